"""Explanation of a plan: its choices, their predicted cost, and the cost of the best
alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from ..core import format_seconds
from ..plans import (
    EXPLAINED,
    ArrayGroup,
    Plan,
    SectionKind,
    fact_rows,
    figures,
    grouped_arrays,
    idle_parts,
    is_pipeline,
    origin_rows,
    plan_devices,
    rebuild,
    sections,
    spoken,
    stage_data,
)
from ._tables import Column, Facts, SectionTable, table
from ._timeline import Timeline

_ROUNDING = 1e-5
# The column with the subject of an alternative.
_SUBJECTS = {SectionKind.ARRAYS: 0, SectionKind.COMMUNICATION: -1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best of all plans that make one decision differently, and its cost.

    Attributes:
        subject: the array, operator or collective that the decision is about; for an array, its
            path.
        chosen: the decision in the plan.
        chosen_step_time_s: predicted step time of the plan, in seconds.
        alternative: the best other decision.
        alternative_step_time_s: predicted step time of the best plan with it, in seconds; None if
            none fits.
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
    stages = []
    for index, stage in enumerate(plan.stages):
        arrays = list(map(asdict, _groups(plan, index)))
        stages.append(stage_data(stage) | {"arrays": arrays})
    return {
        "model": plan.model.name,
        "rebuild": rebuild(plan),
        "method": plan.method,
        "cluster": plan.cluster.get("name"),
        "num_devices": plan_devices(plan),
        "idle_hosts": plan.idle_hosts,
        "stages": stages,
        "num_micro_batches": plan.num_micro_batches,
        "micro_batch_semantics": plan.micro_batch_semantics,
        "combine": dict(plan.combine),
        "schedule": plan.schedule,
        "num_submeshes": plan.num_submeshes,
        "layers": plan.layers,
        "scan_bounds": list(plan.scan_bounds),
        "predicted": {
            **figures(plan),
            "bubble_transfers_s": idle_parts(plan)[0],
            "bubble_waits_s": idle_parts(plan)[1],
            "peak_moment": p.peak_moment,
            "collectives": msgspec.to_builtins(sorted(p.collectives, key=lambda use: -use.seconds)),
        },
        "lower_bound_s": provenance.lower_bound_s,
        "gap": provenance.gap,
        "bound_holds_for": provenance.bound_holds_for,
        "status": provenance.status,
        # Plan files do not hold them.
        "search_s": provenance.search_s or None,
        "trace_s": provenance.trace_s or None,
        "candidates": list(map(dict, provenance.candidates)),
        "alternatives": list(map(asdict, alternatives)),
        "inferred_rules": msgspec.to_builtins(plan.inferred_rules),
        "notes": list(plan.notes),
    }


def explanation(plan: Plan, alternatives: Sequence[Alternative] = (), *, remark: str = "") -> Group:
    """A plan explained, for `rich` to print or `as_text` to turn into text.

    Args:
        plan: the plan to explain.
        alternatives: other decisions with their cost; if the subject is an array or a collective,
            the alternative is shown in its row.
        remark: a last line, such as why there are no alternatives.
    """
    # The row without a name lists the parts of the memory, which have a table of their own here.
    rows = [(name, text) for name, text in fact_rows(plan) if name]
    parts: list[RenderableType] = [
        *(Text(line, style="bold") for line in spoken(plan)),
        "",
        Facts([*rows, *origin_rows(plan)]),
        "",
    ]
    parts += _sections(plan, {alternative.subject: alternative for alternative in alternatives})
    # Alternatives to these need no table of their own: they are in their rows, or like those of a
    # listed array.
    told = set()
    if not is_pipeline(plan):
        told = {use.label for use in plan.prediction.collectives}
        for index in range(len(plan.stages)):
            told |= {group.pattern for group in _groups(plan, index)}
    rest = [other for other in alternatives if other.subject not in told and _extra_s(other)]
    if rest:
        parts.append(
            table(
                "Other decisions",
                rest,
                Column("what", "subject"),
                Column("chosen", "chosen"),
                Column("best alternative (predicted)", _best_other),
            )
        )
    if any(_extra_s(other) < 0 for other in alternatives):
        parts.append(
            Text(
                "Alternatives in another plan take more changes than the one in their row, and are"
                f" no plans of method {plan.method}: --method auto searches among them, too."
                if plan.method != "auto"
                else "The faster alternatives lie within the gap of the search; see bound."
            )
        )
    if remark:
        parts.append(Text(remark))
    return Group(*parts)


def _sections(plan: Plan, others: Mapping[str, Alternative]) -> Iterator[RenderableType]:
    """The sections, with a further column of alternatives where there are any for the rows."""
    for section in sections(plan, EXPLAINED):
        is_stages = section.kind == SectionKind.STAGES
        subject = _SUBJECTS.get(section.kind)
        if subject is not None:
            cells = [_best_other(others.get(row[subject])) for row in section.rows]
            if any(cells):
                header = (*section.header, "best alternative (predicted)")
                rows = tuple((*row, cell) for row, cell in zip(section.rows, cells, strict=True))
                section = replace(section, header=header, rows=rows)
        yield SectionTable(section, narrow=is_stages)
        if is_stages and all(stage.prediction for stage in plan.stages):
            yield Timeline(plan)


def _groups(plan: Plan, index: int) -> list[ArrayGroup]:
    stage = plan.stages[index]
    return grouped_arrays(plan.inputs, stage, stage.shardings)


def _best_other(other: Alternative | None) -> str:
    extra_s = _extra_s(other) if other else 0.0
    if not other or not extra_s:
        return ""
    if other.alternative_step_time_s is None:
        return f"{other.alternative}: does not fit"
    if extra_s < 0:
        return (
            f"{other.alternative}: {format_seconds(other.alternative_step_time_s)} a step in"
            " another plan"
        )
    return f"{other.alternative}: {format_seconds(extra_s)} slower a step"


def _extra_s(other: Alternative) -> float:
    """Seconds by which an alternative is slower: infinite if it does not fit, and 0 if it costs the
    same except for rounding, so that it explains nothing.
    """
    if other.alternative_step_time_s is None:
        return math.inf
    extra_s = other.alternative_step_time_s - other.chosen_step_time_s
    return 0.0 if abs(extra_s) <= _ROUNDING * other.chosen_step_time_s else extra_s
