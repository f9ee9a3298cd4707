"""Text of `print(plan)`: a page that a person reads."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from ..core import format_bytes, format_seconds
from ._arrays import ArrayGroup, format_dims, grouped_arrays, without_moments
from ._collective_text import collective_table, stage_collective_table
from ._plan import Plan
from ._stage_text import equal_stages, meshes, stage_numbers, stage_remarks, stage_table
from ._summary import summary_rows, tried

_ARRAYS = 8
_ARRAYS_OF_STAGES = 4
_KINDS_OF_STAGES = 4
_COLLECTIVES = 5
_NOTES = 6
_WIDTH = 120
_MARGIN = 25
_ROUNDING = 1e-6
# What the closed form of a schedule proves holds for the closed form alone; a simulation may lie
# above it.
_CLOSED_FORM = "closed forms of "
# The names in plan files of the plans among which a bound holds.
_SCOPES = {
    "all copies of all layers": "",
    "gap_within_folded_space": "plans that split equal layers equally",
    "gap_within_neighbourhood": "choices near the solutions of coarser meshes",
}
_WITHIN_GAP = "optimal within the gap"


def describe(plan: Plan) -> str:
    """A plan as text: what it is, its predicted time and memory with their parts, the largest
    arrays, what to know.
    """
    lines = [headline(plan), *_facts(plan), ""]
    if rows := tried(plan):
        lines += [
            "Tried in the search (predicted)",
            *table(("method", "mesh", "step time", "outcome"), rows, right=(2,)),
            "",
        ]
    if is_pipeline(plan):
        lines += [*_stages(plan), "", *_arrays_of_stages(plan), *_collectives_of_stages(plan)]
    else:
        for stage in plan.stages:
            lines += [*_arrays(plan, grouped_arrays(plan.inputs, stage, stage.shardings)), ""]
        lines += _collectives(plan)
    if plan.notes:
        lines += ["", "Notes"]
        lines += [f"  {note}" for note in plan.notes[:_NOTES]]
        if len(plan.notes) > _NOTES:
            lines.append(f"  and {len(plan.notes) - _NOTES} more")
    return "\n".join(lines)


def is_pipeline(plan: Plan) -> bool:
    """True if it runs as stages with a schedule."""
    return plan.is_pipeline or len(plan.stages) > 1


def headline(plan: Plan) -> str:
    """One line: model, method, mesh or stages, and cluster."""
    what, cluster = plan.model.name or "step", plan.cluster.get("name", "a cluster")
    if is_pipeline(plan):
        return f"{what}: {plan.method}, {meshes(plan)} of {cluster}, {plan.schedule}"
    return f"{what}: {plan.method} on {meshes(plan)} of {cluster}"


def time_parts(plan: Plan) -> str:
    """The predicted step time as a sum of its parts; of a pipeline those of its busiest submesh."""
    p = plan.prediction
    hidden = "" if is_pipeline(plan) and not p.hidden_s else f" - {format_seconds(p.hidden_s)} hidden behind compute"
    transfers_s = idle_parts(plan)[0]
    sent = f" + {format_seconds(transfers_s)} transfers" if transfers_s else ""
    bubble = f"{sent} + {format_seconds(idle_parts(plan)[1])} bubble" if is_pipeline(plan) or p.bubble_s else ""
    whose = "stage" if plan.num_submeshes == len(plan.stages) else "submesh"
    return (
        f"{format_seconds(p.step_time_s)} = {format_seconds(p.compute_s)} compute"
        f" + {format_seconds(p.communication_s)} communication + {format_seconds(p.gradient_s)} gradient communication"
        f"{hidden}{bubble}{f' (of the busiest {whose})' if is_pipeline(plan) else ''}"
    )


def idle_parts(plan: Plan) -> tuple[float, float]:
    """`bubble_s` in two: what the busiest submesh sends and receives while it does not compute, and
    what it waits.
    """
    p = plan.prediction
    shares = [stage.prediction.bubble for stage in plan.stages if stage.prediction]
    waits_s = min(shares, default=1.0) * p.step_time_s
    transfers_s = p.bubble_s - waits_s
    # Where nothing is sent the two differ by rounding alone.
    return (transfers_s, waits_s) if transfers_s > _ROUNDING * p.step_time_s else (0.0, p.bubble_s)


def bound(plan: Plan) -> str:
    """Lower bound of the step time, the plans among which it holds, and the gap to it."""
    p = plan.provenance
    if p.lower_bound_s is None:
        return f"no lower bound; {p.status} within {p.bound_holds_for or 'its method'}"
    of_closed_forms = p.bound_holds_for.startswith(_CLOSED_FORM)
    scope = _SCOPES.get(p.bound_holds_for, p.bound_holds_for.removeprefix(_CLOSED_FORM))
    among = f" among {scope}" if scope else ""
    whose = "'s closed form" if of_closed_forms else ""
    lowest = format_seconds(p.lower_bound_s)
    if p.status == "optimal" and (p.gap or 0.0) <= _ROUNDING:
        text = f"{'closed form ' if of_closed_forms else ''}proven optimal{among}; lower bound {lowest}"
    else:
        text = f"lower bound {lowest}{among}"
        if p.gap is not None:
            text += f"; this plan{whose} is at most {p.gap:.2%} above it"
        text += "" if p.status == _WITHIN_GAP else f"; {p.status}"
    if of_closed_forms and p.lower_bound_s:
        above = plan.prediction.step_time_s / p.lower_bound_s - 1
        text += f"; the simulated step time is {abs(above):.1%} {'above' if above >= 0 else 'below'} it"
    return text


def micro_batches(plan: Plan) -> str:
    """Number of micro-batches, and how their outputs combine."""
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
    """Instruction to rebuild the step that the plan is for."""
    if plan.model.kind == "zoo":
        settings = ", ".join(f"{key}={value!r}" for key, value in plan.model.settings.items())
        return f"aliquot.zoo.build({settings})"
    if plan.model.kind == "factory":
        return f"{plan.model.name}({', '.join(f'{k}={v!r}' for k, v in plan.model.settings.items())})"
    return "the plan was made from a function in a running program; pass that function again"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """Aligned columns without lines; the columns whose positions are in `right` are aligned on
    their right.
    """
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
    first: list[tuple[str, str]] = []
    rest: list[tuple[str, str]] = []
    for row in summary_rows(plan):
        (first if row[0] in ("splits", "recomputation") else rest).append(row)
    rows = [
        *first,
        ("micro-batches", micro_batches(plan)),
        ("step time (predicted)", time_parts(plan)),
        *rest,
        ("bound", bound(plan)),
        (
            "memory (predicted)",
            f"{format_bytes(p.peak_memory_bytes)} on each device{share} of"
            f" {format_bytes(p.memory_limit_bytes)}, at {p.peak_moment}",
        ),
        ("", parts),
        (
            "found in",
            f"{format_seconds(plan.provenance.search_s)}, after tracing for {format_seconds(plan.provenance.trace_s)}",
        ),
    ]
    return [line for name, text in rows for line in _fact(name, text)]


def _fact(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"  {name}".ljust(_MARGIN),
        subsequent_indent=" " * _MARGIN,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _stages(plan: Plan) -> list[str]:
    stages = stage_table(plan)
    return [
        "Stages (predicted)",
        *table(stages.header, stages.rows, right=stages.right),
        *(f"  {line}" for line in stage_remarks(plan)),
    ]


def _arrays_of_stages(plan: Plan) -> list[str]:
    lines: list[str] = []
    kinds = list(equal_stages(plan))
    for numbers, groups in kinds[:_KINDS_OF_STAGES]:
        who = f"Stage{'' if len(numbers) == 1 else 's'} {stage_numbers(numbers)}{'' if len(numbers) == 1 else ', each'}"
        held = sum(group.count for group in groups)
        title = f"{who}: the largest of {held} inputs on each device"
        lines += [*_arrays(plan, without_moments(groups)[:_ARRAYS_OF_STAGES], title), ""]
    if len(kinds) > _KINDS_OF_STAGES:
        others = sorted(number for numbers, _ in kinds[_KINDS_OF_STAGES:] for number in numbers)
        lines += [f"Stages {stage_numbers(others)} hold other arrays: see `aliquot explain --json`.", ""]
    return lines


def _arrays(plan: Plan, groups: Sequence[ArrayGroup], title: str = "") -> list[str]:
    shown = without_moments(groups)
    rows = [
        (
            group.pattern,
            str(group.count),
            f"{group.dtype}[{', '.join(map(str, group.shape))}]",
            format_dims(group.dims),
            format_bytes(group.local_bytes),
        )
        for group in shown[:_ARRAYS]
    ]
    left_out = "; optimizer state that is split like its parameters is left out" if len(shown) < len(groups) else ""
    return [
        f"{title}{left_out}" if title else f"The largest of {len(plan.inputs)} inputs on each device{left_out}",
        *table(("path", "count", "each", "split by axes", "on each device"), rows, right=(1, 4)),
    ]


def _collectives_of_stages(plan: Plan) -> list[str]:
    collectives = stage_collective_table(plan)
    if not collectives.rows:
        return ["No communication is predicted within stages."]
    title = f"The most expensive of {len(collectives.rows)} kinds of communication within a stage in a step (predicted)"
    return [title, *table(collectives.header, collectives.rows[:_COLLECTIVES], right=collectives.right)]


def _collectives(plan: Plan) -> list[str]:
    collectives = collective_table(plan)
    if not collectives.rows:
        return ["No communication is predicted."]
    title = f"The most expensive of {len(collectives.rows)} kinds of communication in a step (predicted)"
    return [title, *table(collectives.header, collectives.rows[:_COLLECTIVES], right=collectives.right)]
