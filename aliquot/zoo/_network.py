"""A whole model as pure functions of a plain tree of parameters: shapes, initial values, loss.

All blocks of a model are alike, so one is described, initialised and traced, and the rest repeat it: what costs tens of
seconds for 96 blocks costs the same as for one. The families supply `Ends` and `Block` (`_gpt.py`, `_llama.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import _gpt, _llama
from ._config import ModelConfig
from ._precision import Precision, abstract

_FAMILIES: dict[str, Any] = {"gpt": _gpt, "llama": _llama}


class Network:
    """The functions of one model.

    Parameters are nested dicts: `embed`, `norm`, ... and `layers`, which is a list with one dict for each block, or,
    with `scan`, a single dict whose arrays have a leading layer dim.
    """

    def __init__(self, config: ModelConfig, precision: Precision, *, recompute: str, scan: bool) -> None:
        family = _FAMILIES[config.family]
        self.num_layers, self.scan = config.num_layers, scan
        self._ends_def, self._ends_shapes, self._init_ends = _module(lambda k: _make(family.Ends, config, precision, k))
        self._block_def, self._block_shapes, self._init_block = _module(
            lambda k: _make(family.Block, config, precision, k)
        )
        self._block = _once(self._apply_block, recompute=recompute, scan=scan)

    def shapes(self) -> dict[str, Any]:
        """The tree of parameters as `jax.ShapeDtypeStruct`s; no array is made."""
        if self.scan:
            layers: Any = jax.tree.map(lambda x: abstract((self.num_layers, *x.shape), x.dtype), self._block_shapes)
        else:
            layers = [jax.tree.map(lambda x: x, self._block_shapes) for _ in range(self.num_layers)]
        return {**self._ends_shapes, "layers": layers}

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Initial parameters. The scanned and the unrolled form draw the same numbers from the same key."""
        ends_key, layers_key = jax.random.split(key)
        if self.scan:
            keys = jax.vmap(lambda layer: jax.random.fold_in(layers_key, layer))(jnp.arange(self.num_layers))
            layers: Any = jax.vmap(self._init_block)(keys)
        else:
            layers = [self._init_block(jax.random.fold_in(layers_key, i)) for i in range(self.num_layers)]
        return {**self._init_ends(ends_key), "layers": layers}

    def loss(self, params: dict[str, Any], inputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean cross-entropy in nats of `targets` after `inputs`, both `(B, S)` token ids; at least float32."""
        ends = nnx.merge(self._ends_def, {name: part for name, part in params.items() if name != "layers"})
        x = ends.embed_tokens(inputs)
        if self.scan:
            x, _ = jax.lax.scan(lambda carry, layer: (self._block(layer, carry), None), x, params["layers"])
        else:
            for layer in params["layers"]:
                x = self._block(layer, x)
        return _cross_entropy(ends.logits(x), targets)

    def _apply_block(self, layer: dict[str, Any], x: jax.Array) -> jax.Array:
        y: jax.Array = nnx.merge(self._block_def, layer)(x)
        return y


def _make(cls: Any, config: ModelConfig, precision: Precision, key: jax.Array) -> nnx.Module:
    module: nnx.Module = cls(config, precision, rngs=nnx.Rngs(params=key))
    return module


def _module(make: Callable[[jax.Array], nnx.Module]) -> tuple[Any, Any, Callable[[jax.Array], Any]]:
    """Static definition, parameter shapes, and initialiser of a module, without creating an array."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    definition, state = nnx.split(nnx.eval_shape(make, key))

    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(make(key)))

    return definition, nnx.to_pure_dict(state), jax.jit(init)


def _once(block: Callable[..., jax.Array], *, recompute: str, scan: bool) -> Callable[..., jax.Array]:
    """The block as every layer calls it; unrolled, `jit` makes JAX trace and differentiate it once for all layers."""
    if recompute == "block":
        # A loop already keeps the compiler from merging the recomputation away; unrolled, only barriers do.
        block = jax.checkpoint(block, prevent_cse=not scan)
    return block if scan else jax.jit(block)


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen = jnp.take_along_axis(wide, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(wide, axis=-1) - chosen)
