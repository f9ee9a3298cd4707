"""A step as segments, and the program of each combination of their blocks' options.

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

import numpy as np

from ..cluster import AXIS_NAMES, LogicalMesh
from ..core import InputError
from ..cost import Problem, evaluate, make_problem, phase_costs, picked_choices, price
from ..graph import Extract, Graph, Layers
from ..planners import (
    ILP,
    AbstractIntra,
    BlockOptions,
    IntraSolution,
    Space,
    block_options,
    restrict_blocks,
)
from ..sharding import (
    Choice,
    LayeredStep,
    Segments,
    Spec,
    batch_dims,
    find_segments,
    project,
    segment_layers,
    stage_step,
    without_partial,
)

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
    """A segment whose blocks follow given options; everything else is split as the integer program
    finds best.

    Attributes:
        options: of its blocks.
        choices: for each node of the segment.
        seconds: of its forward and backward pass and its update, by the cost model.
        state_bytes, kept_bytes, working_bytes: of each device, by the cost model: parameters and
            optimizer state, what the forward pass keeps for the backward pass, and the most that is
            there besides.
        enters, leaves: how its inputs and its outputs are split, by their positions.
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
    """Equal segments of a step, or what comes before the first one.

    Attributes:
        name: for people.
        count: how often it is in the step.
        problem: one of them as a step of its own.
        space: its choices on the mesh.
        blocks: its blocks with their options; none before the first block.
        intra: decides what the options leave open.
    """

    name: str
    count: int
    problem: Problem
    space: Space
    blocks: tuple[BlockOptions, ...]
    intra: AbstractIntra

    def combinations(self) -> Iterator[Options]:
        """All of them; one without options where there are no blocks."""
        return itertools.product(*[range(len(block)) for block in self.blocks])

    @cached_property
    def num_combinations(self) -> int:
        """How many of them are worth a look; see `promising`."""
        return min(math.prod(len(block) for block in self.blocks), _MOST)

    def promising(self) -> list[Combination]:
        """All combinations priced, or, of very many, the 243 that promise most by the cost model.

        These are found best first: options are given to one block after the other, and what has the
        least lower bound goes on. A combination whose bound is 1.5 times the best one's is
        hopeless.
        """
        if math.prod(len(block) for block in self.blocks) <= _MOST:
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
                    # A bound may be found weaker for more options; what held before still holds.
                    heapq.heappush(waiting, (max(bound_s, least_s), longer))
        return sorted(found, key=lambda c: (c.seconds, c.options))

    def _bound_s(self, options: Options) -> float | None:
        """No combination that begins with these options takes less; None if there is none."""
        space = restrict_blocks(self.space, self.blocks, {k: (o,) for k, o in enumerate(options)})
        if not all(mask.any() for mask in space.allowed):
            return None
        return self.intra.begin(self.problem, space, memory_limit_bytes=math.inf).bound()

    def combination(self, options: Options) -> Combination | None:
        """A combination priced; None if no choices follow it."""
        space = restrict_blocks(self.space, self.blocks, {k: (o,) for k, o in enumerate(options)})
        if not all(mask.any() for mask in space.allowed):
            return None
        solution = self.intra.solve(self.problem, space, memory_limit_bytes=math.inf)
        return None if solution is None else self._combination(options, solution)

    def _combination(self, options: Options, solution: IntraSolution) -> Combination:
        priced = self.space.priced
        costs = phase_costs(priced, solution.picks, self.problem.graph)
        choices = picked_choices(priced, solution.picks)
        nodes = self.problem.nodes
        enters = {
            position: project(choices[port.node], port.projection)
            for position, port in enumerate(nodes.input_ports)
            if port.node >= 0
        }
        leaves = {
            position: without_partial(project(choices[port.node], port.projection))
            for position, port in enumerate(nodes.output_ports)
            if port.node >= 0
        }
        return Combination(
            options=options,
            choices=choices,
            seconds=evaluate(priced, solution.picks).total_s,
            state_bytes=costs.state_bytes,
            kept_bytes=costs.in_flight_bytes,
            working_bytes=costs.working_bytes,
            enters=enters,
            leaves=leaves,
        )


@dataclass(frozen=True, eq=False)
class SegmentedStep:
    """A step as segments on one mesh.

    Attributes:
        problem: the whole step.
        mesh: of all its devices.
        segments: of its blocks.
        blocks: of the whole step with their options.
        kinds: what comes before the first block, and then each distinct segment.
        sequence: the kinds of the step in order.
        crossings: what crosses between neighbours, by their kinds.
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
        """Positions in `blocks` of those of a kind."""
        return () if kind == 0 else self.segments.kinds[kind - 1]

    def whole(
        self, options: Sequence[Options], intra: AbstractIntra | None = None
    ) -> IntraSolution | None:
        """The whole step with every segment of a kind following the same options; None if nothing
        fits.

        Args:
            options: for each kind.
        """
        fixed = {
            b: (o,)
            for kind, chosen in enumerate(options)
            for b, o in zip(self.blocks_of(kind), chosen, strict=True)
        }
        space = restrict_blocks(self.space, self.blocks, fixed)
        if not all(mask.any() for mask in space.allowed):
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
    """A step as segments, each of which can be measured by itself.

    Args:
        problem: the step, in one micro-batch.
        factors: see `find_blocks`.
        intra: decides what the options leave open, by default `ILP()`.

    Raises:
        InputError: the step has no blocks, or its layers are in a loop, which cannot be cut.
    """
    intra = intra or ILP()
    mesh = LogicalMesh(
        shape=mesh_shape, axis_names=AXIS_NAMES[: len(mesh_shape)], cluster=problem.cluster
    )
    space = _space(problem, mesh)
    blocks = block_options(problem, space, factors=factors)
    segments = find_segments(
        problem.graph, problem.nodes, [b.block for b in blocks], [len(b) for b in blocks]
    )
    layers = segment_layers(problem.graph, segments)
    extracts = stage_step(_layered(problem.graph, layers), range(len(layers))).extracts
    kinds = []
    # -1 is what comes before the first block.
    for number in range(-1, len(segments.kinds)):
        example = extracts[0 if number < 0 else 1 + segments.example(number)]
        part = _problem(example.graph, problem)
        part_space = _space(part, mesh)
        found = block_options(part, part_space, factors=factors)
        wanted = () if number < 0 else segments.kinds[number]
        # A program of one segment must have the choices that it has in the whole step.
        if len(found) != len(wanted):
            raise InputError(
                f"{problem.graph.name} cannot be profiled by segments: one of them has {len(found)}"
                f" blocks by itself and {len(wanted)} in the whole step, so a product spans two"
                " segments."
            )
        kinds.append(
            SegmentKind(
                name=layers.names[0 if number < 0 else 1 + segments.example(number)],
                count=1 if number < 0 else segments.count(number),
                problem=part,
                space=part_space,
                blocks=found,
                intra=intra,
            )
        )
    sequence = (0, *[1 + kind for kind in segments.sequence])
    examples = [
        extracts[0],
        *[extracts[1 + segments.example(kind)] for kind in range(len(segments.kinds))],
    ]
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


def _crossings(
    graph: Graph, extracts: Sequence[Extract], examples: Sequence[Extract], sequence: Sequence[int]
) -> dict[tuple[int, int], tuple[Crossing, ...]]:
    """Arrays that cross between neighbours of each pair of kinds, by the positions that it has in
    the example of each kind.
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
    """For arrays of a segment the positions of those that they are in the example of its kind.

    The first and the last of equal segments may have inputs and outputs of their own; then arrays
    of one shape and type come in the same order.
    """

    def look(v: int) -> tuple[object, ...]:
        return (graph.values[v].shape, graph.values[v].dtype) if v >= 0 else ()

    if [look(v) for v in values] == [look(v) for v in of_example]:
        return {v: place for place, v in enumerate(values)}
    waiting: dict[object, list[int]] = defaultdict(list)
    for place, v in enumerate(of_example):
        waiting[look(v)].append(place)
    return {v: waiting[look(v)].pop(0) for v in values if waiting[look(v)]}


def _space(problem: Problem, mesh: LogicalMesh) -> Space:
    priced = price(problem, mesh)
    return Space(
        name="blocks", priced=priced, allowed=[np.ones(len(n.choices), bool) for n in priced.nodes]
    )


def _layered(graph: Graph, layers: Layers) -> LayeredStep:
    return LayeredStep(
        graph=graph,
        part=graph,
        layers=layers,
        batch_dims=batch_dims(graph),
        num_micro_batches=1,
        combine={},
    )


def _problem(graph: Graph, whole: Problem) -> Problem:
    part = make_problem(graph, whole.cluster, on_missing_rule=whole.nodes.on_missing_rule)
    return replace(part, memory_limit_bytes=whole.memory_limit_bytes)
