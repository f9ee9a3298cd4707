"""What `print(plan)` shows: a page of plain text that a person reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..core import format_bytes, format_seconds
from ._arrays import format_dims, grouped_arrays
from ._plan import Plan, Prediction, Provenance, StagePlan

_ARRAYS = 8
_COLLECTIVES = 5
_NOTES = 6


def describe(plan: Plan) -> str:
    """A plan as text: what it is, its predicted time and memory with their parts, the largest arrays, what to know."""
    lines = [headline(plan), *_facts(plan)]
    for index, stage in enumerate(plan.stages):
        lines += ["", *_stage(plan, stage, index)]
    lines += ["", *_collectives(plan)]
    if plan.notes:
        lines += ["", "Notes"]
        lines += [f"  {note}" for note in plan.notes[:_NOTES]]
        if len(plan.notes) > _NOTES:
            lines.append(f"  and {len(plan.notes) - _NOTES} more")
    return "\n".join(lines)


def headline(plan: Plan) -> str:
    """One line: model, method, mesh and cluster."""
    return f"{plan.model.name or 'step'}: {plan.method} on {meshes(plan)} of {plan.cluster.get('name', 'a cluster')}"


def meshes(plan: Plan) -> str:
    """The stages' meshes with the names of their axes, such as `mesh 4x2 (x, y)`."""
    shown = [f"{'x'.join(map(str, s.mesh_shape))} ({', '.join(s.axis_names)})" for s in plan.stages]
    return f"mesh {shown[0]}" if len(shown) == 1 else f"{len(shown)} stages on meshes {'; '.join(shown)}"


def time_parts(prediction: Prediction) -> str:
    """The predicted step time as a sum of its parts."""
    p = prediction
    return (
        f"{format_seconds(p.step_time_s)} = {format_seconds(p.compute_s)} compute"
        f" + {format_seconds(p.communication_s)} communication + {format_seconds(p.gradient_s)} gradient communication"
        f" - {format_seconds(p.hidden_s)} hidden behind compute"
    )


def bound(provenance: Provenance) -> str:
    """What is known about better plans: lower bound, gap, the space they hold for and the search's status."""
    if provenance.lower_bound_s is None:
        return f"none is stated ({provenance.status} within {provenance.bound_holds_for or 'its method'})"
    gap = "" if provenance.gap is None else f", so at most {provenance.gap:.2%} above the best"
    space = f" ({provenance.bound_holds_for})" if provenance.bound_holds_for else ""
    return f"no plan is faster than {format_seconds(provenance.lower_bound_s)}{gap}{space}; {provenance.status}"


def micro_batches(plan: Plan) -> str:
    """Into how many parts a batch is cut, and how the outputs of the parts combine."""
    if plan.num_micro_batches == 1:
        return "1 (the whole batch at once)"
    by_rule: dict[str, list[str]] = {}
    for path, rule in plan.combine.items():
        by_rule.setdefault(rule, []).append(path)
    rules = "; ".join(
        f"{rule}: {paths[0] if len(paths) == 1 else f'{len(paths)} outputs'}" for rule, paths in by_rule.items()
    )
    semantics = "" if plan.micro_batch_semantics == "exact" else f", {plan.micro_batch_semantics}"
    return f"{plan.num_micro_batches}{semantics}" + (f" (outputs combine by {rules})" if rules else "")


def rebuild(plan: Plan) -> str:
    """How to make the step again that the plan is for."""
    if plan.model.kind == "zoo":
        settings = ", ".join(f"{key}={value!r}" for key, value in plan.model.settings.items())
        return f"aliquot.zoo.build({settings})"
    if plan.model.kind == "factory":
        return f"{plan.model.name}({', '.join(f'{k}={v!r}' for k, v in plan.model.settings.items())})"
    return "the plan was made from a function in a running program; pass that function again"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """Aligned columns without lines; the columns whose positions are in `right` are aligned on their right."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    flush = set(right)
    return [
        "  " + "  ".join(c.rjust(w) if i in flush else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in cells
    ]


def _facts(plan: Plan) -> list[str]:
    p = plan.prediction
    share = f", {p.peak_memory_bytes / p.memory_limit_bytes:.0%} of the limit" if p.memory_limit_bytes else ""
    parts = " + ".join(f"{format_bytes(v)} {name}" for name, v in sorted(p.memory_bytes.items(), key=lambda i: -i[1]))
    return [
        f"  step time (predicted)  {time_parts(p)}",
        f"  bound                  {bound(plan.provenance)}",
        f"  memory (predicted)     {format_bytes(p.peak_memory_bytes)} on each device{share} of"
        f" {format_bytes(p.memory_limit_bytes)}, at {p.peak_moment}",
        f"                         {parts}",
        f"  micro-batches          {micro_batches(plan)}",
        f"  found in               {format_seconds(plan.provenance.search_s)}, after tracing for"
        f" {format_seconds(plan.provenance.trace_s)}",
    ]


def _stage(plan: Plan, stage: StagePlan, index: int) -> list[str]:
    groups = grouped_arrays(plan.inputs, stage, stage.shardings)
    where = f"Stage {index}: the" if len(plan.stages) > 1 else "The"
    title = f"{where} largest of {len(plan.inputs)} inputs on each device"
    rows = [
        (
            group.pattern,
            str(group.count),
            f"{group.dtype}[{', '.join(map(str, group.shape))}]",
            format_dims(group.dims),
            format_bytes(group.local_bytes),
        )
        for group in groups[:_ARRAYS]
    ]
    return [title, *table(("path", "count", "each", "split by axes", "on each device"), rows, right=(1, 4))]


def _collectives(plan: Plan) -> list[str]:
    uses = sorted(plan.prediction.collectives, key=lambda use: -use.seconds)
    if not uses:
        return ["No communication is predicted."]
    rows = [
        (
            use.kind,
            ", ".join(use.axes),
            f"{use.count:g}",
            format_bytes(use.num_bytes),
            format_seconds(use.seconds),
            use.label,
        )
        for use in uses[:_COLLECTIVES]
    ]
    header = ("kind", "axes", "count", "bytes", "time", "what")
    title = f"The most expensive of {len(uses)} kinds of communication in a step (predicted)"
    return [title, *table(header, rows, right=(2, 3, 4))]
