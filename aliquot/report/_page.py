"""A plan as one self-contained HTML page: facts, the mesh, memory, communication and alternatives.
Needs no network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ..core import format_bytes, format_seconds
from ..plans import Plan, bound, headline, is_pipeline, micro_batches, stage_table, summary_rows, time_parts

_MOST = 12
_MOST_CELLS = 64
_BAR_WIDTH = 420
_CELL = 34
_STYLE = """body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1c2733}
h1{font-size:1.35rem}h2{font-size:1.05rem;margin-top:2rem}table{border-collapse:collapse}
td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top;overflow-wrap:anywhere}th{font-weight:600}
.b{fill:#3b6ea5}.l{stroke:#b03030;stroke-width:2}svg text{font-size:12px}"""


def page(plan: Plan) -> str:
    """The HTML text of a plan's page; styles and pictures are inline."""
    p = plan.prediction
    facts = [*summary_rows(plan), ("micro-batches", micro_batches(plan)), ("step time", time_parts(plan))]
    facts.append(("bound", bound(plan)))
    uses = [*p.collectives]
    if not uses:
        uses = [use for stage in plan.stages if stage.prediction for use in stage.prediction.collectives]
    uses = sorted(uses, key=lambda use: -use.seconds)[:_MOST]
    tried = [c for c in plan.provenance.candidates if isinstance(c.get("step_time_s"), int | float)]
    tried = sorted(tried, key=lambda c: float(c["step_time_s"]))[:_MOST]
    parts = sorted(p.memory_bytes.items(), key=lambda item: -item[1])
    limit = p.memory_limit_bytes
    sections = [
        _section("What to do and what it gives (predicted)", _table((), facts)),
        _section("Mesh" if len(plan.stages) == 1 else "Mesh of each stage", _meshes(plan)),
        _section(
            f"Memory on each device at the worst moment: {format_bytes(p.peak_memory_bytes)} of {format_bytes(limit)}",
            _bars([(name, value, format_bytes(value)) for name, value in parts]),
        ),
        _section(
            "Communication of a step (predicted)",
            _bars([(f"{u.kind} {','.join(u.axes)} {u.label}", u.seconds, format_seconds(u.seconds)) for u in uses]),
        ),
        _section(
            "Tried in the search (predicted)",
            _bars(
                [
                    (
                        f"{c.get('name', '')} {c.get('mesh', '')}",
                        float(c["step_time_s"]),
                        format_seconds(c["step_time_s"]),
                    )
                    for c in tried
                ]
            ),
        ),
    ]
    if is_pipeline(plan):
        stages = stage_table(plan)
        sections.insert(2, _section("Stages (predicted)", _table(stages.header, stages.rows)))
    if plan.notes:
        sections.append(_section("Notes", _table((), [(note,) for note in plan.notes])))
    title = escape(headline(plan))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>{''.join(sections)}</body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in header)}</tr>" if header else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{head}{body}</table>"


def _bars(rows: Sequence[tuple[str, float, str]]) -> str:
    most = max((value for _, value, _ in rows), default=0.0)
    if not most:
        return ""
    shown = []
    for name, value, text in rows:
        width = _BAR_WIDTH * value / most
        bar = (
            f'<svg width="{_BAR_WIDTH}" height="14" role="img"><rect class="b" width="{width:.1f}" height="14"/></svg>'
        )
        shown.append(f"<tr><td>{escape(name)}</td><td>{bar}</td><td>{escape(text)}</td></tr>")
    return f"<table>{''.join(shown)}</table>"


def _meshes(plan: Plan) -> str:
    """Devices as cells: the last axis along rows, all others down; large meshes in words alone."""
    pictures = []
    for stage in plan.stages:
        columns, total = stage.mesh_shape[-1], 1
        for size in stage.mesh_shape:
            total *= size
        axes = " x ".join(f"{name} ({size})" for name, size in zip(stage.axis_names, stage.mesh_shape, strict=False))
        words = f"<p>{escape(axes)}: devices {stage.first_device} to {stage.first_device + total - 1}</p>"
        if total > _MOST_CELLS or columns > _MOST_CELLS // 2:
            pictures.append(words)
            continue
        cells = "".join(
            f'<rect x="{k % columns * _CELL + 1}" y="{k // columns * _CELL + 1}" width="{_CELL - 4}" height="{_CELL - 4}"'
            f' rx="4" fill="#dbe7f3" stroke="#3b6ea5"/>'
            f'<text x="{k % columns * _CELL + 8}" y="{k // columns * _CELL + 20}">{stage.first_device + k}</text>'
            for k in range(total)
        )
        extent = f'width="{columns * _CELL}" height="{total // columns * _CELL}"'
        pictures.append(f'{words}<svg {extent} role="img">{cells}</svg>')
    return "".join(pictures)
