"""`Within`: restrictions of a search for pipelines; and `Restricted`, the intra planner that keeps
to them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ...core import InputError, listing, nearest, shortened
from ...cost import Priced, Problem, distinct_specs, joined_axes, sum_collective
from ...graph import Role
from ...sharding import reshard
from ._base import AbstractIntra, AbstractRule, Ints
from .fixed import kinds_of, regular_choices

Shape = tuple[int, int]
_SUBMESHES = ("all", "powers-of-two", "small-powers-of-two")
_MESHES = ("all", "data", "same")
_COLLECTIVES = ("all-to-all", "all-gather")
# Hosts of a submesh, at most, with "small-powers-of-two".
_FEW_HOSTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """Restrictions of a search for pipelines. By default nothing is restricted.

    >>> within = Within(submeshes="powers-of-two", without=("all-to-all",))
    >>> print(within)
    submeshes of powers of two, without all-to-all

    Attributes:
        submeshes: the devices of a stage: "all"; "powers-of-two", of devices in a host and of
            hosts; "small-powers-of-two", also at most 4 hosts; or a tuple of `(hosts, devices in
            each)`.
        meshes: the logical mesh that they form: "all"; "data", where all of them split the batch;
            "same", with hosts along the first axis and their devices along the second; or a tuple
            of `(devices that split the batch, others)`.
        imbalance: the most by which the share that a stage has of the compute may differ from its
            share of the devices: with 0.5 neither exceeds 1.5 times the other.
        without: collectives that no conversion or operator of a stage may take: "all-to-all",
            "all-gather". Gathers of parameters that ZeRO splits are such, too.
        replicated_parameters: False to split every parameter that can be split.
        batch_on_first_axis: True to split the batch over the first axis of a stage's mesh alone.

    Raises:
        InputError: everything that is wrong with them.
    """

    submeshes: str | tuple[Shape, ...] = "all"
    meshes: str | tuple[Shape, ...] = "all"
    imbalance: float = math.inf
    without: tuple[str, ...] = ()
    replicated_parameters: bool = True
    batch_on_first_axis: bool = False

    def __post_init__(self) -> None:
        faults = []
        for name, known in (("submeshes", _SUBMESHES), ("meshes", _MESHES)):
            value = getattr(self, name)
            if isinstance(value, str):
                if value not in known:
                    faults.append(f"{name}={shortened(value, 60)!r}: {nearest(value, known)}")
                continue
            if not value or not all(
                len(shape) == 2 and all(isinstance(n, int) and n > 0 for n in shape)
                for shape in value
            ):
                faults.append(
                    f"{name}={value} must be pairs of positive numbers, such as ((1, 4),)"
                )
        if not self.imbalance >= 0:
            faults.append(f"imbalance={self.imbalance} must not be negative")
        for each in self.without:
            if each not in _COLLECTIVES:
                faults.append(f"without={each!r}: {nearest(str(each), _COLLECTIVES)}")
        if faults:
            raise InputError(listing("A search cannot be restricted so", faults))

    @classmethod
    def read(cls, texts: Iterable[str]) -> Within:
        """The restrictions that texts such as `submeshes=powers-of-two`, `meshes=2x4,4x2`,
        `imbalance=0.5`, `without=all-to-all`, `no-replicated-parameters` and
        `batch-on-first-axis` write.

        Raises:
            InputError: everything that is wrong with them.
        """
        given: dict[str, Any] = {}
        faults = []
        for text in texts:
            key, _, value = text.partition("=")
            if key in ("submeshes", "meshes") and re.fullmatch(r"\d+x\d+(,\d+x\d+)*", value):
                shapes = [shape.split("x") for shape in value.split(",")]
                given[key] = tuple((int(first), int(second)) for first, second in shapes)
            elif key in ("submeshes", "meshes") and value:
                given[key] = value
            elif key == "imbalance" and re.fullmatch(r"\d+(\.\d+)?", value):
                given[key] = float(value)
            elif key == "without" and value:
                given[key] = (*given.get(key, ()), *value.split(","))
            elif text == "no-replicated-parameters":
                given["replicated_parameters"] = False
            elif text == "batch-on-first-axis":
                given["batch_on_first_axis"] = True
            else:
                faults.append(shortened(text, 60))
        if faults:
            raise InputError(
                f"--within {', '.join(faults)}: restrictions are submeshes=powers-of-two (or"
                " small-powers-of-two, 1x4,1x8), meshes=data (or same, 2x4,4x2), imbalance=0.5,"
                " without=all-to-all,all-gather, no-replicated-parameters and batch-on-first-axis."
            )
        return cls(**given)

    @property
    def parts(self) -> Sequence[Within]:
        """Each restriction alone."""
        free = Within()
        found = []
        for f in fields(self):
            if getattr(self, f.name) != getattr(free, f.name):
                found.append(replace(free, **{f.name: getattr(self, f.name)}))
        return found

    @property
    def restricts_splits(self) -> bool:
        """Whether it restricts how operators are split, and not only the stages."""
        return replace(self, submeshes="all", imbalance=math.inf) != Within()

    def without_part(self, part: Within) -> Within:
        """These restrictions without one of `parts`."""
        free = Within()
        (name,) = (f.name for f in fields(self) if getattr(part, f.name) != getattr(free, f.name))
        return replace(self, **{name: getattr(free, name)})

    def allows(self, submesh: Shape, mesh: Shape) -> bool:
        """Whether a stage may have a submesh of `(hosts, devices in each)` as a logical mesh of
        `(devices that split the batch, others)`.
        """
        if isinstance(self.submeshes, str):
            are_powers = all(n & (n - 1) == 0 for n in submesh)
            few = self.submeshes != "small-powers-of-two" or submesh[0] <= _FEW_HOSTS
            has_submesh = self.submeshes == "all" or (are_powers and few)
        else:
            has_submesh = submesh in self.submeshes
        if isinstance(self.meshes, str):
            wanted = {"data": (submesh[0] * submesh[1], 1), "same": submesh}.get(self.meshes, mesh)
            return has_submesh and mesh == wanted
        return has_submesh and mesh in self.meshes

    def __str__(self) -> str:
        def shapes(value: str | tuple[Shape, ...]) -> str:
            if isinstance(value, str):
                return value.replace("-", " ")
            return ", ".join(f"{first}x{second}" for first, second in value)

        parts = [
            *([f"submeshes of {shapes(self.submeshes)}"] if self.submeshes != "all" else []),
            *([f"meshes of {shapes(self.meshes)}"] if self.meshes != "all" else []),
            *([f"an imbalance of {self.imbalance:g}"] if math.isfinite(self.imbalance) else []),
            *([f"without {' and '.join(self.without)}"] if self.without else []),
            *([] if self.replicated_parameters else ["no replicated parameters"]),
            *(["the batch on the first axis"] if self.batch_on_first_axis else []),
        ]
        return ", ".join(parts)


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
        """Choices of the nodes of a stage: those of the other planner that are allowed."""
        within, cluster = self.within, problem.cluster
        data = int(np.prod([mesh_shape[a] for a in data_axes], dtype=int))
        mesh = data, int(np.prod(mesh_shape)) // data
        if not within.allows((cluster.num_hosts, cluster.devices_per_host), mesh):
            return []
        kinds = kinds_of(problem)
        projections = []
        for item, port in zip(problem.graph.inputs, problem.nodes.input_ports, strict=True):
            if item.role is Role.PARAMETER and not within.replicated_parameters:
                projections.append((port.node, port.projection))
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
        """The problem as it is allowed: conversions that take a forbidden collective cost
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
