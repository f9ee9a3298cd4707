"""Arrays that are written to memory, and their live ranges.

A compiler fuses chains of element-wise operators and stores only arrays that cross the border of a
fusion. An array is stored if a product makes or reads it, if another phase reads it, if a reduction
and another operator both read it (a fusion cannot hold both sides of a reduction), or if the step
returns it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...cluster import Target
from ...graph import Graph, Op, Operand, OpId, Phase, traits_of
from ...sharding import Cuts, rearranges, taken_by_regions
from ._host import copy_spans, is_on_host, written_in_place
from ._library import only_convolved

# Links whose result is an array that another operator made, or a part of one.
_VIEWS = ("scan_slice", "tie")
_SLOW = ("tanh",)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Storage:
    """Stored arrays and their live ranges.

    Attributes:
        stored: for each value class, whether it reaches memory.
        writes: for each value class, how often memory is written each time that it is made; see
            `_count_writes`.
        made_at, last_use: live range of each value: the operator from which it is alive, and the
            last that needs it (-1 if none does).
        late_run, late_use: position of each operator, and end of each value's live range, if
            everything that only the update needs is deferred.
    """

    stored: tuple[bool, ...]
    writes: tuple[int, ...]
    made_at: NDArray[np.int64]
    last_use: NDArray[np.int64]
    late_run: NDArray[np.int64]
    late_use: NDArray[np.int64]


def find_storage(cuts: Cuts, target: Target, *, sums_gradients: bool = False) -> Storage:
    """Storage of all arrays of a cut graph, as a target's compiler assigns it.

    Args:
        sums_gradients: whether arrays that enter the update are summed over micro-batches first,
            and stored for that.
    """
    stored = stored_by_fusion(cuts)
    if target.repeats_cheap_work:
        turned = only_convolved(cuts) if target.library_convolves else [False] * len(cuts.producer)
        stored = _stored_where_cheaper(cuts, sums_gradients, turned, target)
    spans = list(copy_spans(cuts, target))
    for span in spans:
        # Outside of loops, a kernel may read an array in host memory without a copy of it.
        if not span.to_host and span.begin < span.end:
            stored[int(cuts.folding.value_class[span.result])] = True
    in_place = written_in_place(cuts, spans, stored) if spans else {}
    for value_class in in_place:
        stored[value_class] = False
    in_order = _latest(cuts, target)
    late = _run_late(cuts) if target.delays_gradients else in_order
    made_at = _made_at(cuts, target.zeroes_early)
    last_use, late_use = _last_use(cuts, stored, in_order), _last_use(cuts, stored, late)
    for span in spans:
        if span.to_host:
            last_use[span.source] = max(last_use[span.source], span.end)
            late_use[span.source] = max(late_use[span.source], span.end)
        else:
            made_at[span.result] = min(made_at[span.result], span.begin)
    for operand in in_place.values():
        members = list(cuts.folding.value_members[operand])
        last_use[members] = late_use[members] = len(cuts.graph.ops)
    return Storage(
        stored=tuple(stored),
        writes=_count_writes(cuts, stored, target),
        made_at=made_at,
        last_use=last_use,
        late_run=np.array(late, np.int64),
        late_use=late_use,
    )


def stored_by_fusion(cuts: Cuts) -> list[bool]:
    """For each value class, whether it crosses the border of a fusion, for compilers that compute
    every array once.
    """
    readers, returned = _readers(cuts), _returned(cuts)
    stored = []
    for value_class, producer in enumerate(cuts.producer):
        if producer is None:
            stored.append(True)
            continue
        maker = cuts.first[producer[0]]
        read_by = [(cuts.first[r], cuts.rules[r]) for r in readers[value_class]]
        stored.append(
            maker.name not in _VIEWS
            and not cuts.const_only[value_class]
            and (
                maker.name == "scan_stack"
                or _is_copied(cuts, value_class, readers[value_class])
                or cuts.rules[producer[0]].contracts
                or value_class in returned
                or any(rule.contracts or _other_phase(maker, op) for op, rule in read_by)
                or (len(read_by) > 1 and any(rule.reduced for _, rule in read_by))
            )
        )
    return stored


def _stored_where_cheaper(
    cuts: Cuts, sums_gradients: bool, turned: list[bool], target: Target
) -> list[bool]:
    """As `stored_by_fusion`, for compilers that weigh storing an array once against recomputing it
    in every kernel that reads it.

    If `k` kernels need an array of `b` bytes that is computed from `a` stored bytes, storing it
    moves `a + (1 + k) b` bytes and recomputing it `k a`. Results of reductions are always stored,
    and so are inputs of a remat region, because of its barrier, and results of slow functions on
    targets that store them. Convolution kernels that the
    library reverses itself (`turned`) are not. What is compared for an array of truth values costs
    nothing in kernels that read it for other reasons.
    """
    readers = _readers(cuts)
    values, members = cuts.graph.values, cuts.folding.value_members
    num_bytes = [values[m[0]].num_bytes for m in members]
    stored = _stored_in_any_case(cuts, readers, sums_gradients, turned)
    # The scatter adds directly into the sum, so the sum is stored instead of the scattered array.
    for scatter, total in _scattered_into(cuts, readers):
        stored[scatter], stored[total] = False, True
    classes = [int(c) for c in cuts.folding.value_class]
    results = [[classes[o] for o in op.outputs if o >= 0] for op in cuts.first]
    order = sorted(range(len(cuts.first)), key=lambda c: cuts.first[c].index)
    kernels = _kernels_that_need(cuts, stored, results, order)
    # For each value class the stored arrays from which a kernel computes it.
    leaves: list[frozenset[int]] = [frozenset()] * len(num_bytes)
    for op_class in order:
        needed: frozenset[int] = frozenset()
        for _, v, _ in cuts.operands(op_class):
            needed |= frozenset({v}) if stored[v] or _is_view(cuts, v) else leaves[v]
        for v in results[op_class]:
            leaves[v] = needed
            if not stored[v] and not _is_view(cuts, v) and not cuts.const_only[v]:
                count = len(kernels[v])
                # Constants are made inside every kernel, and cost no traffic.
                made_of = {leaf for leaf in needed if not cuts.const_only[leaf]}
                moved = sum(num_bytes[leaf] for leaf in made_of)
                # From `a + (1 + k) b < k a`, with the array written once and read by each kernel.
                cheaper = (count - 1) * moved > (count + 1) * num_bytes[v]
                if cheaper and values[members[v][0]].dtype == "bool":
                    # A kernel that reads what is compared for other reasons compares it again.
                    again = sum(
                        num_bytes[leaf]
                        for kernel in kernels[v]
                        for leaf in made_of - _read_besides(cuts, stored, kernel, v)
                    )
                    cheaper = again > moved + (count + 1) * num_bytes[v]
                stored[v] = count > 1 and (
                    cheaper or (target.slow_result_bytes > 0 and is_slow(cuts.first[op_class]))
                )
    return stored


def _read_besides(cuts: Cuts, stored: list[bool], kernel: int, value_class: int) -> set[int]:
    """Stored arrays that a kernel reads, other than to compute one array inside of it."""
    found: set[int] = set()
    seen, todo = {value_class}, [kernel]
    while todo:
        for _, v, _ in cuts.operands(todo.pop()):
            if v in seen:
                continue
            seen.add(v)
            producer = cuts.producer[v]
            if stored[v] or _is_view(cuts, v) or producer is None:
                found.add(v)
            else:
                todo.append(producer[0])
    return found


def _count_writes(cuts: Cuts, stored: list[bool], target: Target) -> tuple[int, ...]:
    """For each value class, how often memory is written each time that it is made: once if it is
    stored.

    Around loops, compilers write more than they store. A stack is zeroed before the loop that fills
    it, which then writes each row in place. And while other code reads rows where they lie, a
    library's products take whole arrays, so that a row is copied before them.
    """
    writes = [int(found) for found in stored]
    readers = _readers(cuts)
    for value_class, producer in enumerate(cuts.producer):
        name = cuts.first[producer[0]].name if producer is not None else ""
        if name == "scan_stack":
            writes[value_class] += target.zeroes_stacks
        elif name == "scan_slice" and target.copies_rows:
            writes[value_class] += any(_is_kernel(cuts, r) for r in readers[value_class])
    return tuple(writes)


def is_slow(op: Op) -> bool:
    """True for functions that take so many instructions that compilers do not compute them twice
    where they could store the result.
    """
    return op.name in _SLOW


def _stored_in_any_case(
    cuts: Cuts, readers: list[set[int]], sums_gradients: bool, turned: list[bool]
) -> list[bool]:
    """For each value class, whether it is always stored, whatever recomputing it would cost."""
    returned = _returned(cuts)
    taken = {int(cuts.folding.value_class[v]) for v in taken_by_regions(cuts.graph.body)}

    def enters_update(value_class: int, maker: Op) -> bool:
        return maker.phase is not Phase.UPDATE and any(
            cuts.first[r].phase is Phase.UPDATE for r in readers[value_class]
        )

    stored = []
    for value_class, producer in enumerate(cuts.producer):
        if producer is None:
            stored.append(True)
            continue
        if _is_view(cuts, value_class) or cuts.const_only[value_class]:
            stored.append(False)
            continue
        op_class = producer[0]
        read_by_kernel = any(_is_kernel(cuts, r) for r in readers[value_class])
        stored.append(
            cuts.first[op_class].name == "scan_stack"
            or _is_copied(cuts, value_class, readers[value_class])
            or _is_kernel(cuts, op_class)
            or bool(cuts.rules[op_class].reduced)
            or value_class in returned
            or value_class in taken
            or (read_by_kernel and not turned[value_class])
            or (sums_gradients and enters_update(value_class, cuts.first[op_class]))
        )
    return stored


def _is_copied(cuts: Cuts, value_class: int, readers: set[int]) -> bool:
    """True if an array is copied to another memory, or is such a copy. A copy to the host that a
    loop stacks is made into the stack.
    """
    names = [cuts.first[r].name for r in readers]
    if is_on_host(cuts, value_class):
        return names != ["scan_stack"]
    return any(traits_of(name).changes_memory for name in names)


def _kernels_that_need(
    cuts: Cuts, stored: list[bool], results: list[list[int]], order: list[int]
) -> list[frozenset[int]]:
    """For each value class the kernels that need it: readers that store a result, and for readers
    that store none, the kernels that need their results.
    """
    kernels: list[frozenset[int]] = [frozenset()] * len(stored)
    # In reverse, so that all readers of a result come before the operator that makes it.
    for op_class in reversed(order):
        op_kernels = {op_class} if any(stored[v] for v in results[op_class]) else set()
        for v in results[op_class]:
            if not stored[v]:
                op_kernels |= kernels[v]
        for _, v, _ in cuts.operands(op_class):
            kernels[v] |= frozenset(op_kernels)
    return kernels


def _readers(cuts: Cuts) -> list[set[int]]:
    """For each value class the operator classes that read it."""
    readers: list[set[int]] = [set() for _ in cuts.producer]
    for op_class in range(len(cuts.first)):
        for _, value_class, _ in cuts.operands(op_class):
            readers[value_class].add(op_class)
    return readers


def _returned(cuts: Cuts) -> set[int]:
    """Value classes that the step returns."""
    value_class = cuts.folding.value_class
    return {int(value_class[o.value]) for o in cuts.graph.outputs if isinstance(o.value, int)}


def _is_view(cuts: Cuts, value_class: int) -> bool:
    producer = cuts.producer[value_class]
    return producer is not None and cuts.first[producer[0]].name in _VIEWS


def _is_kernel(cuts: Cuts, op_class: int) -> bool:
    # A lookup is fused with the operators before and after it.
    return cuts.rules[op_class].contracts and cuts.first[op_class].name != "gather"


def _scattered_into(cuts: Cuts, readers: list[set[int]]) -> Iterator[tuple[int, int]]:
    """Pairs of a scatter's result and the sum that is its only reader, where the compiler scatters
    directly into the sum: its other terms are computed, but not by products.
    """
    value_class = cuts.folding.value_class
    for op in cuts.first:
        if not op.name.startswith("scatter") or op.outputs[0] < 0:
            continue
        scatter = int(value_class[op.outputs[0]])
        users = [cuts.first[r] for r in readers[scatter]]
        if len(users) != 1 or not traits_of(users[0].name).adds or users[0].outputs[0] < 0:
            continue
        terms = [int(value_class[i]) for i in users[0].inputs if isinstance(i, int)]
        if all(
            term == scatter or (cuts.producer[term] is not None and not cuts.by_product(term))
            for term in terms
        ):
            yield scatter, int(value_class[users[0].outputs[0]])


def _other_phase(maker: Op, reader: Op) -> bool:
    return maker.phase is not reader.phase and maker.phase is not Phase.PROLOGUE


def _latest(cuts: Cuts, target: Target) -> list[int]:
    """Positions of operators if products of the backward pass run right before the first reader of
    their results: all of them under a scheduler that works backwards from the end, otherwise those,
    and sums, whose results a loop only stacks; these run at the end of a turn.

    Of two products that read the same array, such as those for the values and for the weights of
    attention, the one whose reader is further from the end runs first.
    """
    ops, classes = cuts.graph.ops, cuts.folding.op_class.tolist()
    moves = [rearranges(op) for op in cuts.first]
    contracts = [rule.contracts for rule in cuts.rules]
    may_wait = [
        moved or rule.contracts or bool(rule.reduced)
        for moved, rule in zip(moves, cuts.rules, strict=True)
    ]
    end = len(ops)
    runs_at = list(range(end))
    first_use = [end] * len(cuts.graph.values)
    only_stacked = [target.delays_gradients] * len(cuts.graph.values)
    # In reverse, as the readers of its results decide where an operator runs.
    for op in reversed(ops):
        index: int = op.index
        used, is_read, waits = end, False, True
        for o in op.outputs:
            if o >= 0 and first_use[o] < end:
                is_read = True
                used = min(used, first_use[o])
                waits = waits and only_stacked[o]
        waits = waits and is_read
        kind, at = classes[index], index
        if used < end and may_wait[kind] and op.phase is Phase.BACKWARD:
            late = (moves[kind] or contracts[kind]) if target.runs_latest else waits
            if late and (target.runs_latest or not op.is_link):
                if ops[used].phase is Phase.BACKWARD:
                    # An operator that only rearranges elements runs with its reader, a product
                    # right before it, but never earlier than in program order.
                    at = runs_at[index] = used if moves[kind] else max(used - 1, index)
        stacks = waits or op.name == "scan_stack"
        for source in op.inputs:
            if isinstance(source, int):
                if at < first_use[source]:
                    first_use[source] = at
                if not stacks:
                    only_stacked[source] = False
    return runs_at


def _run_late(cuts: Cuts) -> list[int]:
    """Positions of operators if gradients of parameters, outside of loops, are computed right
    before the update that reads them.

    A sum is not deferred if another sum over the same dims of the same array is needed earlier:
    one kernel computes both, such as the sums in the gradient of a normalisation over the batch.
    """
    fused = _summed_with_their_layer(cuts.graph)
    runs_at = _deferred_positions(cuts, fused, [frozenset()] * len(cuts.graph.values))
    return _deferred_positions(cuts, fused, _summed_in_turn(cuts, runs_at))


def _deferred_positions(
    cuts: Cuts, fused: Collection[OpId], summed: list[frozenset[Any]]
) -> list[int]:
    """Positions of operators, of which those of gradients wait.

    Args:
        fused: sums that one kernel computes with something else.
        summed: for each value, the dims over which an array derived from it is summed by an
            operator that is not deferred.
    """
    graph, classes = cuts.graph, cuts.folding.op_class.tolist()
    sums_up = [_sums_up(op) for op in cuts.first]
    may_wait = [
        rule.contracts or bool(rule.reduced) or rearranges(op) or traits_of(op.name).adds
        for op, rule in zip(cuts.first, cuts.rules, strict=True)
    ]
    end = len(graph.ops)
    runs_at = list(range(end))
    waits = [True] * len(graph.values)
    first_use = [end] * len(graph.values)
    for op in reversed(graph.ops):
        index: int = op.index
        at, kind = index, classes[index]
        if may_wait[kind] and op.phase is Phase.BACKWARD and op.trips == 1:
            # Results without readers do not prevent deferral.
            results = [o for o in op.outputs if o >= 0 and first_use[o] < end]
            late = bool(results) and all(waits[o] for o in results)
            if late and sums_up[kind]:
                axes = op.params["axes"]
                late = index not in fused
                late = late and not any(axes in summed[i] for i in op.inputs if isinstance(i, int))
            if late:
                at = runs_at[index] = min(first_use[o] for o in results)
                for source in op.inputs:
                    if isinstance(source, int) and at < first_use[source]:
                        first_use[source] = at
                continue
        is_update = op.phase is Phase.UPDATE
        for source in op.inputs:
            if isinstance(source, int):
                if not is_update:
                    waits[source] = False
                if at < first_use[source]:
                    first_use[source] = at
    return runs_at


def _summed_with_their_layer(graph: Graph) -> set[OpId]:
    """Sums for gradients of scales without a bias beside them, such as those of RMSNorm: one kernel
    computes them and the gradient of what was scaled. With a bias, both sums are another kernel.
    """
    maker: dict[Operand, Op] = {out: op for op in graph.ops for out in op.outputs if out >= 0}

    def uncast(value: Operand) -> Operand:
        while (op := maker.get(value)) is not None and op.name == "convert_element_type":
            value = op.inputs[0]
        return value

    def factors(value: Operand) -> set[Operand]:
        found: set[Operand] = set()
        seen: set[Operand] = set()
        todo = [value]
        while todo:
            value = uncast(todo.pop())
            if value in seen or not isinstance(value, int):
                continue
            seen.add(value)
            op = maker.get(value)
            if op is not None and op.name == "mul":
                todo += op.inputs
            else:
                found.add(value)
        return found

    sums = [op for op in graph.ops if op.phase is Phase.BACKWARD and _sums_up(op)]
    whole = {(uncast(op.inputs[0]), op.params["axes"]) for op in sums}
    found = set()
    for op in sums:
        multiplied = factors(op.inputs[0])
        beside_bias = any((value, op.params["axes"]) in whole for value in multiplied)
        if len(multiplied) > 1 and not beside_bias:
            found.add(op.index)
    return found


def _summed_in_turn(cuts: Cuts, runs_at: list[int]) -> list[frozenset[Any]]:
    """For each value of the backward pass, the dims over which an array derived from it, element by
    element, is summed by an operator that is not deferred.
    """
    graph, classes = cuts.graph, cuts.folding.op_class.tolist()
    summed: list[frozenset[Any]] = [frozenset()] * len(graph.values)
    for op in reversed(graph.ops):
        if op.phase is not Phase.BACKWARD or op.trips > 1:
            continue
        dims: frozenset[Any] = frozenset()
        if _sums_up(op):
            dims = frozenset([op.params["axes"]]) if runs_at[op.index] == op.index else dims
        elif not cuts.rules[classes[op.index]].contracts and op.name not in _VIEWS:
            dims = frozenset().union(*(summed[o] for o in op.outputs if o >= 0))
        shapes = [graph.values[o].shape for o in op.outputs if o >= 0]
        for source in op.inputs if dims else ():
            if isinstance(source, int) and (_sums_up(op) or graph.values[source].shape in shapes):
                summed[source] |= dims
    return summed


def _sums_up(op: Op) -> bool:
    return traits_of(op.name).join == "add"


def _made_at(cuts: Cuts, zeroes_early: bool) -> NDArray[np.int64]:
    """Start of each value's live range. A stack lives from the start of the loop that fills it;
    with `zeroes_early`, stacks and scatter-add sums of a backward loop even from the start of the
    straight-line code before the loop.
    """
    made_at = [0] * len(cuts.graph.values)
    loop_begin = straight_begin = before_loop = 0
    looping = backward_loop = False
    for op in cuts.graph.ops:
        # Links that stack a loop's results come after its body, but belong to the loop.
        now = op.trips > 1 or (looping and op.is_link)
        if now and not looping:
            loop_begin, before_loop = op.index, straight_begin
            backward_loop = op.phase is Phase.BACKWARD
        elif looping and not now:
            straight_begin = op.index
        looping = now
        early = zeroes_early and backward_loop and op.phase is Phase.BACKWARD
        for out in op.outputs:
            if out < 0:
                continue
            if op.name == "scan_stack":
                made_at[out] = before_loop if early else loop_begin
            elif op.name == "scatter-add" and early:
                made_at[out] = before_loop
            else:
                made_at[out] = op.index
    return np.array(made_at, np.int64)


def _last_use(cuts: Cuts, stored: list[bool], runs_at: list[int]) -> NDArray[np.int64]:
    """Position of the last reader of each value, also through arrays that are fused away; for
    values that a loop reads from outside, the end of the loop.
    """
    graph = cuts.graph
    classes = cuts.folding.value_class.tolist()
    made_at = [1] * len(graph.values)
    for op in graph.ops:
        for out in op.outputs:
            if out >= 0:
                # A loop makes a row of a stack in each turn, and the whole stack once.
                rows = graph.values[out].shape[0] if op.name == "scan_stack" else 1
                made_at[out] = op.trips // max(rows, 1)
    last = [-1] * len(graph.values)
    loop_ends = {turns: _loop_ends(graph.ops, turns) for turns in {*made_at}}
    for op in reversed(graph.ops):
        index = op.index
        reach = runs_at[index]
        # An array that is fused away keeps its operands alive until its own readers have run.
        for out in op.outputs:
            if out >= 0 and not stored[classes[out]]:
                reach = max(reach, last[out])
        for source in op.inputs:
            if isinstance(source, int):
                # A loop reads values from outside in every turn, so they live until the last turn.
                until = max(reach, loop_ends[made_at[source]][index])
                if until > last[source]:
                    last[source] = until
    return np.array(last, np.int64)


def _loop_ends(ops: tuple[Op, ...], turns: int) -> list[int]:
    """For each operator in a loop around which code runs `turns` times, the last operator of the
    run of such loops around it; for others, themselves.
    """
    ends = list(range(len(ops)))
    for k in range(len(ops) - 2, -1, -1):
        if ops[k].trips > turns and ops[k + 1].trips > turns:
            ends[k] = ends[k + 1]
    return ends
