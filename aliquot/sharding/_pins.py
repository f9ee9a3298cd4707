"""Pins: the sharding constraints that the runtime puts on a step's operators, from the choices of a
plan.

A product's operands are pinned to its own split, and its result twice: to its own split first, then
to its users'. Without the first, the compiler gives the product the split that its users want, and
gathers the operands instead. Any other array is pinned where a product wants it in another split.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from ..cluster import SumCollective, Target
from ..graph import Graph, Op, Operand, Phase, ValueId
from ._nodes import Choice, NodeGraph, Port, Site, project
from ._reshard import (
    gathered_by_rows,
    intermediate_specs,
    minor_axes,
    spec_after_sums,
    split_deferred_sums,
)
from ._spec import PARTIAL, REPLICATED, Spec, divides, without_axes, without_partial
from ._waiting import sums_that_wait
from .programs import parameter_casts

TotalConstraints: TypeAlias = tuple[tuple[Spec, tuple[int, ...]], ...]
"""Specs to constrain a running total to, one after the other, each with its minor axes."""


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """Sharding constraints on the operators of one class.

    Attributes:
        operands: the spec of each operand; None leaves it as it is.
        between: for each operand the specs to constrain it to before, one after the other.
        results: for each result the specs to constrain it to, one after the other.
        minor: for each result the axes that subdivide tiles last in the first of its specs.
        totals: for each result the constraints on its running total over micro-batches, once that
            is summed over data axes.
        on_pieces: each device runs the product on its pieces of the operands, and the runtime
            reduce-scatters the sums to the first spec of the result.
    """

    operands: tuple[Spec | None, ...]
    between: tuple[tuple[Spec, ...], ...]
    results: tuple[tuple[Spec, ...], ...]
    minor: tuple[tuple[int, ...], ...]
    totals: tuple[TotalConstraints, ...]
    on_pieces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pins:
    """All pins of a step.

    Attributes:
        by_class: pins of operator classes; `of(op)` looks up an operator.
        inputs, outputs: splits of the step's inputs and outputs. An output that replaces an input
            has the split of that input.
        values: splits of loop carries and other values that have one.
        totals: constraints on the running totals of these over micro-batches, once they are summed
            over data axes.
        rows: for each value that replaces an input row by row: that input, the value's split and
            the input's.
        token_sums: how the operands of sums that wait over the axis that splits the sequence are
            split, by class.
        wide_sums: products that run on each device's pieces reduce-scatter in float32 at least.
        on_missing_rule: see `dim_rule`.
    """

    by_class: dict[int, Pin]
    op_class: Sequence[int]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    values: dict[ValueId, Spec]
    totals: dict[ValueId, TotalConstraints] = field(default_factory=dict)
    rows: dict[ValueId, tuple[ValueId, Spec, Spec]] = field(default_factory=dict)
    token_sums: dict[int, tuple[Spec | None, ...]] = field(default_factory=dict)
    wide_sums: bool = False
    on_missing_rule: str = "infer"

    def of(self, op: Op) -> Pin | None:
        """The pin of an operator, or None."""
        return self.by_class.get(self.op_class[op.index])


def make_pins(
    graph: Graph,
    nodes: NodeGraph,
    choices: Sequence[Choice],
    axis_sizes: Sequence[int],
    target: Target,
    *,
    data_axes: Collection[int] = (),
    context_axes: Collection[int] = (),
    gathers_once: bool = False,
) -> Pins:
    """Pins of a step under a choice for every node.

    Args:
        axis_sizes: devices along each mesh axis.
        target: the target whose compiler the pins are for. If that makes no reduce-scatters of
            partial sums that become split, all products whose sums are to be reduce-scattered run
            on each device's pieces. Otherwise only those do whose sums are also all-reduced along
            other axes: of several such terms of a sum the compiler merges just the all-reduces.
            Inputs of more than its `rows_above_bytes` are replaced row by row; see
            `gathered_by_rows`.
        data_axes: along which sums of gradients wait for the last micro-batch.
        context_axes: along which those over tokens do, too; at most one.
        gathers_once: whether casts of parameters are gathered over these axes where they are made.
    """
    maker = _PinMaker(
        graph=graph,
        nodes=nodes,
        choices=choices,
        axis_sizes=axis_sizes,
        target=target,
        data_axes=data_axes,
        context_axes=context_axes,
    )
    first_of: dict[int, Op] = {}
    for op in graph.ops:
        first_of.setdefault(nodes.op_class[op.index], op)
    # Partial sums cannot enter or leave a step: callers see whole arrays.
    inputs = tuple(without_partial(maker.spec(p)) for p in nodes.input_ports)
    computed = tuple(without_partial(maker.spec(p)) for p in nodes.output_ports)
    values = {v: without_partial(maker.spec(p)) for v, p in nodes.loop_ports.items()}
    by_class = {s.op_class: maker.pin(s, first_of[s.op_class]) for s in nodes.sites}
    if gathers_once:
        by_class |= maker.gathered_casts(inputs)
    # Splits of the outputs: of the input that an output replaces, otherwise as it is computed.
    outputs = list(computed)
    for item, input_spec in zip(graph.inputs, inputs, strict=True):
        if item.output is not None:
            # XLA reuses the buffer of a donated input only for an output of the same split.
            outputs[item.output] = input_spec
    return Pins(
        by_class=by_class,
        op_class=nodes.op_class,
        inputs=inputs,
        outputs=tuple(outputs),
        values=values,
        totals=maker.totals(values) if data_axes or maker.token_sums else {},
        rows=_replaced_by_rows(graph, inputs, computed, target),
        token_sums=maker.token_sums,
        # XLA's CPU backend makes no reduce-scatters itself. It all-reduces narrow types in wider
        # ones, and prices assume the same of the runtime's reduce-scatters.
        wide_sums=not target.reduce_scatter,
        on_missing_rule=nodes.on_missing_rule,
    )


class _ResultConstraints(msgspec.Struct, frozen=True, kw_only=True):
    """Constraints on one result of an operator; see `Pin`."""

    specs: tuple[Spec, ...]
    minor: tuple[int, ...] = ()
    total: TotalConstraints = ()
    on_pieces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PinMaker:
    """Maker of pins; its fields are the arguments of `make_pins`."""

    graph: Graph
    nodes: NodeGraph
    choices: Sequence[Choice]
    axis_sizes: Sequence[int]
    target: Target
    data_axes: Collection[int]
    context_axes: Collection[int]
    token_sums: dict[int, tuple[Spec | None, ...]] = field(init=False)

    def __post_init__(self) -> None:
        found = {}
        for token_sum in self.nodes.token_sums:
            if any(token_sum.is_split(self.choices, axis) for axis in self.context_axes):
                found[token_sum.op_class] = tuple(
                    None if p is None else self.spec(p) for p in token_sum.operands
                )
        object.__setattr__(self, "token_sums", found)

    def spec(self, port: Port) -> Spec:
        """The split at a port under the choices; replicated at none."""
        if port.node < 0:
            return (REPLICATED,) * len(self.axis_sizes)
        return project(self.choices[port.node], port.projection)

    def pin(self, site: Site, op: Op) -> Pin:
        """The pin of an operator class, of which `op` is the first operator."""
        results = [self.result(site, op, position) for position in range(len(site.results))]
        constraints = [r.specs for r in results]
        for position, readers in enumerate(site.readers):
            # Where all readers want the array as it is split anyway, a pin would say nothing new.
            if readers and all((self.spec(p),) == constraints[position] for p in readers):
                constraints[position] = ()
        return Pin(
            operands=tuple(None if p is None else self.spec(p) for p in site.operands),
            between=tuple(
                self.between(*where)
                for where in zip(op.inputs, site.sources, site.operands, strict=True)
            ),
            results=tuple(constraints),
            minor=tuple(r.minor for r in results),
            totals=tuple(r.total for r in results),
            # A class whose sums run on pieces has one result.
            on_pieces=bool(results) and results[-1].on_pieces,
        )

    def result(self, site: Site, op: Op, position: int) -> _ResultConstraints:
        """The constraints on one result of an operator, for each micro-batch and for its total."""
        ports, output = site.results[position], op.outputs[position]
        shape = self.graph.values[output].shape if output >= 0 else ()
        # Only sums in the backward pass wait for the last micro-batch.
        deferred = [*self.data_axes] if op.phase is Phase.BACKWARD else []
        if site.op_class in self.token_sums:
            deferred += self.context_axes
        each = total = list(map(self.spec, ports))
        if len(each) > 1:
            each, total = map(list, split_deferred_sums(each[0], each[1], deferred))
        if op.name == "gather":
            # A lookup's own split with its partial sums finished at once, then its users'.
            # Constrained to the users' split at once, XLA gathers the table, or exchanges rows
            # among all devices.
            first, last = without_partial(each[0]), without_partial(each[-1])
            between = _between(first, last, shape, self.axis_sizes)
            return _ResultConstraints(specs=tuple(dict.fromkeys((first, *between, last))))
        scattered = self.scattered_sums(each, shape) if site.on_pieces else ()
        # The compiler's own reduce-scatters serve unless other sums are all-reduced.
        on_pieces = any(scattered) and not (self.target.reduce_scatter and all(scattered))
        sums = SumCollective.REDUCE_SCATTER if on_pieces else self.target.sum_collective
        specs, minor = _result_constraints(each, shape, self.axis_sizes, sums)
        return _ResultConstraints(
            specs=specs,
            minor=minor,
            total=_total_constraints(total, shape, self.axis_sizes, self.target.sum_collective),
            on_pieces=on_pieces,
        )

    def scattered_sums(self, specs: Sequence[Spec], shape: Sequence[int]) -> tuple[bool, ...]:
        """For each partial sum of a product, whether a reduce-scatter would finish it; empty if its
        pieces would not be of equal size.
        """
        product_spec, wanted = specs
        summed = spec_after_sums(product_spec, wanted, SumCollective.REDUCE_SCATTER)
        if not divides(shape, summed, self.axis_sizes):
            return ()
        return tuple(d >= 0 for s, d in zip(product_spec, summed, strict=True) if s <= PARTIAL)

    def gathered_casts(self, inputs: Sequence[Spec]) -> Iterator[tuple[int, Pin]]:
        """Pins of the classes of parameters' casts: as the parameter is split, then gathered over
        the axes over which gradients wait.

        Args:
            inputs: splits of the step's inputs.
        """
        of_input = {i.value: spec for i, spec in zip(self.graph.inputs, inputs, strict=True)}
        for number, made in parameter_casts(self.graph).items():
            spec = of_input[made.parameter]
            gathered = without_axes(spec, {*self.data_axes, *self.context_axes})
            yield (
                self.nodes.op_class[number],
                Pin(
                    operands=(None,),
                    between=((),),
                    results=(tuple(dict.fromkeys((spec, gathered))),),
                    minor=((),),
                    totals=((),),
                ),
            )

    def between(
        self, operand: Operand, source: Port | None, target: Port | None
    ) -> tuple[Spec, ...]:
        """Intermediate specs between the one in which an array arises and that of an operand."""
        if source is None or target is None or not isinstance(operand, int):
            return ()
        shape = self.graph.values[operand].shape
        return _between(self.spec(source), self.spec(target), shape, self.axis_sizes)

    def totals(self, values: Mapping[ValueId, Spec]) -> dict[ValueId, TotalConstraints]:
        """Constraints on the running totals of values that loops carry, by the split that each is
        to have in the end.
        """
        summands: set[ValueId] = set()
        for op, held in (sums_that_wait(self.graph) if self.token_sums else {}).items():
            if self.nodes.op_class[op] in self.token_sums:
                summands.update(held)
        totals = {}
        for v, spec in values.items():
            axes = {*self.data_axes, *(self.context_axes if v in summands else ())}
            if not axes:
                continue
            partial = tuple(PARTIAL if a in axes else p for a, p in enumerate(spec))
            shape, sums = self.graph.values[v].shape, self.target.sum_collective
            totals[v] = _total_constraints([partial, spec], shape, self.axis_sizes, sums)
        return totals


def _replaced_by_rows(
    graph: Graph, inputs: Sequence[Spec], computed: Sequence[Spec], target: Target
) -> dict[ValueId, tuple[ValueId, Spec, Spec]]:
    """`Pins.rows`: values that replace an input row by row."""
    rows = {}
    for item, input_spec in zip(graph.inputs, inputs, strict=True):
        if item.output is None:
            continue
        successor, old = graph.outputs[item.output].value, graph.values[item.value]
        if not isinstance(successor, int):
            continue
        new = graph.values[successor]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            continue
        length, rank = next(iter(old.shape), 1), len(old.shape)
        new_spec, above = computed[item.output], target.rows_above_bytes
        if gathered_by_rows(length, rank, old.num_bytes, new_spec, input_spec, above):
            rows[successor] = item.value, new_spec, input_spec
    return rows


def _total_constraints(
    specs: list[Spec], shape: Sequence[int], axis_sizes: Sequence[int], sums: SumCollective
) -> TotalConstraints:
    constraints, minor = _result_constraints(specs, shape, axis_sizes, sums)
    # Only the first tiling, behind a reduce-scatter, has minor axes.
    return tuple((spec, () if number else minor) for number, spec in enumerate(constraints))


def _result_constraints(
    specs: list[Spec], shape: Sequence[int], axis_sizes: Sequence[int], sums: SumCollective
) -> tuple[tuple[Spec, ...], tuple[int, ...]]:
    """The specs to constrain a product's result to, one after the other, and the minor axes of the
    first.

    The first is the product's own split with its partial sums finished, the last its users' split.
    """
    if not specs:
        return (), ()
    product_spec = specs[0]
    if len(specs) == 1:
        return (() if min(product_spec) <= PARTIAL else (product_spec,)), ()
    wanted = without_partial(specs[1])
    summed = spec_after_sums(product_spec, wanted, sums)
    # JAX silently drops a constraint that does not divide an array.
    if not divides(shape, summed, axis_sizes):
        summed = without_partial(product_spec)
    minor = minor_axes(product_spec, summed)
    # No spec names a tiling with minor axes, so there are no intermediate specs to look for.
    if minor:
        return (summed, wanted), minor
    between = _between(summed, wanted, shape, axis_sizes)
    return tuple(dict.fromkeys((summed, *between, wanted))), ()


def _between(
    source: Spec, target: Spec, shape: Sequence[int], axis_sizes: Sequence[int]
) -> tuple[Spec, ...]:
    """Intermediate specs between two others, without the last; none if one does not divide the
    array.
    """
    *between, _ = intermediate_specs(source, target, tuple(axis_sizes))
    return tuple(between) if all(divides(shape, spec, axis_sizes) for spec in between) else ()
