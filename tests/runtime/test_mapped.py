"""What groups of devices have in common keeps its split over all of them: weights, wherever a step
reads them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from runtime.planned import parallel

from aliquot.cluster import TARGETS
from aliquot.cost import Problem
from aliquot.graph import ReplayHook, capture, evaluate
from aliquot.planners import ManualParallel, Zero3Parallel
from aliquot.runtime.spmd._mapped import differing


def plain(w, x):
    return (x @ jnp.sin(w)).sum()


def remat(w, x):
    return jax.checkpoint(lambda w, x: jnp.tanh(x @ jnp.sin(w)).sum())(w, x)


def scan(w, x):
    def body(carry, row):
        total, still = carry
        return (total + x @ jnp.sin(row), jnp.cos(still)), row * 2

    return jax.lax.scan(body, (x, w[0]), w)


def scan_whose_carry_comes_to_differ(w, x):
    def body(carry, row):
        first, second, third = carry
        return (jnp.sin(row), first + 1.0, second + x.sum()), third

    return jax.lax.scan(body, (w[0], w[1], w[2]), w)


def while_loop(w, x):
    return jax.lax.while_loop(
        lambda c: c[0] < 3,
        lambda c: (c[0] + 1, jnp.sin(c[1]) + w[0], c[2] + x),
        (jnp.int32(0), w[0], x),
    )


def while_loop_as_long_as_each_group_needs(w, x):
    return jax.lax.while_loop(
        lambda c: c[1].sum() < 3.0, lambda c: (jnp.sin(c[0]) + w[0], c[1] + jnp.abs(x)), (w[0], x)
    )


def cond(w, x):
    return jax.lax.cond(w[0, 0] > 0, lambda w, x: (jnp.sin(w), x * 2), lambda w, x: (w, x), w, x)


def cond_that_each_group_decides(w, x):
    return jax.lax.cond(
        x.sum() > 0, lambda w, x: (jnp.sin(w), x * 2), lambda w, x: (jnp.cos(w), x), w, x
    )


# For each step the operators on weights alone that stay common to all groups.
COMMON = {
    plain: {"sin"},
    remat: {"sin"},
    scan: {"sin", "cos", "mul"},
    scan_whose_carry_comes_to_differ: {"sin"},
    while_loop: {"sin"},
    while_loop_as_long_as_each_group_needs: set(),
    cond: {"sin"},
    cond_that_each_group_decides: set(),
}


class SplitWhatIsCommon(ReplayHook):
    """Splits everything that does not differ along the groups' axis, which JAX refuses of arrays
    that each group has.
    """

    def __init__(self, mesh, differs):
        self._sharding, self._differs, self.seen = (
            NamedSharding(mesh, PartitionSpec("x")),
            differs,
            set(),
        )

    def results(self, op, arrays):
        split = [self.value(v, a) for v, a in zip(op.outputs, arrays, strict=True)]
        if op.outputs[0] not in self._differs:
            self.seen.add(op.name)
        return split

    def value(self, index, array):
        if index in self._differs or array.ndim == 0 or array.shape[0] % 8:
            return array
        return jax.lax.with_sharding_constraint(array, self._sharding)


@pytest.mark.parametrize("step", COMMON, ids=lambda step: step.__name__)
def test_values_equal_in_all_groups_may_be_split_over_all_groups(step, mesh):
    random = np.random.default_rng(0)
    w, x = (
        random.normal(size=(8, 8)).astype(np.float32),
        random.normal(size=(8, 8)).astype(np.float32),
    )
    graph = capture(step, w, x[0])
    differs = differing(graph, [graph.inputs[1].value])
    hook = SplitWhatIsCommon(mesh(8), differs)
    run = jax.vmap(
        lambda w, x: evaluate(graph, [w, x], on_op=hook), in_axes=(None, 0), spmd_axis_name="x"
    )
    found = jax.jit(run)(w, x)
    assert COMMON[step] <= hook.seen
    assert hook.seen.isdisjoint({"sin", "cos"} - COMMON[step])
    wanted = jax.vmap(step, in_axes=(None, 0))(w, x)
    for have, want in zip(found, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5)


def test_weights_are_gathered_in_the_dtype_in_which_they_are_used(x64):
    """Each group reads all of them, after they were narrowed."""

    def train_step(params, x):
        def loss(params):
            narrow = jax.tree.map(lambda p: p.astype(jnp.float32), params)
            return jnp.mean((jnp.tanh(x @ narrow["up"]) @ narrow["down"]) ** 2)

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    random = np.random.default_rng(0)
    params = {"up": random.normal(size=(64, 128)), "down": random.normal(size=(128, 64))}
    x = random.normal(size=(32, 64)).astype(np.float32)
    step = parallel(train_step, params, x, method=Zero3Parallel(), num_micro_batches=4)
    assert step.plan.stages[0].data_axes == ("x",)
    gathers = [c for c in step.stats().collectives if c.kind == "all-gather"]
    assert {c.dtype for c in gathers} == {"f32"}
    assert all(leaf.largest <= 1e-6 for leaf in step.check(params, x).leaves)


def test_weights_that_a_loop_keeps_are_gathered_once(x64):
    """For the backward pass the plan keeps what the forward pass has gathered."""

    def train_step(layers, x):
        def loss(layers):
            def turn(x, layer):
                return jnp.tanh(x @ layer.astype(jnp.float32)), None

            return jnp.mean(jax.lax.scan(turn, x, layers)[0] ** 2)

        grads = jax.grad(loss)(layers)
        return jax.tree.map(lambda p, g: p - 0.1 * g, layers, grads)

    random = np.random.default_rng(0)
    layers, x = random.normal(size=(3, 64, 64)), random.normal(size=(32, 64)).astype(np.float32)
    step = parallel(train_step, layers, x, method=Zero3Parallel())
    found = sum(c.num_bytes for c in step.stats().collectives if c.kind == "all-gather")
    assert found == sum(
        c.num_bytes for c in step.plan.prediction.collectives if c.kind == "all-gather"
    )
    assert all(leaf.largest <= 1e-6 for leaf in step.check(layers, x).leaves)


def test_totals_of_stacked_gradients_stay_split(x64):
    """Each group of micro-batches adds up what its own devices hold, where a loop over layers makes
    the gradients, too.
    """

    def train_step(layers, x):
        def loss(layers):
            def turn(x, layer):
                return jnp.tanh(x @ layer["up"]) @ layer["down"], None

            return jnp.mean(jax.lax.scan(turn, x, layers)[0] ** 2)

        grads = jax.grad(loss)(layers)
        return jax.tree.map(lambda p, g: p - 0.1 * g, layers, grads)

    random = np.random.default_rng(0)
    layers = {"up": random.normal(size=(3, 32, 64)), "down": random.normal(size=(3, 64, 32))}
    x = random.normal(size=(32, 32))
    specs = {"layers.up": (None, None, "y"), "layers.down": (None, "y", None), "x": ("x", None)}
    method = ManualParallel(specs=specs, mesh_shape=(4, 2))
    step = parallel(train_step, layers, x, method=method, num_micro_batches=4)
    assert step.plan.stages[0].data_axes == ("x",)
    assert not [c for c in step.stats().collectives if c.kind == "all-gather"]
    assert all(leaf.largest <= 1e-12 for leaf in step.check(layers, x).leaves)


def test_sums_wait_along_data_axes_alone(x64):
    """A gradient that is summed over other axes, too, is so for each micro-batch, and among groups
    behind the last.
    """

    def train_step(state, x):
        def loss(w, b):
            return jnp.mean(jnp.tanh(x @ w + b) ** 2)

        value, (dw, db) = jax.value_and_grad(loss, argnums=(0, 1))(state["w"], state["b"])
        mean = 0.9 * state["m"] + dw
        return {"w": state["w"] - 0.1 * mean, "m": mean, "b": state["b"] - 0.1 * db}, value

    random = np.random.default_rng(0)
    state = {
        "w": random.normal(size=(512, 256)),
        "m": random.normal(size=(512, 256)),
        "b": random.normal(size=256),
    }
    x = random.normal(size=(32, 128, 512))
    specs = {
        "state.w": (None, None),
        "state.m": ("y", "x"),
        "state.b": (None,),
        "x": ("x", "y", None),
    }
    step = parallel(
        train_step,
        state,
        x,
        method=ManualParallel(specs=specs, mesh_shape=(4, 2)),
        num_micro_batches=4,
    )
    assert step.plan.stages[0].data_axes == ("x",)
    planned, found = (
        {
            (kind, axes): sum(c.num_bytes for c in some if c.kind == kind and c.axes == axes)
            for kind in ("all-reduce", "reduce-scatter")
            for axes in (("x",), ("y",), ("x", "y"))
        }
        for some in (step.plan.prediction.collectives, step.stats().collectives)
    )
    weights, bias, loss = 512 * 256 * 8, 256 * 8, 8
    reduced = {("x",): weights / 2 + bias, ("y",): 4 * bias, ("x", "y"): 4 * loss}
    scattered = {("x",): 0, ("y",): 4 * weights / 2, ("x", "y"): 0}
    scattered = {("reduce-scatter", axes): num_bytes for axes, num_bytes in scattered.items()}
    assert (
        planned
        == {("all-reduce", axes): num_bytes for axes, num_bytes in reduced.items()} | scattered
    )
    reduced = {("x",): weights / 2 + bias + loss, ("y",): 4 * (bias + loss), ("x", "y"): 0}
    assert found == pytest.approx(
        {("all-reduce", axes): num_bytes for axes, num_bytes in reduced.items()} | scattered
    )
    assert all(leaf.largest <= 1e-12 for leaf in step.check(state, x).leaves)


def test_groups_are_summed_along_the_axes_that_split_the_sum_first(x64, monkeypatch):
    """As for compilers with a reduce-scatter, which would all-reduce whole gradients of which each
    device keeps a part.
    """
    monkeypatch.setattr(Problem, "target", property(lambda problem: TARGETS["gpu"]))

    def train_step(state, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state["w"])
        mean = 0.9 * state["m"] + grad
        return {"w": state["w"] - 0.1 * mean, "m": mean}, loss

    random = np.random.default_rng(0)
    state = {"w": random.normal(size=(512, 256)), "m": random.normal(size=(512, 256))}
    x = random.normal(size=(2048, 512))
    specs = {"state.w": (None, None), "state.m": ("y", None), "x": (("x", "y"), None)}
    step = parallel(
        train_step,
        state,
        x,
        method=ManualParallel(specs=specs, mesh_shape=(4, 2)),
        num_micro_batches=2,
    )
    assert step.plan.stages[0].data_axes == ("x", "y")
    found = [c for c in step.stats().collectives if c.kind == "all-reduce" and c.axes == ("x",)]
    assert sum(c.num_bytes for c in found) == 512 * 256 * 8 / 2
    assert all(leaf.largest <= 1e-12 for leaf in step.check(state, x).leaves)
