"""If one of two processes differs in anything that changes numbers, both end and say in what."""

import pytest
from runtime.differ_cases import CASES, HARMLESS, KINDS, NUM_STEPS, losses, run_case, wrong

# One of each moment; (slow) each kind under one of both runtimes in turn. The benchmark runs all.
_SHORT = [
    ("program", "other random bits"),
    ("pipeline", "other learning rate"),
    ("pipeline", "half a batch once"),
    ("program", "stops early"),
]
_KINDS_IN_SHORT = {kind for _, kind in _SHORT}
_LONG = [
    (("pipeline", "program")[k % 2], kind)
    for k, kind in enumerate(KINDS)
    if kind not in _KINDS_IN_SHORT
]


@pytest.mark.parametrize(
    ("runtime", "kind"),
    [
        pytest.param(*case, id=" ".join(case), marks=() if case in _SHORT else pytest.mark.slow)
        for case in [*_SHORT, *_LONG]
    ],
)
def test_both_processes_end_and_say_what_differs(runtime, kind):
    found = run_case(runtime, kind)
    assert not wrong(kind, found), "\n".join(found["errors"])


@pytest.mark.parametrize(
    ("runtime", "kind"),
    [
        ("program", HARMLESS[3]),
        *(
            pytest.param(("program", "pipeline")[k % 2], kind, marks=pytest.mark.slow)
            for k, kind in enumerate(HARMLESS)
            if k != 3
        ),
    ],
)
def test_what_changes_no_numbers_may_differ(runtime, kind):
    found = run_case(runtime, kind)
    assert found["codes"] == [0, 0], "\n".join(found["errors"])
    one, other = map(losses, found["printed"])
    assert len(one) == NUM_STEPS and one == other


def test_the_table_has_thirty_kinds():
    assert len(KINDS) >= 30 and {*_SHORT, *_LONG} <= {*CASES}
    assert {kind for _, kind in [*_SHORT, *_LONG]} == {*KINDS}
