"""Blocks and segments of a step as plain data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..graph import Phase, named_operator
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
    blocks = []
    nodes = step.problem.nodes.nodes
    for number, options in enumerate(step.blocks):
        block, products, num_forward = options.block, [], 0
        for product in block.products:
            phase = nodes[product].phase
            if phase is not None:
                num_forward += phase is Phase.FORWARD
                plans = [_follows(step, product, masks[product]) for masks in options.masks]
                products.append(
                    {
                        "operator": nodes[product].label,
                        "phase": phase.name.lower(),
                        "plans": plans,
                    }
                )
        blocks.append(
            {
                "number": number,
                "entry": nodes[block.entry].label,
                "parameters": [_NUMBER.sub("*", nodes[p].label) for p in block.parameters],
                "copies": nodes[block.entry].copies,
                "options": [_option(step, block.entry, choice) for choice in options.choices],
                "products": products,
                "forward_products": num_forward,
            }
        )
    return {
        "mesh": dict(zip(step.mesh.axis_names, step.mesh.shape, strict=True)),
        "num_programs": step.num_programs,
        "outside": [named_operator(step.problem.graph.ops[op]) for op in outside],
        "blocks": blocks,
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


def _option(step: SegmentedStep, node: int, choice: Choice) -> str:
    nodes = step.problem.nodes
    given = {port.node for port in nodes.input_ports}
    results = [e for e in nodes.edges if e.source == node]
    operands = [e for e in nodes.edges if e.target == node and e.kind == "operand"]
    parts = []
    for axis, factor in zip(step.mesh.axis_names, choice, strict=True):
        if factor < 0:
            continue
        having = [e for e in operands if e.target_projection[factor] >= 0]
        of_parameter = any(e.source in given for e in having)
        if results and all(e.source_projection[factor] < 0 for e in results):
            role = "contraction"
        elif factor in nodes.batch_factors[node]:
            role = "batch"
        elif len(having) == len(operands):
            role = "expert" if of_parameter else "head"
        else:
            role = "output" if of_parameter else "sequence"
        parts.append(f"{role} on {axis}")
    return ", ".join(parts) or "whole"


def _follows(step: SegmentedStep, product: int, mask: Any) -> str:
    """The splits of a product that an option allows, or "free" if these are many."""
    rows = np.unique(step.space.priced.nodes[product].choices[mask], axis=0)
    if len(rows) > _MOST_WAYS:
        return "free"
    return " or ".join(_option(step, product, tuple(row)) for row in rows.tolist())
