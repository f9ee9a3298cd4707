"""Two plans side by side on one screen: layout, time, memory, and how much else differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..core import counted, format_bytes, format_count, format_seconds
from ..plans import (
    Plan,
    PlanDiff,
    examples_per_step,
    fact_rows,
    is_pipeline,
    memory_parts,
    mfu,
    name_of_part,
    rate,
    step_parts,
)
from ._tables import columns

# Facts of a plan that say how it is laid out, as its head shows them.
_LAYOUT = ("parallelism", "recomputation", "attention", "micro-batches")
# Settings that are no part of what a model is, or that are said beside it.
_SAID = ("recompute", "attention", "model", "global_batch")
# The title of the table whose columns are words.
_DECIDED = "Layout"
_BUBBLE = "bubble of the busiest stage"
# Parts of the memory without stages, each with that of a stage to which it belongs; others are
# temporaries.
_OF_STAGES = {
    **dict.fromkeys(
        ("parameters", "optimizer state", "gradients", "other state"), name_of_part("state")
    ),
    "activations": "activations in flight",
    "low-precision copies of parameters": "low-precision copies of parameters",
}
# From this ratio on, percentages are harder to read than multiples.
_MANY = 10
Row = tuple[str, str, str, str]


def summarised(
    before: Plan, after: Plan, changes: PlanDiff, names: tuple[str, str]
) -> RenderableType:
    """Layout, time and memory of two plans by name, with the figures that their own texts show, and
    how many arrays and operators are split differently.
    """
    if changes.identical:
        return Text(_same(names))
    parts: list[RenderableType] = [Text(_head(before, after, names), style="bold"), Text("")]
    for title, header, rows in _tables(before, after, names):
        right = () if title == _DECIDED else tuple(range(1, len(header)))
        parts.append(columns(title, header, rows, right=right))
    if _are_alike(before, after):
        parts.append(Text(_rest(changes)))
    return Group(*parts)


def summarised_as_markdown(
    before: Plan, after: Plan, changes: PlanDiff, names: tuple[str, str]
) -> str:
    """What `summarised` shows, as Markdown for a comment on a pull request."""
    if changes.identical:
        return _same(names)
    parts = [f"**{_in_markdown(_head(before, after, names))}**"]
    for title, header, rows in _tables(before, after, names):
        lines = [header, ["---", *["---" if title == _DECIDED else "---:"] * (len(header) - 1)]]
        table = "\n".join(f"| {' | '.join(map(_in_markdown, row))} |" for row in (*lines, *rows))
        parts.append(f"{title}\n\n{table}")
    if _are_alike(before, after):
        parts.append(_rest(changes))
    return "\n\n".join(parts)


def _in_markdown(text: str) -> str:
    for mark in "\\|*_<":
        text = text.replace(mark, f"\\{mark}")
    return text


def _same(names: tuple[str, str]) -> str:
    return f"{names[0]} and {names[1]} decide and predict the same."


def _are_alike(before: Plan, after: Plan) -> bool:
    """Whether both plans are for the same step."""
    return (_model(before), before.interface_fingerprint) == (
        _model(after),
        after.interface_fingerprint,
    )


def _head(before: Plan, after: Plan, names: tuple[str, str]) -> str:
    """Which plan is faster, by how much, and what it takes of memory; or how the steps of both
    differ.
    """
    if not _are_alike(before, after):
        shown = []
        for name, plan, other in ((names[0], before, after), (names[1], after, before)):
            theirs = other.model.settings
            own = []
            for key, value in plan.model.settings.items():
                if theirs.get(key) != value and key not in _SAID:
                    own.append(f"{key}={value}")
            batch = f"batch {examples_per_step(plan)}"
            shown.append(f"{name} {', '.join([plan.model.name or 'a step', batch, *own[:4]])}")
        return f"These are plans for two different models or batches: {'; '.join(shown)}."
    (fast, fast_name), (slow, slow_name) = sorted(
        ((before, names[0]), (after, names[1])), key=lambda pair: pair[0].prediction.step_time_s
    )
    f, s = fast.prediction, slow.prediction
    sizes = format_bytes(f.peak_memory_bytes), format_bytes(s.peak_memory_bytes)
    memory = f"memory on each device {sizes[0]}" + (
        ", as the other" if sizes[0] == sizes[1] else f", not {sizes[1]}"
    )
    if not (less := _relative(s.step_time_s, f.step_time_s)):
        return f"As fast within 0.5%; {fast_name}: {memory} (predicted)."
    return (
        f"{fast_name} is faster: {format_seconds(f.step_time_s)} a step, not"
        f" {format_seconds(s.step_time_s)} ({less}); {memory} (predicted)."
    )


def _tables(
    before: Plan, after: Plan, names: tuple[str, str]
) -> Iterator[tuple[str, list[str], list[Sequence[str]]]]:
    """Title, header and rows of each table; changes have a column where there are any."""
    named: list[dict[str, str]] = []
    for plan in (before, after):
        words = {"cluster": str(plan.cluster.get("name", "")), "method": plan.method}
        if plan.is_pipeline:
            words["stages"] = f"{len(plan.stages)}, {plan.schedule}"
        for name, text in fact_rows(plan):
            if name in _LAYOUT:
                words[name] = f"{words[name]}; {text}" if name in words else text
        named.append(words)
    first, second = named
    decided: list[Row] = []
    for name in dict.fromkeys([*first, *second]):
        if first.get(name) != second.get(name) or name in ("method", "parallelism"):
            decided.append((name, first.get(name, "none"), second.get(name, "none"), ""))
    for title, rows in (
        (_DECIDED, decided),
        ("Step time (predicted)", list(_times(before, after))),
        ("Memory on each device at its peak (predicted)", list(_memory(before, after))),
    ):
        width = 4 if _are_alike(before, after) and any(row[3] for row in rows) else 3
        yield title, ["what", *names, "change"][:width], [row[:width] for row in rows]


def _model(plan: Plan) -> tuple[object, ...]:
    # The planner may choose recomputation and attention: they do not make another model.
    settings = {k: v for k, v in plan.model.settings.items() if k not in ("recompute", "attention")}
    return plan.model.name, settings


def _times(before: Plan, after: Plan) -> Iterator[Row]:
    named: list[dict[str, float]] = []
    for plan in (before, after):
        p, parts = plan.prediction, step_parts(plan)
        rows = {"step time": p.step_time_s}
        for name, seconds in parts.items():
            rows[name.replace("pipeline bubble", _BUBBLE)] = seconds
        if not is_pipeline(plan):
            rows["all communication"] = p.communication_s + p.gradient_s
            rows["of it for gradients"] = p.gradient_s
            rows["of it overlapped"] = p.hidden_s
        named.append(rows)
    for name, first in named[0].items():
        # Of stages, only the communication that is exposed is known.
        second = named[1].get(name)
        if second is not None and (first or second):
            yield name, format_seconds(first), format_seconds(second), _relative(first, second)
    (first, what), (second, _) = rate(before), rate(after)
    if first and second:
        texts = format_count(float(round(first))), format_count(float(round(second)))
        yield f"{what} per second", *texts, _relative(first, second)
    used = [mfu(before), mfu(after)]
    if used[0] is not None and used[1] is not None:
        yield "MFU", f"{used[0]:.1%}", f"{used[1]:.1%}", ""


def _memory(before: Plan, after: Plan) -> Iterator[Row]:
    of_stages = is_pipeline(before) or is_pipeline(after)
    named: list[dict[str, float]] = []
    for plan in (before, after):
        sums: dict[str, float] = {}
        for name, num_bytes in memory_parts(plan):
            # Beside a pipeline, parts are summed as those of stages are.
            if of_stages and not is_pipeline(plan):
                name = _OF_STAGES.get(name, "temporaries")
            sums[name] = sums.get(name, 0.0) + num_bytes
        named.append({"total": plan.prediction.peak_memory_bytes, **sums})
    for name in dict.fromkeys([*named[0], *named[1]]):
        first, second = named[0].get(name, 0.0), named[1].get(name, 0.0)
        texts = [format_bytes(value) if value else "none" for value in (first, second)]
        yield name, texts[0], texts[1], _relative(first, second)
    first, second = before.prediction.memory_limit_bytes, after.prediction.memory_limit_bytes
    yield "limit", format_bytes(first), format_bytes(second), _relative(first, second)


def _relative(first: float, second: float) -> str:
    text = f"{second / first - 1:+.0%}" if first and second else ""
    if first and second >= _MANY * first:
        text = f"{second / first:.0f}x"
    return "" if text in ("+0%", "-0%") else text


def _rest(changes: PlanDiff) -> str:
    arrays = sum(c.subject.startswith(("input ", "output ")) for c in changes.decisions)
    operators = sum("operator " in c.subject for c in changes.decisions)
    some = [counted(n, what) for n, what in ((arrays, "array"), (operators, "operator")) if n]
    are = "is" if arrays + operators < 2 else "are"
    return (
        f"{' and '.join(some) or 'nothing'} {are} split differently; --all lists every term, --json"
        " as data."
    ).capitalize()
