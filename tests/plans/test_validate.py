"""Violations of a plan, each by one change to a plan that has none."""

import msgspec
import pytest
from sample_plans import INPUTS, OUTPUTS, PREDICTION, SPLITS, STAGE, sample_pipeline, sample_plan

from aliquot.core import PlanMismatchError
from aliquot.plans import ArrayInterface, MemoryCurve, require_match, violations

replace = msgspec.structs.replace


def _stage(**changes):
    return {"stages": (replace(STAGE, **changes),)}


def _split(path, dims):
    return _stage(shardings={**SPLITS, path: dims})


def _curve(parts, seconds=()):
    return {
        "prediction": replace(
            PREDICTION,
            memory_over_time=MemoryCurve(
                phases=("forward", "update"), parts=parts, seconds=seconds
            ),
        )
    }


def test_the_sample_has_none():
    assert violations(sample_plan(), inputs=INPUTS, outputs=OUTPUTS, num_devices=8) == []


W = "state.params.layers[0].w"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ()}, "the plan has no stages"),
        (
            _stage(mesh_shape=(4, 4)),
            "the stage has mesh 4x4 of 16 devices, and the plan's cluster has 8",
        ),
        (_stage(mesh_shape=(8,), shardings=dict.fromkeys(SPLITS, ())), "1 mesh axes with 2 names"),
        (_stage(axis_names=("x", "x")), "names 2 axes 'x'"),
        (_stage(data_axes=("q",)), "data axis 'q'"),
        (_stage(context_axes=("q",)), "context axis 'q'"),
        (_stage(context_axes=("x",), data_axes=("y",)), "may be one, behind the data axes"),
        (_stage(context_axes=("x", "y")), "context axes x, y, and there may be one"),
        ({"recompute": "blok"}, "the plan's layers recompute 'blok': did you mean 'block'"),
        ({"recompute": "block:0"}, "the plan's layers recompute 'block:0'"),
        (_stage(recompute="operator"), "the stage recomputes 'operator': did you mean"),
        (
            _stage(recompute="operators"),
            "the stage recomputes operators, and its interior names none",
        ),
        (
            _stage(interior=(replace(STAGE.interior[0], recompute=True),)),
            "the stage names operators to recompute, such as",
        ),
        (_split(W, (("z",), ())), f"input `{W}` is split by 'z', no axis of the mesh"),
        (_split(W, (("x",), ("x",))), f"input `{W}` uses axis 'x' 2 times"),
        (_split(W, (("x",),)), f"input `{W}` has 2 dims, and its split names 1"),
        (_split("batch.inputs", (("x", "y"), ("x",))), "uses axis 'x' 2 times"),
        (_split("batch.other", ()), "splits input `batch.other`, which the step does not have"),
        (_stage(shardings={W: SPLITS[W]}), "inputs without a split: `state.params.layers[1].w`"),
        (_stage(outputs={}), "outputs without a split"),
        ({"num_micro_batches": 0}, "num_micro_batches is 0"),
        ({"num_micro_batches": 3}, "3 micro-batches do not divide the batch of 8"),
        ({"micro_batch_semantics": "loose"}, "micro_batch_semantics is 'loose'"),
        ({"combine": {"nothing": "sum"}}, "combine names outputs"),
        ({"inputs": (*INPUTS, INPUTS[0])}, "is listed 2 times"),
        (
            {"prediction": replace(PREDICTION, peak_memory_bytes=4000.0)},
            "add up to 3000 bytes, not to the peak of 4000",
        ),
        ({"prediction": replace(PREDICTION, step_time_s=0.5)}, "add up to 0.011 s, not to 0.5 s"),
        ({"prediction": replace(PREDICTION, memory_limit_bytes=-1.0)}, "memory_limit_bytes is -1"),
        (
            _curve({"parameters": (3000.0,)}),
            "memory_over_time has 2 moments, and another number of them for `parameters`",
        ),
        (
            _curve({"parameters": (3000.0, -1.0)}),
            "memory_over_time holds bytes that are not finite or are negative",
        ),
        (
            _curve({"parameters": (3000.0, 10.0)}, seconds=(0.2, 0.1)),
            "memory_over_time has 2 moments, and needs as many ascending seconds",
        ),
        (_curve({"parameters": (10.0, 2000.0)}), "rises to 2000 bytes, and the peak is 3000 bytes"),
        ({"cluster": {"name": "nothing"}}, "cluster: "),
    ],
)
def test_a_violation_is_named(changes, message):
    found = violations(sample_plan(**changes))
    assert any(message in each for each in found), found


def test_dims_that_do_not_divide():
    inputs = (replace(INPUTS[0], shape=(62, 32)), *INPUTS[1:])
    assert violations(sample_plan(inputs=inputs)) == [
        f"input `{W}` has 62 in dim 0, which x = 4 does not divide"
    ]


def test_all_at_once():
    plan = sample_plan(num_micro_batches=0, **_split(W, (("z",), ("x",))))
    assert len(violations(plan)) == 2


def test_another_model_names_the_first_path_that_differs():
    given = (
        replace(INPUTS[0], shape=(128, 32)),
        ArrayInterface(path="state.params.head", shape=(4,), dtype="float32"),
        *INPUTS[2:],
    )
    with pytest.raises(PlanMismatchError) as caught:
        require_match(sample_plan(), inputs=given)
    assert caught.value.violations == (
        f"input `{W}` is float32[128, 32], planned as float32[64, 32]",
        "input `state.params.head` float32[4] is not in the plan",
        "input `state.params.layers[1].w` float32[64, 32] is planned, and the step has none",
    )


def test_another_device_count():
    with pytest.raises(
        PlanMismatchError, match="the plan is for 8 devices .8xH100., and there are 4"
    ):
        require_match(sample_plan(), num_devices=4)


def test_long_lists_are_cut_in_the_message_alone():
    given = [ArrayInterface(path=f"p{i}", shape=(), dtype="float32") for i in range(50)]
    assert len(violations(sample_plan(), inputs=given)) == 54
    with pytest.raises(PlanMismatchError, match="and 52 more problems"):
        require_match(sample_plan(), inputs=given)


def _pipeline(index=None, **changes):
    """The sample's four stages, with one of them or the plan changed."""
    plan = sample_pipeline(4)
    if index is None:
        return replace(plan, **changes)
    stages = list(plan.stages)
    stages[index] = replace(stages[index], **changes)
    return replace(plan, stages=tuple(stages))


def _predicted(index, **changes):
    return _pipeline(
        index, prediction=replace(sample_pipeline(4).stages[index].prediction, **changes)
    )


@pytest.mark.parametrize("num_stages", [2, 4, 16])
def test_sample_pipelines_have_none(num_stages):
    assert violations(sample_pipeline(num_stages, 8)) == []


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (_pipeline(schedule="single"), "4 stages have no schedule"),
        (_pipeline(schedule="1f1"), "there is no schedule '1f1': did you mean '1f1b'"),
        (
            _pipeline(num_submeshes=3),
            "stage 3 on devices 6 to 7 should be on those of stage 0, with which it shares a",
        ),
        (_pipeline(num_submeshes=5), "4 stages cannot be dealt out to 5 submeshes"),
        (_pipeline(num_submeshes=0), "4 stages cannot be dealt out to 0 submeshes"),
        (
            _pipeline(num_submeshes=2),
            (
                "stage 2 on devices 4 to 5 should be on those of stage 0, with which it shares a"
                " submesh"
            ),
        ),
        (_pipeline(1, first_device=0), "devices 0-1 are in the submeshes of stages 0-1 at once"),
        (
            _pipeline(3, first_device=7),
            "stage 3 on devices 7 to 8 reaches outside the cluster of 8",
        ),
        (
            _pipeline(0, first_device=-1),
            "stage 0 on devices -1 to 0 reaches outside the cluster of 8",
        ),
        (_pipeline(1, first_layer=2), "layer 1 is in no stage"),
        (
            _pipeline(2, first_layer=1),
            "stage 2 begins with layer 1, and the stages before it have all up to 1",
        ),
        (_pipeline(3, layer_names=()), "stage 3 has no layers"),
        (_pipeline(layers="5"), "the stages have 4 layers, and the plan cuts the step into 5"),
        (_pipeline(scan_bounds=(0, 4, 2)), "scan_bounds are 0, 4, 2, and must rise"),
        (_predicted(1, in_flight=5), "stage 1 keeps 5 micro-batches in flight, and there are 4"),
        (_predicted(1, in_flight=0), "stage 1 keeps 0 micro-batches in flight"),
        (_predicted(2, forward_s=-1.0), "stage 2 predicts forward_s -1.0"),
        (_predicted(2, weight_gradient_s=1.0), "stage 2 predicts 1 s for gradients of weights"),
        (_predicted(2, bubble=1.5), "stage 2 predicts a bubble of 1.5"),
        (
            _predicted(0, peak_memory_bytes=1e9),
            "the parts of memory of stage 0 add up to 7000000000 bytes",
        ),
        (_pipeline(num_micro_batches=0), "num_micro_batches is 0"),
    ],
)
def test_a_violation_of_a_pipeline_is_named(plan, message):
    found = violations(plan)
    assert any(message in each for each in found), found


def test_a_submesh_across_hosts():
    plan = sample_pipeline(16)
    stages = [replace(stage, first_device=stage.first_device + 1) for stage in plan.stages]
    assert "stage 3 on devices 7 to 8 straddles hosts of 8" in violations(
        replace(plan, stages=tuple(stages))
    )
    wide = [
        replace(plan.stages[0], mesh_shape=(16,)),
        replace(plan.stages[1], mesh_shape=(16,), first_device=16),
    ]
    found = violations(replace(plan, stages=tuple(wide), num_submeshes=2))
    assert not any("straddles" in each or "outside" in each for each in found)


def test_all_that_is_wrong_with_a_pipeline_at_once():
    plan = replace(
        _pipeline(1, first_device=0, first_layer=3), schedule="zerobubble", num_micro_batches=0
    )
    found = "; ".join(violations(plan))
    for part in (
        "no schedule 'zerobubble'",
        "layers 1-2 are in no stage",
        "devices 0-1",
        "num_micro_batches is 0",
    ):
        assert part in found


@pytest.mark.parametrize(
    ("num_stages", "processes", "fits"),
    [
        (4, 1, True),
        (4, 8, True),
        (4, 2, True),
        (4, 3, False),
        (16, 4, True),
        (16, 2, True),
        (16, 3, False),
        (16, 8, True),
    ],
)
def test_processes_share_the_hosts(num_stages, processes, fits):
    assert (violations(sample_pipeline(num_stages), num_processes=processes) == []) == fits
    if not fits:
        with pytest.raises(PlanMismatchError, match=f"{processes} processes cannot share equally"):
            require_match(sample_pipeline(num_stages), num_processes=processes)
