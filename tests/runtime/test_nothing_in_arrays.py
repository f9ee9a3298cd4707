"""Arrays without elements and None among the leaves of state and batch, under every method, whole
and in micro-batches; and arrays of JAX's type without numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot as aq

_DEVICES, _ROWS, _WIDTH = 4, 8, 8
_METHODS = {
    "dp": aq.DataParallel(),
    "zero2": aq.Zero2Parallel(),
    "zero3": aq.Zero3Parallel(),
    "shard": aq.ShardParallel(mesh_shape=(_DEVICES,)),
    "auto": aq.WholeProgram(max_axes=1),
    "pipeline": aq.PipeshardParallel(num_stages=2, schedule="1f1b"),
}


def _step(state, batch):
    assert state["none"] is None and batch["none"] is None

    def loss(params):
        x = batch["x"]
        for layer in params:
            x = x + jnp.tanh(x @ layer["w"])
            if layer["bias"] is not None:
                x = x + layer["bias"]
            # Nothing is added, and its gradient has no elements.
            x = x + (x[:, :0] @ layer["empty"]) + jnp.sum(layer["long"])
        return jnp.mean((x - 1) ** 2) + jnp.sum(batch["empty"])

    value, gradients = jax.value_and_grad(loss)(state["params"])

    def update(old, change):
        return jax.tree.map(lambda a, b: a + b, old, change)

    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], gradients)
    new = {
        "params": update(state["params"], jax.tree.map(lambda m: -0.1 * m, moments)),
        "moments": moments,
        "none": None,
        "rest": state["rest"] + 1,
        "count": state["count"] + 1,
    }
    return new, {"loss": value, "none": None}


def _arguments():
    random = np.random.default_rng(0)
    params = [
        {
            "w": random.standard_normal((_WIDTH, _WIDTH)) / 4,
            "bias": None if k else np.zeros(_WIDTH),
            # The dim that has elements can be divided by the devices.
            "empty": np.zeros((0, _WIDTH)),
            "long": np.zeros((2 * _DEVICES, 0)),
        }
        for k in range(2)
    ]
    state = {
        "params": params,
        "moments": jax.tree.map(np.zeros_like, params),
        "none": None,
        "rest": np.zeros((_DEVICES, 0, 3)),
        "count": np.int32(0),
    }
    return state, {
        "x": random.standard_normal((_ROWS, _WIDTH)),
        "empty": np.zeros((_ROWS, 0)),
        "none": None,
    }


@pytest.mark.parametrize("method", _METHODS)
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_with_nothing_in_some_arrays_is_the_plain_step(method, count, x64, tmp_path):
    state, batch = _arguments()
    cluster = aq.Cluster.preset(f"{_DEVICES}xcpu")
    plan = aq.plan(
        _step, state, batch, cluster=cluster, method=_METHODS[method], num_micro_batches=count
    )
    plan.save(tmp_path / "plan.json")
    parallel = aq.parallelize(
        _step, aq.Plan.load(tmp_path / "plan.json"), devices=jax.devices()[:_DEVICES]
    )
    plain, have, want = jax.jit(_step), state, state
    for _ in range(2):
        (want, metrics), (have, found) = plain(want, batch), parallel(have, batch)
        assert found["none"] is None and have["none"] is None
        np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-9)
    assert jax.tree.structure(have) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["dp", "zero3", "pipeline"])
def test_gradients_of_integers_are_arrays_without_numbers(method, x64):
    """Translators of other frameworks write them out (`float0`), alone and as carries of loops."""

    def step(params, batch):
        def loss(layers):
            x = batch
            for layer in layers:
                x = jnp.tanh(x @ layer)
            of_integers = jnp.broadcast_to(np.zeros((), jax.dtypes.float0), (4,))
            fixed = jax.lax.stop_gradient((x, layers[0]))

            def again(_, carry):
                return jnp.tanh(carry[0] @ fixed[1]), carry[1]

            target, _ = jax.lax.fori_loop(0, 2, again, (fixed[0], of_integers))
            return jnp.mean((x - target) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    random = np.random.default_rng(0)
    params = [random.standard_normal((_WIDTH, _WIDTH)) / 4 for _ in range(2)]
    batch = random.standard_normal((_ROWS, _WIDTH))
    cluster = aq.Cluster.preset(f"{_DEVICES}xcpu")
    plan = aq.plan(
        step, params, batch, cluster=cluster, method=_METHODS[method], num_micro_batches=2
    )
    found = aq.parallelize(step, plan, devices=jax.devices()[:_DEVICES]).check(params, batch)
    assert found.largest < 1e-12, str(found)
