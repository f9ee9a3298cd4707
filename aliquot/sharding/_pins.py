"""Choices -> the splits that the runtime pins while it replays a step.

A product's operands are pinned to its own split, and its result twice: to its own split first
(otherwise the compiler gives the product the split that its users want, and gathers the operands
instead), then to its users'. An array of a group is pinned where a product wants it in another
split.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..cluster import Target
from ..graph import Graph, Op, Operand, Phase, ValueId
from ._nodes import Choice, NodeGraph, Port, project
from ._reshard import landing, scattered_behind, waiting_apart, way
from ._rows import gathered_by_rows
from ._spec import PARTIAL, REPLICATED, Spec, divides, without_partial

Landing: TypeAlias = tuple[tuple[Spec, tuple[int, ...]], ...]
"""Splits, one after the other, each with the axes that are minor in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Splits at one class of operators: of each operand (None: leave it), and of each result, one
    after the other.

    On its way to an operand's split an array takes on those `between`. In the first split of each
    result the axes in `minor` subdivide tiles last. `totals` are those of its running total, once
    that is added up over data axes.

    `on_pieces`: each device runs the product on its pieces of the operands, and the runtime
    scatters the sums to the first of the result's splits.
    """

    operands: tuple[Spec | None, ...]
    between: tuple[tuple[Spec, ...], ...]
    results: tuple[tuple[Spec, ...], ...]
    minor: tuple[tuple[int, ...], ...]
    totals: tuple[Landing, ...]
    on_pieces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pins:
    """All pins of a step.

    Attributes:
        by_class: pins of operator classes; `of(op)` looks up an operator.
        inputs, outputs: splits of what the step takes and returns. A successor has the split of
            what it replaces.
        values: split of each value that has one, by value index, for loop carries and the like.
        totals: what running totals of these are split like, one after the other, once they are
            added up over data axes.
        rows: of each value that replaces an input row by row, that input, and how either is split.
        wide_sums: whether what products on pieces leave is scattered in float32 at least.
        on_missing_rule: what was done where a primitive has no rule; see `dim_rule`.
    """

    by_class: dict[int, Pin]
    op_class: Sequence[int]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    values: dict[ValueId, Spec]
    totals: dict[ValueId, Landing] = field(default_factory=dict)
    rows: dict[ValueId, tuple[ValueId, Spec, Spec]] = field(default_factory=dict)
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
) -> Pins:
    """Pins of a step under a choice for every node.

    Args:
        axis_sizes: devices along each mesh axis.
        target: whose compiler the pins are for. Where it makes no reduce-scatters of partial sums
            that become split (see `landing`), products whose sums shall be reduce-scattered are to
            run on each device's pieces; otherwise only those whose sums are all-reduced along other
            axes: of several such terms of a sum the compiler merges just the all-reduces. Inputs of
            more than its `rows_above_bytes` are replaced row by row; see `gathered_by_rows`.
        data_axes: along which sums of gradients wait for the last micro-batch.
    """
    reduce_scatter = target.reduce_scatter
    whole: Spec = (REPLICATED,) * len(axis_sizes)

    def spec(port: Port) -> Spec:
        return project(choices[port.node], port.projection) if port.node >= 0 else whole

    def between(operand: Operand, source: Port | None, target: Port | None) -> tuple[Spec, ...]:
        if source is None or target is None or not isinstance(operand, int):
            return ()
        return _between(spec(source), spec(target), graph.values[operand].shape, axis_sizes)

    by_class = {}
    first_of: dict[int, Op] = {}
    for op in graph.ops:
        first_of.setdefault(nodes.op_class[op.index], op)
    for site in nodes.sites:
        op = first_of[site.op_class]
        shapes = [graph.values[o].shape if o >= 0 else () for o in op.outputs]
        # Only in the backward pass are sums made that wait for the last micro-batch.
        waiting = data_axes if op.phase is Phase.BACKWARD else ()
        pairs: list[tuple[tuple[Spec, ...], tuple[int, ...]]] = []
        totals: list[Landing] = []
        on_pieces = False
        for ports, shape in zip(site.results, shapes, strict=True):
            each, total = _apart([spec(p) for p in ports], waiting)
            if op.name == "gather":
                pairs.append((_looked_up(each, shape, axis_sizes), ()))
                totals.append(())
                continue
            # A lookup's partial sums are finished at once; see `_looked_up`.
            on_pieces = site.on_pieces and _is_scattered(
                each, shape, axis_sizes, in_part=reduce_scatter
            )
            pairs.append(_result_chain(each, shape, axis_sizes, reduce_scatter or on_pieces))
            totals.append(_landing(total, shape, axis_sizes, reduce_scatter))
        chains = [chain for chain, _ in pairs]
        for position, readers in enumerate(site.readers):
            # Where all readers want the array as it is split anyway, a pin would say nothing new.
            if all((spec(p),) == chains[position] for p in readers):
                chains[position] = ()
        by_class[site.op_class] = Pin(
            operands=tuple(None if p is None else spec(p) for p in site.operands),
            between=tuple(
                between(*where)
                for where in zip(op.inputs, site.sources, site.operands, strict=True)
            ),
            results=tuple(chains),
            minor=tuple(minor for _, minor in pairs),
            totals=tuple(totals),
            on_pieces=on_pieces,
        )
    # Partial sums cannot enter or leave a step: callers see whole arrays.
    inputs = tuple(without_partial(spec(p)) for p in nodes.input_ports)
    outputs = [without_partial(spec(p)) for p in nodes.output_ports]
    rows = {}
    for item, input_spec in zip(graph.inputs, inputs, strict=True):
        if item.output is None:
            continue
        new, old, output_spec = (
            graph.outputs[item.output].value,
            graph.values[item.value],
            outputs[item.output],
        )
        # XLA reuses the buffer of a donated input only for an output of the same split.
        outputs[item.output] = input_spec
        if isinstance(new, int) and (old.shape, old.dtype) == (
            graph.values[new].shape,
            graph.values[new].dtype,
        ):
            length = next(iter(old.shape), 1)
            rank, above = len(old.shape), target.rows_above_bytes
            if gathered_by_rows(length, rank, old.num_bytes, output_spec, input_spec, above):
                rows[new] = item.value, output_spec, input_spec
    values = {v: without_partial(spec(p)) for v, p in nodes.loop_ports.items()}
    sums = {}
    for v, input_spec in values.items() if data_axes else ():
        partial = tuple(PARTIAL if a in data_axes else p for a, p in enumerate(input_spec))
        sums[v] = _landing([partial, input_spec], graph.values[v].shape, axis_sizes, reduce_scatter)
    return Pins(
        by_class=by_class,
        op_class=nodes.op_class,
        inputs=inputs,
        outputs=tuple(outputs),
        values=values,
        totals=sums,
        rows=rows,
        # As XLA's CPU backend, which makes none itself, all-reduces narrow types, and as they are
        # priced there.
        wide_sums=not reduce_scatter,
        on_missing_rule=nodes.on_missing_rule,
    )


def _apart(specs: list[Spec], waiting: Collection[int]) -> tuple[list[Spec], list[Spec]]:
    """A result's own split and its users', for each summand along the axes `waiting`, and for their
    sum.
    """
    if len(specs) < 2:
        return specs, specs
    each, total = waiting_apart(specs[0], specs[1], waiting)
    return list(each), list(total)


def _is_scattered(
    specs: list[Spec], shape: Sequence[int], axis_sizes: Sequence[int], *, in_part: bool
) -> bool:
    """True if partial sums are reduce-scattered from a result's own split towards its users', if
    anything does that.

    Args:
        in_part: only if others of its sums are all-reduced.
    """
    product_spec, wanted = specs
    arrived = landing(product_spec, wanted, True)
    scattered = {d >= 0 for s, d in zip(product_spec, arrived, strict=True) if s <= PARTIAL}
    return divides(shape, arrived, axis_sizes) and (
        scattered == {True, False} if in_part else True in scattered
    )


def _landing(
    specs: list[Spec], shape: Sequence[int], axis_sizes: Sequence[int], reduce_scatter: bool
) -> Landing:
    chain, behind = _result_chain(specs, shape, axis_sizes, reduce_scatter)
    return tuple((spec, () if number else behind) for number, spec in enumerate(chain))


def _looked_up(
    specs: list[Spec], shape: Sequence[int], axis_sizes: Sequence[int]
) -> tuple[Spec, ...]:
    """A lookup's own split with its partial sums finished, then its users'.

    Asked for the users' at once, XLA gathers the table, or exchanges rows among all devices.
    """
    first, last = without_partial(specs[0]), without_partial(specs[-1])
    return tuple(dict.fromkeys((first, *_between(first, last, shape, axis_sizes), last)))


def _result_chain(
    specs: list[Spec], shape: Sequence[int], axis_sizes: Sequence[int], reduce_scatter: bool
) -> tuple[tuple[Spec, ...], tuple[int, ...]]:
    """A product's own split, its partial sums already where the users want them, then the users'
    split.

    With it the axes that are minor in the first.
    """
    if not specs:
        return (), ()
    product_spec = specs[0]
    if len(specs) == 1:
        return (() if min(product_spec) <= PARTIAL else (product_spec,)), ()
    wanted = without_partial(specs[1])
    arrived = landing(product_spec, wanted, reduce_scatter)
    # JAX drops a constraint that does not divide an array without a word, so such a pin would be
    # lost.
    if not divides(shape, arrived, axis_sizes):
        arrived = without_partial(product_spec)
    behind = scattered_behind(product_spec, arrived)
    # Minor axes have no name in a spec, so the ways between specs do not apply.
    if behind:
        return (arrived, wanted), behind
    return (
        tuple(dict.fromkeys((arrived, *_between(arrived, wanted, shape, axis_sizes), wanted))),
        (),
    )


def _between(
    source: Spec, target: Spec, shape: Sequence[int], axis_sizes: Sequence[int]
) -> tuple[Spec, ...]:
    """Splits to pin an array to between two others; see `way`."""
    *between, _ = way(source, target, tuple(axis_sizes))
    return tuple(between) if all(divides(shape, spec, axis_sizes) for spec in between) else ()
