"""Pipelines as a person reads them: headlines, one row for each stage, equal stages said once."""

import msgspec
import pytest
from sample_plans import sample_pipeline, sample_plan, sample_stage

from aliquot.cluster import ReportedSteps
from aliquot.cluster import _reported as reported
from aliquot.plans import (
    AxisUse,
    equal_stages,
    fact_rows,
    headline,
    idle_parts,
    short_layers,
    stage_collective_table,
    stage_numbers,
    time_parts,
)

replace = msgspec.structs.replace


def _reshaped(plan, shapes):
    stages = [
        replace(
            stage, mesh_shape=shape, axis_names=("x", "y")[: len(shape)], shardings={}, outputs={}
        )
        for stage, shape in zip(plan.stages, shapes, strict=True)
    ]
    return replace(plan, stages=tuple(stages))


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        (sample_pipeline(2), "gpt-10m: pipeshard, 2 stages on 2 devices each of 8xH100, 1f1b"),
        (sample_pipeline(16), "gpt-10m: pipeshard, 16 stages on 2 devices each of 4x8xH100, 1f1b"),
        (
            _reshaped(sample_pipeline(2), [(2, 4)] * 2),
            "gpt-10m: pipeshard, 2 stages on 2x4 devices each of 8xH100, 1f1b",
        ),
        (
            _reshaped(sample_pipeline(3), [(2,), (2,), (1,)]),
            "gpt-10m: pipeshard, 3 stages, 2 on 2 devices each, 1 on 1 device of 8xH100, 1f1b",
        ),
        (
            sample_pipeline(4, num_submeshes=2, schedule="interleaved-1f1b"),
            (
                "gpt-10m: pipeshard, 4 stages on 2 submeshes of 2 devices each of 8xH100,"
                " interleaved-1f1b"
            ),
        ),
        (
            _reshaped(sample_pipeline(4), [(1,), (2,), (4,), (2, 4)]),
            "gpt-10m: pipeshard, 4 stages on 1 to 8 devices of 8xH100, 1f1b",
        ),
        (sample_plan(), "gpt-10m: shard on mesh 4x2 (x, y) of 8xH100"),
    ],
)
def test_headlines(plan, wanted):
    assert headline(plan) == wanted


def test_stages_of_one_device_are_said_not_to_peak_together():
    remark = "which do not reach their peaks at the same time: together they need 6.5 GiB at most"
    interleaved = sample_pipeline(4, num_submeshes=2, schedule="interleaved-1f1b")
    assert remark in " ".join(str(interleaved).split())
    assert "a device holds several" not in str(sample_pipeline(4))


TEXT = """\
gpt-10m on 8xH100, by method pipeshard
  Run 4 stages of 2 GPUs each (1f1b), each with 2-way FSDP, 4 micro-batches, no recomputation:
  21.5 ms a step, 6.5 of 65.2 GiB on each GPU, expected error 9%.

  bound                  7.5% above 20.0 ms, the least by formula for pipelines, 4 micro-batches, 1f1b
  largest costs          compute 57%; pipeline bubble 42%

  step time (predicted)  21.5 ms = 12.2 ms compute + 100.0 us exposed communication + 200.0 us exposed gradient
                         communication + 9.0 ms bubble (of the busiest stage)
  throughput             5953 tokens/s; predicted from NVIDIA H100 data sheet
  expected error         of step times: 2 steps of MaxText on H100: median 9%, worst 16%
  batch                  inputs int32[8, 16]
  parallelism            pipeline: 4 stages, 1f1b; x (2): data parallel, FSDP (ZeRO-3): parameters sharded
  micro-batches          4, accumulated to the result of the whole batch; output [1]['loss'] is summed over them
  memory (predicted)     6.5 GiB on each device, 10% of the limit of 65.2 GiB; peak at stage 0, with 2 micro-batches in
                         flight
                         3.7 GiB parameters, gradients and optimizer state + 1.9 GiB activations in flight + 953.7 MiB
                         temporaries
  planned in             2.25 s of search, after 1.50 s of tracing

Stages (predicted)
  stage  layers     host  devices  mesh  forward  backward    update  to next       memory  in flight  bubble
      0  layers[0]  0     0-1      2      1.0 ms    2.0 ms  500.0 us      0 s  6.5 GiB 10%          2   41.9%
      1  layers[1]  0     2-3      2      1.0 ms    2.0 ms  500.0 us      0 s  6.5 GiB 10%          2   41.9%
      2  layers[2]  0     4-5      2      1.0 ms    2.0 ms  500.0 us      0 s  6.5 GiB 10%          2   41.9%
      3  layers[3]  0     6-7      2      1.0 ms    2.0 ms  500.0 us           6.5 GiB 10%          2   41.9%
  forward, backward, to next: for one micro-batch; update, its gradient synchronisation included: for a step
  memory: on each device, and its share of the limit of 65.2 GiB
  in flight: micro-batches kept at once, at most; bubble: share of the step in which the devices wait

Arrays and collectives: plan --all, aliquot explain, or plan.describe(every=True)."""


def test_the_whole_text(monkeypatch):
    found = ReportedSteps(
        framework="MaxText", reason="", device="H100", kind="pipeline", errors=(-0.02, 0.16)
    )
    monkeypatch.setattr(reported, "_record", lambda: (found,))
    plan = sample_pipeline()
    use = AxisUse(reads={"examples": 1.0}, gradients={"split": 1.0}, batch=("examples",))
    stages = [replace(stage, parallelism={"x": use}) for stage in plan.stages]
    assert str(replace(plan, stages=tuple(stages))) == TEXT
    # Files of earlier versions tell what is split, and not how it is used.
    assert "1f1b; x (2): parameters sharded, batch sharded\n" in str(plan)


def test_no_line_is_too_long():
    assert max(map(len, str(sample_pipeline(16, 32)).splitlines())) <= 120


def test_parts_of_the_time_add_up_with_the_bubble():
    p = sample_pipeline().prediction
    assert p.compute_s + p.communication_s + p.gradient_s + p.bubble_s == pytest.approx(
        p.step_time_s
    )
    text = time_parts(sample_pipeline())
    assert "9.0 ms bubble" in text and "overlap" not in text
    assert "transfers" not in text
    assert "bubble" not in time_parts(sample_plan()) and "overlap" in time_parts(sample_plan())


def test_transfers_of_the_busiest_stage_are_not_counted_as_bubble():
    plan = sample_pipeline()
    stages = [
        replace(stage, prediction=replace(stage.prediction, bubble=share))
        for stage, share in zip(plan.stages, (0.5, 0.4, 0.3, 0.5), strict=True)
    ]
    plan = replace(plan, stages=tuple(stages))
    assert idle_parts(plan) == pytest.approx((0.009 - 0.3 * 0.0215, 0.3 * 0.0215))
    assert (
        "+ 2.6 ms transfers + 6.5 ms bubble (of stage 2, the busiest; others wait for up to 50% of the"
        " step)" in time_parts(plan)
    )
    assert dict(fact_rows(plan))["largest costs"] == "compute 57%; pipeline bubble 30%"


def test_recomputation_has_a_column_where_there_is_any():
    stages = sample_pipeline().stages
    text = str(sample_pipeline(stages=(replace(stages[0], recompute="stage"), *stages[1:])))
    rows = [
        line.split()
        for line in text.splitlines()
        if line.strip().startswith(("stage ", "0 ", "1 "))
    ]
    assert rows[0][5] == "recompute" and rows[1][5] == "stage" and rows[2][5] == "-"
    assert "recompute" not in str(sample_pipeline())


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["state.params.layers[0]"], "layers[0]"),
        ([f"state.params.layers[{i}]" for i in range(6)], "layers[0..5]"),
        (["params.layers[8:12]", "params.layers[12:16]", "layer 9"], "layers[8:16], layer 9"),
        (
            ["params.encoder", "params.blocks[9]", "params.blocks[10]"],
            "params.encoder, blocks[9..10]",
        ),
        (["a", "b", "c", "d", "e"], "a .. e (5)"),
        ([], ""),
    ],
)
def test_short_names_of_layers(names, wanted):
    assert short_layers(names) == wanted


def test_numbers_of_stages():
    assert stage_numbers([]) == ""
    assert stage_numbers([3]) == "3"
    assert stage_numbers([0, 1, 4, 6, 7]) == "0-1, 4, 6-7"


def test_equal_stages_share_a_row():
    odd = sample_stage(2, shardings={"state.params.layers[2].w": ((), ("x",))})
    plan = sample_pipeline()
    plan = replace(plan, stages=(*plan.stages[:2], odd, plan.stages[3]))
    assert [numbers for numbers, _ in equal_stages(plan)] == [(0,), (1, 3), (2,)]
    assert [group.pattern for _, groups in equal_stages(plan) for group in groups][2:] == [
        "state.params.layers[*].w",
        "state.params.layers[2].w",
    ]


def test_equal_communication_shares_a_row():
    assert [row[0] for row in stage_collective_table(sample_pipeline()).rows] == ["0-3"]
    assert stage_collective_table(sample_plan()).rows == ()


def test_stages_without_predictions_can_be_printed():
    bare = [replace(stage, prediction=None) for stage in sample_pipeline().stages]
    assert "layers[3]" in str(sample_pipeline(stages=tuple(bare)))
