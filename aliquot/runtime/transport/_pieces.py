"""Arrays in pieces: the rows of a parameter that is stacked over layers lie on the stages that run
these layers.

The step itself sees one array for each piece (`split_scans`); its caller passes and gets one leaf,
as without a pipeline.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from ...core import InputError
from ...graph import Graph, Piece
from ._state import gather

# Rows of a stacked array, as `split_scans` names them.
_RANGE = re.compile(r"(.*)\[(\d+):(\d+)\]")


class PiecedArray:
    """An array whose rows lie on several meshes: one leaf of a tree, read as a whole by
    `np.asarray`.

    Made by a step whose stages each keep some layers of a stack. Give it back to the step as it is;
    `jnp.asarray` makes a plain array of it, on one device. With several processes, all must do
    either together, as they exchange the pieces.

    Args:
        pieces: arrays that differ in their number of rows alone, in order.

    Attributes:
        pieces: the same.
        bounds: the row at which each piece begins, and the number of all rows.
    """

    __slots__ = ("bounds", "pieces")

    def __init__(self, pieces: Sequence[jax.Array]) -> None:
        self.pieces: tuple[jax.Array, ...] = tuple(pieces)
        self.bounds: tuple[int, ...] = (
            0,
            *itertools.accumulate(piece.shape[0] for piece in self.pieces),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return (self.bounds[-1], *self.pieces[0].shape[1:])

    @property
    def dtype(self) -> Any:
        """Type of its elements."""
        return self.pieces[0].dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the whole."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return sum(piece.nbytes for piece in self.pieces)

    def block_until_ready(self) -> PiecedArray:
        """Wait until all pieces are computed."""
        for piece in self.pieces:
            piece.block_until_ready()
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """The whole, on the host. Random keys come as their words."""
        if copy is False:
            raise ValueError(
                "The pieces of a PiecedArray lie apart: they cannot be read as one array without a"
                " copy."
            )
        whole = np.concatenate(list(map(gather, self.pieces)))
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __jax_array__(self) -> jax.Array:
        """The whole, on one device."""
        whole = jnp.asarray(self.__array__())
        if not jnp.issubdtype(self.dtype, jax.dtypes.prng_key):
            return whole
        keys: jax.Array = jax.random.wrap_key_data(whole, impl=jax.random.key_impl(self.pieces[0]))
        return keys

    def __repr__(self) -> str:
        where = []
        for (a, b), piece in zip(itertools.pairwise(self.bounds), self.pieces, strict=True):
            devices = sorted(piece.devices(), key=lambda device: device.id)
            several = f"{len(devices)} devices from " if len(devices) > 1 else ""
            where.append(f"rows {a}:{b} on {several}{devices[0]}")
        return f"PiecedArray({self.dtype}{list(self.shape)}, {', '.join(where)})"


class Rows(NamedTuple):
    """Sharding of rows `[start, stop)` of an array; of all of it if `stop` is None."""

    sharding: NamedSharding
    start: int = 0
    stop: int | None = None

    def of(self, array: Any) -> Any:
        """These rows of an array."""
        return array if self.stop is None else array[self.start : self.stop]


def places_of(shardings: Mapping[str, NamedSharding]) -> dict[str, tuple[Rows, ...]]:
    """The pieces of arrays with their shardings, by path, from shardings of pieces by paths such as
    `params.w[0:4]` and `params.w[4:8]`.
    """
    places: dict[str, list[Rows]] = {}
    for path, sharding in shardings.items():
        match = _RANGE.fullmatch(path)
        rows = Rows(sharding, int(match[2]), int(match[3])) if match else Rows(sharding)
        places.setdefault(match[1] if match else path, []).append(rows)
    return {path: tuple(sorted(rows, key=lambda r: r.start)) for path, rows in places.items()}


def original_of(graph: Graph) -> Graph:
    """The graph as it was captured: that of the user's arguments and results."""
    while graph.split is not None:
        graph = graph.split.original
    return graph


def input_pieces(graph: Graph) -> tuple[tuple[Piece, ...], ...]:
    """For each array that the user passes, its pieces among the graph's inputs."""
    if graph.split is None:
        return tuple((Piece(position=k),) for k in range(len(graph.inputs)))
    return _composed(input_pieces(graph.split.original), graph.split.inputs)


def output_pieces(graph: Graph) -> tuple[tuple[Piece, ...], ...]:
    """For each array that the user gets, its pieces among the graph's outputs."""
    if graph.split is None:
        return tuple((Piece(position=k),) for k in range(len(graph.outputs)))
    return _composed(output_pieces(graph.split.original), graph.split.outputs)


def _composed(
    outer: Sequence[Sequence[Piece]], inner: Sequence[Sequence[Piece]]
) -> tuple[tuple[Piece, ...], ...]:
    """Pieces of pieces: a graph may have been cut for scans of one length, and then for those of
    another.
    """
    found = []
    for pieces in outer:
        within: list[Piece] = []
        for p in pieces:
            for q in inner[p.position]:
                stop = p.stop if q.stop is None else p.start + q.stop
                within.append(Piece(position=q.position, start=p.start + q.start, stop=stop))
        found.append(tuple(within))
    return tuple(found)


def cut_leaves(
    leaves: Sequence[Any], pieces: Sequence[Sequence[Piece]], paths: Sequence[str]
) -> list[Any]:
    """The user's arrays, cut into the inputs of a graph in pieces.

    Arrays that are in these pieces already are passed on; others are joined if need be, and cut.

    Args:
        leaves: whole arrays, or `PiecedArray`s.
        pieces: as `input_pieces` gives them.
        paths: how messages call the leaves.

    Raises:
        InputError: an array does not have all rows, for example because it is one process's part.
    """
    cut: list[Any] = []
    for leaf, leaf_pieces, path in zip(leaves, pieces, paths, strict=True):
        if isinstance(leaf, PiecedArray):
            if leaf.bounds == (0, *(piece.stop for piece in leaf_pieces)):
                cut += leaf.pieces
                continue
            # Keys have no NumPy form.
            leaf = (
                jnp.asarray(leaf)
                if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
                else np.asarray(leaf)
            )
        stop = leaf_pieces[-1].stop
        if stop is not None and leaf.shape[0] != stop:
            raise InputError(
                f"{path} has {leaf.shape[0]} rows, and its {stop} rows lie on several stages. Pass"
                " all of it in every process, or make it with `step.init`."
            )
        for piece in leaf_pieces:
            cut.append(leaf if piece.stop is None else leaf[piece.start : piece.stop])
    return cut


def join_results(arrays: Sequence[Any], pieces: Sequence[Sequence[Piece]]) -> list[Any]:
    """The user's results from those of a graph in pieces: one for each entry of `pieces`."""
    found: list[Any] = []
    for leaf_pieces in pieces:
        found.append(joined([arrays[piece.position] for piece in leaf_pieces], leaf_pieces))
    return found


def joined(arrays: Sequence[Any], pieces: Sequence[Piece | Rows]) -> Any:
    """The user's array from those of its pieces: the array itself, or a `PiecedArray`."""
    return arrays[0] if pieces[0].stop is None else PiecedArray(arrays)
