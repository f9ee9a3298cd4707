"""Methods by the names of the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from ..core import InputError, nearest
from ..plans import training_schedules
from ._auto import Auto
from ._layout_names import LAYOUTS, layout_by_name, layout_like
from ._megatron import Megatron
from ._method import AbstractMethod
from ._methods import DataParallel, ShardParallel, WholeProgram, Zero2Parallel, Zero3Parallel
from ._pipeshard import PipeshardParallel
from .inter import AbstractInter, Bottleneck, Grid, StageDP, StageLimits
from .intra import ILP, AbstractIntra, Blocks, Within

METHODS: dict[str, Callable[[], AbstractMethod]] = {
    "dp": DataParallel,
    "zero2": Zero2Parallel,
    "zero3": Zero3Parallel,
    "shard": ShardParallel,
    "blocks": lambda: ShardParallel(intra=Blocks()),
    "program": WholeProgram,
    "auto": Auto,
}
_ON_MESH = ("shard", "blocks", "program", "auto")
SYNONYMS: dict[str, Callable[[], AbstractMethod]] = {
    "ddp": DataParallel,
    "fsdp": Zero3Parallel,
    "hsdp": lambda: Zero3Parallel(shard_within="host"),
}
"""Other libraries' names for methods of this one."""
# Methods whose names may end with the number of devices that share a state, such as hsdp:8.
_OF_GROUPS: dict[str, type[Zero2Parallel | Zero3Parallel]] = {
    "hsdp": Zero3Parallel,
    "zero2": Zero2Parallel,
}

PIPELINES: dict[str, Callable[[], AbstractInter]] = {
    "pipeshard": StageDP,
    "bottleneck": Bottleneck,
    "grid": Grid,
}
"""The inter planner of each method that makes pipelines."""

INTRAS: dict[str, Callable[[], AbstractIntra]] = {"ilp": ILP, "blocks": Blocks}
"""The intra planners by name."""

_WITH_INTRA = ("shard", "program", "auto", *PIPELINES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Settings of a pipeline, named like the command line's options. None leaves a choice to the
    search.

    Raises:
        InputError: A number below 1, an unknown schedule, or more stages than layers; lists all
            faults.
    """

    stages: int | None = None
    schedule: str | None = None
    micro_batches: int | None = None
    layers: str | int | None = None
    within: Within | None = None

    def __post_init__(self) -> None:
        faults = [
            f"--{f.name.replace('_', '-')} must be at least 1, got {value}"
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), int) and value < 1
        ]
        if self.schedule is not None and self.schedule not in training_schedules():
            faults.append(
                f"--schedule: there is no schedule {self.schedule!r}:"
                f" {nearest(self.schedule, training_schedules())}"
            )
        if isinstance(self.layers, int) and self.stages is not None and self.stages > self.layers:
            faults.append(
                f"--stages {self.stages} are more than --layers {self.layers}: every stage needs a"
                " layer"
            )
        if faults:
            raise InputError(f"this pipeline cannot be planned: {'; '.join(faults)}")

    @property
    def given(self) -> list[str]:
        """The options that are set and that only pipelines have."""
        found = []
        for name in ("stages", "schedule", "layers", "within"):
            if getattr(self, name) is not None:
                found.append(f"--{name}")
        return found


def method_by_name(
    name: str,
    mesh_shape: tuple[int, ...] | None = None,
    pipeline: PipelineOptions | None = None,
    intra: str | None = None,
) -> AbstractMethod | PipeshardParallel:
    """The method of a name, on a given mesh, with given pipeline options or with an intra planner
    of `INTRAS`, if any.

    Raises:
        InputError: The name is unknown, or the mesh or the options do not apply to it.
    """
    pipeline = pipeline or PipelineOptions()
    if intra is not None:
        if intra not in INTRAS:
            raise InputError(f"--intra: there is no planner {intra!r}: {nearest(intra, INTRAS)}")
        method = method_by_name(name, mesh_shape, pipeline)
        if name not in _WITH_INTRA:
            raise InputError(
                f"--intra {intra}: {name} says itself how operators are split. --intra goes with"
                f" {', '.join(_WITH_INTRA)}."
            )
        assert isinstance(method, Auto | PipeshardParallel | ShardParallel | WholeProgram)
        return replace(method, intra=INTRAS[intra]())
    if name.partition(":")[0] in LAYOUTS:
        return _layout(name, mesh_shape, pipeline)
    if name in PIPELINES:
        return _pipeline(name, mesh_shape, pipeline)
    of_groups, _, size = name.partition(":")
    has_size = of_groups in _OF_GROUPS and size.isdecimal() and len(size) < 7
    if not has_size and name not in METHODS and name not in SYNONYMS:
        known = [*METHODS, *SYNONYMS, *PIPELINES, *LAYOUTS.values()]
        if meant := layout_like(name):
            raise InputError(
                f"Unknown method {name!r}: did you mean {meant!r}? Known: {', '.join(known)}."
            )
        raise InputError(f"Unknown method {name!r}: {nearest(name, known)}")
    if pipeline.given:
        makes = "may make none" if name == "auto" else "makes none"
        raise InputError(
            f"{', '.join(pipeline.given)}: only for pipelines, and {name} {makes}. Add --method"
            " pipeshard."
        )
    if mesh_shape is None and has_size:
        return _OF_GROUPS[of_groups](shard_within=int(size))
    if mesh_shape is None:
        return {**METHODS, **SYNONYMS}[name]()
    if name not in _ON_MESH:
        raise InputError(
            f"Method {name} uses all devices as one axis; --mesh goes with"
            f" {' and '.join(_ON_MESH)}."
        )
    on_mesh = METHODS[name]()
    assert isinstance(on_mesh, Auto | ShardParallel | WholeProgram)
    return replace(on_mesh, mesh_shape=mesh_shape)


def _layout(
    name: str, mesh_shape: tuple[int, ...] | None, options: PipelineOptions
) -> AbstractMethod:
    refused = [
        *(["--mesh"] if mesh_shape else []),
        *(flag for flag in options.given if flag != "--layers"),
    ]
    if refused:
        raise InputError(
            f"{', '.join(refused)}: {name} says how devices are laid out itself, pipelines by 1f1b."
            " Leave that out."
        )
    method = layout_by_name(name, options.micro_batches, options.layers)
    if options.layers is not None and not (isinstance(method, Megatron) and method.pipeline > 1):
        raise InputError(
            f"--layers: only for pipelines, and {name} makes none. Add pp, such as {name},pp2."
        )
    return method


def _pipeline(
    name: str, mesh_shape: tuple[int, ...] | None, options: PipelineOptions
) -> PipeshardParallel:
    if mesh_shape is not None:
        raise InputError(
            f"The stages of {name} have meshes of their own; --mesh goes with"
            f" {' and '.join(_ON_MESH)}."
        )
    inter = PIPELINES[name]()
    try:
        inter.check_limits(StageLimits(num_stages=options.stages, schedule=options.schedule))
    except InputError as error:
        refused = []
        for flag, limits in (
            ("--stages", StageLimits(num_stages=options.stages)),
            ("--schedule", StageLimits(schedule=options.schedule)),
        ):
            try:
                inter.check_limits(limits)
            except InputError:
                refused.append(flag)
        raise InputError(
            f"{', '.join(refused)}: {name} {inter.own_way}. Use --method pipeshard."
        ) from error
    return PipeshardParallel(
        inter=inter,
        num_stages=options.stages,
        schedule=options.schedule,
        num_micro_batches=options.micro_batches,
        layers=options.layers,
        within=options.within,
    )
