"""Structured operators on micro-batches: remat regions, loops and branches.

Bodies of loops are walked until the time specs of their carries are a fixed point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ...graph import Block, Call, Operand, OpId, Phase, any_effects, is_check, scan_counts
from ._findings import LOOP, REMAT, TOP, Findings
from ._micro_calls import NOT_LINEAR, first_op, phase_of
from ._micro_operators import walk_operator
from ._time_specs import LATE, WHOLE, TimeKind, TimeSpec, join


def walk_items(findings: Findings, items: Iterable[OpId | Call], depth: int) -> None:
    """Decide for each item how it runs on micro-batches, in program order."""
    for item in items:
        if isinstance(item, Call):
            _walk_call(findings, item, depth)
        else:
            walk_operator(findings, findings.whole.ops[item], depth)


def _walk_call(findings: Findings, call: Call, depth: int) -> None:
    """Decide whether a structured operator runs on each part, or once before or after all parts."""
    specs = [findings.spec(i) for i in call.inputs]
    phase = phase_of(call, findings.whole)
    if depth == TOP and _must_run_late(findings, call, specs, phase):
        return _run_late(findings, call, specs, phase)
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
                return _run_late(findings, call, specs, phase)
        if not violated or not free or depth == LOOP:
            for out in call.outputs:
                if out >= 0 and not free:
                    findings.free[out] = 0
            return
    # It depends on no parameter, so that it can run on the whole batch beforehand.
    findings.violations = violations
    _run_early(findings, call)


def _must_run_late(findings: Findings, call: Call, specs: Sequence[TimeSpec], phase: Phase) -> bool:
    """True if a call has effects, reads late values, or belongs to the update."""
    kinds = {spec.kind for spec in specs}
    update = phase is Phase.UPDATE and findings.has_backward
    effects = any_effects(call, findings.whole)
    return effects or TimeKind.LATE in kinds or (update and bool(kinds - {TimeKind.EQUAL}))


def _run_early(findings: Findings, call: Call) -> None:
    """Run a call once, on the whole batch, before the first part."""
    findings.early_calls.add(call)
    findings.drop_decisions(call)
    for out in call.outputs:
        if out >= 0:
            spec = findings.spec_by_shape(out) or WHOLE
            findings.set_spec(out, spec, True, TOP)
            findings.origin[out] = first_op(call, findings.whole).index


def _run_late(findings: Findings, call: Call, specs: Sequence[TimeSpec], phase: Phase) -> None:
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
        joined = [
            _join(findings, call, spec, findings.spec(out))
            for spec, out in zip(specs, results, strict=True)
        ]
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
