"""Text of `print(plan)`: a page that a person reads."""

from __future__ import annotations

import itertools
import shutil
import textwrap
from collections.abc import Iterable, Sequence

from ..core import broken, fitting_widths, format_bytes, format_seconds
from ._arrays import MOMENTS_LEFT_OUT, ArrayGroup, format_dims, grouped_arrays, without_moments
from ._collective_text import collective_table, stage_collective_table
from ._plan import Plan
from ._stage_text import StageTable, equal_stages, meshes, stage_numbers, stage_remarks, stage_table
from ._summary import summary_rows, tried

_ARRAYS = 8
_ARRAYS_OF_STAGES = 4
_KINDS_OF_STAGES = 4
_COLLECTIVES = 5
_NOTES = 6
_WIDTH = 120
_LEAST_WIDTH = 60
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


def describe(plan: Plan, width: int | None = None) -> str:
    """A plan as text: what it is, its predicted time and memory with their parts, the largest
    arrays, what to know.

    Args:
        width: of a line; by default that of the terminal, where paths are broken at dots. In a pipe
            tables take what they need.
    """
    known = width or shutil.get_terminal_size((0, 0)).columns
    fits = max(known, _LEAST_WIDTH) if known else None
    lines = [*broken(headline(plan), fits or _WIDTH), *_facts(plan, min(fits or _WIDTH, _WIDTH)), ""]
    if rows := tried(plan):
        lines += [
            "Tried in the search (predicted)",
            *table(("method", "mesh", "step time", "outcome"), rows, right=(2,), width=fits),
            "",
        ]
    if is_pipeline(plan):
        lines += [*_stages(plan, fits), "", *_arrays_of_stages(plan, fits), *_collectives_of_stages(plan, fits)]
    else:
        for stage in plan.stages:
            lines += [*_arrays(plan, grouped_arrays(plan.inputs, stage, stage.shardings), fits), ""]
        lines += _collectives(plan, fits)
    if plan.notes:
        lines += ["", "Notes"]
        lines += [f"  {text}" for note in plan.notes[:_NOTES] for text in broken(note, (fits or len(note) + 2) - 2)]
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


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = (), width: int | None = None
) -> list[str]:
    """Aligned columns without lines; the columns whose positions are in `right` are aligned on
    their right. Where a row is wider than `width`, texts are broken at spaces and before dots.
    """
    flush = set(right)
    cells = [list(header), *(list(row) for row in rows)]
    flexible = [] if width is None else [k for k in range(len(header)) if k not in flush]
    widths = fitting_widths(cells, flexible, (width or 0) - 2 * len(header))
    lines = []
    for row in cells:
        parts = [broken(cell, w) for cell, w in zip(row, widths, strict=True)]
        for texts in itertools.zip_longest(*parts, fillvalue=""):
            padded = [t.rjust(w) if k in flush else t.ljust(w) for k, (t, w) in enumerate(zip(texts, widths))]
            lines.append("  " + "  ".join(padded).rstrip())
    return lines


def _facts(plan: Plan, width: int) -> list[str]:
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
    return [line for name, text in rows for line in _fact(name, text, width)]


def _fact(name: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"  {name}".ljust(_MARGIN),
        subsequent_indent=" " * _MARGIN,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _stages(plan: Plan, width: int | None) -> list[str]:
    stages = stage_table(plan)
    lines = table(stages.header, stages.rows, right=stages.right)
    if width is not None and max(map(len, lines)) > width:
        lines = [line for part in (stages.where, stages.what) for line in _part(stages, part, width)]
    remarks = [text for remark in stage_remarks(plan) for text in broken(remark, (width or _WIDTH) - 2)]
    return ["Stages (predicted)", *lines, *(f"  {line}" for line in remarks)]


def _part(stages: StageTable, positions: Sequence[int], width: int) -> list[str]:
    rows = [[row[k] for k in positions] for row in stages.rows]
    right = [place for place, k in enumerate(positions) if k in stages.right]
    return table([stages.header[k] for k in positions], rows, right=right, width=width)


def _arrays_of_stages(plan: Plan, width: int | None) -> list[str]:
    lines: list[str] = []
    kinds = list(equal_stages(plan))
    for numbers, groups in kinds[:_KINDS_OF_STAGES]:
        who = f"Stage{'' if len(numbers) == 1 else 's'} {stage_numbers(numbers)}{'' if len(numbers) == 1 else ', each'}"
        held = sum(group.count for group in groups)
        title = f"{who}: the largest of {held} inputs on each device"
        lines += [*_arrays(plan, without_moments(groups)[:_ARRAYS_OF_STAGES], width, title), ""]
    if len(kinds) > _KINDS_OF_STAGES:
        others = sorted(number for numbers, _ in kinds[_KINDS_OF_STAGES:] for number in numbers)
        lines += [f"Stages {stage_numbers(others)} hold other arrays: see `aliquot explain --json`.", ""]
    return lines


def _arrays(plan: Plan, groups: Sequence[ArrayGroup], width: int | None, title: str = "") -> list[str]:
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
    left_out = MOMENTS_LEFT_OUT if len(shown) < len(groups) else ""
    return [
        *broken(f"{title or f'The largest of {len(plan.inputs)} inputs on each device'}{left_out}", width or _WIDTH),
        *table(("path", "count", "each", "split by axes", "on each device"), rows, right=(1, 4), width=width),
    ]


def _collectives_of_stages(plan: Plan, width: int | None) -> list[str]:
    collectives = stage_collective_table(plan)
    if not collectives.rows:
        return ["No communication is predicted within stages."]
    title = f"The most expensive of {len(collectives.rows)} kinds of communication within a stage in a step (predicted)"
    return [
        *broken(title, width or _WIDTH),
        *table(collectives.header, collectives.rows[:_COLLECTIVES], right=collectives.right, width=width),
    ]


def _collectives(plan: Plan, width: int | None) -> list[str]:
    collectives = collective_table(plan)
    if not collectives.rows:
        return ["No communication is predicted."]
    title = f"The most expensive of {len(collectives.rows)} kinds of communication in a step (predicted)"
    return [
        *broken(title, width or _WIDTH),
        *table(collectives.header, collectives.rows[:_COLLECTIVES], right=collectives.right, width=width),
    ]
