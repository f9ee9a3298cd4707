"""Analysis of how a step runs on micro-batches: a walk through its items in program order.

A single operator runs on each part, once before the first, or once after the last. Remat regions,
loops and branches are walked inside; bodies of loops until the time specs of their carries are a
fixed point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ...graph import (
    Block,
    Call,
    Graph,
    Literal,
    Op,
    Operand,
    OpId,
    Phase,
    Role,
    any_effects,
    has_effects,
    is_check,
    scan_counts,
)
from . import _micro_calls as calls
from ._findings import LOOP, REMAT, TOP, Findings
from ._micro_calls import EFFECT, NOT_LINEAR, first_op, phase_of
from ._time_specs import (
    EQUAL,
    LATE,
    WHOLE,
    Action,
    Followed,
    TimeKind,
    TimeSpec,
    join,
    split_at,
)


def walk_operator(findings: Findings, op: Op, depth: int) -> None:
    """Decide whether an operator runs on each part, or once before or after all parts."""
    specs = list(map(findings.spec, op.inputs))
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
    begun = []
    for i in op.inputs:
        if isinstance(i, int) and findings.specs[i] == LATE:
            begun.append(findings.origin[i])
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


def walk_items(findings: Findings, items: Iterable[OpId | Call], depth: int) -> None:
    """Decide for each item how it runs on micro-batches, in program order."""
    for item in items:
        if isinstance(item, Call):
            _walk_call(findings, item, depth)
        else:
            walk_operator(findings, findings.whole.ops[item], depth)


def _walk_call(findings: Findings, call: Call, depth: int) -> None:
    """Decide whether a structured operator runs on each part, or once before or after all parts."""
    specs = list(map(findings.spec, call.inputs))
    phase = phase_of(call, findings.whole)
    # It has effects, reads late values, or belongs to the update.
    kinds = {spec.kind for spec in specs}
    update = phase is Phase.UPDATE and findings.has_backward
    is_late = TimeKind.LATE in kinds or (update and bool(kinds - {TimeKind.EQUAL}))
    if depth == TOP and (is_late or any_effects(call, findings.whole)):
        return _call_late(findings, call, specs, phase)
    free = findings.is_free(call.inputs)
    violations, conflicts = dict(findings.violations), dict(findings.conflicts)
    if all(spec.kind is not TimeKind.WHOLE for spec in specs):
        _WALKS[call.kind](findings, call, specs, depth)
        violated = len(findings.violations) > len(violations)
        refused = violated or len(findings.conflicts) > len(conflicts)
        if refused and not free and depth == TOP:
            if not findings.call_needs_parts(call, specs, phase):
                # It runs once, after the last part, so what its body met on parts does not matter.
                findings.violations, findings.conflicts = violations, conflicts
                findings.drop_decisions(call)
                return _call_late(findings, call, specs, phase)
        if not violated or not free or depth == LOOP:
            for out in call.outputs:
                if out >= 0 and not free:
                    findings.free[out] = 0
            return
    # It depends on no parameter, so that it can run on the whole batch beforehand.
    findings.violations = violations
    findings.early_calls.add(call)
    findings.drop_decisions(call)
    for out in call.outputs:
        if out >= 0:
            findings.set_spec(out, findings.spec_by_shape(out) or WHOLE, True, TOP)
            findings.origin[out] = first_op(call, findings.whole).index


def _call_late(findings: Findings, call: Call, specs: Sequence[TimeSpec], phase: Phase) -> None:
    """Run a call once, on combined values, after the last part."""
    first = first_op(call, findings.whole)
    if phase is not Phase.UPDATE and any(spec.kind is TimeKind.CONCATENATE for spec in specs):
        for operand in call.inputs:
            if isinstance(operand, int) and findings.specs[operand] == LATE:
                findings.conflicts.setdefault(findings.origin[operand], NOT_LINEAR)
    findings.late_calls.add(call)
    for out in call.outputs:
        if out >= 0:
            findings.set_spec(out, LATE, False, TOP)
            findings.origin[out] = first.index


def _walk_remat(findings: Findings, call: Call, specs: Sequence[TimeSpec], depth: int) -> None:
    (block,) = call.blocks
    walk_items(findings, block.items, max(depth, REMAT))
    for out, inner in zip(call.outputs, block.outputs, strict=True):
        if out >= 0 and out != inner:
            findings.set_spec(out, findings.spec(inner), findings.is_free((inner,)), depth)


def _walk_scan(findings: Findings, call: Call, specs: Sequence[TimeSpec], depth: int) -> None:
    (block,) = call.blocks
    num_consts, num_carry = scan_counts(call.eqn.params)
    split = num_consts + num_carry
    free = findings.is_free(call.inputs)
    for outer, inner in zip(specs[split:], block.inputs[split:], strict=True):
        assert isinstance(inner, int)
        # The dim that the loop runs over is gone inside its body.
        spec = outer.at(outer.dim - 1) if outer.kind is TimeKind.CONCATENATE else outer
        # Each iteration continues from the example before, whereas each part would begin anew.
        if outer.kind is TimeKind.CONCATENATE and outer.dim == 0:
            findings.note_violation(call, "it loops over the examples of a batch")
        findings.set_spec(inner, spec, free, LOOP)
    _walk_until_settled(
        findings,
        call,
        block,
        block.inputs[num_consts:split],
        specs[num_consts:split],
        block.outputs[:num_carry],
    )
    for position, (out, inner) in enumerate(zip(call.outputs, block.outputs, strict=True)):
        if position < num_carry:
            carried = block.inputs[num_consts + position]
            findings.set_spec(out, findings.spec(carried), free, depth)
        else:
            spec = findings.spec(inner)
            findings.set_spec(
                out,
                # Outside the body the stacked dim comes first again.
                spec.at(spec.dim + 1) if spec.kind is TimeKind.CONCATENATE else spec,
                free,
                depth,
            )


def _walk_while(findings: Findings, call: Call, specs: Sequence[TimeSpec], depth: int) -> None:
    condition, block = call.blocks
    num_cond, num_body = call.eqn.params["cond_nconsts"], call.eqn.params["body_nconsts"]
    carried = block.inputs[num_body:]
    _walk_until_settled(findings, call, block, carried, specs[num_cond + num_body :], block.outputs)
    # Last, once the specs of the carries no longer change.
    walk_items(findings, condition.items, LOOP)
    ends = findings.spec(condition.outputs[0])
    # Under `vmap` each example ends by itself, and keeps its carries until the others are done.
    alone = ends.kind is TimeKind.CONCATENATE and all(
        join(findings.spec(c), ends) is not None for c in carried
    )
    if ends.kind is not TimeKind.EQUAL and not alone:
        findings.note_violation(call, "it ends when the batch says so")
    free = findings.is_free(call.inputs)
    for out, inner in zip(call.outputs, carried, strict=True):
        findings.set_spec(out, findings.spec(inner), free, depth)


def _walk_cond(findings: Findings, call: Call, specs: Sequence[TimeSpec], depth: int) -> None:
    # Each part may check its own examples: the check fails if that of any part does.
    checks = specs[0].kind in (TimeKind.OR, TimeKind.MAX) and is_check(call.eqn)
    if specs[0].kind is not TimeKind.EQUAL and not checks:
        findings.note_violation(call, "it branches on a value of the batch")
    for block in call.blocks:
        walk_items(findings, block.items, LOOP)
    free = findings.is_free(call.inputs)
    for position, out in enumerate(call.outputs):
        joined, *others = (findings.spec(block.outputs[position]) for block in call.blocks)
        for other in others:
            joined = _join(findings, call, joined, other)
        findings.set_spec(out, joined, free, depth)


def _walk_until_settled(
    findings: Findings,
    call: Call,
    block: Block,
    carried: Sequence[Operand],
    init: Sequence[TimeSpec],
    results: Sequence[Operand],
) -> None:
    """Walk through a body until the specs of its carries are a fixed point.

    Args:
        carried, results: the body's operands from the iteration before, and its results for the
            next.
        init: specs of the carries in the first iteration.
    """
    free = findings.is_free(call.inputs)
    specs = list(init)
    # Each carried value can change once: from equal to a sum, or from any blocks to so many.
    for _ in range(len(specs) + 2):
        for inner, spec in zip(carried, specs, strict=True):
            assert isinstance(inner, int)
            findings.set_spec(inner, spec, free, LOOP)
        before = dict(findings.violations)
        walk_items(findings, block.items, LOOP)
        joined = []
        for spec, out in zip(specs, results, strict=True):
            joined.append(_join(findings, call, spec, findings.spec(out)))
        if joined == specs:
            return
        # Violations of a walk whose specs did not hold are dropped.
        specs, findings.violations = joined, before


def _join(findings: Findings, call: Call, a: TimeSpec, b: TimeSpec) -> TimeSpec:
    joined = join(a, b)
    if joined is None:
        findings.note_violation(
            call, "it mixes arrays that micro-batches compute in different ways"
        )
    return joined or a


_WALKS: Mapping[str, Callable[[Findings, Call, Sequence[TimeSpec], int], None]] = {
    "remat": _walk_remat,
    "scan": _walk_scan,
    "while": _walk_while,
    "cond": _walk_cond,
}


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
        # Other state, such as a step counter or a random key, counts as free of parameters, and so
        # do lists that no step changes, such as weights of classes: sums that they make with the
        # batch are cheap to make early.
        is_list = item.output is None and len(whole.values[item.value].shape) < 2
        trains = item.role in (Role.PARAMETER, Role.OPTIMIZER_STATE)
        findings.set_spec(item.value, spec, is_list or not trains, TOP)
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
