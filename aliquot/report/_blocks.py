"""Reports on ParallelBlocks, on segments, and on steps composed of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType

from ..core import counted, format_bytes, format_flops, format_flops_per_s, format_seconds
from ._tables import Column, table


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
    # The beginning that all paths share, up to a dot, such as `state.params.`.
    paths = list(itertools.chain(*(block["parameters"] for block in blocks)))
    root = os.path.commonprefix(paths).rpartition(".")[0] + "." if len(paths) > 1 else ""

    def parameters(paths: Sequence[str]) -> str:
        return ", ".join(path.removeprefix(root) for path in paths)

    def products(block: Mapping[str, Any]) -> str:
        return f"{len(block['products'])}, {block['forward_products']} forward"

    def options(texts: Sequence[str]) -> str:
        return "; ".join(f"{k} {text}" for k, text in enumerate(texts))

    def numbers(of_blocks: Sequence[int]) -> str:
        return ", ".join(map(str, of_blocks)) or "none: what comes before the first block"

    of_blocks = table(
        f"Blocks, with their parameters in {root.rstrip('.')}" if root else "Blocks",
        blocks,
        Column("#", "number", number=True),
        Column("parameters", "parameters", parameters),
        Column("copies", "copies", number=True),
        Column("products", products),
        Column("options of the entry", "options", options),
    )
    of_segments = table(
        "Segments",
        [{"kind": number, **kind} for number, kind in enumerate(kinds)],
        Column("kind", "kind", number=True),
        Column("begins with", "name"),
        Column("blocks", "blocks", numbers),
        Column("in the step", "count", number=True),
        Column("programs", "programs", number=True),
    )
    return Group(head, of_blocks, of_segments)


def composed_text(answer: Mapping[str, Any]) -> RenderableType:
    """The answer of `aliquot blocks search`."""
    best = answer["found"][0]
    head = (
        f"Fastest: {format_seconds(best['step_time_s'])} a step with"
        f" {format_bytes(best['peak_memory_bytes'])} on each device."
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

    def of_segment(number: int) -> Column:
        name, options = answer["kinds"][number], best["options"][number]
        return Column(name, lambda row: row["options"][number], _numbers, shown=bool(options))

    return Group(
        head,
        table(
            "Composed of segments, with the options of the blocks of each",
            answer["found"],
            Column("step time", "step_time_s", format_seconds, number=True),
            Column("memory", "peak_memory_bytes", format_bytes, number=True),
            Column("measured", "measured_share", "{:.0%}".format, number=True),
            Column("as a whole", "measured_s", format_seconds, number=True, shown=ran),
            *map(of_segment, range(len(best["options"]))),
        ),
    )


def _numbers(options: Sequence[int]) -> str:
    return " ".join(map(str, options))


def combinations_text(kinds: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The answer of `aliquot blocks profile`: one table for each kind of segment."""

    def measured(row: Mapping[str, Any]) -> str:
        found = row["measured_s"]
        return str(row["outcome"]) if found is None else format_seconds(found)

    return Group(
        *[
            table(
                f"{kind['name']}, {kind['count']} in the step",
                kind["combinations"],
                Column("options", lambda row: _numbers(row["options"]) or "none"),
                Column("measured", measured, number=True),
                Column(
                    "memory", lambda row: row["measured_bytes"] or None, format_bytes, number=True
                ),
                Column("by the cost model", "modelled_s", format_seconds, number=True),
                Column("memory", "modelled_bytes", format_bytes, number=True),
            )
            for kind in kinds
        ]
    )


def enumeration_text(answer: Mapping[str, Any]) -> RenderableType:
    """The answer of `aliquot blocks enumerate`."""
    rows = answer["rows"]
    composed = any(row["measured_share"] for row in rows)
    ran = any("compiled_bytes" in row for row in rows)
    return table(
        f"All layers alike: {answer['kind']}",
        rows,
        Column("options", "options", _numbers),
        Column("moved", "bytes_moved", format_bytes, number=True),
        Column("communication", "communication_s", format_seconds, number=True),
        Column("predicted", "step_time_s", format_seconds, number=True),
        Column("composed", "composed_s", format_seconds, number=True, shown=composed),
        Column("measured", "measured_s", format_seconds, number=True, shown=ran),
        Column("communicating", "measured_communication_s", format_seconds, number=True, shown=ran),
        Column("computing", "measured_compute_s", format_seconds, number=True, shown=ran),
        Column("memory", "peak_memory_bytes", format_bytes, number=True),
        Column("compiled", "compiled_bytes", format_bytes, number=True, shown=ran),
    )
