"""Compilation of a pipeline: the executables of this process's stages, ready to be issued."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Any

import jax
from msgspec import structs

from ...core import InputError, PlanMismatchError
from ..transport import exchange, watched
from ._issue import Issuer
from ._pipeline import Pipeline
from ._stage_forms import Known, StageForm, array_struct, form_of
from ._stage_functions import Key


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledPipeline:
    """A pipeline whose programs are compiled.

    Attributes:
        stages: its functions compiled; None for those of other processes.
        issuer: runs its steps.
    """

    pipeline: Pipeline
    stages: tuple[StageForm | None, ...] = field(repr=False)
    issuer: Issuer = field(repr=False)


def compile_pipeline(pipeline: Pipeline) -> CompiledPipeline:
    """Compile every function of this process's stages. With several processes all must call it.

    Raises:
        InputError: another library has connected the processes.
        PlanMismatchError: the processes do not fit the plan, or do not run the same one.
    """
    peers = watched() if pipeline.is_shared else None
    if pipeline.is_shared and peers is None:
        raise InputError(
            f"the stages of this pipeline lie in {jax.process_count()} processes, which"
            " jax.distributed.initialize has connected. Stages send arrays to each other, and"
            " processes learn when another one ends, through connections that"
            " aliquot.runtime.initialize makes: call it with the same arguments in its place,"
            " before any device is used."
        )
    if pipeline.is_shared or not any(pipeline.local):
        idle = sorted(set(range(jax.process_count())) - set().union(*pipeline.processes))
        if idle:
            used = len(set().union(*(c.mesh.devices.flat for c in pipeline.contexts)))
            raise PlanMismatchError(
                f"processes {', '.join(map(str, idle))} have no device of any stage: the plan is"
                f" for {used} devices, and {jax.process_count()} processes have"
                f" {len(jax.devices())}",
                asked="the plan does not fit these processes",
                advice=(
                    "Start as many processes as the plan has devices for, or plan for all devices."
                ),
            )
    known: Known = {}
    shared: dict[tuple[Any, ...], Any] = {}
    stages = tuple([_compile(pipeline, k, known, shared) for k in range(len(pipeline.functions))])
    issuer = Issuer(pipeline, stages, known, peers)
    if peers is not None:
        # Transfers are matched by their order alone, so a process with another list of
        # instructions would hang, or receive the wrong arrays.
        digests = exchange(hashlib.sha256(issuer.signature().encode()).digest(), bytes)
        other = [k for k, digest in enumerate(digests) if digest != digests[0]]
        if other:
            raise PlanMismatchError(
                f"processes {', '.join(map(str, other))} would run other instructions than process"
                " 0",
                asked="processes that run a step together must all run the same",
                advice="Give all processes the same step, plan, shapes and versions.",
            )
        issuer.connect()
    return CompiledPipeline(pipeline=pipeline, stages=stages, issuer=issuer)


def _compile(
    pipeline: Pipeline, k: int, known: Known, shared: dict[tuple[Any, ...], Any]
) -> StageForm | None:
    """The `k`th function compiled; None if another process runs it. Equal programs of stages on the
    same devices are compiled once.

    Args:
        known: see `form_of`; gets the shardings that the compiler chose.
        shared: executables compiled so far, keyed by all that determines them.
    """
    start = time.perf_counter()
    form = form_of(pipeline, k, known)
    function, stage = form.function, form.function.program.stage
    if not pipeline.local[stage]:
        return None
    lowered = form.jitted.lower(*form.arguments)
    middle = time.perf_counter()
    mesh = pipeline.contexts[stage].mesh
    if sum(context.mesh == mesh for context in pipeline.contexts) == 1:
        compiled = lowered.compile()
    else:
        # The text is without source lines, in which equal programs may differ. It also lacks what
        # only JAX knows, such as the kind of random keys, so shapes and dtypes belong to the key.
        text = hashlib.sha256(lowered.as_text(debug_info=False).encode()).digest()
        kinds = tuple((r.shape, r.dtype) for r in form.results)
        determined_by = mesh, text, form.donated, form.arguments, kinds, form.wanted
        if determined_by not in shared:
            shared[determined_by] = lowered.compile()
        compiled = shared[determined_by]
    end = time.perf_counter()
    results = []
    for key, s, got in zip(function.gives, form.results, compiled.output_shardings, strict=True):
        chosen = s if s.sharding is not None else array_struct(s.shape, s.dtype, got)
        known[stage, Key(key.form, key.value)] = chosen
        results.append(chosen)
    return structs.replace(
        form,
        results=tuple(results),
        compiled=compiled,
        lower_s=middle - start,
        compile_s=end - middle,
    )
