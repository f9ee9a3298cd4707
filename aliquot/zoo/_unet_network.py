"""U-Nets as pure functions of plain trees; see `_network.py`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ._image_network import Part
from ._network import AbstractNetwork, Tree
from ._precision import Precision
from ._unet import Head, Layer, Stem
from ._unet_config import UNetConfig


class UNetNetwork(AbstractNetwork):
    """A model that predicts what noise is in images.

    The tree of parameters is a dict of `stem`, `layers`, a list with one dict for each layer, and
    `head`.
    """

    def __init__(self, config: UNetConfig, precision: Precision, *, recompute: str) -> None:
        self._configs = list(config.layers())
        made = {
            layer: Part(functools.partial(Layer, layer, config, precision), recompute=recompute)
            for layer in dict.fromkeys(self._configs)
        }
        self._stem = Part(functools.partial(Stem, config, precision), recompute="none")
        self._layers = [made[layer] for layer in self._configs]
        self._head = Part(functools.partial(Head, config, precision), recompute="none")

    def shapes(self) -> dict[str, Tree]:
        """Shapes of the parameters; the model keeps nothing else."""
        layers = [part.shapes[0] for part in self._layers]
        ends = {"stem": self._stem.shapes[0], "head": self._head.shapes[0]}
        return {"params": {**ends, "layers": layers}}

    def init(self, key: jax.Array) -> dict[str, Tree]:
        """Initial parameters."""
        stem_key, layers_key, head_key = jax.random.split(key, 3)
        layers = [
            part.init(jax.random.fold_in(layers_key, i))[0] for i, part in enumerate(self._layers)
        ]
        ends = {"stem": self._stem.init(stem_key)[0], "head": self._head.init(head_key)[0]}
        return {"params": {**ends, "layers": layers}}

    def loss(
        self, params: Tree, state: dict[str, Tree], batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array], dict[str, Tree]]:
        """Half the mean of the squared differences from `targets`, at least float32."""
        (x, time), _ = self._stem.apply(params["stem"], {}, batch["images"], batch["times"])
        kept = [x]
        for part, layer, layer_params in zip(
            self._layers, self._configs, params["layers"], strict=True
        ):
            skip = [kept.pop()] if layer.channels_skip else []
            result, _ = part.apply(layer_params, {}, x, time, batch["context"], *skip)
            if layer.is_kept:
                x, own = result
                kept.append(own)
            else:
                x = result
        found, _ = self._head.apply(params["head"], {}, x)
        wide = jnp.promote_types(found.dtype, jnp.float32)
        missing = found.astype(wide) - batch["targets"].astype(wide)
        return jnp.mean(jnp.square(missing)) / 2, {}, {}
