"""Reports on compiled plans, for readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..core import format_bytes, format_seconds, format_share_of_limit
from ..plans import name_of_part
from ._tables import Column, Facts, columns, table

_MOST = 12


def verification(figures: Mapping[str, Any]) -> Group:
    """The predicted beside the compiled figures, for `rich` to print or `as_text` to turn into
    text.

    Args:
        figures: as `aliquot.verification.Verification.to_dict` gives them.
    """
    verdict = "Fits" if figures["fits"] else "Does not fit"
    said = f"{verdict}: compiled for {figures['num_devices']} x {figures['target']}."
    parts: list[RenderableType] = [Text(said, style="bold")]
    for index, stage in enumerate(figures["stages"]):
        if len(figures["stages"]) > 1:
            if index == 0 and len(figures["submesh_bytes"]) < len(figures["stages"]):
                needed = ", ".join(map(format_bytes, figures["submesh_bytes"]))
                said = f"stages share them; all that are there together need {needed}"
                parts.append(Facts([("devices", said)]))
            parts += [Text(""), Text(f"Stage {index}", style="bold")]
        parts += [Facts(_facts(figures, stage)), Text(""), *_tables(stage)]
    if figures["remarks"]:
        parts += [Text(""), *map(Text, figures["remarks"])]
    return Group(*parts)


def _facts(figures: Mapping[str, Any], stage: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    predicted, compiled, limit = (
        stage["predicted_bytes"],
        stage["compiled_bytes"],
        figures["limit_bytes"],
    )
    share = ""
    if limit:
        used = format_share_of_limit(compiled, limit)
        share = f", {used} of the {format_bytes(limit)} that a program may take"
    off = ""
    if predicted and compiled:
        too = "high" if predicted > compiled else "low"
        off = f", {abs(predicted / compiled - 1):.1%} too {too}"
    yield (
        "memory",
        f"{format_bytes(compiled)} on each device{share}; predicted {format_bytes(predicted)}{off}",
    )
    if not stage["refusal"]:
        again = " (kept from an earlier run)" if stage["cached"] else ""
        yield "compiled in", f"{format_seconds(stage['compile_s'])}{again}"
    if stage["programs"]:
        yield "programs", "; ".join(map(_program, stage["programs"]))
    elif stage["compiler_compute_s"]:
        kernels_s, attention_s = stage["compiler_compute_s"], figures["predicted_attention_s"]
        more = ""
        if attention_s:
            more = f" and the plan's {format_seconds(attention_s)} of cuDNN's attention"
        elif stage["calls_without_a_time"]:
            more = f", without {stage['calls_without_a_time']:.0f} calls of cuDNN"
        more += ", of which XLA has no model" if more else ""
        yield (
            "compute",
            (
                f"{format_seconds(kernels_s + attention_s)} at full clock by XLA's models of its"
                f" kernels{more}; predicted {format_seconds(figures['predicted_compute_s'])}"
            ),
        )
    elif stage["compiler_cycles"]:
        cycles, seconds = stage["compiler_cycles"], figures["predicted_compute_s"]
        yield (
            "compute",
            (
                f"{cycles:.3g} cycles, expects the compiler; the plan's {format_seconds(seconds)}"
                f" of compute are that many at a clock of {cycles / seconds / 1e9:.2f} GHz"
            ),
        )


def _program(figures: Mapping[str, Any]) -> str:
    """A program in words, such as `forward 8 times`, and the program that it equals, if any."""
    name = figures["name"].split(" ", 2)[2].replace("update", "update round")
    times = f" {figures['runs']} times" if figures["runs"] != 1 else ""
    return (
        f"{name}{times} (the same as {figures['same_as']})"
        if figures["same_as"]
        else f"{name}{times}"
    )


def _tables(stage: Mapping[str, Any]) -> Iterable[RenderableType]:
    if stage["refusal"]:
        return
    predicted, compiled = stage["parts"]["predicted"], stage["parts"]["compiled"]
    yield columns("Memory on each device", _MEMORY, _memory_rows(predicted, compiled), right=(1, 3))
    which = Column("kind", "kind"), Column("axes", "axes", lambda axes: ", ".join(axes) or "-")
    if stage["collectives"]:
        yield table(
            "Collectives in a step (the compiler merges small ones)",
            stage["collectives"],
            *which,
            Column("predicted count", "predicted_count", "{:g}".format, number=True),
            Column("compiled count", "compiled_count", "{:g}".format, number=True),
            Column("predicted bytes", "predicted_bytes", format_bytes, number=True),
            Column("compiled bytes", "compiled_bytes", format_bytes, number=True),
        )
    else:
        yield Text("No communication at all.")
    odd = stage["unintended"]
    if not odd:
        moved = sum(row["predicted_bytes"] for row in stage["collectives"])
        added = sum(
            row["compiled_bytes"] for row in stage["collectives"] if not row["predicted_count"]
        )
        few = ", or moves less than 1% of the bytes" if 0 < added < _FEW * moved else ""
        yield Text(f"Every collective is one that the plan intends{few}.")
        return
    more = f"; the largest {_MOST} of {len(odd)}" if len(odd) > _MOST else ""
    yield table(
        f"Collectives that the plan did not intend{more}",
        odd[:_MOST],
        *which,
        Column("count", "count", "{:g}".format, number=True),
        Column("bytes", "bytes", format_bytes, number=True),
        Column("what it moves, or the operator that makes it", "cause"),
    )


# Collectives of a smaller share of the bytes are no finding.
_FEW = 0.01
_MEMORY = ("predicted", "", "compiled", "")


def _memory_rows(
    predicted: Mapping[str, float], compiled: Mapping[str, float]
) -> list[tuple[str, str, str, str]]:
    """The parts of predicted and compiled memory side by side. The parts of one row do not
    correspond, because the compiler decides itself where it stores what.
    """
    rest = dict(predicted)
    arguments = rest.pop("arguments")
    left = sorted(rest.items(), key=lambda item: -item[1])
    left += [("together", sum(rest.values())), ("(arguments)", arguments)]
    if "residuals" in compiled:
        # Contents of a pipeline stage's memory at its fullest moment.
        held = [(words, compiled[kind]) for kind, words in _HELD.items() if compiled[kind]]
        right = [*sorted(held, key=lambda row: -row[1]), ("together", compiled["peak"])]
    else:
        unshared = compiled["outputs"] - compiled["aliases"]
        right = [
            ("arguments", compiled["arguments"]),
            ("temporaries", compiled["temporaries"]),
            ("outputs that reuse no input's memory", unshared),
            ("together", compiled["peak"]),
            ("(outputs that reuse an input's memory)", compiled["aliases"]),
        ]
        # Compilers for CPUs count the arguments alone.
        if compiled["in_use_at_once"] > compiled["arguments"]:
            right.append(("(most in use at once)", compiled["in_use_at_once"]))
    count = max(len(left), len(right))
    shown = []
    for side in (left, right):
        said = [(name_of_part(name), format_bytes(value)) for name, value in side]
        shown.append([*said, *[("", "")] * (count - len(side))])
    return [(*a, *b) for a, b in zip(*shown, strict=True)]


_HELD = {
    "arguments": "state and batch",
    "residuals": "residuals of micro-batches in flight",
    "totals": "running totals",
    "update": "left by the update",
    "other": "other",
    "results": "results of the running program",
    "temporaries": "temporaries of the running program",
}
