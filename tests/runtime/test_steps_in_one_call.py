"""Several steps in one call give the numbers of the plain call, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot as aq


@pytest.mark.parametrize("count", [1, 3])
def test_several_steps_in_one_call_give_the_same_numbers(count):
    def one(w, x):
        value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * grad, value

    def step(w, batches):
        return jax.lax.scan(one, w, batches)

    with jax.enable_x64():
        random = np.random.default_rng(0)
        w, batches = random.normal(size=(16, 8)), random.normal(size=(count, 16, 16))
        plan = aq.plan(
            step, w, batches, cluster=aq.Cluster.preset("8xcpu"), method=aq.Zero3Parallel()
        )
        assert plan.stages[0].shardings["batches"] == ((), ("x",), ())
        found, wanted = aq.parallelize(step, plan)(w, batches), jax.jit(step)(w, batches)
        for have, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-14)
