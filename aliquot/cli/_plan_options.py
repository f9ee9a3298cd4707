"""Groups of options of `aliquot plan`: the method with its pipeline, the measurements to price
with, and the search.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ..core import InputError, divisors
from ._groups import option
from ._options import ProfilesOfAny, read_layers, read_mesh, read_micro_batches

if TYPE_CHECKING:
    from ..planners import AbstractMethod, PipeshardParallel


Objective = Annotated[
    str | None,
    option(
        "Of a function without gradients: the time of one call, or the time between calls that"
        " follow one another.",
        metavar="latency|throughput",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodOptions:
    """The options that say which plans are searched."""

    title: ClassVar[str] = "Method"

    method: str = option(
        "dp (ddp), zero2, zero3 (fsdp), hsdp or hsdp:8 (hybrid FSDP in hosts, in groups of 8;"
        " zero2:8 likewise),"
        " shard, auto, pipeshard, bottleneck, grid, or a layout: tp:8, megatron:dp4,tp8,pp2.",
        "auto",
    )
    mesh: str | None = option("Only this logical mesh, such as 4x2.")
    micro_batches: str | None = option(
        "Number of micro-batches; auto searches it, as methods auto and pipeshard do anyway.",
        metavar="N|auto",
    )
    micro_batch_semantics: str = option(
        "exact: the step's own numbers. independent: each micro-batch is a step of its own"
        " (BatchNorm sees one alone).",
        "exact",
        metavar="exact|independent",
    )
    stages: int | None = option("Stages of a pipeline; by default searched.")
    schedule: str | None = option(
        "gpipe, 1f1b, 1f1b-overlap-friendly, interleaved-1f1b or zero-bubble; by default searched."
    )
    layers: str | None = option(
        "Where stages may be cut: into a number of layers, before paths such as"
        " params.layers[*], or between operators.",
        metavar="N|PATTERN|operators",
    )

    intra: str | None = option(
        "What splits operators, in each stage of a pipeline too: an integer program, the"
        " default, or one decision for each ParallelBlock.",
        metavar="ilp|blocks",
    )

    within: list[str] | None = option(
        "Restrict the search for a pipeline; repeatable: submeshes=powers-of-two, meshes=2x4,"
        " imbalance=0.5, without=all-to-all, no-replicated-parameters, batch-on-first-axis.",
        metavar="RESTRICTION",
    )

    def check(self, global_batch: int | None) -> None:
        """Check what can be checked before JAX is imported.

        Raises:
            InputError: The mesh or the micro-batches cannot be read, or do not divide the batch.
        """
        read_mesh(self.mesh)
        micro_batches = read_micro_batches(self.micro_batches)
        if global_batch is not None and global_batch < 1:
            raise InputError(f"--global-batch must be at least 1, got {global_batch}.")
        if global_batch is not None and micro_batches is not None and global_batch % micro_batches:
            near = divisors(global_batch, most=micro_batches)[-1:]
            near += [n for n in divisors(global_batch) if n > micro_batches][:1]
            # Each micro-batch is then as large as the batch, which the devices divide if they did.
            larger = math.lcm(global_batch, micro_batches)
            raise InputError(
                f"{micro_batches} micro-batches do not divide a global batch of {global_batch}. Try"
                f" --micro-batches {' or '.join(map(str, near))}, or --global-batch {larger}."
            )

    @property
    def num_micro_batches(self) -> int | None:
        """The number of micro-batches that was given, if one was."""
        return read_micro_batches(self.micro_batches)

    @property
    def wanted_micro_batches(self) -> int | Literal["auto"] | None:
        """The number of micro-batches as `aliquot.plan` takes it."""
        from ..planners import PIPELINES

        # These methods search the number themselves when none is given, and know no "auto".
        searches = self.method in PIPELINES
        return "auto" if self.micro_batches == "auto" and not searches else self.num_micro_batches

    def read(self) -> AbstractMethod | PipeshardParallel:
        """The method.

        Raises:
            InputError: There is no such method, or the options do not go with it.
        """
        from ..planners import PipelineOptions, Within, method_by_name

        pipeline = PipelineOptions(
            stages=self.stages,
            schedule=self.schedule,
            micro_batches=self.num_micro_batches,
            layers=read_layers(self.layers),
            within=Within.read(self.within) if self.within else None,
        )
        return method_by_name(self.method, read_mesh(self.mesh), pipeline, self.intra)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The options that say which measurements correct the cost model, and how many it needs."""

    title: ClassVar[str] = "Measurements"

    profiles: Path | None = option(
        "Price with the measurements of this database; see aliquot profile run.", metavar="FILE"
    )
    profiles_of_any: ProfilesOfAny = False
    require_measured: float = option(
        "Refuse a plan if a smaller share of its time was measured.", 0.0, min=0, max=1
    )
    require_grade: str = option(
        "What --require-measured counts: what all devices measured together, or also what one"
        " measured alone.",
        "measured",
        metavar="measured|measured-compute",
    )
    measure: bool = option(
        "Measure here the operators that the best plan needs and the database lacks.", False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The options that say how long to search and what else to do with a plan."""

    title: ClassVar[str] = "Search"

    max_batch: bool = option(
        "Find the largest batch that fits, and the one of highest throughput.", False
    )
    tries: bool = option(
        "If nothing fits, try changes that may make it fit.",
        True,
        names="--try-remedies/--no-remedies",
    )
    verify: bool = option(
        "Compile the plan for the cluster's devices, and keep searching until one fits; with"
        " --max-batch, compile the batches that are answered.",
        False,
    )
    objective: Objective = None
    time_limit: str | None = option(
        "Answer after this time, such as 20s, with the best plan so far and its gap.",
        metavar="TIME",
    )
