"""A step cut into segments, and the combinations of options of the blocks in each segment, of which
each gives a program to measure.

Reference: arXiv 2504.00598 (segments, and enumeration of the options of one).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ..cluster import AXIS_NAMES, LogicalMesh
from ..core import InputError
from ..cost import Problem, evaluate, make_problem, phase_costs, price
from ..graph import Extract, Graph, Layers
from ..planners import (
    ILP,
    AbstractIntra,
    BlockOptions,
    IntraSolution,
    Space,
    as_one_block,
    block_options,
    restrict_blocks,
)
from ..sharding import (
    Choice,
    LayeredStep,
    Segments,
    Spec,
    batch_dims,
    blocks_of_operators,
    entry_operators,
    find_segments,
    project,
    segment_layers,
    stage_step,
    without_partial,
)

# The most combinations of a kind of segment that are tried, and the largest bound of those,
# relative to the first one found; see `SegmentKind.promising`.
_MOST = 243
_HOPELESS = 1.5

Options = tuple[int, ...]
"""One option for each block of a segment, by number."""


class Crossing(NamedTuple):
    """An array that crosses between two neighbouring segments.

    Attributes:
        leaves: its position among the outputs of the segment that makes it: the first of the two,
            or the second one if it crosses in the backward pass.
        enters: its position among the inputs of the other.
    """

    leaves: int
    enters: int
    is_backward: bool
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Combination:
    """A segment whose blocks follow given options; the splits that these leave open are chosen by
    an intra planner.

    Attributes:
        options: the option of each of its blocks.
        choices: for each node of the segment.
        seconds: time of its forward and backward pass and its update, by the cost model.
        state_bytes, kept_bytes, working_bytes: on each device, by the cost model: parameters and
            optimizer state, residuals that the forward pass keeps for the backward pass, and the
            most that is needed besides at any moment.
        enters, leaves: the specs of its inputs and of its outputs, by their positions.
    """

    options: Options
    choices: tuple[Choice, ...]
    seconds: float
    state_bytes: float
    kept_bytes: float
    working_bytes: float
    enters: Mapping[int, Spec]
    leaves: Mapping[int, Spec]


@dataclass(frozen=True, eq=False)
class SegmentKind:
    """A kind of equal segments of a step, or the part of the step before the first block.

    Attributes:
        name: name for readers.
        count: number of such segments in the step.
        of_step: positions of its distinct blocks among those of the step.
        problem: one of the segments as a step of its own.
        space: its choices on the mesh.
        blocks: for each of these, the products that correspond to it, with their options.
        intra: decides the splits that the options leave open.
    """

    name: str
    count: int
    of_step: tuple[int, ...]
    problem: Problem
    space: Space
    blocks: tuple[BlockOptions, ...]
    intra: AbstractIntra

    def combinations(self) -> Iterator[Options]:
        """All combinations of options of the blocks; without blocks, one empty combination."""
        return itertools.product(*map(range, map(len, self.blocks)))

    @cached_property
    def num_combinations(self) -> int:
        """Number of combinations that are tried, at most 243; see `promising`."""
        return min(math.prod(map(len, self.blocks)), _MOST)

    def promising(self) -> list[Combination]:
        """All combinations with their prices or, if there are more than 243, the best 243 by the
        cost model.

        These are found by a best-first search, which fixes the option of one block after another
        and always extends the partial combination with the least lower bound. It stops where a
        bound exceeds 1.5 times the seconds of the first combination found.
        """
        if math.prod(map(len, self.blocks)) <= _MOST:
            return [c for options in self.combinations() if (c := self.combination(options))]
        found: list[Combination] = []
        waiting: list[tuple[float, Options]] = [(0.0, ())]
        while waiting and len(found) < _MOST:
            bound_s, options = heapq.heappop(waiting)
            if found and bound_s > _HOPELESS * found[0].seconds:
                break
            if len(options) == len(self.blocks):
                combination = self.combination(options)
                found += [combination] if combination else []
                continue
            for option in range(len(self.blocks[len(options)])):
                longer = (*options, option)
                least_s = self._bound_s(longer)
                if least_s is not None:
                    # With more options fixed, a weaker bound may be found; the earlier one still
                    # holds.
                    heapq.heappush(waiting, (max(bound_s, least_s), longer))
        return sorted(found, key=lambda c: (c.seconds, c.options))

    def _bound_s(self, options: Options) -> float | None:
        """A lower bound in seconds on all combinations that begin with these options; None if there
        are none.
        """
        space = _restricted(self, dict(enumerate(options)))
        if space is None:
            return None
        return self.intra.begin(self.problem, space, memory_limit_bytes=math.inf).bound()

    def combination(self, options: Options) -> Combination | None:
        """The combination of these options with its prices; None if no choices follow them."""
        space = _restricted(self, dict(enumerate(options)))
        if space is None:
            return None
        solution = self.intra.solve(self.problem, space, memory_limit_bytes=math.inf)
        if solution is None:
            return None
        costs, choices = phase_costs(solution.picked, self.problem.graph), solution.picked.choices
        nodes = self.problem.nodes
        enters, leaves = {}, {}
        for position, port in enumerate(nodes.input_ports):
            if port.node >= 0:
                enters[position] = project(choices[port.node], port.projection)
        for position, port in enumerate(nodes.output_ports):
            if port.node >= 0:
                leaves[position] = without_partial(project(choices[port.node], port.projection))
        return Combination(
            options=options,
            choices=choices,
            seconds=evaluate(solution.picked).total_s,
            state_bytes=costs.state_bytes,
            kept_bytes=costs.in_flight_bytes + costs.recomputed_bytes,
            working_bytes=costs.working_bytes,
            enters=enters,
            leaves=leaves,
        )


@dataclass(frozen=True, eq=False)
class SegmentedStep:
    """A step cut into segments, on one mesh.

    Attributes:
        problem: the whole step.
        mesh: a mesh of all devices.
        segments: the segments that its blocks form.
        space: the choices of the whole step on the mesh.
        blocks: the blocks of the whole step with their options.
        kinds: first the part before the first block, if any operator comes before it; it has no
            blocks. Then each kind of segment.
        sequence: the kind of each segment of the step, in order.
        crossings: arrays that cross between neighbours, by the kinds of both.
    """

    problem: Problem
    mesh: LogicalMesh
    segments: Segments
    space: Space
    blocks: tuple[BlockOptions, ...]
    kinds: tuple[SegmentKind, ...]
    sequence: tuple[int, ...]
    crossings: Mapping[tuple[int, int], tuple[Crossing, ...]]

    @cached_property
    def num_programs(self) -> int:
        """Number of programs to measure."""
        return sum(kind.num_combinations for kind in self.kinds)

    def blocks_of(self, kind: int) -> tuple[int, ...]:
        """Positions in `blocks` of the distinct blocks of a kind of segment."""
        return self.kinds[kind].of_step

    def whole(
        self, options: Sequence[Options], intra: AbstractIntra | None = None
    ) -> IntraSolution | None:
        """The best solution of the whole step in which all segments of a kind follow the same
        options; None if none fits.

        Args:
            options: for each kind of segment.
        """
        fixed = {}
        for kind, chosen in enumerate(options):
            for b, o in zip(self.blocks_of(kind), chosen, strict=True):
                fixed[b] = o
        space = _restricted(self, fixed)
        if space is None:
            return None
        solver = intra or ILP()
        return solver.solve(self.problem, space, memory_limit_bytes=self.problem.memory_limit_bytes)


def segment_step(
    problem: Problem,
    mesh_shape: tuple[int, ...],
    *,
    factors: str = "cfp",
    intra: AbstractIntra | None = None,
) -> SegmentedStep:
    """Cut a step into segments, each of which can be measured by itself.

    Args:
        problem: the step, in one micro-batch.
        factors: see `find_blocks`.
        intra: decides the splits that the options leave open; by default `ILP()`.

    Raises:
        InputError: the step has no blocks, its layers are in a loop, which cannot be cut, or a
            segment alone has other blocks than in the whole step.
    """
    intra = intra or ILP()
    mesh = LogicalMesh(
        shape=mesh_shape, axis_names=AXIS_NAMES[: len(mesh_shape)], cluster=problem.cluster
    )
    space = _space(problem, mesh)
    blocks = block_options(problem, space, factors=factors)
    plain = [b.block for b in blocks]
    segments = find_segments(problem.graph, problem.nodes, plain, list(map(len, blocks)))
    layers = segment_layers(problem.graph, segments)
    extracts = stage_step(_layered(problem.graph, layers), range(len(layers))).extracts
    # The part before the first block, if there is one, is the first kind.
    before = len(layers) - len(segments.sequence)
    places = [*range(before), *[before + segments.example(k) for k in range(len(segments.kinds))]]
    of_step = [()] * before + [tuple(dict.fromkeys(kind)) for kind in segments.kinds]
    sequence = (*range(before), *[before + kind for kind in segments.sequence])
    block_of_op = blocks_of_operators(problem.nodes, plain)
    kinds = []
    for number, (place, wanted) in enumerate(zip(places, of_step, strict=True)):
        extracted = make_problem(
            extracts[place].graph, problem.cluster, on_missing_rule=problem.nodes.on_missing_rule
        )
        part = replace(extracted, memory_limit_bytes=problem.memory_limit_bytes)
        part_space = _space(part, mesh)
        found = block_options(part, part_space, factors=factors)
        meant = {}
        for op, own in entry_operators(part.nodes, [b.block for b in found]):
            meant[own] = block_of_op.get(extracts[place].ops[op])
        kinds.append(
            SegmentKind(
                name=layers.names[place],
                count=sequence.count(number),
                of_step=wanted,
                problem=part,
                space=part_space,
                blocks=_corresponding(problem, found, {b: blocks[b] for b in wanted}, meant),
                intra=intra,
            )
        )
    examples = [extracts[place] for place in places]
    return SegmentedStep(
        problem=problem,
        mesh=mesh,
        segments=segments,
        space=space,
        blocks=blocks,
        kinds=tuple(kinds),
        sequence=sequence,
        crossings=_crossings(
            problem.graph, extracts, [examples[kind] for kind in sequence], sequence
        ),
    )


def _corresponding(
    step: Problem,
    found: Sequence[BlockOptions],
    wanted: Mapping[int, BlockOptions],
    meant: Mapping[int, int | None],
) -> tuple[BlockOptions, ...]:
    """For each block of a step that a segment holds, the blocks of the segment alone that have its
    products. There may be several: alone, equal layers may have separate nodes.

    Args:
        step: the whole step.
        found: the blocks of the segment alone.
        wanted: the step's blocks, by number.
        meant: for each position in `found` the step's block that has the operator of the entry;
            None if none has, so that its split is open here too.

    Raises:
        InputError: a block of the step has no counterpart with the same options in the segment.
    """
    together, wrong = [], []
    for number, whole in wanted.items():
        own = [k for k in range(len(found)) if meant.get(k) == number]
        label = step.nodes.nodes[whole.block.entry].label
        if not own:
            wrong.append(f"{label} begins no block there")
        elif any(found[k].choices != whole.choices for k in own):
            wrong.append(f"{label} cannot be split there as in the whole step")
        else:
            together.append(as_one_block([found[k] for k in own]))
    if wrong:
        raise InputError(
            f"{step.graph.name} cannot be profiled by segments: alone, a segment does not have the"
            f" blocks that it has in the whole step: {'; '.join(wrong)}. Plan the whole step:"
            " --method blocks."
        )
    return tuple(together)


def _crossings(
    graph: Graph, extracts: Sequence[Extract], examples: Sequence[Extract], sequence: Sequence[int]
) -> dict[tuple[int, int], tuple[Crossing, ...]]:
    """For each pair of kinds of neighbours, the arrays that cross between them, by their positions
    in the example segment of each kind.
    """
    found: dict[tuple[int, int], tuple[Crossing, ...]] = {}
    for k, pair in enumerate(itertools.pairwise(sequence)):
        if pair in found:
            continue
        crossing = []
        for maker, reader in ((k, k + 1), (k + 1, k)):
            made, read = _outputs(extracts[maker]), _inputs(extracts[reader])
            leaves = _places(graph, made, _outputs(examples[maker]))
            enters = _places(graph, read, _inputs(examples[reader]))
            for v in made:
                if v in leaves and v in enters:
                    value = graph.values[v]
                    crossing.append(
                        Crossing(
                            leaves[v],
                            enters[v],
                            maker > reader,
                            value.shape,
                            value.dtype,
                            value.num_bytes,
                        )
                    )
        found[pair] = tuple(crossing)
    return found


def _inputs(extract: Extract) -> list[int]:
    return [extract.values[item.value] for item in extract.graph.inputs]


def _outputs(extract: Extract) -> list[int]:
    return [
        extract.values[o.value] if isinstance(o.value, int) else -1 for o in extract.graph.outputs
    ]


def _places(graph: Graph, values: Sequence[int], of_example: Sequence[int]) -> dict[int, int]:
    """For each array of a segment, the position of the array that corresponds to it in the example
    of the segment's kind.

    The first and the last of equal segments may have other inputs and outputs than the example.
    Then arrays of one shape and dtype are taken to come in the same order in both.
    """

    def look(v: int) -> tuple[object, ...]:
        return (graph.values[v].shape, graph.values[v].dtype) if v >= 0 else ()

    if [look(v) for v in values] == [look(v) for v in of_example]:
        return {v: place for place, v in enumerate(values)}
    waiting: dict[object, list[int]] = defaultdict(list)
    for place, v in enumerate(of_example):
        waiting[look(v)].append(place)
    return {v: waiting[look(v)].pop(0) for v in values if waiting[look(v)]}


def _restricted(of: SegmentKind | SegmentedStep, fixed: Mapping[int, int]) -> Space | None:
    """The choices that follow these options of blocks; None if there are none."""
    space = restrict_blocks(of.space, of.blocks, {block: (o,) for block, o in fixed.items()})
    return space if all(mask.any() for mask in space.allowed) else None


def _space(problem: Problem, mesh: LogicalMesh) -> Space:
    return Space.whole("blocks", price(problem, mesh))


def _layered(graph: Graph, layers: Layers) -> LayeredStep:
    return LayeredStep(
        graph=graph,
        part=graph,
        layers=layers,
        batch_dims=batch_dims(graph),
        num_micro_batches=1,
        combine={},
    )
