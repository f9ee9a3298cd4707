"""Mixtral: Llama with gated experts in every layer; and what its relatives add: shared experts and
many small ones (DeepSeekMoE), normalised queries and keys (Qwen 3), latent attention, dense first
layers and sigmoid gates (DeepSeek-V3, without its choice of experts on few hosts, the bias that
balances their use, and the prediction of several tokens).

References: Jiang et al., "Mixtral of Experts", 2024; Dai et al., "DeepSeekMoE: towards ultimate
expert specialization in mixture-of-experts language models", 2024; DeepSeek-AI,
"DeepSeek-V3 technical report", 2024, section 2.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ..graph import experts
from . import _llama, _moe
from ._fp8 import AMAX, magnitudes, scaled_product
from ._latent import LatentAttention
from ._mixtral_config import MixtralConfig
from ._precision import Precision

_MATRICES = ("gate", "up", "down")


class Experts(nnx.Module):
    """SwiGLU networks, of which each token goes through a few, and shared ones for all tokens."""

    def __init__(self, config: MixtralConfig, precision: Precision, *, rngs: nnx.Rngs) -> None:
        self.config, self.compute = config, precision.compute
        small = 0.02 / (2 * config.num_layers) ** 0.5
        into = (config.num_experts, config.hidden_size, config.ffn_size)
        out = (config.num_experts, config.ffn_size, config.hidden_size)
        router = (config.hidden_size, config.num_experts)
        self.router = _moe.weight(router, 0.02, precision, rngs)
        self.gate = _moe.weight(into, 0.02, precision, rngs)
        self.up = _moe.weight(into, 0.02, precision, rngs)
        self.down = _moe.weight(out, small, precision, rngs)
        self.is_fp8 = precision.is_fp8
        if precision.is_fp8:
            # Leaves of their own, as parameters have the same names in all dtypes.
            for name in _MATRICES:
                for kind, amax in magnitudes(getattr(self, name)[...]).items():
                    setattr(self, f"{kind}_{name}", amax)
        if config.shared_ffn_size:
            self.shared = _llama.FeedForward(
                config.dense, precision, rngs=rngs, size=config.shared_ffn_size
            )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What experts make of the tokens, and the loss for using them unequally."""
        config = self.config
        # The choice is made in float32 or wider: rounding would send tokens to other experts.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        gate = jax.nn.softmax if config.gating == "softmax" else jax.nn.sigmoid
        gates_bse = gate(x.astype(wide) @ self.router[...].astype(wide))
        matrices = [m[...].astype(self.compute) for m in (self.gate, self.up, self.down)]
        weights, chosen = jax.lax.top_k(gates_bse, config.top_k)
        if config.normalized_weights:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        if config.routed_scale != 1:
            weights = weights * config.routed_scale
        if config.routing == "dropless":
            y = experts(
                x,
                chosen,
                weights,
                matrices[:2],
                matrices[2],
                activation=swiglu,
                amax=self._amax() if self.is_fp8 else None,
            )
        else:
            y = self._with_places(x, chosen, weights, *matrices)
        if config.shared_ffn_size:
            y = y + self.shared(x)
        if config.gating != "softmax":
            gates_bse = gates_bse / jnp.sum(gates_bse, axis=-1, keepdims=True)
        return y, unequal_use(gates_bse, chosen)

    def _with_places(
        self,
        x: jax.Array,
        chosen: jax.Array,
        weights: jax.Array,
        gate: jax.Array,
        up: jax.Array,
        down: jax.Array,
    ) -> jax.Array:
        """As in `_moe.py`, by products with masks: with a capacity."""
        groups = (-1, self.config.tokens_of_group)
        x_gsm = x.reshape(*groups, x.shape[-1])
        combine_gsec = _moe.places(
            chosen.reshape(*groups, chosen.shape[-1]),
            weights.reshape(*groups, weights.shape[-1]),
            self.config.num_experts,
            self.config.capacity,
        )
        dispatch_gsec = (combine_gsec > 0).astype(self.compute)
        taken_egcm = jnp.einsum("gsec,gsm->egcm", dispatch_gsec, x_gsm)
        if self.is_fp8:
            of_gate, of_up, of_down = zip(*self._amax(), strict=True)
            inner_egcf = swiglu(
                scaled_product(taken_egcm, gate, *of_gate), scaled_product(taken_egcm, up, *of_up)
            )
            made_egcm = scaled_product(inner_egcf, down, *of_down)
        else:
            inner_egcf = swiglu(
                jnp.einsum("egcm,emf->egcf", taken_egcm, gate),
                jnp.einsum("egcm,emf->egcf", taken_egcm, up),
            )
            made_egcm = jnp.einsum("egcf,efm->egcm", inner_egcf, down)
        y_gsm = jnp.einsum("gsec,egcm->gsm", combine_gsec.astype(self.compute), made_egcm)
        return y_gsm.reshape(x.shape)

    def _amax(self) -> list[list[jax.Array]]:
        """As `aliquot.experts` takes them."""
        return [[getattr(self, f"{kind}_{name}")[...] for name in _MATRICES] for kind in AMAX]


class Block(nnx.Module):
    """One layer: attention, then experts; each reads its normalised input, and its result is added
    to the input.
    """

    def __init__(
        self,
        config: MixtralConfig,
        precision: Precision,
        *,
        attention: str = "plain",
        rngs: nnx.Rngs,
    ) -> None:
        self.norm1 = _llama.norm(config.dense, precision, rngs)
        self.attn = _attention(config, precision, attention, rngs)
        self.norm2 = _llama.norm(config.dense, precision, rngs)
        self.moe = Experts(config, precision, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array | tuple[jax.Array, jax.Array]:
        x = x + self.attn(self.norm1(x).astype(x.dtype))
        y, balance = self.moe(self.norm2(x).astype(x.dtype))
        return (x + y, balance) if self.moe.config.balance_weight else x + y


class DenseBlock(_llama.Block):
    """One of the first layers, with one network in place of experts."""

    def __init__(
        self,
        config: MixtralConfig,
        precision: Precision,
        *,
        attention: str = "plain",
        rngs: nnx.Rngs,
    ) -> None:
        self.norm1 = _llama.norm(config.dense, precision, rngs)
        self.attn = _attention(config, precision, attention, rngs)
        self.norm2 = _llama.norm(config.dense, precision, rngs)
        self.mlp = _llama.FeedForward(
            config.dense, precision, rngs=rngs, size=config.dense_ffn_size
        )


def _attention(
    config: MixtralConfig, precision: Precision, kernel: str, rngs: nnx.Rngs
) -> nnx.Module:
    if config.kv_rank:
        return LatentAttention(config, precision, kernel=kernel, rngs=rngs)
    return _llama.Attention(config.dense, precision, kernel=kernel, rngs=rngs)


class Ends(_llama.Ends):
    """Llama's embedding, last norm and output head."""

    def __init__(self, config: MixtralConfig, precision: Precision, *, rngs: nnx.Rngs) -> None:
        super().__init__(config.dense, precision, rngs=rngs)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """One projection, gated by the SiLU of another."""
    return jax.nn.silu(gate) * up


def unequal_use(gates_bse: jax.Array, chosen_bsk: jax.Array) -> jax.Array:
    """The mean over sequences of `E * sum_e (share of choices that are e) * (mean gate of e)`: one
    if all experts are used equally, up to E if few are.

    Reference: Dai et al. (see above), section 3.3, for each sequence by itself.
    """
    num_experts = gates_bse.shape[-1]
    is_chosen = jax.nn.one_hot(chosen_bsk, num_experts, dtype=gates_bse.dtype)
    share_be = jnp.mean(is_chosen, axis=(1, 2))
    return num_experts * jnp.mean(jnp.sum(share_be * jnp.mean(gates_bse, axis=1), axis=-1))
