"""`Restricted`: an intra planner that keeps to the restrictions of a search."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ....cost import Priced, Problem, distinct_specs, joined_axes, sum_collective
from ....graph import Role
from ....sharding import reshard
from .._base import AbstractIntra, AbstractRule, Ints
from ..fixed import kinds_of, regular_choices
from ._within import Within


@dataclass(frozen=True, slots=True, kw_only=True)
class Restricted(AbstractRule):
    """Another planner, which sees only what a search may use.

    Attributes:
        rest: decides.
        within: among what.
    """

    rest: AbstractIntra
    within: Within

    @property
    def name(self) -> str:
        return self.rest.name

    @property
    def gathers_once(self) -> bool:
        return self.rest.gathers_once

    @property
    def ways_beside_tensor(self) -> int:
        return self.rest.ways_beside_tensor

    @property
    def bound_holds_for(self) -> str:
        scope = self.rest.bound_holds_for
        return f"{scope}, {self.within}" if scope else f"plans with {self.within}"

    @property
    def stage_imbalance(self) -> float:
        return self.within.imbalance

    def stage_axes(self, shape: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
        return self.rest.stage_axes(shape)

    def stage_choices(
        self, problem: Problem, mesh_shape: tuple[int, ...], data_axes: frozenset[int]
    ) -> list[Ints] | None:
        """See `AbstractIntra.stage_choices`: those of the other planner that are allowed."""
        within, cluster = self.within, problem.cluster
        data = int(np.prod([mesh_shape[a] for a in data_axes], dtype=int))
        mesh = data, int(np.prod(mesh_shape)) // data
        if not within.allows((cluster.num_hosts, cluster.devices_per_host), mesh):
            return []
        kinds = kinds_of(problem)
        projections = [
            (port.node, port.projection)
            for item, port in zip(problem.graph.inputs, problem.nodes.input_ports, strict=True)
            if item.role is Role.PARAMETER and not within.replicated_parameters
        ]
        choices = self.rest.stage_choices(problem, mesh_shape, data_axes)
        if choices is None:
            choices = regular_choices(problem.nodes, kinds, mesh_shape, data_axes)
        if not choices:
            return []
        left = []
        for node, table in zip(problem.nodes.nodes, choices, strict=True):
            allowed = np.ones(len(table), bool)
            for collective in node.collectives:
                if collective.kind in within.without:
                    for _, rows in joined_axes(table, collective.factors):
                        allowed[rows] = False
            for _, projection in (each for each in projections if each[0] == node.index):
                specs, spec_of = distinct_specs(table, projection)
                is_split = np.array([max(spec) >= 0 for spec in specs])[spec_of]
                # What cannot be split, such as a single number, is whole on every device.
                allowed &= is_split | ~is_split.any()
            if within.batch_on_first_axis and (batch := problem.nodes.batch_factors[node.index]):
                allowed &= ~np.isin(table[:, 1:], list(batch)).any(axis=1)
            left.append(table[allowed])
        return left

    def as_allowed(self, priced: Priced) -> Priced:
        """See `AbstractIntra.as_allowed`: conversions that take a forbidden collective cost
        infinitely much.
        """
        if not self.within.without:
            return priced
        edges = []
        for edge, costs in zip(priced.graph.edges, priced.edges, strict=True):
            sums = sum_collective(edge, priced.target)
            seconds = np.array(costs.seconds)
            for p, q in np.argwhere(costs.moves & np.isfinite(seconds)):
                moves = reshard(costs.sources[p], costs.targets[q], priced.axis_sizes, sums) or ()
                if any(move.kind in self.within.without for move in moves):
                    seconds[p, q] = np.inf
            edges.append(replace(costs, seconds=seconds))
        return replace(priced, edges=tuple(edges))
