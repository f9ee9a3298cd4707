"""Analysis of how a step runs on micro-batches: a walk through its items in program order."""

from __future__ import annotations

from ...graph import Graph, Role
from . import _micro_calls as calls
from ._findings import TOP, Findings
from ._micro_structured import walk_items
from ._time_specs import EQUAL, WHOLE, TimeKind, split_at


def analyse(
    whole: Graph, part: Graph, parts: int, *, chunks: int = 1, on_missing_rule: str
) -> Findings:
    """Findings about how a step runs on micro-batches.

    Args:
        whole, part: the step on its whole batch, and on one of so many `parts`.
        chunks: chunks of the batch, of each of which each part has an equal share.
        on_missing_rule: see `dim_rule`.
    """
    findings = Findings(
        whole=whole, part=part, parts=parts, chunks=chunks, on_missing_rule=on_missing_rule
    )
    for item in whole.inputs:
        # State that holds rows of examples has another shape on a part.
        rows = findings.spec_by_shape(item.value) or EQUAL
        spec = split_at(0, chunks) if item.role is Role.BATCH else rows
        # Other state, such as a step counter or a random key, counts as free of parameters.
        findings.set_spec(
            item.value, spec, item.role not in (Role.PARAMETER, Role.OPTIMIZER_STATE), TOP
        )
    for index, constant in whole.constants.items():
        # A constant that is as long as the batch in both traces, such as a mask, is cut with it,
        # and one of the same shape in both is equal for all parts; any other exists only as a
        # whole.
        spec = findings.spec_by_shape(index) or WHOLE
        findings.set_spec(index, spec, True, TOP)
        if spec.kind is TimeKind.CONCATENATE and calls.numbers_examples(constant, spec.dim):
            findings.positions[index] = (True,)
    walk_items(findings, whole.body.items, TOP)
    return findings
