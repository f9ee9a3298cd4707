"""Steps where the caller's JAX is set up otherwise: meshes of their own, no `jit`, checks of
numbers, strict types, and random keys of other generators.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import aliquot as aq

KEY = jax.random.key(3, impl="unsafe_rbg")
SHIFTS = jax.device_put(np.arange(4, dtype=np.float32), jax.devices()[0])


def step(state, batch):
    params, key = state
    key, use = jax.random.split(key)

    def loss(params):
        hidden = jnp.tanh(batch["x"] @ params["a"])
        kept = jax.random.bernoulli(use, 0.5, hidden.shape)
        hidden = jnp.where(kept, hidden, 0.0) @ params["b"]
        return jnp.mean((hidden - batch["y"] * SHIFTS) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    noise = jax.random.normal(KEY, (4,))
    return (params, key), (value, noise, jnp.roll(batch["y"], 1, 0), SHIFTS, 1.0)


def named(state, batch):
    """The same, with a constraint that names an axis of the caller's mesh."""
    rows = jax.lax.with_sharding_constraint(batch["x"], PartitionSpec("rows"))
    return step(state, batch | {"x": rows})


def arguments(generator="unsafe_rbg"):
    rng = np.random.default_rng(0)

    def array(*shape):
        return rng.normal(size=shape).astype(np.float32)

    params = {"a": array(8, 8), "b": array(8, 4)}
    batch = {"x": array(8, 8), "y": array(8, 4)}
    return (params, jax.random.key(1, impl=generator)), batch


def pipeline(fn, state, batch):
    method = aq.PipeshardParallel(num_stages=2)
    cluster = aq.Cluster.preset("8xcpu")
    plan = aq.plan(fn, state, batch, cluster=cluster, method=method, num_micro_batches=2)
    return aq.parallelize(fn, plan)


def data_parallel(fn, state, batch):
    cluster = aq.Cluster.preset("8xcpu")
    plan = aq.plan(fn, state, batch, cluster=cluster, method=aq.DataParallel())
    return aq.parallelize(fn, plan)


def plain(tree):
    keys = jax.dtypes.prng_key
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(jnp.asarray(x).dtype, keys) else x)
        for x in jax.tree.leaves(tree)
    ]


def assert_same(got, want):
    for a, b in zip(plain(got), plain(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def ambient(kind):
    return jax.set_mesh(jax.make_mesh((8,), ("rows",), axis_types=(kind,)))


SURROUNDINGS = {
    "automatic mesh": lambda: ambient(AxisType.Auto),
    "explicit mesh": lambda: ambient(AxisType.Explicit),
    "no jit": jax.disable_jit,
    "strict types": lambda: jax.numpy_dtype_promotion("strict"),
}


@pytest.mark.parametrize("made", [pipeline, data_parallel])
def test_keys_and_constants_of_any_generator_and_device(made):
    state, batch = arguments()
    parallel = made(step, state, batch)
    assert_same(parallel(state, batch), jax.jit(step)(state, batch))


def test_the_callers_surroundings_change_nothing():
    state, batch = arguments("threefry2x32")
    want = jax.jit(step)(state, batch)
    # One plan and one compilation serve all: neither depends on what surrounds the call.
    for made in (data_parallel, pipeline):
        free = made(step, state, batch)
        for surroundings in SURROUNDINGS.values():
            with surroundings():
                parallel = made(step, state, batch)
                assert parallel.plan == free.plan
                assert_same(free(state, batch), want)


@pytest.mark.parametrize("name", ["automatic mesh", "explicit mesh", "no jit"])
def test_a_step_is_planned_compiled_and_made_in_any_surroundings(name):
    state, batch = arguments("threefry2x32")
    fn = step if name == "no jit" else named
    want = jax.jit(step)(state, batch)
    with SURROUNDINGS[name]():
        parallel = pipeline(fn, state, batch)

        def init(params):
            a = params["a"]
            if name == "automatic mesh":
                a = jax.lax.with_sharding_constraint(a, PartitionSpec("rows"))
            return params | {"a": a}, jax.random.key(1, impl="threefry2x32")

        assert_same(parallel(parallel.init(init, state[0]), batch), want)


def test_transfers_that_nobody_asked_for_may_be_refused(tmp_path):
    """Whatever a step moves it moves on purpose: its arguments, constants, micro-batch numbers, and
    its state when that is made and restored.
    """
    state, batch = arguments("threefry2x32")
    want = jax.jit(step)(state, batch)

    def init(params):
        return params, jax.random.key(1, impl="threefry2x32")

    jax.config.update("jax_transfer_guard", "disallow")
    try:
        for made in (data_parallel, pipeline):
            parallel = made(step, state, batch)
            parallel.prepare(state, batch).save(parallel.init(init, state[0]), tmp_path)
            got = parallel(parallel.restore(tmp_path), batch)
            with jax.transfer_guard("allow"):
                assert_same(got, want)
    finally:
        jax.config.update("jax_transfer_guard", None)


@pytest.mark.parametrize("made", [pipeline, data_parallel])
def test_results_that_are_no_numbers_are_named(made):
    state, batch = arguments("threefry2x32")
    batch["x"][3, 2] = np.nan
    parallel = made(step, state, batch)
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as error:
        parallel(state, batch)
    assert str(error.value).startswith("invalid value (nan) in [0][0].a")
    assert "jax_debug_nans" in str(error.value)
