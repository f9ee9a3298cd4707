"""Cut a step whose layers are a scan into ranges of layers, without unrolling the scan.

Every scan over layers becomes one scan for each range, with the carry passed on, and every array
that is stacked over layers becomes one array for each range: parameters, gradients, moments, and
the results of the update. A stage of a pipeline then holds only its own pieces.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ..core import InputError
from ._split_emission import Emission
from ._split_order import side_by_side
from ._split_reach import stacked_values, tied_values
from ._split_structured import write_step
from ._split_values import Pieces, index_of
from ._types import Graph, Input, Output, Piece, Split, ValueId


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitGraph:
    """A step in ranges of layers.

    Attributes:
        graph: the step on pieces. A stacked input `params.w` is the inputs `params.w[0:5]`,
            `params.w[5:8]`, each with its own successor. `calling` is still that of the original.
        split: where it was cut, and the pieces of each input and output; also `graph.split`.
        joined: positions in the original's `ops` of operators that mix layers: their operands are
            concatenated first. For a loop, these are one of its links and the operators inside that
            read such operands.
        recut: positions of operators that make a stacked array as a whole: their results are cut
            afterwards.
    """

    graph: Graph
    split: Split
    joined: tuple[int, ...]
    recut: tuple[int, ...]

    def cut(self, arrays: Sequence[Any]) -> list[Any]:
        """Convert arrays for the inputs of the original to arrays for the inputs of `graph`."""
        found: list[Any] = []
        for array, pieces in zip(arrays, self.split.inputs, strict=True):
            found += [array if p.stop is None else array[p.start : p.stop] for p in pieces]
        return found

    def join(self, arrays: Sequence[Any]) -> list[Any]:
        """Convert results of `graph` to results of the original."""
        parts_of_outputs = []
        for pieces in self.split.outputs:
            parts_of_outputs.append([arrays[piece.position] for piece in pieces])
        found = []
        for parts in parts_of_outputs:
            found.append(parts[0] if len(parts) == 1 else jnp.concatenate(parts))
        return found


def split_scans(graph: Graph, bounds: Sequence[int]) -> SplitGraph:
    """Cut the scans over layers of a step, and all stacked arrays, at `bounds`.

    The result computes what the step computes, bit by bit, except for sums over all layers (the
    norm of all gradients), which become sums of the ranges' sums. The cut depends only on the
    structure of the step, not on the size of its batch: the same step on another batch is cut in
    the same way, operator by operator. Several passes through the layers run side by side, range
    by range.

    Args:
        graph: a captured step.
        bounds: where ranges begin, and the number of layers: `(0, 5, 8)` for five layers and three.
            All scans over `bounds[-1]` layers are cut; scans of other lengths stay as they are.

    Raises:
        InputError: the bounds are not increasing from 0 to a number of layers that some scan has,
            the step has no scan over layers, or the scan is inside another loop.
    """
    edges = _edges(graph, bounds)
    cut = _split(graph, edges, stacked_values(graph, edges[-1]))
    return replace(cut, graph=side_by_side(cut.graph))


def split_rows(graph: Graph, bounds: Sequence[int], outputs: Collection[int]) -> SplitGraph:
    """Cut some outputs of any function into ranges of rows, together with all values that are made
    row by row for them.

    Each range is then computed without the other rows, as far as rows are independent: a function
    that makes stacked parameters by `vmap` or a scan over layers makes each range separately.

    Args:
        graph: a captured function.
        bounds: where ranges begin, and the number of rows.
        outputs: positions of outputs that have `bounds[-1]` rows.

    Raises:
        InputError: the bounds are not increasing from 0.
    """
    edges = _edges(graph, bounds)
    seeds = [value for k in outputs if isinstance(value := graph.outputs[k].value, int)]
    return _split(graph, edges, tied_values(graph, edges[-1], seeds))


def _split(graph: Graph, edges: tuple[int, ...], stacked: frozenset[ValueId]) -> SplitGraph:
    """The graph with the values in `stacked` cut at `edges`."""
    arrays = Pieces(
        graph=graph, stacked=stacked, ranges=tuple(zip(edges[:-1], edges[1:], strict=True))
    )
    emission = Emission(arrays=arrays)
    body = write_step(emission)
    inputs = _pieces(arrays, graph.input_values)
    outputs = _pieces(arrays, graph.output_values)
    split = Split(original=graph, bounds=edges, inputs=inputs, outputs=outputs)
    new_inputs: list[Input] = []
    for item, pieces in zip(graph.inputs, inputs, strict=True):
        for k, piece in enumerate(pieces):
            output = None if item.output is None else outputs[item.output][k].position
            value = index_of(body.inputs[piece.position])
            path = item.path + _suffix(piece)
            new_inputs.append(replace(item, path=path, value=value, output=output))
    new_outputs: list[Output] = []
    for result, pieces in zip(graph.outputs, outputs, strict=True):
        for piece in pieces:
            path = result.path + _suffix(piece)
            new_outputs.append(Output(path=path, value=body.outputs[piece.position]))
    cut = Graph(
        name=graph.name,
        values=tuple(arrays.values),
        ops=tuple(emission.ops),
        body=body,
        inputs=tuple(new_inputs),
        constants=arrays.constants,
        outputs=tuple(new_outputs),
        calling=graph.calling,
        split=split,
    )
    return SplitGraph(
        graph=cut,
        split=split,
        joined=tuple(sorted(emission.joined)),
        recut=tuple(sorted(emission.recut)),
    )


def _edges(graph: Graph, bounds: Sequence[int]) -> tuple[int, ...]:
    try:
        edges = tuple(map(operator.index, bounds))
    except TypeError:
        edges = ()
    if (
        len(edges) < 2
        or edges[0] != 0
        or any(a >= b for a, b in zip(edges[:-1], edges[1:], strict=True))
    ):
        raise InputError(
            f"bounds={tuple(bounds)} are no ranges of the layers of {graph.name}: they must"
            " increase from 0 to the number of layers, so that each layer is in one range. For"
            " eight layers in two halves write (0, 4, 8)."
        )
    return edges


def _pieces(arrays: Pieces, values: Sequence[Any]) -> tuple[tuple[Piece, ...], ...]:
    pieces = []
    position = 0
    for value in values:
        stacked = isinstance(value, int) and value in arrays.stacked
        ranges: Sequence[tuple[int, int | None]] = arrays.ranges if stacked else ((0, None),)
        pieces.append(
            tuple(
                [Piece(position=position + k, start=a, stop=b) for k, (a, b) in enumerate(ranges)]
            )
        )
        position += len(ranges)
    return tuple(pieces)


def _suffix(piece: Piece) -> str:
    return "" if piece.stop is None else f"[{piece.start}:{piece.stop}]"
