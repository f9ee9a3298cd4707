"""The object that `aliquot plan --json` prints, with and without a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..core import InfeasibleError

if TYPE_CHECKING:
    from .._remedies import Remedy
    from ..cluster import Cluster
    from ..plans import Plan
    from ._model import Model


def summary(plan: Plan, plan_s: float, out: Path | None) -> dict[str, Any]:
    """A plan's figures as `plan --json` prints them, all predicted but those below `compiled`.

    Args:
        plan_s: seconds from the step to the plan: tracing, searching, writing down, and compiling
            where that was asked for.
    """

    from ..plans import figures, layers_recompute, stage_data

    p, provenance = plan.prediction, plan.provenance
    stages = []
    for stage in plan.stages:
        num_operators = sum(op.copies for op in stage.interior)
        stages.append(stage_data(stage) | {"num_operators": num_operators})
    return {
        "feasible": True,
        "method": plan.method,
        "model": plan.model.name,
        "recompute": layers_recompute(plan),
        "cluster": plan.cluster.get("name"),
        "idle_hosts": plan.idle_hosts,
        "mesh": list(plan.stages[0].mesh_shape),
        **figures(plan),
        "lower_bound_s": provenance.lower_bound_s,
        "gap": provenance.gap,
        "bound_holds_for": provenance.bound_holds_for,
        "space": provenance.bound_holds_for or None,
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
        "stages": stages,
        "compiled": msgspec.to_builtins(plan.compiled),
        "notes": list(plan.notes),
        "plan_file": str(out) if out else None,
    }


def no_plan(
    model: Model,
    where: Cluster,
    method: str,
    micro_batches: int | None,
    error: InfeasibleError,
    remedies: Sequence[Remedy],
) -> dict[str, Any]:
    """The same keys as for a plan, with the smallest memory found instead of a time."""
    from ..plans import figures

    return {
        "feasible": False,
        "method": method,
        "model": model.name,
        "recompute": model.recompute or model.reference.settings.get("recompute"),
        "cluster": where.name,
        "mesh": None,
        **figures(None),
        "peak_memory_bytes": error.required_bytes,
        "memory_limit_bytes": error.available_bytes,
        "memory_bytes": error.parts,
        "lower_bound_s": None,
        "gap": None,
        "space": None,
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
