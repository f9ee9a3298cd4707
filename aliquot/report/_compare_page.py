"""A comparison as one self-contained HTML page for a decision: what to take and how sure that is,
then time, memory and money of every candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ..core import format_bytes, format_count, format_seconds, format_share_of_limit
from ..plans import examples_per_step, expected_error, tokens_per_step
from ._comparison import (
    Candidate,
    Comparison,
    format_cost,
    layout,
    mfu_of,
    notes_of,
    parts_of,
    seconds_of,
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
            (f"{_timed(comparison)} (predicted)", format_seconds(_seconds(best, comparison))),
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
            c.plan.prediction.memory_bytes,
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


def recommendation(comparison: Comparison) -> list[str]:
    """What to take, in sentences: the fastest, how sure its lead is, and the cheapest."""
    planned = [c for c in comparison.candidates if c.plan]
    if not planned:
        return ["No candidate fits. Why not is listed below, with what each would need."]
    best, *others = planned
    assert best.plan is not None
    said = [
        f"Take {name_of(best, comparison)}: {format_seconds(_seconds(best, comparison))} a"
        f" {'call' if comparison.objective == 'throughput' else 'step'}."
    ]
    error = expected_error(best.plan)
    if error is not None:
        said.append(f"Predicted step times on these devices were off by {error}.")
    best_s = _seconds(best, comparison)
    if others and best_s:
        second = others[0]
        behind = _seconds(second, comparison) / best_s - 1
        lead = f"{name_of(second, comparison)} is next, {behind:.1%} slower"
        if error is None:
            said.append(f"{lead}; how far predictions are off here is not known, so measure both.")
        elif behind <= error.error_of_90_percent:
            said.append(f"{lead}: less than that error, so measure both, or take the simpler one.")
        else:
            said.append(f"{lead}: more than that error.")
    costs = [(cost, c) for c in planned if (cost := comparison.cost(c)) is not None]
    if costs:
        cost, cheapest = min(costs, key=lambda item: item[0])
        own = comparison.cost(best)
        if cheapest is best or own is None:
            said.append(f"It is the cheapest, too: {format_cost(cost)} {comparison.cost_unit}.")
        else:
            said.append(
                f"The cheapest is {name_of(cheapest, comparison)}: {format_cost(cost)}"
                f" {comparison.cost_unit}, and {format_cost(own)} for the fastest."
            )
    return said


def name_of(candidate: Candidate, comparison: Comparison) -> str:
    """What a candidate is called: its cluster, its method, or both."""
    several = len({c.cluster for c in comparison.candidates}) > 1
    methods = len({c.method for c in comparison.candidates}) > 1
    if not several:
        return candidate.method
    return f"{candidate.cluster}, {candidate.method}" if methods else candidate.cluster


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
        format_seconds(_seconds(candidate, comparison)),
        "" if used is None else f"{used:.1%}",
        _throughput(candidate, comparison),
        *cost,
        f"{format_bytes(p.peak_memory_bytes)}{_share(candidate)}",
    ]


def _timed(comparison: Comparison) -> str:
    return "time between calls" if comparison.objective == "throughput" else "step time"


def _seconds(candidate: Candidate, comparison: Comparison) -> float:
    return seconds_of(candidate.plan, comparison.objective) if candidate.plan else 0.0


def _throughput(candidate: Candidate, comparison: Comparison) -> str:
    plan, step_s = candidate.plan, _seconds(candidate, comparison)
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
