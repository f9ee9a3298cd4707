"""A parallel step is the plain step: a few cases in which every choice occurs, and (slow) all."""

from __future__ import annotations

import pytest
from runtime.equality import LEAF, LOSS, NUM_STEPS, all_cases, compare, covering, pairs

REPORT = {
    "name": "step_equality",
    "question": "Equality of parallel and plain steps",
    "bar": (
        "float64, AdamW: loss and every leaf of the state within 1e-9 of the leaf's largest"
        " magnitude; float32, SGD: loss within 1e-5 relative, every leaf within 1e-4 of its largest"
        " update"
    ),
    "method": (
        f"{NUM_STEPS} steps of the whole program and of the plain step on one device, from one"
        " state over the same batches; the largest difference of any loss and of any leaf after the"
        " last step. The bias of the keys, whose gradient is rounding alone, is measured on the"
        " scale of the queries' bias beside it. Machine code is not optimized. Deterministic: one"
        " run each."
    ),
    "largest": ["loss", "leaf"],
}
_CASES = all_cases()
# The first of a sample in which each two choices meet combine the most.
_SAMPLE = covering(_CASES)[:6]


@pytest.mark.parametrize("case", _SAMPLE, ids=str)
def test_a_parallel_step_is_the_plain_step(case):
    assert_within(case, compare(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_all_parallel_steps_are_the_plain_step(case, row):
    found = compare(case)
    row(
        case.dtype,
        method=case.method,
        mesh=case.mesh,
        model=case.model,
        form=case.form,
        micro_batches=case.micro_batches,
        loss=found.loss,
        leaf=found.leaf,
        worst_leaf=found.path,
    )
    assert_within(case, found)


def assert_within(case, found):
    assert found.loss <= LOSS[case.dtype], found
    assert found.leaf <= LEAF[case.dtype], found


def test_every_choice_is_in_the_sample():
    few, every = (
        {choice for case in cases for pair in pairs(case) for choice in pair}
        for cases in (_SAMPLE, _CASES)
    )
    assert few == every
