"""What a printed plan leads with: splits in the field's words, throughput, the largest costs and
the runner-up.
"""

import dataclasses

import msgspec
import pytest
from sample_plans import INPUTS, PREDICTION, PROVENANCE, SPLITS, STAGE, sample_pipeline, sample_plan

from aliquot.cluster import Cluster, ReportedSteps
from aliquot.cluster import _reported as reported
from aliquot.plans import (
    ArrayInterface,
    AxisUse,
    ModelReference,
    fact_rows,
    grouped_arrays,
    memory_parts,
    mfu,
    origin_rows,
    runner_up,
    summary_rows,
    tokens_per_step,
)

replace = msgspec.structs.replace
MOMENT = "state.opt.mu.layers[0].w"
MODEL = ModelReference(
    kind="zoo",
    name="gpt-10m",
    settings={"dtype": "bf16", "recompute": "block"},
    flops_per_step=1e12,
)


EMA = "state.ema.layers[0].w"


def roles_of(use, **shardings):
    """The line "parallelism" of a step with one moment and an average of the first of two weights;
    what is not given is whole.
    """
    inputs = (
        *INPUTS,
        ArrayInterface(path=MOMENT, shape=(64, 32), dtype="float32", role="optimizer_state"),
        ArrayInterface(path=EMA, shape=(64, 32), dtype="float32", role="state"),
    )
    whole = dict.fromkeys([*SPLITS, MOMENT, EMA], ((), ())) | {"state.step": ()}
    stage = replace(STAGE, shardings=whole | shardings, data_axes=())
    if use is not None:
        stage = replace(stage, parallelism={"x": use})
    return dict(summary_rows(sample_plan(inputs=inputs, stages=(stage,))))["parallelism"]


BATCH = {"batch.inputs": (("x",), ())}
WEIGHTS = {f"state.params.layers[{k}].w": (("x",), ()) for k in (0, 1)}
MOMENTS = {MOMENT: (("x",), ())}
AVERAGES = {EMA: (("x",), ())}
SHARDED = BATCH | WEIGHTS | MOMENTS | AVERAGES


def use(reads, gradients="whole", batch=("examples",), exchanges=False):
    return AxisUse(reads={reads: 1.0}, gradients={gradients: 1.0}, batch=batch, exchanges=exchanges)


@pytest.mark.parametrize(
    ("facts", "shardings", "wanted"),
    [
        (use("examples"), BATCH, "data parallel: parameters replicated"),
        (
            use("examples", "split"),
            SHARDED,
            "data parallel, FSDP (ZeRO-3): parameters sharded",
        ),
        # What is whole above 1% of the state is named; the step counter is less.
        (
            use("examples", "split"),
            BATCH | WEIGHTS | MOMENTS,
            "data parallel, FSDP (ZeRO-3): parameters sharded; whole over x: state.ema.layers[0].w"
            " (8.0 KiB)",
        ),
        # Sharded weights alone are no ZeRO-3.
        (
            use("examples", "split"),
            BATCH | WEIGHTS | AVERAGES,
            "data parallel: parameters sharded, gradients sharded, optimizer state replicated",
        ),
        (
            use("examples", "whole"),
            SHARDED,
            "data parallel: parameters sharded, gradients replicated, optimizer state sharded",
        ),
        (
            use("examples", "split at last"),
            SHARDED,
            "data parallel, FSDP: optimizer state and parameters sharded; gradients are whole until"
            " they are summed after the last micro-batch",
        ),
        (
            use("examples", "split"),
            BATCH | MOMENTS | AVERAGES,
            "data parallel, ZeRO-2: optimizer state sharded, parameters replicated",
        ),
        (
            use("examples", "whole"),
            BATCH | MOMENTS | AVERAGES,
            "data parallel, ZeRO-1: optimizer state sharded, parameters replicated",
        ),
        (
            use("positions", batch=("positions",)),
            {"batch.inputs": ((), ("x",))},
            "context parallel: parameters replicated",
        ),
        (
            use("pieces", batch=(), exchanges=True),
            WEIGHTS | MOMENTS | AVERAGES,
            "tensor parallel: parameters sharded, batch replicated",
        ),
        # The weights are used in pieces, so that their axis is no FSDP, whatever it splits beside.
        (
            use("pieces", exchanges=True),
            BATCH | WEIGHTS | AVERAGES,
            "tensor parallel: parameters sharded, optimizer state replicated; between products"
            " with them, activations are split over x, too",
        ),
        # Each device has models of its own: nothing is exchanged.
        (use("models", "split"), SHARDED, "independent models: parameters sharded, batch sharded"),
        (
            use("pieces", "split", batch=()),
            WEIGHTS | MOMENTS | AVERAGES,
            "independent models: parameters sharded, batch replicated",
        ),
        # Weights are gathered for the examples of each device, though the input itself is whole.
        (
            use("examples", "split", batch=()),
            WEIGHTS | MOMENTS | AVERAGES,
            "data parallel, FSDP (ZeRO-3): parameters sharded; the inputs are replicated over x,"
            " and split inside the step",
        ),
        # Products of neither kind prevail.
        (
            AxisUse(reads={"pieces": 0.4, "nothing": 0.6}, exchanges=True),
            WEIGHTS | MOMENTS | AVERAGES,
            "parameters sharded, optimizer state sharded, batch replicated; 40% of the parameters"
            " are not gathered: each device computes with its own shard (tensor parallelism)",
        ),
        # A file of an earlier version tells what is split alone.
        (
            None,
            BATCH | WEIGHTS | AVERAGES,
            "parameters sharded, optimizer state replicated, batch sharded",
        ),
    ],
)
def test_axes_in_the_fields_words(facts, shardings, wanted):
    assert roles_of(facts, **shardings).split("; y (2)")[0] == f"x (4): {wanted}"


def test_the_limit_of_the_memory_is_said_as_a_share_of_the_device():
    device = Cluster.preset("8xH100").device
    own = replace(PREDICTION, memory_limit_bytes=0.9 * device.memory_bytes)
    said = dict(fact_rows(sample_plan(prediction=own)))["memory (predicted)"]
    assert " of the limit of 71.2 GiB (90% of the 79.1 GiB of H100; the rest is left" in said
    given = replace(PREDICTION, memory_limit_bytes=40 * 2**30)
    said = dict(fact_rows(sample_plan(prediction=given)))["memory (predicted)"]
    assert " of the limit of 40.0 GiB; peak at" in said


def test_the_batch_in_memory_is_that_of_one_micro_batch():
    prediction = replace(PREDICTION, memory_bytes={"batch": 2.0**20})
    for count, told in ((8, "1.0 MiB batch (one micro-batch)"), (1, "1.0 MiB batch")):
        plan = sample_plan(prediction=prediction, num_micro_batches=count)
        assert ("", told) in fact_rows(plan)
        # Pictures of several plans have one colour for it.
        assert memory_parts(plan) == [("batch", 2.0**20)]


def test_an_axis_of_one_device_splits_nothing():
    stage = replace(STAGE, mesh_shape=(1,), axis_names=("x",), shardings={**SPLITS})
    assert dict(summary_rows(sample_plan(stages=(stage,))))["parallelism"] == "nothing: one device"


def test_throughput_is_of_the_model_and_says_what_it_rests_on():
    plan = sample_plan(model=MODEL)
    assert tokens_per_step(plan) == 8 * 16
    assert mfu(plan) == pytest.approx(1e12 / (0.011 * 8 * 989.4e12))
    rows = dict(summary_rows(plan))
    assert rows["throughput"] == "MFU 1.1%, 11.6k tokens/s; predicted from NVIDIA H100 data sheet"
    counted = "over the dense bfloat16 peak, 989.4 TFLOP/s on each device"
    assert rows["MFU counts"].endswith(counted)
    assert rows["recomputation"] == ("each block (full activation checkpointing)")
    assert mfu(sample_plan()) is None


KINDS = ("data, FSDP", "data, FSDP, 8 bits", "context", "experts", "pipeline")


@pytest.fixture
def record(monkeypatch):
    """One reported step of each kind on H100."""
    found = tuple(
        ReportedSteps(framework="MaxText", reason="", device="H100", kind=kind, errors=(0.1 * n,))
        for n, kind in enumerate((*KINDS, "pipeline, interleaved"), 1)
    )
    monkeypatch.setattr(reported, "_record", lambda: found)
    return {steps.kind: f"of step times: {steps}" for steps in found}


@pytest.mark.parametrize("spec", ["8xH100", "72xGB200", "16xtrn2"])
def test_devices_without_calibration_say_so(spec, record):
    cluster = Cluster.preset(spec)
    rows = dict(summary_rows(sample_plan(cluster=cluster.to_dict())))
    unknown = "of step times: not known: the speeds are those of a data sheet"
    assert rows["expected error"].startswith(record[KINDS[0]] if spec == "8xH100" else unknown)
    fitted = dataclasses.replace(cluster.device, calibration={"matmul_efficiency": 0.5})
    plan = sample_plan(cluster=dataclasses.replace(cluster, device=fitted).to_dict())
    unknown = "not known: no measured step was compared"
    assert dict(summary_rows(plan))["expected error"] == unknown


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "data, FSDP"),
        ({"model": replace(MODEL, flops_dtype="fp8")}, "data, FSDP, 8 bits"),
        (
            {"stages": (replace(STAGE, shardings={**SPLITS, "batch.inputs": ((), ("x",))}),)},
            "context",
        ),
        (
            {"inputs": (replace(INPUTS[0], path="state.params.moe.up"), *INPUTS)},
            "experts",
        ),
    ],
)
def test_the_expected_error_is_of_the_same_kind_of_step(changes, kind, record):
    assert dict(summary_rows(sample_plan(**changes)))["expected error"] == record[kind]


def test_the_expected_error_of_pipelines_is_that_of_pipelines(record):
    straight, chunks = (
        dict(summary_rows(sample_pipeline(4, **changes)))["expected error"]
        for changes in ({}, {"num_submeshes": 2, "schedule": "interleaved-1f1b"})
    )
    assert straight == record["pipeline"] and chunks == record["pipeline, interleaved"]


def test_the_two_largest_costs():
    assert dict(summary_rows(sample_plan()))["largest costs"].startswith(
        "compute 73%; exposed communication 27%"
    )


def test_hidden_gathers_of_parameters_are_not_taken_off_sums_of_gradients():
    gathers = replace(PREDICTION, communication_s=0.006, gradient_s=0.001, hidden_s=0.004)
    costs = dict(summary_rows(sample_plan(prediction=gathers)))["largest costs"]
    assert costs.startswith("compute 73%; exposed communication 27%")


def test_a_plan_that_was_not_searched_is_no_runner_up():
    chosen = {"name": "shard", "step_time_s": PREDICTION.step_time_s, "outcome": "chosen"}
    promised = {
        "name": "pipeshard, 2 micro-batches",
        "step_time_s": 0.9 * PREDICTION.step_time_s,
        "outcome": "not searched: limit on numbers of micro-batches; estimated from its layers",
    }
    slower = {
        "name": "pipeshard, 8 micro-batches",
        "step_time_s": 2 * PREDICTION.step_time_s,
        "outcome": "slower, as estimated from its layers",
    }
    tried = (chosen, promised, slower)
    said = runner_up(sample_plan(provenance=replace(PROVENANCE, candidates=tried)))
    assert said.startswith("pipeshard, 8 micro-batches: ")
    assert said.endswith(" a step (estimated from its layers)")
    tried = (chosen, promised)
    assert runner_up(sample_plan(provenance=replace(PROVENANCE, candidates=tried))) == ""


def test_the_runner_up_is_the_best_that_was_not_taken():
    tried = (
        {"name": "shard", "mesh": [4, 2], "step_time_s": 0.011},
        {"name": "shard, x only for the batch", "mesh": "8", "step_time_s": 0.02},
    )
    assert (
        runner_up(sample_plan(provenance=replace(PROVENANCE, candidates=tried)))
        == "shard on 8, x only for the batch: 20.0 ms, +9.0 ms a step"
    )
    assert runner_up(sample_plan(provenance=replace(PROVENANCE, candidates=tried[:1]))) == ""


def test_what_rebuilds_the_step_says_what_the_plan_recomputes_beside_it():
    model = replace(sample_plan().model, kind="zoo", settings={"recompute": "none"})
    rows = dict(origin_rows(sample_plan(model=model, recompute="minimal")))
    assert rows["to rebuild the step"].endswith("; the plan adds the recomputation (minimal)")
    own = replace(sample_plan().model, kind="closure", settings={})
    rows = dict(origin_rows(sample_plan(model=own, recompute="block")))
    assert rows["to rebuild the step"].endswith("again; the plan adds the recomputation (block)")
    rows = dict(origin_rows(sample_plan(model=model)))
    assert rows["to rebuild the step"] == "aliquot.zoo.build(recompute='none')"


def test_what_was_chosen_is_marked_among_what_was_tried():
    tried = (
        {"name": "dp", "mesh": "8", "step_time_s": 0.011, "outcome": "slower"},
        {"name": "zero3", "mesh": "4x2", "step_time_s": 0.011002, "outcome": "slower"},
        {"name": "shard", "mesh": "4x2", "step_time_s": 0.011, "outcome": "slower"},
        {"name": "zero2", "mesh": "8", "step_time_s": 0.02, "outcome": "slower"},
        {"name": "blocks", "mesh": "8", "step_time_s": 0.01104, "outcome": "slower"},
    )
    text = str(sample_plan(provenance=replace(PROVENANCE, candidates=tried)))
    rows = [line.split("  ") for line in text.splitlines() if " ms  " in line]
    outcomes = {row[1]: row[-1] for row in rows}
    assert outcomes["shard"] == "chosen" and outcomes["zero2"] == "slower"
    # Times that read alike are not called slower, or by how much.
    assert outcomes["blocks"] == "slower by 0.36%"
    assert outcomes["dp"] == outcomes["zero3"] == "as fast as the chosen"


def test_a_bound_of_the_chosen_alone_is_shown_where_no_other_is_known():
    tried = (
        {"name": "dp", "mesh": "8", "step_time_s": 0.02, "lower_bound_s": 0.001},
        {"name": "zero3", "mesh": "4x2", "step_time_s": 0.011, "lower_bound_s": 0.0105},
    )
    plain = replace(PROVENANCE, lower_bound_s=None, gap=None, bound_holds_for="")
    given = sample_plan(provenance=replace(plain, candidates=tried), method="zero3")
    assert dict(fact_rows(given))["bound"] == (
        "at most 4.76% above the fastest of plans of zero3 on 4x2; --method auto compares zero3"
        " with others"
    )
    assert dict(fact_rows(sample_plan(provenance=plain)))["bound"].startswith("no lower bound")


def test_a_gap_that_would_be_told_as_nothing_is_told_as_less_than_that():
    near = replace(PROVENANCE, gap=1e-6, status="time limit reached")
    text = " ".join(str(sample_plan(provenance=near)).split())
    assert "less than 0.01% above the fastest of all splits of mesh 4x2" in text


def test_parts_of_the_time_that_are_nothing_are_left_out():
    prediction = replace(
        PREDICTION, step_time_s=0.008, communication_s=0.0, gradient_s=0.0, hidden_s=0.0
    )
    assert "= 8.0 ms compute\n" in str(sample_plan(prediction=prediction))


def test_moments_are_left_out_where_they_are_split_like_their_parameters():
    moments = tuple(
        ArrayInterface(path=path, shape=(64, 32), dtype="float32", role="optimizer_state")
        for path in (MOMENT, MOMENT.replace("mu", "nu"))
    )
    inputs = (*INPUTS[:1], *moments)

    def text(*dims):
        split = dict(zip((m.path for m in moments), dims, strict=True))
        alike = replace(STAGE, shardings={**SPLITS, **split})
        assert grouped_arrays(inputs, alike, alike.shardings)
        return sample_plan(inputs=inputs, stages=(alike,)).describe(every=True)

    own, said = SPLITS["state.params.layers[0].w"], "sharded like its parameters is left out"
    both = text(own, own)
    assert "state.opt.mu" not in both and "state.opt.nu" not in both and said in both
    one = text(own, ((), ()))
    assert "state.opt.mu" not in one and "state.opt.nu" in one and said in one
    # Two that are split alike, and not as their parameter is, have a row each.
    neither = text(((), ()), ((), ()))
    assert "state.opt.mu" in neither and "state.opt.nu" in neither and said not in neither


def test_rows_of_stacked_layers_are_listed_and_counted():
    """Stages of a loop over layers hold some rows of the stacked arrays."""
    stacked = tuple(
        ArrayInterface(path=path, shape=(12, 64, 32), dtype="float32", role=role)
        for path, role in (
            ("state.params.layers.w", "parameter"),
            ("state.opt.mu.layers.w", "optimizer_state"),
        )
    )
    shardings = {
        "state.params.layers.w[0:8]": ((), (), ()),
        "state.opt.mu.layers.w[0:8]": ((), ("x",), ()),
    }
    stage = replace(STAGE, shardings=shardings)
    groups = {g.pattern: g for g in grouped_arrays(stacked, stage, shardings)}
    assert list(groups) == list(shardings)
    assert groups["state.params.layers.w[0:8]"].shape == (8, 64, 32)
    assert groups["state.opt.mu.layers.w[0:8]"].local_bytes == 8 * 64 * 32 * 4 / 4
    batch = ArrayInterface(path="batch.inputs", shape=(8, 16), dtype="int32", role="batch")
    split = replace(stage, shardings={**shardings, "batch.inputs": (("x",), ())})
    split = replace(split, parallelism={"x": use("examples", "split")})
    rows = dict(summary_rows(sample_plan(inputs=(*stacked, batch), stages=(split,))))
    assert rows["parallelism"].startswith("x (4): data parallel, ZeRO-2: optimizer state sharded")


def test_in_clusters_of_several_hosts_axes_say_whether_they_stay_within_one():
    cluster = {"name": "2x4xH100", "num_hosts": 2, "devices_per_host": 4}
    stage = replace(STAGE, mesh_shape=(2, 4), axis_names=("x", "y"), shardings={**SPLITS})
    text = dict(summary_rows(sample_plan(cluster=cluster, stages=(stage,))))["parallelism"]
    assert text.startswith("x (2, across hosts): ") and "; y (4, within a host): " in text
    odd = replace(stage, first_device=2)
    text = dict(summary_rows(sample_plan(cluster=cluster, stages=(odd,))))["parallelism"]
    assert "y (4, across hosts)" in text


def test_a_method_of_the_first_stage_of_zero_is_called_that():
    shardings = dict.fromkeys(SPLITS, ((), ())) | {MOMENT: (("x",), ())} | BATCH
    stage = replace(STAGE, shardings=shardings, mesh_shape=(4,), axis_names=("x",))
    stage = replace(stage, parallelism={"x": use("examples", "split")})
    inputs = (
        *INPUTS,
        ArrayInterface(path=MOMENT, shape=(64, 32), dtype="float32", role="optimizer_state"),
    )
    for method, wanted in (("megatron:dp4,zero1", "ZeRO-1:"), ("zero2", "ZeRO-2:")):
        plan = sample_plan(inputs=inputs, stages=(stage,), method=method)
        assert wanted in dict(summary_rows(plan))["parallelism"]
