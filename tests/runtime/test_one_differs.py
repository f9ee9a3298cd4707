"""If one of two processes differs in anything that changes numbers, both end and say in what."""

import re

import pytest
from runtime.call_cost import call_cost
from runtime.differ_cases import (
    CASES,
    HARMLESS,
    KINDS,
    NUM_STEPS,
    late_steps,
    losses,
    message_of,
    run_case,
    wrong,
)

_COST_CALLS = 2000
REPORT = {
    "name": "one_differs",
    "question": "One of two processes differs from the other",
    "bar": (
        "every difference that changes numbers is named by both processes, with the process and"
        " both values, before two more steps end, and ends both; no other difference ends a run;"
        " the comparison of a demo's call takes less than 1 ms of the processor"
    ),
    "method": (
        f"Each kind once, with two processes of one CPU device each that train {NUM_STEPS} steps;"
        " process 1 differs from the start or in the sixth step. A message counts if both processes"
        " show it, name process 1 and say all words of the kind's row in the test's table. Steps"
        " after the fault are those that a process still ends. The cost is the processor time and"
        " the time of one comparison, in a loop, with batches of 16 x 512 tokens and their targets"
        " beside a state of 100 arrays, reports sent over a connection."
    ),
    "largest": ["steps_after_it", "processor_ms"],
}
# One of each moment; (slow) all.
_SHORT = [
    ("program", "other random bits"),
    ("pipeline", "other learning rate"),
    ("pipeline", "half a batch once"),
    ("program", "stops early"),
]


@pytest.mark.parametrize(("runtime", "kind"), _SHORT)
def test_both_processes_end_and_say_what_differs(runtime, kind):
    found = run_case(runtime, kind)
    assert not wrong(kind, found), "\n".join(found["errors"])


@pytest.mark.slow
@pytest.mark.parametrize(("runtime", "kind"), CASES)
def test_all_differences_are_named(runtime, kind, row):
    found = run_case(runtime, kind)
    said = message_of(found, 0)
    headline = re.search(r"must all run the same(?: \([^)]*\))?(?:, \d+ problems)?: (.*)", said)
    row(
        "Differences",
        kind=kind,
        runtime=runtime,
        exit_codes=" ".join(map(str, found["codes"])),
        steps_after_it=late_steps(found),
        wrong=wrong(kind, found),
        process_0_says=(headline[1] if headline else said)[:160],
    )
    assert not wrong(kind, found), "\n".join(found["errors"])


def test_what_changes_no_numbers_may_differ():
    assert_same_losses(run_case("program", HARMLESS[3]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", HARMLESS)
@pytest.mark.parametrize("runtime", ["program", "pipeline"])
def test_all_that_may_differ_ends_no_run(runtime, kind, row):
    found = run_case(runtime, kind)
    one, other = map(losses, found["printed"])
    row(
        "What may differ",
        kind=kind,
        runtime=runtime,
        exit_codes=" ".join(map(str, found["codes"])),
        equal_losses=bool(one) and one == other,
    )
    assert_same_losses(found)


def assert_same_losses(found):
    assert found["codes"] == [0, 0], "\n".join(found["errors"])
    one, other = map(losses, found["printed"])
    assert len(one) == NUM_STEPS and one == other


@pytest.mark.slow
def test_a_comparison_takes_less_than_a_millisecond(row):
    cpu_s, seconds = call_cost(_COST_CALLS)
    row(
        "Cost of a comparison",
        calls=_COST_CALLS,
        ms=round(seconds * 1e3, 3),
        processor_ms=round(cpu_s * 1e3, 3),
    )
    assert cpu_s < 1e-3


def test_the_table_has_thirty_kinds():
    assert len(KINDS) >= 30 and {*_SHORT} <= {*CASES}
