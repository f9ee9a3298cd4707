"""`NodeIndex`: maps arrays to nodes and their dims to factors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field

from ..graph import Moves, Op, Operand, Phase, Role, ValueId, traits_of, wildcard
from ._cuts import Cuts, rearranges
from ._ids import NO_NODE, NodeId, SlotId
from ._nodes import Port
from ._spec import PARTIAL, REPLICATED
from ._waiting import adds_or_hands_on, sums_that_wait
from .programs import parameter_casts


@dataclass(slots=True, kw_only=True)
class NodeIndex:
    """Maps arrays to nodes and their dims to factors. Nodes are numbered in program order.

    Attributes:
        cuts: the cut step.
        on_missing_rule: see `dim_rule`.
        order: operator classes in program order.
        kinds: for each node "product" and its operator class, or "group" and the slot that stands
            for the group.
        of_product, of_group: the node of each product's operator class, and of each group.
        group_slots: the slots of each group.
        group_classes: for each group's node its classes of dims; their positions are its factors.
        factor_of: the factor of each class of dims.
        slot_value: the value class of each slot.
        group_ops, op_group: the operator classes of each group's node, and the reverse.
        readers_as_split: for each slot the operators that read its array without a conversion.
        value_read_phases: for each value class the phases in which it is read.
        readers: for each value class the operator classes that read it.
        batch_values: the inputs that belong to the batch.
        token_sums: the operator classes whose sums may wait where an axis splits the sequence; see
            `sums_that_wait`.
    """

    cuts: Cuts
    on_missing_rule: str
    order: list[int] = field(default_factory=list)
    kinds: list[tuple[str, int]] = field(default_factory=list)
    of_product: dict[int, NodeId] = field(default_factory=dict)
    of_group: dict[SlotId, NodeId] = field(default_factory=dict)
    group_slots: dict[SlotId, list[SlotId]] = field(default_factory=dict)
    group_classes: dict[NodeId, list[int]] = field(default_factory=dict)
    factor_of: dict[int, int] = field(default_factory=dict)
    slot_value: dict[SlotId, int] = field(default_factory=dict)
    group_ops: dict[NodeId, list[int]] = field(default_factory=dict)
    op_group: dict[int, NodeId] = field(default_factory=dict)
    readers_as_split: dict[SlotId, list[Op]] = field(default_factory=dict)
    value_read_phases: list[set[Phase]] = field(default_factory=list)
    readers: dict[int, set[int]] = field(default_factory=dict)
    batch_values: frozenset[ValueId] = field(init=False)
    token_sums: frozenset[int] = field(init=False)
    _slot_ports: dict[SlotId, Port] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cuts = self.cuts
        self.batch_values = frozenset(cuts.graph.inputs_of(Role.BATCH))
        self.order = sorted(range(len(cuts.first)), key=lambda c: cuts.first[c].index)
        for key, slot in cuts.slots.by_key.items():
            self.slot_value[slot] = key if isinstance(key, int) else key[1]  # type: ignore[index]
            self.group_slots.setdefault(cuts.slots.group(slot), []).append(slot)
        for group, slots in self.group_slots.items():
            self._name_group(group, slots)
        for op_class in self.order:
            if cuts.rules[op_class].contracts:
                self.of_product[op_class] = NodeId(len(self.kinds))
                self.kinds.append(("product", op_class))
        self.value_read_phases = [set() for _ in cuts.producer]
        for op_class in self.order:
            self._place(op_class)
        waiting = sums_that_wait(cuts.graph)
        token_sums = set()
        for op_class, members in enumerate(cuts.folding.members):
            if waiting.keys() >= set(members) and self._makes_gradient(op_class):
                token_sums.add(op_class)
        self.token_sums = frozenset(token_sums)

    def _makes_gradient(self, op_class: int) -> bool:
        """True if the result of a sum is a gradient wherever it is read."""
        cuts = self.cuts
        out = cuts.first[op_class].outputs[0]
        if not cuts.rules[op_class].contracts:
            return self.enters_update(out)
        value_class = int(cuts.folding.value_class[out])
        keys = {("landed", value_class, "main"), ("landed", value_class, "update")}
        return all(map(self.is_gradient, keys & cuts.slots.by_key.keys()))

    def is_gradient(self, key: Hashable) -> bool:
        """True if an array in a slot other than its home is a gradient, or a term of one, such as
        those of a parameter that is used twice: with micro-batches it may wait for the last one.
        """
        assert isinstance(key, tuple)
        kind, value_class, *zone = key
        total = self.serves(
            value_class, lambda op: adds_or_hands_on(op) and op.phase is not Phase.UPDATE
        )
        reaches_update = self.cuts.fresh[total] or ("gradient", total) in self.cuts.slots.by_key
        waits = kind == "landed" and reaches_update
        return waits or kind == "gradient" or (kind == "landed" and zone == ["update"])

    def _place(self, op_class: int) -> None:
        """Find the group of an operator, and note in which phase it reads what."""
        cuts = self.cuts
        op = cuts.first[op_class]
        touched = []
        for _, value_class, _ in cuts.operands(op_class):
            self.value_read_phases[value_class].add(op.phase)
            self.readers.setdefault(value_class, set()).add(op_class)
            if cuts.rules[op_class].contracts:
                continue
            slot = cuts.operand_slot(op_class, value_class)
            if slot is not None:
                touched.append(slot)
                if not self.runs_whole(op_class):
                    self.readers_as_split.setdefault(slot, []).append(op)
        if cuts.rules[op_class].contracts:
            return
        for value_class in cuts.made(op_class):
            slot = cuts.home(value_class)
            if slot is not None:
                touched.append(slot)
        if touched:
            node = self.of_group[cuts.slots.group(touched[0])]
            self.op_group[op_class] = node
            self.group_ops.setdefault(node, []).append(op_class)

    def reads_by_phase(self, slot: SlotId) -> dict[Phase, bool]:
        """For each phase in which operators read a slot without a conversion, whether all of them
        are deferrable.
        """
        by_phase: dict[Phase, bool] = {}
        for op in self.readers_as_split.get(slot, ()):
            by_phase[op.phase] = by_phase.get(op.phase, True) and op.deferrable
        return by_phase

    def _name_group(self, group: SlotId, slots: list[SlotId]) -> None:
        store = self.cuts.slots
        index = self.of_group[group] = NodeId(len(self.kinds))
        self.kinds.append(("group", group))
        classes: dict[int, int] = {}
        for slot in slots:
            for dim in range(store.ranks[slot]):
                root = store.dim_class(store.element(slot, dim))
                # A dim of size 1 stands for an absent dim and gets no factor; a tied or blocked one
                # would keep that dim from being split in the whole group.
                if root not in store.blocked and store.sizes[store.element(slot, dim)] > 1:
                    classes.setdefault(root, len(classes))
        self.factor_of.update(classes)
        self.group_classes[index] = list(classes)

    def slot_port(self, slot: SlotId | None) -> Port:
        """Port of an array in a slot: the factors of its group, by dim."""
        if slot is None:
            return Port(node=NO_NODE, projection=())
        known = self._slot_ports.get(slot)
        if known is None:
            known = self._slot_ports[slot] = self._find_port(slot)
        return known

    def _find_port(self, slot: SlotId) -> Port:
        store = self.cuts.slots
        node = self.of_group[store.group(slot)]
        projection = [REPLICATED] * len(self.group_classes[node])
        for dim in range(store.ranks[slot]):
            factor = self.factor_of.get(store.dim_class(store.element(slot, dim)))
            if factor is not None:
                projection[factor] = dim
        return Port(node=node, projection=tuple(projection))

    def result_port(self, op_class: int, position: int) -> Port:
        """Port of a result of a product."""
        rule = self.cuts.rules[op_class]
        return self.product_port(op_class, rule.results[position], sums=rule.sums(position))

    def product_port(
        self, op_class: int, dims: tuple[str, ...], *, sums: Collection[str] = ()
    ) -> Port:
        """Port of an operand or result of a product: the product's factors, by dim.

        Args:
            sums: the factors over which it is a partial sum.
        """
        rule = self.cuts.rules[op_class]
        projection = []
        number = 0
        for factor in rule.factors:
            names = {factor}
            if rule.exchange is not None and factor == rule.exchange.factor:
                names.add(rule.exchange.beside)
            dim = next((d for d, factors in enumerate(dims) if factors[0] in names), REPLICATED)
            if factor in sums:
                # Each sum of a product has a number of its own, as XLA reduces them one by one
                # unless it merges them.
                dim = PARTIAL - number if rule.reduce == "sum" else REPLICATED
                number += 1
            projection.append(dim)
        return Port(node=self.of_product[op_class], projection=tuple(projection))

    def class_port(self, value_class: int) -> Port:
        """The port at which a value arises: that of its home slot, or that of the product that
        makes it.
        """
        producer = self.cuts.producer[value_class]
        if (
            producer is not None
            and self.cuts.by_product(value_class)
            and not self.cuts.const_only[value_class]
        ):
            return self.result_port(*producer)
        return self.slot_port(self.cuts.home(value_class))

    def value_port(self, value: ValueId) -> Port:
        """As `class_port`, for one value."""
        return self.class_port(int(self.cuts.folding.value_class[value]))

    def operand_port(self, operand: Operand) -> Port:
        """As `value_port`; a port without a node for a literal."""
        return (
            self.value_port(operand)
            if isinstance(operand, int)
            else Port(node=NO_NODE, projection=())
        )

    def landed_ports(self, value_class: int) -> list[Port]:
        """The slots in which a product's result is used."""
        by_key = self.cuts.slots.by_key
        keys = [("landed", value_class, "main"), ("landed", value_class, "update")]
        return [self.slot_port(by_key[k]) for k in keys if k in by_key]

    def on_pieces(self, value_class: int) -> bool:
        """True if a value is a matrix product that is read through slots of its own, so that each
        device can compute its piece from its pieces of the two operands.
        """
        producer = self.cuts.producer[value_class]
        is_product = producer is not None and self.cuts.first[producer[0]].name == "dot_general"
        return is_product and bool(self.landed_ports(value_class))

    def passes_through(self, op_class: int, letter: str, factor: int) -> bool:
        """True if every result of a group operator, scalars aside, carries a letter of its rule in
        a dim of the given factor.
        """
        cuts = self.cuts
        rule, op = cuts.rules[op_class], cuts.first[op_class]
        for dims, out in zip(rule.results, op.outputs, strict=True):
            if out < 0:
                continue
            projection = self.slot_port(cuts.home(int(cuts.folding.value_class[out]))).projection
            carried = any(
                letters[0] == letter and projection[factor] == dim
                for dim, letters in enumerate(dims)
            )
            # A scalar result has no projection; it needs no dim of its own to be split.
            if projection and not carried:
                return False
        return True

    def runs_whole(self, op_class: int) -> bool:
        """True if a group operator lets none of its dims be split, and works on arrays of more than
        one element.
        """
        cuts = self.cuts
        op, rule = cuts.first[op_class], cuts.rules[op_class]
        if (
            op.is_link
            or rearranges(op)
            or rule.contracts
            or rule.factors
            or cuts.made_of_constants(op_class)
        ):
            return False
        return any(n > 1 for n in rule.sizes.values())

    def enters_update(self, value: ValueId) -> bool:
        """True if the update reads a value, or a value that it only serves to make (see
        `serves`).
        """
        value_class = self.serves(int(self.cuts.folding.value_class[value]), _hands_on_or_sums)
        return Phase.UPDATE in self.value_read_phases[value_class]

    def serves(
        self,
        value_class: int,
        through: Callable[[Op], bool],
        ending: Callable[[Op], bool] | None = None,
    ) -> int:
        """The last value that a value serves to make: the result of its only reader, that of this
        result's only reader, and so on; the value itself if it has no or several readers.

        Args:
            through: which operators may stand on the way.
            ending: which of them may make the last value; by default all of them.
        """
        cuts, last, seen = self.cuts, value_class, set[int]()
        # A value with several readers serves more than one result.
        while len(readers := self.readers.get(value_class, set())) == 1:
            op = cuts.first[next(iter(readers))]
            # The terms of a running total over equal layers are one class, so the walk would return
            # to it.
            seen.add(value_class)
            if (
                not through(op)
                or op.outputs[0] < 0
                or int(cuts.folding.value_class[op.outputs[0]]) in seen
            ):
                break
            value_class = int(cuts.folding.value_class[op.outputs[0]])
            last = value_class if ending is None or ending(op) else last
        return last

    def total_dtype(self, value_class: int) -> str:
        """The dtype in which the step hands a gradient to the update: that of the last value of the
        backward pass that a value serves to make.
        """
        cuts, seen = self.cuts, set[int]()
        while value_class not in seen:
            seen.add(value_class)
            readers = [cuts.first[r] for r in self.readers.get(value_class, ())]
            if len(readers) != 1 or readers[0].phase is not Phase.BACKWARD:
                break
            if (out := readers[0].outputs[0]) < 0:
                break
            value_class = int(cuts.folding.value_class[out])
        return cuts.graph.values[cuts.folding.value_members[value_class][0]].dtype

    def label_of_value(self, value_class: int) -> str:
        """Label of a value class: an input's path, or its producer."""
        producer = self.cuts.producer[value_class]
        if producer is not None:
            return self.label(producer[0])
        member = self.cuts.folding.value_members[value_class][0]
        return next(
            (i.path for i in self.cuts.graph.inputs if i.value == member), f"constant:{member}"
        )

    def name_of_value(self, value_class: int) -> str:
        """Name of a value class for messages: the parameter's path for a cast, slice or
        rearrangement of one.
        """
        parameters = (
            self._parameters_behind(value_class) if self.cuts.producer[value_class] else set()
        )
        paths = set(map(self.label_of_value, parameters))
        if len(paths) > 1 or any(len(self.cuts.folding.value_members[v]) > 1 for v in parameters):
            paths = set(map(wildcard, paths))
        return paths.pop() if len(paths) == 1 else self.label_of_value(value_class)

    def _parameters_behind(self, value_class: int) -> set[int]:
        """Parameters of which a value is only a cast, slice or rearrangement, by value class."""
        cuts, producer = self.cuts, self.cuts.producer[value_class]
        if not cuts.param_only[value_class]:
            return set()
        if producer is None:
            return {value_class}
        op = cuts.first[producer[0]]
        if not (rearranges(op) or op.name == "scan_slice"):
            return set()
        found = set()
        for _, v, _ in cuts.operands(producer[0]):
            found.update(self._parameters_behind(v))
        return found

    def label(self, op_class: int) -> str:
        """Label of an operator class: its primitive, and the index of its first operator."""
        op = self.cuts.first[op_class]
        return f"{op.name}:{op.index}"


def adds(op: Op) -> bool:
    """True if it is a sum of arrays."""
    return traits_of(op.name).adds


def adds_or_transposes(op: Op) -> bool:
    """True if it is a sum of arrays, or puts the dims of one into another order."""
    traits = traits_of(op.name)
    return traits.adds or traits.moves is Moves.TRANSPOSE


def adds_transposes_or_casts(op: Op) -> bool:
    """True if it is a sum of arrays, or one array in another order of dims or in another dtype."""
    return adds_or_transposes(op) or traits_of(op.name).moves is Moves.CAST


def _hands_on_or_sums(op: Op) -> bool:
    return adds_or_hands_on(op) or traits_of(op.name).join == "add" or op.name == "scan_stack"


def classes_of_casts(cuts: Cuts) -> dict[int, bool]:
    """The classes of the step's own casts of parameters to narrower types, and whether each is the
    first one that has its result (`parameter_casts`).
    """
    casts = parameter_casts(cuts.graph)
    found = {}
    for op_class, ops in enumerate(cuts.folding.members):
        if all(op in casts for op in ops):
            found[op_class] = all(casts[op].first == op for op in ops)
    return found
