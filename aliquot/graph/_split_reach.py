"""Scans over layers, and the arrays that must be cut into pieces together with these scans.

Only operators that run once are examined: those of the step itself and of remat regions and
branches in it. The body of a loop is the same for every range of layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ..core import InputError
from . import _jax_compat as compat
from ._split_rows import local_rule
from ._types import Block, Call, Graph, Op, Phase, Role, ValueId, value_ids


class LayerScan(msgspec.Struct, frozen=True, kw_only=True):
    """A forward loop over `length` layers: `Graph.ops[start:stop]` are its operators, links
    included.
    """

    length: int
    start: int
    stop: int


def scans_over_layers(graph: Graph) -> tuple[LayerScan, ...]:
    """The forward scans over stacked parameters, in program order; empty if none can be cut.

    A scan is over layers if it takes in each step a slice of a parameter, or of an array made from
    a parameter layer by layer (a cast to another dtype). Scans inside other loops do not count:
    `split_scans` refuses them.
    """
    scans = []
    for call in forward_scans(graph):
        num_consts, _ = compat.scan_counts(call.eqn.params)
        bound = call.blocks[0].inputs[num_consts:]
        ends = [graph.links[v].index for v in (*bound, *call.outputs) if isinstance(v, int)]
        scans.append(
            LayerScan(length=call.eqn.params["length"], start=min(ends), stop=max(ends) + 1)
        )
    return tuple(scans)


def stacked_values(graph: Graph, length: int) -> frozenset[ValueId]:
    """All values that are cut into pieces when the scans over `length` layers are.

    These are the arrays that the scans slice and stack, and all values tied to them row by row:
    gradients, moments, results of the update.

    Raises:
        InputError: nothing can be cut at that length.
    """
    seeds = []
    for call in forward_scans(graph):
        if call.eqn.params["length"] == length:
            seeds += _stacked_operands(call)
    nested = _over_parameters(graph, list(_nested_scans(graph, graph.body, False)))
    if any(call.eqn.params["length"] == length for call in nested):
        raise InputError(
            f"{graph.name} runs its scan over {length} layers inside another loop (its own"
            " accumulation over micro-batches, perhaps), and a loop cannot pass from one stage to"
            " the next and back. Write the step for the whole batch and let num_micro_batches"
            " cut it."
        )
    if seeds:
        return tied_values(graph, length, seeds)
    lengths = sorted({scan.length for scan in scans_over_layers(graph)})
    if lengths:
        raise InputError(
            f"Ranges of {length} layers were asked for, but {graph.name} scans over"
            f" {' and '.join(map(str, lengths))} layers: ranges must cover all of them. Let bounds"
            f" end at {lengths[0]}."
        )
    raise InputError(
        f"{graph.name} has no scan over layers, so nothing in it can be cut into ranges of {length}"
        " layers: no jax.lax.scan of the step takes stacked parameters as its xs. Write the layers"
        " as such a scan, or cut the unrolled step as it is."
    )


def tied_values(graph: Graph, length: int, seeds: Iterable[ValueId]) -> frozenset[ValueId]:
    """The seeds, of `length` rows each, and all values that are tied to them row by row."""
    neighbours: dict[ValueId, list[tuple[ValueId, ...]]] = {}
    for group in _groups(graph, length):
        for value in group:
            neighbours.setdefault(value, []).append(group)
    reached, pending = set(seeds), list(seeds)
    # A value's groups are popped when they are followed, so no group is visited twice from one
    # value.
    while pending:
        for group in neighbours.pop(pending.pop(), ()):
            fresh = [v for v in group if v not in reached]
            reached.update(fresh)
            pending += fresh
    return frozenset(reached)


def is_split(call: Call, stacked: frozenset[ValueId], length: int) -> bool:
    """True if a scan is one of those that are cut."""
    return call.eqn.params["length"] == length and not stacked.isdisjoint(_stacked_operands(call))


def _stacked_operands(call: Call) -> list[ValueId]:
    """Arrays that a scan slices in each step, and those that it stacks."""
    num_consts, num_carry = compat.scan_counts(call.eqn.params)
    return value_ids([*call.inputs[num_consts + num_carry :], *call.outputs[num_carry:]])


def opens(call: Call) -> bool:
    """True if the bodies of a call run once and can be cut, too."""
    # The compiler sees only one of the branches for platforms, so these run as one operator.
    return call.kind == "remat" or (
        call.kind == "cond" and call.eqn.params.get("branches_platforms") is None
    )


def _flat(graph: Graph, block: Block) -> Iterator[Op | Call]:
    """Operators and calls that run once, also inside bodies that run once."""
    for item in block.items:
        if not isinstance(item, Call):
            yield graph.ops[item]
            continue
        yield item
        if opens(item):
            for inner in item.blocks:
                yield from _flat(graph, inner)


def _groups(graph: Graph, length: int) -> Iterator[tuple[ValueId, ...]]:
    """Groups of values that are cut alike, because their rows correspond."""
    values = graph.values
    for item in _flat(graph, graph.body):
        if isinstance(item, Op):
            rule = local_rule(item, values, length)
            if rule is not None:
                both, with_rows = (*item.inputs, *item.outputs), (*rule.operands, *rule.results)
                yield tuple(value_ids(itertools.compress(both, with_rows)))
        elif item.kind == "scan":
            if item.eqn.params["length"] == length:
                yield tuple(_stacked_operands(item))
        elif opens(item):
            for position, result in enumerate(item.outputs):
                group = value_ids([result, *(block.outputs[position] for block in item.blocks)])
                if all(values[v].shape[:1] == (length,) for v in group):
                    yield tuple(group)
    # The next step takes the state that this one returns, so both must be cut alike.
    for state in graph.inputs:
        if state.output is not None:
            group = value_ids([state.value, graph.outputs[state.output].value])
            if all(values[v].shape[:1] == (length,) for v in group):
                yield tuple(group)


def _of_parameters(graph: Graph, length: int) -> set[ValueId]:
    """Values of `length` rows, each of which is made from the same row of a parameter."""
    marked = set()
    for i in graph.inputs:
        if i.role is Role.PARAMETER and graph.values[i.value].shape[:1] == (length,):
            marked.add(i.value)
    for op in graph.ops:
        if op.phase is Phase.UPDATE or marked.isdisjoint(value_ids(op.inputs)):
            continue
        rule = local_rule(op, graph.values, length)
        if rule and not marked.isdisjoint(value_ids(itertools.compress(op.inputs, rule.operands))):
            marked.update(value_ids(itertools.compress(op.outputs, rule.results)))
    return marked


def forward_scans(graph: Graph) -> list[Call]:
    """The scans over layers of the forward pass."""
    calls = [c for c in _flat(graph, graph.body) if isinstance(c, Call) and c.kind == "scan"]
    scans = []
    for call in _over_parameters(graph, calls):
        phases = {op.phase for op in _inside(graph, call)}
        if phases.isdisjoint((Phase.BACKWARD, Phase.UPDATE)):
            scans.append(call)
    return scans


def _over_parameters(graph: Graph, calls: Sequence[Call]) -> list[Call]:
    lengths = {call.eqn.params["length"] for call in calls}
    marked = {length: _of_parameters(graph, length) for length in lengths}
    found: list[Call] = []
    for call in calls:
        sliced = call.inputs[sum(compat.scan_counts(call.eqn.params)) :]
        if not marked[call.eqn.params["length"]].isdisjoint(value_ids(sliced)):
            found.append(call)
    return found


def _inside(graph: Graph, call: Call) -> Iterator[Op]:
    for block in call.blocks:
        for item in block.items:
            if isinstance(item, Call):
                yield from _inside(graph, item)
            else:
                yield graph.ops[item]


def _nested_scans(graph: Graph, block: Block, in_loop: bool) -> Iterator[Call]:
    """Scans inside the bodies of other loops."""
    for item in block.items:
        if isinstance(item, Call):
            if in_loop and item.kind == "scan":
                yield item
            for inner in item.blocks:
                yield from _nested_scans(graph, inner, in_loop or not opens(item))
