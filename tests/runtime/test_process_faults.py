"""Whatever happens to a process: it keeps its own exit code, the others end with 3 and a message,
and nobody hangs.
"""

import pytest
from runtime.fault_cases import BAR_S, CASES, name_of, run_case, wrong

REPORT = {
    "name": "process_faults",
    "question": "Faults in runs of many processes",
    "bar": (
        f"no process hangs; each has the exit code that it should have, at most {BAR_S} s after the"
        " fault"
    ),
    "method": (
        "Each case once, on CPU devices of processes on one machine, which train until the fault"
        " comes. Seconds are from the fault to the end of the last process that has to end, without"
        " the time that was given for others to come; where processes differ, from the last one's"
        " arrival. `-` is a process that does not end by itself: it is stopped, sleeps, or belongs"
        " to the run that goes on."
    ),
    "largest": ["seconds"],
}
# One of each moment and way to end; (slow) all.
_SHORT = [
    "raise at step, rank 1 of 3, pipeline",
    "stop at step, rank 1 of 2, pipeline",
    "kill at meeting, rank 1 of 3, pipeline",
    "interrupt at step, rank 0 of 2, pipeline",
    "plan, rank 1 of 2, program",
    "version, rank 1 of 2, program",
    "second run at step, rank 0 of 2, program",
]


@pytest.mark.parametrize("case", [c for c in CASES if name_of(c) in _SHORT], ids=name_of)
def test_processes_end_as_they_should(case):
    assert_ended_well(case, run_case(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_all_faults_end_as_they_should_and_soon(case, row):
    found = run_case(case)
    row(
        "Cases",
        case=name_of(case),
        exit_codes=" ".join("-" if code is None else str(code) for code in found["codes"]),
        seconds=round(found["seconds"], 1),
        wrong=wrong(found),
    )
    assert_ended_well(case, found)
    assert found["seconds"] <= BAR_S


def assert_ended_well(case, found):
    assert not wrong(found), "\n".join(found["errors"])
    if case["kind"] in ("plan", "model", "shape"):
        what = {
            "plan": "decisions in its plan",
            "model": "operators in its traced step",
            # The plan of another batch is another plan.
            "shape": "decisions in its plan",
        }
        # One of two that differ: which is the odd one nobody can say.
        assert f"process 1 has other {what[case['kind']]} than process 0" in found["errors"][0]
        assert (
            case["kind"] != "shape" or "process 1: inputs[4].shape = (32, 16)" in found["errors"][0]
        )
    if case["kind"] == "version":
        assert (
            "jax 0.0.1 in process 1" in found["errors"][0]
            and "jax 0.0.1 in process 1" in found["errors"][1]
        )


def test_the_table_has_sixty_cases_and_the_selection_is_in_it():
    names = [name_of(case) for case in CASES]
    assert len(set(names)) == len(names) >= 60
    assert {*_SHORT} <= {*names}
