"""A plan as one self-contained HTML page, which needs no network: facts, the mesh, plans that the
search tried, the schedule, memory, and communication.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from ..core import format_bytes, format_seconds, format_share_of_limit
from ..plans import (
    EXPLAINED,
    Plan,
    Section,
    SectionKind,
    chrome_trace,
    device_range,
    fact_rows,
    memory_parts,
    mesh_picture,
    sections,
    spoken,
    stage_numbers,
    step_parts,
)
from ._asked import asked_facts, command_block, command_of
from ._drawings import areas, bar, bars_in_parts, round_ticks, rows_over_time, time_marks
from ._page_series import memory_series, schedule_rows
from ._trace import planned_trace

_MOST_PLACES = 8
_LONGEST_TRACE = 500_000
_ENDS_OF_PARTS = re.compile(r"(?<=[A-Za-z_\])])[./](?=[A-Za-z_])")
_STYLE = """:root{color-scheme:light dark;--ink:#1c2733;--quiet:#52606d;--paper:#fff;--card:#f2f6fa;
--line:#e3e7eb;--mark:#8a949e;--limit:#b03030;--bar:#3b6ea5}
@media(prefers-color-scheme:dark){:root{--ink:#e3e8ee;--quiet:#a3b0bd;--paper:#14191f;
--card:#1f2831;--line:#333e49;--mark:#6d7884;--limit:#ff7b72;--bar:#6ca6e0}}
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:60rem;
padding:0 1rem;color:var(--ink);background:var(--paper)}
h1{font-size:1.35rem}h2{font-size:1.05rem;margin-top:2rem}
.card{display:flex;flex-wrap:wrap;gap:.8rem 2rem;margin:0;padding:.9rem 1.1rem;
background:var(--card);border-radius:.5rem}.card dt{font-size:.8rem;color:var(--quiet)}
.card dd{margin:0;font-weight:600}.note{color:var(--quiet)}
table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top}
th{font-weight:600}.facts td:first-child{min-width:6.5rem}
.number{text-align:right}.number,.word{white-space:nowrap}svg{max-width:100%;height:auto}
svg text{font-size:12px;fill:var(--ink)}
.answer{font-size:1.05rem}.command{background:var(--card);padding:.6rem .8rem;overflow-x:auto;
white-space:pre-wrap;border-radius:.5rem}details{margin:.6rem 0}summary{cursor:pointer;
font-weight:600}.error{stroke:var(--bar);stroke-width:3}.unknown{fill:var(--mark)}
.bar{fill:var(--bar)}.grid{stroke:var(--line)}.mark{stroke:var(--mark);stroke-dasharray:2 3}
.limit{stroke:var(--limit);stroke-width:2}
.legend span{display:inline-block;white-space:nowrap;margin-right:1.2rem}
.legend svg{vertical-align:-1px}
@media(max-width:640px){body{margin:1rem auto;font-size:13px}.chart text{font-size:22px}
td,th{padding-right:.5rem}.picture{display:none}}"""
# On narrow screens a row of many cells becomes a list of them, each behind its heading.
_STACKED = """@media(max-width:WIDTHpx){.NAME tr{display:block;border-top:1px solid var(--line);
padding:.3rem 0}.NAME tr:first-child,.NAME td:empty{display:none}.NAME td{display:flex;
text-align:left;padding:.05rem 0;white-space:normal}.NAME td::before{content:attr(data-label);
flex:0 0 7rem;color:var(--quiet)}.NAME .picture{display:none}}"""
_NARROW = {"wide": "640", "widest": "960"}
# Cells of a row of a wide table, and of the widest, at least.
_MANY, _MOST = 4, 9
_LONG_WORD = 20


def page(plan: Plan, *, date: str = "") -> str:
    """The HTML text of a plan's page, with styles and pictures inline.

    Args:
        date: on which it is written, to be shown.
    """
    what, do, figures = spoken(plan)
    said = f'<p class="answer">{escape(do)} {escape(figures)}</p>'
    asked = f"<h2>Asked</h2>{card(asked_facts([plan], date))}{command_block(command_of(plan))}"
    return whole_page(what, said + asked, _sections(plan))


def whole_page(name: str, card: str, sections: Iterable[tuple[str, str]]) -> str:
    """The HTML text of a page from its title, the HTML of its card, and titles and HTML of its
    sections; those without HTML are left out.
    """
    title = escape(name)
    parts = "".join(f"<h2>{escape(about)}</h2>{body}" for about, body in sections if body)
    narrow = ""
    for kind, width in _NARROW.items():
        narrow += _STACKED.replace("NAME", kind).replace("WIDTH", width)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}{narrow}</style></head>"
        f"<body><h1>{title}</h1>{card}{parts}</body></html>\n"
    )


def card(facts: Iterable[tuple[str, str]]) -> str:
    """Facts that most readers look for first, as HTML; those without a text are left out."""
    shown = [f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts if v]
    return f'<dl class="card">{"".join(shown)}</dl>'


def _sections(plan: Plan) -> Iterator[tuple[str, str]]:
    p = plan.prediction
    share = format_share_of_limit(p.peak_memory_bytes, p.memory_limit_bytes)
    memory = [
        (
            f"{format_bytes(p.peak_memory_bytes)} of {format_bytes(p.memory_limit_bytes)}"
            f" ({share})",
            dict(memory_parts(plan)),
        )
    ]
    yield (
        "Memory on each device, to the limit (predicted)",
        memory_bars(memory, p.memory_limit_bytes),
    )
    yield "Time of a step (predicted)", time_bars([(format_seconds(p.step_time_s), plan)])
    kinds: dict[tuple[tuple[int, ...], tuple[str, ...]], list[int]] = {}
    for index, stage in enumerate(plan.stages):
        kinds.setdefault((stage.mesh_shape, stage.axis_names), []).append(index)
    drawn = []
    for indices in kinds.values():
        if len(plan.stages) > 1:
            places = [device_range(plan.stages[index]) for index in indices]
            devices = ", ".join(f"{start} to {stop - 1}" for start, stop in places[:_MOST_PLACES])
            dots = ", ..." if len(places) > _MOST_PLACES else ""
            stages = f"stage{'s' if len(indices) > 1 else ''} {stage_numbers(indices)}"
            said = f"{stages}: devices {devices}{dots}"
            drawn.append(f"<p>{escape(said[:1].upper() + said[1:])}</p>")
        drawn.append(f"<p>{mesh_picture(plan, plan.stages[indices[0]])}</p>")
    yield "Mesh" if len(plan.stages) == 1 else "Mesh of each stage", "".join(drawn)
    folded = (SectionKind.ARRAYS, SectionKind.COMMUNICATION, SectionKind.MEMORY)
    for section in sections(plan, EXPLAINED):
        if section.kind not in folded:
            yield section.title, _section(section)
        if section.kind == SectionKind.STAGES:
            yield "Schedule (predicted)", _schedule(plan)
    facts = [row for row in fact_rows(plan) if row[0]]
    more = [("Why, and how (predicted)", table((), facts, kind="facts"))]
    more += _memory_over_time(plan)
    more += [(s.title, _section(s)) for s in sections(plan, EXPLAINED) if s.kind in folded]
    details = ""
    for title, body in more:
        details += f"<details><summary>{escape(title)}</summary>{body}</details>"
    yield "More", details


def time_bars(rows: Sequence[tuple[str, Plan]]) -> str:
    """Step times by part, on one axis, each with its name."""
    longest_s = max(sum(step_parts(plan).values()) for _, plan in rows)
    return bars_in_parts(
        [(name, step_parts(plan)) for name, plan in rows],
        marks=[(s, format_seconds(s)) for s in round_ticks(longest_s)],
        label="time of a step, by part",
    )


def memory_bars(rows: Sequence[tuple[str, Mapping[str, float]]], limit: float = 0.0) -> str:
    """Memory of a device by part, on one axis up to the limit, each with its name."""
    most = max(limit, max(sum(parts.values()) for _, parts in rows))
    ticks = [tick for tick in round_ticks(most, binary=True) if tick < 0.9 * most]
    return bars_in_parts(
        rows,
        marks=[*((tick, format_bytes(tick)) for tick in ticks), (most, format_bytes(most))],
        label="memory on each device, by part",
        limit=limit,
    )


def _section(section: Section) -> str:
    """A section as a table, with a bar beside each row that has an amount, and the section's
    remarks.
    """
    most = max(section.amounts, default=0.0)
    parts = [row[0] for row in section.rows] if section.kind == SectionKind.MEMORY else []
    pictures = []
    for row, amount in zip(section.rows, section.amounts):
        if most:
            pictures.append(bar(amount / most, row[0], parts))
    rows = table(section.header, section.rows, section.right, pictures) if section.rows else ""
    # The empty paragraph keeps a section without rows and remarks: its title says that there is
    # nothing to list.
    return rows + "".join(f"<p>{escape(remark)}</p>" for remark in section.remarks) or "<p></p>"


def _memory_over_time(plan: Plan) -> Iterator[tuple[str, str]]:
    series = memory_series(plan)
    if series is None:
        return
    limit_bytes = plan.prediction.memory_limit_bytes
    drawn = areas(
        series.places,
        series.parts,
        limit=(limit_bytes, f"limit {format_bytes(limit_bytes)}"),
        format_value=format_bytes,
        marks=series.marks,
        label="memory over the course of a step, by part",
        steps=series.steps,
    )
    across = "time" if series.is_time else "operators of the step in the order in which they run"
    if not plan.is_pipeline and plan.num_micro_batches > 1:
        across += f"; all {plan.num_micro_batches} micro-batches drawn as one"
    yield (
        f"Memory over the course of a step{series.who} (predicted)",
        f"{drawn}<p>From left to right: {across}.</p>",
    )


def _schedule(plan: Plan) -> str:
    drawn = schedule_rows(plan)
    if not any(drawn.rows):
        return ""
    marks = time_marks(drawn.shown_s)
    text = rows_over_time(
        drawn.names, drawn.rows, marks=marks, label="tasks of each submesh over time"
    )
    if drawn.num_left_out:
        text += f"<p>And {drawn.num_left_out} more submeshes.</p>"
    if drawn.shown_s < drawn.step_time_s:
        text += f"<p>The beginning of a step of {format_seconds(drawn.step_time_s)}.</p>"
    # The predicted schedule is a download inside the page, where it is not too long for one.
    trace = json.dumps(chrome_trace(planned_trace(plan)))
    if len(trace) > _LONGEST_TRACE:
        return text + (
            "<p>The whole schedule is in the trace that <code>aliquot explain PLAN --trace"
            " FILE</code> writes.</p>"
        )
    data = base64.b64encode(trace.encode()).decode()
    return text + (
        f'<p><a download="schedule.json" href="data:application/json;base64,{data}">Save the'
        " schedule</a>, and open it at"
        ' <a href="https://ui.perfetto.dev">ui.perfetto.dev</a> to zoom in.</p>'
    )


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    pictures: Sequence[str] = (),
    kind: str = "rows",
) -> str:
    """A table of texts. Paths may be broken behind dots, slashes and brackets; words never are.

    Args:
        kind: class of the table, for its style.
        right: positions of columns with numbers.
        pictures: HTML of one more cell at the end of each of the first rows.
    """

    if len(header) >= _MANY:
        kind = "widest" if len(header) >= _MOST else "wide"

    def cells_of(row: Sequence[str], tag: str) -> str:
        cells = []
        for k, cell in enumerate(row):
            # A word is short and has no place where it may go on in the next line.
            is_word = len(cell) <= _LONG_WORD and not _ENDS_OF_PARTS.search(cell)
            kind = "number" if k in right else "word" if is_word and " " not in cell else ""
            how = f' class="{kind}"' if kind else ""
            if tag == "td" and header:
                how += f' data-label="{escape(header[k])}"'
            text = _ENDS_OF_PARTS.sub("\\g<0><wbr/>", escape(cell))
            cells.append(f"<{tag}{how}>{text}</{tag}>")
        return "".join(cells)

    lines = [cells_of(header, "th")] if header else []
    for row, picture in itertools.zip_longest(rows, pictures, fillvalue=""):
        beside = f'<td class="picture">{picture}</td>' if picture else ""
        lines.append(cells_of(row, "td") + beside)
    return f'<table class="{kind}">{"".join(f"<tr>{line}</tr>" for line in lines)}</table>'
