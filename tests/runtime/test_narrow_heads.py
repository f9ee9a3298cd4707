"""Heads narrower than a tensor degree give the numbers of the plain step, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot as aq


@pytest.mark.parametrize(
    "method",
    [aq.TensorParallel(degree=2), aq.Megatron(data=4, tensor=2, zero_stage=3)],
    ids=["tp", "megatron"],
)
def test_a_head_narrower_than_the_tensor_degree_gives_the_same_numbers(method):
    def step(params, batch):
        def loss(params):
            h = batch["x"] + jax.nn.gelu(batch["x"] @ params["up"]) @ params["down"]
            value = (h @ params["value"] + params["bias"])[..., 0]
            return jnp.mean((value - batch["y"]) ** 2) + jnp.mean((h @ params["out"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    with jax.enable_x64():
        shapes = {"up": (16, 32), "down": (32, 16), "value": (16, 1), "bias": (1,), "out": (16, 24)}
        random = np.random.default_rng(0)
        params = {name: 0.1 * random.normal(size=shape) for name, shape in shapes.items()}
        batch = {"x": random.normal(size=(8, 16)), "y": random.normal(size=8)}
        plan = aq.plan(step, params, batch, cluster=aq.Cluster.preset("8xcpu"), method=method)
        assert plan.stages[0].shardings["params.value"][1] == ()
        found, wanted = aq.parallelize(step, plan)(params, batch), jax.jit(step)(params, batch)
        for have, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-14)
