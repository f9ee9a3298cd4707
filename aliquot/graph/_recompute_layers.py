"""Recomputation in the layers of a captured step: what each layer keeps for its backward pass, and
what it computes again there.

A step that was differentiated keeps all that its backward pass reads. Here it is rewritten: the
backward pass of each layer first computes some of these values again, from what the layer keeps, as
it would if the step's author had put `jax.checkpoint` around each layer. The step is not
differentiated again, so custom gradients, `stop_gradient` and the like stay as they are.

Layers are the repeats of a step whose layers are written out, or the turns of its scans over
layers. What is not repeated, such as the loss, keeps all.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec
from msgspec import structs

from ..core import FUSED_ATTENTION, recompute_parts, recompute_ways
from . import _jax_compat as compat
from ._alike_layers import alike_layers
from ._dataflow import Item, items_of, made_by, plain_item, read_by, reads_of
from ._effects import any_effects
from ._recompute import items_between
from ._rule import traits_of
from ._split_reach import forward_scans
from ._types import (
    Block,
    Call,
    Graph,
    Literal,
    Op,
    Operand,
    OpId,
    Phase,
    Recomputation,
    Role,
    Value,
    ValueId,
    value_ids,
)

Places: TypeAlias = tuple[tuple[int, int], ...]


def recompute_names(graph: Graph) -> tuple[str, ...]:
    """The ways in which the layers of a step can recompute, from the one that keeps most.

    Only "none" where nothing is repeated, and for steps without gradients or with regions that
    recompute already.
    """
    sites = _sites(graph, None)
    bodies = [layer.forward for layer in sites.layers] or [loop.forward for loop in sites.loops]
    if not bodies:
        return ("none",)
    attends = any(_attention(graph, items, sites.weights) for items in bodies)
    return recompute_ways(has_attention=attends)


def recomputing(
    graph: Graph, name: str, places: Places | None = None
) -> tuple[Graph, Recomputation]:
    """A step with layers that recompute, in loose form: to be replayed by `evaluate`. New loops
    have placeholders as equations, and links are left out.

    Args:
        name: one of `RECOMPUTE`.
        places: `Recomputation.places` of the same step on another batch; None to look for layers.
    """
    sites = _sites(graph, places)
    loose = _Loose(graph, list(graph.values), list(graph.ops))
    items = list(graph.body.items)
    kept, _ = recompute_parts(name)
    if sites.loops:
        pieces: dict[int, OpId | Call] = {}
        for loop in sites.loops:
            pieces |= _with_less_kept(loose, loop, kept, sites.weights)
        items = [pieces.get(id(item), item) for item in items]
    else:
        items = _with_regions(loose, sites, name)
    body = replace(graph.body, items=tuple(_live(loose, items, graph.returned)))
    again = replace(graph, values=tuple(loose.values), ops=tuple(loose.ops), body=body)
    how = Recomputation(
        name=name,
        places=sites.places,
        op_origins=tuple(loose.op_origins),
        value_origins=tuple(loose.value_origins),
    )
    return again, how


# -- Where a step repeats layers --------------------------------------------------------------


class _Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that is written out: the items of its forward pass."""

    forward: tuple[Item, ...]


class _Loop(msgspec.Struct, frozen=True, kw_only=True):
    """A scan over layers, and the one that runs their backward pass.

    Attributes:
        forward: items of its body.
        stacks: positions of the scan's results that only the other scan reads, row by row.
    """

    call: Call
    backward: Call
    forward: tuple[Item, ...]
    stacks: tuple[int, ...]


class _Sites(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of a step that can recompute: loops over layers, or layers that are written out.

    Attributes:
        weights: values that depend on parameters alone.
    """

    items: tuple[Item, ...] = ()
    layers: tuple[_Layer, ...] = ()
    loops: tuple[_Loop, ...] = ()
    places: Places = ()
    weights: frozenset[ValueId] = frozenset()


# Cached, because each way to recompute asks for the layers of the same step.
@functools.lru_cache(maxsize=2)
def _sites(graph: Graph, places: Places | None) -> _Sites:
    """The sites of layers; none where a step recomputes already, or takes no gradients.

    Args:
        places: where layers that are written out begin; None to look for them.
    """
    calls = [item for item in graph.body.items if isinstance(item, Call)]
    phases = {op.phase for op in graph.ops}
    if Phase.BACKWARD not in phases or any(op.region for op in graph.ops):
        return _Sites()
    items = items_of(graph)
    weights = graph.inputs_of(Role.PARAMETER)
    for item in items:
        if _is_of_weights(graph, item, weights) and item.phase is not Phase.UPDATE:
            weights.update(item.outputs)
    links = graph.links
    loops = tuple(_loops(graph, calls, items, links))
    entering = itertools.chain(*(loop.call.blocks[0].inputs for loop in loops))
    rows = [v for v in entering if isinstance(v, int) and v in links]
    weights.update([row for row in rows if weights.issuperset(links[row].inputs)])
    if loops:
        return _Sites(items=items, loops=loops, weights=frozenset(weights))
    found = alike_layers(graph, items) if places is None else places
    layers = []
    for start, stop in found:
        layers.append(tuple(item for item in items[start:stop] if item.phase is Phase.FORWARD))
    if not all(_multiplies(graph, part) for part in layers) or len(layers) < 2:
        return _Sites()
    made = tuple(_Layer(forward=part) for part in layers)
    return _Sites(items=items, layers=made, places=found, weights=frozenset(weights))


def _is_of_weights(graph: Graph, item: Item, weights: Collection[ValueId]) -> bool:
    """True for what is made of weights, and of numbers such as those by which they are scaled."""
    if not item.inputs:
        return not any(graph.values[value].shape for value in item.outputs)
    return all(value in weights for value in item.inputs)


def _multiplies(graph: Graph, items: Iterable[Item]) -> bool:
    ops = itertools.chain.from_iterable(item.ops for item in items)
    return any(traits_of(graph.ops[op].name).multiplies for op in ops)


def _loops(
    graph: Graph, calls: Sequence[Call], items: Sequence[Item], links: Mapping[ValueId, Op]
) -> Iterator[_Loop]:
    """The scans over layers whose backward pass is one other scan."""
    readers: dict[ValueId, list[Item]] = {}
    for item in items:
        for value in item.inputs:
            readers.setdefault(value, []).append(item)
    returned = {output.value for output in graph.outputs}
    scans = {id(call): call for call in calls if call.kind == "scan"}
    for call in forward_scans(graph):
        if id(call) not in scans:
            continue
        num_carry = compat.scan_counts(call.eqn.params)[1]
        by_reader: dict[int, list[int]] = {}
        for k, stack in enumerate(call.outputs[num_carry:]):
            reading = readers.get(stack, [])
            if len(reading) != 1 or stack in returned:
                continue
            other = reading[0].op_or_call
            if id(other) not in scans or reading[0].phase is not Phase.BACKWARD:
                continue
            assert isinstance(other, Call)
            first = sum(compat.scan_counts(other.eqn.params))
            same = other.eqn.params["length"] == call.eqn.params["length"]
            if same and stack not in other.inputs[:first]:
                by_reader.setdefault(id(other), []).append(k)
        if len(by_reader) != 1:
            continue
        ((reader, stacks),) = by_reader.items()
        body = call.blocks[0].items
        forward = tuple(plain_item(graph, inner, Phase.FORWARD) for inner in body)
        if _multiplies(graph, forward):
            yield _Loop(call=call, backward=scans[reader], forward=forward, stacks=tuple(stacks))


# -- What a layer keeps -----------------------------------------------------------------------


def _attention(
    graph: Graph, items: Sequence[Item], weights: Collection[ValueId]
) -> tuple[Item, ...]:
    """The products of a layer of which neither operand is a weight, and fused attention."""
    known = set(weights)
    found = []
    for item in items:
        if _is_of_weights(graph, item, known):
            known.update(item.outputs)
        for op in (graph.ops[k] for k in item.ops):
            # Products of a loop read the loop's operands.
            operands = item.inputs if isinstance(item.op_or_call, Call) else op.inputs[:2]
            plain = traits_of(op.name).multiplies and known.isdisjoint(operands)
            if plain or op.name in FUSED_ATTENTION:
                found.append(item)
                break
    return tuple(found)


def _saved(
    graph: Graph, items: Sequence[Item], name: str, weights: Collection[ValueId]
) -> set[ValueId]:
    """Values of a layer that are kept where its backward pass needs them, besides what enters the
    layer.
    """
    # What has effects runs as often as in the step, and what its author keeps in host memory stays.
    saved: set[ValueId] = set()
    for item in items:
        if any_effects(item.op_or_call, graph) or any(
            traits_of(graph.ops[op].name).changes_memory for op in item.ops
        ):
            saved.update(item.outputs)
    if name in ("fused", "minimal", "narrow"):
        known = set(weights)
        for item in items:
            if _is_of_weights(graph, item, known):
                known.update(item.outputs)
            elif _is_kept_product(graph, item, known, only_narrow=name == "narrow"):
                saved.update(item.outputs)
                if name == "fused":
                    saved.update(value for value in item.inputs if value not in known)
    elif name in ("save_qkv", "save_attention"):
        attention = _attention(graph, items, weights)
        made = made_by(attention)
        by_weights = [_multiplies(graph, [item]) and item not in attention for item in items]
        # What depends on a product of the same attention: not by way of a product with a weight.
        behind = set(made)
        for item, ends in zip(items, by_weights, strict=True):
            if not ends and not behind.isdisjoint(item.inputs):
                behind.update(item.outputs)
        entering = {*read_by(attention)}
        if name == "save_qkv":
            saved |= entering - behind
        else:
            # All that the products of attention read, likewise.
            sources = set(entering)
            for item, ends in zip(reversed(items), reversed(by_weights), strict=True):
                if not ends and not sources.isdisjoint(item.outputs):
                    sources.update(item.inputs)
            saved |= made - sources
    return saved


def _is_kept_product(
    graph: Graph, item: Item, weights: Collection[ValueId], *, only_narrow: bool
) -> bool:
    """True for a product with a weight, and for fused attention.

    Args:
        only_narrow: leave out products whose result is wider than the activations they read. This
            is the same for every size of the batch.
    """
    if isinstance(item.op_or_call, Call):
        return False
    op = graph.ops[item.op_or_call]
    if op.name in FUSED_ATTENTION:
        return True
    if not traits_of(op.name).multiplies:
        return False
    if op.name == "dot_general" and any(op.params["dimension_numbers"][1]):
        return False
    read = [i for i in op.inputs[:2] if isinstance(i, int) and i not in weights]
    result = math.prod(graph.values[op.outputs[0]].shape)
    return not only_narrow or any(result <= math.prod(graph.values[i].shape) for i in read)


# -- Layers that are written out --------------------------------------------------------------


@dataclass(slots=True)
class _Loose:
    """A graph to which operators and values are added; the origins are those of `Recomputation`."""

    graph: Graph
    values: list[Value]
    ops: list[Op]
    op_origins: list[OpId] = field(init=False)
    value_origins: list[ValueId] = field(init=False)

    def __post_init__(self) -> None:
        self.op_origins = [op.index for op in self.ops]
        self.value_origins = [value.index for value in self.values]

    def fresh(self, like: ValueId, shape: tuple[int, ...] | None = None) -> ValueId:
        """A new value, as another one."""
        index, old = ValueId(len(self.values)), self.values[like]
        self.values.append(
            structs.replace(old, index=index, shape=old.shape if shape is None else shape)
        )
        self.value_origins.append(self.value_origins[like])
        return index

    def copy(self, item: OpId | Call, names: dict[ValueId, ValueId]) -> OpId | Call:
        """An operator or call again, on the values that `names` has for its operands; its results
        are added to `names`.
        """
        if not isinstance(item, Call):
            op, index = self.ops[item], OpId(len(self.ops))
            made = {o: self.fresh(o) for o in op.outputs if o >= 0}
            self.op_origins.append(self.op_origins[item])
            self.ops.append(
                structs.replace(
                    op,
                    index=index,
                    inputs=_renamed(op.inputs, names),
                    outputs=tuple([made.get(o, o) for o in op.outputs]),
                    phase=Phase.BACKWARD,
                )
            )
            names |= made
            return index
        around = set(value_ids(item.inputs))
        inputs = _renamed(item.inputs, names)
        blocks = []
        inner = dict(names)
        for block in item.blocks:
            for value in block.inputs:
                if isinstance(value, int) and value not in around and value not in inner:
                    inner[value] = self.fresh(value)
            taken = _renamed(block.inputs, inner)
            items = tuple([self.copy(each, inner) for each in block.items])
            blocks.append(Block(inputs=taken, items=items, outputs=_renamed(block.outputs, inner)))
        names |= {o: self.fresh(o) for o in item.outputs if o >= 0}
        outputs = tuple([names.get(o, o) for o in item.outputs])
        return replace(item, inputs=inputs, blocks=tuple(blocks), outputs=outputs)

    def reading(self, item: OpId | Call, names: Mapping[ValueId, ValueId]) -> OpId | Call:
        """The operator or call, reading other values."""
        if not isinstance(item, Call):
            op = self.ops[item]
            if names.keys().isdisjoint(value_ids(op.inputs)):
                return item
            index = OpId(len(self.ops))
            self.op_origins.append(self.op_origins[item])
            self.ops.append(structs.replace(op, index=index, inputs=_renamed(op.inputs, names)))
            return index
        blocks = []
        for block in item.blocks:
            inputs, outputs = _renamed(block.inputs, names), _renamed(block.outputs, names)
            items = tuple([self.reading(each, names) for each in block.items])
            blocks.append(Block(inputs=inputs, items=items, outputs=outputs))
        return replace(item, inputs=_renamed(item.inputs, names), blocks=tuple(blocks))


def _renamed(operands: Iterable[Operand], names: Mapping[ValueId, ValueId]) -> tuple[Operand, ...]:
    return tuple([i if isinstance(i, Literal) else names.get(i, i) for i in operands])


class _Region(msgspec.Struct):
    """A part of the backward pass: what a layer computes again, then operators of the pass, up to
    the last that reads a value of the layer, or to the next region.
    """

    last: int
    scope: str
    items: list[OpId | Call]


def _with_regions(loose: _Loose, sites: _Sites, name: str) -> list[OpId | Call]:
    """The items of a step whose layers are written out. As with `jax.checkpoint`, what a layer
    computes again stands in one region with its backward pass, whose barrier waits for the
    gradients that enter it.
    """
    graph, items = loose.graph, sites.items
    again, read_elsewhere = _recomputed(graph, sites, name)
    reading: dict[ValueId, list[int]] = {}
    for k, item in enumerate(items):
        if item.phase is Phase.BACKWARD:
            for value in item.inputs:
                reading.setdefault(value, []).append(k)
    begins: dict[int, list[int]] = {}
    lasts: dict[int, int] = {}
    for n, layer in enumerate(sites.layers):
        if not made_by(again[n]).isdisjoint(reading):
            own = made_by(layer.forward)
            first = min(reading[o][0] for o in own - read_elsewhere if o in reading)
            begins.setdefault(first, []).append(n)
            own |= sites.weights.intersection(read_by(layer.forward))
            lasts[n] = max(reading[value][-1] for value in own if value in reading)
    names: dict[ValueId, ValueId] = {}
    written: list[OpId | Call | _Region] = []
    late: list[OpId | Call] = []
    region: _Region | None = None
    for k, item in enumerate(items):
        is_backward = item.phase is Phase.BACKWARD
        if region is not None and (k in begins or (is_backward and k > region.last)):
            written += [region, *late]
            region, late = None, []
        for n in begins.get(k, ()):
            copies = [loose.copy(each.op_or_call, names) for each in again[n]]
            scope = graph.ops[item.ops[0]].scope if item.ops else ""
            if region is None:
                region = _Region(last=lasts[n], scope=scope, items=[])
            region.items += copies
        new = loose.reading(item.op_or_call, names) if is_backward else item.op_or_call
        if region is None:
            written.append(new)
        elif is_backward:
            region.items.append(new)
        elif item.phase is Phase.UPDATE:
            # It may read what the region makes, and no operator of the region reads it.
            late.append(new)
        else:
            written.append(new)
    if region is not None:
        written += [region, *late]
    return _closed(loose, written)


def _closed(loose: _Loose, written: Sequence[OpId | Call | _Region]) -> list[OpId | Call]:
    """The items, with regions as calls whose results are what others read."""
    inside = replace(loose.graph, ops=tuple(loose.ops))
    uses = Counter(value_ids(inside.output_values))
    reads: list[Counter[ValueId]] = []
    for each in written:
        parts = each.items if isinstance(each, _Region) else [each]
        reads.append(Counter(itertools.chain(*(reads_of(inside, part) for part in parts))))
        uses.update(reads[-1])
    closed: list[OpId | Call] = []
    for each, own in zip(written, reads, strict=True):
        if not isinstance(each, _Region):
            closed.append(each)
            continue
        made = _made(loose, each.items)
        taken = tuple(value for value in own if value not in made)
        results = tuple(value for value in made if uses[value] > own[value])
        closed.append(_remat(each.items, taken, results, prevent_cse=True, scope=each.scope))
    return closed


def _made(loose: _Loose, items: Iterable[OpId | Call]) -> dict[ValueId, None]:
    """The values that items make, in order."""
    results = (i.outputs if isinstance(i, Call) else loose.ops[i].outputs for i in items)
    return dict.fromkeys(value_ids(itertools.chain(*results)))


def _remat(
    items: Sequence[OpId | Call],
    taken: tuple[ValueId, ...],
    results: tuple[ValueId, ...],
    *,
    prevent_cse: bool,
    scope: str,
) -> Call:
    return Call(
        kind="remat",
        eqn=compat.remat_equation(prevent_cse=prevent_cse, scope=scope),
        blocks=(Block(inputs=taken, items=tuple(items), outputs=results),),
        inputs=taken,
        outputs=results,
    )


def _recomputed(graph: Graph, sites: _Sites, name: str) -> tuple[list[list[Item]], set[ValueId]]:
    """For each layer the forward items that it computes again in the backward pass, in program
    order; and the values that others read than a layer's own forward pass and the backward pass.
    """
    in_layer: dict[int, int] = {}
    owner: dict[ValueId, int] = {}
    for n, layer in enumerate(sites.layers):
        in_layer.update(dict.fromkeys(map(id, layer.forward), n))
        owner.update(dict.fromkeys(made_by(layer.forward), n))
    kept = graph.returned
    wanted: set[ValueId] = set()
    for item in sites.items:
        for value in item.inputs:
            if value not in owner:
                continue
            if item.phase is Phase.BACKWARD:
                wanted.add(value)
            elif in_layer.get(id(item)) != owner[value]:
                kept.add(value)
    again: list[list[Item]] = []
    name, every = recompute_parts(name)
    for n, layer in enumerate(sites.layers):
        if n % (every or 1):
            again.append([])
            continue
        saved = _saved(graph, layer.forward, name, sites.weights) | kept
        made = itertools.chain.from_iterable(item.outputs for item in layer.forward)
        mine = [value for value in made if value in wanted and value not in saved]
        again.append(items_between(layer.forward, mine, frozenset(saved)))
    return again, kept


# -- Loops over layers ------------------------------------------------------------------------


def _with_less_kept(
    loose: _Loose, loop: _Loop, name: str, weights: Collection[ValueId]
) -> dict[int, OpId | Call]:
    """Both scans of a loop over layers, by the identity of the old ones: the first stacks what its
    layers keep, and the second computes the rest again.
    """
    forward, backward = loop.call, loop.backward
    (block,), (other,) = forward.blocks, backward.blocks
    num_consts, num_carry = compat.scan_counts(forward.eqn.params)
    other_consts, other_carry = compat.scan_counts(backward.eqn.params)
    consts, slices = block.inputs[:num_consts], block.inputs[num_consts + num_carry :]
    rows_of = zip(slices, forward.inputs[num_consts + num_carry :], strict=True)
    stacked_from = {}
    for inner, array in rows_of:
        if isinstance(inner, int) and isinstance(array, int):
            stacked_from[inner] = array
    # What the first scan stacks for the second: by the array, the value of which it holds the rows.
    stacks: dict[ValueId, ValueId] = {}
    for k in loop.stacks:
        value = block.outputs[num_carry + k]
        if isinstance(value, int):
            stacks[forward.outputs[num_carry + k]] = value
    # What the second scan gets row by row: the arrays, and what stands for a row inside its body.
    given = list(
        zip(
            backward.inputs[other_consts + other_carry :],
            other.inputs[other_consts + other_carry :],
            strict=True,
        )
    )
    rows = {
        stack: inner for stack, inner in given if isinstance(stack, int) and isinstance(inner, int)
    }
    made = made_by(loop.forward)
    saved = _saved(loose.graph, loop.forward, name, weights)
    wanted = [value for value in stacks.values() if value in made and value not in saved]
    again = items_between(loop.forward, wanted, frozenset(saved))
    made_again = made_by(again)
    leaves = [i for i in read_by(again) if i not in made_again]
    # What the second scan reads of each value of the first one's body, by that value.
    names: dict[ValueId, ValueId] = {}
    more_consts: dict[ValueId, None] = {}
    more_rows: dict[ValueId, ValueId] = {}
    new_stacks: list[tuple[ValueId, ValueId]] = []
    instead: dict[ValueId, ValueId] = {}
    known = {value: stack for stack, value in stacks.items() if value not in made_again}

    def row(stack: ValueId, like: ValueId) -> ValueId:
        """What the second scan's body reads of a stack, added to its operands if need be."""
        if stack in rows:
            return rows[stack]
        if stack not in more_rows:
            more_rows[stack] = loose.fresh(like)
        return more_rows[stack]

    for leaf in leaves:
        if leaf in stacked_from:
            names[leaf] = row(stacked_from[leaf], leaf)
        elif leaf in consts:
            more_consts[leaf] = None
        elif leaf in loose.graph.constants:
            continue
        elif leaf in known:
            names[leaf] = rows[known[leaf]]
        else:
            length = forward.eqn.params["length"]
            stack = loose.fresh(leaf, (length, *loose.values[leaf].shape))
            new_stacks.append((stack, leaf))
            names[leaf] = row(stack, leaf)
    dropped: set[ValueId] = set()
    copies = [loose.copy(item.op_or_call, names) for item in again]
    for stack, value in stacks.items():
        if value in made_again:
            new = names[value]
        elif value in stacked_from:
            # A row of what the first scan gets row by row, such as a weight.
            new = row(stacked_from[value], value)
        else:
            continue
        dropped.add(stack)
        for array, old in given:
            if array == stack and isinstance(old, int):
                instead[old] = new
    if not dropped:
        return {}
    ends, results = [*block.outputs[:num_carry]], [*forward.outputs[:num_carry]]
    stacked = zip(forward.outputs[num_carry:], block.outputs[num_carry:], strict=True)
    for stack, inner in (*stacked, *new_stacks):
        if stack not in dropped:
            ends.append(inner)
            results.append(stack)
    alive = set(value_ids(ends))
    first = replace(
        forward,
        eqn=compat.loop_like(forward.eqn, num_carry, num_consts, scope=_scope(loose, forward)),
        blocks=(
            Block(
                inputs=block.inputs,
                items=tuple(_live(loose, block.items, alive)),
                outputs=tuple(ends),
            ),
        ),
        outputs=tuple(results),
    )
    around = tuple(value for value in more_consts if value not in backward.inputs[:other_consts])
    carried = slice(other_consts, other_consts + other_carry)
    inputs = [*other.inputs[:other_consts], *around, *other.inputs[carried]]
    operands = [*backward.inputs[:other_consts], *around, *backward.inputs[carried]]
    for array, old in given:
        if array not in dropped:
            inputs.append(old)
            operands.append(array)
    inputs += more_rows.values()
    operands += more_rows
    body = [*copies, *(loose.reading(item, instead) for item in other.items)]
    outputs = _renamed(other.outputs, instead)
    second = replace(
        backward,
        eqn=compat.loop_like(
            backward.eqn, other_carry, other_consts + len(around), scope=_scope(loose, backward)
        ),
        blocks=(_in_region(loose, tuple(inputs), body, outputs),),
        inputs=tuple(operands),
    )
    return {id(forward): first, id(backward): second}


def _in_region(
    loose: _Loose,
    inputs: tuple[Operand, ...],
    items: Sequence[OpId | Call],
    outputs: tuple[Operand, ...],
) -> Block:
    """A loop's body that is one region, as `jax.checkpoint` leaves it."""
    inside = replace(loose.graph, ops=tuple(loose.ops))
    made = _made(loose, items)
    every = itertools.chain.from_iterable(reads_of(inside, item) for item in items)
    reads = dict.fromkeys(i for i in every if i not in made)
    results = tuple([o for o in dict.fromkeys(value_ids(outputs)) if o in made])
    region = _remat(items, tuple(reads), results, prevent_cse=False, scope="")
    return Block(inputs=inputs, items=(region,), outputs=outputs)


def _scope(loose: _Loose, call: Call) -> str:
    """The names of the user's code around a loop."""
    links = loose.graph.links
    return next((links[v].scope for v in call.outputs if v in links), "")


def _live(loose: _Loose, items: Sequence[OpId | Call], wanted: set[ValueId]) -> list[OpId | Call]:
    """The items that make wanted values, or have effects."""
    graph = replace(loose.graph, ops=tuple(loose.ops))
    needed, alive = set(wanted), []
    for item in reversed(items):
        outputs = item.outputs if isinstance(item, Call) else loose.ops[item].outputs
        if not needed.isdisjoint(outputs) or any_effects(item, graph):
            alive.append(item)
            needed.update(reads_of(graph, item))
    return alive[::-1]
