"""Functions of a pipeline's stages with shapes and shardings of their arguments and results, before
they are compiled and after.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import msgspec
from jax.sharding import NamedSharding, PartitionSpec

from ...graph import ValueId, memory_kind
from ...sharding import Part, TimeKind, struct_of
from ._pipeline import Pipeline
from ._stage_functions import Form, Key, StageContext, StageFunction

Known: TypeAlias = dict[tuple[int, Key], Any]
"""Shape, dtype and sharding of the functions' results, by stage and key."""


class StageForm(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A stage's function with what it takes and gives.

    Attributes:
        jitted: takes and returns flat arrays.
        donated: positions of donated arguments.
        arguments, results: shapes and dtypes with their shardings; a sharding of None is left to
            the compiler, until it has chosen one.
        wanted: the results' shardings.
        compiled: its executable, once there is one. Equal functions of stages on the same devices
            share it; the first of them has the time that it took as `compile_s`.
    """

    function: StageFunction
    jitted: Any
    donated: tuple[int, ...]
    arguments: tuple[Any, ...]
    results: tuple[Any, ...]
    wanted: tuple[Any, ...]
    compiled: Any = None
    lower_s: float = 0.0
    compile_s: float = 0.0


def form_of(pipeline: Pipeline, k: int, known: Known) -> StageForm:
    """The `k`th function before it is compiled.

    Args:
        known: the results of the functions before it; gets those of this one.
    """
    function = pipeline.functions[k]
    arguments = tuple(_struct(pipeline, function, key, known) for key in function.takes)
    shapes = jax.eval_shape(function.run, *arguments)
    donated = donated_positions(pipeline, k)
    results, wanted = [], []
    for key, s in zip(function.gives, shapes, strict=True):
        wanted.append(_out_sharding(pipeline, function, key, s.shape))
        results.append(array_struct(s.shape, s.dtype, wanted[-1]))
        known[function.program.stage, Key(key.form, key.value)] = results[-1]
    # Equal stages have equal programs. Caches compare programs with their names, so the name must
    # not contain the number of the stage.
    function.run.__name__ = function.program.name.split(" ", 2)[2].replace(" ", "_")
    run = function.run if arguments else _on_mesh(function, pipeline)
    return StageForm(
        function=function,
        jitted=jax.jit(run, out_shardings=wanted, donate_argnums=donated, keep_unused=True),
        donated=donated,
        arguments=arguments,
        results=tuple(results),
        wanted=tuple(wanted),
    )


def _on_mesh(function: StageFunction, pipeline: Pipeline) -> Callable[[], list[Any]]:
    """A function without arguments, such as one that makes constants, on the devices of its stage.

    JAX runs a program where its arguments lie. This one has none and would run on the first device
    of all, from where no other program of the stage could take its results.
    """
    mesh = pipeline.contexts[function.program.stage].mesh

    @functools.wraps(function.run)
    def run() -> list[Any]:
        placed = []
        for array in function.run():
            # The devices are fixed; how an array is split over them is left to the compiler.
            dims = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * array.ndim)
            placed.append(jax.lax.with_sharding_constraint(array, NamedSharding(mesh, dims)))
        return placed

    return run


def given_slots(pipeline: Pipeline, value: ValueId) -> dict[int, tuple[int, NamedSharding]]:
    """Slot and sharding of an input by stage: on its home, or on every stage that reads it."""
    slots = {}
    for stage, values in sorted(pipeline.instructions.given.items()):
        if value in values:
            slots[stage] = values[value], pipeline.contexts[stage].given_sharding(value)
    return slots


def target_sharding(
    pipeline: Pipeline, stage: int, key: Key, shape: Sequence[int]
) -> NamedSharding:
    """Sharding, on the receiving stage, of a value that another stage sends."""
    context = pipeline.contexts[stage]
    if key.form is Form.GIVEN:
        return context.given_sharding(key.value)
    if key.form is Form.SENT:
        return context.sent_sharding(key.value, shape)
    if key.form is Form.LATE:
        return context.late_sharding(key.value)
    return NamedSharding(context.mesh, PartitionSpec())


def leaf_dtype(pipeline: Pipeline, value: ValueId) -> Any:
    """Dtype of an input of the step, or of a constant."""
    constants = pipeline.graph.constants
    if value in constants:
        return constants[value].dtype
    return struct_of(pipeline.graph.values[value]).dtype


def array_struct(shape: Sequence[int], dtype: Any, sharding: Any) -> Any:
    """JAX's description of an array; a sharding of None is left to the compiler."""
    make: Any = jax.ShapeDtypeStruct
    return make(tuple(shape), dtype, sharding=sharding)


def _struct(
    pipeline: Pipeline, function: StageFunction, key: Key, known: Mapping[tuple[int, Key], Any]
) -> Any:
    """Shape and sharding of an argument."""
    stage = function.program.stage
    context = pipeline.contexts[stage]
    match key.form:
        case Form.GIVEN | Form.HANDED_ON:
            value = pipeline.graph.values[key.value]
            dtype = leaf_dtype(pipeline, key.value)
            dtype = (
                dtype
                if jnp.issubdtype(dtype, jax.dtypes.extended)
                else jax.dtypes.canonicalize_dtype(dtype)
            )
            return array_struct(value.shape, dtype, context.given_sharding(key.value))
        case Form.NUMBER:
            return array_struct((), jnp.int32, NamedSharding(context.mesh, PartitionSpec()))
        case Form.TOTAL if context.totals is not None:
            return array_struct(
                *context.totals.shape_and_dtype(key.value), context.total_sharding(key.value)
            )
    plain = Key(key.form, key.value)
    if (stage, plain) in known:
        return known[stage, plain]
    # A value from another stage: its shape there, with this stage's split.
    stages = range(len(pipeline.contexts))
    struct = next(known[s, plain] for s in stages if (s, plain) in known)
    sharding = target_sharding(pipeline, stage, plain, struct.shape)
    return array_struct(struct.shape, struct.dtype, sharding)


def _out_sharding(
    pipeline: Pipeline, function: StageFunction, key: Key, shape: Sequence[int]
) -> Any:
    """Sharding of a result; None leaves it to the compiler."""
    stage = function.program.stage
    context = pipeline.contexts[stage]
    if key.form is Form.TOTAL and context.totals is not None:
        return context.total_sharding(key.value)
    if key.form is Form.HANDED_ON:
        return context.given_sharding(key.value)
    if key.form is Form.SENT and key.value in pipeline.sent:
        return context.sent_sharding(key.value, shape)
    if key.form is Form.LATE:
        for value, successor in pipeline.successors.items():
            if successor == key.value and pipeline.home.get(value) == stage:
                return context.given_sharding(value)
        if key.value in pipeline.sent_late:
            return context.late_sharding(key.value)
        if pipeline.is_shared:
            # Processes that do not compile this program must know the sharding as well.
            return NamedSharding(context.mesh, _result_spec(context, key.value, shape))
    if key.form is Form.PACKED:
        return NamedSharding(context.mesh, PartitionSpec())
    # A sharding also says in which memory an array lies. If one result's is left to the compiler,
    # JAX takes no account of memories when it puts results in the place of donated arguments.
    # What the halves of a loop hand on is known to the programs alone.
    values = function.program.graph.values
    kinds = {k: memory_kind(values[k.value]) for k in function.gives if 0 <= k.value < len(values)}
    if not any(kinds.values()):
        return None
    if key.form in (Form.SENT, Form.LOCAL) and key.value < len(context.parts.body.values):
        return context.sent_sharding(key.value, shape)
    spec = _result_spec(context, key.value, shape) if key.form is Form.LATE else PartitionSpec()
    return NamedSharding(context.mesh, spec, memory_kind=kinds.get(key))


def _result_spec(context: StageContext, value: ValueId, shape: Sequence[int]) -> PartitionSpec:
    """Split of a result of the whole batch: along the batch if it holds one entry for each
    example.
    """
    specs = context.plan.specs if context.plan is not None else ()
    kind = specs[value] if value < len(specs) else None
    size = math.prod(context.mesh.shape[axis] for axis in context.data_axes)
    if kind is None or kind.kind is not TimeKind.CONCATENATE or size == 1 or shape[kind.dim] % size:
        return PartitionSpec()
    return PartitionSpec(*[None] * kind.dim, context.data_axes)


def donated_values(pipeline: Pipeline) -> frozenset[ValueId]:
    """The step's inputs whose buffers are donated to results."""
    found = set()
    for k, f in enumerate(pipeline.functions):
        for position in donated_positions(pipeline, k):
            if f.takes[position].form in (Form.GIVEN, Form.HANDED_ON):
                found.add(f.takes[position].value)
    return frozenset(found)


def donated_positions(pipeline: Pipeline, k: int) -> tuple[int, ...]:
    """Positions of the `k`th function's arguments whose buffers results may take over: totals, and
    state without later readers, also that which a micro-batch hands on to the next.
    """
    function = pipeline.functions[k]
    stage = function.program.stage
    # An early update runs before tasks of the other stages on its devices.
    is_early = stage in pipeline.schedule.early_updates
    later = set()
    for n, f in enumerate(pipeline.functions):
        if n > k or (is_early and f.program.stage != stage):
            for key in f.takes:
                if key.form is Form.GIVEN and pipeline.same_devices(f.program.stage, stage):
                    later.add(key.value)
    # Inputs that the step returns unchanged remain the caller's.
    returned = {o.value for o in pipeline.graph.outputs if isinstance(o.value, int)}
    kept = later | pipeline.pulled | returned
    is_update = function.program.part is Part.UPDATE
    makes_state = {key.value for key in function.gives if key.form is Form.HANDED_ON}
    values = pipeline.graph.values
    positions = []
    for position, key in enumerate(function.takes):
        if key.form is Form.TOTAL and not is_update:
            positions.append(position)
        if key.form not in (Form.GIVEN, Form.HANDED_ON) or key.value in kept:
            continue
        # The function makes the successor of an input, on the input's home stage and with its shape
        # and dtype.
        successor = pipeline.successors.get(key.value)
        overwrites = (
            is_update
            and isinstance(successor, int)
            and Key(Form.LATE, successor) in function.gives
            and pipeline.home.get(key.value) == stage
            and values[key.value].shape == values[successor].shape
            and values[key.value].dtype == values[successor].dtype
        )
        if overwrites or (key.form is Form.HANDED_ON and key.value in makes_state):
            positions.append(position)
    return tuple(positions)
