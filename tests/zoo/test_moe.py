"""Which experts a token goes to, and what comes back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aliquot.zoo import configure
from aliquot.zoo._moe import Experts, top2_gating
from aliquot.zoo._precision import PRECISIONS

TINY = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_heads": 2,
    "ffn_size": 12,
    "vocab_size": 32,
    "seq_len": 8,
}


def gates(seed, *shape, sharpness=2.0):
    return jax.nn.softmax(sharpness * jax.random.normal(jax.random.key(seed), shape))


def one_by_one(gates_se, capacity):
    """GShard's algorithm 1 as it is printed, token after token, without its random choice: (S, E,
    C).
    """
    num_tokens, num_experts = gates_se.shape
    taken = np.zeros(num_experts, int)
    combine = np.zeros((num_tokens, num_experts, capacity))
    order = np.argsort(-gates_se, axis=1, kind="stable")
    for rank in (0, 1):
        for token in range(num_tokens):
            best = gates_se[token, order[token, :2]]
            expert = order[token, rank]
            if taken[expert] < capacity:
                combine[token, expert, taken[expert]] = best[rank] / best.sum()
            taken[expert] += 1
    return combine


place = jax.jit(top2_gating, static_argnums=1)


@pytest.mark.parametrize(("capacity", "sharpness"), [(2, 2.0), (3, 10.0), (4, 0.1), (12, 5.0)])
def test_places_are_those_of_the_algorithm(capacity, sharpness):
    g = gates(0, 3, 12, 4, sharpness=sharpness)
    combine, _ = place(g, capacity)
    want = np.stack([one_by_one(np.asarray(group), capacity) for group in g])
    np.testing.assert_allclose(combine, want, rtol=1e-6, atol=1e-7)
    assert ((np.asarray(combine) > 0).sum(axis=1) <= 1).all()


def test_second_experts_wait_for_all_first_ones():
    # Tokens 0 and 1 want expert 0 and then 1, token 2 wants 1 first: with two places only one
    # second choice fits.
    g = jnp.asarray([[[0.6, 0.3, 0.1], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1]]])
    combine, _ = place(g, 2)
    assert (np.asarray(combine[0, :, 1]) > 0).tolist() == [
        [False, True],
        [False, False],
        [True, False],
    ]


def test_balance_is_one_where_all_experts_are_used_alike_and_their_number_where_one_is():
    alike = jnp.eye(4)[jnp.arange(8) % 4][None] * 0.96 + 0.01
    assert float(place(alike, 8)[1]) == pytest.approx(1.0)
    alone = jnp.tile(jnp.asarray([1.0, 0.0, 0.0, 0.0]), (1, 8, 1))
    assert float(place(alone, 8)[1]) == pytest.approx(4.0)


def experts(**sizes):
    config = configure("moe-380m", **(TINY | {"num_experts": 4} | sizes))
    return Experts(config, PRECISIONS["float32"], rngs=nnx.Rngs(params=0))


run = jax.jit(lambda module, x: module(x))


def test_with_places_for_all_a_token_is_the_weighted_sum_of_two_experts():
    module = experts(capacity_factor=4.0)
    x = jax.random.normal(jax.random.key(1), (2, 8, 8))
    tokens, gate, up, down = (
        np.asarray(array) for array in (x, module.gate[...], module.up[...], module.down[...])
    )
    scores = np.exp(tokens @ gate)
    scores /= scores.sum(-1, keepdims=True)
    all_of_them = np.einsum(
        "bsef,efm->bsem", np.maximum(np.einsum("bsm,emf->bsef", tokens, up), 0), down
    )
    best = np.sort(scores, axis=-1)[..., -2:-1]
    weights = np.where(scores >= best, scores, 0)
    want = np.einsum("bse,bsem->bsm", weights / weights.sum(-1, keepdims=True), all_of_them)
    np.testing.assert_allclose(run(module, x)[0], want, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("group_size", [8, 4])
def test_a_sequence_depends_on_no_other(group_size):
    module = experts(group_size=group_size, capacity_factor=0.5)
    x = jax.random.normal(jax.random.key(1), (4, 8, 8))
    together, balance = run(module, x)
    parts = [run(module, x[i : i + 1]) for i in range(4)]
    np.testing.assert_allclose(
        together, np.concatenate([y for y, _ in parts]), rtol=1e-5, atol=1e-7
    )
    assert float(balance) == pytest.approx(np.mean([float(b) for _, b in parts]))
    # Few places: some tokens find none, and then nothing is added to them.
    assert (np.abs(together).max(axis=-1) == 0).any()


def test_groups_of_several_sequences_hold_them_one_after_the_other():
    x = jax.random.normal(jax.random.key(1), (4, 8, 8))
    together, balance = run(experts(group_size=16, capacity_factor=0.5), x)
    # The same tokens as two sequences of twice the length.
    longer = experts(seq_len=16, group_size=16, capacity_factor=0.5)
    want, want_balance = run(longer, x.reshape(2, 16, 8))
    np.testing.assert_allclose(together.reshape(2, 16, 8), want, rtol=1e-6)
    assert float(balance) == pytest.approx(float(want_balance))


def test_the_choice_is_made_in_float32():
    config = configure("moe-380m", **TINY, num_experts=4)
    module = Experts(config, PRECISIONS["bf16"], rngs=nnx.Rngs(params=0))
    jaxpr = jax.make_jaxpr(lambda x: module(x))(jnp.zeros((1, 8, 8), jnp.bfloat16))
    products = [
        eqn.outvars[0].aval.dtype for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"
    ]
    assert products == [jnp.float32] + [jnp.bfloat16] * 4
