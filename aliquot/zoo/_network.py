"""Models as pure functions of plain trees, which give shapes, initial values and the loss: the
interface of all models, and the models of text.

All layers of a kind are alike, so only one is described, initialised and traced, and the others
reuse it: otherwise this would take tens of seconds for 96 layers. The families define the layers,
and the parts before and after them (`_gpt.py`, `_bert.py`, `_llama.py`, `_mixtral.py`, `_moe.py`);
`_t5_network.py` has encoder-decoder models, `_image_network.py` the models of images.
"""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..core import recompute_parts
from . import _bert, _gpt, _llama, _mixtral, _moe
from ._config import AbstractTextConfig, MoEConfig
from ._mixtral_config import MixtralConfig
from ._precision import Precision, abstract
from ._recompute import recomputed

Tree = Any

# For each family, the parts before and after the layers, and the kinds of layers in the order in
# which they alternate.
_FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt": (_gpt.Ends, {"block": _gpt.Block}),
    "bert": (_bert.Ends, {"block": _bert.Block}),
    "llama": (_llama.Ends, {"block": _llama.Block}),
    "mixtral": (_mixtral.Ends, {"block": _mixtral.Block}),
    "moe": (_moe.Ends, {"experts": _moe.ExpertBlock, "dense": _moe.DenseBlock}),
}


class AbstractNetwork(abc.ABC):
    """The functions of one model.

    The model's part of a training state is a dict: `params`, which are trained, and whatever else
    the model keeps from step to step. Each is a nested dict of the parts before and after the
    layers, and `layers`.
    """

    @abc.abstractmethod
    def shapes(self) -> dict[str, Tree]:
        """The model's part of a state as `jax.ShapeDtypeStruct`s; no array is made."""

    @abc.abstractmethod
    def init(self, key: jax.Array) -> dict[str, Tree]:
        """Initial values of the model's part of a state."""

    @abc.abstractmethod
    def loss(
        self, params: Tree, state: dict[str, Tree], batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array], dict[str, Tree]]:
        """The loss in nats, at least float32; other figures to report; and new values of what the
        model keeps besides parameters.
        """


class Network(AbstractNetwork):
    """A model of text.

    `layers` is a list with one dict for each layer, or, with `scan`, a dict whose arrays have a
    leading layer dim: one such dict, or one for each kind of layer. If the first layers are of
    another kind, the scanned form is a list of these, `first`, and a dict for the `rest`.
    """

    def __init__(
        self,
        config: AbstractTextConfig,
        precision: Precision,
        *,
        recompute: str,
        scan: bool,
        attention: str,
    ) -> None:
        ends, kinds = _FAMILIES[config.family]
        self._cross_entropy = masked_cross_entropy if config.family == "bert" else cross_entropy
        self.num_layers, self.scan = config.num_layers, scan
        self.balance_weight = 0.0
        if isinstance(config, MoEConfig | MixtralConfig):
            self.balance_weight = config.balance_weight
        self._ends_def, self._ends_shapes, self._init_ends = _module(
            lambda k: _make(ends, config, replace(precision, is_fp8=False), k)
        )

        def made(cls: Any, *, scan: bool) -> _Kind:
            make = functools.partial(_make, cls, config, precision, attention=attention)
            return _Kind(make, recompute=recompute, scan=scan)

        self._kinds = [made(cls, scan=scan) for cls in kinds.values()]
        self._names = list(kinds)
        self._first: list[_Kind] = []
        if isinstance(config, MixtralConfig) and config.num_dense_layers:
            self._first = [made(_mixtral.DenseBlock, scan=False)] * config.num_dense_layers

    def shapes(self) -> dict[str, Tree]:
        """Shapes of the parameters; a model of text keeps nothing else."""
        if self.scan:
            count = self._num_turns
            whole = [kind.shapes for kind in self._kinds]
            stacks = jax.tree.map(lambda x: abstract((count, *x.shape), x.dtype), whole)
            layers = self._stacked(stacks)
            if self._first:
                first = [jax.tree.map(lambda x: x, kind.shapes) for kind in self._first]
                layers = {"first": first, "rest": layers}
        else:
            layers = [jax.tree.map(lambda x: x, kind.shapes) for kind in self._turns()]
        return {"params": {**self._ends_shapes, "layers": layers}}

    def init(self, key: jax.Array) -> dict[str, Tree]:
        """Initial parameters. The scanned and the unrolled form draw the same numbers from the same
        key.
        """
        ends_key, layers_key = jax.random.split(key)

        def one_by_one(kinds: Iterable[_Kind]) -> list[Tree]:
            return [kind.init(jax.random.fold_in(layers_key, i)) for i, kind in enumerate(kinds)]

        if self.scan:
            step, count = len(self._kinds), len(self._first)
            stacks = []
            for first, kind in enumerate(self._kinds):
                numbers = jnp.arange(count + first, self.num_layers, step)
                stacks.append(jax.vmap(kind.init)(_folded(layers_key, numbers)))
            layers = self._stacked(stacks)
            if self._first:
                layers = {"first": one_by_one(self._first), "rest": layers}
        else:
            layers = one_by_one(self._turns())
        return {"params": {**self._init_ends(ends_key), "layers": layers}}

    def loss(
        self, params: Tree, state: dict[str, Tree], batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array], dict[str, Tree]]:
        """Mean cross-entropy of `targets` given `inputs`, plus, with experts, a loss for using them
        unequally.
        """
        ends = self._ends(params)
        x, balance = self.apply_layers(params["layers"], ends.embed_tokens(batch["inputs"]))
        loss = self._cross_entropy(ends.logits(x), batch["targets"])
        if not balance:
            return loss, {}, {}
        mean = sum(balance[1:], start=balance[0]) / self._num_turns
        return loss + self.balance_weight * mean, {"balance_loss": mean}, {}

    def forward(self, params: Tree, tokens: jax.Array) -> jax.Array:
        """Logits `(B, S, vocab_size)` of the token behind each."""
        ends = self._ends(params)
        x, _ = self.apply_layers(params["layers"], ends.embed_tokens(tokens))
        logits: jax.Array = ends.logits(x)
        return logits

    def prefill(
        self, params: Tree, cache: Tree, tokens: jax.Array, length: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """The cache with the first `length` tokens of each sequence, and logits `(B, vocab_size)`
        of the token behind these. What follows them in `tokens` does not count.
        """
        ends = self._ends(params)
        layers, x = self._through("prefill", params, cache, ends.embed_tokens(tokens))
        place = jax.lax.broadcasted_iota(jnp.int32, x.shape[:2], 1)
        last = jnp.where((place == length[:, None] - 1)[..., None], x, 0).sum(1)
        return {"layers": layers}, ends.logits(last)

    def decode(
        self, params: Tree, cache: Tree, token: jax.Array, position: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """The cache with one more token of each sequence, at its position, and logits
        `(B, vocab_size)` of the next.
        """
        ends = self._ends(params)
        x = ends.embed_token(token, position)
        layers, x = self._through("decode", params, cache, x, position)
        return {"layers": layers}, ends.logits(x)

    def _through(
        self, what: str, params: Tree, cache: Tree, x: jax.Array, *inputs: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """The caches of all layers, and the activations behind the last."""
        (kind,) = self._kinds
        run = kind.method(what)
        if self.scan:

            def turn(x: jax.Array, each: tuple[Tree, Tree]) -> tuple[jax.Array, Tree]:
                y: tuple[jax.Array, Tree] = run(each[0], x, each[1], *inputs)
                return y

            x, layers = jax.lax.scan(turn, x, (params["layers"], cache["layers"]))
            return layers, x
        caches = []
        for layer, own in zip(params["layers"], cache["layers"], strict=True):
            x, own = run(layer, x, own, *inputs)
            caches.append(own)
        return caches, x

    def _ends(self, params: Tree) -> Any:
        return nnx.merge(
            self._ends_def, {name: part for name, part in params.items() if name != "layers"}
        )

    def apply_layers(self, layers: Tree, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Activations after the last layer, and the figures that layers of experts report."""
        reports: list[jax.Array] = []
        if not self.scan:
            for number, (kind, layer) in enumerate(zip(self._turns(), layers, strict=True)):
                x, report = kind.apply(layer, x, number=number)
                reports += report
            return x, reports

        def turn(x: jax.Array, layer: Tree) -> tuple[jax.Array, list[jax.Array]]:
            reports: list[jax.Array] = []
            for kind, one in zip(self._kinds, self._unstacked(layer), strict=True):
                x, report = kind.apply(one, x)
                reports += report
            return x, reports

        if self._first:
            for first in layers["first"]:
                x, _ = self._first[0].apply(first, x)
            layers = layers["rest"]
        x, stacked = jax.lax.scan(turn, x, layers)
        return x, [report.sum() for report in stacked]

    @property
    def _num_turns(self) -> int:
        """How often the kinds of layers alternate behind the first layers."""
        return (self.num_layers - len(self._first)) // len(self._kinds)

    def _turns(self) -> Iterator[_Kind]:
        kinds = itertools.chain(self._first, itertools.cycle(self._kinds))
        return itertools.islice(kinds, self.num_layers)

    def _stacked(self, stacks: list[Tree]) -> Tree:
        return stacks[0] if len(stacks) == 1 else dict(zip(self._names, stacks, strict=True))

    def _unstacked(self, layers: Tree) -> list[Tree]:
        return [layers] if len(self._kinds) == 1 else [layers[name] for name in self._names]


class LayersAlone(AbstractNetwork):
    """The layers of a model of text, without embedding and head: they map hidden states to hidden
    states, and the loss is the mean of the squared differences from others.
    """

    def __init__(self, whole: Network) -> None:
        self._whole = whole

    def shapes(self) -> dict[str, Tree]:
        return {"params": {"layers": self._whole.shapes()["params"]["layers"]}}

    def init(self, key: jax.Array) -> dict[str, Tree]:
        return {"params": {"layers": self._whole.init(key)["params"]["layers"]}}

    def loss(
        self, params: Tree, state: dict[str, Tree], batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array], dict[str, Tree]]:
        """The loss, to which nothing is added for experts that are used unequally."""
        x, _ = self._whole.apply_layers(params["layers"], batch["inputs"])
        return jnp.mean(jnp.square(x - batch["targets"]).astype(jnp.float32)), {}, {}


class _Kind:
    """One kind of layer: shapes of its parameters, their initial values, and the function
    itself.
    """

    def __init__(
        self, make: Callable[[jax.Array], nnx.Module], *, recompute: str, scan: bool
    ) -> None:
        self._definition, self.shapes, self.init = _module(make)
        self._scan = scan
        self._every = recompute_parts(recompute)[1] or 1
        self._applied = _once(self._block, recompute=recompute, scan=scan)
        self._kept = _once(self._block, recompute="none", scan=scan)

    def apply(
        self, layer: Tree, *inputs: jax.Array, number: int = 0
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Results of the layer with this number, of which every n-th recomputes."""
        run = self._kept if number % self._every else self._applied
        results: tuple[jax.Array, list[jax.Array]] = run(layer, *inputs)
        return results

    def method(self, name: str) -> Callable[..., Any]:
        """A method of the layer as a function of its parameters and arguments."""

        def run(layer: Tree, *inputs: Any) -> Any:
            return getattr(nnx.merge(self._definition, layer), name)(*inputs)

        run.__name__ = name
        return _once(run, recompute="none", scan=self._scan)

    def _block(self, layer: Tree, *inputs: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        outputs = nnx.merge(self._definition, layer)(*inputs)
        return (outputs[0], [outputs[1]]) if isinstance(outputs, tuple) else (outputs, [])


def _make(
    cls: Any, config: Any, precision: Precision, key: jax.Array, **settings: str
) -> nnx.Module:
    module: nnx.Module = cls(config, precision, **settings, rngs=nnx.Rngs(params=key))
    return module


def _module(make: Callable[[jax.Array], nnx.Module]) -> tuple[Any, Any, Callable[[jax.Array], Any]]:
    """Static definition, parameter shapes, and initialiser of a module, without creating an
    array.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    definition, state = nnx.split(nnx.eval_shape(make, key))

    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(make(key)))

    return definition, nnx.to_pure_dict(state), jax.jit(init)


def _once(block: Callable[..., Any], *, recompute: str, scan: bool) -> Callable[..., Any]:
    """The function of a block as every layer calls it. If layers are unrolled, `jit` makes JAX
    trace and differentiate it once for all of them.
    """
    # Without a loop, only barriers keep the compiler from merging the recomputation with the
    # forward pass.
    block = recomputed(block, recompute, prevent_cse=not scan)
    return block if scan else jax.jit(block)


def _folded(key: jax.Array, numbers: jax.Array) -> jax.Array:
    keys: jax.Array = jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)
    return keys


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean over everything before the last dim of `logits`, whose indices the targets are; at least
    float32.
    """
    return jnp.mean(_cross_entropies(logits, targets))


def masked_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy over the targets that are not negative; zero if all are negative."""
    is_asked = targets >= 0
    losses = jnp.where(is_asked, _cross_entropies(logits, jnp.maximum(targets, 0)), 0)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(is_asked, dtype=losses.dtype), 1)


def _cross_entropies(logits: jax.Array, targets: jax.Array) -> jax.Array:
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen = jnp.take_along_axis(wide, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(wide, axis=-1) - chosen
