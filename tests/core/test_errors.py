"""Errors say everything at once, survive a process boundary, and carry the exit code."""

import pickle
from pathlib import Path

import pytest

from aliquot.core import (
    AliquotError,
    CaptureError,
    ClusterError,
    InfeasibleError,
    InputError,
    MissingExtraError,
    MissingRuleError,
    PlanFileError,
    PlanMismatchError,
    nearest,
)

ALL = [
    CaptureError("no"),
    MissingRuleError("no"),
    InfeasibleError("no", required_bytes=3.0, available_bytes=2.0, parts={"parameters": 3.0}),
    PlanMismatchError(["a", "b"], asked="plan.json", advice="plan again"),
    PlanFileError("no"),
    ClusterError("one", asked="cluster 'x'"),
    InputError("no"),
    MissingExtraError("plot", "matplotlib"),
]


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_pickles_whole(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and vars(copy) == vars(error)


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_only_infeasible_is_an_answer(error):
    assert isinstance(error, AliquotError)
    assert error.exit_code == (1 if isinstance(error, InfeasibleError) else 2)


def test_every_violation_is_in_the_message():
    text = str(
        PlanMismatchError(
            ["params.w is missing", "batch.x has 3 dims"], asked="p.json", advice="plan again"
        )
    )
    assert text.startswith("p.json, 2 problems:") and text.endswith("plan again")
    assert "params.w is missing" in text and "batch.x has 3 dims" in text


def test_one_violation_stays_on_one_line():
    assert (
        str(ClusterError("hosts must be at least 1", asked="cluster '0x8xH100'")).count("\n") == 0
    )


def test_a_single_text_is_one_violation():
    assert ClusterError("wrong").violations == ("wrong",)


def test_missing_extra_names_the_command(monkeypatch, tmp_path):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    assert "pip install -e '.[plot]'" in str(MissingExtraError("plot", "matplotlib"))
    monkeypatch.chdir(tmp_path)
    assert f"pip install -e '{root}[plot]'" in str(MissingExtraError("plot", "matplotlib"))
    # Installed as a package, it has no checkout.
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    assert str(MissingExtraError("plot", "matplotlib")).endswith("Run: pip install matplotlib")


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("gpt-1.4b", "'gpt-1.3b'"),
        ("GPT-1.3B", "'gpt-1.3b'"),
        ("llama", "'llama-7b' or 'llama-13b'"),
        ("zzz", None),
    ],
)
def test_nearest(name, suggested):
    text = nearest(name, ["gpt-125m", "gpt-1.3b", "llama-7b", "llama-13b"])
    assert text.endswith("Known: gpt-125m, gpt-1.3b, llama-7b, llama-13b.")
    assert text.startswith(f"did you mean {suggested}?" if suggested else "Known:")


def test_three_of_a_list_that_a_command_shows_are_suggested():
    names = ["gpt-125m", "gpt-1.3b", "llama-7b", "llama-13b", "llama-70b", "llama-2-7b"]
    text = nearest("llama3-7b", names, listed_by="aliquot models")
    assert (
        text == "did you mean 'llama-7b', 'llama-70b' or 'llama-2-7b'? `aliquot models` lists all."
    )
    assert nearest("zzz", names, listed_by="aliquot models") == "`aliquot models` lists all."


def test_most_similar_of_many_names_are_suggested():
    paths = [f"state.params.layers[{k}].{name}" for k in range(50) for name in ("up", "down")]
    text = nearest("state.params.layers[7].gate", paths)
    assert (
        len(text) < 400 and "state.params.layers[7]." in text and text.endswith(" and 92 others.")
    )


def test_nearest_among_nothing():
    assert nearest("a", []) == "None is known."
