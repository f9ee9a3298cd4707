"""Functions over arrays on a stage's mesh, from the stage's programs.

Between stages a value of a micro-batch travels as the array that the user would see: examples of
all data-parallel groups in order. Within a stage it keeps a leading dim for the groups, split over
the mesh's data axes, so that no gradient crosses between groups before the last micro-batch.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...graph import NO_VALUE, Graph, StageId, ValueId, memory_kind
from ...sharding import Layout, MicroBatchGraphs, MicroBatchPlan, Part, Pins, StageProgram, TimeKind
from ..spmd import ConstraintLowering, Totals, axis_names, kept_apart, partition

_REDUCE: dict[TimeKind, Callable[..., Any]] = {
    TimeKind.SUM: jnp.sum,
    TimeKind.PROD: jnp.prod,
    TimeKind.MAX: jnp.max,
    TimeKind.MIN: jnp.min,
    TimeKind.AND: jnp.all,
    TimeKind.OR: jnp.any,
}
# Neutral elements: where the first group holds a value that counts once, the others hold these.
_NEUTRAL: dict[TimeKind, Callable[..., Any]] = {TimeKind.SUM: jnp.zeros, TimeKind.PROD: jnp.ones}


class Form(enum.StrEnum):
    """The forms in which a stage may have a value."""

    GIVEN = "given"  # an input of the step, or a constant
    EARLY = "early"  # of the whole batch, made before the first micro-batch
    LOCAL = "local"  # of one micro-batch, as the stage itself uses it
    SENT = "sent"  # of one micro-batch, as stages exchange it
    TOTAL = "total"  # added up over micro-batches so far
    STACKED = "stacked"  # of one micro-batch, kept for the update
    LATE = "late"  # of the whole batch, in the update
    PACKED = "packed"  # a vector of scalars of the update, on its way to other stages
    NUMBER = "number"  # the number of the micro-batch
    HANDED_ON = "handed on"  # state as a micro-batch finds it


class Key(NamedTuple):
    """A value in some form. `micro_batch` is set only where a program takes a value of several
    micro-batches.
    """

    form: Form
    value: ValueId = NO_VALUE
    micro_batch: int = -1


class StageSetup(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The mesh of a stage and the splits on it.

    Attributes:
        mesh: its devices.
        pins: its splits, indexed by the operators of the whole step.
        data_axes: mesh axes that split nothing but the batch.
        context_axes: the axis that splits the sequence, if gradients wait over it, too.
        given_specs: how inputs of the step are split, by value.
        sent_specs: how values that it exchanges with other stages are split, by value.
    """

    mesh: Mesh
    pins: Pins
    data_axes: tuple[str, ...]
    given_specs: Mapping[ValueId, PartitionSpec]
    sent_specs: Mapping[ValueId, PartitionSpec]
    context_axes: tuple[str, ...] = ()


class StageContext(StageSetup, frozen=True, kw_only=True, eq=False, dict=True):
    """Mesh, splits and layout with which a stage runs. `data_axes` are those that the data-parallel
    groups lie along; empty without micro-batches.

    Attributes:
        bodies: the graphs that run in each micro-batch, each with its results that are added up.
        parts, plan: the step cut into micro-batches for this number of groups; `plan` is None if
            the whole batch runs at once.
        layout: groups and micro-batches.
    """

    bodies: Sequence[tuple[Graph, Sequence[ValueId]]]
    parts: MicroBatchGraphs
    plan: MicroBatchPlan | None
    layout: Layout

    @functools.cached_property
    def lowering(self) -> ConstraintLowering:
        """Writes the splits into programs."""
        return ConstraintLowering(mesh=self.mesh, pins=self.pins)

    @property
    def without(self) -> frozenset[str]:
        """Axes that pins must not name: those that the groups lie along, which `vmap` adds."""
        return frozenset(self.data_axes) if self.layout.groups > 1 else frozenset()

    @functools.cached_property
    def totals(self) -> Totals | None:
        """Running totals over micro-batches."""
        if self.plan is None:
            return None
        return Totals(
            plan=self.plan,
            mesh=self.mesh,
            lowering=self.lowering,
            layout=self.layout,
            pins=self.pins,
            without=self.without,
            apart=kept_apart(self.pins, self.mesh, self.context_axes, self.bodies),
        )

    def kind(self, value: ValueId) -> TimeKind:
        """How the values of an array in the micro-batches make up its value for the whole batch."""
        assert self.plan is not None
        return self.plan.specs[value].kind

    def given_sharding(self, value: ValueId) -> NamedSharding:
        """Sharding of an input of the step."""
        spec = self.given_specs.get(value, PartitionSpec())
        return NamedSharding(self.mesh, spec, memory_kind=self.memory_kind(value))

    def memory_kind(self, value: ValueId) -> str | None:
        """JAX's name for the memory of a value; None for device memory."""
        return memory_kind(self.parts.body.values[value])

    def sent_sharding(self, value: ValueId, shape: Sequence[int]) -> NamedSharding:
        """Sharding of a value of a micro-batch that comes from another stage, or goes to one."""
        spec = self.sent_specs.get(value)
        if len(shape) > len(self.parts.body.values[value].shape):
            # Each group has a value of its own: there is a leading dim, which may count another
            # stage's groups.
            spec = (
                PartitionSpec(self.data_axes) if shape[0] == self.layout.groups else PartitionSpec()
            )
        elif spec is None:
            dims: list[Any] = [None] * len(shape)
            kind = self.plan.specs[value] if self.plan else None
            size = 1
            for axis in self.data_axes:
                size *= self.mesh.shape[axis]
            if (
                kind is not None
                and kind.kind is TimeKind.CONCATENATE
                and shape[kind.dim] % size == 0
                and self.data_axes
            ):
                dims[kind.dim] = self.data_axes
            spec = PartitionSpec(*dims)
        return NamedSharding(self.mesh, spec, memory_kind=self.memory_kind(value))

    def late_sharding(self, value: ValueId) -> NamedSharding:
        """Sharding of a value of the whole batch that updates of two stages exchange, such as the
        gradient of a weight that both use.
        """
        return NamedSharding(self.mesh, self.sent_specs.get(value, PartitionSpec()))

    def total_sharding(self, value: ValueId) -> NamedSharding:
        """Sharding of a running total."""
        assert self.totals is not None
        shape, _ = self.totals.shape_and_dtype(value)
        axes = self.totals.axes_apart(value)
        lead = 1 if axes else 0
        dims = partition(self.mesh, self.totals.total_spec(value), shape[lead:], axes)
        groups = tuple(axis_names(self.mesh, axes))
        return NamedSharding(self.mesh, PartitionSpec(*([groups] * lead), *dims))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageFunction:
    """A program as a function of flat arrays: its arguments and results, in order."""

    program: StageProgram
    takes: tuple[Key, ...]
    gives: tuple[Key, ...]
    run: Callable[..., list[Any]]


def build_function(
    program: StageProgram,
    context: StageContext,
    *,
    made_by: Mapping[ValueId, StageId],
    sent: frozenset[ValueId],
) -> StageFunction:
    """The function of a program.

    Args:
        context: of its stage.
        made_by: the stage that makes a value.
        sent: values that other stages read.
    """
    if program.part is Part.EARLY:
        return StageFunction(
            program=program,
            takes=_keys(Form.GIVEN, program.given),
            gives=_keys(Form.EARLY, program.exports),
            run=lambda *arrays: context.lowering.replay(program.graph, arrays),
        )
    if program.part is Part.UPDATE:
        return _update(program, context)
    return _body(program, context, made_by, sent)


def _body(
    program: StageProgram,
    context: StageContext,
    made_by: Mapping[ValueId, StageId],
    sent: frozenset[ValueId],
) -> StageFunction:
    """The function of a forward or backward program, which runs for each micro-batch."""
    grouped = context.layout.groups > 1
    outside = dict(zip(context.parts.inside, context.parts.early_values, strict=True))
    # Within a stage each group keeps its own values, so that groups exchange nothing.
    own_imports = [v for v in program.imports if grouped and made_by[v] == program.stage]
    others = [v for v in program.imports if v not in own_imports]
    parts = context.totals is not None
    handed_on = dict(program.handed_on)
    takes = [
        *_keys(Form.GIVEN, program.given),
        *_keys(Form.EARLY, [outside[v] for v in program.early]),
        *_keys(Form.LOCAL, own_imports),
        *_keys(Form.SENT, others),
        *_keys(Form.TOTAL, program.totals if parts else ()),
        *_keys(Form.HANDED_ON, handed_on),
        *([Key(Form.NUMBER)] if parts else []),
    ]
    at_home = []
    for v in program.exports:
        if grouped and made_by[v] == program.stage and v in program.kept:
            at_home.append(v)
    away = [v for v in program.exports if not grouped or v in sent]
    gives = [
        *_keys(Form.LOCAL, at_home),
        *_keys(Form.SENT, away),
        *_keys(Form.TOTAL, program.totals),
        *_keys(Form.STACKED, program.stacked),
        *_keys(Form.HANDED_ON, handed_on),
    ]

    def run(*arrays: Any) -> list[Any]:
        known = dict(zip(takes, arrays, strict=True))
        results = _replay_part(program, context, known, outside)
        gathered = [results[v] for v in at_home]
        for v in away:
            gathered.append(_joined(context, v, results[v]) if grouped else results[v])
        for v in program.totals:
            if context.totals is None:
                gathered.append(results[v])
            else:
                gathered.append(context.totals.add(v, known[Key(Form.TOTAL, v)], results[v]))
        return gathered + [results[v] for v in (*program.stacked, *handed_on.values())]

    return StageFunction(program=program, takes=tuple(takes), gives=tuple(gives), run=run)


def _keys(form: Form, values: Iterable[ValueId]) -> tuple[Key, ...]:
    return tuple(Key(form, value) for value in values)


def _replay_part(
    program: StageProgram,
    context: StageContext,
    known: Mapping[Key, Any],
    outside: Mapping[ValueId, ValueId],
) -> dict[ValueId, Any]:
    """The program's results for one micro-batch, with a leading dim for the groups where there are
    several.
    """
    parts, layout = context.parts, context.layout
    number = known.get(Key(Form.NUMBER))
    plain: dict[ValueId, Any] = {}
    mapped: dict[ValueId, Any] = {}
    sliced = dict(parts.sliced)
    for key, array in known.items():
        value = key.value
        if key.form in (Form.GIVEN, Form.EARLY):
            names = (
                [value]
                if key.form is Form.GIVEN
                else [v for v in program.early if outside[v] == value]
            )
            for name in names:
                if value in sliced:
                    place = mapped if layout.groups > 1 else plain
                    place[name] = _slice(context, array, value, sliced[value], number)
                else:
                    plain[name] = array
        elif key.form is Form.HANDED_ON:
            plain[value] = array
        elif key.form is Form.LOCAL:
            mapped[value] = array
        elif key.form is Form.SENT and layout.groups == 1:
            # Another stage may have another number of groups.
            has_groups = array.ndim > len(program.graph.values[value].shape)
            plain[value] = _for_groups(array, 1, context.kind(value))[0] if has_groups else array
        elif key.form is Form.SENT:
            _take_apart(context, value, array, plain, mapped)
    order = [item.value for item in program.graph.inputs]
    names = [v for v in order if v in mapped]

    def run(group: Any, has_groups: Sequence[Any]) -> list[Any]:
        arrays = (
            plain
            | dict(zip(names, has_groups, strict=True))
            | {parts.group: group, parts.micro_batch: number}
        )
        inputs = [arrays[v] for v in order]
        return context.lowering.replay(
            program.graph,
            inputs,
            without=context.without,
            mapped=[*names, parts.group],
            apart=None if context.totals is None else context.totals.apart,
        )

    if layout.groups == 1:
        results = run(jnp.int32(0), [])
    else:
        # `vmap` takes one name for one axis, and a tuple for several.
        axes: Any = context.data_axes if len(context.data_axes) > 1 else context.data_axes[0]
        groups = jnp.arange(layout.groups, dtype=jnp.int32)
        results = jax.vmap(run, spmd_axis_name=axes)(groups, [mapped[v] for v in names])
    made = {}
    for output, array in zip(program.graph.outputs, results, strict=True):
        if isinstance(output.value, int):
            made[output.value] = array
    return made


def _slice(context: StageContext, array: Any, value: ValueId, dim: int, number: Any) -> Any:
    """One micro-batch's part of an array of the whole batch."""
    blocks = context.plan.specs[value].blocks if context.plan is not None else 1
    parts = context.layout.cut(array, dim, blocks)
    cut = jax.lax.dynamic_index_in_dim(parts, number, keepdims=False)
    if context.layout.groups == 1:
        return cut
    # The dim of the groups is split over the data axes, so that each group's devices hold its part
    # alone.
    dims: list[Any] = [context.data_axes] + [None] * (cut.ndim - 1)
    return jax.lax.with_sharding_constraint(cut, NamedSharding(context.mesh, PartitionSpec(*dims)))


def _joined(context: StageContext, value: ValueId, array: Any) -> Any:
    """A value that each group has for itself, in the form in which other stages receive it. The dim
    of the groups is kept where their values can neither be joined nor reduced.
    """
    assert context.plan is not None
    spec = context.plan.specs[value]
    if spec.kind is TimeKind.CONCATENATE:
        # The groups' examples follow one another in each block, as each has a contiguous share of
        # it.
        (groups, *shape), dim, blocks = array.shape, spec.dim, spec.blocks or 1
        rest = (shape[dim] // blocks, *shape[dim + 1 :])
        apart = array.reshape(groups, *shape[:dim], blocks, *rest)
        joined = (*shape[:dim], groups * shape[dim], *shape[dim + 1 :])
        return jnp.moveaxis(apart, 0, dim + 1).reshape(joined)
    # Values that are equal in all groups are taken from the first.
    return _REDUCE[spec.kind](array, axis=0) if spec.kind in _REDUCE else array[0]


def _take_apart(
    context: StageContext,
    value: ValueId,
    array: Any,
    plain: dict[ValueId, Any],
    mapped: dict[ValueId, Any],
) -> None:
    """The reverse of `_joined`. A sum or product goes to the first group alone, so that it counts
    once.
    """
    assert context.plan is not None
    spec, groups = context.plan.specs[value], context.layout.groups
    if spec.kind is TimeKind.CONCATENATE:
        shape, dim, blocks = array.shape, spec.dim, spec.blocks or 1
        rest = (shape[dim] // (blocks * groups), *shape[dim + 1 :])
        apart = array.reshape(*shape[:dim], blocks, groups, *rest)
        own = (groups, *shape[:dim], shape[dim] // groups, *shape[dim + 1 :])
        mapped[value] = jnp.moveaxis(apart, dim + 1, 0).reshape(own)
    elif array.ndim > len(context.parts.body.values[value].shape):
        mapped[value] = _for_groups(array, groups, spec.kind)
    elif spec.kind in _NEUTRAL:
        # The first group takes the value, and the others the neutral element.
        mapped[value] = _NEUTRAL[spec.kind]((groups, *array.shape), array.dtype).at[0].set(array)
    else:
        plain[value] = array


def _for_groups(array: Any, groups: int, kind: TimeKind) -> Any:
    """Values of groups, converted to another number of groups: each new group gets the values of
    the old groups that hold its examples.
    """
    count = array.shape[0]
    if groups % count == 0:
        # Groups that share examples each take an equal part of their sum.
        repeated = jnp.repeat(array, groups // count, axis=0)
        shared = (
            repeated / (groups // count) if kind is TimeKind.SUM and groups > count else repeated
        )
        return shared.astype(array.dtype)
    # Neither number divides the other: convert to a single group first.
    if count % groups:
        return _for_groups(_for_groups(array, 1, kind), groups, kind)
    shares = array.reshape(groups, count // groups, *array.shape[1:])
    return _REDUCE[kind](shares, axis=1) if kind in _REDUCE else shares.mean(1).astype(array.dtype)


def _update(program: StageProgram, context: StageContext) -> StageFunction:
    """The function of an update program: it combines totals first, then runs the operators."""
    plan, totals = context.plan, context.totals
    handed_on = {new: v for v, new in context.parts.handed_on if new in program.combines}
    combines = [v for v in program.combines if v not in handed_on]
    summed = [v for v in combines if totals is None or totals.is_summed(v)]
    stacked = [v for v in combines if v not in summed]
    count = plan.num_micro_batches if plan else 1
    takes = [
        *_keys(Form.GIVEN, program.given),
        *_keys(Form.EARLY, program.early),
        *_keys(Form.LATE, program.imports),
        *_keys(Form.TOTAL, summed),
        *(Key(Form.STACKED, v, m) for v, m in itertools.product(stacked, range(count))),
        # As the last micro-batch leaves it.
        *(Key(Form.HANDED_ON, v, count) for v in handed_on.values()),
    ]

    def run(*arrays: Any) -> list[Any]:
        known = dict(zip(takes, arrays, strict=True))
        values = {}
        for key, array in known.items():
            if key.form not in (Form.TOTAL, Form.STACKED, Form.HANDED_ON):
                values[key.value] = array
        for new, v in handed_on.items():
            values[new] = known[Key(Form.HANDED_ON, v, count)]
        for v in summed:
            total = known[Key(Form.TOTAL, v)]
            values[v] = total if totals is None else totals.add_up(v, total)
        for v in stacked:
            assert totals is not None
            stack = jnp.stack([known[Key(Form.STACKED, v, m)] for m in range(count)])
            values[v] = totals.combine(v, stack)
        return context.lowering.replay(
            program.graph, [values[i.value] for i in program.graph.inputs]
        )

    return StageFunction(
        program=program,
        takes=tuple(takes),
        gives=_keys(Form.LATE, program.exports),
        run=run,
    )
