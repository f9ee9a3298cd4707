"""Micro-batches through structured operators: remat regions, and loops until nothing changes any
more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...graph import Block, Call, Operand, OpId, Phase, any_effects, is_check, scan_counts
from ._findings import LOOP, REMAT, TOP, Findings
from ._micro_calls import first_op, ops_of, phase_of
from ._micro_operators import walk_operator
from ._time_specs import LATE, WHOLE, TimeKind, TimeSpec, join, spec_by_shape, split_at


def walk_items(found: Findings, items: Iterable[OpId | Call], depth: int) -> None:
    for item in items:
        if isinstance(item, Call):
            _walk_call(found, item, depth)
        else:
            walk_operator(found, found.whole.ops[item], depth)


def _walk_call(found: Findings, call: Call, depth: int) -> None:
    specs = [found.spec(i) for i in call.inputs]
    kinds = {spec.kind for spec in specs}
    phase = phase_of(call, found.whole)
    update = phase is Phase.UPDATE and found.has_backward
    effects = any_effects(call, found.whole) and found.own.isdisjoint(ops_of(call))
    late = effects or TimeKind.LATE in kinds or (update and kinds - {TimeKind.EQUAL})
    if depth == TOP and late:
        return _late_call(found, call, specs, phase)
    free = found.is_free(call.inputs)
    before, conflicts = dict(found.violations), dict(found.conflicts)
    walk = {"remat": _walk_remat, "scan": _walk_scan, "while": _walk_while, "cond": _walk_cond}[
        call.kind
    ]
    if TimeKind.WHOLE not in kinds:
        walk(found, call, specs, depth)
        refused = len(found.violations) > len(before) or len(found.conflicts) > len(conflicts)
        # What was found inside is kept only if the call can run on parts; otherwise all of it runs
        # once, after the last.
        if refused and not free and depth == TOP and not found.call_needs_parts(call, specs, phase):
            found.violations, found.conflicts = before, conflicts
            found.forget(call)
            return _late_call(found, call, specs, phase)
        if len(found.violations) == len(before) or not free or depth == LOOP:
            for out in call.outputs:
                if out >= 0 and not free:
                    found.free[out] = 0
            return
    found.violations = before
    found.early_calls.add(call)
    found.forget(call)
    for out in call.outputs:
        if out >= 0:
            found.set_spec(
                out, spec_by_shape(*found.shapes_of(out), found.parts) or WHOLE, True, TOP
            )
            found.origin[out] = first_op(call, found.whole).index


def _late_call(found: Findings, call: Call, specs: Sequence[TimeSpec], phase: Phase) -> None:
    first = first_op(call, found.whole)
    if phase is not Phase.UPDATE and any(spec.kind is TimeKind.CONCATENATE for spec in specs):
        for operand in call.inputs:
            if isinstance(operand, int) and found.specs[operand] == LATE:
                reason = "it is not linear in a sum over the batch, and the examples need it"
                found.conflicts.setdefault(found.origin[operand], reason)
    found.late_calls.add(call)
    for out in call.outputs:
        if out >= 0:
            found.set_spec(out, LATE, False, TOP)
            found.origin[out] = first.index


def _walk_remat(found: Findings, call: Call, specs: Sequence[TimeSpec], depth: int) -> None:
    (block,) = call.blocks
    walk_items(found, block.items, max(depth, REMAT))
    for out, inner in zip(call.outputs, block.outputs, strict=True):
        if out >= 0 and out != inner:
            found.set_spec(out, found.spec(inner), found.is_free((inner,)), depth)


def _walk_scan(found: Findings, call: Call, specs: Sequence[TimeSpec], depth: int) -> None:
    (block,) = call.blocks
    num_consts, num_carry = scan_counts(call.eqn.params)
    split = num_consts + num_carry
    free = found.is_free(call.inputs)
    for outer, inner in zip(specs[split:], block.inputs[split:], strict=True):
        assert isinstance(inner, int)
        # The dim that the loop runs over is gone inside its body.
        spec = split_at(outer.dim - 1) if outer.kind is TimeKind.CONCATENATE else outer
        # Turns of such a loop follow one another, and parts of the batch would each begin anew.
        if outer == split_at(0):
            found.violate(call, "it loops over the examples of a batch")
        found.set_spec(inner, spec, free, LOOP)
    _walk_until_settled(
        found,
        call,
        block,
        block.inputs[num_consts:split],
        specs[num_consts:split],
        block.outputs[:num_carry],
    )
    for position, (out, inner) in enumerate(zip(call.outputs, block.outputs, strict=True)):
        if position < num_carry:
            carried = block.inputs[num_consts + position]
            found.set_spec(out, found.spec(carried), free, depth)
        else:
            spec = found.spec(inner)
            found.set_spec(
                out,
                # Outside the body the stacked dim comes first again.
                split_at(spec.dim + 1) if spec.kind is TimeKind.CONCATENATE else spec,
                free,
                depth,
            )


def _walk_while(found: Findings, call: Call, specs: Sequence[TimeSpec], depth: int) -> None:
    condition, block = call.blocks
    num_cond, num_body = call.eqn.params["cond_nconsts"], call.eqn.params["body_nconsts"]
    carried = block.inputs[num_body:]
    _walk_until_settled(found, call, block, carried, specs[num_cond + num_body :], block.outputs)
    # The condition is looked at last, once what the loop carries no longer changes.
    walk_items(found, condition.items, LOOP)
    ends = found.spec(condition.outputs[0])
    # Under `vmap` each example has an end of its own, and keeps what it has until the others are
    # done.
    alone = ends.kind is TimeKind.CONCATENATE and all(found.spec(c) == ends for c in carried)
    if ends.kind is not TimeKind.EQUAL and not alone:
        found.violate(call, "it ends when the batch says so")
    free = found.is_free(call.inputs)
    for out, inner in zip(call.outputs, carried, strict=True):
        found.set_spec(out, found.spec(inner), free, depth)


def _walk_cond(found: Findings, call: Call, specs: Sequence[TimeSpec], depth: int) -> None:
    # A check finds what any part finds, so each part may check it.
    checks = specs[0].kind in (TimeKind.OR, TimeKind.MAX) and is_check(call.eqn)
    if specs[0].kind is not TimeKind.EQUAL and not checks:
        found.violate(call, "it branches on a value of the batch")
    for block in call.blocks:
        walk_items(found, block.items, LOOP)
    free = found.is_free(call.inputs)
    for position, out in enumerate(call.outputs):
        joined, *others = (found.spec(block.outputs[position]) for block in call.blocks)
        for other in others:
            joined = _join(found, call, joined, other)
        found.set_spec(out, joined, free, depth)


def _walk_until_settled(
    found: Findings,
    call: Call,
    block: Block,
    carried: Sequence[Operand],
    init: Sequence[TimeSpec],
    results: Sequence[Operand],
) -> None:
    """Walk through a body until what enters it is what leaves it."""
    free = found.is_free(call.inputs)
    specs = list(init)
    # Each carried value can change twice: from equal to a sum, and from that to a mean.
    for _ in range(2 * len(specs) + 2):
        for inner, spec in zip(carried, specs, strict=True):
            assert isinstance(inner, int)
            found.set_spec(inner, spec, free, LOOP)
        before = dict(found.violations)
        walk_items(found, block.items, LOOP)
        joined = [
            _join(found, call, spec, found.spec(out))
            for spec, out in zip(specs, results, strict=True)
        ]
        if joined == specs:
            return
        # What a round found under specs that did not hold is forgotten.
        specs, found.violations = joined, before


def _join(found: Findings, call: Call, a: TimeSpec, b: TimeSpec) -> TimeSpec:
    joined = join(a, b)
    if joined is None:
        found.violate(call, "it mixes arrays that micro-batches compute in different ways")
    return joined or a
