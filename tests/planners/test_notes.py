"""What a plan says of work that every device does: operators that run whole, and a share of the
computing.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from offloaded import batch_of, offloaded_step, shapes_of
from ordinary_steps import step_of
from unknown_primitives import shared_scale_p, soft_cap_p

import aliquot as aq
from aliquot.core import format_bytes

EIGHT = aq.Cluster.preset("8xH100")


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def planned(fn, *args, method=None, **options):
    with pytest.warns(UserWarning, match="Rules were inferred"):
        return aq.plan(fn, *args, cluster=EIGHT, method=method or aq.DataParallel(), **options)


def scaled(primitive):
    return lambda x: primitive.bind(2 * x)


@pytest.mark.parametrize("method", [aq.DataParallel(), aq.Auto()], ids=["dp", "auto"])
def test_operators_that_run_whole_are_priced_and_named(method):
    def whole(params, batch):
        return params, jnp.sum(shared_scale_p.bind(jnp.tanh(batch @ params)))

    plan = planned(whole, struct(512, 4096), struct(8192, 512), method=method)
    (line,) = [note for note in plan.notes if "runs whole" in note]
    assert (
        "shared_scale_test" in line
        and "no rule, and none was found" in line
        and "test_notes.py" in line
    )
    assert f"{format_bytes(2 * 8192 * 4096 * 4)} each time, 1 times a step" in line
    gathers = [use.num_bytes for use in plan.prediction.collectives if use.kind == "all-gather"]
    assert f"{format_bytes(sum(gathers)) if gathers else 'nothing'} is gathered" in line
    assert plan.prediction.compute_s > 2 * 8192 * 4096 * 4 / 3.35e12
    assert line.split(":")[0] in str(plan)


def test_with_a_rule_the_step_is_faster_and_has_no_note():
    def step(primitive):
        return lambda params, batch: (params, jnp.sum(primitive(jnp.tanh(batch @ params))))

    args = struct(512, 4096), struct(8192, 512)
    split = planned(step(lambda x: soft_cap_p.bind(x, cap=2.0)), *args)
    whole = planned(step(shared_scale_p.bind), *args)
    assert whole.prediction.compute_s > 3 * split.prediction.compute_s
    assert not [note for note in split.notes if "runs whole" in note]
    (line,) = [note for note in whole.notes if "replicated" in note]
    assert re.match(
        r"\d\d% of the compute is replicated .*: operators that run whole \(\d\d%\)", line
    )


def test_the_longest_operator_that_a_plan_replicates_is_named():
    def train_step(params, batch):
        def loss(w):
            return jnp.mean((jnp.tanh(w["long"] @ w["wide"]) @ batch.T) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    args = {"long": struct(4096, 4096), "wide": struct(4096, 512)}, struct(64, 512)
    plan = aq.plan(train_step, *args, cluster=EIGHT, method=aq.DataParallel())
    (line,) = [note for note in plan.notes if "replicated" in note]
    assert re.search(
        r"operators that the plan replicates \(\d\d%, the longest dot_general:0 at"
        r" test_notes.py:\d+ ",
        line,
    ), line


def test_a_batch_that_is_no_argument_is_noted():
    batch = np.ones((1024, 512), np.float32)

    def train_step(params):
        grads = jax.grad(lambda p: jnp.mean((batch @ p) ** 2))(params)
        return params - 0.1 * grads

    plan = aq.plan(train_step, struct(512, 512), cluster=EIGHT, method=aq.ShardParallel())
    (line,) = [note for note in plan.notes if "constant" in note]
    assert line.startswith("The step holds a constant of 2.0 MiB") and line in plan.notes[0]


def test_a_plan_by_blocks_says_what_is_in_none():
    def train_step(params, batch):
        def loss(w):
            return jnp.mean((jnp.tanh(batch @ (w["full"] + w["a"] @ w["b"])) @ w["out"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    weights = {"full": struct(64, 256), "a": struct(64, 8), "b": struct(8, 256)}
    args = {**weights, "out": struct(256, 64)}, struct(64, 64)
    ways = aq.Blocks(), aq.ILP()
    by_blocks, without = (
        aq.plan(train_step, *args, cluster=EIGHT, method=aq.ShardParallel(intra=intra)).notes
        for intra in ways
    )
    (line,) = [note for note in by_blocks if "in no ParallelBlock" in note]
    assert "dot_general:0 at test_notes.py:" in line and "each split by itself" in line
    assert not [note for note in without if "ParallelBlock" in note]


def test_a_plan_by_blocks_says_which_of_them_are_split_apart():
    args = step_of("adapters")
    cluster = aq.Cluster.preset("8xV100-32GB")
    apart, together = (
        aq.plan(*args, cluster=cluster, method=aq.ShardParallel(intra=blocks, mesh_shape=(4, 2)))
        for blocks in (aq.Blocks(), aq.Blocks(tolerance=0.05))
    )
    (line,) = [note for note in apart.notes if "one decision" in note]
    assert line.startswith("1 ParallelBlock whose products are split each by itself")
    assert not [note for note in together.notes if "one decision" in note]
    for plan in (apart, together):
        scope = "in 1 micro-batch that split each product by some option of its ParallelBlock"
        assert plan.provenance.bound_holds_for.startswith(f"plans without a pipeline {scope}")
    assert together.provenance.status == "rounded" and together.provenance.gap > 0.02


def test_a_step_that_forgets_to_return_its_state_is_noted():
    def train_step(params, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p) ** 2))(params)
        return {"loss": loss, "grads": grads}

    args = struct(512, 512), struct(64, 512)
    plan = aq.plan(train_step, *args, cluster=EIGHT, method=aq.ShardParallel())
    assert plan.notes[0].startswith("The step computes gradients and updates nothing")


@pytest.mark.parametrize(("rows", "is_said"), [(14_000_000, False), (17_000_000, True)])
def test_a_plan_that_fills_a_gpu_says_that_the_compiler_saves_memory(rows, is_said):
    plan = aq.plan(lambda x: x * 2.0, struct(1024, rows), cluster=aq.Cluster.preset("1xH100"))
    assert any("XLA rematerializes" in note for note in plan.notes) == is_said


def test_state_that_is_returned_in_another_memory_is_noted():
    step, init = offloaded_step("save", moments="host")
    state, cluster = init(jax.random.key(0)), aq.Cluster.preset("8xcpu")

    def notes(shapes):
        plan = aq.plan(step, shapes, batch_of(), cluster=cluster, method=aq.DataParallel())
        return [note for note in plan.notes if "memory" in note]

    (line,) = notes(shapes_of(state))
    assert line.startswith("state.momentum.down and 1 more array of the state: planned in device")
    assert 'memory_kind="pinned_host"' in line
    assert not notes(shapes_of(state, "host"))


def test_a_replicated_update_is_noted_in_one_line():
    def train_step(params, batch):
        grads = jax.grad(lambda p: jnp.mean((batch @ p) ** 2))(params)
        return params - 0.1 * grads

    args = struct(4096, 4096), struct(8, 4096)
    plans = {
        m: aq.plan(train_step, *args, cluster=EIGHT, method=m)
        for m in (aq.DataParallel(), aq.Zero3Parallel())
    }
    lines = [[note for note in plan.notes if "replicated" in note] for plan in plans.values()]
    assert len(lines[0]) == 1 and "the update of state that is not split" in lines[0][0]
    assert lines[1] == []


def test_small_operators_and_one_device_are_not_mentioned():
    plan = planned(lambda x: shared_scale_p.bind(2 * x), struct(64, 8))
    assert not [note for note in plan.notes if "runs whole" in note]
    with pytest.warns(UserWarning, match="Rules were inferred"):
        alone = aq.plan(
            scaled(shared_scale_p), struct(8192, 4096), cluster=aq.Cluster.preset("1xH100")
        )
    assert alone.notes == ()


@pytest.mark.parametrize(
    ("devices", "rows", "count", "said"),
    [
        (
            "7xH100",
            64,
            1,
            "7 devices do not divide the batch of 64: data parallelism can use 1 of them",
        ),
        (
            "8xH100",
            24,
            2,
            (
                "8 devices do not divide each of the 2 micro-batches of 12: data parallelism can"
                " use 4 of them"
            ),
        ),
        ("8xH100", 64, 1, ""),
        ("8xH100", 4, 1, ""),
        ("8xH100", 64, 2, ""),
    ],
)
def test_a_batch_that_the_devices_do_not_divide_is_said(devices, rows, count, said):
    def train_step(params, batch):
        return params - 0.1 * jax.grad(lambda p: jnp.mean((batch @ p) ** 2))(params)

    cluster = aq.Cluster.preset(devices)
    plan = aq.plan(
        train_step, struct(512, 512), struct(rows, 512), cluster=cluster, num_micro_batches=count
    )
    lines = [note for note in plan.notes if "do not divide" in note]
    assert bool(lines) == bool(said)
    if said:
        assert lines[0].startswith(said)
        assert said.split(":")[0] in " ".join(str(plan).split())


def test_sizes_that_no_axis_divides_are_named_once():
    def train_step(params, batch):
        grads = jax.grad(lambda p: jnp.mean((batch @ p["w"] @ p["v"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = {"w": struct(1024, 1024), "v": struct(1024, 1030)}
    plan = aq.plan(
        train_step,
        params,
        struct(64, 1024),
        cluster=aq.Cluster.preset("7xH100"),
        method=aq.ShardParallel(),
    )
    lines = [note for note in plan.notes if note.startswith("No axis")]
    assert lines == [
        "No axis of the mesh 7 divides 1024: dim 0 of params.v and 2 more dims of that size stay"
        " whole.",
        "No axis of the mesh 7 divides 1030: dim 1 of params.v stays whole.",
    ]
    assert "x (7): nothing" in str(plan) and "operators inside the step" not in str(plan)


def test_a_batch_that_cannot_be_split_is_answered_with_sizes_that_can():
    def train_step(params, batch):
        grads = jax.grad(lambda p: jnp.mean((batch @ p) ** 2))(params)
        return params - 0.1 * grads

    args = struct(256, 256), struct(64, 256)
    with pytest.raises(aq.core.InputError, match="a multiple of 128, such as 128, 8 micro-batches"):
        aq.plan(
            train_step,
            *args,
            cluster=EIGHT,
            method=aq.DataParallel(),
            num_micro_batches=16,
        )
    assert (
        aq.plan(
            train_step, *args, cluster=EIGHT, method=aq.DataParallel(), num_micro_batches=8
        ).num_micro_batches
        == 8
    )
