"""Steps with Pallas kernels: split along their grids, each device runs its piece, and nothing is
gathered for them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from runtime.planned import parallel

import aliquot as aq

BLOCK = 4


def product(x, w):
    def kernel(x, w, out):
        out[...] = jnp.dot(x[...], w[...])

    (rows, inner), columns = x.shape, w.shape[1]
    return pl.pallas_call(
        kernel,
        grid=(rows // BLOCK, columns // BLOCK),
        in_specs=[
            pl.BlockSpec((BLOCK, inner), lambda i, j: (i, 0)),
            pl.BlockSpec((inner, BLOCK), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        interpret=True,
    )(x, w)


@jax.custom_vjp
def dense(x, w):
    return product(x, w)


dense.defvjp(
    lambda x, w: (product(x, w), (x, w)), lambda kept, g: (product(g, kept[1].T), kept[0].T @ g)
)


def train_step(params, batch):
    def loss(params):
        return jnp.mean(
            (dense(jnp.tanh(dense(batch["x"], params["up"])), params["down"]) - batch["y"]) ** 2
        )

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments():
    random = np.random.default_rng(0)
    sizes = {"up": (8, 64), "down": (64, 8)}
    params = {
        name: jnp.asarray(random.normal(size=size) / 4, jnp.float32) for name, size in sizes.items()
    }
    return params, {name: jnp.asarray(random.normal(size=(128, 8)), jnp.float32) for name in "xy"}


def estimated(grid, block, flops):
    """Doubles rows, and says that it takes so many operations."""

    def kernel(x, out):
        out[...] = 2 * x[...]

    def run(x):
        estimate = pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0)
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[block],
            out_specs=block,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            cost_estimate=estimate,
            interpret=True,
        )(x)

    return run


def test_a_kernel_is_never_free():
    """What runs whole takes every device as long as it would take one; what is split takes each its
    part.
    """
    x = jnp.ones((64, 8), jnp.float32)
    rows, whole = ((16,), pl.BlockSpec((4, 8), lambda i: (i, 0))), ((), pl.BlockSpec())

    def seconds(shape, flops):
        plan = aq.plan(
            estimated(*shape, flops),
            x,
            cluster=aq.Cluster.preset("8xH100"),
            method=aq.DataParallel(),
        )
        return plan.prediction.step_time_s

    free, taken = seconds(whole, 0), seconds(whole, 10**15)
    assert taken - free > 1.0
    assert seconds(rows, 10**15) - free == pytest.approx((taken - free) / 8, rel=0.2)


METHODS = {
    "dp": aq.DataParallel(),
    "zero3": aq.Zero3Parallel(),
    "shard": aq.ShardParallel(),
    "columns": aq.ManualParallel(specs={"*up": (None, "x"), "*down": ("x", None)}, mesh_shape=(8,)),
}


@pytest.mark.parametrize("num_micro_batches", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_with_kernels(method, num_micro_batches):
    step = parallel(
        train_step, *arguments(), method=METHODS[method], num_micro_batches=num_micro_batches
    )
    check = step.check(*arguments())
    assert check.largest < 1e-5, str(check)


@jax.custom_vjp
def normalised(x):
    def kernel(x, out):
        out[...] = jax.nn.softmax(x[...])

    def row(x):
        return pl.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
        )(x)

    return jax.vmap(row)(x)


def _backward(y, g):
    return (y * (g - (g * y).sum(-1, keepdims=True)),)


normalised.defvjp(lambda x: (normalised(x),) * 2, _backward)


@pytest.mark.parametrize("rows", [16, 32])
def test_a_kernel_for_each_example(rows):
    """Down to one example for each device and micro-batch, of which the plan is worked out from
    larger ones.
    """

    def step(params, batch):
        grads = jax.grad(
            lambda params: jnp.mean((normalised(batch["x"] @ params["up"]) @ params["down"]) ** 2)
        )(params)
        return jax.tree.map(lambda p, g: p - 9.0 * g, params, grads)

    params, batch = arguments()
    args = params, {"x": batch["x"][:rows]}
    check = parallel(step, *args, method=aq.DataParallel(), num_micro_batches=2).check(*args)
    assert check.largest < 1e-5, str(check)


def test_each_device_runs_its_piece():
    step = parallel(train_step, *arguments(), method=aq.DataParallel())
    text = step.lower().compile().as_text()
    assert "all-reduce" in text and "all-gather" not in text
