"""The first three lines of a plan: what to do, what it takes, and how sure that is."""

import msgspec
import pytest
from sample_plans import PREDICTION, PROVENANCE, STAGE, sample_pipeline, sample_plan

from aliquot.cluster import Cluster, ReportedSteps
from aliquot.cluster import _reported as reported
from aliquot.plans import AxisUse, ModelReference, fact_rows, spoken

replace = msgspec.structs.replace
WEIGHTS = {f"state.params.layers[{k}].w": (("x",), ()) for k in (0, 1)}
WHOLE = {f"state.params.layers[{k}].w": ((), ()) for k in (0, 1)}
BATCH = {"batch.inputs": (("x",), ()), "state.step": ()}


def stage(axes, shardings, **uses):
    shape = tuple(axes.values())
    return replace(
        STAGE,
        mesh_shape=shape,
        axis_names=tuple(axes),
        shardings=shardings,
        parallelism=uses,
        data_axes=(),
    )


EXAMPLES = AxisUse(reads={"examples": 1.0}, gradients={"split": 1.0}, batch=("examples",))
WHOLE_GRADIENTS = replace(EXAMPLES, gradients={"whole": 1.0})
PIECES = AxisUse(reads={"pieces": 1.0}, exchanges=True)


@pytest.mark.parametrize(
    ("planned", "wanted"),
    [
        (
            stage({"x": 8}, WEIGHTS | BATCH, x=EXAMPLES),
            "Shard parameters and optimizer state over all 8 GPUs (FSDP)",
        ),
        (
            stage({"x": 8}, WHOLE | BATCH, x=WHOLE_GRADIENTS),
            "Split the batch over all 8 GPUs (data parallel)",
        ),
        (
            stage({"x": 8}, WEIGHTS | {"batch.inputs": ((), ())}, x=PIECES),
            "Split each layer's matrix products over all 8 GPUs (tensor parallel, parameters"
            " sharded)",
        ),
        (
            stage({"y": 4, "x": 2}, WEIGHTS | {"batch.inputs": (("y",), ())}, y=EXAMPLES, x=PIECES),
            "Combine 4-way data parallelism and 2-way tensor parallelism on all 8 GPUs",
        ),
        (stage({"x": 1}, WHOLE | BATCH), "Run everything on one GPU"),
    ],
)
def test_what_is_split_over_which_devices(planned, wanted):
    plan = sample_plan(stages=(planned,))
    assert spoken(plan)[1] == f"{wanted}, 2 micro-batches, no recomputation:"


def test_the_figures_are_those_of_the_plan():
    fuller = replace(PREDICTION, step_time_s=6.2, peak_memory_bytes=52 * 2**30)
    fuller = replace(fuller, memory_limit_bytes=71.2 * 2**30)
    model = ModelReference(kind="zoo", name="gpt", settings={}, flops_per_step=3e16)
    plan = sample_plan(prediction=fuller, model=model)
    assert spoken(plan)[2] == (
        "6.20 s a step, 52.0 of 71.2 GiB on each GPU, MFU 61%, expected error 9%"
        " (one step compared)."
    )


def test_an_error_that_is_not_known_is_called_so(monkeypatch):
    sheet = sample_plan(cluster=Cluster.preset("8xMI300X").to_dict())
    monkeypatch.setattr(reported, "_record", lambda: ())
    assert spoken(sheet)[2].endswith("expected error not known.")
    measured = replace(PROVENANCE, profiles="figures.sqlite")
    prediction = replace(PREDICTION, measured_error=0.03)
    plan = sample_plan(provenance=measured, prediction=prediction)
    assert spoken(plan)[2].endswith("mean error of the measurements 3%.")


def test_a_device_known_by_its_data_sheet_has_a_range(monkeypatch):
    errors = tuple(1 / (0.9 + 0.05 * n) - 1 for n in range(10, -1, -1))
    known = ReportedSteps(framework="A", reason="why", device="GB300", kind="tensor", errors=errors)
    monkeypatch.setattr(reported, "_record", lambda: (known,))
    model = ModelReference(kind="zoo", name="gpt", settings={}, flops_per_step=3e16)
    prediction = replace(PREDICTION, step_time_s=6.0)
    cluster = Cluster.preset("8xMI300X").to_dict()
    sheet = sample_plan(cluster=cluster, prediction=prediction, model=model)
    # Nine of the eleven, from 1.0 to 1.4 times as long.
    assert spoken(sheet)[2].startswith("6.00 s to 8.40 s a step, ")
    assert spoken(sheet)[2].endswith("MFU 34% to 48%, the device is known by its data sheet alone.")
    rows = dict(fact_rows(sheet))
    assert rows["step time (predicted)"].startswith("6.00 s to 8.40 s; by the data sheet 6.00 s = ")
    assert "devices known by theirs alone (GB300)" in rows["expected error"]
    # Of a device that was measured it is one figure.
    measured = sample_plan(prediction=prediction)
    assert spoken(measured)[2].startswith("6.00 s a step, ")


def test_stages_and_what_they_recompute():
    use = {"x": EXAMPLES}
    stages = [replace(each, parallelism=use) for each in sample_pipeline().stages]
    stages[0] = replace(stages[0], recompute="stage")
    assert spoken(sample_pipeline(stages=tuple(stages)))[1] == (
        "Run 4 stages of 2 GPUs each (1f1b), each with 2-way FSDP, 4 micro-batches, recompute"
        " everything in 1 of 4 stages:"
    )


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("none", "no recomputation:"),
        ("block", "recompute each block (full activation checkpointing):"),
        ("block:2", "recompute one block in 2 (block:2):"),
        ("minimal", "recompute each block except its products with weights (minimal):"),
        (
            "narrow:4",
            "recompute one block in 4 except its products with weights that are no wider than their"
            " input (narrow:4):",
        ),
    ],
)
def test_what_is_recomputed_is_an_instruction(how, said):
    assert spoken(sample_plan(recompute=how))[1].endswith(said)


def test_layers_and_stages_that_recompute_are_both_told():
    plan = sample_pipeline(recompute="minimal")
    stages = [replace(plan.stages[0], recompute="stage"), *plan.stages[1:]]
    assert spoken(replace(plan, stages=tuple(stages)))[1].endswith(
        "recompute each block except its products with weights (minimal) and everything in 1 of 4"
        " stages:"
    )
