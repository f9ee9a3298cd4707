"""Reports hold what they should, as text and as data; figures say whether they are predicted or
compiled.
"""

import dataclasses
import json
import types

import msgspec
import pytest
from sample_plans import PREDICTION, PROVENANCE, SPLITS, STAGE, sample_pipeline, sample_plan

from aliquot.cluster import Cluster
from aliquot.core import InputError
from aliquot.plans import Change, CollectiveUse, PlanDiff, describe, diff
from aliquot.report import (
    Alternative,
    BatchSearch,
    BatchTrial,
    as_text,
    beside_measured,
    columns,
    compared,
    difference,
    explained,
    explanation,
    loss_chart,
)
from aliquot.report._timeline import Timeline

replace = msgspec.structs.replace
replace_alternative = dataclasses.replace
OTHERS = (
    Alternative(
        subject="state.params.layers[*].w",
        chosen="[x, y]",
        chosen_step_time_s=0.011,
        alternative="[-, y]",
        alternative_step_time_s=0.0125,
    ),
    Alternative(
        subject="gradients",
        chosen="all-reduce",
        chosen_step_time_s=0.011,
        alternative="reduce-scatter",
        alternative_step_time_s=None,
    ),
    Alternative(
        subject="mesh",
        chosen="4x2",
        chosen_step_time_s=0.011,
        alternative="8",
        alternative_step_time_s=0.0105,
    ),
)


def test_explanation_as_text():
    text = as_text(explanation(sample_plan(), OTHERS, remark="last"), width=160)
    for part in (
        "gpt-10m on 8xH100, by method shard",
        "11.0 ms a step, 2.9 of 9.8 KiB on each GPU, expected error 9% (one step compared).",
        "step time (predicted)  11.0 ms = 8.0 ms compute",
        "optimal",
        "dot_general in the backward pass (predicted)",
        "[-, y]: 1.5 ms slower a step",
        "reduce-scatter: does not fit",
        "8: 10.5 ms a step in another plan",
        "state.params.layers[*].w",
        "Tried in the search (predicted)",
        "20.0 ms",
        "state.step is not split",
        "aliquot.zoo.build(model='gpt-10m', global_batch=8)",
        "last",
    ):
        assert part in text, text


def test_memory_rows_add_up():
    lines = as_text(explanation(sample_plan())).splitlines()
    rows = [line.split() for line in lines]
    assert ["parameters", "2.0", "KiB", "20.5%"] in rows
    assert ["total", "2.9", "KiB", "30.0%"] in rows


def test_explanation_as_data():
    data = json.loads(json.dumps(explained(sample_plan(), OTHERS)))
    predicted = data["predicted"]
    parts_s = (
        predicted["compute_s"]
        + predicted["communication_s"]
        + predicted["gradient_s"]
        - predicted["hidden_s"]
    )
    assert parts_s == pytest.approx(predicted["step_time_s"])
    assert sum(predicted["memory_bytes"].values()) == predicted["peak_memory_bytes"]
    assert data["stages"][0]["arrays"][0]["pattern"] == "state.params.layers[*].w"
    assert data["alternatives"][1]["alternative_step_time_s"] is None


def test_a_closure_says_that_it_must_be_passed_again():
    plan = sample_plan(
        model=msgspec.structs.replace(sample_plan().model, kind="closure", settings={})
    )
    assert "pass that function again" in as_text(explanation(plan), width=200)


def test_a_plan_without_bound():
    plan = sample_plan(
        provenance=replace(
            PROVENANCE, lower_bound_s=None, gap=None, status="optimal", bound_holds_for=""
        )
    )
    assert "no lower bound; --method auto compares shard with others" in as_text(
        explanation(plan), width=200
    )


def test_difference_merges_layers():
    shardings = {**SPLITS, **{f"state.params.layers[{i}].w": ((), ("y",)) for i in range(2)}}
    found = diff(
        sample_plan(), sample_plan(method="dp", stages=(replace(STAGE, shardings=shardings),))
    )
    text = as_text(difference(found, "a.json", "b.json"))
    assert "state.params.layers[*].w (2 of them)" in text
    assert "shard" in text and "dp" in text
    assert "decide and predict the same" in as_text(
        difference(diff(sample_plan(), sample_plan()), "a", "b")
    )


def test_difference_leaves_out_what_follows_from_parameters():
    arrays = [
        ("state.params.a_b.w", "parameter"),
        ("state.params.c.w", "parameter"),
        ("state.opt.mu.a_b.w", "optimizer_state"),
        ("state.opt.mu.c.w", "optimizer_state"),
        ("state.opt.total", "optimizer_state"),
    ]
    inputs = [("replicated", "[x]"), ("replicated", "[y]"), ("replicated", "[x]")] + [
        ("replicated", "[z]")
    ] * 2
    changes = [
        Change(section="decision", subject=f"{kind} {path}", before=before, after=after)
        for kind, prefix in (("input", "state"), ("output", "[0]"))
        for (path, _), (before, after) in zip(
            [(path.replace("state", prefix, 1), role) for path, role in arrays], inputs, strict=True
        )
    ]
    changes.append(
        Change(section="decision", subject="output [1].loss", before="[x]", after="replicated")
    )
    shown = as_text(difference(PlanDiff(changes=tuple(changes), roles=dict(arrays)), "a", "b"))
    listed = [line.split()[0] for line in shown.splitlines() if "[" in line and "." in line]
    assert listed == [
        "state.params.a_b.w",
        "state.params.c.w",
        # Split otherwise than its parameter.
        "state.opt.mu.c.w",
        "state.opt.total",
        "output",
    ]


def test_difference_has_a_row_for_each_kind_of_collective():
    use = CollectiveUse(kind="all-reduce", axes=("x",), count=3.0, num_bytes=2048.0, seconds=1e-3)
    before, after = sample_plan(), sample_plan()
    after = replace(after, prediction=replace(after.prediction, collectives=(use,)))
    text = as_text(difference(diff(before, after), "a", "b"), width=160)
    (line,) = [line for line in text.splitlines() if "all-reduce over x " in line]
    # The bytes are the same.
    assert "2 times, 3.0 ms" in line and "3 times, 1.0 ms" in line


def test_predicted_beside_compiled():
    compiled = [
        CollectiveUse(kind="all-reduce", axes=("x",), count=3.0, num_bytes=2100.0, seconds=0.0)
    ]
    memory = types.SimpleNamespace(
        argument_bytes=2200, output_bytes=2148, alias_bytes=2100, temp_bytes=824
    )
    figures = compared(sample_plan(), memory, compiled)
    assert figures["memory"][0] == {
        "what": "state and batch",
        "predicted_bytes": 2180.0,
        "compiled_bytes": 2200,
    }
    assert figures["memory"][1]["compiled_bytes"] == 3072
    first = next(row for row in figures["collectives"] if row["kind"] == "all-reduce")
    assert first == {
        "kind": "all-reduce",
        "axes": "x",
        "predicted_count": 2.0,
        "compiled_count": 3.0,
        "predicted_bytes": 2048.0,
        "compiled_bytes": 2100.0,
    }
    rows = [
        line.split() for line in as_text(beside_measured(sample_plan(), 0.012, figures)).split("\n")
    ]
    assert ["step", "time", "11.0", "ms", "12.0", "ms"] in rows
    assert [*"memory of each device at its peak 2.9 KiB 3.0 KiB".split()] in rows
    assert [*"exchanged by each device in a step 2.5 KiB 2.1 KiB".split()] in rows


def test_curves_in_one_frame():
    text = loss_chart(
        {"8 devices": [5.0, 4.0, 3.5, 3.2], "1 device": [5.0, 4.0, 3.5, 3.2]}, width=30, height=6
    )
    lines = text.splitlines()
    assert len(lines) == 8
    assert (
        lines[0].startswith("   5.000 ┤o")
        and lines[5].startswith("   3.200")
        and lines[5].endswith("o")
    )
    assert "⠒ 8 devices   o 1 device" in lines[-1]


@pytest.mark.parametrize("values", [[2.0], [1.0, 1.0, 1.0], [3.0, float("nan"), 1.0]])
def test_odd_curves(values):
    assert "step 0" in loss_chart({"one": values})


def test_no_curve():
    with pytest.raises(InputError, match="at least one finite value"):
        loss_chart({"one": [float("nan")]})


@pytest.mark.parametrize("width", [80, 120])
def test_a_pipeline_explained(width):
    text = as_text(explanation(sample_pipeline(16)), width=width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0] == "gpt-10m on 4x8xH100, by method pipeshard"
    assert lines[1].startswith("Run 16 stages of 2 GPUs each (1f1b), each with 2-way")
    whole = " ".join(text.split())
    assert "+ 45.0 ms bubble (of the busiest stage)" in whole
    assert "Stages 1-15, each: sharding of the largest of 1 arrays" in whole
    rows = [
        line.split()
        for line in lines
        if line.strip().startswith("9 ") and ("layers" in line or "ms" in line)
    ]
    if width == 80:
        assert rows == [
            ["9", "layers[9]", "2", "18-19", "2"],
            [
                "9",
                "1.0",
                "ms",
                "2.0",
                "ms",
                "500.0",
                "us",
                "0",
                "s",
                "6.5",
                "GiB",
                "10%",
                "2",
                "78.3%",
            ],
        ]
    else:
        assert (
            len(rows) == 1
            and rows[0][:5] == ["9", "layers[9]", "2", "18-19", "2"]
            and rows[0][-1] == "78.3%"
        )
    assert "0-15 all-reduce x" in whole


@pytest.mark.parametrize("width", [80, 100, 160])
def test_tables_fit_the_width_and_break_paths_at_dots(width):
    path = "state.params.encoder.blocks[*].attention.projections.query.kernel"
    uses = (
        CollectiveUse(
            kind="reduce-scatter", axes=("x",), count=4, num_bytes=1e6, seconds=1e-3, label=path
        ),
    )
    plan = sample_plan()
    plan = replace(plan, prediction=replace(plan.prediction, collectives=uses))
    for text in (as_text(explanation(plan), width=width), describe(plan, width, every=True)):
        lines = text.splitlines()
        assert max(map(len, lines)) <= width
        assert "reduce-scatter" in text and path in text.replace("\n", "").replace(" ", "")
        parts = [line.split()[-1] for line in lines if line.split()]
        assert all(p.startswith((".", "state")) for p in parts if len(p) > 8 and p in path)


def test_alternatives_that_cost_the_same_are_left_out():
    same = replace_alternative(OTHERS[0], alternative_step_time_s=0.011 * (1 + 1e-9))
    other = replace_alternative(OTHERS[2], alternative_step_time_s=0.011)
    text = as_text(explanation(sample_plan(), (same, other)), width=160)
    assert "0 s slower" not in text and "best alternative" not in text


def test_the_schedule_of_a_pipeline_is_drawn():
    lines = Timeline(sample_pipeline(4, 4)).lines(80)
    assert all(len(line) <= 80 for line in lines)
    drawn = [line.split() for line in lines[:4]]
    assert [number for number, _ in drawn] == ["0", "1", "2", "3"]
    rows = [row for _, row in drawn]
    # Each micro-batch begins one forward task later on each submesh, and its backward pass comes
    # back the other way.
    assert [row.index("0") for row in rows] == sorted(row.index("0") for row in rows)
    assert [row.index("a") for row in rows] == sorted(
        (row.index("a") for row in rows), reverse=True
    )
    assert all(set("0123abcdU") <= set(row) for row in rows)
    assert rows[3].replace("0", "").startswith("......")


def test_of_a_long_schedule_beginning_and_end_are_drawn():
    lines = Timeline(sample_pipeline(4, 64)).lines(100)
    assert all(" ... " in line and line.endswith(("U", ".")) for line in lines[:4])
    assert "... leaves out the middle, which repeats" in lines[-2]
    # Tasks before what is drawn of the end take no columns away.
    assert {len(line) for line in lines[:4]} == {100}
    assert any("U" in line for line in lines[:4])


def test_a_pipeline_as_data_keeps_everything():
    data = json.loads(json.dumps(explained(sample_pipeline(4))))
    predicted = data["predicted"]
    parts = sum(
        predicted[name] for name in ("compute_s", "communication_s", "gradient_s", "bubble_s")
    )
    assert parts - predicted["hidden_s"] == pytest.approx(predicted["step_time_s"])
    assert (data["schedule"], data["num_submeshes"], len(data["stages"])) == ("1f1b", 4, 4)
    stage = data["stages"][2]
    assert (stage["devices"], stage["layers"], stage["recompute"]) == (
        [4, 5],
        ["state.params.layers[2]"],
        "none",
    )
    assert stage["predicted"]["in_flight"] == 2
    assert stage["arrays"][0]["pattern"] == "state.params.layers[2].w"


def test_equal_differences_of_stages_are_one_row():
    before = sample_pipeline(4)
    stages = [
        replace(stage, recompute="stage" if index != 1 else "none")
        for index, stage in enumerate(before.stages)
    ]
    stages[1] = replace(stages[1], data_axes=())
    text = as_text(
        difference(diff(before, replace(before, stages=tuple(stages))), "a.json", "b.json")
    )
    assert "stages 0, 2-3 recompute" in text and "stage 1 data axes" in text


def test_speeds_are_no_times():
    slower = sample_plan(cluster=Cluster.preset("8xA100-80GB").to_dict())
    text = as_text(difference(diff(sample_plan(), slower), "a", "b"), width=180)
    (line,) = [line for line in text.splitlines() if "cluster.device.memory bandwidth" in line]
    assert "3.4 TB/s" in line and "2.0 TB/s" in line
    (line,) = [line for line in text.splitlines() if "cluster.device.peak.bfloat16" in line]
    assert "989.4 TFLOP/s" in line and "312.0 TFLOP/s" in line


def test_headings_of_numbers_are_broken_where_a_table_is_too_wide_and_never_cut():
    header = ("stage", "time of an iteration", "memory of which reserved")
    text = as_text(columns("Stages", header, [("first", "1,234.5", "17")], right=(1, 2)), width=36)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 36
    assert " ".join(lines).split().count("iteration") == 1
    assert "reserved" in text and "1,234.5" in text


def test_the_largest_batch_of_one_pass_and_one_that_is_fast_enough_are_named():
    def trial(batch: int, step_time_s: float, micro_batches: int) -> BatchTrial:
        prediction = msgspec.structs.replace(PREDICTION, step_time_s=step_time_s)
        plan = sample_plan(num_micro_batches=micro_batches, prediction=prediction)
        return BatchTrial(global_batch=batch, plan=plan)

    found = BatchSearch(
        model="gpt-10m",
        cluster="8xH100",
        trials=(trial(64, 0.4, 1), trial(128, 0.66, 1), trial(256, 1.31, 2)),
        unit=8,
        is_limited=False,
    )
    lines = str(found).splitlines()
    assert "  largest batch in one pass      128" in lines
    assert any(
        line.startswith(
            "  largest batch tried that fits  256, in 2 accumulated micro-batches of 128"
        )
        for line in lines
    )
    (fastest,) = (line for line in lines if "highest throughput" in line)
    assert "256," in fastest and fastest.endswith("; 128 reaches 99.2% of it")
