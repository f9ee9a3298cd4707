"""Operations of a step of one's own, counted in its products, give it an MFU."""

import jax
import jax.numpy as jnp
import pytest

import aliquot as aq
from aliquot.plans import mfu, tokens_per_step

ROWS, WIDTH = 4096, 1024
CLUSTER = aq.Cluster.preset("4xH100")


def train(recompute, dtype):
    """Two products forward; the backward pass has three, and one or two more if recomputed."""

    def loss(params, x):
        def layer(x, w):
            return jnp.tanh(x @ w)

        for w in params:
            x = (jax.checkpoint(layer) if recompute else layer)(x, w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))

    struct = jax.ShapeDtypeStruct
    return step, [struct((WIDTH, WIDTH), dtype)] * 2, struct((ROWS, WIDTH), dtype)


@pytest.mark.parametrize(("recompute", "products"), [(False, 5), (True, 6)])
@pytest.mark.parametrize(("dtype", "peak"), [("bfloat16", 989.4e12), ("float32", 494.7e12)])
def test_products_of_a_step_are_counted_without_most_of_recomputation(
    recompute, products, dtype, peak
):
    plan = aq.plan(*train(recompute, dtype), cluster=CLUSTER, method=aq.DataParallel())
    product = 2.0 * ROWS * WIDTH**2
    assert plan.model.flops_per_step in (products * product, 5 * product)
    assert plan.model.flops_dtype == dtype
    used = mfu(plan)
    assert used == pytest.approx(
        plan.model.flops_per_step / (plan.prediction.step_time_s * 4 * peak)
    )
    assert "MFU" in str(plan)


def test_tokens_that_cannot_be_seen_are_said():
    step, params, rows = train(False, "bfloat16")
    options = {"cluster": CLUSTER, "method": aq.DataParallel()}
    plan = aq.plan(step, params, rows, tokens_per_step=ROWS, **options)
    assert tokens_per_step(plan) == ROWS and " tokens/s" in str(plan)
    assert tokens_per_step(aq.Plan.from_json(plan.to_json())) == ROWS
    assert " examples/s" in str(aq.plan(step, params, rows, **options))
    with pytest.raises(aq.InputError, match="tokens_per_step must be at least 1"):
        aq.plan(step, params, rows, tokens_per_step=0, **options)
