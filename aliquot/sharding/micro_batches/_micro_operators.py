"""Micro-batches through one operator: on each part, once beforehand, or once after the last
part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...graph import Literal, Op, Phase, has_effects
from . import _micro_calls as calls
from ._findings import LOOP, TOP, Findings
from ._micro_calls import EFFECT
from ._time_specs import (
    EQUAL,
    LATE,
    MEAN,
    WHOLE,
    Action,
    Conversion,
    Followed,
    TimeKind,
    TimeSpec,
    spec_by_shape,
)


def walk_operator(found: Findings, op: Op, depth: int) -> None:
    specs = [found.spec(i) for i in op.inputs]
    # A walk through a loop's body comes here again, with other specs than before.
    for k in range(len(specs)):
        found.conversions.pop((op.index, k), None)
    if op.index in found.own:
        return _alone(found, op, specs, depth)
    if has_effects(op):
        # Once for the whole batch, as in the plain step; in a loop that runs for each part it
        # cannot.
        if depth != TOP:
            found.violations[op.index] = EFFECT
        return _late(found, op, specs)
    kinds = {spec.kind for spec in specs}
    # Equal operands alone are not enough: an iota or a broadcast writes down the size of the batch.
    if kinds <= {TimeKind.EQUAL} and found.same_results(op):
        # What every part computes alike needs no rule.
        found.actions.pop(op.index, None)
        free = found.is_free(op.inputs)
        for out in op.outputs:
            found.set_spec(out, EQUAL, free, depth)
        return
    # Outside of loops all of the update waits, as its gradients are known only then.
    update = op.phase is Phase.UPDATE and found.has_backward
    if TimeKind.LATE in kinds or (update and depth == TOP and kinds - {TimeKind.EQUAL}):
        return _late(found, op, specs)
    reason = "it needs an array of which more than one dim is the batch's"
    if TimeKind.WHOLE not in kinds:
        outcome = found.follow(op, specs, depth)
        if isinstance(outcome, Followed):
            return _finish(found, op, outcome, depth)
        reason = outcome
    # What depends on no parameter can be computed on the whole batch, before the first part.
    free = found.is_free(op.inputs)
    if (
        free
        and depth != LOOP
        and all(isinstance(i, Literal) or found.outside[i] for i in op.inputs)
    ):
        _early(found, op)
    elif depth == TOP and not found.needs_parts(op, specs):
        _late(found, op, specs)
    elif TimeKind.WHOLE in kinds:
        found.blame(op, specs, TimeKind.WHOLE, reason)
        _alone(found, op, [EQUAL if s.kind is TimeKind.WHOLE else s for s in specs], depth)
    else:
        found.violations[op.index] = reason
        _alone(found, op, specs, depth)


def _finish(found: Findings, op: Op, outcome: Followed, depth: int) -> None:
    if outcome.action is Action.RUN:
        found.actions.pop(op.index, None)
    else:
        found.actions[op.index] = outcome.action
    for position, how in outcome.conversions:
        found.conversions[op.index, position] = how
    free = found.is_free(op.inputs)
    for out, spec in zip(op.outputs, outcome.results, strict=True):
        if out >= 0:
            found.set_spec(out, spec, free, depth)
    _note_positions(found, op, outcome)


def _early(found: Findings, op: Op) -> None:
    found.actions[op.index] = Action.EARLY
    # A value that the parts cannot slice is known as a whole alone.
    for out in op.outputs:
        if out >= 0:
            found.set_spec(
                out, spec_by_shape(*found.shapes_of(out), found.parts) or WHOLE, True, TOP
            )
            found.origin[out] = op.index


def _late(found: Findings, op: Op, specs: list[TimeSpec]) -> None:
    if found.needs_parts(op, specs):
        found.blame(
            op,
            specs,
            TimeKind.LATE,
            "it is not linear in a sum over the batch, and the examples need it",
        )
    found.actions[op.index] = Action.LATE
    # Where several late values meet, the walk goes back to the earliest, as all that follows
    # depends on it.
    begun = [found.origin[i] for i in op.inputs if isinstance(i, int) and found.specs[i] == LATE]
    for out in op.outputs:
        if out >= 0:
            found.set_spec(out, LATE, False, TOP)
            found.origin[out] = min(begun, default=op.index)


def _alone(found: Findings, op: Op, specs: Sequence[TimeSpec], depth: int) -> None:
    """Run on a part as if it were the whole batch."""
    found.actions.pop(op.index, None)
    for k, spec in enumerate(specs):
        if spec.kind is TimeKind.SUM:
            # A part's sum is scaled up to the batch, so that dividing it by the batch's size, as
            # the user's code does, gives the part's own mean.
            found.conversions[op.index, k] = Conversion.ESTIMATE
    for out in op.outputs:
        if out >= 0:
            seen = spec_by_shape(*found.shapes_of(out), found.parts) or MEAN
            found.set_spec(out, MEAN if seen == EQUAL else seen, False, depth)


def _note_positions(found: Findings, op: Op, outcome: Followed) -> None:
    out = op.outputs[0]
    if out < 0 or outcome.results[0].kind is not TimeKind.CONCATENATE:
        return
    known = [found.positions.get(i) if isinstance(i, int) else None for i in op.inputs]
    if outcome.action is Action.SHIFT:
        found.positions[out] = (True,)
    elif calls.keeps_positions(op) and known[0] == (True,):
        found.positions[out] = (True,)
    elif op.name == "lt" and known[0] == (True,) and isinstance(op.inputs[1], Literal):
        # JAX writes an index i as `select(i < 0, i + n, i)`; positions are never negative, so i is
        # left.
        if np.all(np.asarray(op.inputs[1].value) <= 0):
            found.always_false.add(out)
    elif op.name == "select_n" and op.inputs[0] in found.always_false and known[1] is not None:
        found.positions[out] = known[1]
    elif (
        op.name == "concatenate"
        and op.params["dimension"] == len(found.whole.values[out].shape) - 1
    ):
        flags: list[bool] = []
        for i, flags_of_operand in zip(op.inputs, known, strict=True):
            width = i.shape[-1] if isinstance(i, Literal) else found.whole.values[i].shape[-1]
            flags += [flags_of_operand == (True,)] * width
        if len(flags) > 1:
            found.positions[out] = tuple(flags)
