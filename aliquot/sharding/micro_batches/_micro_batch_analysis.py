"""Analysis of how a step runs on micro-batches: a walk through its items in program order."""

from __future__ import annotations

from ...graph import Graph, Role
from . import _micro_calls as calls
from ._findings import TOP, Findings
from ._micro_calls import standing_for
from ._micro_structured import walk_items
from ._time_specs import EQUAL, WHOLE, TimeKind, spec_by_shape, split_at


def analyse(
    whole: Graph, part: Graph, parts: int, *, on_missing_rule: str, settle: bool
) -> Findings:
    """Findings about how a step runs on micro-batches.

    Args:
        whole, part: the step on its whole batch, and on one of so many `parts`.
        on_missing_rule: see `dim_rule`.
        settle: resolve conflicts by applying their operators to each micro-batch separately;
            otherwise conflicts are noted.
    """
    findings = Findings(whole=whole, part=part, parts=parts, on_missing_rule=on_missing_rule)
    for item in whole.inputs:
        spec = split_at(0) if item.role is Role.BATCH else EQUAL
        # Other state, such as a step counter or a random key, counts as free of parameters.
        findings.set_spec(
            item.value, spec, item.role not in (Role.PARAMETER, Role.OPTIMIZER_STATE), TOP
        )
    for index, constant in whole.constants.items():
        # A constant that is as long as the batch in both traces, such as a mask, is cut with it,
        # and one of the same shape in both is equal for all parts; any other exists only as a
        # whole.
        spec = spec_by_shape(*findings.shapes_of(index), parts) or WHOLE
        findings.set_spec(index, spec, True, TOP)
        if spec.kind is TimeKind.CONCATENATE and calls.numbers_examples(constant, spec.dim):
            findings.positions[index] = (True,)
    if settle:
        _settle(findings)
    else:
        walk_items(findings, whole.body.items, TOP)
    return findings


def _settle(findings: Findings) -> None:
    """Walk through the items; at a conflict go back to the operator in which it began, apply that
    to each micro-batch separately, and walk on from there.
    """
    items = findings.whole.body.items
    # Conflicts may name operators inside an item.
    place = {k: n for n, item in enumerate(items) for k in standing_for(item, findings.whole)}
    at = 0
    while at < len(items):
        walk_items(findings, items[at : at + 1], TOP)
        at += 1
        if findings.conflicts:
            first = min(place[k] for k in findings.conflicts)
            # `per_part` only grows, so that the walk comes to an end.
            findings.per_part |= findings.conflicts.keys()
            findings.conflicts.clear()
            for item in items[first:at]:
                findings.forget(item)
            at = first
