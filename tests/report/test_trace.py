"""Predicted schedules as traces: every task once, nothing at the same time on a submesh, the step
time as planned.
"""

import json

import msgspec
import numpy as np
import pytest
from sample_plans import sample_pipeline, sample_plan

from aliquot.core import InputError
from aliquot.cost import StageCosts, simulate
from aliquot.plans import (
    Trace,
    TraceEvent,
    chrome_trace,
    in_flight_events,
    make_schedule,
    save_trace,
)
from aliquot.report import planned_trace

replace = msgspec.structs.replace
SCHEDULES = [
    ("gpipe", 4),
    ("1f1b", 4),
    ("zero-bubble", 4),
    ("interleaved-1f1b", 2),
    ("inference", 4),
]


def _uneven(schedule, submeshes, overlaps, seed):
    """Four stages with figures of their own, whose step time is simulated."""
    rng = np.random.default_rng(seed)
    plan = sample_pipeline(4, 8, schedule=schedule, num_submeshes=submeshes)
    stages = []
    for stage in plan.stages:
        f, b, u, t = (float(x) for x in rng.uniform(0.5, 2.0, 4) * (1e-3, 2e-3, 5e-4, 3e-4))
        figures = replace(
            stage.prediction,
            forward_s=f,
            backward_s=b,
            weight_gradient_s=0.4 * b,
            update_s=u,
            transfer_s=t,
        )
        stages.append(
            replace(stage, prediction=figures, first_device=stage.first_device % (2 * submeshes))
        )
    p = [stage.prediction for stage in stages]
    times = simulate(
        make_schedule(schedule, 4, 8, submeshes),
        StageCosts(
            forward_s=[x.forward_s for x in p],
            backward_input_s=[x.backward_s - x.weight_gradient_s for x in p],
            backward_weight_s=[x.weight_gradient_s for x in p],
            update_s=[x.update_s for x in p],
            transfer_s=[x.transfer_s for x in p[:-1]],
            state_bytes=[0.0] * 4,
            in_flight_bytes=[0.0] * 4,
            working_bytes=[0.0] * 4,
            overlaps_transfers=overlaps,
        ),
    )
    prediction = replace(plan.prediction, step_time_s=times.step_time_s)
    return replace(plan, stages=tuple(stages), prediction=prediction, overlaps_transfers=overlaps)


def _boxes(trace):
    """Complete events by process and thread."""
    found = {}
    for event in chrome_trace(trace)["traceEvents"]:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    return found


def _overlap(events):
    events = sorted(events, key=lambda event: (event["ts"], event["ts"] + event["dur"]))
    return [
        (a["name"], b["name"])
        for a, b in zip(events, events[1:])
        if a["ts"] + a["dur"] > b["ts"] + 1e-6
    ]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("schedule", "submeshes"), SCHEDULES)
def test_a_planned_trace(schedule, submeshes, overlaps, tmp_path):
    plan = _uneven(schedule, submeshes, overlaps, seed=submeshes)
    trace = planned_trace(plan)
    assert trace.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=1e-12)
    path = tmp_path / "trace.json"
    trace.save(path)
    data = json.loads(path.read_text())
    assert data == chrome_trace(trace)
    assert max(e["ts"] + e["dur"] for e in data["traceEvents"] if e["ph"] == "X") == pytest.approx(
        plan.prediction.step_time_s * 1e6
    )
    boxes = _boxes(trace)
    tasks = [task for tasks in make_schedule(schedule, 4, 8, submeshes).lists for task in tasks]
    shown = [
        (e["args"]["stage"], e["args"]["micro-batch"], e["cat"])
        for (_, tid), events in boxes.items()
        for e in events
        if tid == 0 and e["cat"] != "update"
    ]
    assert sorted(shown) == sorted((t.stage, t.micro_batch, str(t.kind)) for t in tasks)
    updates = [e for events in boxes.values() for e in events if e["name"] == "update"]
    assert sorted(e["args"]["stage"] for e in updates) == [0, 1, 2, 3]
    assert [pair for events in boxes.values() for pair in _overlap(events)] == []
    if not overlaps:
        every = [
            [e for (pid, _), events in boxes.items() if pid == submesh for e in events]
            for submesh in range(4)
        ]
        assert [pair for events in every for pair in _overlap(events)] == []


def test_transfers_come_between_the_tasks_that_they_join():
    trace = planned_trace(_uneven("1f1b", 4, True, seed=0))
    ends = {(e.kind, e.stage, e.micro_batch): e for e in trace.events if e.lane == "compute"}
    sends = [e for e in trace.events if e.lane != "compute"]
    assert len(sends) == 2 * 3 * 8
    for send in sends:
        source = send.stage + (-1 if send.kind == "forward" else 1)
        assert ends[send.kind, source, send.micro_batch].end_s <= send.start_s + 1e-12
        assert send.end_s <= ends[send.kind, send.stage, send.micro_batch].start_s + 1e-12


def test_names_and_counters():
    data = chrome_trace(planned_trace(sample_pipeline(4, 4)))
    events = data["traceEvents"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes[1] == "submesh 1: stage 1 on devices 2-3"
    assert {e["name"] for e in events if e["ph"] == "X"} >= {"F 0", "F 3", "B 3", "update"}
    counts = [e["args"]["stage 0"] for e in events if e["ph"] == "C" and e["pid"] == 0]
    schedule = make_schedule("1f1b", 4, 4)
    assert (max(counts), counts[-1]) == (schedule.in_flight(0), 0)
    assert data["otherData"]["source"] == "predicted"


def test_halves_of_backward_have_names_of_their_own():
    names = {event.name for event in planned_trace(_uneven("zero-bubble", 4, True, seed=1)).events}
    assert {"F 7", "I 7", "W 7", "send F 7", "send I 7", "update"} <= names


def test_nothing_is_in_flight_without_a_backward_pass():
    assert list(in_flight_events(planned_trace(_uneven("inference", 4, True, seed=1)).events)) == []


def test_times_that_touch_stay_apart():
    third = 1e-6 / 3
    events = tuple(
        TraceEvent(
            kind="forward",
            lane="compute",
            submesh=0,
            stage=0,
            micro_batch=k,
            start_s=k * third,
            end_s=(k + 1) * third,
        )
        for k in range(9)
    )
    boxes = _boxes(Trace(title="t", source="measured", submeshes=("one",), events=events))
    assert _overlap(boxes[0, 0]) == []


@pytest.mark.parametrize(
    "plan",
    [
        sample_plan(),
        sample_pipeline(
            2, stages=tuple(replace(s, prediction=None) for s in sample_pipeline(2).stages)
        ),
    ],
)
def test_a_plan_without_figures_of_stages_has_no_trace(plan):
    with pytest.raises(InputError, match="no schedule to trace"):
        planned_trace(plan)


def test_a_place_that_cannot_be_written_to(tmp_path):
    with pytest.raises(InputError, match="it is a folder"):
        save_trace(planned_trace(sample_pipeline(2)), tmp_path)
