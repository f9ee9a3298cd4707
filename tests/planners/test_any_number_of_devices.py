"""Numbers of devices that do not divide the dims of a step: the state is split over as many as
divide them, and plans say which arrays are, and by how much the others miss.
"""

import functools
import re

import jax.numpy as jnp
import pytest
from planners.small_steps import array, momentum_step

import aliquot as aq
from aliquot import zoo
from aliquot.core import InfeasibleError
from aliquot.planners import method_by_name

SIZES = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_heads": 4,
    "ffn_size": 512,
    "vocab_size": 1024,
    "seq_len": 8,
}


@functools.cache
def llama(rows):
    """A Llama whose dims are powers of two, in a loop over its layers."""
    return zoo.build(zoo.configure("llama-7b", **SIZES), rows, scan=True)


def planned(cluster, method, *, rows=144, **options):
    work = llama(rows)
    method = method_by_name(method) if isinstance(method, str) else method
    return aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=aq.Cluster.preset(cluster),
        method=method,
        **options,
    )


def held_bytes(plan, *parts):
    return sum(plan.prediction.memory_bytes[part] for part in parts)


@pytest.fixture(scope="module")
def whole():
    """The state that each device holds under data parallelism."""
    return planned("6xH100", "dp", rows=12)


@pytest.mark.parametrize(
    "cluster, mesh",
    [
        ("6xH100", (3, 2)),
        ("2x6xH100", (3, 4)),
        ("3x8xH100", (3, 8)),
        ("6x8xH100", (3, 16)),
        ("9x8xH100", (9, 8)),
    ],
)
def test_fsdp_splits_the_state_over_as_many_devices_as_divide_it(cluster, mesh, whole):
    plan = planned(cluster, "fsdp")
    assert plan.stages[0].mesh_shape == mesh
    copies, sharers = mesh
    for part in ("parameters", "optimizer state"):
        # Counters of a few bytes stay whole.
        assert held_bytes(plan, part) == pytest.approx(held_bytes(whole, part) / sharers, rel=1e-3)
    devices = copies * sharers
    misses = [f"{n} = {n // devices} x {devices} + {n % devices}" for n in (1024, 512, 256)]
    (note,) = [note for note in plan.notes if "cannot share" in note]
    assert note == (
        f"{devices} devices cannot share state.params.embed.embedding [1024, 256] and 32 more"
        " arrays, 100% of the state that they split, as they divide none of the dims"
        f" ({', '.join(misses)}, 2 < {devices}): each is split over {sharers} of these devices, in"
        f" {copies} copies. With multiples of {devices} all would share it."
    )
    assert note in str(plan)


@pytest.mark.parametrize("cluster", ["8xH100", "2x8xH100", "8x8xH100"])
@pytest.mark.parametrize("method", ["zero2", "zero3"])
def test_devices_that_divide_the_state_make_one_axis(cluster, method):
    plan = planned(cluster, method, rows=64)
    assert len(plan.stages[0].mesh_shape) == 1
    assert not [note for note in plan.notes if "cannot share" in note]


def test_zero2_splits_moments_and_hybrid_fsdp_each_group(whole):
    zero2 = planned("6xH100", "zero2")
    assert held_bytes(zero2, "parameters") > 0.8 * held_bytes(whole, "parameters")
    assert held_bytes(zero2, "optimizer state") < 0.51 * held_bytes(whole, "optimizer state")
    hybrid = planned("2x6xH100", "hsdp")
    assert hybrid.stages[0].mesh_shape == (2, 3, 2)
    assert held_bytes(hybrid, "parameters") < 0.51 * held_bytes(whole, "parameters")
    assert any("6 devices cannot share" in note for note in hybrid.notes)


@pytest.mark.parametrize(
    "layout, mesh", [("dp12,tp2,fsdp", (3, 4, 2)), ("dp6,tp2,zero1", (3, 2, 2))]
)
def test_layouts_split_the_state_over_as_many_data_ranks_as_divide_it(layout, mesh, whole):
    plan = planned("3x8xH100" if mesh[1] == 4 else "2x6xH100", f"megatron:{layout}")
    stage = plan.stages[0]
    assert stage.mesh_shape == mesh and stage.axis_names == ("replica", "data", "tensor")
    assert stage.shardings["batch.inputs"][0] == ("replica", "data")
    part = "parameters" if "fsdp" in layout else "optimizer state"
    # Norms are not split over the tensor axis.
    assert held_bytes(plan, part) < 1.1 * held_bytes(whole, part) / (mesh[1] * mesh[2])
    assert any(f"split over {mesh[1]} of these devices, in 3 copies" in n for n in plan.notes)


def test_arrays_that_all_devices_divide_are_split_over_all():
    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["in"]) @ params["out"]) ** 2)

    params = {"in": array(512, 1536), "out": array(1536, 64), "odd": array(512, 512)}
    step, state, batch = momentum_step(
        lambda p, b: loss(p, {"x": b["x"] @ p["odd"]}), params, {"x": array(96, 512)}
    )
    plan = aq.plan(
        step, state, batch, cluster=aq.Cluster.preset("3x8xH100"), method=aq.Zero3Parallel()
    )
    stage = plan.stages[0]
    assert stage.mesh_shape == (3, 8)
    split = {
        name: sorted(a for dim in stage.shardings[f"state.params.{name}"] for a in dim)
        for name in params
    }
    assert split == {"in": ["x", "y"], "out": ["x", "y"], "odd": ["y"]}
    (note,) = [note for note in plan.notes if "cannot share" in note]
    assert "state.params.odd [512, 512]" in note and "(512 = 21 x 24 + 8)" in note


def test_the_search_is_no_slower_than_fsdp_on_such_a_number():
    fixed = planned("2x6xH100", "fsdp")
    for method in (aq.ShardParallel(), aq.WholeProgram()):
        searched = planned("2x6xH100", method).prediction.step_time_s
        assert searched <= 1.001 * fixed.prediction.step_time_s


def test_more_devices_are_advised_along_the_axis_that_splits_the_state():
    with pytest.raises(InfeasibleError) as refusal:
        planned("6xH100", "fsdp", memory_limit_bytes=4e6)
    assert re.search(r"\d+ such devices \(now 6\)", str(refusal.value))
