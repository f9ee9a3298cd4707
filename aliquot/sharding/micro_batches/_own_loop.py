"""Steps that loop over micro-batches themselves, without that loop.

The loop's body on the whole batch adds up the same rows. Cut into as many micro-batches as the loop
had turns, it is the same program, but gradients are summed over devices once, behind the last.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from ...core import CaptureError, InputError
from ...graph import (
    Call,
    Graph,
    Literal,
    Operand,
    OpId,
    OwnLoop,
    find_own_loop,
    in_one_turn,
    ops_inside,
    scan_counts,
)
from ._cut_state import TRACE_ERRORS
from ._micro_batches import MicroBatchPlan, plan_micro_batches
from ._resized import batch_size, calls_of
from ._time_specs import TimeKind
from ._traces import align, trace_of_size


class WithoutLoop(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A step without its own loop over micro-batches.

    Attributes:
        graph: the step, in which one turn takes the whole batch.
        turns: of the loop.
    """

    graph: Graph
    turns: int


# Plans, prices and the runtime ask for the same few steps.
@functools.lru_cache(maxsize=4)
def without_own_loop(graph: Graph, on_missing_rule: str = "infer") -> WithoutLoop | None:
    """A step without its own loop over micro-batches; None if it has none, or if the sums of the
    loop's turns are not those of one turn over the whole batch.
    """
    loop = find_own_loop(graph)
    if loop is None:
        return None
    size, turns = batch_size(graph), loop.turns
    # Steps on other batches are derived from two sizes. A loop of one row a turn may be another
    # program.
    other = 2 * turns if size != 2 * turns else 3 * turns
    try:
        small = in_one_turn(*_two_sizes(graph, other, turns)).graph
        extract = in_one_turn(*_two_sizes(graph, size, turns))
        calling = replace(graph.calling, traces={other: small}, own_traces={}, cut_state={})
        whole = replace(extract.graph, calling=calling)
        plan = plan_micro_batches(whole, turns, on_missing_rule=on_missing_rule)
    except (CaptureError, InputError, *TRACE_ERRORS):
        return None
    place = {old: new for new, old in enumerate(extract.values)}
    are_sums = all(plan.specs[place[value]].kind is TimeKind.SUM for value in loop.added)
    if not are_sums or not _are_turns(plan, loop, extract.ops):
        return None
    return WithoutLoop(graph=whole, turns=turns)


def _are_turns(plan: MicroBatchPlan, loop: OwnLoop, ops: Sequence[OpId]) -> bool:
    """True if each micro-batch runs what a turn of the loop runs on the same rows: nothing in it is
    made for the whole batch, counts once for all parts, or knows the place of a row in the batch,
    as random numbers for all rows and means of the batch do.

    Args:
        ops: for each operator of the step without its loop, that of the step with it.
    """
    of_turns = set(ops_inside(loop.call)) - loop.additions
    otherwise = plan.actions.keys() | {op for op, _ in plan.conversions}
    for call in plan.early_calls | plan.late_calls:
        otherwise |= set(ops_inside(call))
    # Blocks of rows would be paired with others than in a turn.
    in_rows = all(spec.blocks <= 1 for spec in plan.specs)
    if not in_rows or any(ops[op] in of_turns for op in otherwise):
        return False
    for call in calls_of(plan.whole.body):
        if not of_turns.isdisjoint(ops[op] for op in ops_inside(call)):
            for operand, target in _becomes(call):
                if _counts_once(plan, operand, target):
                    return False
    return True


def _becomes(call: Call) -> Iterator[tuple[Operand, Operand]]:
    """What the carries of a loop, and the results of a branch, are made from."""
    *_, body = call.blocks
    if call.kind == "scan":
        first, count = scan_counts(call.eqn.params)
        carries = body.inputs[first : first + count]
        yield from zip(call.inputs[first : first + count], carries, strict=True)
        yield from zip(body.outputs[:count], carries, strict=True)
    elif call.kind == "while":
        count = len(call.outputs)
        yield from zip(call.inputs[-count:], body.inputs[-count:], strict=True)
        yield from zip(body.outputs, body.inputs[-count:], strict=True)
    elif call.kind == "cond":
        for block in call.blocks:
            yield from zip(block.outputs, call.outputs, strict=True)


def _counts_once(plan: MicroBatchPlan, operand: Operand, target: Operand) -> bool:
    """True if a value that is equal in all micro-batches, and not zero, becomes a summand, so that
    it counts once for all of them.
    """
    if not isinstance(target, int) or target < 0 or plan.specs[target].kind is not TimeKind.SUM:
        return False
    maker = plan.whole.makers.get(operand) if isinstance(operand, int) else None
    if maker is not None and maker.name == "broadcast_in_dim":
        operand = maker.inputs[0]
    if isinstance(operand, Literal):
        return bool(operand.value != 0)
    return plan.specs[operand].kind is TimeKind.EQUAL


def _two_sizes(graph: Graph, size: int, turns: int) -> Iterator[Graph]:
    """The step on `size` examples, and with as many in each turn of its loop."""
    one = trace_of_size(graph, size)
    yield one
    part, _ = align(one, trace_of_size(graph, size * turns))
    yield part
