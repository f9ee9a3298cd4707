"""Comparison of predicted figures with the compiler's: memory by kind, and collectives by kind and
axes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from rich.console import RenderableType

from ..core import format_bytes, format_seconds
from ..plans import Collective, Plan, compare_collectives, grouped_arrays
from ._tables import columns


class Memory(Protocol):
    """The compiler's account of a program's memory on each device."""

    @property
    def argument_bytes(self) -> int:
        """Bytes of the step's arguments."""

    @property
    def output_bytes(self) -> int:
        """Bytes of its results."""

    @property
    def alias_bytes(self) -> int:
        """Bytes of outputs that reuse the memory of arguments."""

    @property
    def temp_bytes(self) -> int:
        """Bytes of its temporaries."""


def compared(plan: Plan, memory: Memory, collectives: Iterable[Collective]) -> dict[str, Any]:
    """Predicted and compiled figures of one step on each device, as plain values ready for JSON.

    Args:
        plan: The plan with its prediction.
        memory: The compiler's figures. In total a program needs its arguments, the outputs that do
            not reuse memory of arguments, and its temporaries.
        collectives: The collectives of the compiled program.
    """
    total = memory.argument_bytes + memory.output_bytes - memory.alias_bytes + memory.temp_bytes
    groups = []
    for stage in plan.stages:
        groups += grouped_arrays(plan.inputs, stage, stage.shardings)
    arguments = sum(group.local_bytes for group in groups)
    rows = [
        {**row.to_dict(), "axes": ", ".join(row.axes)}
        for row in compare_collectives(plan.prediction.collectives, collectives)
    ]
    return {
        "memory": [
            {
                "what": "state and batch",
                "predicted_bytes": arguments,
                "compiled_bytes": memory.argument_bytes,
            },
            {
                "what": "memory, worst moment",
                "predicted_bytes": plan.prediction.peak_memory_bytes,
                "compiled_bytes": total,
            },
        ],
        "collectives": sorted(rows, key=lambda row: (row["kind"], row["axes"])),
    }


def beside_measured(plan: Plan, step_time_s: float, figures: dict[str, Any]) -> RenderableType:
    """Predicted figures of a step beside those of its run.

    Args:
        step_time_s: measured, in seconds; 0 if it is not known.
        figures: as `compared` gives them.
    """

    def sizes(rows: list[dict[str, Any]]) -> list[str]:
        predicted, compiled = zip(*((r["predicted_bytes"], r["compiled_bytes"]) for r in rows))
        return [format_bytes(sum(predicted)), format_bytes(sum(compiled))]

    state, peak = figures["memory"]
    rows = [
        (
            "step time",
            format_seconds(plan.prediction.step_time_s),
            format_seconds(step_time_s) if step_time_s else "too few steps",
        ),
        ("state and batch on each device", *sizes([state])),
        ("memory of each device at its peak", *sizes([peak])),
        ("exchanged by each device in a step", *sizes(figures["collectives"])),
    ]
    return columns("One step", ("", "predicted", "measured"), rows, right=(1, 2))
