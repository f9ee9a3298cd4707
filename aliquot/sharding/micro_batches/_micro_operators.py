"""Single operators on micro-batches: run on each part, once before the first, or once after the
last.
"""

from __future__ import annotations

import numpy as np

from ...graph import Literal, Op, Phase, has_effects
from . import _micro_calls as calls
from ._findings import LOOP, TOP, Findings
from ._micro_calls import EFFECT, NOT_LINEAR
from ._time_specs import (
    EQUAL,
    LATE,
    WHOLE,
    Action,
    Followed,
    TimeKind,
    TimeSpec,
)


def walk_operator(findings: Findings, op: Op, depth: int) -> None:
    """Decide whether an operator runs on each part, or once before or after all parts."""
    specs = [findings.spec(i) for i in op.inputs]
    # Bodies of loops are walked several times, with other specs each time.
    for k in range(len(specs)):
        findings.conversions.pop((op.index, k), None)
    if has_effects(op):
        # Once for the whole batch, as in the plain step; in a loop that runs for each part it
        # cannot.
        if depth != TOP:
            findings.violations[op.index] = EFFECT
        return _run_late(findings, op, specs)
    kinds = {spec.kind for spec in specs}
    # Equal operands alone are not enough: an iota or a broadcast writes down the size of the batch.
    if kinds <= {TimeKind.EQUAL} and findings.same_results(op):
        # An operator that every part computes alike needs no rule.
        findings.actions.pop(op.index, None)
        free = findings.is_free(op.inputs)
        for out in op.outputs:
            findings.set_spec(out, EQUAL, free, depth)
        return
    # Outside of loops all of the update runs late, because its gradients are known only after the
    # last part.
    update = op.phase is Phase.UPDATE and findings.has_backward
    if TimeKind.LATE in kinds or (update and depth == TOP and kinds - {TimeKind.EQUAL}):
        return _run_late(findings, op, specs)
    reason = "it needs an array of which more than one dim is the batch's"
    if TimeKind.WHOLE not in kinds:
        outcome = findings.follow(op, specs, depth)
        if isinstance(outcome, Followed):
            return _run_on_part(findings, op, outcome, depth)
        reason = outcome
    # Operators that depend on no parameter can run on the whole batch, before the first part.
    free = findings.is_free(op.inputs)
    if (
        free
        and depth != LOOP
        and all(isinstance(i, Literal) or findings.outside_loops[i] for i in op.inputs)
    ):
        _run_early(findings, op)
    elif depth == TOP and not findings.needs_parts(op, specs):
        _run_late(findings, op, specs)
    elif TimeKind.WHOLE in kinds:
        findings.note_conflict(op, specs, TimeKind.WHOLE, reason)
        _go_on(findings, op, depth)
    else:
        findings.note_refused(op, specs, reason)
        _go_on(findings, op, depth)


def _run_on_part(findings: Findings, op: Op, outcome: Followed, depth: int) -> None:
    """Run an operator on each part, as `follow` says."""
    if outcome.action is Action.RUN:
        findings.actions.pop(op.index, None)
    else:
        findings.actions[op.index] = outcome.action
    for position, how in outcome.conversions:
        findings.conversions[op.index, position] = how
    free = findings.is_free(op.inputs)
    for out, spec in zip(op.outputs, outcome.results, strict=True):
        if out >= 0:
            findings.set_spec(out, spec, free, depth)
    _note_positions(findings, op, outcome)


def _run_early(findings: Findings, op: Op) -> None:
    """Run an operator once, on the whole batch, before the first part."""
    findings.actions[op.index] = Action.EARLY
    # A value that cannot be sliced for the parts exists only as a whole.
    for out in op.outputs:
        if out >= 0:
            findings.set_spec(out, findings.spec_by_shape(out) or WHOLE, True, TOP)
            findings.origin[out] = op.index


def _run_late(findings: Findings, op: Op, specs: list[TimeSpec]) -> None:
    """Run an operator once, on combined values, after the last part."""
    if findings.needs_parts(op, specs):
        findings.note_conflict(op, specs, TimeKind.LATE, NOT_LINEAR)
    findings.actions[op.index] = Action.LATE
    # Where several late values meet, the walk goes back to the earliest, as all that follows
    # depends on it.
    begun = [
        findings.origin[i] for i in op.inputs if isinstance(i, int) and findings.specs[i] == LATE
    ]
    for out in op.outputs:
        if out >= 0:
            findings.set_spec(out, LATE, False, TOP)
            findings.origin[out] = min(begun, default=op.index)


def _go_on(findings: Findings, op: Op, depth: int) -> None:
    """Go on behind an operator that is refused, so that all such operators are found."""
    findings.actions.pop(op.index, None)
    for out in op.outputs:
        if out >= 0:
            findings.set_spec(out, findings.spec_by_shape(out) or EQUAL, False, depth)


def _note_positions(findings: Findings, op: Op, outcome: Followed) -> None:
    """Note index arrays that hold each example's own position: lookups by them stay on a part."""
    out = op.outputs[0]
    if out < 0 or outcome.results[0].kind is not TimeKind.CONCATENATE:
        return
    known = [findings.positions.get(i) if isinstance(i, int) else None for i in op.inputs]
    if outcome.action is Action.SHIFT:
        findings.positions[out] = (True,)
    elif calls.keeps_positions(op) and known[0] == (True,):
        findings.positions[out] = (True,)
    elif op.name == "lt" and known[0] == (True,) and isinstance(op.inputs[1], Literal):
        # JAX writes an index i as `select(i < 0, i + n, i)`. Positions are never negative, so that
        # this is i.
        if np.all(np.asarray(op.inputs[1].value) <= 0):
            findings.always_false.add(out)
    elif op.name == "select_n" and op.inputs[0] in findings.always_false and known[1] is not None:
        findings.positions[out] = known[1]
    elif (
        op.name == "concatenate"
        and op.params["dimension"] == len(findings.whole.values[out].shape) - 1
    ):
        flags: list[bool] = []
        for i, flags_of_operand in zip(op.inputs, known, strict=True):
            width = i.shape[-1] if isinstance(i, Literal) else findings.whole.values[i].shape[-1]
            flags += [flags_of_operand == (True,)] * width
        if len(flags) > 1:
            findings.positions[out] = tuple(flags)
