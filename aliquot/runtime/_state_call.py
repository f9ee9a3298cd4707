"""A step's state, flat: its arrays with their places, and the way back to the user's objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
from jax.tree_util import tree_flatten_with_path, tree_unflatten

from ..core import InputError, listing
from ..graph import Calling, FlatCall, calling_of, parameter_names, path_parts
from ..plans import ArrayInterface

Arrays: TypeAlias = list[tuple[str, tuple[int, ...]]]
"""Place and shape of each array of an argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCall:
    """A state as if the step were called with nothing else.

    Attributes:
        call: the flat call: the arrays of the state and their paths in the step's arguments.
        calling: its calling convention.
    """

    call: FlatCall
    calling: Calling

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The arrays."""
        return self.call.leaves

    @property
    def paths(self) -> tuple[str, ...]:
        """Place of each array in the step's arguments."""
        return self.call.paths

    @property
    def names(self) -> tuple[str, ...]:
        """Place of each array in the state: without the argument's name if there is only one."""
        return tuple(name_of(path, self.calling.names) for path in self.call.paths)

    def tree(self, leaves: Sequence[Any]) -> Any:
        """Something for each array, in a tree that holds nothing else: what is no array is None,
        and NNX objects are dicts. Of several arguments, a dict by their names.
        """
        flat = list(leaves)
        for position, _ in self.call.statics:
            flat.insert(position, None)
        names = [name for name in self.calling.names if name not in self.calling.modules]
        arguments: dict[str, Any] = {}
        for k, tree in enumerate(self.call.trees):
            part = tree_unflatten(tree, flat[: tree.num_leaves])
            del flat[: tree.num_leaves]
            # The last tree is that of all NNX objects, by the names of their arguments.
            arguments |= {names[k]: part} if k < len(names) else part
        if len(arguments) == 1:
            return next(iter(arguments.values()))
        return {name: arguments[name] for name in self.calling.names if name in arguments}

    def value(self, leaves: Sequence[Any]) -> Any:
        """The user's state with these arrays: the step's state argument, or a tuple of several."""
        arguments = tuple(self.calling.arguments(leaves).values())
        return arguments if len(arguments) > 1 else arguments[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainState:
    """A tree of arrays that belongs to no step; as `StateCall`."""

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    structure: Any

    def tree(self, leaves: Sequence[Any]) -> Any:
        """Something for each array, in the user's tree."""
        return tree_unflatten(self.structure, leaves)

    value = tree

    @property
    def paths(self) -> tuple[str, ...]:
        """The same as `names`."""
        return self.names


def plain_state(state: Any) -> PlainState:
    """A tree of arrays and numbers. Raises `InputError` for other leaves."""
    pairs, structure = tree_flatten_with_path(state)
    names = tuple("".join(path_parts(keys)).removeprefix(".") or "state" for keys, _ in pairs)
    others, leaves = [], []
    for name, (_, leaf) in zip(names, pairs, strict=True):
        if not isinstance(leaf, int | float) and not hasattr(leaf, "dtype"):
            others.append(f"{name} is a {type(leaf).__name__}")
        leaves.append(leaf if hasattr(leaf, "dtype") else np.asarray(leaf))
    if others:
        raise InputError(
            listing("a checkpoint holds arrays and numbers", others, "Save the rest as its `meta`.")
        )
    return PlainState(names=names, leaves=tuple(leaves), structure=structure)


def state_call(
    fn: Callable[..., Any],
    inputs: Sequence[ArrayInterface],
    state: Any,
    static_numbers: frozenset[str] = frozenset(),
) -> StateCall:
    """A state of a step: its state argument, or a tuple of several in the order of the step's
    parameters.

    Args:
        inputs: the step's.
        static_numbers: paths of numbers that are no arrays of the step.
    """
    stateful = state_arguments(fn, inputs)
    several = len(stateful) > 1 and isinstance(state, tuple) and len(state) == len(stateful)
    parts = list(state) if several else [state]
    given = dict(zip(stateful[: len(parts)], parts, strict=True))
    calling = calling_of(fn, (), given, static_numbers=static_numbers)
    return StateCall(call=calling.flatten((), given), calling=calling)


def misplaced_state(
    fn: Callable[..., Any], inputs: Sequence[ArrayInterface], state: Any
) -> list[str]:
    """Sentences for a state whose arrays are not those that the step takes."""
    names = state_arguments(fn, inputs)
    parts = state if isinstance(state, tuple) else (state,)
    # Each part for itself, since it is not known which argument it is.
    call = calling_of(fn, (), {str(k): part for k, part in enumerate(parts)}).call
    found = arrays_of(call.parts, call.leaves)
    taken: dict[str, Arrays] = {}
    for item in inputs:
        name = argument_of(item.path)
        taken.setdefault(name, []).append((item.path.removeprefix(name), item.shape))
    there = [found.get(str(k), []) for k in range(len(parts))]
    return misplaced_arguments({name: sorted(taken[name]) for name in names}, there)


def arrays_of(paths: Sequence[tuple[str, ...]], leaves: Sequence[Any]) -> dict[str, Arrays]:
    """For each argument the places and shapes of its arrays; `paths` as in `FlatCall.parts`."""
    arrays: dict[str, Arrays] = {}
    for parts, leaf in zip(paths, leaves, strict=True):
        arrays.setdefault(parts[0], []).append(("".join(parts[1:]), tuple(leaf.shape)))
    return {name: sorted(places) for name, places in arrays.items()}


def misplaced_arguments(taken: Mapping[str, Arrays], found: Sequence[Arrays]) -> list[str]:
    """One sentence for each place that holds another argument than the step takes there, or none;
    no sentence if the arguments are in order, and differ in what they hold.

    Args:
        taken: the arrays of each argument, in the order of the step's parameters.
        found: the arrays at each place.
    """
    names = list(taken)
    lines = []
    are_in_order = len(found) == len(names)
    for place, (name, arrays) in enumerate(zip_longest(names, found), 1):
        other = next((n for n in names if taken[n] == arrays), None)
        if arrays is None:
            lines.append(f"at place {place} {name} is expected, and nothing is there")
        elif name is None:
            lines.append(f"at place {place} nothing is expected")
        elif arrays != taken[name]:
            are_in_order &= other is None
            what = "something else" if other is None else f"what the step takes as {other}"
            lines.append(f"at place {place} {name} is expected, and {what} is there")
    is_any_known = any(arrays in taken.values() for arrays in found)
    return lines if is_any_known and not are_in_order else []


def argument_of(path: str) -> str:
    """The name of the argument that a path begins with."""
    return path.split(".")[0].split("[")[0]


def state_arguments(fn: Callable[..., Any], inputs: Sequence[ArrayInterface]) -> list[str]:
    """Arguments of the step that hold anything but a batch, in the order of its parameters.

    An argument is also a batch if arrays of other sizes stand beside those with the batch's, as the
    nodes of a graph beside its edges: where most of its arrays have that size, or it comes last.
    """
    held = ("parameter", "optimizer_state", "state")
    roles: dict[str, list[str]] = {}
    for item in inputs:
        roles.setdefault(argument_of(item.path), []).append(item.role)
    last = [name for name in parameter_names(fn) if name in roles][-1:]
    stateful: dict[str, None] = {}
    for name, found in roles.items():
        of_batch = found.count("batch")
        is_batch = of_batch > len(found) / 2 or (of_batch and last == [name])
        if not is_batch and any(role in held for role in found):
            stateful[name] = None
    # NNX objects come last among the inputs, and by their names.
    in_order = [name for name in parameter_names(fn) if name in stateful]
    return list(dict.fromkeys([*in_order, *stateful]))


def name_of(path: str, arguments: Sequence[str]) -> str:
    """Place of an array in the state, which consists of these arguments: without the argument's
    name if there is only one.
    """
    if len(arguments) > 1:
        return path
    return path.removeprefix(arguments[0]).removeprefix(".") or path
