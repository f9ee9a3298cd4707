"""What loops copy beside what their operators do, in bytes counted by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import aliquot as aq
from aliquot.cluster import TARGETS, Cluster
from aliquot.cost import make_problem

LAYERS, ROWS = 6, 32


def multiplied(x, w):
    return jnp.tanh(x @ w)


def cast_first(x, w):
    return jnp.tanh(x @ w.astype(x.dtype))


def scaled(x, w):
    return jnp.tanh(x * w[0])


def read_twice(x, w):
    return jnp.tanh(x @ w + w[0])


# A layer; dtypes of its input and of its weights; and how often the rows of weights are copied.
BODIES = {
    "a product reads rows": (multiplied, jnp.float32, jnp.float32, 1),
    "a product reads narrow rows": (multiplied, jnp.float16, jnp.float16, 1),
    "a cast reads rows": (cast_first, jnp.float16, jnp.float32, 0),
    "elementwise code reads rows": (scaled, jnp.float32, jnp.float32, 0),
    "a product and elementwise code read rows": (read_twice, jnp.float32, jnp.float32, 1),
}
COPIES = {"1xV100-32GB": 1, "1xA100-40GB": 1, "1xH100": 1, "1xcpu": 1, "v5e-1": 0}


def moved(cluster: str, step, *arguments) -> tuple[float, float]:
    """Bytes and kernels of a step on one device."""
    problem = make_problem(aq.capture(step, *arguments), Cluster.preset(cluster))
    works = [work for node_work in problem.work for work in node_work]
    return (
        sum(num_bytes for work in works for num_bytes, _ in work.arrays),
        sum(work.kernels for work in works),
    )


def without_copies(monkeypatch, cluster: str, step, *arguments) -> tuple[float, float]:
    with monkeypatch.context() as patch:
        for kind, target in TARGETS.items():
            neither = dataclasses.replace(target, zeroes_stacks=False, copies_rows=False)
            patch.setitem(TARGETS, kind, neither)
        return moved(cluster, step, *arguments)


@pytest.mark.parametrize("width", [16, 128])
@pytest.mark.parametrize("cluster", COPIES)
@pytest.mark.parametrize("body", BODIES)
def test_stacks_are_zeroed_and_rows_copied_before_products(body, cluster, width, monkeypatch):
    layer, dtype, weights_dtype, times = BODIES[body]

    def step(weights, x):
        def stacked(x, w):
            y = layer(x, w)
            return y, y

        return jax.lax.scan(stacked, x, weights)[1]

    weights = jax.ShapeDtypeStruct((LAYERS, width, width), weights_dtype)
    x = jax.ShapeDtypeStruct((ROWS, width), dtype)
    stack_bytes = LAYERS * ROWS * width * x.dtype.itemsize
    rows_bytes = times * weights.size * weights.dtype.itemsize
    num_bytes, kernels = moved(cluster, step, weights, x)
    least_bytes, least_kernels = without_copies(monkeypatch, cluster, step, weights, x)
    assert num_bytes - least_bytes == COPIES[cluster] * (stack_bytes + rows_bytes)
    assert kernels - least_kernels == COPIES[cluster] * LAYERS * times


def test_an_inner_loop_zeroes_its_stack_in_every_turn_of_the_outer_loop(monkeypatch):
    def step(x):
        def outer(x, _):
            def inner(x, _):
                return x * 2, x

            return jax.lax.scan(inner, x, length=5)

        return jax.lax.scan(outer, x, length=3)[1]

    x = jax.ShapeDtypeStruct((ROWS, 16), jnp.float32)
    turns = 3 * 5
    # Once for the inner stacks, and once for the stack of these.
    zeroed = 2 * turns * x.size * x.dtype.itemsize
    num_bytes, _ = moved("1xH100", step, x)
    assert num_bytes - without_copies(monkeypatch, "1xH100", step, x)[0] == zeroed


@pytest.mark.parametrize(
    "cluster", ["1xV100-32GB", pytest.param("1xA100-40GB", marks=pytest.mark.slow), "1xH100"]
)
def test_a_loop_that_keeps_activations_costs_more_than_recomputation_saves(cluster):
    """Stacks are written twice and their rows copied, which layers written out are not."""
    sizes = {"num_layers": 6, "hidden_size": 512, "num_heads": 8, "seq_len": 512}
    where = Cluster.preset(cluster)

    @functools.cache
    def seconds(scan: bool, recompute: str) -> float:
        work = aq.zoo.build(
            "gpt-125m",
            16,
            overrides=sizes,
            dtype="float16",
            scan=scan,
            recompute=recompute,
            device=where.device,
        )
        step = work.train_step, work.state, work.batch
        # What the step itself recomputes, and nothing else.
        how = "none" if recompute == "none" else None
        plan = aq.plan(*step, cluster=where, method=aq.DataParallel(), recompute=how)
        return plan.prediction.step_time_s

    assert seconds(False, "none") < seconds(False, "block") < seconds(True, "none")
    assert seconds(True, "block") < seconds(True, "none")
    assert seconds(True, "block") == pytest.approx(seconds(False, "block"), rel=0.05)


def test_a_loop_in_a_loop_reads_its_rows_again():
    """Each turn of the outer loop copies every row, and products read the copies."""
    width = 256

    def per_turn(layers):
        def nested(turns):
            def step(x, w):
                def turn(x, _):
                    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], None

                return jax.lax.scan(turn, x, None, length=turns)[0]

            x = jax.ShapeDtypeStruct((1, width), jnp.float32)
            w = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
            return moved("1xH100", step, x, w)[0]

        return (nested(4) - nested(2)) / 2

    row_bytes = 4 * width * width
    more = (per_turn(2 * LAYERS) - per_turn(LAYERS)) / LAYERS
    assert more == pytest.approx(3 * row_bytes, rel=0.05)
