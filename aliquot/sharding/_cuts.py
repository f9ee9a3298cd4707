"""Cuts of a graph into nodes: the slots through which operators read arrays, and the dims that
operators tie.

An array may change its split at a cut: around products; where arrays made of parameters alone meet
activations; and where gradients end. A gradient ends where it is summed over the batch: what only
adds such sums up on their way to the update belongs to the update, and what the update computes for
each example does not. Arrays made of constants alone have no split of their own: they are computed
in whatever split their users want.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..graph import (
    Block,
    Call,
    DimRule,
    Folding,
    Graph,
    Op,
    Phase,
    Role,
    ValueId,
    traits_of,
    value_ids,
)
from ._dim_rule import dim_rule
from ._exchanges import Exchanges, Place, find_exchanges
from ._ids import SlotId
from ._slots import Slots

# Stands for the dims of an exchange among the factors of a rule, which are letters.
_EXCHANGED = ""


def dims_of_batch(
    graph: Graph,
    folding: Folding,
    rules: Sequence[DimRule],
    sources: Sequence[Sequence[Counter[int]]],
    order: Sequence[int],
) -> list[set[int]]:
    """For each value class the dims that hold examples: the leading dim of the inputs that belong
    to the batch, and what operators make of it.

    Where a loop takes one row of that dim after the other, nothing is said of the rows.

    Args:
        graph, folding: the step, and its classes of equal operators and values.
        rules, sources: of each operator class; see `Cuts`.
        order: the operator classes in program order.
    """
    value_class = folding.value_class
    found: list[set[int]] = [set() for _ in folding.value_members]
    for item in graph.inputs:
        if item.role is Role.BATCH and graph.values[item.value].shape[:1] > (1,):
            found[int(value_class[item.value])].add(0)
    if not any(found):
        return found
    first_reader: dict[int, int] = {}
    for place, op_class in enumerate(order):
        for v in itertools.chain(*sources[op_class]):
            first_reader.setdefault(v, place)
    again = True
    # Again where a layer reads what an equal one made, and where a loop carries examples.
    while again:
        again = False
        for place, op_class in enumerate(order):
            op, rule = graph.ops[folding.members[op_class][0]], rules[op_class]
            arrays = []
            for k, read in enumerate(sources[op_class]):
                for v in read:
                    arrays.append((v, rule.operands[k]))
            letters: set[str] = set()
            for v, dims in arrays:
                letters.update(*(dims[dim] for dim in found[v]))
            letters.discard("1")
            if not letters:
                continue
            made = []
            for out, dims in zip(op.outputs, rule.results, strict=True):
                if out >= 0:
                    made.append((int(value_class[out]), dims))
            # What a loop carries holds the same in its first turn.
            made += arrays if op.name == "tie" else []
            for v, dims in made:
                holding = {d for d, names in enumerate(dims) if _holds(op, names, letters)}
                if not holding <= found[v]:
                    found[v] |= holding
                    again = again or first_reader.get(v, place) < place
    return found


def _holds(op: Op, names: str, letters: set[str]) -> bool:
    """True if a dim with these factors holds examples, which operands hold in these `letters`."""
    if letters & set(names):
        return True
    # Dims that an operator needs whole have factors of their own on both sides.
    return names.isupper() and not op.is_link and any(map(str.isupper, letters))


@dataclass(slots=True, kw_only=True)
class Cuts:
    """The quotient graph, cut: for each operator class its rule and the slots of its operands and
    results.

    Attributes:
        graph, folding: the step, and its classes of equal operators and values.
        rules, first: the rule and the first operator of each operator class.
        sources: for each operator class and operand, how many of its copies read which value class.
        producer: for each value class the operator class that makes it and the position among its
            results; None for inputs and constants.
        const_only, param_only: for each value class what it is made of; see `_origins`.
        batch_dims: for each value class the dims that hold examples; see `dims_of_batch`.
        fresh: for each value class whether it is a gradient fresh from a product, or a sum of
            gradients; see `_mark_fresh`.
        slots: the slots and the groups that they form.
        exchanges: operators that put the rows of the batch elsewhere.
    """

    graph: Graph
    folding: Folding
    rules: list[DimRule]
    first: list[Op]
    sources: list[list[Counter[int]]]
    producer: list[tuple[int, int] | None]
    const_only: list[bool]
    param_only: list[bool]
    batch_dims: list[set[int]]
    fresh: list[bool]
    slots: Slots = field(default_factory=Slots)
    exchanges: Exchanges = field(default_factory=Exchanges)
    # All of these are asked for many times of each operator.
    _on_examples: list[bool] = field(init=False, repr=False)
    _shapes: list[tuple[int, ...]] = field(init=False, repr=False)
    _reads: list[tuple[tuple[int, int, int], ...]] = field(init=False, repr=False)
    _zones: dict[int, str] = field(init=False, default_factory=dict, repr=False)
    _operand_slots: dict[tuple[int, int], SlotId | None] = field(
        init=False, default_factory=dict, repr=False
    )

    def __post_init__(self) -> None:
        values = self.graph.values
        self._shapes = [values[members[0]].shape for members in self.folding.value_members]
        self._reads: list[tuple[tuple[int, int, int], ...]] = []
        for counters in self.sources:
            read = []
            for position, counter in enumerate(counters):
                for value_class, count in counter.items():
                    read.append((position, value_class, count))
            self._reads.append(tuple(read))
        self._on_examples = []
        for op_class, reads in enumerate(self._reads):
            touched = (*self.made(op_class), *(v for _, v, _ in reads))
            self._on_examples.append(any(self.batch_dims[v] for v in touched))

    def shape(self, value_class: int) -> tuple[int, ...]:
        """Shape of the values of a class."""
        return self._shapes[value_class]

    def times_made(self, value_class: int) -> float:
        """Number of times that a step makes a value; 1 for inputs. A loop writes a stack once, row
        by row.
        """
        producer = self.producer[value_class]
        if producer is None:
            return 1.0
        op = self.first[producer[0]]
        return (
            op.trips / max(self.shape(value_class)[0], 1)
            if op.name == "scan_stack"
            else float(op.trips)
        )

    def by_product(self, value_class: int) -> bool:
        """True if a product makes a value."""
        producer = self.producer[value_class]
        return producer is not None and self.rules[producer[0]].contracts

    def home(self, value_class: int) -> SlotId | None:
        """The slot in which a value arises; None for products, constants and scalars."""
        # Constants stay out of the groups: tables of rotary embeddings would tie queries, keys and
        # all layers together.
        if (
            self.const_only[value_class]
            or self.by_product(value_class)
            or not self.shape(value_class)
        ):
            return None
        return self.slots.get(value_class, self.shape(value_class))

    def operand_slot(self, op_class: int, value_class: int) -> SlotId | None:
        """The slot through which a group operator reads a value."""
        key = op_class, value_class
        if key not in self._operand_slots:
            self._operand_slots[key] = self._find_operand_slot(op_class, value_class)
        return self._operand_slots[key]

    def _find_operand_slot(self, op_class: int, value_class: int) -> SlotId | None:
        if self.const_only[value_class] or not self.shape(value_class):
            return None
        zone = self.zone(op_class)
        if self.by_product(value_class):
            return self.slots.get(("landed", value_class, zone), self.shape(value_class))
        # This lets activations read a gathered copy of a parameter that is stored in another split,
        # as under ZeRO-3.
        is_parameter = self.param_only[value_class] or self._is_state(op_class, value_class)
        if is_parameter and not self.makes_param_only(op_class):
            return self.slots.get(("parameter", value_class, zone), self.shape(value_class))
        # Without this cut, gradients of norm scales, which are reductions of activations, would tie
        # the optimizer state to the activations.
        if zone == "update" and self.crosses(value_class):
            return self.slots.get(("gradient", value_class), self.shape(value_class))
        return self.home(value_class)

    def zone(self, op_class: int) -> str:
        """Zone of an operator: "update" for those of the update that do not work on examples, and
        for those that only rearrange gradients or add them up on the way there; else "main". Each
        zone reads through slots of its own.
        """
        if op_class not in self._zones:
            self._zones[op_class] = self._find_zone(op_class)
        return self._zones[op_class]

    def _find_zone(self, op_class: int) -> str:
        op = self.first[op_class]
        if op.phase is Phase.UPDATE:
            return "main" if self.on_examples(op_class) else "update"
        fresh = any(self.fresh[v] for v in self.made(op_class))
        return "update" if fresh else "main"

    def on_examples(self, op_class: int) -> bool:
        """True if an operand or result of an operator holds examples."""
        return self._on_examples[op_class]

    def _is_state(self, op_class: int, value_class: int) -> bool:
        """True if an operator of the update, which works on examples, reads what does not hold any,
        such as a new parameter.
        """
        op = self.first[op_class]
        if op.phase is not Phase.UPDATE or self.batch_dims[value_class]:
            return False
        return self.on_examples(op_class)

    def crosses(self, value_class: int) -> bool:
        """True if a value is made in the forward or backward pass, or from examples, and not merely
        rearranged or added up on its way to the update since a gradient ended.
        """
        producer = self.producer[value_class]
        if producer is None or self.fresh[value_class]:
            return False
        phase = self.first[producer[0]].phase
        return phase in (Phase.FORWARD, Phase.BACKWARD) or (
            phase is Phase.UPDATE and self.on_examples(producer[0])
        )

    def makes_param_only(self, op_class: int) -> bool:
        """True if an operator computes on parameters alone."""
        return any(self.param_only[v] for v in self.made(op_class))

    def made_of_constants(self, op_class: int) -> bool:
        """True if all results of an operator are made of constants alone."""
        return all(self.const_only[v] for v in self.made(op_class))

    def made(self, op_class: int) -> list[int]:
        """The value classes of the results of an operator class."""
        outputs = value_ids(self.first[op_class].outputs)
        return [int(self.folding.value_class[o]) for o in outputs]

    def operands(self, op_class: int) -> tuple[tuple[int, int, int], ...]:
        """`(position, value class, how many copies read it)` of an operator class; literals are
        left out.
        """
        return self._reads[op_class]


def cut(graph: Graph, folding: Folding, on_missing_rule: str) -> Cuts:
    """Cut a folded graph. Raises `MissingRuleError` for an operator without a rule."""
    first, rules = [], []
    for members in folding.members:
        first.append(graph.ops[members[0]])
        rules.append(dim_rule(first[-1], graph, on_missing_rule=on_missing_rule))
    const_only, param_only = _origins(graph)
    by_value = folding.value_members
    producer: list[tuple[int, int] | None] = [None] * len(by_value)
    sources: list[list[Counter[int]]] = []
    for op in first:
        sources.append([Counter() for _ in op.inputs])
    classes = folding.value_class.tolist()
    for op_class, op in enumerate(first):
        for position, out in enumerate(op.outputs):
            if out >= 0:
                producer[classes[out]] = (op_class, position)
    # All copies are looked at, since equal operators may read arrays of different classes, as the
    # first layer does.
    for op in graph.ops:
        counters = sources[int(folding.op_class[op.index])]
        for position, operand in enumerate(op.inputs):
            if isinstance(operand, int):
                counters[position][classes[operand]] += 1
    order = sorted(range(len(first)), key=lambda c: first[c].index)
    cuts = Cuts(
        graph=graph,
        folding=folding,
        rules=rules,
        first=first,
        sources=sources,
        producer=producer,
        const_only=[const_only[members[0]] for members in by_value],
        param_only=[param_only[members[0]] for members in by_value],
        batch_dims=dims_of_batch(graph, folding, rules, sources, order),
        fresh=[False] * len(by_value),
    )
    _mark_fresh(cuts, order)
    cuts.exchanges = find_exchanges(cuts, order)
    for op_class in order:
        _tie(cuts, op_class)
    for one, other in cuts.exchanges.across:
        _tie_across(cuts, one, other)
    # An input that no operator reads is split as well, and needs a slot.
    for item in graph.inputs:
        cuts.home(classes[item.value])
    # Partial sums that leave the step, or a stage, are summed first, and need a slot for that
    # although no operator reads them.
    for output in graph.outputs:
        if isinstance(output.value, int):
            # Give a product's result a slot behind the product, unless it has one because an
            # operator reads it.
            value_class = classes[output.value]
            shape = cuts.shape(value_class)
            keys = ("landed", value_class, "main"), ("landed", value_class, "update")
            if shape and cuts.by_product(value_class) and cuts.slots.by_key.keys().isdisjoint(keys):
                cuts.slots.get(keys[0], shape)
    return cuts


def _origins(graph: Graph) -> tuple[list[bool], list[bool]]:
    """For each value: whether it is made of constants alone; whether it is made of parameters (and
    constants) alone, by operators whose results are no larger than their operands.
    """
    const = [False] * len(graph.values)
    param = [False] * len(graph.values)
    for index in graph.constants:
        const[index] = True
    for item in graph.inputs:
        param[item.value] = item.role is Role.PARAMETER
    for op in graph.ops:
        inputs = value_ids(op.inputs)
        # A loop's carry may start as a constant, but does not stay one.
        is_const = all(const[i] for i in inputs) and op.name != "tie"
        largest = max((graph.values[i].num_bytes for i in inputs if param[i]), default=0)
        is_param = (
            not is_const
            and op.phase is not Phase.UPDATE
            and all(const[i] or param[i] for i in inputs)
            and op.name not in ("gather", "tie")
            and not traits_of(op.name).multiplies
        )
        for out in op.outputs:
            if out >= 0:
                const[out] = is_const
                param[out] = is_param and graph.values[out].num_bytes <= largest
    return const, param


def rearranges(op: Op) -> bool:
    """True if an operator only rearranges or casts one array. Between the product that makes a
    weight's gradient and the update, it belongs to the update.
    """
    moves = traits_of(op.name).moves
    return op.name in ("scan_stack", "tie") or (moves is not None and moves.keeps_all)


def taken_by_regions(block: Block) -> Iterator[ValueId]:
    """Values that the remat regions of a block take, and those of the blocks inside it."""
    for item in block.items:
        if isinstance(item, Call):
            if item.kind == "remat":
                yield from value_ids(item.blocks[0].inputs)
            for inner in item.blocks:
                yield from taken_by_regions(inner)


def _mark_fresh(cuts: Cuts, order: list[int]) -> None:
    """Mark as fresh the gradients that only the update reads: those that a product made and that
    were only rearranged since; and those that have ended and are added up, as those of a bias that
    is used twice are, with all that happens to them before.
    """
    made = list(map(cuts.made, range(len(cuts.first))))
    reads = []
    for c in range(len(cuts.first)):
        reads.append([v for _, v, _ in cuts.operands(c)])
    rearranging = list(map(rearranges, cuts.first))
    adding = [traits_of(op.name).adds for op in cuts.first]
    # Sums of products alone need no other cut than those behind the products.
    of_products = list(map(cuts.by_product, range(len(cuts.fresh))))
    for op_class in order:
        if (adding[op_class] or rearranging[op_class]) and reads[op_class]:
            only_products = all(of_products[v] for v in reads[op_class])
            for v in made[op_class]:
                of_products[v] = only_products
    # Whether only the update reads a value: at once, after it was rearranged, or after whatever
    # happens to a gradient that has ended.
    at_once = [True] * len(cuts.fresh)
    at_last = [True] * len(cuts.fresh)
    # Whether a value is added up, and whether that is a loop's running total, which is one with
    # what the loop sums unless it is added up itself.
    in_sum = [False] * len(cuts.fresh)
    in_total = [False] * len(cuts.fresh)
    added_up = [False] * len(cuts.first)
    # From the last operator to the first, so that all readers of a value are seen before its maker.
    for op_class in reversed(order):
        op, rule, results = cuts.first[op_class], cuts.rules[op_class], made[op_class]
        on_examples = cuts.on_examples(op_class)
        is_update = op.phase is Phase.UPDATE
        hands_on = rearranging[op_class] and all(at_once[v] for v in results)
        ended = (
            op.phase is Phase.BACKWARD
            and not (rule.contracts or rule.reduced or on_examples)
            and all(at_last[v] for v in results)
        )
        # The terms of a total that hold no products.
        vectors = not any(of_products[v] for v in reads[op_class])
        begins = adding[op_class] and not all(of_products[v] for v in reads[op_class])
        leads = any(in_sum[v] for v in results) and (
            vectors or not any(in_total[v] for v in results)
        )
        if ended and (leads or (begins and not any(in_total[v] for v in results))):
            # Ties of loops hold what goes round together, whatever reads it.
            added_up[op_class] = op.name != "tie"
            for v in reads[op_class]:
                in_sum[v] = True
        for v in reads[op_class]:
            at_once[v] = at_once[v] and (is_update or hands_on)
            at_last[v] = at_last[v] and (ended or (is_update and not on_examples))
            in_total[v] = in_total[v] or op.name == "tie"
    for op_class in order:
        rearranged = (
            cuts.first[op_class].phase is Phase.BACKWARD
            and rearranging[op_class]
            and not cuts.on_examples(op_class)
            and all(at_once[v] for v in made[op_class])
            and all(cuts.by_product(v) or cuts.fresh[v] for v in reads[op_class])
        )
        if reads[op_class] and (rearranged or added_up[op_class]):
            for v in made[op_class]:
                cuts.fresh[v] = True


def _tie(cuts: Cuts, op_class: int) -> None:
    """Unite the dims that one group operator ties, and put its arrays into one group."""
    rule, op = cuts.rules[op_class], cuts.first[op_class]
    if rule.contracts:
        return
    slots = cuts.slots
    exchange = cuts.exchanges.of(op_class)
    elements: dict[str, list[int]] = {}
    touched: list[SlotId] = []

    def visit(slot: SlotId | None, dims: tuple[str, ...], exchanged: int) -> None:
        if slot is None:
            return
        touched.append(slot)
        for dim, factors in enumerate(dims):
            element = slots.element(slot, dim)
            if dim == exchanged:
                elements.setdefault(_EXCHANGED, []).append(element)
            elif factors[0] in exchange.untied:
                continue
            elif factors[0].islower():
                elements.setdefault(factors[0], []).append(element)
            # Each iteration of a loop takes one row of the stack: if that dim is split, XLA gathers
            # the whole stack.
            elif factors != "1" and op.name in ("scan_slice", "scan_stack"):
                slots.block(element)

    for position, value_class, _ in cuts.operands(op_class):
        exchanged = exchange.at(False, position)
        visit(cuts.operand_slot(op_class, value_class), rule.operands[position], exchanged)
    for position, out in enumerate(op.outputs):
        if out >= 0:
            home = cuts.home(int(cuts.folding.value_class[out]))
            visit(home, rule.results[position], exchange.at(True, position))
    for members in elements.values():
        for other in members[1:]:
            slots.unite(members[0], other)
    slots.join(touched)


def _tie_across(cuts: Cuts, one: Place, other: Place) -> None:
    """Unite two dims that hold the batch, on both sides of arrays that are computed whole."""
    slots = cuts.slots
    for a in _slots_at(cuts, one):
        for b in _slots_at(cuts, other):
            if slots.group(a) == slots.group(b):
                slots.unite(slots.element(a, one.dim), slots.element(b, other.dim))


def _slots_at(cuts: Cuts, place: Place) -> list[SlotId]:
    op_class, position = place.op_class, place.position
    if cuts.rules[op_class].contracts:
        return []
    if place.is_result:
        slots = [cuts.home(int(cuts.folding.value_class[cuts.first[op_class].outputs[position]]))]
    else:
        slots = [cuts.operand_slot(op_class, v) for v in cuts.sources[op_class][position]]
    return [slot for slot in slots if slot is not None]
