"""Folding of repeats: operators of equal layers become one class, so that all later work is done
once for each class.

Three steps:

1. Each operator gets a key, which says what it is, not where it stands. The key of a product with a
   parameter includes the parameter's path with wildcards for numbers, so that projections of equal
   shape in one layer have different keys.
2. Among forward and backward operators, runs of equal periods (layers) are found by comparing the
   sequence of keys with itself shifted; those that cover most come first.
3. Update and prologue operators, which optimizers repeat for every leaf, are hashed by their key
   and the classes of what they read, then in reverse by the classes of their users. If operators of
   a class then still read arrays of several classes, such as two weights of one shape whose norms
   are taken, both are done again, until each class reads arrays of one class.

Classes form a quotient graph. An operand of a class may come from several classes (the embedding
for the first layer, the previous layer for the others), so the edges from one copy to the next are
kept.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ._rule import traits_of
from ._types import Graph, Literal, Op, OpId, Phase, Role, ValueId

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """`count` copies of `period` operators each, from position `start` of `Graph.ops`."""

    start: int
    period: int
    count: int


class Folding(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Classes of equal operators and values.

    Attributes:
        op_class: class of each operator.
        members: operators of each class, in program order.
        value_class: class of each value; inputs and constants have classes too.
        value_members: values of each class.
        runs: the repeats found in the forward and backward passes.
    """

    op_class: Ints
    members: tuple[tuple[OpId, ...], ...]
    value_class: Ints
    value_members: tuple[tuple[ValueId, ...], ...]
    runs: tuple[Run, ...]


def fold(graph: Graph, *, repeats: bool = True) -> Folding:
    """Classes of a graph; with `repeats=False`, every operator and value has its own class."""
    if not repeats:
        ops, values = range(len(graph.ops)), range(len(graph.values))
        return Folding(
            op_class=np.arange(len(ops), dtype=np.int64),
            members=tuple((OpId(i),) for i in ops),
            value_class=np.arange(len(values), dtype=np.int64),
            value_members=tuple((ValueId(i),) for i in values),
            runs=(),
        )
    repeated = find_repeats(graph)
    classes, outside = repeated.op_class.tolist(), repeated.outside
    while True:
        classes = _refined_by_users(graph, outside, classes)
        value_class = _value_classes(graph, classes, repeated.origin)
        if not _mixes(graph, outside, classes, value_class):
            break
        classes = _refined_by_sources(graph, outside, classes, value_class)
    return Folding(
        op_class=np.array(classes, np.int64),
        members=cast("tuple[tuple[OpId, ...], ...]", _members(classes)),
        value_class=np.array(value_class, np.int64),
        value_members=cast("tuple[tuple[ValueId, ...], ...]", _members(value_class)),
        runs=repeated.runs,
    )


class Repeats(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Repeated runs of a graph, before the classes of its update are refined.

    Attributes:
        op_class: class of each operator; those of the update and the prologue may be too coarse.
        runs: as in `Folding`.
        outside: the operators of the update, and those of the prologue that lie in no run.
        origin: for each value that is made from a single parameter or state array, the wildcarded
            path of this input; None for others.
    """

    op_class: Ints
    runs: tuple[Run, ...]
    outside: tuple[Op, ...]
    origin: tuple[str | None, ...]


# Cached, because layers are cut and compared one after the other with the classes of one graph.
@functools.lru_cache(maxsize=1)
def find_repeats(graph: Graph) -> Repeats:
    """Repeats, and classes of forward and backward operators: the cheaper part of `fold`."""
    origin: list[str | None] = [None] * len(graph.values)
    for item in graph.inputs:
        if item.role in (Role.PARAMETER, Role.OPTIMIZER_STATE, Role.STATE):
            origin[item.value] = wildcard(item.path)
    for op in graph.ops:
        sources = [i for i in op.inputs if isinstance(i, int)]
        if len(sources) == 1 and origin[sources[0]] is not None and op.phase is not Phase.UPDATE:
            for out in op.outputs:
                if out >= 0:
                    origin[out] = origin[sources[0]]
    keys = _keys(graph, origin)
    runs = _find_runs(graph, keys)
    in_run = np.zeros(len(keys), bool)
    for run in runs:
        in_run[run.start : run.start + run.period * run.count] = True
    outside = []
    for op, repeated in zip(graph.ops, in_run.tolist(), strict=True):
        if not repeated and (op.phase is Phase.UPDATE or op.phase is Phase.PROLOGUE):
            outside.append(op)
    return Repeats(
        op_class=np.array(_classes(graph, keys, origin, runs, outside), np.int64),
        runs=tuple(runs),
        outside=tuple(outside),
        origin=tuple(origin),
    )


def wildcard(path: str) -> str:
    """A path with its numbers replaced: `params.layers[*].q` for every layer."""
    return re.sub(r"\d+", "*", path)


class _Interner:
    """Numbers for hashable things, in order of first appearance."""

    def __init__(self, start: int = 0) -> None:
        self._known: dict[Any, int] = {}
        self._start = start

    def __call__(self, thing: Any) -> int:
        return self._known.setdefault(thing, self._start + len(self._known))


def _keys(graph: Graph, origin: Sequence[str | None]) -> Ints:
    """A number for each operator; those with equal numbers do equal work on equal kinds of
    operands.
    """
    intern = _Interner()
    param_key = _ParamKeys()
    kinds = [intern((v.shape, v.dtype, o)) for v, o in zip(graph.values, origin, strict=True)]

    def operand(item: int | Literal) -> Any:
        return kinds[item] if isinstance(item, int) else (str(item.value), item.shape, item.dtype)

    keys = []
    for op in graph.ops:
        inputs = tuple([kinds[i] if type(i) is not Literal else operand(i) for i in op.inputs])
        outputs = tuple([kinds[o] if o >= 0 else -1 for o in op.outputs])
        within = (op.phase, op.deferrable, op.trips, op.region > 0)
        keys.append(intern((op.name, within, param_key(op.params), inputs, outputs)))
    return np.array(keys, np.int64)


class _ParamKeys:
    """Numbers for the parameters of primitives, equal for equal parameters. Bodies are compared by
    their text, which is formatted once for each object.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, Any]] = {}
        self._intern = _Interner()

    def __call__(self, params: Any) -> int:
        # Kept with its number: an id means something only while its object lives.
        known = self._by_id.get(id(params))
        if known is None:
            number = self._intern(tuple([(k, self._one(v)) for k, v in sorted(params.items())]))
            known = self._by_id[id(params)] = params, number
        interned: int = known[1]
        return interned

    def _one(self, value: Any) -> Any:
        if value is None or isinstance(value, int | float | str | bool):
            return value
        if isinstance(value, tuple):
            return tuple(map(self._one, value))
        known = self._by_id.get(id(value))
        if known is None:
            known = (value, str(value))
            self._by_id[id(value)] = known
        return known[1]


def _find_runs(graph: Graph, keys: Ints) -> list[Run]:
    """Repeats among forward and backward operators, without overlap; the longest cover first."""
    in_update = np.array([op.phase is Phase.UPDATE for op in graph.ops])
    heavy = np.array([traits_of(op.name).multiplies for op in graph.ops])
    # Operators of the update never match their shifted selves.
    sequence = np.where(in_update, -1 - np.arange(len(keys)), keys)
    runs: list[Run] = []
    pending = [(0, len(keys))]
    while pending:
        low, high = pending.pop()
        best: tuple[int, int, Run] | None = None
        for period in _candidate_periods(sequence, heavy, low, high):
            same = sequence[low : high - period] == sequence[low + period : high]
            edges = np.flatnonzero(
                np.diff(np.concatenate(([False], same, [False])).astype(np.int8))
            )
            for start, end in zip(edges[::2], edges[1::2], strict=True):
                # Each copy but the last equals the next one.
                count = 1 + (end - start) // period
                if count < 2 or not heavy[low + start : low + start + period].any():
                    continue
                cover = count * period
                if best is None or (cover, -period) > best[:2]:
                    best = (
                        int(cover),
                        -period,
                        Run(start=int(low + start), period=int(period), count=int(count)),
                    )
        run = best[2] if best else None
        if run is None:
            continue
        runs.append(run)
        pending += [(low, run.start), (run.start + run.period * run.count, high)]
    return sorted(runs, key=lambda r: r.start)


def _candidate_periods(keys: Ints, heavy: NDArray[np.bool_], low: int, high: int) -> list[int]:
    """Distances between neighbouring products with equal keys, most frequent first."""
    where = low + np.flatnonzero(heavy[low:high])
    if len(where) < 2:
        return []
    order = np.argsort(keys[where], kind="stable")
    sorted_keys, sorted_where = keys[where][order], where[order]
    equal = sorted_keys[1:] == sorted_keys[:-1]
    distances, counts = np.unique((sorted_where[1:] - sorted_where[:-1])[equal], return_counts=True)
    # Limited, because trying a period takes a pass over all operators.
    return list(map(int, distances[np.argsort(-counts, kind="stable")][:64]))


def _classes(
    graph: Graph,
    keys: Ints,
    origin: Sequence[str | None],
    runs: Sequence[Run],
    outside: Sequence[Op],
) -> list[int]:
    """The class of each operator. In a run it is that of the first copy."""
    first = np.arange(len(keys))
    for run in runs:
        offsets = np.arange(run.period * run.count)
        first[run.start + offsets] = run.start + offsets % run.period
    classes: list[int] = first.tolist()
    of_value: list[Any] = [("input", path) for path in origin]
    for op, op_class in zip(graph.ops, classes, strict=True):
        for position, out in enumerate(op.outputs):
            if out >= 0:
                of_value[out] = op_class, position
    for op in outside:
        classes[op.index] = int(keys[op.index])
    return _refined_by_sources(graph, outside, classes, of_value)


def _refined_by_sources(
    graph: Graph, outside: Sequence[Op], classes: Sequence[int], value_class: Sequence[Any]
) -> list[int]:
    """Split classes of operators `outside` of the passes that read values of several classes."""
    of_value, refined = list(value_class), list(classes)
    is_array = [bool(value.shape) for value in graph.values]
    # Numbers that no other operator has.
    intern = _Interner(start=len(graph.ops))
    for op in outside:
        # What makes scalars depends on arrays alone: else each term of a sum over all gradients
        # would have a class of its own.
        scalar = not any(o >= 0 and is_array[o] for o in op.outputs)
        sources = []
        for i in op.inputs:
            if type(i) is not Literal and (is_array[i] or not scalar):
                sources.append(of_value[i])
        op_class = refined[op.index] = intern((classes[op.index], tuple(sources)))
        for position, out in enumerate(op.outputs):
            if out >= 0:
                of_value[out] = op_class, position
    return refined


def _refined_by_users(graph: Graph, outside: Sequence[Op], classes: Sequence[int]) -> list[int]:
    """Split classes of operators `outside` of the passes whose users differ: operators on the
    moments of different parameters may differ only in the parameters that they update.
    """
    # No users are kept of scalars, as those of each term of a sum differ.
    made = itertools.chain.from_iterable(op.outputs for op in outside)
    users: dict[int, set[Any]] = {o: set() for o in made if o >= 0 and graph.values[o].shape}
    refined = []
    intern = _Interner()
    for op, own_class in zip(reversed(graph.ops), reversed(classes), strict=True):
        key: Any = own_class
        if not users.keys().isdisjoint(op.outputs):
            key = own_class, tuple([frozenset(users.get(o, ())) for o in op.outputs])
        refined.append(intern(key))
        for position, source in enumerate(op.inputs):
            if type(source) is not Literal and source in users:
                users[source].add((refined[-1], position))
    return refined[::-1]


def _mixes(
    graph: Graph, outside: Sequence[Op], classes: Sequence[int], value_class: Sequence[int]
) -> bool:
    """True if operators of one class `outside` of the passes read arrays of several classes, which
    would tie how these are split.
    """
    read: dict[tuple[int, int], int] = {}
    for op in outside:
        for position, source in enumerate(op.inputs):
            if type(source) is not Literal and graph.values[source].shape:
                own = value_class[source]
                if read.setdefault((classes[op.index], position), own) != own:
                    return True
    return False


def _value_classes(graph: Graph, classes: Sequence[int], origin: Sequence[str | None]) -> list[int]:
    """Class of each value: of a result by its producer's class and its position, of an input by its
    kind and the classes that read it.
    """
    intern = _Interner()
    result = [-1] * len(graph.values)
    for op, own_class in zip(graph.ops, classes, strict=True):
        for position, out in enumerate(op.outputs):
            if out >= 0:
                result[out] = intern((own_class, position))
    readers: dict[int, set[Any]] = {}
    for v, value_class in enumerate(result):
        if value_class < 0:
            readers[v] = set()
    for op, own_class in zip(graph.ops, classes, strict=True):
        for position, source in enumerate(op.inputs):
            if type(source) is not Literal and source in readers:
                readers[source].add((own_class, position))

    def kind(v: int) -> Any:
        return graph.values[v].shape, graph.values[v].dtype, origin[v]

    for v, read in readers.items():
        # Inputs that are no state, such as a batch, each have their own class: nothing shows that
        # two of them are alike.
        result[v] = intern(("input", kind(v) if origin[v] else v, frozenset(read)))
    return result


def _members(classes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Members of each class, classes numbered 0, 1, ..."""
    members: list[list[int]] = [[] for _ in range(max(classes, default=-1) + 1)]
    for thing, own_class in enumerate(classes):
        members[own_class].append(thing)
    return tuple(map(tuple, members))
