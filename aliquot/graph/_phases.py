"""Phases of operators: forward, backward, update or prologue.

Dataflow decides. Only where differentiation began is read from the text of the name stack (`jvp(`
in the forward, `transpose(` in the backward pass). This text is no API of JAX, so a test pins it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ._types import Literal, Operand, Phase, ValueId


class Draft(NamedTuple):
    """An operator before its phase is known; the fields are those of `Op`."""

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[ValueId, ...]
    params: Any
    scope: str
    trips: int
    eqn: Any
    region: int


def label(scope: str) -> Phase | None:
    """The phase that the text of a name stack states, or None."""
    if "transpose(" in scope:
        return Phase.BACKWARD
    return Phase.FORWARD if "jvp(" in scope else None


def assign_phases(
    drafts: Sequence[Draft],
    num_values: int,
    decided: Mapping[ValueId, Sequence[ValueId]] | None = None,
) -> list[Phase]:
    """The phase of each operator.

    Args:
        decided: for each value that decides when a loop ends, the results of the loop: the value
            counts as feeding what they feed.

    An operator without a label that depends on the backward pass is update; one that depends only
    on the forward pass is forward (metrics, running statistics); one that depends on neither is
    prologue if it feeds either, else update. If no operator has a label, all are forward.
    """
    known: dict[str, Phase | None] = {}
    labels = []
    for draft in drafts:
        if draft.scope not in known:
            known[draft.scope] = label(draft.scope)
        labels.append(known[draft.scope])
    if not any(labels):
        return [Phase.FORWARD] * len(drafts)
    phases = _by_dataflow(drafts, labels, num_values)
    feeds = bytearray(num_values)
    decided = decided or {}
    for position in range(len(drafts) - 1, -1, -1):
        draft, phase = drafts[position], phases[position]
        wanted = phase is Phase.FORWARD or phase is Phase.BACKWARD
        for o in draft.outputs:
            wanted = wanted or (
                o >= 0 and (feeds[o] == 1 or any(feeds[r] for r in decided.get(o, ())))
            )
        if phase is None:
            phases[position] = phase = Phase.PROLOGUE if wanted else Phase.UPDATE
        if wanted and phase is not Phase.UPDATE:
            for i in draft.inputs:
                if type(i) is not Literal:
                    feeds[i] = 1
    return [phase for phase in phases if phase is not None]


def _by_dataflow(
    drafts: Sequence[Draft], labels: Sequence[Phase | None], num_values: int
) -> list[Phase | None]:
    """Labels, completed for all operators that depend on a labelled one."""
    after_forward = bytearray(num_values)
    after_backward = bytearray(num_values)
    phases: list[Phase | None] = []
    for draft, known in zip(drafts, labels, strict=True):
        backward, forward = known is Phase.BACKWARD, known is Phase.FORWARD
        for i in draft.inputs:
            if type(i) is not Literal:
                backward = backward or after_backward[i] == 1
                forward = forward or after_forward[i] == 1
        if known is None and backward:
            known = Phase.UPDATE
        elif known is None and forward:
            known = Phase.FORWARD
        phases.append(known)
        if backward or forward:
            for out in draft.outputs:
                if out >= 0:
                    after_backward[out], after_forward[out] = backward, forward
    return phases
