"""Calling convention of the user's step: from arguments to flat arrays, and from flat results to
the value that the step returns.

Arrays are traced, and so are Python numbers; everything else (functions, flags, the settings of an
Equinox module, numbers whose values the step needs) is static and belongs to the identity of the
call. NNX objects that the step changes in place come back through `finish`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import msgspec
import numpy as np
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    tree_flatten_with_path,
    tree_unflatten,
)

from ..core import CaptureError
from . import _jax_compat as compat
from . import _nnx
from ._types import Recomputation


def is_array(leaf: Any) -> bool:
    """True if a leaf is traced: an array, a NumPy scalar or a shape."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def path_parts(keys: Sequence[Any]) -> tuple[str, ...]:
    """A pytree path as a user writes it, key by key: `.params`, `.layers`, `[3]`."""
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
    # NNX variables keep their array one level further down, which would only clutter the path.
    if len(keys) > 1 and isinstance(keys[-1], GetAttrKey) and keys[-1].name == "value":
        parts.pop()
    return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatCall:
    """One flattened call: its arrays with their paths, and everything that is not an array.

    Attributes:
        paths: place of each array in the arguments, such as `state.params.w`.
        parts: the same, key by key, beginning with the argument's name.
        leaves: the arrays, or their shapes.
        statics: leaves that are no arrays, each with its position among all leaves.
        static_paths: path of each of these.
        trees: structure of each argument that holds no NNX object, then of the state of those that
            do.
        definition: the NNX objects without their arrays, or None.
        numbers: paths of the Python numbers among the arrays.
    """

    paths: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...]
    leaves: tuple[Any, ...]
    statics: tuple[tuple[int, Any], ...]
    static_paths: tuple[str, ...]
    trees: tuple[Any, ...]
    definition: Any
    numbers: tuple[str, ...]

    def skeleton(self) -> tuple[Any, ...]:
        """Key that two calls must share to run the same program."""
        return (self.paths, self.statics, self.trees, self.definition)

    def differences(self, other: FlatCall, names: Sequence[str] = ()) -> tuple[str, ...]:
        """One sentence for each way in which the skeleton of another call differs from this one;
        arrays in the order of their arguments' `names`.
        """
        order = {name: k for k, name in enumerate(names)}

        def only_in(one: FlatCall, another: FlatCall) -> list[tuple[str, ...]]:
            parts = sorted(one.parts, key=lambda p: order.get(p[0], len(order)))
            known = set(another.parts)
            return [p for p in parts if p not in known]

        missing, new = only_in(self, other), only_in(other, self)
        lines = []
        for parts in missing:
            within = [each for each in new if each[: len(parts)] == parts]
            new = [each for each in new if each[: len(parts)] != parts]
            path = "".join(parts)
            if within:
                lines.append(
                    f"{path} was one array and now holds {len(within):,} arrays or numbers:"
                    " numpy.asarray makes one array of a list"
                )
            else:
                lines.append(f"{path} is missing")
        lines += [f"{''.join(parts)} is new" for parts in new]
        mine = {}
        for path, (_, value) in zip(self.static_paths, self.statics, strict=True):
            mine[path] = value
        theirs = {}
        for path, (_, value) in zip(other.static_paths, other.statics, strict=True):
            theirs[path] = value
        for path in mine | theirs:
            if path not in theirs or path not in mine:
                lines.append(
                    f"{path}, which is no array, is {'new' if path in theirs else 'missing'}"
                )
            elif mine[path] is not theirs[path] and mine[path] != theirs[path]:
                lines.append(
                    f"{path}, which is no array, was {mine[path]!r} and is {theirs[path]!r}"
                )
        # Only where nothing else differs: a new array changes the tree as well.
        if not lines and self.trees != other.trees:
            lines.append("the static fields of some argument have changed")
        if not lines and self.definition != other.definition:
            lines.append("the static attributes of some module have changed")
        return tuple(lines)


class _Number(msgspec.Struct, frozen=True):
    """A Python number among the results; it comes back as an array, as from `jax.jit`."""

    value: bool | int | float | complex


@dataclass(slots=True, kw_only=True)
class Calling:
    """The calling convention of one captured step.

    Attributes:
        fn: the user's function.
        num_positional: how many arguments are passed by position.
        names: argument names in call order.
        modules: names of the arguments that are, or hold, NNX objects.
        call: the example call.
        out_paths: path of each output.
        out_tree, out_statics: structure of the result, filled when the step is traced.
        num_results: how many flat outputs are the user's result; the rest is the state of
            `modules`.
        out_parts: path of each output of the user's result, key by key.
        state_tree: structure of that state.
        static_numbers: paths of Python numbers that are static.
        traces: the step on batches of other sizes, by their number of examples: traced, or derived
            from two traces.
        own_traces: the step traced on batches of other sizes, likewise.
        cut_state: the inputs besides the batch that are cut with it, by position, each with the
            dim; None before they are looked for.
        recompute: how the layers of the step recompute; None as the step itself does.
        as_written: the captured step before its layers were made to recompute; None if they were
            not.
    """

    fn: Callable[..., Any]
    num_positional: int
    names: tuple[str, ...]
    modules: tuple[str, ...]
    call: FlatCall
    out_paths: tuple[str, ...] = ()
    out_parts: tuple[tuple[str, ...], ...] = ()
    out_tree: Any = None
    out_statics: tuple[tuple[int, Any], ...] = ()
    num_results: int = 0
    state_tree: Any = None
    static_numbers: frozenset[str] = frozenset()
    traces: dict[int, Any] = field(default_factory=dict, repr=False)
    own_traces: dict[int, Any] = field(default_factory=dict, repr=False)
    cut_state: dict[int, int] | None = field(default=None, repr=False)
    recompute: Recomputation | None = None
    as_written: Any = field(default=None, repr=False)

    def flatten(self, args: Sequence[Any], kwargs: dict[str, Any]) -> FlatCall:
        """Arguments of a later call, flat. The names must be those of the example call.

        Raises:
            CaptureError: other arguments are passed.
        """
        return _flatten(
            self.names, self._values(args, kwargs), self.modules, self.static_numbers, shapes=False
        )

    def is_traced_alike(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """True if JAX would trace another call into what it traced the example call into."""
        try:
            values = self._values(args, kwargs)
        except CaptureError:
            return False
        call = _flatten(self.names, values, self.modules, self.static_numbers, shapes=True)
        same = (call.skeleton(), call.numbers) == (self.call.skeleton(), self.call.numbers)
        pairs = zip(call.leaves, self.call.leaves, strict=False)
        return same and all(compat.shape_struct(a) == compat.shape_struct(b) for a, b in pairs)

    def differences(self, call: FlatCall) -> tuple[str, ...]:
        """How the skeleton of another call differs, in the order of the arguments."""
        return self.call.differences(call, self.names)

    def _values(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Argument values in the order of the example call."""
        names, values = _named(self.fn, args, kwargs)
        if names == self.names:
            return values
        by_name = dict(zip(names, values, strict=True))
        if by_name.keys() != set(self.names):
            raise CaptureError(
                f"{_name(self.fn)} was captured with the arguments ({', '.join(self.names)}) and is"
                f" called with ({', '.join(names)}). Call it as it was captured, or capture it"
                " again."
            )
        return tuple(by_name[name] for name in self.names)

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """Call the user's function on flat arrays; returns its result flat, then the state of its
        NNX objects.
        """
        values, objects = _rebuild(self.call, self.names, self.modules, leaves)
        positional = values[: self.num_positional]
        keywords = dict(
            zip(self.names[self.num_positional :], values[self.num_positional :], strict=True)
        )
        result = self.fn(*positional, **keywords)
        pairs, tree = tree_flatten_with_path(result)
        settings = _nnx.inside_equinox(result)
        statics: list[tuple[int, Any]] = []
        arrays = []
        parts = []
        wrong = []
        for position, (keys, leaf) in enumerate(pairs):
            if is_array(leaf):
                arrays.append(leaf)
                parts.append(path_parts(keys))
            elif isinstance(leaf, bool | int | float | complex):
                is_setting = settings[position] or self._returns_setting(path_parts(keys), leaf)
                statics.append((position, leaf if is_setting else _Number(leaf)))
            elif self._known_static(leaf):
                statics.append((position, leaf))
            else:
                wrong.append(
                    f"{''.join(path_parts(keys)) or 'the result itself'} is a {type(leaf).__name__}"
                )
        if wrong:
            raise CaptureError(
                f"{_name(self.fn)} returns something that is no array: {'; '.join(wrong)}. "
                "A compiled step can return arrays only; return it from outside the step."
            )
        self.out_tree, self.out_statics, self.num_results = tree, tuple(statics), len(arrays)
        self.out_parts = tuple(parts)
        paths = list(map("".join, parts))
        if objects:
            # Appended to the user's result, so that one program returns both.
            _, state = _nnx.split(objects)
            state_pairs, self.state_tree = tree_flatten_with_path(state)
            arrays += [leaf for _, leaf in state_pairs]
            paths += ["".join(path_parts(keys)).removeprefix(".") for keys, _ in state_pairs]
        self.out_paths = tuple(paths)
        return arrays

    def arguments(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """The arguments of the example call with other arrays, by name; NNX objects are new."""
        values, _ = _rebuild(self.call, self.names, self.modules, leaves)
        return dict(zip(self.names, values, strict=True))

    def finish(self, outputs: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Flat results to the user's result; NNX objects among the arguments take their new
        state.
        """
        leaves = list(outputs[: self.num_results])
        for position, static in self.out_statics:
            leaves.insert(
                position, jax.device_put(static.value) if isinstance(static, _Number) else static
            )
        if self.modules:
            values = self._values(args, kwargs)
            objects = {n: v for n, v in zip(self.names, values, strict=True) if n in self.modules}
            _nnx.update(objects, tree_unflatten(self.state_tree, outputs[self.num_results :]))
        return tree_unflatten(self.out_tree, leaves)

    def _returns_setting(self, parts: Sequence[str], number: Any) -> bool:
        """True if a number in the result is a static argument that is returned at its own place."""
        ends = tuple(end for end in ("".join(parts), "".join(parts[1:])) if end)
        for path, (_, static) in zip(self.call.static_paths, self.call.statics, strict=True):
            if static == number and path.endswith(ends):
                return True
        return False

    def _known_static(self, leaf: Any) -> bool:
        return any(leaf is static for _, static in self.call.statics) or leaf is None


def calling_of(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    static_numbers: frozenset[str] = frozenset(),
) -> Calling:
    """The calling convention of `fn(*args, **kwargs)`. Raises `CaptureError` if `fn` cannot be
    called.

    Args:
        static_numbers: paths of Python numbers that are static, besides arguments that a jitted
            `fn` declares static.
    """
    if not callable(fn):
        raise CaptureError(
            f"A training step must be a function, got a {type(fn).__name__}. Pass the function"
            " itself first, then example arguments: capture(train_step, state, batch)."
        )
    names, values = _named(fn, args, kwargs)
    modules = tuple(n for n, v in zip(names, values, strict=True) if _nnx.holds_module(v))
    positions, keywords = compat.static_arguments(fn)
    static_numbers |= {
        n
        for k, n in enumerate(names)
        if n in keywords or (k < len(args) and positions & {k, k - len(args)})
    }
    return Calling(
        fn=fn,
        num_positional=len(args),
        names=names,
        modules=modules,
        call=_flatten(names, values, modules, static_numbers, shapes=True),
        static_numbers=static_numbers,
    )


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def parameter_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's parameters, in the order of its signature; none if it has no
    signature.
    """
    return tuple(parameter.name for parameter in _parameters(fn))


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return []


def _named(
    fn: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Argument names (from the signature, if there is one) and values, in call order."""
    parameters = _parameters(fn)
    names = []
    for k in range(len(args)):
        # Arguments that `*args` takes have no names of their own.
        plain = k < len(parameters) and parameters[k].kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        names.append(parameters[k].name if plain else f"args[{k}]")
    return (*names, *kwargs), (*args, *kwargs.values())


def _flatten(
    names: Sequence[str],
    values: Sequence[Any],
    modules: Sequence[str],
    static_numbers: Collection[str],
    *,
    shapes: bool,
) -> FlatCall:
    """Flatten one call; Python numbers become arrays, or shapes of arrays."""
    objects = {n: v for n, v in zip(names, values, strict=True) if n in modules}
    definition, state = _nnx.split(objects) if objects else (None, None)
    parts, leaves, static_paths, trees = [], [], [], []
    statics: list[tuple[int, Any]] = []
    numbers: list[str] = []
    named = zip(names, values, strict=True)
    groups: list[tuple[tuple[str, ...], Any]] = [((n,), v) for n, v in named if n not in objects]
    if objects:
        groups.append(((), state))
    for prefix, group in groups:
        pairs, tree = tree_flatten_with_path(group)
        trees.append(tree)
        for (keys, leaf), is_setting in zip(pairs, _nnx.inside_equinox(group), strict=True):
            # The name of an argument that holds an NNX object is the first key of the objects'
            # state.
            where = prefix + path_parts(keys) if prefix else (keys[0].key, *path_parts(keys[1:]))
            path = "".join(where)
            # By exact type: a `bool` is an `int` too, but is a flag.
            number = type(leaf) in (int, float) and not is_setting and path not in static_numbers
            if number:
                numbers.append(path)
                struct = compat.number_struct(leaf)
                leaf = struct if shapes else np.asarray(leaf, struct.dtype)
            if number or is_array(leaf):
                parts.append(where)
                leaves.append(leaf)
            else:
                static_paths.append(path)
                # Positions rise, so that inserting the statics in this order puts each where it
                # was.
                statics.append((len(leaves) + len(statics), leaf))
    return FlatCall(
        paths=tuple(map("".join, parts)),
        parts=tuple(parts),
        leaves=tuple(leaves),
        statics=tuple(statics),
        static_paths=tuple(static_paths),
        trees=tuple(trees),
        definition=definition,
        numbers=tuple(numbers),
    )


def _rebuild(
    call: FlatCall, names: Sequence[str], modules: Sequence[str], leaves: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Argument values with `leaves` in place of the example's arrays, and the NNX objects among
    them.
    """
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
