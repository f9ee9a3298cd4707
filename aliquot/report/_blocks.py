"""Reports on ParallelBlocks, on segments, and on steps composed of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType

from ..core import counted, format_bytes, format_flops, format_flops_per_s, format_seconds
from ._tables import columns


def blocks_text(answer: Mapping[str, Any]) -> RenderableType:
    """The answer of `aliquot blocks analyze`."""
    blocks, segments = answer["blocks"], answer["segments"]
    mesh = " x ".join(f"{axis}={size}" for axis, size in answer["mesh"].items())
    kinds = segments["kinds"]
    num_kinds = sum(bool(kind["blocks"]) for kind in kinds)
    head = (
        f"{len(blocks)} distinct ParallelBlocks on a mesh {mesh}, in {num_kinds} kinds of"
        f" segment: {answer['num_programs']} programs to measure, whatever the depth. Found in"
        f" {format_seconds(answer['seconds'])}, {format_seconds(answer['trace_s'])} of it to trace"
        " the step."
    )
    if answer["outside"]:
        head += (
            f" {counted(len(answer['outside']), 'product')} in no block, each split by itself:"
            f" {', '.join(answer['outside'])}."
        )
    root = _common_root([path for block in blocks for path in block["parameters"]])
    table = columns(
        f"Blocks, with their parameters in {root.rstrip('.')}" if root else "Blocks",
        ("#", "parameters", "copies", "products", "options of the entry"),
        [
            (
                str(block["number"]),
                ", ".join(path.removeprefix(root) for path in block["parameters"]),
                str(block["copies"]),
                f"{len(block['products'])}, {block['forward_products']} forward",
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


def _common_root(paths: Sequence[str]) -> str:
    """The beginning that all paths share, up to a dot, such as `state.params.`."""
    return os.path.commonprefix(list(paths)).rpartition(".")[0] + "." if len(paths) > 1 else ""


def composed_text(answer: Mapping[str, Any]) -> RenderableType:
    """The answer of `aliquot blocks search`."""
    best = answer["found"][0]
    head = (
        f"Fastest: {format_seconds(best['step_time_s'])} a step with"
        f" {format_bytes(best['memory_bytes'])} on each device."
        f" {best['measured_combinations']} of the {best['combinations']} ways to split a"
        " segment are measured, the others modelled;"
        f" {best['measured_share']:.0%} of this time rests on measurements."
    )
    if best.get("measured_s") is not None:
        head += f" As a whole step it takes {format_seconds(best['measured_s'])}."
    if answer.get("costs_s"):
        head += (
            f" Timed again: {', '.join(map(format_seconds, answer['costs_s']))}; it computes"
            f" {format_flops(answer['flops'])} a step, {format_flops_per_s(answer['flops_per_s'])}"
            " on all devices."
        )
    if "plan" in answer:
        head += f" Plan: {answer['plan']}"
    ran = any(row.get("measured_s") is not None for row in answer["found"])
    table = columns(
        "Composed of segments, with the options of the blocks of each",
        (
            "step time",
            "memory",
            "measured",
            *(("as a whole",) if ran else ()),
            *[
                name
                for name, options in zip(answer["kinds"], best["options"], strict=True)
                if options
            ],
        ),
        [
            (
                format_seconds(row["step_time_s"]),
                format_bytes(row["memory_bytes"]),
                f"{row['measured_share']:.0%}",
                *((_seconds_or_none(row.get("measured_s")),) if ran else ()),
                *[" ".join(map(str, options)) for options in row["options"] if options],
            )
            for row in answer["found"]
        ],
        right=(0, 1, 2, *((3,) if ran else ())),
    )
    return Group(head, table)


def combinations_text(kinds: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The answer of `aliquot blocks profile`: one table for each kind of segment."""
    return Group(
        *[
            columns(
                f"{kind['name']}, {kind['count']} in the step",
                ("options", "measured", "memory", "by the cost model", "memory"),
                [
                    (
                        " ".join(map(str, row["options"])) or "none",
                        (
                            row["outcome"]
                            if row["measured_s"] is None
                            else format_seconds(row["measured_s"])
                        ),
                        format_bytes(row["measured_bytes"]) if row["measured_bytes"] else None,
                        format_seconds(row["modelled_s"]),
                        format_bytes(row["modelled_bytes"]),
                    )
                    for row in kind["combinations"]
                ],
                right=range(1, 5),
            )
            for kind in kinds
        ]
    )


def _seconds_or_none(value_s: float | None) -> str | None:
    return None if value_s is None else format_seconds(value_s)


def enumeration_text(answer: Mapping[str, Any]) -> RenderableType:
    """The answer of `aliquot blocks enumerate`."""
    rows = answer["rows"]
    composed = any(row["measured_share"] for row in rows)
    ran = any("compiled_bytes" in row for row in rows)
    return columns(
        f"All layers alike: {answer['kind']}",
        (
            "options",
            "moved",
            "communication",
            "predicted",
            *(("composed",) if composed else ()),
            *(("measured", "communicating", "computing") if ran else ()),
            "memory",
            *(("compiled",) if ran else ()),
        ),
        [
            (
                " ".join(map(str, row["options"])),
                format_bytes(row["bytes_moved"]),
                format_seconds(row["communication_s"]),
                format_seconds(row["predicted_s"]),
                *((format_seconds(row["composed_s"]),) if composed else ()),
                *(
                    [
                        _seconds_or_none(row.get(f"measured_{what}"))
                        for what in ("s", "communication_s", "compute_s")
                    ]
                    if ran
                    else ()
                ),
                format_bytes(row["memory_bytes"]),
                *(
                    (format_bytes(row["compiled_bytes"]) if "compiled_bytes" in row else None,)
                    if ran
                    else ()
                ),
            )
            for row in rows
        ],
        right=range(1, 5 + composed + 4 * ran),
    )
