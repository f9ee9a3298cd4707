"""A comparison as one self-contained HTML page for a decision: what to take and how sure that is,
then time, memory and money of every candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ..core import format_bytes, format_count, format_seconds, format_share_of_limit
from ..plans import examples_per_step, memory_parts, tokens_per_step
from ._comparison import (
    Candidate,
    Comparison,
    format_cost,
    layout,
    mfu_of,
    name_of,
    notes_of,
    parts_of,
    recommendation,
)
from ._drawings import bars_in_parts, round_ticks
from ._page import card, table, whole_page

_MOST_NAME = 44


def compare_page(comparison: Comparison) -> str:
    """The HTML text of the page, with styles and pictures inline."""
    clusters = list(dict.fromkeys(c.cluster for c in comparison.candidates))
    where = f" on {clusters[0]}" if len(clusters) == 1 else ""
    what = "methods" if where else "clusters"
    return whole_page(
        f"{comparison.model}{where}: {what} compared", _card(comparison), _sections(comparison)
    )


def _card(comparison: Comparison) -> str:
    best = comparison.candidates[0] if comparison.candidates else None
    if best is None or best.plan is None:
        return card([("recommendation", "no candidate fits")])
    p = best.plan.prediction
    cost = comparison.cost(best)
    return card(
        [
            ("fastest", name_of(best, comparison)),
            (f"{_timed(comparison)} (predicted)", format_seconds(comparison.seconds(best))),
            ("throughput", _throughput(best, comparison)),
            ("memory on each device", f"{format_bytes(p.peak_memory_bytes)}{_share(best)}"),
            (comparison.cost_unit, format_cost(cost)),
        ]
    )


def _sections(comparison: Comparison) -> Iterator[tuple[str, str]]:
    yield "Recommendation", "".join(f"<p>{escape(text)}</p>" for text in recommendation(comparison))
    planned = [c for c in comparison.candidates if c.plan]
    rows = [_row(c, comparison) for c in comparison.candidates]
    header = ["candidate", "mesh", _timed(comparison), "MFU", "throughput", "memory"]
    if comparison.prices:
        header.insert(5, comparison.cost_unit)
    numbers = range(2, len(header))
    yield "Candidates, fastest first (predicted)", table(header, rows, tuple(numbers))
    times = [(name_of(c, comparison), parts_of(c.plan)) for c in planned if c.plan]
    if times:
        longest_s = max(sum(parts.values()) for _, parts in times)
        yield (
            "Time of a step (predicted)",
            bars_in_parts(
                [
                    (_with(name, format_seconds(sum(parts.values()))), parts)
                    for name, parts in times
                ],
                marks=[(s, format_seconds(s)) for s in round_ticks(longest_s)],
                label="time of a step of each candidate, by part",
            ),
        )
        yield "Memory on each device (predicted)", _memory(planned, comparison)
    why = [(name_of(c, comparison), comparison.why_not(c)) for c in comparison.candidates]
    yield "Why not the others", table((), [row for row in why if row[1]], kind="facts")
    yield "Notes", "".join(f"<p>{escape(note)}</p>" for note in notes_of(comparison))


def _memory(planned: list[Candidate], comparison: Comparison) -> str:
    bars = [
        (
            _with(
                name_of(c, comparison),
                f"{format_bytes(c.plan.prediction.peak_memory_bytes)}{_share(c)}",
            ),
            dict(memory_parts(c.plan)),
        )
        for c in planned
        if c.plan
    ]
    most = max(sum(parts.values()) for _, parts in bars)
    return bars_in_parts(
        bars,
        marks=[(tick, format_bytes(tick)) for tick in round_ticks(most, binary=True)],
        label="memory on each device of each candidate, by part",
    )


def _row(candidate: Candidate, comparison: Comparison) -> list[str]:
    plan, name = candidate.plan, name_of(candidate, comparison)
    cost = [format_cost(comparison.cost(candidate))] if comparison.prices else []
    if plan is None:
        need = format_bytes(candidate.required_bytes) if candidate.required_bytes else ""
        empty = [""] * len(cost)
        return [name, "", "does not fit" if need else "no plan", "", "", *empty, need]
    used, p = mfu_of(plan, comparison.objective), plan.prediction
    return [
        name,
        layout(plan),
        format_seconds(comparison.seconds(candidate)),
        "" if used is None else f"{used:.1%}",
        _throughput(candidate, comparison),
        *cost,
        f"{format_bytes(p.peak_memory_bytes)}{_share(candidate)}",
    ]


def _timed(comparison: Comparison) -> str:
    return "time between calls" if comparison.objective == "throughput" else "step time"


def _throughput(candidate: Candidate, comparison: Comparison) -> str:
    plan, step_s = candidate.plan, comparison.seconds(candidate)
    if plan is None or not step_s:
        return ""
    tokens = tokens_per_step(plan)
    what = "tokens/s" if tokens else "examples/s"
    return f"{format_count(float(round((tokens or examples_per_step(plan)) / step_s)))} {what}"


def _share(candidate: Candidate) -> str:
    p = candidate.plan.prediction if candidate.plan else None
    if not p or not p.memory_limit_bytes:
        return ""
    return f" ({format_share_of_limit(p.peak_memory_bytes, p.memory_limit_bytes)})"


def _with(name: str, figure: str) -> str:
    short = name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 1]}…"
    return f"{short}: {figure}"
