"""Collectives inside nodes, as opposed to those along edges."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from ..graph import NO_VALUE, Exchange, Phase, Ring, traits_of, value_ids
from ._ids import NodeId, SlotId
from ._nodes import NodeCollective, Projection, SplitBy

if TYPE_CHECKING:
    from ._node_index import NodeIndex

RING = "ring"
"""Kind of a collective in which each device passes on to the next, one time less than there are
devices.
"""
PERMUTE = "collective-permute"
_HALVES = frozenset({"bfloat16", "float16"})
# Rows are few if this many devices have more of them each.
_MOST_PIECES = 64


def divided_by(projection: Projection) -> SplitBy:
    """For each factor of a node, whether splitting it divides an array: whether a dim of the array
    stands for it.
    """
    return tuple(dim >= 0 for dim in projection)


def product_collectives(naming: NodeIndex, op_class: int) -> tuple[NodeCollective, ...]:
    """Collectives of a product's reductions other than sums, which are finished at once, of its
    ring, and of the rows that it exchanges.
    """
    cuts = naming.cuts
    op, rule = cuts.first[op_class], cuts.rules[op_class]
    if rule.ring is not None:
        return tuple(_ring(naming, op_class, rule.ring))
    if rule.exchange is not None:
        return tuple(_rows_sent(naming, op_class, rule.exchange))
    # Sums are left partial instead, as edges may finish them later or scatter them.
    if not rule.reduced or rule.reduce == "sum":
        return ()
    out = op.outputs[0]
    value = cuts.graph.values[out]
    port = naming.product_port(op_class, rule.results[0])
    return (
        NodeCollective(
            kind="all-reduce",
            factors=tuple(k for k, f in enumerate(rule.factors) if f in rule.reduced),
            split_by=divided_by(port.projection),
            num_bytes=float(value.num_bytes),
            dtype=value.dtype,
            count=float(len(cuts.folding.members[op_class]) * op.trips),
            phase=op.phase,
            gradient=False,
            label=naming.label(op_class),
            deferrable=op.deferrable,
        ),
    )


def _ring(naming: NodeIndex, op_class: int, ring: Ring) -> Iterator[NodeCollective]:
    """What devices send each other round a ring: keys and values, and their gradients, summed in
    float32, which also come home. Of what is balanced, they exchange halves before and after.
    """
    cuts = naming.cuts
    op, rule = cuts.first[op_class], cuts.rules[op_class]
    for arrays, dims_of, round_trips, is_result in (
        (op.inputs, rule.operands, ring.travels, False),
        (op.outputs, rule.results, ring.returns, True),
    ):
        for position, (array, dims) in enumerate(zip(arrays, dims_of, strict=True)):
            is_cut = any(ring.factor in names for names in dims)
            if not isinstance(array, int) or array < 0 or not is_cut:
                continue
            value = cuts.graph.values[array]
            wide = 2.0 if is_result and value.dtype in _HALVES else 1.0
            moves = [(RING, wide)] if position in round_trips else []
            moves += [(PERMUTE, wide)] if position in round_trips and is_result else []
            moves += [(PERMUTE, 1.0)] if ring.balanced else []
            for kind, times in moves:
                sums = rule.sums(position) if is_result else ()
                port = naming.product_port(op_class, dims, sums=sums)
                yield NodeCollective(
                    kind=kind,
                    factors=(rule.factors.index(ring.factor),),
                    split_by=divided_by(port.projection),
                    num_bytes=float(value.num_bytes) * times,
                    dtype=value.dtype,
                    count=_times(naming, op_class),
                    phase=op.phase,
                    gradient=False,
                    label=naming.label(op_class),
                    deferrable=op.deferrable,
                )


def _rows_sent(naming: NodeIndex, op_class: int, exchange: Exchange) -> Iterator[NodeCollective]:
    """All-to-alls of the rows that travel to what they have chosen and back."""
    cuts = naming.cuts
    op, rule = cuts.first[op_class], cuts.rules[op_class]
    sent = []
    for position, times in exchange.sends.items():
        if isinstance(array := op.inputs[position], int):
            sent.append((array, rule.operands[position], times))
    sent += [
        (op.outputs[position], rule.results[position], times)
        for position, times in exchange.returns.items()
    ]
    for array, dims, times in sent:
        if array < 0:
            continue
        value = cuts.graph.values[array]
        yield NodeCollective(
            kind="all-to-all",
            factors=(rule.factors.index(exchange.factor),),
            split_by=divided_by(naming.product_port(op_class, dims).projection),
            num_bytes=float(value.num_bytes) * times,
            dtype=value.dtype,
            count=_times(naming, op_class),
            phase=op.phase,
            gradient=False,
            label=naming.label(op_class),
            deferrable=op.deferrable,
        )


def whole_bytes(naming: NodeIndex, op_class: int) -> float:
    """Bytes that an operator reads and writes each time that it runs."""
    cuts = naming.cuts
    op = cuts.first[op_class]
    arrays = set(value_ids((*op.inputs, *op.outputs)))
    # Rules of kernels know traffic that their operands do not show, such as tables that are read
    # again and again.
    return max(
        float(sum(cuts.graph.values[i].num_bytes for i in arrays)),
        cuts.rules[op_class].accessed_bytes,
    )


def group_collectives(naming: NodeIndex, index: NodeId) -> tuple[NodeCollective, ...]:
    """Sums of reductions over a split factor, and gathers of what an operator needs whole."""
    collectives = []
    for op_class in naming.group_ops.get(index, ()):
        collectives += _reductions(naming, op_class)
        collectives += _gathers(naming, op_class)
        collectives += _exchanges(naming, op_class)
    return tuple(collectives)


def batch_sums(naming: NodeIndex, batch_factors: Sequence[frozenset[int]]) -> int:
    """Number of places between products of the backward pass at which layers sum over the batch, in
    a step.

    Sums between the same products are combined into one collective.
    """
    cuts, members = naming.cuts, naming.cuts.folding.members
    products: list[int] = []
    for c, rule in enumerate(cuts.rules):
        products += members[c] if rule.contracts else ()
    products.sort()
    stretches: set[int] = set()
    for node, op_classes in naming.group_ops.items():
        for op_class in op_classes if batch_factors[node] else ():
            op = cuts.first[op_class]
            # A sum inside a loop stands between products of the same iteration, and is not combined
            # with sums outside.
            # No product waits for a maximum, as of magnitudes by which a later step scales 8 bits.
            sums_up = traits_of(op.name).join == "add"
            if op.phase is Phase.BACKWARD and op.trips == 1 and sums_up:
                sums = [r for r in _reductions(naming, op_class) if not r.gradient]
                if any(batch_factors[node] & set(r.factors) for r in sums):
                    stretches.update(bisect.bisect(products, k) for k in members[op_class])
    return len(stretches)


def _times(naming: NodeIndex, op_class: int) -> float:
    """How often a step runs an operator class, all copies together."""
    return float(len(naming.cuts.folding.members[op_class]) * naming.cuts.first[op_class].trips)


def _reductions(naming: NodeIndex, op_class: int) -> list[NodeCollective]:
    """The all-reduce of a group operator that reduces over split factors; empty if it reduces
    none.
    """
    cuts = naming.cuts
    op, rule = cuts.first[op_class], cuts.rules[op_class]
    factors: dict[int, None] = {}
    for position, value_class, _ in cuts.operands(op_class):
        projection = naming.slot_port(cuts.operand_slot(op_class, value_class)).projection
        for dim, letters in enumerate(rule.operands[position]):
            if letters[0] in rule.reduced and dim in projection:
                factors[projection.index(dim)] = None
    out = op.outputs[0] if op.outputs else NO_VALUE
    if not factors or out < 0:
        return []
    value = cuts.graph.values[out]
    # A scalar result belongs to no group; nothing divides it.
    result_projection = naming.slot_port(cuts.home(int(cuts.folding.value_class[out]))).projection
    size = len(naming.group_classes[naming.op_group[op_class]])
    return [
        NodeCollective(
            kind="all-reduce",
            factors=tuple(factors),
            split_by=divided_by(result_projection) if result_projection else (False,) * size,
            num_bytes=float(sum(cuts.graph.values[o].num_bytes for o in op.outputs if o >= 0)),
            dtype=value.dtype,
            count=_times(naming, op_class),
            phase=op.phase,
            gradient=op.phase is Phase.BACKWARD and naming.enters_update(out),
            label=naming.label(op_class),
            deferrable=op.deferrable,
            over_tokens=op_class in naming.token_sums,
            total_dtype=naming.total_dtype(int(cuts.folding.value_class[out])),
        )
    ]


def _gathers(naming: NodeIndex, op_class: int) -> list[NodeCollective]:
    """All-gathers of operands along factors that a group operator needs whole."""
    cuts = naming.cuts
    op, rule = cuts.first[op_class], cuts.rules[op_class]
    if op.is_link:
        return []
    gathers = []
    exchange = cuts.exchanges.of(op_class)
    for position, value_class, count in cuts.operands(op_class):
        slot = cuts.operand_slot(op_class, value_class)
        projection = naming.slot_port(slot).projection
        # A dim of length one carries no factor, and needs no gather.
        for dim, letters in enumerate(rule.operands[position]):
            if dim not in projection or letters == "1":
                continue
            # Rows that are exchanged are not gathered.
            if exchange.at(False, position) == dim:
                continue
            factor = projection.index(dim)
            # A reduced dim becomes a partial sum, and one that the results carry stays split:
            # neither is gathered.
            if letters[0] in rule.reduced or naming.passes_through(op_class, letters[0], factor):
                continue
            value = cuts.graph.values[cuts.folding.value_members[value_class][0]]
            gathers.append(
                NodeCollective(
                    kind="all-gather",
                    factors=(factor,),
                    split_by=divided_by(projection),
                    num_bytes=float(value.num_bytes),
                    dtype=value.dtype,
                    count=float(count * op.trips),
                    phase=op.phase,
                    gradient=False,
                    label=naming.label(op_class),
                    deferrable=op.deferrable,
                )
            )
    return gathers


def _exchanges(naming: NodeIndex, op_class: int) -> list[NodeCollective]:
    """What devices send each other when an operator puts the rows of a split batch elsewhere.

    A join pads each part and adds them up: k equal parts are k permutes of each. So is a cut: k
    permutes of what is cut off. What is regrouped, or repeated, is exchanged among all devices. A
    roll moves the rows at the edges of pieces, or whole pieces.
    """
    cuts = naming.cuts
    exchange, uneven = cuts.exchanges.of(op_class), cuts.exchanges.uneven
    op = cuts.first[op_class]
    operands: list[_Exchanged] = []
    for position, value_class, _ in cuts.operands(op_class):
        slot = cuts.operand_slot(op_class, value_class)
        if (dim := exchange.at(False, position)) >= 0 and slot is not None:
            operands.append(_Exchanged(value_class=value_class, slot=slot, dim=dim))
    results: list[_Exchanged] = []
    for position, out in enumerate(op.outputs):
        value_class = int(cuts.folding.value_class[out]) if out >= 0 else -1
        home = cuts.home(value_class) if out >= 0 else None
        if (dim := exchange.at(True, position)) >= 0 and home is not None:
            results.append(_Exchanged(value_class=value_class, slot=home, dim=dim))
    # What a roll cuts off moves where it is joined.
    if not operands or not results or any(r.value_class in uneven for r in results):
        return []
    joins = len(operands) > 1 or op.name == "pad"
    whole = (results if joins else operands)[0]
    found = []
    for part in operands if joins or len(results) == 1 else results:
        projection = naming.slot_port(part.slot).projection
        if part.dim not in projection:
            continue
        rows, of_rows, result_rows = (
            cuts.shape(p.value_class)[p.dim] for p in (part, whole, results[0])
        )
        if not rows or not result_rows:
            # Nothing is sent of an empty array.
            continue
        value = cuts.graph.values[cuts.folding.value_members[part.value_class][0]]
        num_bytes, pieces = float(value.num_bytes), 1
        kinds: tuple[str, ...] = (PERMUTE,)
        split_by = divided_by(projection)
        if part.value_class in uneven:
            shift = of_rows - rows
            if shift * _MOST_PIECES <= of_rows:
                num_bytes *= shift / rows
                split_by = (False,) * len(split_by)
        elif op.name in ("reshape", "tile"):
            kinds = ("all-to-all", PERMUTE)
        elif op.name == "slice":
            num_bytes *= result_rows / rows
            pieces = max(1, round(rows / result_rows))
        else:
            pieces = max(1, round(of_rows / rows))
        for kind in kinds:
            found.append(
                NodeCollective(
                    kind=kind,
                    factors=(projection.index(part.dim),),
                    split_by=split_by,
                    num_bytes=num_bytes,
                    dtype=value.dtype,
                    count=pieces * _times(naming, op_class),
                    phase=op.phase,
                    gradient=False,
                    label=naming.label(op_class),
                    deferrable=op.deferrable,
                )
            )
    return found


class _Exchanged(msgspec.Struct, frozen=True, kw_only=True):
    """An operand or result whose rows are exchanged along a dim."""

    value_class: int
    slot: SlotId
    dim: int
