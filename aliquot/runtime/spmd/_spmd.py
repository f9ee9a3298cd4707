"""One program over one mesh: the whole step, or a loop over micro-batches with the update behind
it.

With data-parallel groups every part of the loop's body carries a dim for the group, split over the
mesh's data axes. The gradients of a group are then added up where they arise, and cross between
groups once, after the last micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from jax.sharding import Mesh, NamedSharding

from ...graph import Graph, Literal, Role, Value, ValueId, memory_kind
from ...sharding import (
    Layout,
    MicroBatchPlan,
    Pins,
    Spec,
    TimeKind,
    cast_once,
    cut_graph,
    dims_of,
    sizes_of,
)
from ._apart import kept_apart
from ._lowering import AbstractLowering, ConstraintLowering, partition
from ._mesh import axis_names
from ._totals import Totals


class Program(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A step as one jitted function over flat arrays.

    Attributes:
        jitted: takes one array for each input of the step, returns one for each output. Donated
            inputs are used up.
        in_shardings, out_shardings: in that order.
        donated: positions of the donated inputs.
    """

    jitted: Any
    in_shardings: tuple[NamedSharding, ...]
    out_shardings: tuple[NamedSharding, ...]
    donated: tuple[int, ...]


def build_program(
    graph: Graph,
    pins: Pins,
    mesh: Mesh,
    *,
    micro_batches: MicroBatchPlan | None = None,
    data_axes: Sequence[str] = (),
    context_axes: Sequence[str] = (),
    casts_once: bool = False,
) -> Program:
    """The program of a step.

    Args:
        graph: the step.
        pins: its splits.
        mesh: where it runs; all axes `AxisType.Auto`.
        micro_batches: how it is cut over time; its groups must be those of `data_axes`. None for no
            cut.
        data_axes: mesh axes over which gradients wait for the last micro-batch.
        context_axes: the axis that splits the sequence, if they wait over it, too.
        casts_once: whether parameters are cast before the first micro-batch (`StagePlan`).
    """
    lowering = ConstraintLowering(mesh=mesh, pins=pins)
    ins = [graph.values[item.value] for item in graph.inputs]
    outs = [graph.values[o.value] if isinstance(o.value, int) else o.value for o in graph.outputs]
    in_shardings = _shardings(mesh, pins.inputs, ins)
    out_shardings = _shardings(mesh, pins.outputs, outs)
    run: Callable[..., list[Any]]
    if micro_batches is None or micro_batches.num_micro_batches == 1:

        def run(*flat: Any) -> list[Any]:
            return lowering.replay(graph, flat)

    else:
        axes = tuple(data_axes), tuple(context_axes)
        run = _Loop(micro_batches, lowering, mesh, pins, axes, casts_once)
    donated = []
    for position, item in enumerate(graph.inputs):
        # A buffer is reused only for a result of the same split, shape and dtype; for others JAX
        # would warn.
        if item.output is not None and in_shardings[position] == out_shardings[item.output]:
            old, new = ins[position], outs[item.output]
            if isinstance(new, Value) and (old.shape, old.dtype) == (new.shape, new.dtype):
                donated.append(position)
    jitted = jax.jit(
        run,
        in_shardings=in_shardings,
        out_shardings=list(out_shardings),
        donate_argnums=tuple(donated),
        # Unused inputs keep their place, so that arguments stand in the order of the step's inputs.
        keep_unused=True,
    )
    return Program(
        jitted=jitted,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donated=tuple(donated),
    )


def _shardings(
    mesh: Mesh, specs: Sequence[Spec], arrays: Sequence[Value | Literal]
) -> tuple[NamedSharding, ...]:
    """The shardings of inputs or outputs, each in the memory in which it lies."""
    found = []
    for spec, array in zip(specs, arrays, strict=True):
        dims = partition(mesh, spec, array.shape)
        found.append(NamedSharding(mesh, dims, memory_kind=memory_kind(array)))
    return tuple(found)


class _Loop:
    """The step as a loop over micro-batches. Called with flat arrays, it returns flat results."""

    def __init__(
        self,
        plan: MicroBatchPlan,
        lowering: AbstractLowering,
        mesh: Mesh,
        pins: Pins,
        axes: tuple[tuple[str, ...], tuple[str, ...]],
        casts_once: bool,
    ) -> None:
        data_axes, context_axes = axes
        self._plan, self._lowering = plan, lowering
        self._axes = tuple(axis_names(mesh, data_axes))
        self._without = frozenset(self._axes) if plan.num_groups > 1 else frozenset()
        self._layout = _layout(plan, pins, mesh, self._without)
        self._graphs = cut_graph(plan, self._layout)
        if casts_once and plan.phased is None:
            self._graphs = cast_once(self._graphs)
        self._inputs = [item.value for item in plan.whole.inputs]
        self._specs = dict(zip(self._inputs, pins.inputs, strict=True))
        body, crossing = self._graphs.body, self._graphs.crossing
        summed = frozenset(v for v in crossing if plan.is_summed(v))
        self._apart = kept_apart(pins, mesh, context_axes, [(body, summed)])
        self._totals = Totals(
            plan=plan,
            mesh=mesh,
            lowering=lowering,
            layout=self._layout,
            pins=pins,
            without=self._without,
            apart=self._apart,
        )
        # JAX names the program after the function.
        self.__name__ = plan.whole.name

    def __call__(self, *flat: Any) -> list[Any]:
        """Early values first, then a scan over micro-batches that adds up totals and hands state
        on, then the late graph.
        """
        parts, layout = self._graphs, self._layout
        early = self._lowering.replay(parts.early, flat) if parts.early_values else []
        known = dict(zip(self._inputs, flat, strict=True))
        known |= self._plan.whole.constants
        known |= dict(zip(parts.early_values, early, strict=True))
        slices = [self._cut(known[value], value, dim) for value, dim in parts.sliced]
        whole = self._totals
        handed_on = dict(parts.handed_on)
        collected = [v for v in parts.crossing if v not in handed_on.values()]
        summed = [v for v in collected if whole.is_summed(v)]
        stacked = [v for v in collected if not whole.is_summed(v)]

        def step(carry: Any, part: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
            totals, state = carry
            given = known | dict(zip(handed_on, state, strict=True))
            results = dict(zip(parts.crossing, self._part(given, *part), strict=True))
            totals = [whole.add(v, t, results[v]) for v, t in zip(summed, totals, strict=True)]
            state = [
                self._lowering.constrain(results[new], self._specs[old])
                for old, new in parts.handed_on
            ]
            return (totals, state), [results[v] for v in stacked]

        zeros = [whole.zeros(v) for v in summed]
        start = [known[value] for value in handed_on]
        numbers = jnp.arange(layout.micro_batches, dtype=jnp.int32)
        (totals, state), stacks = jax.lax.scan(step, (zeros, start), (numbers, slices))
        combined = {v: whole.add_up(v, total) for v, total in zip(summed, totals, strict=True)}
        combined |= {v: whole.combine(v, stack) for v, stack in zip(stacked, stacks, strict=True)}
        combined |= dict(zip(handed_on.values(), state, strict=True))
        crossing = [combined[v] for v in parts.crossing]
        # Casts of parameters are made early, but the late graph reads none.
        read_late = len(parts.late.inputs) - len(flat) - len(crossing)
        return self._lowering.replay(parts.late, [*flat, *early[:read_late], *crossing])

    def _part(
        self, known: dict[ValueId, Any], micro_batch: Any, slices: Sequence[Any]
    ) -> list[Any]:
        """Crossing values of one micro-batch, for all groups."""
        parts, groups = self._graphs, self._layout.groups
        outside = dict(zip(parts.inside, parts.early_values, strict=True))
        order = [i.value for i in parts.body.inputs]
        sliced = [value for value, _ in parts.sliced]
        given = [v for v in order if outside.get(v, v) in sliced]

        def run(group: Any, arrays_of_group: Sequence[Any]) -> list[Any]:
            arrays = known | dict(zip(sliced, arrays_of_group, strict=True))
            arrays |= {parts.group: group, parts.micro_batch: micro_batch}
            inputs = [arrays[outside.get(v, v)] for v in order]
            return self._lowering.replay(
                parts.body,
                inputs,
                without=self._without,
                mapped=[*given, parts.group],
                apart=self._apart,
            )

        if groups == 1:
            return run(jnp.int32(0), slices)
        names: Any = self._axes if len(self._axes) > 1 else self._axes[0]
        mapped = jax.vmap(run, spmd_axis_name=names)
        results: list[Any] = mapped(jnp.arange(groups, dtype=jnp.int32), list(slices))
        return results

    def _cut(self, array: Any, value: ValueId, dim: int) -> Any:
        cut = self._layout.cut(array, dim, self._plan.specs[value].blocks)
        leading = 2 if self._layout.groups > 1 else 1
        spec = self._specs.get(value)
        if spec is None:
            return cut
        return self._lowering.constrain(cut, spec, without=self._without, leading=leading)


def _layout(plan: MicroBatchPlan, pins: Pins, mesh: Mesh, without: frozenset[str]) -> Layout:
    """The layout of the batch: groups, shards of a group's examples, and micro-batches. Shards are
    counted only where the mesh axes split the batch in that order.

    Independent micro-batches follow one another in the batch, however many devices share it.

    Shards must also divide arrays that hold fewer rows than there are examples.
    """
    if plan.phased is not None:
        return Layout(micro_batches=plan.num_micro_batches)
    sizes = {str(name): size for name, size in mesh.shape.items()}
    shards = 1
    for item, spec in zip(plan.whole.inputs, pins.inputs, strict=True):
        shape = plan.part.values[item.value].shape
        if item.role is not Role.BATCH:
            continue
        names = tuple(sizes)
        batch_axes, *_ = dims_of(spec, names, len(shape))
        others = tuple(name for name in batch_axes if name not in without)
        (count,) = sizes_of([others], sizes)
        # A group's shards are contiguous only where groups are the major axes of the batch.
        if (
            batch_axes[: len(batch_axes) - len(others)]
            == tuple(n for n in batch_axes if n in without)
            and shape[0] % count == 0
        ):
            # Each chunk of the batch lies on some of the shards.
            shards = max(shards, count // math.gcd(count, plan.specs[item.value].blocks))
    # An array that the shards do not divide would be cut elsewhere than the batch.
    even = all(
        plan.part.values[v].shape[spec.dim] % (shards * (spec.blocks or 1)) == 0
        for v, spec in enumerate(plan.specs)
        if spec.kind is TimeKind.CONCATENATE
    )
    return Layout(
        groups=plan.num_groups, shards=shards if even else 1, micro_batches=plan.num_micro_batches
    )
