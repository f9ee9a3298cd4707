"""A step as segments, and the program of each combination of their blocks' options.

Reference: arXiv 2504.00598 (segments, and enumeration of the options of one).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..cluster import AXIS_NAMES, LogicalMesh
from ..core import InputError
from ..cost import Problem, evaluate, make_problem, phase_costs, picked_choices, price
from ..graph import Graph, Layers, Phase, fold
from ..planners import ILP, AbstractIntra, BlockOptions, IntraSolution, Space, block_options, restrict_blocks
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

Options = tuple[int, ...]
"""One option for each block of a segment, by number."""


class Crossing(NamedTuple):
    """An array that may cross between segments: equal ones of equal segments have one class."""

    value_class: int
    is_backward: bool
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Combination:
    """A segment whose blocks follow given options; everything else is split as the integer program finds best.

    Attributes:
        options: of its blocks.
        choices: for each node of the segment.
        seconds: of its forward and backward pass and its update, by the cost model.
        state_bytes, kept_bytes, working_bytes: of each device, by the cost model: parameters and
            optimizer state, what the forward pass keeps for the backward pass, and the most that is
            there besides.
        enters, leaves: how the arrays are split that it reads from other segments, and that it makes
            for others, by `Crossing`.
    """

    options: Options
    choices: tuple[Choice, ...]
    seconds: float
    state_bytes: float
    kept_bytes: float
    working_bytes: float
    enters: Mapping[Crossing, Spec]
    leaves: Mapping[Crossing, Spec]


@dataclass(frozen=True, eq=False)
class SegmentKind:
    """Equal segments of a step, or what comes before the first one.

    Attributes:
        name: for people.
        count: how often it is in the step.
        problem: one of them as a step of its own.
        space: its choices on the mesh.
        blocks: its blocks with their options; none before the first block.
        crossings: for each of its values what it is to the whole step.
        intra: decides what the options leave open.
    """

    name: str
    count: int
    problem: Problem
    space: Space
    blocks: tuple[BlockOptions, ...]
    crossings: tuple[Crossing, ...]
    intra: AbstractIntra

    def combinations(self) -> Iterator[Options]:
        """All of them; one without options where there are no blocks."""
        return itertools.product(*[range(len(block)) for block in self.blocks])

    def combination(self, options: Options) -> Combination | None:
        """A combination priced; None if no choices follow it."""
        space = restrict_blocks(self.space, self.blocks, dict(enumerate(options)))
        if not all(mask.any() for mask in space.allowed):
            return None
        solution = self.intra.solve(self.problem, space, memory_limit_bytes=math.inf)
        return None if solution is None else self._combination(options, solution)

    def _combination(self, options: Options, solution: IntraSolution) -> Combination:
        priced = self.space.priced
        costs = phase_costs(priced, solution.picks, self.problem.graph)
        choices = picked_choices(priced, solution.picks)
        graph, nodes = self.problem.graph, self.problem.nodes
        enters = {
            self.crossings[item.value]: project(choices[port.node], port.projection)
            for item, port in zip(graph.inputs, nodes.input_ports, strict=True)
            if port.node >= 0
        }
        leaves = {
            self.crossings[output.value]: without_partial(project(choices[port.node], port.projection))
            for output, port in zip(graph.outputs, nodes.output_ports, strict=True)
            if port.node >= 0 and isinstance(output.value, int)
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
    """

    problem: Problem
    mesh: LogicalMesh
    segments: Segments
    space: Space
    blocks: tuple[BlockOptions, ...]
    kinds: tuple[SegmentKind, ...]
    sequence: tuple[int, ...]

    @cached_property
    def num_programs(self) -> int:
        """How many there are to measure."""
        return sum(math.prod(len(block) for block in kind.blocks) for kind in self.kinds)

    def blocks_of(self, kind: int) -> tuple[int, ...]:
        """Positions in `blocks` of those of a kind."""
        return () if kind == 0 else self.segments.kinds[kind - 1]

    def whole(self, options: Sequence[Options], intra: AbstractIntra | None = None) -> IntraSolution | None:
        """The whole step with every segment of a kind following the same options; None if nothing fits.

        Args:
            options: for each kind.
        """
        fixed = {b: o for kind, chosen in enumerate(options) for b, o in zip(self.blocks_of(kind), chosen, strict=True)}
        space = restrict_blocks(self.space, self.blocks, fixed)
        if not all(mask.any() for mask in space.allowed):
            return None
        solver = intra or ILP()
        return solver.solve(self.problem, space, memory_limit_bytes=self.problem.memory_limit_bytes)


def segment_step(
    problem: Problem, mesh_shape: tuple[int, ...], *, factors: str = "cfp", intra: AbstractIntra | None = None
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
    mesh = LogicalMesh(shape=mesh_shape, axis_names=AXIS_NAMES[: len(mesh_shape)], cluster=problem.cluster)
    space = _space(problem, mesh)
    blocks = block_options(problem, space, factors=factors)
    segments = find_segments(problem.graph, problem.nodes, [b.block for b in blocks], [len(b) for b in blocks])
    layers = segment_layers(problem.graph, segments)
    crossings = _crossings(problem.graph)
    extracts = stage_step(_layered(problem.graph, layers), range(len(layers))).extracts
    kinds = []
    for number in range(-1, len(segments.kinds)):
        example = extracts[0 if number < 0 else 1 + segments.example(number)]
        part = _problem(example.graph, problem)
        part_space = _space(part, mesh)
        found = block_options(part, part_space, factors=factors)
        wanted = () if number < 0 else segments.kinds[number]
        if len(found) != len(wanted):
            raise InputError(
                f"{problem.graph.name} cannot be profiled by segments: one of them has {len(found)} blocks by itself and "
                f"{len(wanted)} in the whole step, so a product spans two segments."
            )
        kinds.append(
            SegmentKind(
                name=layers.names[0 if number < 0 else 1 + segments.example(number)],
                count=1 if number < 0 else segments.count(number),
                problem=part,
                space=part_space,
                blocks=found,
                crossings=tuple([crossings[v] for v in example.values]),
                intra=intra,
            )
        )
    return SegmentedStep(
        problem=problem,
        mesh=mesh,
        segments=segments,
        space=space,
        blocks=blocks,
        kinds=tuple(kinds),
        sequence=(0, *[1 + kind for kind in segments.sequence]),
    )


def _crossings(graph: Graph) -> list[Crossing]:
    backward = {o for op in graph.ops if op.phase is Phase.BACKWARD for o in op.outputs}
    classes = fold(graph).value_class.tolist()
    return [
        Crossing(value_class=classes[v.index], is_backward=v.index in backward, num_bytes=v.num_bytes)
        for v in graph.values
    ]


def _space(problem: Problem, mesh: LogicalMesh) -> Space:
    priced = price(problem.nodes, mesh)
    return Space(name="blocks", priced=priced, allowed=[np.ones(len(n.choices), bool) for n in priced.nodes])


def _layered(graph: Graph, layers: Layers) -> LayeredStep:
    return LayeredStep(
        graph=graph, part=graph, layers=layers, batch_dims=batch_dims(graph), num_micro_batches=1, combine={}
    )


def _problem(graph: Graph, whole: Problem) -> Problem:
    part = make_problem(graph, whole.cluster, on_missing_rule=whole.nodes.on_missing_rule)
    return replace(part, memory_limit_bytes=whole.memory_limit_bytes)
