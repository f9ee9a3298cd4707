"""Layers of a forward pass that are written out one after the other: where its products repeat.

Unlike `find_repeats`, whose copies are equal operator by operator so that one decision stands for
all, layers here may differ between their products: by the number of the layer in a random key, by a
loss that some add, or by arrays that the first layer makes for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._dataflow import Item, forward_places, made_by, read_by
from ._layers import crossing_bytes, narrowest
from ._rule import traits_of
from ._types import Graph, Literal


def alike_layers(graph: Graph, items: Sequence[Item]) -> tuple[tuple[int, int], ...]:
    """The layers as ranges of positions in `items`, of all items of a step, in order.

    Of a run of products that repeats, each copy is a layer. It begins where the fewest bytes cross
    between the products of two copies.
    """
    forward = forward_places(items)
    places: list[int] = []
    # What the products of an item have in common with those of other layers.
    keys: list[Any] = []
    for place, k in enumerate(forward):
        key = []
        for op in (graph.ops[n] for n in items[k].ops):
            if traits_of(op.name).multiplies:
                read = [i if isinstance(i, Literal) else graph.values[i] for i in op.inputs]
                shapes = tuple(array.shape for array in read)
                key.append((op.name, shapes, str(op.params.get("dimension_numbers"))))
        if key:
            places.append(place)
            keys.append(tuple(key))
    crossing = crossing_bytes(graph, items, forward)
    layers: list[tuple[int, int]] = []
    for run in _runs(keys, 0):
        found = _cut(run, places, crossing)
        parts = []
        for a, b in found:
            parts.append([items[k] for k in forward[a:b]])
        # Parts of one layer side by side, such as the products for queries, keys and values, do
        # not read what the one before them makes.
        reads = (read_by(other).keys() & made_by(one) for one, other in itertools.pairwise(parts))
        if all(reads):
            layers += found
    return tuple((forward[a], forward[b - 1] + 1) for a, b in layers)


class _Run(NamedTuple):
    """`count` copies of `period` products, from product `start`; `size` products repeat."""

    start: int
    period: int
    size: int


def _runs(keys: Sequence[Any], start: int) -> list[_Run]:
    """The runs of products that repeat, those first found that cover most; in order."""
    best: _Run | None = None
    numbers: dict[Any, int] = {}
    ids = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
    for period in range(1, len(keys) // 2 + 1):
        equal = np.concatenate(([False], ids[period:] == ids[:-period], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            size = end - begin + period
            if size >= 2 * period and (best is None or size > best.size):
                best = _Run(begin, period, size)
    if best is None:
        return []
    after = best.start + best.size
    here = best._replace(start=start + best.start)
    return [*_runs(keys[: best.start], start), here, *_runs(keys[after:], start + after)]


def _cut(run: _Run, places: Sequence[int], crossing: NDArray[np.float64]) -> list[tuple[int, int]]:
    """The layers of a run, as ranges of places of the forward pass."""
    found: list[tuple[float, int, list[int], range]] = []
    for offset in range(run.period):
        count = (run.size - offset) // run.period
        if count < 2:
            break
        start = run.start + offset
        firsts = range(start, start + count * run.period, run.period)
        cuts = []
        for k in firsts[1:]:
            # Between the last product of a layer and the first of the next.
            cuts.append(narrowest(range(places[k - 1] + 1, places[k] + 1), crossing))
        widest = max(float(crossing[cut]) for cut in cuts)
        found.append((widest, -count, cuts, firsts))
    _, _, cuts, firsts = min(found, key=lambda each: each[:2])
    # The first layer begins, and the last ends, as far from its products as the others do.
    before = places[firsts[1]] - cuts[0]
    behind = cuts[0] - places[firsts[1] - 1]
    last = firsts[-1] + run.period - 1
    least = places[firsts[0] - 1] + 1 if firsts[0] else 0
    most = places[last + 1] if last + 1 < len(places) else len(crossing) - 1
    begin = max(least, places[firsts[0]] - before)
    end = min(most, places[last] + behind)
    bounds = [begin, *cuts, end]
    return list(zip(bounds[:-1], bounds[1:], strict=True))
