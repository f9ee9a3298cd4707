"""What `aliquot verify` says of the compute that a compiler expects."""

from dataclasses import replace

import pytest
from sample_plans import sample_plan
from verify.verdicts import verified

from aliquot.report._verify import _facts, _memory_rows, _tables


@pytest.mark.parametrize(
    ("calls", "attention_s", "said"),
    [
        (0, 0.0, "2.0 ms at full clock by XLA's models of its kernels; predicted 1.00 s"),
        (4, 0.5e-3, "2.5 ms at full clock by XLA's models of its kernels and the plan's 500.0 us"),
        (4, 0.0, "kernels, without 4 calls of cuDNN, of which XLA has no model"),
    ],
)
def test_the_second_opinion_on_compute_says_what_it_leaves_out(calls, attention_s, said):
    found = verified(sample_plan(), 500)
    (stage,) = found.stages
    compiled = replace(stage.compiled, modelled_compute_s=2e-3, unpriced_calls=calls)
    found = replace(
        found, predicted_attention_s=attention_s, stages=(replace(stage, compiled=compiled),)
    )
    figures = found.to_dict()
    assert said in dict(_facts(figures, figures["stages"][0]))["compute"]


def test_memory_is_told_beside_its_prediction():
    figures = verified(sample_plan(), 500).to_dict()
    (stage,) = figures["stages"]
    near = {**stage, "predicted_bytes": 525, "compiled_bytes": 500}
    told = dict(_facts(figures, near))
    assert told["memory"].endswith("; predicted 525 B, 5.0% too high") and "prediction" not in told


@pytest.mark.parametrize(
    ("compiled_bytes", "said"),
    [(0, "intends."), (5, "intends, or moves less than 1% of the bytes."), (20, "intends.")],
)
def test_small_collectives_that_no_plan_asks_for_are_said_to_be_small(compiled_bytes, said):
    (stage,) = verified(sample_plan(), 500).to_dict()["stages"]
    row = {"kind": "all-gather", "axes": ["x"], "predicted_count": 1, "compiled_count": 1}
    rows = [
        {**row, "predicted_bytes": 1000, "compiled_bytes": 1000},
        {**row, "predicted_count": 0, "predicted_bytes": 0, "compiled_bytes": compiled_bytes},
    ]
    *_, last = _tables({**stage, "collectives": rows, "unintended": []})
    assert str(last).endswith(said)


def test_parts_of_the_memory_have_the_names_that_plans_show():
    buffers = {"arguments": 1, "temporaries": 1, "outputs": 0, "aliases": 0, "peak": 2}
    rows = _memory_rows({"resharded copies": 2, "arguments": 1}, {**buffers, "in_use_at_once": 0})
    assert rows[0][0] == "gathered or resharded copies"


@pytest.mark.parametrize(("most", "is_told"), [(0, False), (30, False), (70, True)])
def test_a_peak_that_leaves_out_temporaries_is_none(most, is_told):
    sizes = {"arguments": 30, "temporaries": 50, "outputs": 30, "aliases": 30, "peak": 80}
    rows = _memory_rows({"arguments": 30}, {**sizes, "in_use_at_once": most})
    names = [row[2] for row in rows]
    assert ("(most in use at once)" in names) is is_told
