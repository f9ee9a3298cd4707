"""`aliquot plan`: from a model's name and a cluster to a plan file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from ..cluster import Cluster
from ..core import InfeasibleError, InputError
from ..plans import device_range, mfu, tokens_per_step
from ._devices import use_host_only
from ._interrupts import INTERRUPTED
from ._max_batch import find_max_batch
from ._model_options import (
    BatchSize,
    Dtype,
    MemoryLimit,
    Recompute,
    Scan,
    SeqLen,
    Settings,
    model_options,
)
from ._options import (
    Json,
    check_destination,
    read_cluster,
    read_layers,
    read_mesh,
    read_micro_batches,
    read_time_limit,
)
from ._progress import search_progress
from ._remedies import try_remedies, with_remedies
from ._session import Session, session

if TYPE_CHECKING:
    from .._remedies import Remedy
    from ..planners import AbstractMethod, PipeshardParallel
    from ..plans import Plan
    from ._model import Model


def plan(
    model: Annotated[
        str,
        typer.Argument(help="A name from the zoo, or package.module:factory.", show_default=False),
    ],
    cluster: Annotated[
        str,
        typer.Option(help="A preset such as 8xH100, a TOML file, or detect.", show_default=False),
    ],
    global_batch: BatchSize = None,
    method: Annotated[
        str,
        typer.Option(
            help=(
                "dp (ddp), zero2, zero3 (fsdp), hsdp, shard, auto, pipeshard, grid, or a layout:"
                " tp:8, "
                "megatron:dp4,tp8,pp2."
            )
        ),
    ] = "auto",
    mesh: Annotated[str | None, typer.Option(help="Only this logical mesh, such as 4x2.")] = None,
    micro_batches: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help=(
                "Number of micro-batches; auto searches it, as methods auto and pipeshard do"
                " anyway."
            ),
        ),
    ] = None,
    micro_batch_semantics: Annotated[
        str,
        typer.Option(
            metavar="exact|independent",
            help=(
                "exact: the step's own numbers. independent: what does not decompose (BatchNorm)"
                " sees one micro-batch."
            ),
        ),
    ] = "exact",
    stages: Annotated[
        int | None, typer.Option(help="Stages of a pipeline; by default searched.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="gpipe, 1f1b, interleaved-1f1b or zero-bubble; by default searched."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="N|PATTERN",
            help="Where stages may be cut: a number of layers, or paths such as params.layers[*].",
        ),
    ] = None,
    memory_limit: MemoryLimit = None,
    seq_len: SeqLen = None,
    dtype: Dtype = None,
    recompute: Recompute = None,
    scan: Scan = False,
    settings: Settings = None,
    max_batch: Annotated[
        bool,
        typer.Option(
            "--max-batch",
            help="Find the largest batch that fits, and the one of highest throughput.",
        ),
    ] = False,
    tries: Annotated[
        bool,
        typer.Option(
            "--try-remedies/--no-remedies",
            help="If nothing fits, try changes that may make it fit.",
        ),
    ] = True,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compile the plan for the cluster's devices, and keep searching until one fits.",
        ),
    ] = False,
    profiles: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Price with the measurements of this database; see aliquot profile run.",
        ),
    ] = None,
    profiles_of_any: Annotated[
        bool,
        typer.Option(
            "--profiles-of-any", help="Also use measurements of other devices or of another JAX."
        ),
    ] = False,
    require_measured: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Refuse a plan if a smaller share of its time was measured."
        ),
    ] = 0.0,
    require_grade: Annotated[
        str,
        typer.Option(
            metavar="measured|measured-compute",
            help=(
                "What --require-measured counts: what all devices measured together, or also what"
                " one measured alone."
            ),
        ),
    ] = "measured",
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure here the operators that the best plan needs and the database lacks.",
        ),
    ] = False,
    time_limit: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Answer after this time, such as 20s, with the best plan so far and its gap.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest way to run a model's training step on a cluster, and say what it is
    predicted to cost.
    """
    with session(as_json) as say:
        check_destination(out)
        shape = read_mesh(mesh)
        parts = read_micro_batches(micro_batches)
        time_limit_s = read_time_limit(time_limit)
        _check_batches(global_batch, parts)
        if cluster != "detect":
            use_host_only()
        where = read_cluster(cluster)
        from ..planners import PIPELINES, PipelineOptions, method_by_name
        from ._model import find_factory, resolve
        from ._recomputation import AUTO, refuse_auto, with_either_recomputation

        if ":" in model:
            # Its module may register the schedule that is asked for.
            find_factory(model)
        asked = PipelineOptions(
            stages=stages, schedule=schedule, micro_batches=parts, layers=read_layers(layers)
        )
        how = method_by_name(method, shape, asked)
        searched = micro_batches == "auto" and method not in PIPELINES
        options, limit = model_options(
            global_batch, seq_len, dtype, recompute, scan, settings, memory_limit
        )
        if max_batch:
            refuse_auto(options, model, "--max-batch")
            find_max_batch(
                model, options, where, how, 1 if parts is None else parts, limit, out, say
            )
            return
        is_auto = options.recompute == AUTO and ":" not in model
        if is_auto:
            options = replace(options, recompute="block")
        built = resolve(model, options, where)
        started = time.perf_counter()

        def make(of: Model, within_s: float | None) -> Plan:
            return make_plan(
                of,
                where,
                how,
                "auto" if searched else parts,
                say,
                semantics=micro_batch_semantics,
                memory_limit_bytes=limit,
                verify=verify,
                profiles=profiles,
                profiles_of_any=profiles_of_any,
                require_measured=require_measured,
                require_grade=require_grade,
                measure=measure,
                time_limit_s=within_s,
            )

        try:
            if is_auto:
                result = with_either_recomputation(model, options, where, make, time_limit_s)
            else:
                result = make(built, time_limit_s)
        except InfeasibleError as error:
            remedies = (
                try_remedies(model, options, built, where, how, parts, limit, say) if tries else ()
            )
            say.finish(_no_plan(built, where, method, parts, error, remedies))
            raise with_remedies(error, remedies) from None
        except KeyboardInterrupt as stopped:
            _interrupted(getattr(stopped, "plan", None), time.perf_counter() - started, out, say)
            raise typer.Exit(INTERRUPTED) from None
        _deliver(result, time.perf_counter() - started, out, say)


def make_plan(
    model: Model,
    where: Cluster,
    how: AbstractMethod | PipeshardParallel,
    micro_batches: int | Literal["auto"] | None,
    say: Session,
    *,
    semantics: str = "exact",
    memory_limit_bytes: float | None = None,
    verify: bool = False,
    **of_profiles: Any,
) -> Plan:
    """Plan a model, with progress on standard error.

    Args:
        of_profiles: see `aliquot.plan`.
    """
    from .._api import plan as find_plan
    from ._model import user_code

    with user_code(model.name), search_progress(say) as report:
        return find_plan(
            model.step,
            model.state,
            model.batch,
            cluster=where,
            method=how,
            num_micro_batches=micro_batches,
            micro_batch_semantics=semantics,
            memory_limit_bytes=memory_limit_bytes,
            model=model.reference,
            verify=verify,
            progress=report,
            **of_profiles,
        )


def summary(plan: Plan, plan_s: float, out: Path | None) -> dict[str, Any]:
    """A plan's figures as `plan --json` prints them, all predicted but those below `compiled`.

    Args:
        plan_s: seconds from the step to the plan: tracing, searching, writing down, and compiling
            where that was asked for.
    """
    p, provenance = plan.prediction, plan.provenance
    return {
        "feasible": True,
        "method": plan.method,
        "model": plan.model.name,
        "cluster": plan.cluster.get("name"),
        "mesh": list(plan.stages[0].mesh_shape),
        "step_time_s": p.step_time_s,
        "compute_s": p.compute_s,
        "communication_s": p.communication_s,
        "gradient_s": p.gradient_s,
        "hidden_s": p.hidden_s,
        "bubble_s": p.bubble_s,
        "mfu": mfu(plan),
        "tokens_per_s": tokens_per_step(plan) / p.step_time_s if p.step_time_s else None,
        "memory_bytes_per_device": p.peak_memory_bytes,
        "memory_limit_bytes": p.memory_limit_bytes,
        "memory_bytes": dict(p.memory_bytes),
        "lower_bound_s": provenance.lower_bound_s,
        "gap": provenance.gap,
        "bound_holds_for": provenance.bound_holds_for,
        "status": provenance.status,
        "search_s": provenance.search_s,
        "trace_s": provenance.trace_s,
        "plan_s": plan_s,
        "num_stages": len(plan.stages),
        "num_micro_batches": plan.num_micro_batches,
        "micro_batch_semantics": plan.micro_batch_semantics,
        "schedule": plan.schedule,
        "num_submeshes": plan.num_submeshes,
        "measured_share": p.measured_share,
        "measured_compute_share": p.measured_compute_share,
        "measured_error": p.measured_error,
        "profiles": provenance.profiles or None,
        "stages": [
            {
                "mesh": list(stage.mesh_shape),
                "axis_names": list(stage.axis_names),
                "data_axes": list(stage.data_axes),
                "devices": list(range(*device_range(stage))),
                "layers": list(stage.layer_names),
                "recompute": stage.recompute,
                "predicted": msgspec.to_builtins(stage.prediction),
                "num_operators": sum(op.copies for op in stage.interior),
            }
            for stage in plan.stages
        ],
        "compiled": msgspec.to_builtins(plan.compiled),
        "notes": list(plan.notes),
        "plan_file": str(out) if out else None,
    }


def _check_batches(global_batch: int | None, micro_batches: int | None) -> None:
    if global_batch is not None and global_batch < 1:
        raise InputError(f"--global-batch must be at least 1, got {global_batch}.")
    if global_batch is not None and micro_batches is not None and global_batch % micro_batches:
        raise InputError(
            f"{micro_batches} micro-batches do not divide a global batch of {global_batch}. Try"
            f" --global-batch {-(-global_batch // micro_batches) * micro_batches}, or other"
            " --micro-batches."
        )


def _deliver(plan: Plan, plan_s: float, out: Path | None, say: Session) -> None:
    if out is not None:
        plan.save(out)
    say.show(str(plan))
    if out is not None:
        say.show(f"\nWritten to {out}. Read on with: aliquot explain {out}")
    say.finish(summary(plan, plan_s, out))


def _interrupted(best: Plan | None, plan_s: float, out: Path | None, say: Session) -> None:
    if best is None:
        say.note("interrupted before any plan was complete; nothing was written.")
        return
    say.note("interrupted; this is the best plan so far.")
    _deliver(best, plan_s, out, say)


def _no_plan(
    model: Model,
    where: Cluster,
    method: str,
    micro_batches: int | None,
    error: InfeasibleError,
    remedies: Sequence[Remedy],
) -> dict[str, Any]:
    """The same keys as for a plan, with the smallest memory found instead of a time."""
    return {
        "feasible": False,
        "method": method,
        "model": model.name,
        "cluster": where.name,
        "mesh": None,
        "step_time_s": None,
        "memory_bytes_per_device": error.required_bytes,
        "memory_limit_bytes": error.available_bytes,
        "memory_bytes": error.parts,
        "lower_bound_s": None,
        "gap": None,
        "search_s": None,
        "trace_s": None,
        "plan_s": None,
        "num_stages": 0,
        "num_micro_batches": micro_batches,
        "schedule": None,
        "stages": [],
        "compiled": None,
        "reason": str(error),
        "remedies": [each.to_dict() for each in remedies],
        "plan_file": None,
    }
