"""ParallelBlocks, segments and what composing them found, as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType

from ..core import format_bytes, format_seconds
from ._tables import columns


def blocks_text(answer: Mapping[str, Any]) -> RenderableType:
    """The answer of `aliquot blocks analyze`."""
    blocks, segments = answer["blocks"], answer["segments"]
    mesh = " x ".join(f"{axis}={size}" for axis, size in answer["mesh"].items())
    kinds = segments["kinds"]
    head = (
        f"{len(blocks)} distinct ParallelBlocks on a mesh {mesh}, in {len(kinds) - 1} kinds of segment: "
        f"{answer['num_programs']} programs to measure, whatever the depth."
    )
    table = columns(
        "Blocks",
        ("#", "parameters", "copies", "products", "options of the entry"),
        [
            (
                str(block["number"]),
                ", ".join(block["parameters"]),
                str(block["copies"]),
                f"{block['forward_products']} forward, {len(block['products'])} in all",
                "; ".join(f"{k} {option}" for k, option in enumerate(block["options"])),
            )
            for block in blocks
        ],
        right=(0, 2),
    )
    of_segments = columns(
        "Segments",
        ("kind", "begins with", "blocks", "in the step", "programs"),
        [
            (
                str(k),
                kind["name"],
                ", ".join(map(str, kind["blocks"])) or "none: what comes before the first block",
                str(kind["count"]),
                str(kind["programs"]),
            )
            for k, kind in enumerate(kinds)
        ],
        right=(0, 3, 4),
    )
    return Group(head, table, of_segments)


def composed_text(answer: Mapping[str, Any]) -> RenderableType:
    """The answer of `aliquot blocks search`."""
    best = answer["found"][0]
    head = (
        f"Fastest: {format_seconds(best['step_time_s'])} a step with {format_bytes(best['memory_bytes'])} on each device, "
        f"{best['measured_share']:.0%} of it measured."
    )
    if "plan" in answer:
        head += f" Plan: {answer['plan']}"
    table = columns(
        "Composed of segments",
        ("step time", "memory", "measured", *[f"options of {name}" for name in answer["kinds"][1:]]),
        [
            (
                format_seconds(row["step_time_s"]),
                format_bytes(row["memory_bytes"]),
                f"{row['measured_share']:.0%}",
                *[" ".join(map(str, options)) for options in row["options"][1:]],
            )
            for row in answer["found"]
        ],
        right=(0, 1, 2),
    )
    return Group(head, table)


def enumeration_text(answer: Mapping[str, Any]) -> RenderableType:
    """The answer of `aliquot blocks enumerate`."""
    rows = answer["rows"]
    return columns(
        "All layers alike",
        ("options", "bytes moved", "communication", "predicted", "composed", "measured", "memory", "compiled"),
        [
            (
                " ".join(map(str, row["options"])),
                format_bytes(row["bytes_moved"]),
                format_seconds(row["communication_s"]),
                format_seconds(row["predicted_s"]),
                format_seconds(row["composed_s"]),
                format_seconds(row["measured_s"]) if row.get("measured_s") is not None else None,
                format_bytes(row["memory_bytes"]),
                format_bytes(row["compiled_bytes"]) if "compiled_bytes" in row else None,
            )
            for row in rows
        ],
        right=range(1, 8),
    )
