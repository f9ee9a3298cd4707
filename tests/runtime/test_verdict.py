"""The verdict of `step.check`: what rounding explains is equal, and nothing else is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime.planned import parallel

import aliquot as aq
from aliquot.runtime._check import check_step, compare

ROWS = 64


def adam(state, batch):
    """A first step of Adam in bfloat16, with biases that shift all logits of a head and so have no
    gradient but rounding.
    """

    def loss_fn(params):
        logits = batch["x"].astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
        logits = logits.reshape(-1, 8, 16) + params["shift"].astype(jnp.bfloat16)[:, None]
        logits = logits.astype(jnp.float32)
        picked = jnp.take_along_axis(logits, batch["y"][:, None, None], 2)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["moments"], grads)
    params = jax.tree.map(
        lambda p, g: p - 1e-3 * g / (jnp.sqrt(g * g) + 1e-12), state["params"], grads
    )
    return {"params": params, "moments": moments}, {"loss": loss, "right": batch["y"].sum()}


def arguments():
    random = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(random.normal(size=(32, 8 * 16)) / 6, jnp.float32),
        "shift": jnp.zeros((8,), jnp.float32),
    }
    batch = {
        "x": jnp.asarray(random.normal(size=(ROWS, 32)), jnp.float32),
        "y": jnp.asarray(random.integers(0, 16, ROWS)),
    }
    return {"params": params, "moments": jax.tree.map(jnp.zeros_like, params)}, batch


@pytest.fixture(scope="module")
def planned():
    return parallel(adam, *arguments(), method=aq.Zero2Parallel())


def test_a_first_step_of_adam_that_flips_its_sign_at_no_gradient_is_equal(planned):
    found = planned.check(*arguments())
    assert found.is_equal and found.rounding == "bfloat16"
    flipped = next(leaf for leaf in found.leaves if leaf.path.endswith("params.shift"))
    assert flipped.relative > 0.5 and found.largest > 0.5
    count = len(found.leaves)
    assert str(found).startswith(
        f"equal: all {count} outputs agree with the plain step as closely as bfloat16 allows; the"
        f" largest relative difference is {found.largest:.2e}, at "
    )
    assert str(found).endswith("), where rounding alone changes the plain step by as much")


def test_a_long_sum_in_16_bits_may_differ_by_what_the_plain_step_loses():
    """Ones are added up in bfloat16: 256 and one more are 256, so that sums of parts are larger."""

    def step(state, batch):
        def turn(total, x):
            return total + x, None

        total, _ = jax.lax.scan(turn, jnp.bfloat16(0), batch["x"].astype(jnp.bfloat16))
        return {"w": state["w"] - total.astype(jnp.float32)}

    args = {"w": jnp.zeros(())}, {"x": jnp.ones((2048,), jnp.float32)}
    graph = aq.capture(step, *args)
    assert step(*args)["w"] == -256.0
    for sum_of_parts, is_equal in [(256.0, True), (2048.0, True), (8192.0, False), (np.nan, False)]:
        found = check_step(graph, [jnp.float32(-sum_of_parts)], jax.tree.leaves(args))
        assert found.is_equal == is_equal, str(found)


def test_a_step_that_does_not_exist_in_float32_is_compared_all_the_same():
    def step(state, batch):
        halves = (state["w"] * batch["x"]).astype(jnp.bfloat16)
        bits = jax.lax.bitcast_convert_type(halves, jnp.uint16)
        return {"w": (bits + jnp.arange(8, dtype=jnp.uint16)).astype(jnp.float32)}

    args = {"w": jnp.ones((8,))}, {"x": jnp.arange(1.0, 9.0)}
    graph, (wanted,) = aq.capture(step, *args), jax.tree.leaves(step(*args))
    for factor, is_equal in [(1.0, True), (1.5, False)]:
        assert check_step(graph, [wanted * factor], jax.tree.leaves(args)).is_equal == is_equal


@pytest.mark.parametrize("factor", [0.5, 1.2, np.nan])
@pytest.mark.parametrize("path", ["moments.w", "loss", "right"])
def test_what_rounding_does_not_explain_is_named(planned, path, factor):
    leaves = jax.tree.leaves(arguments())
    graph = aq.capture(adam, *arguments())
    results = list(jax.tree.leaves(adam(*arguments())))
    at = next(k for k, o in enumerate(graph.outputs) if path in o.path.replace("']", ""))
    if path == "right" and np.isnan(factor):
        return
    results[at] = (results[at] * factor).astype(results[at].dtype)
    found = check_step(graph, results, leaves)
    assert not found.is_equal and [leaf.is_equal for leaf in found.leaves].count(False) == 1
    assert str(found).startswith(f"not equal: {graph.outputs[at].path} differs by")
    assert f"(1 of {len(results)} outputs differ by more than rounding)" in str(found)


def test_the_tolerance_is_that_of_the_number_format():
    one = [jnp.ones((4,), jnp.float32)]
    for rounding, within, beyond in [
        ("float32", 5e-6, 5e-5),
        ("bfloat16", 1e-2, 5e-2),
        ("float8_e4m3fn", 0.1, 0.5),
    ]:
        assert compare(["a"], [one[0] * (1 + within)], one, rounding).is_equal
        assert not compare(["a"], [one[0] * (1 + beyond)], one, rounding).is_equal
    whole = [jnp.ones((4,), jnp.int32)]
    assert not compare(["a"], [whole[0] + 1], whole, "bfloat16").is_equal
