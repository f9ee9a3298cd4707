"""Programs of plans as bytes: lowered for their target in this process, compiled in another.

The step is traced here, where the user's function is, on a mesh without devices; `jax.export`
writes the module down with its splits. What the other process compiles is the program that the
runtime would compile.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from ..cost import PlannedStep
from ..plans import StagePlan
from ..runtime import StageExport, build_plan_program
from ..sharding import axes_of

_FOR_OTHERS = "jax_export_ignore_forward_compatibility"
_CUSTOM_CALL = re.compile(r'custom_call @"?([\w.$]+)')
# Custom calls that the runtime itself puts into programs.
_OWN_CUSTOM_CALLS = frozenset({"LayoutConstraint"})
Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableProgram:
    """One stage's program as bytes.

    Attributes:
        module: what `jax.export` serialized.
        platform: the platform that it was lowered for.
        mesh_shape, axis_names: of its mesh.
        in_dims, out_dims: mesh axes that split each dim of each input and output; None leaves one
            to the compiler.
        in_kinds, out_kinds: for each input and output the memory that it lies in, by JAX's name;
            None for device memory.
        donated: positions of donated inputs.
        x64: whether JAX keeps 64 bits.
    """

    module: bytes
    platform: str
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    in_dims: tuple[Dims | None, ...]
    out_dims: tuple[Dims | None, ...]
    in_kinds: tuple[str | None, ...]
    out_kinds: tuple[str | None, ...]
    donated: tuple[int, ...]
    x64: bool

    @property
    def num_devices(self) -> int:
        """Devices that it runs on."""
        return math.prod(self.mesh_shape)

    @property
    def fingerprint(self) -> str:
        """A hash of the program: equal for equal programs."""
        settings = (
            self.platform,
            self.mesh_shape,
            self.axis_names,
            self.in_dims,
            self.out_dims,
            self.in_kinds,
            self.out_kinds,
            self.donated,
            self.x64,
        )
        return hashlib.sha256(self.module + repr(settings).encode()).hexdigest()


def portable_program(step: PlannedStep, platform: str) -> PortableProgram:
    """The program of a plan that is no pipeline, lowered for a platform of which no device need be
    here.

    Args:
        platform: `"cuda"`, `"tpu"` or `"cpu"`.

    Raises:
        CaptureError: the step does not decompose into the plan's micro-batches.
    """
    graph, (stage,) = step.graph, step.plan.stages
    # Positions of devices do not matter for an exported program, so the mesh needs none.
    mesh: Any = AbstractMesh(
        tuple(stage.mesh_shape),
        tuple(stage.axis_names),
        axis_types=(AxisType.Auto,) * len(stage.mesh_shape),
    )
    program = build_plan_program(step, mesh)
    structs = []
    make: Any = jax.ShapeDtypeStruct
    for leaf, sharding in zip(graph.calling.call.leaves, program.in_shardings, strict=True):
        dtype = leaf.dtype
        if not jax.numpy.issubdtype(dtype, jax.dtypes.extended):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        structs.append(make(tuple(leaf.shape), dtype, sharding=sharding))
    return PortableProgram(
        module=bytes(_exported(program.jitted, structs, platform).serialize()),
        platform=platform,
        mesh_shape=tuple(stage.mesh_shape),
        axis_names=tuple(stage.axis_names),
        in_dims=tuple(map(_dims, program.in_shardings)),
        out_dims=tuple(map(_dims, program.out_shardings)),
        in_kinds=tuple(sharding.memory_kind for sharding in program.in_shardings),
        out_kinds=tuple(sharding.memory_kind for sharding in program.out_shardings),
        donated=program.donated,
        x64=_keeps_64_bits(),
    )


def portable_stage(export: StageExport, stage: StagePlan, platform: str) -> PortableProgram:
    """One program of a stage of a pipeline, lowered for a platform of which no device need be here.

    Splits that the compiler chose for another program's results, where `export.sources` says so,
    are still to be put into `in_dims`.
    """
    form = export.form
    return PortableProgram(
        module=bytes(_exported(form.jitted, form.arguments, platform).serialize()),
        platform=platform,
        mesh_shape=tuple(stage.mesh_shape),
        axis_names=tuple(stage.axis_names),
        in_dims=tuple(None if s.sharding is None else _dims(s.sharding) for s in form.arguments),
        out_dims=tuple(None if sharding is None else _dims(sharding) for sharding in form.wanted),
        in_kinds=tuple(getattr(s.sharding, "memory_kind", None) for s in form.arguments),
        out_kinds=tuple(getattr(sharding, "memory_kind", None) for sharding in form.wanted),
        donated=form.donated,
        x64=_keeps_64_bits(),
    )


def _keeps_64_bits() -> bool:
    return bool(jax.dtypes.canonicalize_dtype("int64") == "int64")


def _exported(jitted: Any, structs: Sequence[Any], platform: str) -> Any:
    """The program in the form of `jax.export`, with all custom calls allowed."""
    from jax import export

    def written(names: Set[str]) -> Any:
        checks = list(map(export.DisabledSafetyCheck.custom_call, sorted(names)))
        return export.export(jitted, platforms=[platform], disabled_checks=checks)(*structs)

    # The same release of JAX reads the module. So it need not be written for readers of other
    # releases, which would be another program, and custom calls are safe that are not guaranteed to
    # work in later releases.
    promised = getattr(jax.config, _FOR_OTHERS)
    jax.config.update(_FOR_OTHERS, True)
    try:
        try:
            return written(_OWN_CUSTOM_CALLS)
        except ValueError as error:
            names = set(_CUSTOM_CALL.findall(str(error)))
            if not names:
                raise
            return written(_OWN_CUSTOM_CALLS | names)
    finally:
        jax.config.update(_FOR_OTHERS, promised)


def _dims(sharding: NamedSharding) -> Dims:
    return tuple(map(axes_of, sharding.spec))
