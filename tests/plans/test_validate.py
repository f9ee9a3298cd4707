"""Violations of a plan, each by one change to a plan that has none."""

import msgspec
import pytest
from sample_plans import INPUTS, OUTPUTS, PREDICTION, SPLITS, STAGE, sample_plan

from aliquot.core import PlanMismatchError
from aliquot.plans import ArrayInterface, require_match, violations

replace = msgspec.structs.replace


def _stage(**changes):
    return {"stages": (replace(STAGE, **changes),)}


def _split(path, dims):
    return _stage(shardings={**SPLITS, path: dims})


def test_the_sample_has_none():
    assert violations(sample_plan(), inputs=INPUTS, outputs=OUTPUTS, num_devices=8) == []


W = "state.params.layers[0].w"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ()}, "the plan has no stages"),
        (_stage(mesh_shape=(4, 4)), "the stage has mesh 4x4 of 16 devices, and the plan's cluster has 8"),
        (_stage(mesh_shape=(8,), shardings=dict.fromkeys(SPLITS, ())), "1 mesh axes with 2 names"),
        (_stage(axis_names=("x", "x")), "names 2 axes 'x'"),
        (_stage(data_axes=("q",)), "data axis 'q'"),
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
        ({"cluster": {"name": "nothing"}}, "cluster: "),
    ],
)
def test_a_violation_is_named(changes, message):
    found = violations(sample_plan(**changes))
    assert any(message in each for each in found), found


def test_dims_that_do_not_divide():
    inputs = (replace(INPUTS[0], shape=(62, 32)), *INPUTS[1:])
    assert violations(sample_plan(inputs=inputs)) == [f"input `{W}` has 62 in dim 0, which x = 4 does not divide"]


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
    with pytest.raises(PlanMismatchError, match="the plan is for 8 devices .8xH100., and there are 4"):
        require_match(sample_plan(), num_devices=4)


def test_long_lists_are_cut_in_the_message_alone():
    given = [ArrayInterface(path=f"p{i}", shape=(), dtype="float32") for i in range(50)]
    assert len(violations(sample_plan(), inputs=given)) == 54
    with pytest.raises(PlanMismatchError, match="and 52 more problems"):
        require_match(sample_plan(), inputs=given)
