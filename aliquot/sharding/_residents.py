"""Residents of memory: inputs for the whole step, and every stored array from its making to its
last use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..graph import Phase, Role, traits_of
from ._library import copied_kernels, indexed_maxima
from ._materialised import Storage, find_storage
from ._nodes import Port, Resident
from ._operands import Casts, casts_of_parameters, only_multiplied
from ._spec import REPLICATED

if TYPE_CHECKING:
    from ._node_index import NodeIndex

_CATEGORY_OF_ROLE = {
    Role.PARAMETER: "parameters",
    Role.OPTIMIZER_STATE: "optimizer state",
    Role.STATE: "other state",
    Role.BATCH: "batch",
    Role.OTHER: "other inputs",
}


def residents(
    naming: NodeIndex, *, product_itemsize: int = 0, maxpool_gradient_stores_indices: bool = False, **habits: bool
) -> Iterator[Resident]:
    """All residents of a step. What replaces an input reuses its buffer and is not counted again.

    Args:
        product_itemsize: bytes of an element of float32 in memory where only products read it, and
            of a parameter that is cast before loops; 0 if operands are held as they are and cast
            where they are read.
        maxpool_gradient_stores_indices: whether gradients of maxima over windows are scattered by
            positions found beforehand.
        habits: of compilers, see `find_storage`.
    """
    storage = find_storage(naming.cuts, **habits)
    if habits.get("library_convolves", False):
        yield from _copies_of_kernels(naming, storage)
    if maxpool_gradient_stores_indices:
        yield from _positions_of_maxima(naming, storage)
    narrow = only_multiplied(naming.cuts) if product_itemsize else []
    casts = Casts(itemsize={}, replaced=frozenset(), until=0)
    if product_itemsize:
        casts = casts_of_parameters(naming.cuts, product_itemsize, in_loop=habits.get("sums_gradients", False))
    late_readers = _LateReaders(naming, storage)
    cuts = naming.cuts
    graph, folding = cuts.graph, cuts.folding
    end = len(graph.ops)
    replacing = {graph.outputs[i.output].value for i in graph.inputs if i.output is not None}
    returned = {o.value for o in graph.outputs} - replacing
    role_of = {i.value: i for i in graph.inputs}
    for value_class, members in enumerate(folding.value_members):
        producer = cuts.producer[value_class]
        value = graph.values[members[0]]
        if value.num_bytes == 0:
            continue
        if producer is None:
            item = role_of.get(members[0])
            port = naming.class_port(value_class)
            yield Resident(
                node=port.node,
                projection=port.projection,
                num_bytes=value.num_bytes,
                category=_CATEGORY_OF_ROLE[item.role] if item else "constants",
                label=item.path if item else naming.label_of_value(value_class),
                births=np.zeros(len(members), np.int64),
                deaths=np.full(len(members), end, np.int64),
            )
            if value_class in casts.itemsize:
                yield Resident(
                    node=port.node,
                    projection=port.projection,
                    num_bytes=value.num_bytes * casts.itemsize[value_class] // value.itemsize,
                    category="temporaries",
                    label=f"cast of {naming.label_of_value(value_class)}",
                    births=np.zeros(len(members), np.int64),
                    deaths=np.full(len(members), casts.until, np.int64),
                )
            continue
        if not storage.stored[value_class] or members[0] in replacing or value_class in casts.replaced:
            continue
        num_bytes = value.num_bytes
        if product_itemsize and narrow[value_class]:
            num_bytes = num_bytes * product_itemsize // value.itemsize
        landed = naming.landed_ports(value_class)
        maker = naming.cuts.first[producer[0]]
        early = storage.made_at[members[0]] < maker.index and maker.name == "scatter-add"
        # Zeroed early, to be filled by each device with a sum of its own.
        port = landed[0] if landed and not early else naming.class_port(value_class)
        births = storage.made_at[np.array(members)]
        deaths = storage.last_use[np.array(members)]
        late_deaths = storage.late_use[np.array(members)]
        if members[0] in returned:
            deaths = late_deaths = np.full(len(members), end, np.int64)
        waits = late_readers.waited_for(value_class, int(deaths[0])) if (late_deaths > deaths).any() else None
        made_late = maker.index != storage.late_run[maker.index] and naming.cuts.by_product(value_class)
        late = storage.late_run[np.array(folding.members[producer[0]])]
        yield Resident(
            node=port.node,
            projection=port.projection,
            num_bytes=num_bytes,
            category=_category(naming, value_class),
            label=naming.label_of_value(value_class),
            births=late if made_late else births,
            deaths=np.maximum(np.maximum(deaths, births), late if made_late else births),
            stacked=maker.name == "scan_stack",
            late_deaths=late_deaths if waits else None,
            reader=waits.node if waits else -1,
            read_projection=waits.projection if waits else (),
            unreduced_from=births if made_late else None,
            maker=naming.of_product[producer[0]] if made_late else -1,
        )


def _copies_of_kernels(naming: NodeIndex, storage: Storage) -> Iterator[Resident]:
    cuts = naming.cuts
    for copied in copied_kernels(cuts, storage.last_use):
        port = naming.product_port(copied.op_class, cuts.rules[copied.op_class].operands[1])
        yield Resident(
            node=port.node,
            projection=port.projection,
            num_bytes=cuts.graph.values[cuts.folding.value_members[copied.value_class][0]].num_bytes,
            category="temporaries",
            label=f"copy of {naming.label_of_value(copied.value_class)}",
            births=copied.births,
            deaths=copied.deaths,
        )


def _positions_of_maxima(naming: NodeIndex, storage: Storage) -> Iterator[Resident]:
    for scattered in indexed_maxima(naming.cuts, storage.made_at):
        port = naming.class_port(scattered.value_class)
        yield Resident(
            node=port.node,
            projection=port.projection,
            num_bytes=scattered.num_bytes,
            category="temporaries",
            label=f"positions of maxima of {naming.label_of_value(scattered.value_class)}",
            births=scattered.births,
            deaths=scattered.deaths,
        )


class _LateReaders:
    """Products that may be put off, and what waits for them."""

    def __init__(self, naming: NodeIndex, storage: Storage) -> None:
        cuts = naming.cuts
        self._node_index = naming
        self._products: list[int] = []
        self._operand: dict[int, Port] = {}
        for op_class in naming.order:
            op, rule = cuts.first[op_class], cuts.rules[op_class]
            if storage.late_run[op.index] > op.index and traits_of(op.name).multiplies:
                self._products.append(op_class)
                for position, value_class, _ in cuts.operands(op_class):
                    port = naming.product_port(op_class, rule.operands[position])
                    self._operand.setdefault(value_class, port)

    def waited_for(self, value_class: int, last_use: int) -> Port | None:
        """The product that reads an array, and how. What sums for biases and norms read waits as
        the next product does.
        """
        if value_class in self._operand:
            return self._operand[value_class]
        cuts = self._node_index.cuts
        for op_class in self._products:
            if cuts.first[op_class].index >= last_use:
                rule = cuts.rules[op_class]
                summed = tuple(0 if f in rule.reduced else REPLICATED for f in rule.factors)
                return Port(node=self._node_index.of_product[op_class], projection=summed)
        return None


def _category(naming: NodeIndex, value_class: int) -> str:
    producer = naming.cuts.producer[value_class]
    phase = naming.cuts.first[producer[0]].phase if producer is not None else Phase.PROLOGUE
    phases = naming.value_read_phases[value_class]
    if phase is Phase.BACKWARD and Phase.UPDATE in phases:
        return "gradients"
    if phase is Phase.FORWARD and Phase.BACKWARD in phases:
        return "activations"
    return "temporaries"
