"""Experts without a capacity are the weighted sum of what each chosen expert makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def drawn(*, num_into=2, top=2, lead=(3, 5), count=4, features=6, inner=8):
    def draw(seed, *shape):
        return 0.3 * jax.random.normal(jax.random.key(seed), shape)

    tokens = draw(0, *lead, features)
    chosen = jax.random.randint(jax.random.key(1), (*lead, top), 0, count)
    weights = jax.nn.softmax(draw(2, *lead, top))
    into = [draw(3 + k, count, features, inner) for k in range(num_into)]
    return tokens, chosen, weights, into, draw(9, count, inner, features)


def one_by_one(tokens, chosen, weights, into, out, activation):
    """What all experts make of each token, of which the chosen ones are taken."""
    inner = activation(*(jnp.einsum("...m,emf->...ef", tokens, matrix) for matrix in into))
    made = jnp.einsum("...ef,efm->...em", inner, out)
    return (jnp.take_along_axis(made, chosen[..., None], -2) * weights[..., None]).sum(-2)


def test_few_more_rows_are_multiplied_than_tokens_have():
    """Not each row by the matrices of all experts, as `ragged_dot` does on CPUs and GPUs."""
    tokens, chosen, weights, into, out = drawn(lead=(512,), count=8, features=32, inner=64)

    def loss(tokens, into, out):
        return aliquot.experts(tokens, chosen, weights, into, out, activation=swiglu).sum()

    def flops(run, *args):
        return jax.jit(run).lower(*args).compile().cost_analysis()["flops"]

    # Of 1,024 rows: 3 products forward, of the gradients 8.
    once = 2 * 1024 * 32 * 64
    assert flops(loss, tokens, into, out) < 1.35 * 3 * once
    assert flops(jax.grad(loss, (0, 1, 2)), tokens, into, out) < 1.35 * 8 * once


@pytest.mark.parametrize(
    ("arrays", "activation"),
    [
        (drawn(), swiglu),
        (drawn(num_into=1, top=1, lead=(7,)), jax.nn.relu),
        # All tokens choose one expert, twice, and others get none.
        (drawn()[:1] + (jnp.full((3, 5, 2), 3),) + drawn()[2:], swiglu),
    ],
    ids=["gated", "ungated", "one-for-all"],
)
@pytest.mark.parametrize("platform", ["here", "tpu"])
def test_result_and_gradients_are_those_of_all_experts_one_by_one(
    platform, arrays, activation, monkeypatch
):
    if platform == "tpu":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, tpu, default: tpu(*args))
        jax.clear_caches()
    tokens, chosen, weights, into, out = arrays

    def loss(run, tokens, weights, into, out):
        y = run(tokens, chosen, weights, into, out, activation=activation)
        return jnp.sum(y * jnp.sin(jnp.arange(y.size).reshape(y.shape))), y

    found, want = (
        jax.jit(jax.grad(loss, argnums=(1, 2, 3, 4), has_aux=True), static_argnums=0)(
            run, tokens, weights, into, out
        )
        for run in (aliquot.experts, one_by_one)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, want)


def test_experts_of_a_vmap_are_those_of_each():
    tokens, chosen, weights, into, out = drawn()
    each = jax.vmap(lambda *of_tokens: aliquot.experts(*of_tokens, into, out, activation=swiglu))(
        tokens, chosen, weights
    )
    whole = aliquot.experts(tokens, chosen, weights, into, out, activation=swiglu)
    np.testing.assert_allclose(each, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("platform", ["here", "tpu"])
@pytest.mark.parametrize("only_expert", [None, 3], ids=["drawn", "one-for-all"])
def test_products_of_8_bit_floats_are_near_and_tell_their_magnitudes(
    only_expert, platform, monkeypatch
):
    """One expert for all needs a second round where each expert has equally many places."""
    if platform == "tpu":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, tpu, default: tpu(*args))
        jax.clear_caches()
    tokens, chosen, weights, into, out = drawn()
    if only_expert is not None:
        chosen = jnp.full_like(chosen, only_expert)
    zero = jnp.zeros(())

    @jax.jit
    def run(amax):
        def loss(tokens, weights, into, out, amax):
            y = aliquot.experts(tokens, chosen, weights, into, out, activation=swiglu, amax=amax)
            return jnp.sum(y * jnp.sin(jnp.arange(y.size).reshape(y.shape))), y

        return jax.grad(loss, (0, 1, 2, 3, 4), has_aux=True)(tokens, weights, into, out, amax)

    of_matrices = [jnp.max(jnp.abs(matrix)) for matrix in (*into, out)]
    # Of a first step nothing is known; the second is scaled by what it saw.
    (*_, (inputs, _, gradients)), _ = run([[zero] * 3, of_matrices, [zero] * 3])
    (*found, seen), y = run([inputs, of_matrices, gradients])
    (*wanted, _), y_wide = run(None)
    for a, b in zip(jax.tree.leaves((found, y)), jax.tree.leaves((wanted, y_wide)), strict=True):
        assert 1e-4 < jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)) < 0.2
    assert inputs[0] == inputs[1] == jnp.max(jnp.abs(tokens)) and seen[1] == [0, 0, 0]
    hidden = swiglu(*(jnp.einsum("...m,emf->...ef", tokens, matrix) for matrix in into))
    taken = jnp.take_along_axis(hidden, chosen[..., None], -2) * weights[..., None]
    np.testing.assert_allclose(seen[0][2], jnp.max(jnp.abs(taken)), rtol=0.1)
    assert seen[2][2] == jnp.max(jnp.abs(jnp.sin(jnp.arange(y.size))))


def test_all_faults_of_shapes_and_dtypes_are_said_at_once():
    tokens, chosen, weights, into, out = drawn()
    with pytest.raises(aliquot.InputError) as refusal:
        aliquot.experts(
            tokens.astype(jnp.bfloat16),
            weights,
            weights[:, :2],
            [into[0], into[1][:, :3]],
            out,
            activation=swiglu,
            amax=[[1.0] * 3] * 2,
        )
    for word in ("float32", "(3, 2, 2)", "into[1]", "bfloat16", "amax has [3, 3]"):
        assert word in str(refusal.value)
