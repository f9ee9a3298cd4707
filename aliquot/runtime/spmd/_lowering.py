"""Lowering of pins to a program: how a plan's splits reach the compiler."""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...graph import EXPERTS, NO_VALUE, Graph, Op, Operand, ReplayHook, ValueId, evaluate, traits_of
from ...sharding import REPLICATED, Pin, Pins, Spec, dim_rule, dims_of, is_declared, without_partial
from ._apart import Apart, OwnPart
from ._local import (
    Bind,
    Devices,
    convolution,
    in_plain_order,
    joined_by_sums,
    on_pieces,
    scattered_product,
    split_experts,
)
from ._mapped import differing
from ._mesh import axis_names


class AbstractLowering(abc.ABC):
    """A way to run a graph under a plan's pins."""

    @abc.abstractmethod
    def replay(
        self,
        graph: Graph,
        arrays: Sequence[Any],
        *,
        without: frozenset[str] = frozenset(),
        mapped: Collection[int] = (),
        apart: Apart | None = None,
    ) -> list[Any]:
        """Run a graph on traced arrays, one for each of its inputs.

        Args:
            graph: the step that the pins are of, or some of its operators under their own indices.
            arrays: one for each of `graph.inputs`.
            without: mesh axes along which a `vmap` around the replay gives each group of devices
                arrays of its own.
            mapped: the inputs that each group has for itself. Pins of values that depend on them
                must not mention the axes of `without`.
            apart: sums whose summands are kept apart: results that hold some have one more dim, the
                first, for the parts of the sequence, split over its axis.
        """

    @abc.abstractmethod
    def constrain(
        self,
        array: Any,
        spec: Spec,
        *,
        without: frozenset[str] = frozenset(),
        leading: int = 0,
        minor: Sequence[int] = (),
    ) -> Any:
        """Split an array as `spec` says.

        Args:
            without: mesh axes that are not to be mentioned.
            leading: number of dims before those that `spec` speaks of; the last of them is split
                over `without`.
            minor: positions of mesh axes that subdivide tiles last.
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConstraintLowering(AbstractLowering):
    """Sharding constraints where the pins are; the compiler's partitioner does the rest.

    An array that a pin leaves whole is constrained too; otherwise the compiler would choose its
    split.
    """

    mesh: Mesh
    pins: Pins

    def replay(
        self,
        graph: Graph,
        arrays: Sequence[Any],
        *,
        without: frozenset[str] = frozenset(),
        mapped: Collection[int] = (),
        apart: Apart | None = None,
    ) -> list[Any]:
        if apart is None:
            return self._replay(graph, arrays, without, mapped, None)

        def of_part(number: Any) -> list[Any]:
            part = OwnPart(apart=apart, mesh=self.mesh, number=number)
            return self._replay(graph, arrays, without, mapped, part)

        dims = [0 if o.value in apart.values else None for o in graph.outputs]
        if not any(dim == 0 for dim in dims):
            return self._replay(graph, arrays, without, mapped, None)
        parts = jax.vmap(of_part, out_axes=dims, spmd_axis_name=apart.axis)
        results: list[Any] = parts(jnp.arange(apart.size, dtype=jnp.int32))
        return results

    def _replay(
        self,
        graph: Graph,
        arrays: Sequence[Any],
        without: frozenset[str],
        mapped: Collection[int],
        part: OwnPart | None,
    ) -> list[Any]:
        hook = _Constrain(self, graph, without, differing(graph, mapped), part)
        results = evaluate(graph, arrays, on_op=hook)
        if self.pins.rows:
            given = {item.value: array for item, array in zip(graph.inputs, arrays, strict=True)}
            for position, output in enumerate(graph.outputs):
                results[position] = self._renewed(output.value, results[position], given)
        return results

    def constrain(
        self,
        array: Any,
        spec: Spec,
        *,
        without: frozenset[str] = frozenset(),
        leading: int = 0,
        minor: Sequence[int] = (),
    ) -> Any:
        # Scalars cannot be split.
        if array.ndim == 0:
            return array
        dims = partition(self.mesh, spec, array.shape[leading:], without, minor)
        if leading:
            groups = tuple(axis_names(self.mesh, without))
            lead = [()] * (leading - 1) + [groups]
            dims = PartitionSpec(*lead, *dims)
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, dims))

    def _renewed(self, value: Operand, new: Any, given: Mapping[ValueId, Any]) -> Any:
        """A result; if it replaces an input row by row, the input's array with the result's rows
        written into it, each gathered by itself.
        """
        old, *specs = (
            self.pins.rows.get(value, (NO_VALUE,)) if isinstance(value, int) else (NO_VALUE,)
        )
        if old not in given:
            return new
        new = self.constrain(new, specs[0])

        def replace(number: Any, kept: Any) -> Any:
            row = jax.lax.dynamic_index_in_dim(new, number, keepdims=False)
            for spec in specs:
                row = self.constrain(row, _of_row(spec))
            # Otherwise the whole array would get the memory layout in which a gather leaves a row.
            row = in_plain_order(
                row, self.mesh, partition(self.mesh, _of_row(specs[-1]), row.shape)
            )
            return jax.lax.dynamic_update_index_in_dim(kept, row, number, 0)

        return jax.lax.fori_loop(0, new.shape[0], replace, given[old])


def partition(
    mesh: Mesh,
    spec: Spec,
    shape: Sequence[int],
    without: frozenset[str] = frozenset(),
    minor: Sequence[int] = (),
) -> PartitionSpec:
    """A spec as JAX writes it. Axes that do not divide a dim are left out: a micro-batch may be too
    small for them.
    """
    names = axis_names(mesh)
    kept: list[tuple[str, ...]] = []
    for size, axes in zip(
        shape, dims_of(without_partial(spec), names, len(shape), minor), strict=True
    ):
        mine: list[str] = []
        shards = 1
        for axis in axes:
            # JAX refuses an argument that its axes do not divide, and drops such a constraint.
            if axis not in without and size % (shards * mesh.shape[axis]) == 0:
                mine.append(axis)
                shards *= mesh.shape[axis]
        kept.append(tuple(mine))
    return PartitionSpec(*kept)


def _of_row(spec: Spec) -> Spec:
    """Split of one row of an array."""
    return tuple(REPLICATED if p == 0 else p - 1 if p > 0 else p for p in spec)


# JAX runs these on the first device alone. The compiler warns the user where their operands are
# split ("involuntary full rematerialization"), and does the same without a word where they are
# whole. A program whose results come from there would leave them on that device.
_CALLBACKS = frozenset({"debug_callback", "debug_print", "io_callback", "pure_callback"})


class _Constrain(ReplayHook):
    """Pins every operand, then every result, one split after the other."""

    def __init__(
        self,
        lowering: ConstraintLowering,
        graph: Graph,
        without: frozenset[str],
        differing: frozenset[int],
        part: OwnPart | None,
    ) -> None:
        self._graph = graph
        self._part = part
        self._apart = part.apart if part is not None else None
        self._lowering, self._without, self._differing = lowering, without, differing
        self._pins = lowering.pins
        # Pinned arrays, by the id of the array before the pin and the spec. That array is kept
        # alive, so that its id is not reused.
        self._between: dict[tuple[int, Spec], tuple[Any, Any]] = {}

    @contextmanager
    def body(self) -> Iterator[None]:
        # Arrays of a loop's body must not be used outside of it.
        outside, self._between = self._between, {}
        try:
            yield
        finally:
            self._between = outside

    def operands(self, op: Op, arrays: list[Any]) -> Sequence[Any]:
        if op.name in _CALLBACKS:
            return [self._pin(i, a, ()) for i, a in zip(op.inputs, arrays, strict=True)]
        pin = self._pins.of(op) if op.index < len(self._pins.op_class) else None
        if pin is None:
            return arrays
        for position, (spec, between) in enumerate(zip(pin.operands, pin.between, strict=True)):
            for each in between:
                arrays[position] = self._once(op.inputs[position], arrays[position], each)
            if spec is not None:
                arrays[position] = self._pin(op.inputs[position], arrays[position], spec)
        return arrays

    def _once(self, value: Operand, array: Any, spec: Spec) -> Any:
        """A pinned array, shared by all operands with the same array and spec: the partitioner
        would convert the array once for each of several equal pins.
        """
        known = self._between.get((id(array), spec))
        if known is None:
            known = self._between[id(array), spec] = self._pin(value, array, spec), array
        return known[0]

    def run(self, op: Op, arrays: Sequence[Any], bind: Bind) -> Sequence[Any]:
        """Run an operator: as it is, or on each device's pieces where the partitioner splits it
        badly.
        """
        if self._part is not None:
            arrays = self._summands(self._part, op, arrays)
        pin = self._pins.of(op) if op.index < len(self._pins.op_class) else None
        if pin is not None and op.name == "concatenate":
            return self._join(pin, op, arrays, bind)
        sums_scattered = pin is not None and pin.on_pieces
        by_itself = traits_of(op.name).runs_on_pieces or not is_declared(op)
        if not sums_scattered and not by_itself and op.name != "conv_general_dilated":
            return bind(op.eqn, arrays)
        mesh, without = self._lowering.mesh, self._without_of(*op.inputs, *op.outputs)
        if pin is not None and sums_scattered:
            return self._product(pin, op, arrays, bind, without)
        devices = Devices(mesh, axis_names(mesh, without))
        if op.name == "conv_general_dilated":
            return convolution(op.eqn, arrays, bind, devices)
        given = pin.operands if pin is not None else [None] * len(arrays)
        splits = [
            s if s is None else partition(mesh, s, a.shape, without)
            for s, a in zip(given, arrays, strict=True)
        ]
        if op.name in EXPERTS and pin is not None:
            made = jax.eval_shape(lambda *arrays: list(bind(op.eqn, arrays)), *arrays)
            wanted = [
                partition(mesh, chain[0] if chain else (), one.shape, without, minor)
                for chain, minor, one in zip(pin.results, pin.minor, made, strict=True)
            ]
            return split_experts(
                op.eqn, arrays, devices, splits, wanted, wide_sums=self._pins.wide_sums
            )
        rule = dim_rule(op, self._graph, on_missing_rule=self._pins.on_missing_rule)
        return on_pieces(op.eqn, arrays, bind, devices, rule, splits)

    def _join(self, pin: Pin, op: Op, arrays: Sequence[Any], bind: Bind) -> Sequence[Any]:
        """A join of arrays; a sum of padded ones where it is along a dim that is split."""
        dim = op.params["dimension"]
        # Keys cannot be added.
        is_key = jnp.issubdtype(arrays[0].dtype, jax.dtypes.extended)
        if not is_key and any(dim in spec for spec in pin.operands if spec is not None):
            return [joined_by_sums(arrays, dim)]
        return bind(op.eqn, arrays)

    def _product(
        self, pin: Pin, op: Op, arrays: Sequence[Any], bind: Bind, without: frozenset[str]
    ) -> Sequence[Any]:
        """A product with its partial sums reduce-scattered; as it is if that does not lead to the
        wanted split.
        """
        mesh, (chain,), (minor,) = self._lowering.mesh, pin.results, pin.minor
        operands = [
            partition(mesh, spec or (), array.shape, without)
            for spec, array in zip(pin.operands, arrays, strict=True)
        ]

        def wanted(shape: Sequence[int]) -> PartitionSpec:
            return partition(mesh, chain[0], shape, without, minor)

        groups = without
        if self._apart is not None and op.index in self._apart.ops:
            # The innermost `vmap` is that over parts of the sequence.
            groups = frozenset({self._apart.axis})
        result = scattered_product(
            op.eqn,
            arrays,
            bind,
            Devices(mesh, axis_names(mesh, groups)),
            operands,
            wanted,
            wide_sums=self._pins.wide_sums,
        )
        return bind(op.eqn, arrays) if result is None else result

    def results(self, op: Op, arrays: list[Any]) -> Sequence[Any]:
        if op.name in _CALLBACKS:
            arrays = [self._pin(i, a, ()) for i, a in zip(op.outputs, arrays, strict=True)]
        pin = self._pins.of(op) if op.index < len(self._pins.op_class) else None
        if pin is None:
            return arrays
        for position, (chain, minor) in enumerate(zip(pin.results, pin.minor, strict=True)):
            for number, spec in enumerate(chain):
                arrays[position] = self._pin(
                    op.outputs[position], arrays[position], spec, () if number else minor
                )
        return arrays

    def value(self, index: ValueId, array: Any) -> Any:
        spec = self._pins.values.get(index)
        return array if spec is None else self._pin(index, array, spec)

    def row(self, index: ValueId, array: Any) -> Any:
        # Without this pin the rows would be stacked as they are, and the whole stack converted
        # after the loop.
        spec = self._pins.values.get(index)
        if spec is None:
            return array
        return self._pin(index, array, _of_row(spec))

    def _pin(self, value: Operand, array: Any, spec: Spec, minor: Sequence[int] = ()) -> Any:
        without = self._without_of(value)
        return self._lowering.constrain(array, spec, without=without, minor=minor)

    def _without_of(self, *operands: Operand) -> frozenset[str]:
        """Mesh axes over which each group of devices, or part of the sequence, has arrays of its
        own.
        """
        values = {i for i in operands if isinstance(i, int)}
        axes = frozenset() if self._differing.isdisjoint(values) else self._without
        if self._apart is not None and not self._apart.values.isdisjoint(values):
            axes |= {self._apart.axis}
        return axes

    def _summands(self, part: OwnPart, op: Op, arrays: Sequence[Any]) -> Sequence[Any]:
        """Operands of one part: of a sum its tokens, and what is added to summands but once."""
        held = part.apart.values
        if op.index in part.apart.ops and held.isdisjoint(op.inputs):
            specs = self._pins.token_sums[self._pins.op_class[op.index]]
            splits = [
                None if s is None else partition(part.mesh, s, a.shape, self._without_of(i))
                for i, s, a in zip(op.inputs, specs, arrays, strict=True)
            ]
            return part.operands(op, arrays, splits)
        if traits_of(op.name).adds and not held.isdisjoint(op.outputs):
            arrays = list(arrays)
            for k, value in enumerate(op.inputs):
                if value not in held:
                    arrays[k] = part.once(arrays[k])
        return arrays
