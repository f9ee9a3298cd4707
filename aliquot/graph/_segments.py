"""Folding of repeats: operators of equal layers become one class, so that all later work is done
once for each class.

Three steps:

1. Each operator gets a key, which says what it is, not where it stands. The key of a product with a
   parameter includes the parameter's path with wildcards for numbers, so that projections of equal
   shape in one layer have different keys.
2. Among forward and backward operators, runs of equal periods (layers) are found by comparing the
   sequence of keys with itself shifted; those that cover most come first.
3. Update and prologue operators, which optimizers repeat for every leaf, are hashed by their key
   and the classes of their inputs, then once more in reverse by the classes of their users.

Classes form a quotient graph. An operand of a class may come from several classes (the embedding
for the first layer, the previous layer for the others), so the edges from one copy to the next are
kept.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Folding:
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
    origin = repeated.origin
    classes = _refined_by_users(graph, repeated.op_class)
    value_class = _value_classes(graph, classes, origin)
    return Folding(
        op_class=classes,
        members=cast("tuple[tuple[OpId, ...], ...]", _members(classes)),
        value_class=value_class,
        value_members=cast("tuple[tuple[ValueId, ...], ...]", _members(value_class)),
        runs=repeated.runs,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Repeats:
    """Repeated runs of a graph, before the classes of its update are refined by their users.

    Attributes:
        op_class: class of each operator; those of the update may be too coarse.
        runs: as in `Folding`.
        origin: for each value that is made from a single parameter or state array, the wildcarded
            path of this input; None for others.
    """

    op_class: Ints
    runs: tuple[Run, ...]
    origin: tuple[str | None, ...]


# Cached, because layers are cut and compared one after the other with the classes of one graph.
@functools.lru_cache(maxsize=1)
def find_repeats(graph: Graph) -> Repeats:
    """Repeats, and classes of forward and backward operators: the cheaper part of `fold`."""
    origin = _origins(graph)
    keys = _keys(graph, origin)
    runs = _find_runs(graph, keys)
    return Repeats(
        op_class=_classes(graph, keys, origin, runs), runs=tuple(runs), origin=tuple(origin)
    )


def wildcard(path: str) -> str:
    """A path with its numbers replaced: `params.layers[*].q` for every layer."""
    return re.sub(r"\d+", "*", path)


class _Interner:
    """Numbers for hashable things, in order of first appearance."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def __call__(self, thing: Any) -> int:
        return self._known.setdefault(thing, len(self._known))


def _origins(graph: Graph) -> list[str | None]:
    """For each value that is made from a single parameter or state array, the wildcarded path of
    this input.
    """
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
    return origin


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
            return tuple([self._one(v) for v in value])
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
        run = _best_run(sequence, heavy, low, high)
        if run is None:
            continue
        runs.append(run)
        pending += [(low, run.start), (run.start + run.period * run.count, high)]
    return sorted(runs, key=lambda r: r.start)


def _best_run(keys: Ints, heavy: NDArray[np.bool_], low: int, high: int) -> Run | None:
    """The run that covers most of `keys[low:high]`, every copy with at least one product; None if
    nothing repeats.
    """
    best: tuple[int, int, Run] | None = None
    for period in _candidate_periods(keys, heavy, low, high):
        same = keys[low : high - period] == keys[low + period : high]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
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
    return best[2] if best else None


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
    return [int(d) for d in distances[np.argsort(-counts, kind="stable")][:64]]


def _classes(graph: Graph, keys: Ints, origin: Sequence[str | None], runs: Sequence[Run]) -> Ints:
    """The class of each operator; see `_refined_by_users`."""
    in_run = np.full(len(keys), -1, np.int64)
    for number, run in enumerate(runs):
        # A run's number and the place in its period, in one integer.
        offsets = np.arange(run.period * run.count) % run.period
        in_run[run.start : run.start + len(offsets)] = offsets + (number << 32)
    intern = _Interner()
    of_value: list[Any] = [("input", o) for o in origin]
    classes = []
    for op, key, place in zip(graph.ops, keys.tolist(), in_run.tolist(), strict=True):
        if place >= 0:
            own_class = intern(("run", place))
        elif op.phase is Phase.UPDATE or op.phase is Phase.PROLOGUE:
            scalar = _only_scalars(graph, op)
            sources = (
                () if scalar else tuple([of_value[i] for i in op.inputs if isinstance(i, int)])
            )
            own_class = intern(("hash", key, sources))
        else:
            own_class = intern(("single", op.index))
        classes.append(own_class)
        for position, out in enumerate(op.outputs):
            if out >= 0:
                of_value[out] = (own_class, position)
    return np.array(classes, np.int64)


def _only_scalars(graph: Graph, op: Op) -> bool:
    return all(o < 0 or not graph.values[o].shape for o in op.outputs)


def _refined_by_users(graph: Graph, classes: Ints) -> Ints:
    """Split classes of update operators whose users differ: operators on the moments of different
    parameters may differ only in the parameters that they update.
    """
    # Only update operators are refined by their users.
    users: dict[int, set[Any]] = {
        o: set()
        for op in graph.ops
        if op.phase is Phase.UPDATE
        for o in op.outputs
        if o >= 0 and graph.values[o].shape
    }
    refined = []
    intern = _Interner()
    for op, own_class in zip(reversed(graph.ops), reversed(classes.tolist()), strict=True):
        key: Any = own_class
        if op.phase is Phase.UPDATE and not _only_scalars(graph, op):
            key = (
                own_class,
                tuple([frozenset(users.get(o, ())) if o >= 0 else None for o in op.outputs]),
            )
        refined.append(intern(key))
        for position, source in enumerate(op.inputs):
            if type(source) is not Literal and source in users:
                users[source].add((refined[-1], position))
    return np.array(refined[::-1], np.int64)


def _value_classes(graph: Graph, classes: Ints, origin: Sequence[str | None]) -> Ints:
    """Class of each value: of a result by its producer's class and its position, of an input by its
    kind and the classes that read it.
    """
    intern = _Interner()
    result = [-1] * len(graph.values)
    op_class = classes.tolist()
    for op, own_class in zip(graph.ops, op_class, strict=True):
        for position, out in enumerate(op.outputs):
            if out >= 0:
                result[out] = intern((own_class, position))
    readers: dict[int, set[Any]] = {
        v: set() for v, value_class in enumerate(result) if value_class < 0
    }
    for op, own_class in zip(graph.ops, op_class, strict=True):
        for position, source in enumerate(op.inputs):
            if type(source) is not Literal and source in readers:
                readers[source].add((own_class, position))

    def kind(v: int) -> Any:
        return graph.values[v].shape, graph.values[v].dtype, origin[v]

    for v, read in readers.items():
        # Inputs that are no state, such as a batch, each have their own class: nothing shows that
        # two of them are alike.
        result[v] = intern(("input", kind(v) if origin[v] else v, frozenset(read)))
    return np.array(result, np.int64)


def _members(classes: Ints) -> tuple[tuple[int, ...], ...]:
    """Members of each class, classes numbered 0, 1, ..."""
    members: list[list[int]] = [[] for _ in range(int(classes.max(initial=-1)) + 1)]
    for thing, own_class in enumerate(classes.tolist()):
        members[own_class].append(thing)
    return tuple([tuple(things) for things in members])
