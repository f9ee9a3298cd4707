"""MoE: a GPT in which every other layer has many feed-forward networks, the experts; each token
goes through two of them.

Tokens are dispatched to their experts, and results combined, by products with masks, so that all
shapes are static and experts may be on different devices. Shape suffixes: G groups of tokens, S
tokens of a group, E experts, C places that an expert has for a group, M elements of a token, F
elements inside an expert.

Reference: Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic
Sharding", 2020, section 2 and algorithm 1; the order of layers is that of the benchmark suite of
Alpa (Zheng et al., OSDI 2022).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ..graph import experts
from . import _gpt
from ._config import MoEConfig
from ._precision import Precision


class Experts(nnx.Module):
    """Feed-forward networks, of which each token goes through two. Also returns the loss for using
    them unequally.
    """

    def __init__(self, config: MoEConfig, precision: Precision, *, rngs: nnx.Rngs) -> None:
        self.group_size, self.capacity, self.compute = (
            config.group_size,
            config.capacity,
            precision.compute,
        )
        self.routing = config.routing
        # Projections into the residual stream start the smaller, the deeper the model is, so that
        # the stream keeps its variance.
        small = 0.02 / (2 * config.num_layers) ** 0.5
        inside = (config.num_experts, config.hidden_size, config.ffn_size)
        self.gate = weight((config.hidden_size, config.num_experts), 0.02, precision, rngs)
        self.up = weight(inside, 0.02, precision, rngs)
        self.down = weight((inside[0], inside[2], inside[1]), small, precision, rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_gsm = x.reshape(-1, self.group_size, x.shape[-1])
        # The choice is made in float32 or wider: rounding would send tokens to other experts.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        gates_gse = jax.nn.softmax(
            jnp.einsum("gsm,me->gse", x_gsm.astype(wide), self.gate[...].astype(wide))
        )
        if self.routing == "dropless":
            weights, chosen = jax.lax.top_k(gates_gse, 2)
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
            up, down = (m[...].astype(self.compute) for m in (self.up, self.down))
            y_gsm = experts(x_gsm, chosen, weights, [up], down, activation=jax.nn.relu)
            return y_gsm.reshape(x.shape), unequal_use(gates_gse, chosen[..., 0])
        combine_gsec, balance = top2_gating(gates_gse, self.capacity)
        dispatch_gsec = (combine_gsec > 0).astype(self.compute)
        taken_egcm = jnp.einsum("gsec,gsm->egcm", dispatch_gsec, x_gsm)
        inner_egcf = jax.nn.relu(
            jnp.einsum("egcm,emf->egcf", taken_egcm, self.up[...].astype(self.compute))
        )
        made_egcm = jnp.einsum("egcf,efm->egcm", inner_egcf, self.down[...].astype(self.compute))
        y_gsm = jnp.einsum("gsec,egcm->gsm", combine_gsec.astype(self.compute), made_egcm)
        return y_gsm.reshape(x.shape), balance


class ExpertBlock(nnx.Module):
    """One layer: attention, then experts; each reads its normalised input, and its result is added
    to the input.
    """

    def __init__(
        self, config: MoEConfig, precision: Precision, *, attention: str = "plain", rngs: nnx.Rngs
    ) -> None:
        self.norm1 = _gpt.norm(config.dense, precision, rngs)
        self.attn = _gpt.Attention(config.dense, precision, kernel=attention, rngs=rngs)
        self.norm2 = _gpt.norm(config.dense, precision, rngs)
        self.moe = Experts(config, precision, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + self.attn(self.norm1(x).astype(x.dtype))
        y, balance = self.moe(self.norm2(x).astype(x.dtype))
        return x + y, balance


class DenseBlock(_gpt.Block):
    """GPT's layer, for the layers without experts."""

    def __init__(
        self, config: MoEConfig, precision: Precision, *, attention: str = "plain", rngs: nnx.Rngs
    ) -> None:
        super().__init__(config.dense, precision, attention=attention, rngs=rngs)


class Ends(_gpt.Ends):
    """GPT's embeddings, last norm and output head."""

    def __init__(self, config: MoEConfig, precision: Precision, *, rngs: nnx.Rngs) -> None:
        super().__init__(config.dense, precision, rngs=rngs)


def top2_gating(gates_gse: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Weight of each token at each place of each expert, `(G, S, E, C)`, and the loss for
    imbalance.

    The weights of a token's best and second-best expert sum to one. First all tokens take places of
    their best experts, in order, then places of their second-best. A token that finds no place is
    dropped there, and its other weight does not change. Unlike in the reference, the second-best
    expert is always used, so nothing is random.

    The loss is the mean over groups of `E * sum_e (share of tokens whose best is e) * (mean gate of
    e)`: one if all experts are used equally, E if only one is used.

    Reference: GShard, algorithm 1, whose loss is this one divided by `E ** 2`.
    """
    num_experts = gates_gse.shape[-1]
    first_gse = jax.nn.one_hot(jnp.argmax(gates_gse, axis=-1), num_experts, dtype=jnp.int32)
    others_gse = jnp.where(first_gse > 0, -1.0, gates_gse)
    second_gse = jax.nn.one_hot(jnp.argmax(others_gse, axis=-1), num_experts, dtype=jnp.int32)

    balance = _unequal(first_gse, gates_gse)

    weight1_gs = jnp.sum(gates_gse * first_gse, axis=-1)
    weight2_gs = jnp.sum(gates_gse * second_gse, axis=-1)
    total_gs = weight1_gs + weight2_gs
    before1_gse = jnp.cumsum(first_gse, axis=1) - first_gse
    before2_gse = (
        jnp.cumsum(second_gse, axis=1) - second_gse + jnp.sum(first_gse, axis=1, keepdims=True)
    )
    combine_gsec = _placed(first_gse, before1_gse, weight1_gs / total_gs, capacity)
    return combine_gsec + _placed(second_gse, before2_gse, weight2_gs / total_gs, capacity), balance


def _placed(
    chosen_gse: jax.Array, before_gse: jax.Array, weight_gs: jax.Array, capacity: int
) -> jax.Array:
    """Each token's weight at its place in its chosen expert, the one after `before_gse` earlier
    tokens; zeros if the expert has no place left.
    """
    place_gs = jnp.sum(before_gse * chosen_gse, axis=-1)
    # For places beyond the last one, `one_hot` gives zeros.
    place_gsc = jax.nn.one_hot(place_gs, capacity, dtype=weight_gs.dtype)
    weight_gse = weight_gs[..., None] * chosen_gse.astype(weight_gs.dtype)
    return weight_gse[..., None] * place_gsc[:, :, None, :]


def unequal_use(gates_gse: jax.Array, best_gs: jax.Array) -> jax.Array:
    """The loss for imbalance of `top2_gating`, from each token's best expert."""
    return _unequal(jax.nn.one_hot(best_gs, gates_gse.shape[-1], dtype=jnp.int32), gates_gse)


def _unequal(first_gse: jax.Array, gates_gse: jax.Array) -> jax.Array:
    share_ge = jnp.mean(first_gse.astype(gates_gse.dtype), axis=1)
    mean_ge = jnp.mean(gates_gse, axis=1)
    return gates_gse.shape[-1] * jnp.mean(jnp.sum(share_ge * mean_ge, axis=-1))


def places(
    chosen_gsk: jax.Array, weights_gsk: jax.Array, num_experts: int, capacity: int
) -> jax.Array:
    """Weight of each token at each place of each expert, `(G, S, E, C)`, for any number of choices.

    First all tokens take places of their first choices, in order, then of their second ones, and so
    on. A token that finds no place is dropped there.
    """
    combine_gsec, earlier_ge = jnp.zeros(()), jnp.zeros((), jnp.int32)
    for k in range(chosen_gsk.shape[-1]):
        one_gse = jax.nn.one_hot(chosen_gsk[..., k], num_experts, dtype=jnp.int32)
        before_gse = jnp.cumsum(one_gse, axis=1) - one_gse + earlier_ge
        combine_gsec = combine_gsec + _placed(one_gse, before_gse, weights_gsk[..., k], capacity)
        earlier_ge = earlier_ge + jnp.sum(one_gse, axis=1, keepdims=True)
    return combine_gsec


def weight(
    shape: tuple[int, ...], scale: float, precision: Precision, rngs: nnx.Rngs
) -> nnx.Param[jax.Array]:
    """A parameter of normal random numbers of a scale."""
    return nnx.Param(nnx.initializers.normal(scale)(rngs.params(), shape, precision.params))
