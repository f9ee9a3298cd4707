"""The methods that a user can name. Each enters spaces (choices on logical meshes) into a race,
which finds the best.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cluster import AXIS_NAMES, Cluster, LogicalMesh, logical_mesh_shapes
from ..core import CaptureError, InfeasibleError, InputError, divisors
from ..cost import MeshUse, Priced, Problem, price
from ._base import Decision, Progress, Task, faster
from ._counts import batch_size, program_counts
from ._method import AbstractMethod
from ._neighbourhood import FEW_AXES, choices_to_try
from ._quick_bounds import cannot_fit, is_too_large, least_compute_s, never_fits
from ._race import (
    Entry,
    Race,
    RaceInParts,
    finished,
    goes_first,
)
from ._search import AbstractFamily, Hosts, Search
from .intra import ILP, AbstractIntra, Fixed, Space, TooLarge, fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel(AbstractMethod):
    """Split the batch over all devices; all else is replicated, and gradients are all-reduced."""

    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        return _fixed(problem, progress, "dp", Fixed(zero_stage=0), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero2Parallel(AbstractMethod):
    """Data parallelism with optimizer state and gradients split over devices.

    Parameters of which the step reads casts to 16 bits are split too, and their casts gathered,
    with micro-batches once a step; other parameters are whole on every device.

    With `shard_within="host"` they are split over the devices of a host and replicated across
    hosts; with a number, over that many neighbouring devices and replicated over the groups.
    """

    shard_within: str | int | None = None

    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        within, per_host = self.shard_within, problem.cluster.devices_per_host
        # As it is typed: on hosts of one device, all share one state.
        size = (per_host if per_host > 1 else None) if within == "host" else within
        name = "zero2" if size is None else f"zero2:{size}"
        return _fixed(problem, progress, name, Fixed(zero_stage=2, gathers_once=True), within)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero3Parallel(AbstractMethod):
    """Data parallelism with parameters, gradients and optimizer state split over devices, gathered
    where they are used.

    With `shard_within="host"` they are split over the devices of a host and replicated across
    hosts; with a number, over that many neighbouring devices and replicated over the groups (hybrid
    FSDP).
    """

    shard_within: str | int | None = None

    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        # As it is typed.
        within = self.shard_within
        name = "zero3" if within is None else "hsdp" if within == "host" else f"hsdp:{within}"
        return _fixed(problem, progress, name, Fixed(zero_stage=3), within)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManualParallel(AbstractMethod):
    """Your own PartitionSpecs for inputs, by path pattern; a solver splits the rest.

    Args:
        specs: `{"state.params.*.q.kernel": (None, "y")}`: shell patterns over input paths to one
            entry per dim, each None, an axis name or a tuple of them. `jax.sharding.PartitionSpec`
            works too. `*attn.[qkv].kernel` matches any of three; `layers[0]` and `layers[*]` are
            indices.
        mesh_shape: the logical mesh.
        axis_names: its axes, by default x, y, z, w.
        where_possible: pass over a split that an input cannot have, beside what stands before it in
            `specs`, in place of refusing it.
    """

    specs: Mapping[str, Sequence[Any]]
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...] = ()
    where_possible: bool = False
    intra: AbstractIntra = field(default_factory=ILP)

    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        """The plan of one program. Raises `InputError` listing every pattern that cannot be
        followed.
        """
        # Axes of size one keep their names, as patterns may use them.
        mesh = _mesh(
            problem, self.mesh_shape, self.axis_names or AXIS_NAMES[: len(self.mesh_shape)]
        )
        entries = []
        pinned = frozenset(
            problem.nodes.input_ports[k].node for k in fixed.matching(problem, self.specs)
        )
        for way in _ways(problem, mesh, self.intra, pinned):
            priced = way.priced(problem)
            pins = fixed.pinned(
                problem, priced, self.specs, mesh.axis_names, where_possible=self.where_possible
            )
            space = Space(name=way.named("manual"), priced=priced, allowed=way.allowed).among(pins)
            if space.has_choices:
                entries.append(Entry(space=space, intra=self.intra))
        planner = f"given specs, the rest by {self.intra.name}"
        manual = Race(
            problem=problem, method="manual", intra=self.intra, planner=planner, progress=progress
        )
        return manual.best(entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardParallel(AbstractMethod):
    """Split every operator as the intra planner finds best: data, tensor, sequence and ZeRO-style
    splits in one search.

    Args:
        intra: finds the splits.
        mesh_shape: the logical mesh; by default all meshes with up to two axes are tried.
    """

    intra: AbstractIntra = field(default_factory=ILP)
    mesh_shape: tuple[int, ...] | None = None

    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        return finished(self.race(problem, progress, faster_than_s=math.inf, pauses=False))

    def race(
        self, problem: Problem, progress: Progress | None, *, faster_than_s: float, pauses: bool
    ) -> RaceInParts:
        """The search of one program, in parts: it pauses where memory makes it long."""
        meshes = _meshes(problem, self.mesh_shape)
        race = Race(
            problem=problem, method="shard", intra=self.intra, states_bound=True, progress=progress
        )
        return race.in_parts(
            _shard_entries(problem, meshes, self.intra),
            expected=len(meshes),
            faster_than_s=faster_than_s,
            pauses=pauses,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeProgram(AbstractMethod):
    """One program on all devices: race the fixed methods and the search over logical meshes; bounds
    prune those that cannot win.

    Args:
        intra: finds the splits.
        max_meshes: number of logical meshes to try, the most promising first.
        max_axes: the most axes that a logical mesh may have.
        mesh_shape: the only logical mesh to try; None tries all within these limits.
        faster_than_s: the step time to beat. Spaces whose bound is no lower are not searched
            closely, and the answer may then be any program that fits.
    """

    intra: AbstractIntra = field(default_factory=ILP)
    max_meshes: int = 32
    max_axes: int = 2
    mesh_shape: tuple[int, ...] | None = None
    faster_than_s: float = math.inf

    def decide(self, task: Task) -> Decision:
        """The fastest plan of the task. Without a given mesh hosts may be left idle, if that is
        faster.
        """
        task.refuse_large_state()
        on_fewer = list[Hosts]()
        if self.mesh_shape is None and task.cluster.num_hosts > 1:
            least_s = least_compute_s(task.problem(task.num_micro_batches or task.own_turns))
            on_fewer = Hosts.below(task, self.programs, least_s)
        search = Search(task=task, faster_than_s=self.faster_than_s)
        return self.searched(search, [*self.programs(task), *on_fewer])

    def programs(self, task: Task) -> list[AbstractFamily]:
        return [self.programs_of(task, simple=functools.partial(simple_plan, task))]

    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        race = self.race(problem, progress, faster_than_s=self.faster_than_s, pauses=False)
        return finished(race)

    def race(
        self, problem: Problem, progress: Progress | None, *, faster_than_s: float, pauses: bool
    ) -> RaceInParts:
        """The search of one program, in parts: it pauses where memory makes it long."""
        entries = []
        if self.mesh_shape is None:
            for name, stage in (("dp", 0), ("zero2", 2), ("zero3", 3)):
                try:
                    entries += _fixed_entries(
                        problem,
                        name,
                        Fixed(zero_stage=stage, gathers_once=stage == 2, rest=self.intra),
                        None,
                    )
                except InputError:
                    # The devices do not divide the batch; the search has other splits.
                    continue
        # The most promising meshes come first, so that a limit on their number drops the others.
        meshes = _meshes(problem, self.mesh_shape, self.max_axes)[: self.max_meshes]
        race = Race(
            problem=problem,
            method="program",
            intra=self.intra,
            planner=f"the fastest of dp, zero2, zero3 and {self.intra.name}",
            states_bound=True,
            progress=progress,
        )
        return race.in_parts(
            itertools.chain(entries, _shard_entries(problem, meshes, self.intra)),
            expected=len(entries) + len(meshes),
            faster_than_s=faster_than_s,
            pauses=pauses,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimplePlan(AbstractMethod):
    """The plan of `simple_plan`, as a method."""

    def decide(self, task: Task) -> Decision:
        found = simple_plan(task)
        return found if found is not None else Zero3Parallel().decide(task)

    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        return Zero3Parallel().solve(problem, progress)


def simple_plan(task: Task, *, fewest: int = 1) -> Decision | None:
    """The fastest of ZeRO-2, ZeRO-3 and both of them inside hosts (hybrid FSDP) in the fewest
    micro-batches in which one fits; None if none fits. Where a micro-batch has fewer rows than
    there are devices, the devices of a row split its sequence (context parallelism), with ZeRO-3.
    It takes a small part of a search, which begins at its number of micro-batches and has its step
    time to beat.

    Args:
        fewest: numbers of micro-batches below this are known not to fit.
    """
    key = task.cluster, task.limit_bytes, task.num_micro_batches, task.semantics
    if key not in task.simple_plans:
        found = _find_simple_plan(task, fewest)
        if found is not None:
            # The step outside is not known to the problem.
            found = replace(found, combine=task.combine(found.num_micro_batches))
        task.simple_plans[key] = found
    return task.simple_plans[key]


def have_equal_rows(task: Task) -> bool:
    """True if all devices can have equally many whole rows of a micro-batch. Otherwise simple plans
    split rows, or there are none, which says little of the memory that other plans need.
    """
    parts = (task.num_micro_batches or 1) * task.cluster.num_devices
    return batch_size(task.graph) % parts == 0


def _find_simple_plan(task: Task, fewest: int) -> Decision | None:
    if not task.holds_state:
        return None
    cluster, asked, batch = task.cluster, task.num_micro_batches, batch_size(task.graph)
    every = [asked] if asked is not None else program_counts(task.graph, cluster.num_devices)
    if asked is None and batch >= cluster.num_devices:
        # Devices share rows only where the batch has too few, and all have equally many.
        every = [n for n in every if batch // n % cluster.num_devices == 0]
    counts = [n for n in every if n >= fewest]
    refused = list[int]()
    # Numbers below `fewest` are not solved, but the problem of one tells of the sizes of others.
    made = [task.problem(1)] if 1 in every and fewest > 1 else []
    too_large: dict[int, InfeasibleError] = {}

    def solved(count: int, *, most_methods: int | None = None) -> Decision | None:
        problem = task.problem(count)
        if problem not in made:
            made.append(problem)
        found: Decision | None = None
        if cannot_fit(problem):
            return None
        for method in _simple_methods(cluster, batch // count)[:most_methods]:
            try:
                found = faster(found, method.solve(problem, task.progress))
            except InputError:
                continue
            except InfeasibleError as error:
                if found is None:
                    # The others keep more than the first.
                    too_large[count] = error
                    return None
        return found

    for k, count in enumerate(counts):
        # Problems are not made where another shows their size.
        if any(count % n == 0 for n in refused) or any(is_too_large(p, count) for p in made):
            continue
        # To say why a step does not decompose takes longer than to find out.
        if not task.decomposes(count):
            refused.append(count)
            continue
        try:
            best = solved(count)
        except (InputError, CaptureError):
            refused.append(count)
            continue
        if best is not None:
            return best
        finest = counts[-1]
        if count in too_large and count != finest:
            if _may_fit(too_large[count], count, counts[k + 1]):
                continue
        if len(made) == 2 and fewest == 1 and count != finest:
            # Nothing fits where the finest micro-batches do not, with what keeps least.
            if not task.decomposes(finest):
                refused.append(finest)
                continue
            with contextlib.suppress(InputError, CaptureError):
                if solved(finest, most_methods=1) is None and have_equal_rows(task):
                    return None
    return None


def _may_fit(refusal: InfeasibleError, count: int, following: int) -> bool:
    """True if what was refused with `count` micro-batches probably fits with the number that
    follows it: activations shrink with micro-batches, all else stays as large.
    """
    if refusal.required_bytes is None or refusal.available_bytes is None:
        return False
    less_bytes = refusal.parts.get("activations", 0.0) * (1 - count / following)
    return refusal.required_bytes - less_bytes <= refusal.available_bytes


def _simple_methods(cluster: Cluster, rows: int) -> list[AbstractMethod]:
    """The methods of a simple plan, for micro-batches of so many rows; that which keeps least is
    the first.
    """
    # A Megatron layout may be a pipeline, whose module reads this one.
    from ._megatron import Megatron

    if rows < cluster.num_devices:
        return [Megatron(data=rows, context=cluster.num_devices // rows, zero_stage=3)]
    methods: list[AbstractMethod] = [Zero3Parallel(), Zero2Parallel()]
    if cluster.num_hosts > 1 and cluster.devices_per_host > 1:
        methods += [Zero2Parallel(shard_within="host"), Zero3Parallel(shard_within="host")]
    return methods


def _mesh(problem: Problem, shape: Sequence[int], axis_names: Sequence[str] = ()) -> LogicalMesh:
    devices = problem.cluster.num_devices
    if int(np.prod(shape)) != devices or not shape or min(shape) < 1:
        raise InputError(
            f"A mesh {'x'.join(map(str, shape))} has {int(np.prod(shape))} devices,"
            f" {problem.cluster.name} has {devices}. Meshes that fit:"
            f" {', '.join('x'.join(map(str, s)) for s in logical_mesh_shapes(devices))}."
        )
    names = tuple(axis_names) or AXIS_NAMES[: len(shape)]
    # An axis of one device splits nothing, and is left out.
    if not axis_names and len(shape) > 1:
        shape = tuple(n for n in shape if n > 1) or (1,)
        names = AXIS_NAMES[: len(shape)]
    return LogicalMesh(shape=tuple(shape), axis_names=names, cluster=problem.cluster)


def _meshes(problem: Problem, shape: Sequence[int] | None, max_axes: int = 2) -> list[LogicalMesh]:
    if shape is not None:
        return [_mesh(problem, shape)]
    meshes = [_mesh(problem, s) for s in logical_mesh_shapes(problem.cluster.num_devices, max_axes)]
    # Meshes that the race solves first, since their solutions bound the others, come first; the
    # rest keep their order.
    return sorted(meshes, key=lambda mesh: not goes_first(mesh))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Way:
    """A way to use a mesh: for each node the choices, and a mask of those that are allowed."""

    use: MeshUse
    choices: Sequence[NDArray[np.int64]]
    allowed: fixed.Masks

    def named(self, method: str) -> str:
        """What tables call it."""
        names, axes = self.use.mesh.axis_names, sorted(self.use.data_axes)
        name = (
            f"{method}, {'+'.join(names[a] for a in axes)} only for the batch" if axes else method
        )
        for axis in self.use.context_axes:
            name += f", {names[axis]} only for the sequence"
        return f"{name}{', parameters gathered once' if self.use.gathers_once else ''}"

    def priced(self, problem: Problem) -> Priced:
        """Its prices."""
        repeats = problem.num_micro_batches
        return price(problem, self.use, repeats=repeats, choices=self.choices)


def _ways(
    problem: Problem, mesh: LogicalMesh, intra: AbstractIntra, also: frozenset[int] = frozenset()
) -> Iterator[_Way]:
    """Ways to use a mesh. Data axes split only the batch, and so reduce gradients once, after the
    last micro-batch. Casts of parameters that they split are gathered in each micro-batch, beside
    compute, or once, before the first.

    Where the rows of a micro-batch are too few for the next axis to be a data axis too, it may be a
    context axis, which splits the sequence and nothing else that is computed for each micro-batch.
    """
    kinds = fixed.kinds_of(problem)
    sets = [frozenset[int]()]
    if problem.num_micro_batches > 1:
        leading = [frozenset(range(count)) for count in range(1, len(mesh.shape) + 1)]
        # Meshes of many axes are slow to price, so the variant without data axes, where every
        # micro-batch reduces its gradients, is left out for them.
        leading = [axes for axes in leading if _can_wait(problem, mesh, axes)]
        sets = leading if leading and len(mesh.shape) > FEW_AXES else sets + leading
    ways = [(axes, frozenset[int]()) for axes in sets]
    if with_context := list(_with_context(problem, mesh)):
        split = fixed.context_split(problem.graph, problem.nodes, kinds)
        ways += with_context if split.tokens else []
    for data_axes, context_axes in ways:
        use = MeshUse(mesh=mesh, data_axes=data_axes, context_axes=context_axes)
        choices = choices_to_try(problem, use, intra, also)
        for axis in context_axes:
            choices = split.on_axis(axis, problem.nodes, kinds, choices)
        if not all(map(len, choices)):
            # The axis does not divide the sequence.
            continue
        masks = fixed.data_axes_restriction(problem.nodes, choices, kinds, data_axes)
        if masks is None:
            continue
        # Independent micro-batches are steps of their own, in which nothing is gathered once.
        may_wait = data_axes and kinds.cast and problem.semantics != "independent"
        for gathers_once in (False, True) if may_wait else (False,):
            used = replace(use, gathers_once=gathers_once)
            yield _Way(use=used, choices=choices, allowed=masks)


def _with_context(
    problem: Problem, mesh: LogicalMesh
) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """Sets of data axes, each with the next axis as context axis where it cannot be a data axis,
    which would take no longer.
    """
    if problem.num_micro_batches == 1 or problem.semantics == "independent":
        return
    if not problem.nodes.token_sums:
        return
    for axis in range(len(mesh.shape)):
        data_axes, context_axes = frozenset(range(axis)), frozenset({axis})
        if not _can_wait(problem, mesh, data_axes):
            return
        if not _can_wait(problem, mesh, data_axes | context_axes):
            yield data_axes, context_axes


def _can_wait(problem: Problem, mesh: LogicalMesh, axes: frozenset[int]) -> bool:
    """True if, with these data axes, gradients can be reduced after the last micro-batch."""
    return problem.runs_in_groups(math.prod(mesh.shape[a] for a in axes))


def _shard_entries(
    problem: Problem, meshes: Sequence[LogicalMesh], intra: AbstractIntra
) -> Iterator[Entry]:
    for mesh in meshes:
        too_large = False
        for way in _ways(problem, mesh, intra):
            name = way.named(intra.name)
            # Data axes leave fewer choices, so that nothing is smaller than without them.
            use = way.use
            is_narrower = too_large and not (use.context_axes or use.gathers_once)
            space: Space | TooLarge
            if is_narrower or never_fits(problem, use, way.choices, way.allowed):
                too_large = too_large or not (use.data_axes or use.context_axes)
                space = TooLarge(
                    name=name,
                    mesh=mesh,
                    choices=way.choices,
                    allowed=way.allowed,
                    price=functools.partial(way.priced, problem),
                )
            else:
                space = Space(name=name, priced=way.priced(problem), allowed=way.allowed)
            yield Entry(space=space, intra=intra)


def _fixed_entries(
    problem: Problem, name: str, intra: Fixed, shard_within: str | int | None
) -> list[Entry]:
    cluster = problem.cluster
    group = _devices_that_share_a_state(shard_within, cluster)
    # Groups of one device split nothing, so that all share the state.
    group = group if group > 1 else cluster.num_devices
    groups = (cluster.num_devices // group,) if group < cluster.num_devices else ()
    split = fixed.split_state(problem, intra.sharded(problem), group)
    mesh = _mesh(problem, (*groups, *split.axes))
    all_axes = frozenset(range(len(mesh.shape)))
    # The axis of groups does not split the state.
    rule = replace(intra, first_shard_axis=len(groups))
    deferring = (
        [all_axes] if problem.num_micro_batches > 1 and _can_wait(problem, mesh, all_axes) else []
    )
    ways = fixed.ways_to_sum(
        rule, deferring, splits=intra.zero_stage >= 2, repeats=problem.num_micro_batches
    )
    entries = []
    for data_axes, way in ways:
        use = MeshUse(mesh=mesh, data_axes=data_axes, gathers_once=way.gathers_once)
        priced = price(problem, use, repeats=problem.num_micro_batches)
        label = name
        if problem.num_micro_batches > 1:
            how = "split" if intra.zero_stage >= 2 else "summed"
            when = "after the last" if data_axes else "in each"
            label = f"{name}, gradients {how} {when} micro-batch"
        space = way.restrict(problem, Space.whole(label, priced))
        # More devices make more groups; where all share the state, they lengthen its last axis.
        growing_axis = 0 if groups else len(mesh.shape) - 1
        entries.append(
            Entry(space=space, intra=way.rest, notes=split.notes, growing_axis=growing_axis)
        )
    return entries


def _devices_that_share_a_state(shard_within: str | int | None, cluster: Cluster) -> int:
    """Number of devices over which ZeRO splits one copy of the state."""
    if shard_within is None:
        return cluster.num_devices
    if shard_within == "host":
        return cluster.devices_per_host
    if not isinstance(shard_within, int):
        raise InputError(
            f'shard_within={shard_within!r}: pass "host", a number of devices, or None for all.'
        )
    if shard_within < 1 or cluster.num_devices % shard_within:
        count = cluster.num_devices
        sizes = [str(n) for n in divisors(count)[1:]]
        raise InputError(
            f"shard_within={shard_within}: the state is split over groups of that many devices,"
            f" which must divide the {count} devices of {cluster.name}."
            f" {'Use one of ' if sizes else 'Leave it out'}{', '.join(sizes)}."
        )
    if shard_within == 1 < cluster.num_devices:
        raise InputError(
            "shard_within=1: groups of one device split nothing. Give a larger number, or use"
            " method dp, in which every device holds the whole state."
        )
    return shard_within


def _fixed(
    problem: Problem, progress: Progress | None, name: str, intra: Fixed, within: str | int | None
) -> Decision:
    race = Race(problem=problem, method=name, intra=intra, progress=progress)
    return race.best_of_ways(_fixed_entries(problem, name, intra, within))
