"""Models of images as pure functions of plain trees; see `_network.py`.

Bottlenecks differ in shape from stage to stage, so each shape is described and traced once. Besides
parameters the state has `batch_stats`, the running averages of BatchNorm, in a tree like that of
the parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from ._image_config import WideResNetConfig
from ._network import AbstractNetwork, Tree, _once, cross_entropy
from ._precision import Precision
from ._wide_resnet import Bottleneck, Head, Stem


class ImageNetwork(AbstractNetwork):
    """A classifier of images.

    The trees of parameters and of averages are dicts of `stem`, `layers`, a list with one dict for
    each bottleneck, and `head`, which has no averages.
    """

    def __init__(self, config: WideResNetConfig, precision: Precision, *, recompute: str) -> None:
        shapes = list(config.bottlenecks())
        networks = {
            shape: Part(functools.partial(Bottleneck, shape, precision), recompute=recompute)
            for shape in dict.fromkeys(shapes)
        }
        self._stem = Part(functools.partial(Stem, config, precision), recompute="none")
        self._layers = [networks[shape] for shape in shapes]
        self._head = Part(
            functools.partial(Head, shapes[-1].channels_out, config, precision), recompute="none"
        )

    def shapes(self) -> dict[str, Tree]:
        """Shapes of parameters and running averages."""
        return self._trees(
            self._stem.shapes, [part.shapes for part in self._layers], self._head.shapes
        )

    def init(self, key: jax.Array) -> dict[str, Tree]:
        """Initial parameters and running averages."""
        stem_key, layers_key, head_key = jax.random.split(key, 3)
        layers = [
            part.init(jax.random.fold_in(layers_key, i)) for i, part in enumerate(self._layers)
        ]
        return self._trees(self._stem.init(stem_key), layers, self._head.init(head_key))

    def loss(
        self, params: Tree, state: dict[str, Tree], batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array], dict[str, Tree]]:
        """Mean cross-entropy of `labels`; the running averages move a tenth of the way to the
        averages of this batch.
        """
        averages = state["batch_stats"]
        x, stem = self._stem.apply(params["stem"], averages["stem"], batch["images"])
        layers = []
        for part, layer_params, average in zip(
            self._layers, params["layers"], averages["layers"], strict=True
        ):
            x, moved = part.apply(layer_params, average, x)
            layers.append(moved)
        logits, _ = self._head.apply(params["head"], {}, x)
        return (
            cross_entropy(logits, batch["labels"]),
            {},
            {"batch_stats": {"stem": stem, "layers": layers}},
        )

    @staticmethod
    def _trees(
        stem: tuple[Tree, Tree], layers: list[tuple[Tree, Tree]], head: tuple[Tree, Tree]
    ) -> dict[str, Tree]:
        return {
            "params": {
                "stem": stem[0],
                "layers": [layer_params for layer_params, _ in layers],
                "head": head[0],
            },
            "batch_stats": {"stem": stem[1], "layers": [average for _, average in layers]},
        }


class Part:
    """One module: shapes and initial values of its parameters and averages, and its function, which
    also returns new averages.
    """

    def __init__(self, make: Callable[..., nnx.Module], *, recompute: str) -> None:
        key = jax.eval_shape(lambda: jax.random.key(0))
        self._make = make
        self._definition, self._shapes = _split(
            nnx.eval_shape(lambda k: make(rngs=nnx.Rngs(params=k)), key)
        )
        self.init = jax.jit(self._init)
        self.apply = _once(self._apply, recompute=recompute, scan=False)

    @property
    def shapes(self) -> tuple[Tree, Tree]:
        """Shapes of parameters and averages: new trees at each call, because each layer has its
        own.
        """
        params, averages = (jax.tree.map(lambda x: x, tree) for tree in self._shapes)
        return params, averages

    def _init(self, key: jax.Array) -> tuple[Tree, Tree]:
        return _split(self._make(rngs=nnx.Rngs(params=key)))[1]

    def _apply(self, params: Tree, averages: Tree, *inputs: jax.Array) -> tuple[Any, Any]:
        module: Any = nnx.merge(self._definition, params, averages)
        y = module(*inputs)
        return y, nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))


def _split(module: Any) -> tuple[Any, tuple[Tree, Tree]]:
    """A module's static definition, and its parameters and averages."""
    parts: Any = nnx.split(module, nnx.Param, nnx.BatchStat)
    definition, params, averages = parts
    return definition, (nnx.to_pure_dict(params), nnx.to_pure_dict(averages))
