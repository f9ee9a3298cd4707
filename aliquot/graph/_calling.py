"""How a user calls the step: arguments to flat arrays, flat results back to what the step returns.

Array leaves are traced; everything else in the arguments (Python numbers, functions, flags) is static and belongs to the
identity of the call. NNX objects that the step changes in place come back through `finish`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    tree_flatten_with_path,
    tree_unflatten,
)

from ..core import CaptureError
from . import _nnx


def is_array(leaf: Any) -> bool:
    """Whether a leaf is traced: an array, a NumPy scalar or a shape."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def format_path(keys: Sequence[Any]) -> str:
    """A pytree path as a user writes it: `.params.layers[3].attn.q`."""
    parts = []
    for key in keys:
        match key:
            case DictKey(key=k) if isinstance(k, str) and k.isidentifier():
                parts.append(f".{k}")
            case DictKey(key=k):
                parts.append(f"[{k!r}]")
            case SequenceKey(idx=i) | FlattenedIndexKey(key=i):
                parts.append(f"[{i}]")
            case GetAttrKey(name=name):
                parts.append(f".{name}")
            case _:
                parts.append(f"[{key}]")
    # NNX variables keep their array one level further down; that level means nothing to a reader.
    return "".join(parts).removesuffix(".value")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatCall:
    """One call, flat: the arrays with their paths, and all that is not an array."""

    paths: tuple[str, ...]
    leaves: tuple[Any, ...]
    statics: tuple[tuple[int, Any], ...]
    trees: tuple[Any, ...]
    definition: Any

    def skeleton(self) -> tuple[Any, ...]:
        """What two calls must share to run the same program."""
        return (self.paths, self.statics, self.trees, self.definition)


@dataclass(slots=True, kw_only=True)
class Calling:
    """The calling convention of one captured step.

    Attributes:
        fn: the user's function.
        num_positional: how many arguments are passed by position.
        names: argument names in call order.
        modules: names of the arguments that are, or hold, NNX objects.
        call: the example call.
        out_tree, out_statics: structure of the result, filled when the step is traced.
        num_results: how many flat outputs are the user's result; the rest is the state of `modules`.
        state_tree: structure of that state.
    """

    fn: Callable[..., Any]
    num_positional: int
    names: tuple[str, ...]
    modules: tuple[str, ...]
    call: FlatCall
    out_paths: tuple[str, ...] = ()
    out_tree: Any = None
    out_statics: tuple[tuple[int, Any], ...] = ()
    num_results: int = 0
    state_tree: Any = None
    _definition: Any = field(default=None)

    def flatten(self, args: Sequence[Any], kwargs: dict[str, Any]) -> FlatCall:
        """Arguments of a later call, flat. The names must be those of the example call."""
        names, values = _named(self.fn, args, kwargs)
        if names != self.names:
            raise CaptureError(
                f"{_name(self.fn)} was captured with the arguments ({', '.join(self.names)}) "
                f"and is called with ({', '.join(names)}). Call it as it was captured, or capture it again."
            )
        return _flatten(names, values)

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """Call the user's function on flat arrays; returns flat arrays: its result, then the state of its NNX objects."""
        values, objects = _rebuild(self.call, self.names, self.modules, leaves)
        positional = values[: self.num_positional]
        keywords = dict(zip(self.names[self.num_positional :], values[self.num_positional :], strict=True))
        result = self.fn(*positional, **keywords)
        pairs, tree = tree_flatten_with_path(result)
        statics = []
        arrays = []
        paths = []
        for position, (keys, leaf) in enumerate(pairs):
            if is_array(leaf) or isinstance(leaf, bool | int | float | complex):
                arrays.append(leaf)
                paths.append(format_path(keys))
            elif self._known_static(leaf):
                statics.append((position, leaf))
            else:
                where = format_path(keys) or "the result itself"
                raise CaptureError(
                    f"{_name(self.fn)} returns something that is no array: {where} is a {type(leaf).__name__}. "
                    "A compiled step can return arrays only; return it from outside the step."
                )
        self.out_tree, self.out_statics, self.num_results = tree, tuple(statics), len(arrays)
        if objects:
            _, state = _nnx.split(objects)
            state_pairs, self.state_tree = tree_flatten_with_path(state)
            arrays += [leaf for _, leaf in state_pairs]
            paths += [format_path(keys).removeprefix(".") for keys, _ in state_pairs]
        self.out_paths = tuple(paths)
        return arrays

    def finish(self, outputs: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Flat results to the user's result; NNX objects among the arguments take their new state."""
        leaves = list(outputs[: self.num_results])
        for position, static in self.out_statics:
            leaves.insert(position, static)
        if self.modules:
            names, values = _named(self.fn, args, kwargs)
            objects = {n: v for n, v in zip(names, values, strict=True) if n in self.modules}
            _nnx.update(objects, tree_unflatten(self.state_tree, outputs[self.num_results :]))
        return tree_unflatten(self.out_tree, leaves)

    def _known_static(self, leaf: Any) -> bool:
        return any(leaf is static for _, static in self.call.statics) or leaf is None


def calling_of(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Calling:
    """The calling convention of `fn(*args, **kwargs)`. Raises `CaptureError` for something that cannot be called."""
    if not callable(fn):
        raise CaptureError(f"A training step must be a function, got a {type(fn).__name__}.")
    names, values = _named(fn, args, kwargs)
    modules = tuple(n for n, v in zip(names, values, strict=True) if _holds_module(v))
    return Calling(fn=fn, num_positional=len(args), names=names, modules=modules, call=_flatten(names, values))


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _named(fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Argument names (those of the signature where there is one) and values, in call order."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = []
    for k in range(len(args)):
        plain = k < len(parameters) and parameters[k].kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        names.append(parameters[k].name if plain else f"args[{k}]")
    return (*names, *kwargs), (*args, *kwargs.values())


def _holds_module(value: Any) -> bool:
    leaves = jax.tree_util.tree_leaves(value, is_leaf=_nnx.is_module)
    return any(_nnx.is_module(leaf) for leaf in leaves)


def _flatten(names: Sequence[str], values: Sequence[Any]) -> FlatCall:
    modules = {n: v for n, v in zip(names, values, strict=True) if _holds_module(v)}
    definition, state = _nnx.split(modules) if modules else (None, None)
    paths, leaves, statics, trees = [], [], [], []
    parts = [(n, v) for n, v in zip(names, values, strict=True) if n not in modules]
    if modules:
        parts.append(("", state))
    for name, part in parts:
        pairs, tree = tree_flatten_with_path(part)
        trees.append(tree)
        for keys, leaf in pairs:
            if is_array(leaf):
                paths.append((name + format_path(keys)).removeprefix("."))
                leaves.append(leaf)
            else:
                statics.append((len(leaves) + len(statics), leaf))
    return FlatCall(
        paths=tuple(paths), leaves=tuple(leaves), statics=tuple(statics), trees=tuple(trees), definition=definition
    )


def _rebuild(
    call: FlatCall, names: Sequence[str], modules: Sequence[str], leaves: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Argument values with `leaves` in place of the example's arrays, and the NNX objects among them."""
    flat = list(leaves)
    for position, static in call.statics:
        flat.insert(position, static)
    parts = []
    for tree in call.trees:
        parts.append(tree_unflatten(tree, flat[: tree.num_leaves]))
        del flat[: tree.num_leaves]
    objects = _nnx.merge(call.definition, parts.pop()) if modules else {}
    plain = iter(parts)
    return [objects[n] if n in modules else next(plain) for n in names], objects
