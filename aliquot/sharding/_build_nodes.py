"""Construction of a `NodeGraph`: one pass over the classes of a folded, cut graph.

A class of operators or values stands for equal ones, such as those of all layers. Each product is a
node, and so is each group of slots that are split together; a slot is an array as one group of
operators sees it. A port says how an array lies in its node. `naming`, the index of the nodes
(`NodeIndex`), finds all of these by class. For where arrays may change their split see `Cuts`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..cluster import Target
from ..graph import Graph, Operand, OpId, Phase, Role, fold
from ._cuts import cut, taken_by_regions
from ._dim_rule import is_declared
from ._edges import EdgeBuilder
from ._ids import NodeId, SlotId
from ._node_collectives import batch_sums, group_collectives, product_collectives, whole_bytes
from ._node_index import NodeIndex
from ._nodes import Adjacency, Factor, Node, NodeGraph, Port, Site, TokenSum, WholeOperator
from ._spec import REPLICATED


def index_nodes(graph: Graph, *, repeats: bool = True, on_missing_rule: str = "infer") -> NodeIndex:
    """The index of a step's nodes and arrays.

    Args:
        repeats: fold equal layers into one decision.
        on_missing_rule: see `dim_rule`.

    Raises:
        MissingRuleError: a primitive has no rule.
    """
    return NodeIndex(
        cuts=cut(graph, fold(graph, repeats=repeats), on_missing_rule),
        on_missing_rule=on_missing_rule,
    )


def build_nodes(
    naming: NodeIndex,
    target: Target,
    *,
    sums_gradients: bool = False,
    passes_apart: bool = False,
) -> NodeGraph:
    """The decisions of a step, for any mesh.

    Args:
        naming: the index of its nodes, from `index_nodes`.
        target: says how its compiler reduces sums of partial products.
        sums_gradients: whether gradients are summed over micro-batches before they are reduced.
        passes_apart: whether the forward and the backward pass are programs of their own, as those
            of a pipeline's stages are: each then converts what it reads.
    """
    cuts, graph = naming.cuts, naming.cuts.graph
    edges = EdgeBuilder(
        naming=naming, target=target, sums_gradients=sums_gradients, passes_apart=passes_apart
    )
    for op_class in naming.order:
        edges.add_operator(op_class)
    edges.add_crossings()
    edges.add_aliases()
    nodes = tuple(_node(naming, NodeId(index)) for index in range(len(naming.kinds)))
    batch_factors = _batch_factors(naming, edges, nodes)
    # Ports of values that loops carry and slice, which are the results of links, and of values that
    # rematerialised regions take.
    ports = {}
    linked = {op.outputs[0] for op in graph.ops if op.is_link}
    # A region's barrier hides from the compiler how its operands are split; without a pin, the
    # compiler would choose other splits.
    for value in linked | set(taken_by_regions(graph.body)):
        if value >= 0:
            value_class = int(naming.cuts.folding.value_class[value])
            port = (naming.landed_ports(value_class) or [naming.class_port(value_class)])[0]
            if port.node >= 0:
                ports[value] = port
    return NodeGraph(
        nodes=nodes,
        edges=tuple(edges.edges),
        sites=tuple(_sites(naming)),
        input_ports=tuple(_boundary_port(naming, i.value) for i in graph.inputs),
        output_ports=tuple(_output_port(naming, o.value) for o in graph.outputs),
        num_ops=len(graph.ops),
        batch_factors=batch_factors,
        batch_sums=batch_sums(naming, batch_factors),
        op_class=tuple(cuts.folding.op_class.tolist()),
        loop_ports=ports,
        folded=any(len(m) > 1 for m in cuts.folding.members),
        on_missing_rule=naming.on_missing_rule,
        whole=tuple(_whole_operators(naming)),
        small=tuple(
            (cuts.first[op_class].index, rows)
            for op_class, rows in sorted(cuts.exchanges.small.items())
        ),
        token_sums=tuple(_token_sum(naming, c) for c in sorted(naming.token_sums)),
    )


def _token_sum(naming: NodeIndex, op_class: int) -> TokenSum:
    cuts = naming.cuts
    rule, op = cuts.rules[op_class], cuts.first[op_class]
    operands: list[Port | None] = [None] * len(op.inputs)
    for position, value_class, _ in cuts.operands(op_class):
        operands[position] = (
            naming.product_port(op_class, rule.operands[position])
            if rule.contracts
            else naming.slot_port(cuts.operand_slot(op_class, value_class))
        )
    summed = []
    for dims in rule.operands:
        summed.append(frozenset(d for d, c in enumerate(dims) if c[0] in rule.reduced))
    return TokenSum(op_class=op_class, operands=tuple(operands), summed=tuple(summed))


def _whole_operators(naming: NodeIndex) -> Iterator[WholeOperator]:
    """Operators that every device runs on whole arrays, as none of their dims may be split."""
    for op_class in naming.order:
        if op_class in naming.op_group and naming.runs_whole(op_class):
            op = naming.cuts.first[op_class]
            yield WholeOperator(
                label=naming.label(op_class),
                index=op.index,
                num_bytes=whole_bytes(naming, op_class),
                count=float(len(naming.cuts.folding.members[op_class]) * op.trips),
                phase=op.phase,
                declared=is_declared(op),
            )


def _node(naming: NodeIndex, index: NodeId) -> Node:
    """The node of a product, or of a group of slots."""
    kind, which = naming.kinds[index]
    if kind == "product":
        rule = naming.cuts.rules[which]
        return Node(
            index=index,
            label=naming.label(which),
            kind=kind,
            factors=tuple(Factor(size=rule.sizes[f], label=f) for f in rule.factors),
            copies=len(naming.cuts.folding.members[which]),
            phase=naming.cuts.first[which].phase,
            multiplies=rule.flops > 0,
            collectives=product_collectives(naming, which),
        )
    slots = naming.group_slots[SlotId(which)]
    # Factors of a group, one for each class of dims that are split together: its size is the gcd of
    # theirs, and its label the first of them.
    store = naming.cuts.slots
    sizes = [0] * len(naming.group_classes[index])
    labels = [""] * len(sizes)
    shortest: list[tuple[float, OpId | None]] = [(math.inf, None)] * len(sizes)
    for slot in slots:
        # An array that devices need not divide is seen by the compiler alone.
        if naming.slot_value[slot] in naming.cuts.exchanges.uneven:
            continue
        for dim in range(store.ranks[slot]):
            element = store.element(slot, dim)
            factor = naming.factor_of.get(store.dim_class(element))
            if factor is not None:
                size = store.sizes[element]
                sizes[factor] = math.gcd(sizes[factor], size)
                if size < shortest[factor][0]:
                    producer = naming.cuts.producer[naming.slot_value[slot]]
                    shortest[factor] = (
                        size,
                        (None if producer is None else naming.cuts.first[producer[0]].index),
                    )
                labels[factor] = (
                    labels[factor] or f"{naming.label_of_value(naming.slot_value[slot])}.{dim}"
                )
    # The input that a group holds, or its first array.
    values = [naming.slot_value[s] for s in slots]
    named = [v for v in values if naming.cuts.producer[v] is None]
    # Equal labels are numbered.
    seen: Counter[str] = Counter()
    factors = []
    for size, label, (_, op) in zip(sizes, labels, shortest, strict=True):
        seen[label] += 1
        distinct = label if seen[label] == 1 else f"{label}#{seen[label]}"
        factors.append(Factor(size=size, label=distinct, shortest=op))
    return Node(
        index=index,
        label=naming.label_of_value((named or values)[0]),
        kind=kind,
        factors=tuple(factors),
        copies=max(len(naming.cuts.folding.value_members[naming.slot_value[s]]) for s in slots),
        collectives=group_collectives(naming, index),
    )


def _sites(naming: NodeIndex) -> list[Site]:
    """Places at which the runtime pins splits: products, and other operators that read an array
    through a slot other than its home, or make one that a product reads.

    A product's result is pinned twice, as the product makes it and as its readers want it. Without
    pins the compiler would propagate a product's split back to the arrays that it reads, and to
    those that these are made of. Of primitives without a declared rule the compiler knows nothing:
    their operands are pinned as the inferred rule wants them.
    """
    cuts = naming.cuts
    readers = _product_readers(naming)
    sites = []
    for op_class in naming.order:
        op, rule = cuts.first[op_class], cuts.rules[op_class]
        # Links only connect values inside a loop with those outside, so that there is nothing to
        # pin.
        if op.is_link:
            continue
        result_classes = [int(cuts.folding.value_class[o]) if o >= 0 else -1 for o in op.outputs]
        if rule.contracts:
            operands = tuple(
                naming.product_port(op_class, rule.operands[k]) if isinstance(i, int) else None
                for k, i in enumerate(op.inputs)
            )
            results = []
            for position, value_class in enumerate(result_classes):
                port = naming.result_port(op_class, position)
                landed = naming.landed_ports(value_class) if value_class >= 0 else []
                results.append((port, *landed[:1]))
            sites.append(
                Site(
                    op_class=op_class,
                    operands=operands,
                    sources=_sources(naming, op_class, operands),
                    results=tuple(results),
                    on_pieces=any(v >= 0 and naming.on_pieces(v) for v in result_classes),
                )
            )
            continue
        exchange = cuts.exchanges.of(op_class)
        pinned: list[Port | None] = [None] * len(op.inputs)
        for position, value_class, _ in cuts.operands(op_class):
            slot = cuts.operand_slot(op_class, value_class)
            # What a product makes is pinned at the product itself.
            crosses = slot != cuts.home(value_class) or exchange.at(False, position) >= 0
            # Compilers know rolls by a pattern in which no pin may stand.
            pins = crosses and not exchange.rolls and not cuts.by_product(value_class)
            if slot is not None and (pins or not is_declared(op)):
                pinned[position] = naming.slot_port(slot)
        # Products read through transposes: what is converted for them is the array before the
        # transpose.
        feeds_product = []
        for v in result_classes:
            feeds_product.append(
                v in readers and cuts.home(v) is not None and op.name != "transpose"
            )
        # Without pins on both sides the compiler would gather what is to be exchanged.
        exchanged = []
        for k, v in enumerate(result_classes):
            exchanged.append(exchange.at(True, k) >= 0 and v not in cuts.exchanges.uneven)
        if any(p is not None for p in pinned) or any(feeds_product) or any(exchanged):
            made: list[tuple[Port, ...]] = []
            reading: list[tuple[Port, ...]] = []
            for v, feeds, always in zip(result_classes, feeds_product, exchanged, strict=True):
                made.append((naming.class_port(v),) if feeds or always else ())
                reading.append(tuple(readers[v]) if feeds and not always else ())
            sites.append(
                Site(
                    op_class=op_class,
                    operands=tuple(pinned),
                    sources=_sources(naming, op_class, pinned),
                    results=tuple(made),
                    readers=tuple(reading),
                )
            )
    return sites


def _boundary_port(naming: NodeIndex, operand: Operand) -> Port:
    """The port of an input or output of the step; arrays without elements, which JAX does not
    split, stay whole.
    """
    port = naming.operand_port(operand)
    if isinstance(operand, int) and 0 in naming.cuts.graph.values[operand].shape:
        return replace(port, projection=(REPLICATED,) * len(port.projection))
    return port


def _output_port(naming: NodeIndex, operand: Operand) -> Port:
    """The port of an output of the step. For a product's result it is the slot in which the result
    is used, where its partial sums are added up.
    """
    port = _boundary_port(naming, operand)
    if not isinstance(operand, int) or 0 in naming.cuts.graph.values[operand].shape:
        return port
    landed = naming.landed_ports(int(naming.cuts.folding.value_class[operand]))
    return landed[0] if landed else port


def _sources(
    naming: NodeIndex, op_class: int, operands: Sequence[Port | None]
) -> tuple[Port | None, ...]:
    """For each operand that is pinned, the port at which it arises, if that is the same for all
    copies of the operator.
    """
    sources: list[Port | None] = [None] * len(operands)
    for position, value_class, _ in naming.cuts.operands(op_class):
        # Copies that read arrays of different nodes come from different splits, and no single way
        # leads from all of them.
        if operands[position] is not None and len(naming.cuts.sources[op_class][position]) == 1:
            port = naming.class_port(value_class)
            sources[position] = port if port.node >= 0 else None
    return tuple(sources)


def _product_readers(naming: NodeIndex) -> dict[int, list[Port]]:
    """For each value class that products read, the ports at which they do, and those at which it is
    a row of a stack.
    """
    cuts = naming.cuts
    readers: dict[int, list[Port]] = {}
    stacked: dict[int, list[Port]] = {}
    for op_class in naming.order:
        for position, value_class, _ in cuts.operands(op_class):
            if cuts.rules[op_class].contracts:
                port = naming.product_port(op_class, cuts.rules[op_class].operands[position])
                readers.setdefault(value_class, []).append(port)
            elif cuts.first[op_class].name == "scan_stack":
                port = naming.slot_port(cuts.operand_slot(op_class, value_class))
                stacked.setdefault(value_class, []).append(port)
    found = {}
    for value_class, ports in readers.items():
        found[value_class] = ports + stacked.get(value_class, [])
    return found


def _batch_factors(
    naming: NodeIndex, edges: EdgeBuilder, nodes: tuple[Node, ...]
) -> tuple[frozenset[int], ...]:
    """For each node the factors that the batch dim of the inputs runs through.

    It is the leading dim, or the next one where a loop runs over the leading dim, as over the
    batches of several steps; a batch of one row has none. It runs through neither parameters, nor
    their gradients, and through the update only where that works on examples.
    """
    graph, roots = naming.cuts.graph, []
    for item in graph.inputs:
        if item.role is not Role.BATCH:
            continue
        port = naming.value_port(item.value)
        shape = graph.values[item.value].shape
        has_rows = port.node >= 0 and (shape[0] > 1 or item.value in graph.looped)
        for dim in range(min(2, len(shape)) if has_rows else 0):
            if dim in port.projection:
                roots.append((port.node, port.projection.index(dim)))
                break
    parameter_nodes = set()
    for i in graph.inputs:
        if i.role is Role.PARAMETER:
            parameter_nodes.add(naming.value_port(i.value).node)
    ways = Adjacency(
        e
        for e in edges.edges
        if e.index in edges.of_examples or (e.phase is not Phase.UPDATE and not e.gradient)
    )
    reached = ways.reached(roots, set(range(len(nodes))) - parameter_nodes)
    return tuple(frozenset(reached.get(k, ())) for k in range(len(nodes)))
