"""Segments: runs of ParallelBlocks that repeat by structure, so that one measurement serves all of
them.

Segments end where few bytes cross from one block to the next, and have up to five blocks, no two of
them alike; more only in a loop over layers, which cannot be cut. They are chosen so that the
options of all distinct kinds make as few combinations as possible: that is how many programs there
are to measure, whatever the depth of the model.

Reference: arXiv 2504.00598, whose released code covers the blocks with as few kinds as it can.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from ..core import InputError
from ..graph import Graph, Layers, cut_between, narrowest_bytes
from ._nodes import NodeGraph
from ._parallel_block import ParallelBlock, block_by_operator

_LONGEST = 5
_SHORTEST = 3
# Segments may end where at most this many times the bytes cross that cross at the narrowest place,
# or fewer bytes than at the places beside it.
_NARROW = 1.5
# How many sets of kinds are kept at each place of the sequence: the width of the beam.
_KEPT = 32


class Segments(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A step's forward pass as a sequence of segments.

    Attributes:
        blocks: of the step; kinds count positions in it.
        kinds: distinct segments, each by its blocks in program order, where one may come more than
            once; the first of the sequence comes first.
        sequence: the kind of each segment of the step.
        entries: for each segment the operators that are the entries of its blocks.
    """

    blocks: tuple[ParallelBlock, ...]
    kinds: tuple[tuple[int, ...], ...]
    sequence: tuple[int, ...]
    entries: tuple[tuple[int, ...], ...]

    def count(self, kind: int) -> int:
        """Number of segments of the step of one kind."""
        return self.sequence.count(kind)

    def example(self, kind: int) -> int:
        """The position of a segment of a kind: the middle one, because those at the ends of a step
        have more to do.
        """
        places = [k for k, other in enumerate(self.sequence) if other == kind]
        return places[len(places) // 2]


def find_segments(
    graph: Graph, nodes: NodeGraph, blocks: Sequence[ParallelBlock], num_options: Sequence[int]
) -> Segments:
    """Cover a step's blocks with segments.

    Args:
        blocks: from `find_blocks`.
        num_options: for each block the number of its options.

    Raises:
        InputError: the step has no blocks.
    """
    if not blocks:
        raise InputError(
            f"{graph.name} has no product with a parameter in its forward pass, so there is nothing"
            " to profile."
        )
    instances = entry_operators(nodes, blocks)
    of_block = [block for _, block in instances]
    crossing = narrowest_bytes(graph, [(a, b) for (a, _), (b, _) in itertools.pairwise(instances)])
    # A segment may end at narrow places; nothing can be cut where no bytes cross. The narrowest
    # place of a step is no measure for all of it: an encoder may be wider than its decoder, and its
    # output crosses every layer of the decoder. So places narrower than those beside them count.
    open_bytes = [c if c > 0 else math.inf for c in crossing]
    narrowest = min(open_bytes, default=math.inf)
    walled = [math.inf, *open_bytes, math.inf]
    is_boundary = [
        True,
        *[
            c < math.inf and (c <= _NARROW * narrowest or c <= min(before, after))
            for before, c, after in zip(walled, walled[1:], walled[2:], strict=False)
        ],
        True,
    ]
    # A loop over layers, or a rematerialised region, cannot be cut: the blocks in it are one
    # segment, however many they are.
    limits = ((_SHORTEST, _LONGEST), (1, _LONGEST), (1, len(of_block)))
    covers = (
        _cover(of_block, is_boundary, num_options, *lengths, alike=alike)
        for alike, lengths in itertools.product((False, True), limits)
    )
    starts = next(cover for cover in covers if cover is not None)
    pieces = _pieces(of_block, starts)
    # A layer of more blocks than a segment may have is two segments or three. If these can only be
    # as long as usual, they may fall out of step with the layers, and the ends are kinds apart.
    shorter = _cover(of_block, is_boundary, num_options, _SHORTEST - 1, _LONGEST, alike=False)
    if shorter is not None and len({*_pieces(of_block, shorter)}) < len({*pieces}):
        starts, pieces = shorter, _pieces(of_block, shorter)
    kinds = tuple(dict.fromkeys(pieces))
    return Segments(
        blocks=tuple(blocks),
        kinds=kinds,
        sequence=tuple(map(kinds.index, pieces)),
        entries=tuple(_pieces([op for op, _ in instances], starts)),
    )


def _pieces(things: Sequence[int], starts: Sequence[int]) -> list[tuple[int, ...]]:
    """The blocks of each segment, or their entries."""
    ends = [*starts[1:], len(things)]
    return [tuple(things[a:b]) for a, b in zip(starts, ends, strict=True)]


def segment_layers(graph: Graph, segments: Segments) -> Layers:
    """A step's layers: one for what comes before the first block, if anything does, and one for
    each segment.

    Raises:
        InputError: two segments lie in one loop, which cannot be cut.
    """
    bounds = [(-1, segments.entries[0][0])]
    bounds += [(before[-1], after[0]) for before, after in itertools.pairwise(segments.entries)]
    return cut_between(graph, bounds)


def entry_operators(nodes: NodeGraph, blocks: Sequence[ParallelBlock]) -> list[tuple[int, int]]:
    """Operators that are entries, in program order, each with its block."""
    block_of: dict[int, int] = {}
    for k, block in enumerate(blocks):
        block_of.update(dict.fromkeys(block.entries, k))
    return sorted(block_by_operator(nodes, block_of).items())


def _cover(
    of_block: Sequence[int],
    is_boundary: Sequence[bool],
    num_options: Sequence[int],
    shortest: int,
    longest: int,
    *,
    alike: bool,
) -> list[int] | None:
    """The starts of segments that cover the step: those with the fewest combinations of options
    over distinct kinds, then with the fewest segments. None if no segments cover it.

    Args:
        alike: whether a segment may hold a block more than once.
    """
    count = len(of_block)

    def combinations(kinds: frozenset[tuple[int, ...]]) -> int:
        # Kinds are measured one by one, so their combinations add up; only options inside one kind
        # multiply.
        total = 0
        for kind in kinds:
            total += math.prod(num_options[b] for b in set(kind))
        return total

    reached: list[dict[frozenset[tuple[int, ...]], tuple[int, ...]]] = [
        {} for _ in range(count + 1)
    ]
    reached[0][frozenset()] = ()
    for end in range(1, count + 1):
        if not is_boundary[end]:
            continue
        # Where a segment with this end may start; at the end of the step, the head, it may be
        # shorter than usual.
        fewest = 1 if end == len(is_boundary) - 1 else shortest
        for start in range(max(end - longest, 0), end - fewest + 1):
            if not is_boundary[start]:
                continue
            piece = tuple(of_block[start:end])
            if not alike and len(set(piece)) < len(piece):
                continue
            for kinds, starts in reached[start].items():
                more, longer = kinds | {piece}, (*starts, start)
                known = reached[end].get(more)
                if known is None or len(longer) < len(known):
                    reached[end][more] = longer
        # Equal covers are told apart by where they start, so that each run of the search finds the
        # same one.
        best = sorted(
            reached[end].items(), key=lambda item: (combinations(item[0]), len(item[1]), item[1])
        )
        reached[end] = dict(best[:_KEPT])
    return list(next(iter(reached[count].values()))) if reached[count] else None
