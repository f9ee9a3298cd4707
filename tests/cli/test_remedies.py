"""Changes that a command proposes are commands to type."""

import pytest

from aliquot.cli._remedies import _command_with


@pytest.mark.parametrize(
    ("typed", "change", "proposed"),
    [
        ("plan gpt-10m --method fsdp", "--method tp:8", "aliquot plan gpt-10m --method tp:8"),
        (
            "plan gpt-10m --method=fsdp --global-batch 8",
            "--method tp:8 without recomputation",
            "aliquot plan gpt-10m --global-batch 8 --method tp:8",
        ),
        (
            "plan gpt-10m --cluster 8xH100 --method fsdp --micro-batches 2 --json",
            "--micro-batches 4 --recompute block",
            "aliquot plan gpt-10m --cluster 8xH100 --method fsdp --json --micro-batches 4"
            " --recompute block",
        ),
        ("plan gpt-10m", "a smaller batch", "a smaller batch"),
    ],
)
def test_a_change_takes_the_place_of_the_options_that_it_names(
    typed, change, proposed, monkeypatch
):
    monkeypatch.setattr("sys.argv", ["aliquot", *typed.split()])
    assert _command_with(change) == proposed
