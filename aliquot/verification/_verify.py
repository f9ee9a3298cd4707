"""Predictions of a plan beside the compiler's account."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..cluster import Cluster
from ..core import format_bytes, format_seconds
from ..cost import PlannedStep, attention_s
from ..plans import DEVICE_MEMORY, grouped_arrays
from ._compare import (
    CollectiveComparison,
    UnintendedCollective,
    compare_collectives,
    unintended_collectives,
)
from ._compile import CompiledProgram, Compiler
from ._process import Progress
from ._program import portable_program
from ._targets import CompileTarget, resolve_target


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramVerification:
    """One program of a pipeline's stage: how often a step runs it, and the compiler's account of
    it.

    `same_as` names the program of another stage that is the same and was compiled once for both;
    else it is empty.
    """

    name: str
    runs: int
    compiled: CompiledProgram
    same_as: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        c = self.compiled
        return {
            "name": self.name,
            "runs": self.runs,
            **_buffers(c),
            "compile_s": c.compile_s,
            "cached": c.cached,
            "same_as": self.same_as or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StageVerification:
    """One stage: the prediction and the compiler's account, on each device.

    Attributes:
        predicted_bytes: the plan's peak.
        predicted_parts: what the peak is made of.
        predicted_host_bytes: what the plan keeps in host memory for a device.
        argument_bytes: by the plan, what the step's inputs, state and batch, take on a device.
        compiled: the compiler's account; for a pipeline's stage, that of all its programs together,
            at the moment of a step when its devices hold most.
        held: of a pipeline's stage what its devices hold at that moment, by kind.
        programs: of a pipeline's stage its programs.
        collectives: predicted and compiled, by kind and mesh axes.
        unintended: collectives that the plan does not explain, most bytes first.
    """

    predicted_bytes: float
    predicted_parts: dict[str, float]
    predicted_host_bytes: float = 0.0
    argument_bytes: float
    compiled: CompiledProgram
    collectives: tuple[CollectiveComparison, ...]
    unintended: tuple[UnintendedCollective, ...]
    held: dict[str, float] = field(default_factory=dict)
    programs: tuple[ProgramVerification, ...] = ()

    @property
    def compiled_bytes(self) -> float:
        """Memory that must be free on a device."""
        return self.compiled.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        c = self.compiled
        return {
            "predicted_bytes": self.predicted_bytes,
            "compiled_bytes": self.compiled_bytes,
            "predicted_host_bytes": self.predicted_host_bytes,
            # Of a pipeline's stage, the host memory of all programs together is not known.
            "compiled_host_bytes": c.host_bytes or None,
            "parts": {
                "predicted": {"arguments": self.argument_bytes, **self.predicted_parts},
                "compiled": {**(self.held or _buffers(c)), "peak": self.compiled_bytes},
            },
            "collectives": [each.to_dict() for each in self.collectives],
            "unintended": [each.to_dict() for each in self.unintended],
            "compile_s": c.compile_s,
            "cached": c.cached,
            "compiler_cycles": c.cycles or None,
            "compiler_compute_s": c.modelled_compute_s or None,
            "calls_without_a_time": c.unpriced_calls,
            "refusal": c.refusal or None,
            "programs": [each.to_dict() for each in self.programs],
        }


def _buffers(c: CompiledProgram) -> dict[str, float]:
    return {
        "arguments": c.argument_bytes,
        "outputs": c.output_bytes,
        "temporaries": c.temp_bytes,
        "aliases": c.alias_bytes,
        "in_use_at_once": c.live_bytes,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A plan and what the compiler of a target makes of it.

    Attributes:
        target: what it was compiled for.
        num_devices: of all stages.
        limit_bytes: what a program may take on each device; None if unknown.
        predicted_step_time_s, predicted_compute_s: of the plan; `predicted_attention_s` of the
            compute are fused attention.
        stages: in order.
        submesh_bytes: for a pipeline, the memory that must be free on the devices of each submesh,
            for all stages there together.
        remarks: what else the reader should know.
    """

    target: CompileTarget
    num_devices: int
    limit_bytes: float | None
    predicted_step_time_s: float
    predicted_compute_s: float
    predicted_attention_s: float = 0.0
    stages: tuple[StageVerification, ...]
    submesh_bytes: tuple[float, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def compiled_bytes(self) -> float:
        """Memory that must be free on the fullest device."""
        return max([stage.compiled_bytes for stage in self.stages] + list(self.submesh_bytes))

    @property
    def fits(self) -> bool:
        """True if every stage fits, by the compiler's account."""
        if any(stage.compiled.refusal for stage in self.stages):
            return False
        return self.limit_bytes is None or self.compiled_bytes <= self.limit_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `aliquot verify --json` prints them."""
        return {
            "target": self.target.name,
            "num_devices": self.num_devices,
            "fits": self.fits,
            "limit_bytes": self.limit_bytes,
            "predicted_step_time_s": self.predicted_step_time_s,
            "predicted_compute_s": self.predicted_compute_s,
            "predicted_attention_s": self.predicted_attention_s,
            "submesh_bytes": list(self.submesh_bytes),
            "stages": [stage.to_dict() for stage in self.stages],
            "remarks": list(self.remarks),
        }

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does NOT fit"
        limit = f" of {format_bytes(self.limit_bytes)}" if self.limit_bytes is not None else ""
        statements = []
        for number, stage in enumerate(self.stages):
            which = f"stage {number}: " if len(self.stages) > 1 else ""
            statements.append(
                f"{which}{format_bytes(stage.compiled_bytes)}{limit} on each device (predicted"
                f" {format_bytes(stage.predicted_bytes)}), compiled in"
                f" {format_seconds(stage.compiled.compile_s)}"
            )
            if stage.compiled.host_bytes:
                statements.append(
                    f"{which}{format_bytes(stage.compiled.host_bytes)} in host memory for each"
                    f" device (predicted {format_bytes(stage.predicted_host_bytes)})"
                )
            statements += [f"not in the plan: {each}" for each in stage.unintended]
        head = f"{verdict} {self.num_devices} x {self.target.name}"
        lines = (
            [f"{head}: {statements[0]}", *statements[1:]]
            if len(self.stages) == 1
            else [head, *statements]
        )
        return "\n".join([*lines, *self.remarks])


def verify_program(
    step: PlannedStep,
    *,
    target: str | None = None,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> Verification:
    """Compile the program of a plan that is no pipeline; see `verify_plan`."""
    plan = step.plan
    cluster = Cluster.from_dict(plan.cluster)
    chosen = resolve_target(target, cluster, limit_bytes=plan.prediction.memory_limit_bytes)
    (stage,) = plan.stages
    tell = progress or (lambda line: None)
    with Compiler(
        chosen, num_devices=math.prod(stage.mesh_shape), progress=tell, cache=cache
    ) as compiler:
        compiler.start()
        tell("exporting the program")
        program = portable_program(step, chosen.platform)
        compiled = compiler.compile(program, devices_per_host=cluster.devices_per_host)
    uses = plan.prediction.collectives
    paths = [each.path for each in plan.inputs]
    here = [array for array in plan.inputs if array.memory == DEVICE_MEMORY]
    arguments = grouped_arrays(here, stage, stage.shardings)
    # A program that was refused has no text.
    collectives = () if compiled.refusal else compiled.collectives
    return Verification(
        target=chosen,
        num_devices=program.num_devices,
        limit_bytes=chosen.limit_bytes,
        predicted_step_time_s=plan.prediction.step_time_s,
        predicted_compute_s=plan.prediction.compute_s,
        predicted_attention_s=attention_s(step) if compiled.unpriced_calls else 0.0,
        stages=(
            StageVerification(
                predicted_bytes=plan.prediction.peak_memory_bytes,
                predicted_parts=dict(plan.prediction.memory_bytes),
                predicted_host_bytes=sum(plan.prediction.host_memory_bytes.values()),
                argument_bytes=sum(group.local_bytes for group in arguments),
                compiled=compiled,
                collectives=compare_collectives(uses, collectives) if not compiled.refusal else (),
                unintended=unintended_collectives(
                    uses,
                    collectives,
                    paths,
                    dict(zip(stage.axis_names, stage.mesh_shape, strict=True)),
                ),
            ),
        ),
        remarks=remarks_on(cluster, chosen, [compiled]),
    )


def remarks_on(
    cluster: Cluster, target: CompileTarget, compiled: Sequence[CompiledProgram]
) -> tuple[str, ...]:
    """Remarks on a target that is not the plan's device, and those of the compiler on its
    programs.
    """
    remarks = []
    if target.name != cluster.device.name:
        remarks.append(
            f"The plan was made for {cluster.device.name}, and its predictions are for that."
        )
    for each in compiled:
        if each.remark:
            remarks.append(each.remark)
        if each.refusal:
            remarks.append(f"The compiler says: {each.refusal}")
    return tuple(dict.fromkeys(remarks))
