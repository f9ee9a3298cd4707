"""Encoder-decoder models as pure functions of plain trees; see `_network.py`."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ._network import AbstractNetwork, Tree, _folded, _Kind, _make, _module, cross_entropy
from ._precision import Precision, abstract
from ._t5 import DecoderBlock, EncoderBlock, Ends
from ._t5_config import T5Config


class T5Network(AbstractNetwork):
    """A model that reads one text and predicts another.

    `layers` is a list with one dict for each layer, those of the encoder first; or, with `scan`,
    `encoder` and `decoder`, each a dict whose arrays have a leading layer dim.
    """

    def __init__(
        self, config: T5Config, precision: Precision, *, recompute: str, scan: bool, attention: str
    ) -> None:
        self.num_layers, self.scan = config.num_layers, scan
        self._ends_def, self._ends_shapes, self._init_ends = _module(
            lambda k: _make(Ends, config, replace(precision, is_fp8=False), k)
        )
        self._encoder, self._decoder = (
            _Kind(
                functools.partial(_make, cls, config, precision, attention=attention),
                recompute=recompute,
                scan=scan,
            )
            for cls in (EncoderBlock, DecoderBlock)
        )

    def shapes(self) -> dict[str, Tree]:
        """Shapes of the parameters; the model keeps nothing else."""
        count = self.num_layers
        layers: Tree
        if self.scan:
            layers = {
                side: jax.tree.map(lambda x: abstract((count, *x.shape), x.dtype), kind.shapes)
                for side, kind in (("encoder", self._encoder), ("decoder", self._decoder))
            }
        else:
            layers = [jax.tree.map(lambda x: x, kind.shapes) for kind in self._sides()]
        return {"params": {**self._ends_shapes, "layers": layers}}

    def init(self, key: jax.Array) -> dict[str, Tree]:
        """Initial parameters. The scanned and the unrolled form draw the same numbers from the same
        key.
        """
        ends_key, layers_key = jax.random.split(key)
        count = self.num_layers
        layers: Tree
        if self.scan:
            layers = {
                side: jax.vmap(kind.init)(_folded(layers_key, first + jnp.arange(count)))
                for side, kind, first in (
                    ("encoder", self._encoder, 0),
                    ("decoder", self._decoder, count),
                )
            }
        else:
            layers = [
                kind.init(jax.random.fold_in(layers_key, i)) for i, kind in enumerate(self._sides())
            ]
        return {"params": {**self._init_ends(ends_key), "layers": layers}}

    def loss(
        self, params: Tree, state: dict[str, Tree], batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array], dict[str, Tree]]:
        """Mean cross-entropy of `targets`, each given `inputs` and the targets before it."""
        ends = nnx.merge(
            self._ends_def, {name: part for name, part in params.items() if name != "layers"}
        )
        layers = params["layers"]
        first, last = (
            (layers["encoder"], layers["decoder"])
            if self.scan
            else (layers[: self.num_layers], layers[self.num_layers :])
        )
        encoded = ends.encoded(
            self._apply(self._encoder, first, ends.embed_inputs(batch["inputs"]))
        )
        x = self._apply(self._decoder, last, ends.embed_targets(batch["targets"]), encoded)
        return cross_entropy(ends.logits(x), batch["targets"]), {}, {}

    def _sides(self) -> list[_Kind]:
        return [self._encoder] * self.num_layers + [self._decoder] * self.num_layers

    def _apply(self, kind: _Kind, layers: Any, x: jax.Array, *others: jax.Array) -> jax.Array:
        """Activations after the last of these layers, all of which also read `others`."""
        if self.scan:
            x, _ = jax.lax.scan(
                lambda x, layer: (kind.apply(layer, x, *others)[0], None), x, layers
            )
            return x
        for number, layer in enumerate(layers):
            x, _ = kind.apply(layer, x, *others, number=number)
        return x
