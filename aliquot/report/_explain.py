"""Explanation of a plan: its choices, their predicted cost, and the cost of the best alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core import format_bytes, format_seconds
from ..plans import (
    MOMENTS_LEFT_OUT,
    ArrayGroup,
    Plan,
    bound,
    collective_table,
    device_range,
    format_dims,
    grouped_arrays,
    headline,
    idle_parts,
    is_pipeline,
    micro_batches,
    plan_devices,
    rebuild,
    stage_collective_table,
    summary_rows,
    time_parts,
    without_moments,
)
from ._stages import arrays_of_stages, stages
from ._tables import columns, facts
from ._timeline import Timeline

_ARRAYS = 12
_COLLECTIVES = 10
_CANDIDATES = 20
_ROUNDING = 1e-5
_WHAT_TO_DO = ("splits", "recomputation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best plan among those that decide one thing differently, and its cost.

    Attributes:
        subject: the array, operator or collective that is decided; an array's path where it is one.
        chosen: the decision in the plan.
        chosen_step_time_s: predicted step time of the plan, in seconds.
        alternative: the best other decision.
        alternative_step_time_s: predicted step time with it, in seconds; None if nothing fits then.
    """

    subject: str
    chosen: str
    chosen_step_time_s: float
    alternative: str
    alternative_step_time_s: float | None


def explained(plan: Plan, alternatives: Sequence[Alternative] = ()) -> dict[str, Any]:
    """Everything that `explanation` shows, as plain values ready for JSON. Times in seconds, sizes
    in bytes.
    """
    p, provenance = plan.prediction, plan.provenance
    return {
        "model": plan.model.name,
        "rebuild": rebuild(plan),
        "method": plan.method,
        "cluster": plan.cluster.get("name"),
        "num_devices": plan_devices(plan),
        "stages": [
            {
                "mesh": list(stage.mesh_shape),
                "axis_names": list(stage.axis_names),
                "data_axes": list(stage.data_axes),
                "devices": list(range(*device_range(stage))),
                "layers": list(stage.layer_names),
                "recompute": stage.recompute,
                "predicted": msgspec.to_builtins(stage.prediction),
                "arrays": [asdict(group) for group in _groups(plan, index)],
            }
            for index, stage in enumerate(plan.stages)
        ],
        "num_micro_batches": plan.num_micro_batches,
        "micro_batch_semantics": plan.micro_batch_semantics,
        "combine": dict(plan.combine),
        "schedule": plan.schedule,
        "num_submeshes": plan.num_submeshes,
        "layers": plan.layers,
        "scan_bounds": list(plan.scan_bounds),
        "predicted": {
            "step_time_s": p.step_time_s,
            "compute_s": p.compute_s,
            "communication_s": p.communication_s,
            "gradient_s": p.gradient_s,
            "hidden_s": p.hidden_s,
            "bubble_s": p.bubble_s,
            "bubble_transfers_s": idle_parts(plan)[0],
            "bubble_waits_s": idle_parts(plan)[1],
            "peak_memory_bytes": p.peak_memory_bytes,
            "memory_limit_bytes": p.memory_limit_bytes,
            "memory_bytes": dict(p.memory_bytes),
            "peak_moment": p.peak_moment,
            "collectives": [
                {
                    "kind": use.kind,
                    "axes": list(use.axes),
                    "count": use.count,
                    "num_bytes": use.num_bytes,
                    "time_s": use.seconds,
                    "label": use.label,
                }
                for use in sorted(p.collectives, key=lambda use: -use.seconds)
            ],
        },
        "lower_bound_s": provenance.lower_bound_s,
        "gap": provenance.gap,
        "bound_holds_for": provenance.bound_holds_for,
        "status": provenance.status,
        "search_s": provenance.search_s,
        "trace_s": provenance.trace_s,
        "candidates": [dict(candidate) for candidate in provenance.candidates],
        "alternatives": [asdict(alternative) for alternative in alternatives],
        "inferred_rules": msgspec.to_builtins(plan.inferred_rules),
        "notes": list(plan.notes),
    }


def explanation(plan: Plan, alternatives: Sequence[Alternative] = (), *, remark: str = "") -> Group:
    """A plan explained, for `rich` to print or `as_text` to turn into text.

    Args:
        plan: What to explain.
        alternatives: What else was possible; where a subject is an array or a collective, it stands
            beside it.
        remark: A last line, such as why there are no alternatives.
    """
    by_subject = {alternative.subject: alternative for alternative in alternatives}
    parts: list[RenderableType] = [Text(headline(plan), style="bold"), _facts(plan), ""]
    shown: set[str] = set()
    if is_pipeline(plan):
        parts.append(stages(plan))
        if all(stage.prediction for stage in plan.stages):
            parts.append(Timeline(plan))
        parts += [_memory(plan), *arrays_of_stages(plan)]
        if any(stage.prediction and stage.prediction.collectives for stage in plan.stages):
            parts.append(_collectives_of_stages(plan))
    else:
        parts.append(_memory(plan))
        for index in range(len(plan.stages)):
            groups = _groups(plan, index)
            listed = without_moments(groups)[:_ARRAYS]
            # What is split like its parameter is not said again below.
            shown |= {group.pattern for group in groups}
            parts.append(_arrays(listed, by_subject, len(without_moments(groups)) < len(groups)))
        if plan.prediction.collectives:
            shown |= {use.label for use in plan.prediction.collectives}
            parts.append(_collectives(plan, by_subject))
    rest = [other for other in alternatives if other.subject not in shown and not _is_as_fast(other)]
    if rest:
        parts.append(_alternatives(rest))
    if plan.provenance.candidates:
        parts.append(_candidates(plan))
    if plan.inferred_rules:
        parts.append(_inferred(plan))
    if plan.notes:
        parts += [Text("Notes", style="bold"), *(Text(f"  {note}") for note in plan.notes), ""]
    if remark:
        parts.append(Text(remark))
    return Group(*parts)


def _facts(plan: Plan) -> Table:
    provenance = plan.provenance
    return facts(
        [
            *(row for row in summary_rows(plan) if row[0] in _WHAT_TO_DO),
            ("micro-batches", micro_batches(plan)),
            ("step time (predicted)", time_parts(plan)),
            *(row for row in summary_rows(plan) if row[0] not in _WHAT_TO_DO),
            ("bound", bound(plan)),
            (
                "found by",
                f"{provenance.planner} of aliquot {provenance.version}, in {format_seconds(provenance.search_s)}",
            ),
            ("to rebuild the step", rebuild(plan)),
        ]
    )


def _memory(plan: Plan) -> Group:
    p = plan.prediction
    limit = p.memory_limit_bytes
    rows = [
        (name, format_bytes(value), _share(value, limit))
        for name, value in sorted(p.memory_bytes.items(), key=lambda item: -item[1])
    ]
    rows.append(("together", format_bytes(p.peak_memory_bytes), _share(p.peak_memory_bytes, limit)))
    rows.append(("limit", format_bytes(limit), ""))
    title = f"Memory on each device at the worst moment: {p.peak_moment} (predicted)"
    return columns(title, ("part", "bytes", "of the limit"), rows, right=(1, 2))


def _share(value: float, limit: float) -> str:
    return f"{value / limit:.1%}" if limit else ""


def _groups(plan: Plan, index: int) -> list[ArrayGroup]:
    stage = plan.stages[index]
    return grouped_arrays(plan.inputs, stage, stage.shardings)


def _arrays(groups: Sequence[ArrayGroup], others: Mapping[str, Alternative], leaves_out: bool) -> Group:
    rows = [
        (
            group.pattern,
            str(group.count),
            f"{group.dtype}[{', '.join(map(str, group.shape))}]",
            format_dims(group.dims),
            format_bytes(group.local_bytes),
            _best_other(others.get(group.pattern)),
        )
        for group in groups
    ]
    header = ["path", "count", "each", "split by axes", "on each device"]
    title = f"Largest inputs, by what each device holds{MOMENTS_LEFT_OUT if leaves_out else ''}"
    return columns(title, *_with_others(header, rows), right=(1, 4))


def _collectives(plan: Plan, others: Mapping[str, Alternative]) -> Group:
    table = collective_table(plan)
    rows = [(*row, _best_other(others.get(row[-1]))) for row in table.rows[:_COLLECTIVES]]
    title = _of_kinds("Most expensive communication of a step (predicted)", table.rows)
    return columns(title, *_with_others(table.header, rows), right=table.right)


def _collectives_of_stages(plan: Plan) -> Group:
    table = stage_collective_table(plan)
    title = _of_kinds("Most expensive communication within a stage in a step (predicted)", table.rows)
    return columns(title, table.header, table.rows[:_COLLECTIVES], right=table.right)


def _of_kinds(title: str, rows: Sequence[Sequence[str]]) -> str:
    return f"{title}, {_COLLECTIVES} of {len(rows)} kinds" if len(rows) > _COLLECTIVES else title


def _with_others(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows, whose last cells are the alternatives: without that column where it would be
    empty.
    """
    if any(row[-1] for row in rows):
        return [*header, "best alternative (predicted)"], rows
    return header, [row[:-1] for row in rows]


def _best_other(other: Alternative | None) -> str:
    if other is None or _is_as_fast(other):
        return ""
    if other.alternative_step_time_s is None:
        return f"{other.alternative}: does not fit"
    extra_s = other.alternative_step_time_s - other.chosen_step_time_s
    sign = "+" if extra_s >= 0 else "-"
    return f"{other.alternative}: {sign}{format_seconds(abs(extra_s))} a step"


def _is_as_fast(other: Alternative) -> bool:
    """Whether an alternative costs the same but for rounding: no reason for or against anything."""
    seconds = other.alternative_step_time_s
    return seconds is not None and abs(seconds - other.chosen_step_time_s) <= _ROUNDING * other.chosen_step_time_s


def _alternatives(others: Sequence[Alternative]) -> Group:
    rows = [(other.subject, other.chosen, _best_other(other)) for other in others]
    return columns("Other decisions", ("what", "chosen", "best alternative (predicted)"), rows)


def _candidates(plan: Plan) -> Group:
    candidates = plan.provenance.candidates
    rows = [
        (
            str(candidate.get("name", "")),
            _mesh(candidate.get("mesh")),
            _seconds(candidate.get("step_time_s")),
            _seconds(candidate.get("lower_bound_s")),
            str(candidate.get("outcome", "")),
        )
        for candidate in candidates[:_CANDIDATES]
    ]
    title = "Tried in the search (predicted)"
    if len(candidates) > _CANDIDATES:
        title += f", {_CANDIDATES} of {len(candidates)}"
    return columns(title, ("method", "mesh", "step time", "lower bound", "outcome"), rows, right=(2, 3))


def _inferred(plan: Plan) -> Group:
    rows = [(each.primitive, str(each.count), each.rule, _splits(each.rule)) for each in plan.inferred_rules]
    header = ("primitive", "operators", "rule", "what may be split")
    return columns("Inferred, as no rule is declared", header, rows, right=(1,))


def _splits(rule: str) -> str:
    """In words what a rule's short form says of the first result."""
    first = rule.partition("->")[2].partition(",")[0]
    split = [str(d) for d, letter in enumerate(first) if letter != "."]
    if not split:
        return "nothing: it runs whole on every device"
    return f"dim{'' if len(split) == 1 else 's'} {', '.join(split)} of its result"


def _mesh(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value or "")


def _seconds(value: Any) -> str:
    return format_seconds(value) if isinstance(value, int | float) else ""
