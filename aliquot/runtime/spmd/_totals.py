"""Accumulators over micro-batches: running totals, and results kept part by part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ...graph import ValueId
from ...sharding import Layout, MicroBatchPlan, Pins, Spec, TimeKind, TotalConstraints
from ._apart import Apart
from ._lowering import AbstractLowering
from ._mesh import axis_names

_REDUCE: dict[TimeKind, Callable[..., Any]] = {
    TimeKind.MAX: jnp.max,
    TimeKind.MIN: jnp.min,
    TimeKind.PROD: jnp.prod,
    TimeKind.AND: jnp.all,
    TimeKind.OR: jnp.any,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Totals:
    """Accumulation of the micro-batches' values into those of the whole batch. Arrays carry a
    leading dim for groups where there are several.

    Attributes:
        plan: how the step is cut.
        mesh, lowering, pins: how arrays are split.
        layout: groups and micro-batches.
        without: mesh axes that the groups lie along.
        apart: sums over tokens whose summands are kept apart; None for none. Their totals carry a
            leading dim for the groups and, in each, the parts of the sequence.
        constraints: on the total of each value, once the groups' totals are summed.
    """

    plan: MicroBatchPlan
    mesh: Mesh
    lowering: AbstractLowering
    layout: Layout
    pins: Pins
    without: frozenset[str]
    apart: Apart | None = None
    constraints: dict[ValueId, TotalConstraints] = field(init=False)

    def __post_init__(self) -> None:
        graph = self.plan.whole
        pins = self.pins
        constraints: dict[ValueId, TotalConstraints] = dict(pins.totals)
        for op in graph.ops:
            pin = pins.of(op)
            first = op.inputs[0] if op.inputs else None
            chain = constraints.get(first, ()) if isinstance(first, int) else ()
            if chain and op.name in ("convert_element_type", "transpose") and op.outputs[0] >= 0:
                order = op.params.get("permutation", range(len(graph.values[op.outputs[0]].shape)))
                places = {dim: place for place, dim in enumerate(order)}
                constraints[op.outputs[0]] = tuple(
                    (tuple(places.get(p, p) for p in spec), minor) for spec, minor in chain
                )
            if pin is not None:
                for out, own in zip(op.outputs, pin.totals, strict=True):
                    if out >= 0 and own:
                        constraints[out] = own
        object.__setattr__(self, "constraints", constraints)

    def is_summed(self, value: ValueId) -> bool:
        """True if the parts' values are added up as they come: sums and means."""
        return self.plan.is_summed(value)

    def shape_and_dtype(self, value: ValueId) -> tuple[tuple[int, ...], Any]:
        """Shape and dtype of a running total: at least single precision."""
        each = self.plan.part.values[value]
        dtype = jnp.dtype(each.dtype)
        if jnp.issubdtype(dtype, jnp.inexact):
            # Many small gradients added up in half precision would be lost.
            dtype = jnp.promote_types(dtype, jnp.float32)
        return (*self._lead(value), *each.shape), dtype

    def zeros(self, value: ValueId) -> Any:
        """A total before the first part."""
        return self.spread(value, jnp.zeros(*self.shape_and_dtype(value)))

    def add(self, value: ValueId, total: Any, result: Any) -> Any:
        """A running total with one more micro-batch's value."""
        # Of summands, the dims of groups and of parts of the sequence become one.
        return self.spread(value, total + result.reshape(total.shape).astype(total.dtype))

    def spread(self, value: ValueId, total: Any) -> Any:
        """A running total, constrained so that each group's part stays on the group's devices."""
        if not self._lead(value):
            return total
        return self.lowering.constrain(
            total, self.total_spec(value), without=self.axes_apart(value), leading=1
        )

    def axes_apart(self, value: ValueId) -> frozenset[str]:
        """Mesh axes along which devices have totals of their own."""
        if self.apart is None or value not in self.apart.values:
            return self.without
        return self.without | {self.apart.axis}

    def _lead(self, value: ValueId) -> tuple[int, ...]:
        count = math.prod(self.mesh.shape[axis] for axis in self.axes_apart(value))
        return (count,) if count > 1 else ()

    def total_spec(self, value: ValueId) -> Spec:
        """Split of a running total's dims, without that of the groups."""
        whole: Spec = (-1,) * len(self.pins.inputs[0]) if self.pins.inputs else ()
        chain = self.constraints.get(value)
        return chain[-1][0] if chain else self.pins.values.get(value, whole)

    def add_up(self, value: ValueId, total: Any) -> Any:
        """The batch's value from a running total. It is rounded to the step's own dtype before
        devices add up theirs, as they do without micro-batches, so that they send no more bytes.
        """
        chain = self.constraints.get(value, ())
        if self.plan.specs[value].kind is TimeKind.MEAN:
            total = total / self.plan.num_parts
        total = total.astype(self.plan.whole.values[value].dtype)
        if self._lead(value):
            axes = self.axes_apart(value)
            total = self._over_groups(total, axes, *chain[0]) if chain else _sum(total)
        for spec, minor in chain:
            total = self.lowering.constrain(total, spec, minor=minor)
        return total

    def _over_groups(
        self, total: Any, summed: frozenset[str], spec: Spec, minor: Sequence[int]
    ) -> Any:
        """The sum of totals that are apart: first along the axes that split the sum, then along the
        others. If all were summed at once, XLA would all-reduce the whole array.
        """
        names = axis_names(self.mesh)
        axes = [name for name in names if name in summed]
        scattered = [k for k, name in enumerate(axes) if spec[names.index(name)] >= 0]
        # Sums along all axes, or along none, need no second step.
        if not 0 < len(scattered) < len(axes):
            return _sum(total)
        apart = total.reshape(*(self.mesh.shape[name] for name in axes), *total.shape[1:])
        left = _sum(apart, scattered).reshape(-1, *total.shape[1:])
        others = summed - {axes[k] for k in scattered}
        return _sum(self.lowering.constrain(left, spec, without=others, leading=1, minor=minor))

    def combine(self, value: ValueId, stack: Any) -> Any:
        """The batch's value of results that are not summed, stacked by micro-batch, and by group
        where there are any.
        """
        spec = self.plan.specs[value]
        lead = (0, 1) if self.layout.groups > 1 else (0,)
        if spec.kind is TimeKind.CONCATENATE:
            return self.layout.join(stack, spec.dim, spec.blocks or 1)
        if spec.kind in _REDUCE:
            return _REDUCE[spec.kind](stack, axis=lead)
        # Values that are equal on all parts are taken from the last.
        return stack[(-1,) * len(lead)]


def _sum(total: Any, dims: Sequence[int] = (0,)) -> Any:
    """The sum over dims, in the array's own dtype: `jnp.sum` would add 16-bit floats in 32 bits,
    and devices would send those.
    """
    zero = jnp.zeros((), total.dtype)
    return jax.lax.reduce(total, zero, jax.lax.add, dims)
