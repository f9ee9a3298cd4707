"""Over the axis that splits the sequence, gradients are summed once, after the last micro-batch."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime.cudnn_stand_in import cudnn_on_cpu as cudnn_on_cpu
from runtime.equality import largest
from runtime.test_layouts import SIZES, workload
from runtime.test_layouts import plain as plain_model
from runtime.test_ring import BARS, ROWS, SEQ, plain, start, train_step

import aliquot as aq
from aliquot import zoo
from aliquot.planners import method_by_name

CLUSTER = aq.Cluster.preset("8xcpu")
# So slow that small steps are planned as large ones are: not by the latency of collectives.
SLOW = replace(
    CLUSTER,
    device=replace(
        CLUSTER.device,
        peak_flops_per_s=dict.fromkeys(CLUSTER.device.peak_flops_per_s, 1e6),
        memory_bandwidth_bytes_per_s=1e8,
    ),
    intra=replace(CLUSTER.intra, bandwidth_bytes_per_s=1e7),
)


def bytes_by_axes(collectives: Iterable[Any], kinds: set[str]) -> dict[tuple[str, ...], float]:
    found: collections.Counter[tuple[str, ...]] = collections.Counter()
    for use in collectives:
        if use.kind in kinds:
            found[use.axes] += use.num_bytes
    return dict(found)


def laid_out(step: Any, name: str, micro_batches: int) -> aq.Step:
    return aq.parallelize(
        step, cluster=CLUSTER, method=method_by_name(name), num_micro_batches=micro_batches
    )


@pytest.mark.parametrize(
    ("kernel", "name", "micro_batches", "dtype"),
    [
        ("fused", "megatron:dp2,cp4,ring", 2, "float64"),
        ("fused", "megatron:dp1,cp4,tp2,ring", 4, "float32"),
        ("fused", "megatron:dp2,cp4,ulysses", 2, "float32"),
        ("plain", "megatron:dp1,cp8,gather", 4, "float64"),
        pytest.param("fused", "megatron:dp1,cp8,ring", 4, "float64", marks=pytest.mark.slow),
        pytest.param("fused", "megatron:dp2,cp4,ulysses", 2, "float64", marks=pytest.mark.slow),
        pytest.param("heads first", "megatron:dp2,cp4,ring", 2, "float64", marks=pytest.mark.slow),
    ],
)
def test_the_loop_sums_no_gradient_over_the_sequence(
    kernel: str, name: str, micro_batches: int, dtype: str, cudnn_on_cpu: None
) -> None:
    with jax.enable_x64(dtype == "float64"):
        params, batch = jax.tree.map(lambda x: x.astype(dtype), start())
        step = laid_out(functools.partial(train_step, kernel, True), name, micro_batches)
        found = dict(jax.tree.leaves_with_path(jax.device_get(step(params, batch))))
        for path, leaf in jax.tree.leaves_with_path(plain(True, dtype)):
            worst = np.abs(found[path] - leaf).max() / np.abs(leaf).max()
            assert worst <= BARS[dtype], (path, worst)
    (stage,) = step.plan.stages
    assert stage.context_axes == ("context",)
    sizes = dict(zip(stage.axis_names, stage.mesh_shape, strict=True))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / sizes.get("tensor", 1)
    loss = micro_batches * batch.itemsize
    axes = (*stage.data_axes, "context")
    kinds = {"all-reduce", "all-reduce-start"}
    planned, compiled = (
        {k: v for k, v in bytes_by_axes(some, kinds).items() if "tensor" not in k}
        for some in (step.plan.prediction.collectives, step.stats().collectives)
    )
    assert planned == {axes: whole + loss}
    # XLA sums the loss over one axis after the other.
    losses = {axes: loss} if len(axes) == 1 else {}
    assert compiled[axes] == whole + losses.get(axes, 0)
    others = {k: v for k, v in compiled.items() if k != axes}
    assert sum(others.values()) <= 2 * loss


@pytest.mark.parametrize(
    ("name", "model", "micro_batches", "scan"),
    [
        ("megatron:dp2,cp2,tp2,sp,zero1", "llama", 2, True),
        ("megatron:dp1,cp4,pp2,gather", "llama", 4, False),
        pytest.param("megatron:dp2,cp4,ulysses,zero1", "gpt", 2, False, marks=pytest.mark.slow),
        pytest.param("megatron:dp2,cp2,tp2,fsdp", "llama", 4, False, marks=pytest.mark.slow),
        pytest.param("megatron:dp2,ep2,cp2,zero1", "moe", 2, False, marks=pytest.mark.slow),
        pytest.param("megatron:dp2,cp2,pp2,ulysses", "llama", 2, True, marks=pytest.mark.slow),
    ],
)
def test_it_is_the_plain_step(name: str, model: str, micro_batches: int, scan: bool) -> None:
    with jax.enable_x64(True):
        state, batch, wanted, loss = plain_model(model, scan)
        step = laid_out(workload(model, scan).train_step, name, micro_batches)
        found, metrics = step(state, batch)
        assert all(stage.context_axes == ("context",) for stage in step.plan.stages)
        assert abs(float(metrics["loss"]) - loss) <= 1e-9 * abs(loss)
        difference, path = largest("float64", state, jax.device_get(found), wanted)
        assert difference <= 1e-9, path
    if "pp" in name:
        predicted = [use for stage in step.plan.stages for use in stage.prediction.collectives]
        planned, compiled = (
            sum(n for k, n in bytes_by_axes(some, {"all-reduce"}).items() if "context" in k)
            for some in (predicted, step.stats().collectives)
        )
        # XLA sums the losses over one axis after the other.
        assert abs(planned - compiled) <= 8 * micro_batches


@pytest.mark.parametrize(
    ("mesh", "micro_batches", "scan", "axes"),
    [
        ((2, 4), 8, False, (("x",), ("y",))),
        ((4, 2), 8, True, ((), ("x",))),
        pytest.param((2, 4), 16, False, ((), ("x",)), marks=pytest.mark.slow),
    ],
)
def test_integer_programs_wait_too(
    mesh: tuple[int, ...], micro_batches: int, scan: bool, axes: Any
) -> None:
    with jax.enable_x64(True):
        state, batch, wanted, loss = plain_model("llama", scan)
        step = aq.parallelize(
            workload("llama", scan).train_step,
            cluster=SLOW,
            method=aq.ShardParallel(mesh_shape=mesh),
            num_micro_batches=micro_batches,
        )
        found, metrics = step(state, batch)
        (stage,) = step.plan.stages
        assert (stage.data_axes, stage.context_axes) == axes
        assert abs(float(metrics["loss"]) - loss) <= 1e-9 * abs(loss)
        difference, path = largest("float64", state, jax.device_get(found), wanted)
        assert difference <= 1e-9, path
    for kinds in ({"all-reduce", "all-reduce-start"}, {"reduce-scatter"}, {"all-gather"}):
        planned, compiled = (
            bytes_by_axes(some, kinds)
            for some in (step.plan.prediction.collectives, step.stats().collectives)
        )
        for over in planned.keys() | compiled.keys():
            # XLA sums losses over one axis after the other.
            different = abs(planned.get(over, 0) - compiled.get(over, 0))
            assert different <= 8 * micro_batches, over


def test_stages_that_integer_programs_split_wait_too(x64: None) -> None:
    sizes = {**SIZES, "num_heads": 2, "seq_len": 64}
    config = zoo.configure("llama-7b", **sizes)
    work = zoo.build(config, 8, dtype="float64", learning_rate=1e-3)
    state = jax.device_get(work.init(jax.random.key(0)))
    random = np.random.default_rng(0)
    batch = {
        name: random.integers(0, SIZES["vocab_size"], x.shape, np.int32)
        for name, x in work.batch.items()
    }
    wanted, metrics = jax.device_get(jax.jit(work.train_step)(state, batch))
    step = aq.parallelize(
        work.train_step,
        cluster=SLOW,
        method=aq.PipeshardParallel(num_stages=2, schedule="1f1b"),
        num_micro_batches=8,
    )
    found, measured = step(state, batch)
    assert [stage.context_axes for stage in step.plan.stages] == [("y",)] * 2
    assert abs(float(measured["loss"]) - metrics["loss"]) <= 1e-9 * abs(metrics["loss"])
    difference, path = largest("float64", state, jax.device_get(found), wanted)
    assert difference <= 1e-9, path
    predicted = [use for stage in step.plan.stages for use in stage.prediction.collectives]
    sums = {"all-reduce", "all-reduce-start", "reduce-scatter"}
    planned, compiled = (
        bytes_by_axes(some, sums) for some in (predicted, step.stats().collectives)
    )
    assert compiled == planned


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_pinned_sequence_waits(dtype: str) -> None:
    """The other axis splits weights, whose gradients it sums in each micro-batch."""
    with jax.enable_x64(dtype == "float64"):
        params, batch = jax.tree.map(lambda x: x.astype(dtype), start())
        step = aq.parallelize(
            functools.partial(train_step, "plain", True),
            cluster=SLOW,
            method=aq.ManualParallel(specs={"batch": (None, ("x", "y"))}, mesh_shape=(2, 4)),
            num_micro_batches=4,
        )
        found = dict(jax.tree.leaves_with_path(jax.device_get(step(params, batch))))
        for path, leaf in jax.tree.leaves_with_path(plain(True, dtype)):
            worst = np.abs(found[path] - leaf).max() / np.abs(leaf).max()
            assert worst <= BARS[dtype], (path, worst)
    assert step.plan.stages[0].context_axes == ("x",)
    sums = {"all-reduce", "all-reduce-start", "reduce-scatter"}
    planned, compiled = (
        bytes_by_axes(some, sums)
        for some in (step.plan.prediction.collectives, step.stats().collectives)
    )
    assert compiled == planned


def tied_step(decay: float, scanned: bool, state: Any, x: Any) -> Any:
    """A weight used twice, in a loop or out of it, and a penalty on it that no token gives."""

    def loss(w: Any) -> Any:
        def layer(x: Any, _: Any) -> Any:
            return jnp.tanh(x @ w["both"]), None

        x_out = jax.lax.scan(layer, x, None, 2)[0] if scanned else layer(layer(x, None)[0], None)[0]
        return jnp.mean((x_out * w["scale"]) ** 2) + decay * jnp.sum(w["both"] ** 3)

    value, grads = jax.value_and_grad(loss)(state["w"])
    mean = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
    return {"w": jax.tree.map(lambda p, m: p - 0.1 * m, state["w"], mean), "m": mean}, value


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("scanned", [False, True])
def test_what_is_added_to_a_sum_over_tokens_counts_once(
    decay: float, scanned: bool, x64: None
) -> None:
    random = np.random.default_rng(0)
    w = {"both": random.normal(size=(8, 8)), "scale": random.normal(size=8)}
    state = {"w": w, "m": jax.tree.map(np.zeros_like, w)}
    x = random.normal(size=(ROWS, SEQ, 8))
    step = laid_out(functools.partial(tied_step, decay, scanned), "megatron:dp2,cp4,zero1", 2)
    step(state, x)
    assert step.plan.stages[0].context_axes == ("context",)
    assert all(leaf.largest <= 1e-12 for leaf in step.check(state, x).leaves)
    if not scanned:
        found = bytes_by_axes(step.stats().collectives, {"all-reduce"})
        assert found["data", "context"] == sum(leaf.nbytes for leaf in jax.tree.leaves(w))
