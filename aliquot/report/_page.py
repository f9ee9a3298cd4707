"""A plan as one self-contained HTML page: facts, the mesh, the schedule, memory, communication and alternatives.
Needs no network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from ..core import format_bytes, format_seconds
from ..plans import (
    CollectiveUse,
    Plan,
    bound,
    device_range,
    headline,
    is_pipeline,
    micro_batches,
    stage_numbers,
    stage_table,
    summary_rows,
    time_parts,
)
from ._drawings import areas, bars, cells, rows_over_time
from ._page_series import memory_series, schedule_rows

_MOST = 12
_MOST_CELLS = 64
_STYLE = """:root{color-scheme:light}body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:60rem;
padding:0 1rem;color:#1c2733;background:#fff}h1{font-size:1.35rem}h2{font-size:1.05rem;margin-top:2rem}
table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top;
overflow-wrap:break-word}th{font-weight:600}.bars td:first-child{overflow-wrap:anywhere}
.bars td:last-child{white-space:nowrap}svg{max-width:100%;height:auto}
svg text{font-size:12px;fill:#1c2733}.device{fill:#dbe7f3;stroke:#3b6ea5}.grid{stroke:#e3e7eb}
.mark{stroke:#8a949e;stroke-dasharray:2 3}.limit{stroke:#b03030;stroke-width:2}.legend span{margin-right:1.2rem}
.legend svg{vertical-align:-1px}"""


def page(plan: Plan) -> str:
    """The HTML text of a plan's page; styles and pictures are inline."""
    title = escape(headline(plan))
    sections = "".join(f"<h2>{escape(name)}</h2>{body}" for name, body in _sections(plan) if body)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>{sections}</body></html>\n"
    )


def _sections(plan: Plan) -> Iterator[tuple[str, str]]:
    facts = [*summary_rows(plan), ("micro-batches", micro_batches(plan)), ("step time", time_parts(plan))]
    yield "What to do and what it gives (predicted)", _table((), [*facts, ("bound", bound(plan))])
    yield "Mesh" if len(plan.stages) == 1 else "Mesh of each stage", _meshes(plan)
    if is_pipeline(plan):
        stages = stage_table(plan)
        yield "Stages (predicted)", _table(stages.header, stages.rows)
        yield "Schedule (predicted)", _schedule(plan)
    yield from _memory(plan)
    yield "Communication of a step (predicted)", _communication(plan)
    yield "Tried in the search (predicted)", _tried(plan)
    yield "Notes", _table((), [(note,) for note in plan.notes]) if plan.notes else ""


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    p = plan.prediction
    limit = format_bytes(p.memory_limit_bytes)
    parts = sorted(p.memory_bytes.items(), key=lambda item: -item[1])
    yield (
        f"Memory on each device at the worst moment: {format_bytes(p.peak_memory_bytes)} of {limit}",
        bars([(name, value, format_bytes(value)) for name, value in parts], [name for name, _ in parts]),
    )
    series = memory_series(plan)
    if series is None:
        return
    drawn = areas(
        series.places,
        series.parts,
        limit=p.memory_limit_bytes,
        limit_text=f"limit {limit}",
        format_value=format_bytes,
        marks=series.marks,
        label="memory over the course of a step, by part",
        steps=series.steps,
    )
    across = "time" if series.steps else "operators of the step in the order in which they run"
    yield f"Memory over the course of a step{series.who} (predicted)", f"{drawn}<p>From left to right: {across}.</p>"


def _communication(plan: Plan) -> str:
    """The most expensive collectives; those of a pipeline with the stages that run them."""
    rows: dict[tuple[str, str], tuple[float, list[int]]] = {}
    for index, stage in enumerate(plan.stages):
        uses: Iterable[CollectiveUse] = (
            stage.prediction.collectives if stage.prediction else plan.prediction.collectives
        )
        for use in uses:
            key = f"{use.kind} over {', '.join(use.axes)}", use.label
            seconds, stages = rows.get(key, (0.0, []))
            rows[key] = max(seconds, use.seconds), [*stages, index] if index not in stages else stages
    shown = sorted(rows.items(), key=lambda item: -item[1][0])[:_MOST]
    several = len(plan.stages) > 1
    text = bars(
        [
            (
                f"{what} {label}{f' ({_stages(stages)})' if several else ''}",
                seconds,
                format_seconds(seconds),
            )
            for (what, label), (seconds, stages) in shown
        ]
    )
    each = "<p>Seconds are those of the stage in which each takes longest.</p>" if several and text else ""
    left = f"<p>And {len(rows) - _MOST} more that take less.</p>" if len(rows) > _MOST else ""
    return text + each + left


def _stages(numbers: Sequence[int]) -> str:
    return f"stage{'s' if len(numbers) > 1 else ''} {stage_numbers(numbers)}"


def _tried(plan: Plan) -> str:
    tried = [c for c in plan.provenance.candidates if isinstance(c.get("step_time_s"), int | float)]
    tried = sorted(tried, key=lambda c: float(c["step_time_s"]))[:_MOST]
    return bars(
        [
            (f"{c.get('name', '')} {_mesh_text(c)}".rstrip(), float(c["step_time_s"]), format_seconds(c["step_time_s"]))
            for c in tried
        ]
    )


def _mesh_text(candidate: dict[str, object]) -> str:
    mesh = candidate.get("mesh") or ""
    return "x".join(map(str, mesh)) if isinstance(mesh, list | tuple) else str(mesh)


def _schedule(plan: Plan) -> str:
    drawn = schedule_rows(plan)
    if not any(drawn.rows):
        return ""
    marks = [(0.0, "0 s"), (drawn.shown_s, format_seconds(drawn.shown_s))]
    text = rows_over_time(drawn.names, drawn.rows, marks=marks, label="tasks of each submesh over time")
    if drawn.num_left_out:
        text += f"<p>And {drawn.num_left_out} more submeshes.</p>"
    if drawn.shown_s < drawn.step_time_s:
        text += (
            f"<p>The beginning of a step of {format_seconds(drawn.step_time_s)}; the whole of it is in the trace that "
            "<code>aliquot explain PLAN --trace FILE</code> writes.</p>"
        )
    return text


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in header)}</tr>" if header else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{head}{body}</table>"


def _meshes(plan: Plan) -> str:
    """Devices as cells, the last axis along rows, all others down; stages with equal meshes share a line of text."""
    kinds: dict[tuple[tuple[int, ...], tuple[str, ...]], list[int]] = {}
    for index, stage in enumerate(plan.stages):
        kinds.setdefault((stage.mesh_shape, stage.axis_names), []).append(index)
    drawn = []
    for (shape, names), indices in kinds.items():
        axes = " x ".join(f"{name} ({size})" for name, size in zip(names, shape, strict=False))
        places = [device_range(plan.stages[index]) for index in indices]
        first, last = min(start for start, _ in places), max(stop for _, stop in places) - 1
        who = "" if len(plan.stages) == 1 else f"{_stages(indices)}, {'each ' * (len(indices) > 1)}on a mesh of "
        drawn.append(f"<p>{escape(who + axes)}: devices {first} to {last}</p>")
        total = math.prod(shape)
        if len(places) * total > _MOST_CELLS or shape[-1] > _MOST_CELLS // 2:
            continue
        for start, stop in dict.fromkeys(places):
            drawn.append(f"<p>{cells(range(start, stop), shape[-1], f'devices {start} to {stop - 1}')}</p>")
    return "".join(drawn)
