"""What a compiler made of a plan, as a person reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..core import format_bytes, format_seconds
from ._tables import columns, facts

_MOST = 12


def verification(figures: Mapping[str, Any]) -> Group:
    """Predicted beside compiled, for `rich` to print or `as_text` to turn into text.

    Args:
        figures: as `aliquot.verify.Verification.to_dict` gives them.
    """
    parts: list[RenderableType] = [Text(_headline(figures), style="bold")]
    for index, stage in enumerate(figures["stages"]):
        if len(figures["stages"]) > 1:
            parts += [Text(""), Text(f"Stage {index}", style="bold")]
        parts += [facts(_facts(figures, stage)), Text(""), *_tables(stage)]
    if figures["remarks"]:
        parts += [Text(""), *(Text(remark) for remark in figures["remarks"])]
    return Group(*parts)


def _headline(figures: Mapping[str, Any]) -> str:
    where = f"{figures['num_devices']} x {figures['target']}"
    return f"It {'fits' if figures['fits'] else 'does not fit'} {where}, says the compiler that would run it."


def _facts(figures: Mapping[str, Any], stage: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    predicted, compiled, limit = stage["predicted_bytes"], stage["compiled_bytes"], figures["limit_bytes"]
    share = f", {compiled / limit:.0%} of the {format_bytes(limit)} that a program may take" if limit else ""
    yield "memory", f"{format_bytes(compiled)} on each device{share}; predicted {format_bytes(predicted)}"
    if predicted:
        yield "prediction", f"{abs(predicted / compiled - 1):.1%} too {'high' if predicted > compiled else 'low'}"
    if not stage["refusal"]:
        again = " (kept from an earlier run)" if stage["cached"] else ""
        yield "compiled in", f"{format_seconds(stage['compile_s'])}{again}"
    if stage["compiler_cycles"]:
        cycles, seconds = stage["compiler_cycles"], figures["predicted_compute_s"]
        yield (
            "compute",
            f"{cycles:.3g} cycles, expects the compiler; the plan's {format_seconds(seconds)} of compute are that many at "
            f"a clock of {cycles / seconds / 1e9:.2f} GHz",
        )


def _tables(stage: Mapping[str, Any]) -> Iterable[RenderableType]:
    if stage["refusal"]:
        return
    predicted, compiled = stage["parts"]["predicted"], stage["parts"]["compiled"]
    yield columns("Memory on each device", _MEMORY, _memory_rows(predicted, compiled), right=(1, 3))
    rows = [
        (
            row["kind"],
            ", ".join(row["axes"]) or "-",
            f"{row['predicted_count']:g}",
            f"{row['compiled_count']:g}",
            format_bytes(row["predicted_bytes"]),
            format_bytes(row["compiled_bytes"]),
        )
        for row in stage["collectives"]
    ]
    title = "Collectives in a step (the compiler merges small ones)"
    yield columns(title, _COLLECTIVES, rows, right=(2, 3, 4, 5)) if rows else Text("No communication at all.")
    odd = stage["unintended"]
    if not odd:
        yield Text("Every collective is one that the plan intends.")
        return
    listed = [
        (each["kind"], ", ".join(each["axes"]) or "-", f"{each['count']:g}", format_bytes(each["bytes"]), each["cause"])
        for each in odd[:_MOST]
    ]
    more = f"; the largest {_MOST} of {len(odd)}" if len(odd) > _MOST else ""
    yield columns(f"Collectives that the plan did not intend{more}", _UNINTENDED, listed, right=(2, 3))


_MEMORY = ("predicted", "", "compiled", "")
_COLLECTIVES = ("kind", "axes", "predicted count", "compiled count", "predicted bytes", "compiled bytes")
_UNINTENDED = ("kind", "axes", "count", "bytes", "what it moves, or the operator that makes it")


def _memory_rows(predicted: Mapping[str, float], compiled: Mapping[str, float]) -> list[tuple[str, str, str, str]]:
    """Two accounts side by side. They are cut differently: what lives where is the compiler's own affair."""
    own = {name: value for name, value in predicted.items() if name != "arguments"}
    left = sorted(own.items(), key=lambda item: -item[1])
    outputs = compiled["outputs"] - compiled["aliases"]
    right = [
        ("arguments", compiled["arguments"]),
        ("temporaries", compiled["temporaries"]),
        ("outputs in places of their own", outputs),
    ]
    left.append(("together", sum(own.values())))
    right += [("together", compiled["peak"])]
    left.append(("(arguments)", predicted["arguments"]))
    right.append(("(outputs in place of arguments)", compiled["aliases"]))
    if compiled["in_use_at_once"]:
        right.append(("(most in use at once)", compiled["in_use_at_once"]))
    count = max(len(left), len(right))
    shown = [[(name, format_bytes(value)) for name, value in side] for side in (left, right)]
    for side in shown:
        side += [("", "")] * (count - len(side))
    return [(*a, *b) for a, b in zip(*shown, strict=True)]
