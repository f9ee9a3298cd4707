"""A comparison as one self-contained HTML page for a decision: what to take and how sure that is,
then time, memory and money of every candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ..cluster import NO_PRICE, usual_error
from ..core import format_bytes, format_count, format_seconds, format_share_of_limit
from ..plans import expected_error, memory_parts, rate, said_error
from ._asked import asked_facts, command_block, comparing_command
from ._comparison import (
    Candidate,
    Comparison,
    format_cost,
    layout,
    mfu_of,
    name_of,
    notes_of,
    recommendation,
)
from ._drawings import scatter
from ._page import card, memory_bars, table, time_bars, whole_page

_MOST_NAME = 44


def compare_page(comparison: Comparison, *, date: str = "") -> str:
    """The HTML text of the page, with styles and pictures inline.

    Args:
        date: on which it is written, to be shown.
    """
    clusters = list(dict.fromkeys(c.cluster for c in comparison.candidates))
    where = f" on {clusters[0]}" if len(clusters) == 1 else ""
    what = "methods" if where else "clusters"
    plans = [c.plan for c in comparison.candidates if c.plan]
    best = comparison.candidates[0] if comparison.candidates else None
    facts = [("recommendation", "no candidate fits")]
    if best and best.plan:
        used = format_bytes(best.plan.prediction.peak_memory_bytes)
        facts = [
            ("fastest", name_of(best, comparison)),
            (f"{_timed(comparison)} (predicted)", format_seconds(comparison.seconds(best))),
            ("throughput", _throughput(best, comparison)),
            ("memory on each device", f"{used}{_share(best)}"),
            (comparison.cost_unit, format_cost(comparison.cost(best))),
        ]
    asked = ""
    if plans:
        methods = list(dict.fromkeys(c.method for c in comparison.candidates))
        given = dict(asked_facts(plans, date)) | {"method": ", ".join(methods)}
        if comparison.prices_from:
            given["prices"] = comparison.prices_from
        command = command_block(comparing_command(plans, methods))
        asked = f"<h2>Asked</h2>{card(given.items())}{command}"
    name = f"{comparison.model}{where}: {what} compared"
    return whole_page(name, card(facts) + asked, _sections(comparison))


def _sections(comparison: Comparison) -> Iterator[tuple[str, str]]:
    yield "Recommendation", "".join(f"<p>{escape(text)}</p>" for text in recommendation(comparison))
    planned = [c for c in comparison.candidates if c.plan]
    numbers = {id(c): str(number) for number, c in enumerate(planned, 1)}
    rows = [[numbers.get(id(c), ""), *_row(c, comparison)] for c in comparison.candidates]
    header = ["number", "candidate", "mesh", _timed(comparison), "MFU", "throughput", "memory"]
    if comparison.prices:
        header.insert(6, comparison.cost_unit)
    yield "Candidates, fastest first (predicted)", table(header, rows, tuple(range(3, len(header))))
    if planned:
        points, listed = [], []
        for c in planned:
            assert c.plan is not None
            error = usual_error(expected_error(c.plan))
            p = c.plan.prediction
            points.append((p.step_time_s, p.peak_memory_bytes, error))
            listed.append(f"<li>{escape(name_of(c, comparison))}: {said_error(c.plan)}</li>")
        drawn = scatter(
            points,
            limit=_limit(planned),
            format_x=format_seconds,
            format_y=format_bytes,
            names=("step time, with its expected error", "memory on each device, and its limit"),
            label="step time against memory of each candidate",
        )
        yield "Step time against memory (predicted)", f"{drawn}<ol>{''.join(listed)}</ol>"
        times, sizes = [], []
        for c in planned:
            assert c.plan is not None
            name, p = name_of(c, comparison), c.plan.prediction
            used = f"{format_bytes(p.peak_memory_bytes)}{_share(c)}"
            times.append((_with(name, format_seconds(p.step_time_s)), c.plan))
            sizes.append((_with(name, used), dict(memory_parts(c.plan))))
        yield "Time of a step (predicted)", time_bars(times)
        yield "Memory on each device, to the limit (predicted)", memory_bars(sizes, _limit(planned))
    reasons = []
    for c in comparison.candidates:
        if why := comparison.why_not(c):
            reasons.append((name_of(c, comparison), why))
    yield "Why not the others", table((), reasons, kind="facts")
    yield "Notes", "".join(f"<p>{escape(note)}</p>" for note in notes_of(comparison))


def _limit(planned: list[Candidate]) -> float:
    """The limit of the memory, where all candidates have the same."""
    limits = {c.plan.prediction.memory_limit_bytes for c in planned if c.plan}
    return limits.pop() if len(limits) == 1 else 0.0


def _row(candidate: Candidate, comparison: Comparison) -> list[str]:
    plan, name = candidate.plan, name_of(candidate, comparison)
    cost = [format_cost(comparison.cost(candidate)) or NO_PRICE] if comparison.prices else []
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
    per_s, what = rate(plan, step_s)
    return f"{format_count(float(round(per_s)))} {what}/s"


def _share(candidate: Candidate) -> str:
    p = candidate.plan.prediction if candidate.plan else None
    if not p or not p.memory_limit_bytes:
        return ""
    return f" ({format_share_of_limit(p.peak_memory_bytes, p.memory_limit_bytes)})"


def _with(name: str, figure: str) -> str:
    short = name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 1]}…"
    return f"{short}: {figure}"
