"""Blocks and segments of a step as plain data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..graph import Phase, named_operator
from ..planners import BlockOptions
from ..sharding import Choice, outside_blocks
from ._database import ProfileDatabase
from ._programs import program_key
from ._segments import Combination, SegmentedStep

# The most splits of a product that are listed for an option. There may be two, because dispatch and
# combine may be split over the experts, and equal mesh axes may be exchanged.
_MOST_WAYS = 2
# The number of a layer in a path: an index, or behind a name as in `Dense_0.kernel`; digits of
# other names, such as `t1`, are their own.
_NUMBER = re.compile(r"(?<=\[)\d+(?=\])|(?<=_)\d+(?=\.)")


def describe_blocks(step: SegmentedStep) -> dict[str, Any]:
    """The blocks of a step with their products and options, its segments, and the products that are
    outside all blocks.

    Under `"plans"` each product has, for each option of its block, the split that follows from it,
    in the words of the options: a split contraction leaves partial sums. The entry is "free" if the
    option does not determine the split.
    """
    outside = outside_blocks(step.problem.nodes, [b.block for b in step.blocks])
    return {
        "mesh": dict(zip(step.mesh.axis_names, step.mesh.shape, strict=True)),
        "num_programs": step.num_programs,
        "outside": [named_operator(step.problem.graph.ops[op]) for op in outside],
        "blocks": [_block(step, number, block) for number, block in enumerate(step.blocks)],
        "segments": {
            "kinds": [
                {
                    "name": kind.name,
                    "count": kind.count,
                    "blocks": list(step.blocks_of(k)),
                    "programs": kind.num_combinations,
                }
                for k, kind in enumerate(step.kinds)
            ],
            "sequence": list(step.sequence),
        },
    }


def describe_combinations(
    step: SegmentedStep, combinations: Sequence[Sequence[Combination]], database: ProfileDatabase
) -> list[dict[str, Any]]:
    """For each kind of segment its combinations of options, fastest first, each with its time and
    memory by the cost model and, if a database holds its program, as measured.
    """
    described = []
    for kind, some in zip(step.kinds, combinations, strict=True):
        rows = []
        for c in some:
            known = database.get(program_key(kind.problem.graph, c.choices, step.mesh.shape))
            rows.append(
                {
                    "options": list(c.options),
                    "modelled_s": c.seconds,
                    "modelled_bytes": c.state_bytes + c.kept_bytes + c.working_bytes,
                    "measured_s": known.seconds if known else None,
                    "measured_bytes": known.memory_bytes if known else None,
                    "outcome": known.outcome if known else "not measured",
                }
            )
        rows.sort(
            key=lambda row: (
                row["measured_s"] is None,
                row["modelled_s"] if row["measured_s"] is None else row["measured_s"],
            )
        )
        described.append({"name": kind.name, "count": kind.count, "combinations": rows})
    return described


def _block(step: SegmentedStep, number: int, options: BlockOptions) -> dict[str, Any]:
    nodes, block = step.problem.nodes.nodes, options.block
    phases = {p: phase for p in block.products if (phase := nodes[p].phase) is not None}
    return {
        "number": number,
        "entry": nodes[block.entry].label,
        "parameters": [_NUMBER.sub("*", nodes[p].label) for p in block.parameters],
        "copies": nodes[block.entry].copies,
        "options": [_option(step, block.entry, choice) for choice in options.choices],
        "products": [
            {
                "operator": nodes[product].label,
                "phase": phases[product].name.lower(),
                "plans": [_follows(step, product, masks[product]) for masks in options.masks],
            }
            for product in phases
        ],
        "forward_products": sum(phase is Phase.FORWARD for phase in phases.values()),
    }


def _option(step: SegmentedStep, node: int, choice: Choice) -> str:
    axes = step.mesh.axis_names
    parts = [
        f"{_factor(step, node, f)} on {axis}"
        for axis, f in zip(axes, choice, strict=True)
        if f >= 0
    ]
    return ", ".join(parts) or "whole"


def _factor(step: SegmentedStep, node: int, factor: int) -> str:
    """The role of a factor in a product: contraction, batch, expert, head, output or sequence."""
    nodes = step.problem.nodes
    results = [e.source_projection[factor] for e in nodes.edges if e.source == node]
    if results and all(dim < 0 for dim in results):
        return "contraction"
    if factor in nodes.batch_factors[node]:
        return "batch"
    operands = [
        e.target_projection[factor] for e in nodes.edges if e.target == node and e.kind == "operand"
    ]
    given = {port.node for port in nodes.input_ports}
    of_parameter = any(
        e.target_projection[factor] >= 0 and e.source in given
        for e in nodes.edges
        if e.target == node and e.kind == "operand"
    )
    if all(dim >= 0 for dim in operands):
        return "expert" if of_parameter else "head"
    return "output" if of_parameter else "sequence"


def _follows(step: SegmentedStep, product: int, mask: Any) -> str:
    """The splits of a product that an option allows, or "free" if these are many."""
    rows = np.unique(step.space.priced.nodes[product].choices[mask], axis=0)
    if len(rows) > _MOST_WAYS:
        return "free"
    return " or ".join(_option(step, product, tuple(row)) for row in rows.tolist())
