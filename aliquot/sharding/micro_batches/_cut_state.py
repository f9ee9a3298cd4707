"""State that holds rows of examples, such as the cache of a decoder: it is cut with the batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...core import CaptureError
from ...graph import Graph, Role, build_graph
from ._resized import batch_size

TRACE_ERRORS = (TypeError, ValueError, IndexError, ArithmeticError)
"""Errors by which a user's function refuses arrays of other shapes."""

# A loop over micro-batches reads the old state and fills the new one; the last program of a stage
# joins what its forward programs have left.
_IN_A_LOOP, _IN_STAGES = 2, 3
# Groups of arrays of one shape are few, so that more ways than these are not worth their traces.
_MOST_WAYS = 32


def find_cut_state(graph: Graph, size: int) -> tuple[dict[int, int], Graph]:
    """The inputs besides the batch that are cut with it, by position, each with the dim of its
    rows; and the step traced on `size` examples with these inputs cut.

    A dim as long as the batch may be something else, so the step itself decides: it is traced with
    such dims cut, and a cut counts if the step can be traced and returns state as large as it takes
    it. State that the step replaces is cut where it can be; other inputs, such as weights, only
    where the step cannot be traced otherwise.

    Raises as the user's function does if nothing is to be cut and it cannot be traced.
    """
    state = []
    for k, item in enumerate(graph.inputs):
        if item.role is Role.STATE and item.output is not None:
            state.append(k)
    for cuts in _ways(graph, state):
        if (traced := _traced(graph, size, cuts)) is not None:
            return cuts, traced
    try:
        return {}, trace_cut(graph, size, {})
    except (CaptureError, *TRACE_ERRORS):
        # Such as the results of an encoder, which a decoder reads and returns as they are.
        others = [k for k, item in enumerate(graph.inputs) if item.role is not Role.BATCH]
        for cuts in _ways(graph, others):
            if (traced := _traced(graph, size, cuts)) is not None:
                break
        else:
            raise
    for k in sorted(cuts):
        # Such as a bias of as many elements as there are examples.
        fewer = {position: dim for position, dim in cuts.items() if position != k}
        if (again := _traced(graph, size, fewer)) is not None:
            cuts, traced = fewer, again
    return cuts, traced


def _ways(graph: Graph, positions: Iterable[int]) -> Iterator[dict[int, int]]:
    """Ways to cut some of these inputs, those first that cut most. Arrays of one shape are cut
    alike.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for k in positions:
        alike.setdefault(graph.values[graph.inputs[k].value].shape, []).append(k)
    rows = batch_size(graph)
    shapes = [shape for shape in alike if rows in shape]
    dims = []
    for shape in shapes:
        dims.append([*(d for d, n in enumerate(shape) if n == rows), None])
    for chosen in itertools.islice(itertools.product(*dims), _MOST_WAYS):
        cuts = {}
        for shape, dim in zip(shapes, chosen, strict=True):
            if dim is not None:
                for k in alike[shape]:
                    cuts[k] = dim
        if cuts:
            yield cuts


def _traced(graph: Graph, size: int, cuts: Mapping[int, int]) -> Graph | None:
    """The step traced with these inputs cut; None if it cannot be, or changes its state."""
    try:
        traced = trace_cut(graph, size, cuts)
    except (CaptureError, *TRACE_ERRORS):
        return None
    for before, now in zip(graph.inputs, traced.inputs, strict=True):
        if before.output is None or now.output is None:
            continue
        kept, new = graph.outputs[before.output].value, traced.outputs[now.output].value
        if not isinstance(kept, int) or not isinstance(new, int):
            continue
        if graph.values[kept].shape != graph.values[before.value].shape:
            continue
        if traced.values[new].shape != traced.values[now.value].shape:
            return None
    return traced


def trace_cut(graph: Graph, size: int, cuts: Mapping[int, int]) -> Graph:
    """The step traced on so many examples. `cuts` are the inputs besides the batch that have a row
    for each, by position, with the dim of these rows; all others keep the shapes of the whole step.
    """
    leaves = []
    for k, (item, leaf) in enumerate(zip(graph.inputs, graph.calling.call.leaves, strict=True)):
        dim = 0 if item.role is Role.BATCH else cuts.get(k)
        if dim is not None:
            shape = graph.values[item.value].shape
            leaf = _Leaf(leaf, (*shape[:dim], size, *shape[dim + 1 :]))
        leaves.append(leaf)
    return with_copies(build_graph(graph.calling, leaves), graph, size, cuts)


def with_copies(part: Graph, whole: Graph, size: int, cuts: Mapping[int, int]) -> Graph:
    """The step on `size` examples, with what lies in memory of the inputs in `cuts`."""
    copies = _IN_A_LOOP * max(1, batch_size(whole) // size)
    inputs = tuple(
        replace(item, copies=copies) if k in cuts else item for k, item in enumerate(part.inputs)
    )
    return replace(part, inputs=inputs)


def in_stages(part: Graph) -> Graph:
    """A step at the size of a micro-batch, with what lies in memory of each input in a pipeline."""
    inputs = tuple(
        replace(item, copies=item.copies // _IN_A_LOOP * _IN_STAGES) if item.copies > 1 else item
        for item in part.inputs
    )
    return replace(part, inputs=inputs)


class _Leaf:
    """A leaf of another shape."""

    def __init__(self, like: Any, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.dtype = like.dtype
        self.weak_type = getattr(like, "weak_type", False)
