"""Models with gated experts in every layer: what a layer computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aliquot import InputError
from aliquot.zoo import configure
from aliquot.zoo._mixtral import Experts, unequal_use
from aliquot.zoo._precision import PRECISIONS

TINY = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 24,
    "vocab_size": 64,
    "seq_len": 8,
}


def experts(**sizes):
    config = configure("mixtral-8x7b", **(TINY | sizes))
    return Experts(config, PRECISIONS["float32"], rngs=nnx.Rngs(params=0))


def test_with_places_for_all_both_routings_are_one():
    """And their gradients; some experts are chosen far more often than others."""
    x = jax.random.normal(jax.random.key(1), (2, 8, 16))

    @jax.jit
    def run(module, x):
        def loss(module):
            y, balance = module(x)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), (y, balance)

        return nnx.grad(loss, has_aux=True)(module)

    found = [
        run(experts(routing=routing, capacity_factor=4.0, shared_ffn_size=8), x)
        for routing in ("dropless", "capacity")
    ]
    pairs = zip(*map(jax.tree.leaves, found), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_with_few_places_tokens_are_dropped_only_where_there_is_a_capacity():
    x = jnp.tile(jax.random.normal(jax.random.key(1), (1, 1, 16)), (1, 8, 1))
    dropless, _ = experts()(x)
    limited, _ = experts(routing="capacity", capacity_factor=0.5)(x)
    assert (np.abs(dropless).max(axis=-1) > 0).all()
    # Equal tokens choose the same two experts, each of which has a place for one.
    assert (np.abs(limited).max(axis=-1) > 0).sum() == 1


def test_use_is_one_where_all_experts_are_used_alike():
    alike = jnp.full((1, 8, 4), 0.25)
    chosen = jnp.arange(16).reshape(1, 8, 2) % 4
    assert float(unequal_use(alike, chosen)) == pytest.approx(1.0)
    alone = jnp.tile(jnp.asarray([1.0, 0, 0, 0]), (1, 8, 1))
    assert float(unequal_use(alone, chosen[..., :1] * 0)) == pytest.approx(4.0)


def test_all_faults_of_a_configuration_are_said_at_once():
    with pytest.raises(InputError) as refusal:
        configure("mixtral-8x7b", top_k=9, routing="drop", group_size=3, shared_ffn_size=-1)
    for word in ("top_k=9", "routing='drop'", "group_size=3", "shared_ffn_size=-1"):
        assert word in str(refusal.value)


def test_the_older_family_routes_without_a_capacity_too():
    sizes = {**TINY, "num_experts": 4}
    del sizes["num_kv_heads"]
    x = jax.random.normal(jax.random.key(1), (2, 8, 16))
    from aliquot.zoo._moe import Experts as Older

    results = [
        Older(
            configure("moe-380m", **sizes, routing=routing, capacity_factor=8.0),
            PRECISIONS["float32"],
            rngs=nnx.Rngs(params=0),
        )(x)
        for routing in ("dropless", "capacity")
    ]
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
