"""The walk of `_micro_batches` through a step: every operator in order, loop bodies until nothing
changes any more.
"""

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
    """Find out how a step runs on micro-batches.

    Args:
        whole, part: the step on its whole batch, and on one of so many `parts`.
        on_missing_rule: see `dim_rule`.
        settle: where operators conflict, apply each to every micro-batch separately and go on; else
            note all conflicts.
    """
    found = Findings(whole=whole, part=part, parts=parts, on_missing_rule=on_missing_rule)
    for item in whole.inputs:
        spec = split_at(0) if item.role is Role.BATCH else EQUAL
        # State that is no parameter, such as a step counter or a key, does not make what it enters
        # depend on parameters.
        found.set_spec(
            item.value, spec, item.role not in (Role.PARAMETER, Role.OPTIMIZER_STATE), TOP
        )
    for index, constant in whole.constants.items():
        # A constant as long as the batch, such as a mask, is cut with it; of any other size it is
        # each part's own.
        spec = spec_by_shape(*found.shapes_of(index), parts) or WHOLE
        found.set_spec(index, spec, True, TOP)
        if spec.kind is TimeKind.CONCATENATE and calls.numbers_examples(constant, spec.dim):
            found.positions[index] = (True,)
    if settle:
        _settle(found)
    else:
        walk_items(found, whole.body.items, TOP)
    return found


def _settle(found: Findings) -> None:
    """Walk until a conflict, back to where it began, and on from there; what comes before stays as
    it is.
    """
    items = found.whole.body.items
    # An item is found by every operator that a conflict may name, also by those inside it.
    place = {k: n for n, item in enumerate(items) for k in standing_for(item, found.whole)}
    at = 0
    while at < len(items):
        walk_items(found, items[at : at + 1], TOP)
        at += 1
        if found.conflicts:
            first = min(place[k] for k in found.conflicts)
            # What was decided stays decided: `own` only grows, so that the walk comes to an end.
            found.own |= found.conflicts.keys()
            found.conflicts.clear()
            for item in items[first:at]:
                found.undo(item)
            at = first
