"""Residents of memory: inputs, alive for the whole step, and stored arrays, each alive from its
making to its last use.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ...cluster import Target
from ...graph import Input, Memory, Phase, Role, traits_of
from ...sharding import (
    NO_NODE,
    REPLICATED,
    NodeId,
    NodeIndex,
    Port,
    Projection,
    classes_of_casts,
)
from ._library import copied_kernels, indexed_maxima, turned_weights
from ._operands import Casts, casts_of_parameters, only_multiplied
from ._storage import Storage, is_slow

# Parts of memory that inputs are.
CATEGORY_OF_ROLE = {
    Role.PARAMETER: "parameters",
    Role.OPTIMIZER_STATE: "optimizer state",
    Role.STATE: "other state",
    Role.BATCH: "batch",
    Role.OTHER: "other inputs",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resident:
    """Arrays of one class in memory.

    Attributes:
        node, projection: the factors of the node whose splits divide `num_bytes`.
        num_bytes: of the whole, unsplit array.
        births, deaths: live range of each copy: the first and the last operator during which it is
            alive.
        memory: the memory in which they lie.
        stacked: whether a loop fills the array, one row in each turn.
        late_deaths: end of the live range if the product `consumer_node`, which reads the array as
            split by `read_projection`, is deferred to the update; None if no such product can be.
        unreduced_from: start of the live range of the partial sums, before they are summed over
            devices, if the product `producer_node` that makes them is not deferred; None if it
            cannot be deferred.
        cast: of casts of parameters whether they are the first ones that have their results; None
            of all else.
        read_until: of casts of parameters the last operator before the update.
        hoisted: whether it is a parameter's cast that the compiler makes before a loop.
    """

    node: NodeId
    projection: Projection
    num_bytes: int
    category: str
    label: str
    births: NDArray[np.int64] = field(repr=False)
    deaths: NDArray[np.int64] = field(repr=False)
    memory: Memory = Memory.DEVICE
    stacked: bool = False
    late_deaths: NDArray[np.int64] | None = field(default=None, repr=False)
    consumer_node: NodeId = NO_NODE
    read_projection: Projection = ()
    unreduced_from: NDArray[np.int64] | None = field(default=None, repr=False)
    producer_node: NodeId = NO_NODE
    cast: bool | None = None
    read_until: int = 0
    hoisted: bool = False


def residents(
    index: NodeIndex, storage: Storage, target: Target, *, sums_gradients: bool = False
) -> Iterator[Resident]:
    """All residents of a step. An output that replaces an input reuses its buffer and is not
    counted.

    Args:
        storage: what `target`'s compiler stores of the step.
        sums_gradients: whether the whole step is the body of a loop, over micro-batches.
    """
    if target.library_convolves:
        yield from _copies_of_kernels(index, storage)
        yield from _copies_of_weights(index)
    if target.maxpool_gradient_stores_indices:
        yield from _positions_of_maxima(index, storage)
    yield from _inside_operators(index)
    cuts, graph, itemsize = index.cuts, index.cuts.graph, target.held_product_bytes
    narrow, casts = [False] * len(cuts.producer), Casts(itemsize={}, replaced=frozenset(), until=0)
    if itemsize:
        narrow = only_multiplied(cuts)
        casts = casts_of_parameters(cuts, itemsize, in_loop=sums_gradients)
    last_read = max((op.index for op in graph.ops if op.phase is not Phase.UPDATE), default=0)
    late_readers, own_casts = _LateReaders(index, storage), classes_of_casts(cuts)
    # A new parameter takes the buffer of the old one; other outputs are new arrays.
    replacing = {graph.outputs[i.output].value for i in graph.inputs if i.output is not None}
    returned = {o.value for o in graph.outputs} - replacing
    input_of = {i.value: i for i in graph.inputs}
    for value_class, members in enumerate(cuts.folding.value_members):
        value = graph.values[members[0]]
        if value.num_bytes == 0:
            continue
        if cuts.producer[value_class] is None:
            yield from _of_input(index, value_class, input_of.get(members[0]), casts)
            continue
        reuses_buffer = members[0] in replacing or value_class in casts.replaced
        if not storage.stored[value_class] or reuses_buffer:
            continue
        found = _of_stored_array(
            index,
            storage,
            value_class,
            value.num_bytes * itemsize // value.itemsize
            if narrow[value_class]
            else value.num_bytes * _widening(index, value_class, target),
            late_readers,
            returned=members[0] in returned,
        )
        maker = cuts.producer[value_class]
        assert maker is not None
        if maker[0] in own_casts:
            found = replace(found, cast=own_casts[maker[0]], read_until=last_read)
        yield found


def _widening(index: NodeIndex, value_class: int, target: Target) -> int:
    """How many times as wide as in the step the result of a slow function is stored. What a product
    reads is as wide as the product's operands.
    """
    cuts, producer = index.cuts, index.cuts.producer[value_class]
    value = cuts.graph.values[cuts.folding.value_members[value_class][0]]
    if producer is None or not is_slow(cuts.first[producer[0]]) or value.dtype != "bfloat16":
        return 1
    readers = index.readers.get(value_class, ())
    multiplied = any(cuts.rules[op_class].contracts for op_class in readers)
    return 1 if multiplied else max(1, target.slow_result_bytes // value.itemsize)


def _of_input(
    index: NodeIndex, value_class: int, item: Input | None, casts: Casts
) -> Iterator[Resident]:
    """Residents of an input or constant: the array for the whole step, and its cast if any."""
    members = index.cuts.folding.value_members[value_class]
    value = index.cuts.graph.values[members[0]]
    port = index.class_port(value_class)
    births = np.zeros(len(members), np.int64)
    yield Resident(
        node=port.node,
        projection=port.projection,
        num_bytes=value.num_bytes * (item.copies if item else 1),
        category=CATEGORY_OF_ROLE[item.role] if item else "constants",
        label=item.path if item else index.label_of_value(value_class),
        memory=value.memory,
        births=births,
        deaths=np.full(len(members), len(index.cuts.graph.ops), np.int64),
    )
    if value_class in casts.itemsize:
        yield Resident(
            node=port.node,
            projection=port.projection,
            num_bytes=value.num_bytes * casts.itemsize[value_class] // value.itemsize,
            category="temporaries",
            label=f"cast of {index.label_of_value(value_class)}",
            births=births,
            deaths=np.full(len(members), casts.until, np.int64),
            hoisted=True,
        )


def _of_stored_array(
    index: NodeIndex,
    storage: Storage,
    value_class: int,
    num_bytes: int,
    late_readers: _LateReaders,
    *,
    returned: bool,
) -> Resident:
    """The resident of an array that an operator makes and the compiler stores.

    Args:
        returned: whether the step returns it as a new array.
    """
    cuts, members = index.cuts, np.array(index.cuts.folding.value_members[value_class])
    producer = cuts.producer[value_class]
    assert producer is not None
    maker = cuts.first[producer[0]]
    landed = index.landed_ports(value_class)
    births, deaths = storage.made_at[members], storage.last_use[members]
    # An accumulator that is zeroed early is filled by each device with its own summand, so it has
    # the split of the array before the sum over devices.
    zeroed_early = births[0] < maker.index and maker.name == "scatter-add"
    port = landed[0] if landed and not zeroed_early else index.class_port(value_class)
    late_deaths = storage.late_use[members]
    if returned:
        deaths = late_deaths = np.full(len(members), len(cuts.graph.ops), np.int64)
    late_reader = None
    if (late_deaths > deaths).any():
        late_reader = late_readers.waited_for(value_class, int(deaths.min()))
    made_late = maker.index != storage.late_run[maker.index] and cuts.by_product(value_class)
    summed_at = births
    if made_late:
        summed_at = storage.late_run[np.array(cuts.folding.members[producer[0]])]
    return Resident(
        node=port.node,
        projection=port.projection,
        num_bytes=num_bytes,
        category=_category(index, value_class),
        label=index.label_of_value(value_class),
        births=summed_at,
        deaths=np.maximum(np.maximum(deaths, births), summed_at),
        memory=cuts.graph.values[members[0]].memory,
        stacked=maker.name == "scan_stack",
        late_deaths=late_deaths if late_reader else None,
        consumer_node=late_reader.node if late_reader else NO_NODE,
        read_projection=late_reader.projection if late_reader else (),
        unreduced_from=births if made_late else None,
        producer_node=index.of_product[producer[0]] if made_late else NO_NODE,
    )


def _copies_of_kernels(index: NodeIndex, storage: Storage) -> Iterator[Resident]:
    cuts = index.cuts
    for copied in copied_kernels(cuts, storage.last_use):
        port = index.product_port(copied.op_class, cuts.rules[copied.op_class].operands[1])
        yield Resident(
            node=port.node,
            projection=port.projection,
            num_bytes=cuts.graph.values[
                cuts.folding.value_members[copied.value_class][0]
            ].num_bytes,
            category="temporaries",
            label=f"copy of {index.label_of_value(copied.value_class)}",
            births=copied.births,
            deaths=copied.deaths,
        )


def _copies_of_weights(index: NodeIndex) -> Iterator[Resident]:
    for value_class, last_read in turned_weights(index.cuts):
        port = index.class_port(value_class)
        members = index.cuts.folding.value_members[value_class]
        yield Resident(
            node=port.node,
            projection=port.projection,
            num_bytes=index.cuts.graph.values[members[0]].num_bytes,
            category="temporaries",
            label=f"copy of {index.label_of_value(value_class)}",
            births=np.zeros(len(members), np.int64),
            deaths=np.full(len(members), last_read, np.int64),
        )


def _inside_operators(index: NodeIndex) -> Iterator[Resident]:
    """Arrays that products make and read themselves."""
    cuts = index.cuts
    for op_class, rule in enumerate(cuts.rules):
        runs_at = np.array(cuts.folding.members[op_class], np.int64)
        for inside in rule.inside:
            divided = tuple(0 if f in inside.divided_by else REPLICATED for f in rule.factors)
            yield Resident(
                node=index.of_product[op_class],
                projection=divided,
                num_bytes=int(inside.num_bytes),
                category="temporaries",
                label=f"inside {index.label(op_class)}",
                births=runs_at,
                deaths=runs_at,
            )


def _positions_of_maxima(index: NodeIndex, storage: Storage) -> Iterator[Resident]:
    for scattered in indexed_maxima(index.cuts, storage.made_at):
        port = index.class_port(scattered.value_class)
        yield Resident(
            node=port.node,
            projection=port.projection,
            num_bytes=scattered.num_bytes,
            category="temporaries",
            label=f"{scattered.what} maxima of {index.label_of_value(scattered.value_class)}",
            births=scattered.births,
            deaths=scattered.deaths,
        )


class _LateReaders:
    """The products that a compiler may defer, and the arrays that stay in memory for them."""

    def __init__(self, index: NodeIndex, storage: Storage) -> None:
        cuts = index.cuts
        self._index = index
        # Products by when each of their copies runs in program order.
        self._runs: list[tuple[int, int]] = []
        self._operand: dict[int, Port] = {}
        for op_class in index.order:
            op, rule = cuts.first[op_class], cuts.rules[op_class]
            if storage.late_run[op.index] > op.index and traits_of(op.name).multiplies:
                self._runs += [(member, op_class) for member in cuts.folding.members[op_class]]
                for position, value_class, _ in cuts.operands(op_class):
                    port = index.product_port(op_class, rule.operands[position])
                    self._operand.setdefault(value_class, port)
        self._runs.sort()

    def waited_for(self, value_class: int, last_use: int) -> Port | None:
        """Port at which the deferred product reads an array. An array read by sums for gradients of
        biases and norms is taken to wait for the next product; None if there is none.
        """
        if value_class in self._operand:
            return self._operand[value_class]
        cuts = self._index.cuts
        following = bisect.bisect_left(self._runs, (last_use, 0))
        if following == len(self._runs):
            return None
        _, op_class = self._runs[following]
        rule = cuts.rules[op_class]
        summed = tuple(0 if f in rule.reduced else REPLICATED for f in rule.factors)
        return Port(node=self._index.of_product[op_class], projection=summed)


def _category(index: NodeIndex, value_class: int) -> str:
    producer = index.cuts.producer[value_class]
    phase = index.cuts.first[producer[0]].phase if producer is not None else Phase.PROLOGUE
    phases = index.value_read_phases[value_class]
    if phase is Phase.BACKWARD and Phase.UPDATE in phases:
        return "gradients"
    if phase is Phase.FORWARD and Phase.BACKWARD in phases:
        return "activations"
    return "temporaries"
