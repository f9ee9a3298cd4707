"""All programs of a pipeline, compiled, and the loop that issues their instructions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..graph import Graph
from ..plans import Schedule
from ._instructions import Instructions, Run, Send, write_instructions
from ._pipeline_stats import bytes_on_device
from ._split import Part, StagePrograms
from ._stage_functions import Form, Key, StageContext, StageFunction, build_function
from ._transfer import move


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledStage:
    """A stage's function as the compiler left it; `shapes` are those of its results, with their shardings."""

    function: StageFunction
    compiled: Any
    donated: tuple[int, ...]
    arguments: tuple[Any, ...]
    shapes: tuple[Any, ...]
    lower_s: float
    compile_s: float


class Pipeline:
    """A step as instructions over the programs of its stages.

    Made of abstract shapes only; `compile` compiles, `run` runs.
    """

    def __init__(
        self,
        graph: Graph,
        programs: StagePrograms,
        contexts: Sequence[StageContext],
        schedule: Schedule,
    ) -> None:
        self.graph, self.schedule, self.contexts = graph, schedule, tuple(contexts)
        self._programs = programs
        self._successors = {i.value: graph.outputs[i.output].value for i in graph.inputs if i.output is not None}
        self.home = self._homes()
        sent, self._sent_late = self._sent(True), self._sent(False)
        self.functions = tuple(
            build_function(p, contexts[p.stage], made_by=programs.made_by, sent=sent) for p in programs.programs
        )
        self._sent_values = sent
        self.results = tuple(
            (where[0], o.value) if where is not None and isinstance(o.value, int) else None
            for o, where in zip(graph.outputs, programs.outputs, strict=True)
        )
        self.instructions: Instructions = write_instructions(
            self.functions,
            schedule,
            home=self.home,
            results=dict.fromkeys(r for r in self.results if r is not None),
        )
        self._local = [any(d.process_index == jax.process_index() for d in c.mesh.devices.flat) for c in contexts]
        self._stages: tuple[CompiledStage | None, ...] = ()
        self._zeros: dict[int, Any] = {}
        self._numbers: dict[int, Any] = {}
        self._constants: dict[int, Any] = {}
        self._slots: list[Any] = [None] * len(self.instructions.slots)
        self._moves: list[tuple[Any, ...] | None] = []

    def _homes(self) -> dict[int, int]:
        """Where each input that is kept lies: with its successor, else where it is read first."""
        home = dict(self._programs.home)
        for item in self.graph.inputs:
            where = self._programs.outputs[item.output] if item.output is not None else None
            if where is not None:
                home[item.value] = where[0]
            elif item.output is not None and item.value not in home:
                readers = [p.stage for p in self._programs.programs if item.value in p.given]
                home[item.value] = min(readers, default=0)
        return home

    def _sent(self, in_body: bool) -> frozenset[int]:
        """Values that stages exchange: of micro-batches, or in the update."""
        made_by = self._programs.made_by
        return frozenset(
            v
            for p in self._programs.programs
            if (p.part is not Part.UPDATE) == in_body
            for v in p.imports
            if made_by[v] != p.stage
        )

    # ---- shapes and shardings ----------------------------------------------------------------------------------------

    def given_slots(self, value: int) -> dict[int, tuple[int, NamedSharding]]:
        """Where an input must lie, by stage, as slot and sharding: on its home, or on every stage that reads it."""
        return {
            stage: (values[value], self.contexts[stage].given_sharding(value))
            for stage, values in sorted(self.instructions.given.items())
            if value in values
        }

    def donated_values(self) -> frozenset[int]:
        """The inputs whose place a result takes."""
        return frozenset(
            f.takes[position].value
            for k, f in enumerate(self.functions)
            for position in self._donated(k, f)
            if f.takes[position].form is Form.GIVEN
        )

    def slot_bytes(self) -> dict[int, int]:
        """Bytes of each slot on each device of its stage."""
        shapes: dict[tuple[int, Key], Any] = {}
        for stage in self.compile():
            if stage is not None:
                number = stage.function.program.stage
                shapes |= {(number, Key(k.form, k.value)): s for k, s in zip(stage.function.takes, stage.arguments)}
                shapes |= {(number, Key(k.form, k.value)): s for k, s in zip(stage.function.gives, stage.shapes)}
        return {
            slot: bytes_on_device(shapes[stage, key])
            for slot, (stage, key, _) in enumerate(self.instructions.slots)
            if (stage, key) in shapes
        }

    def _struct(self, function: StageFunction, key: Key, known: Mapping[tuple[int, Key], Any]) -> Any:
        """Shape and sharding of an argument."""
        stage = function.program.stage
        context = self.contexts[stage]
        match key.form:
            case Form.GIVEN:
                value = self.graph.values[key.value]
                return _shape(value.shape, _dtype(self._leaf_dtype(key.value)), context.given_sharding(key.value))
            case Form.NUMBER:
                return _shape((), jnp.int32, NamedSharding(context.mesh, PartitionSpec()))
            case Form.TOTAL if context.totals is not None:
                return _shape(*context.totals.look(key.value), context.total_sharding(key.value))
        plain = Key(key.form, key.value)
        if (stage, plain) in known:
            return known[stage, plain]
        # From another stage: the array that it makes, in this stage's split.
        made = next(known[s, plain] for s in range(len(self.contexts)) if (s, plain) in known)
        return _shape(made.shape, made.dtype, self._target(stage, plain, made.shape))

    def _leaf_dtype(self, value: int) -> Any:
        for item, leaf in zip(self.graph.inputs, self.graph.calling.call.leaves, strict=True):
            if item.value == value:
                return leaf.dtype
        return self.graph.constants[value].dtype

    def _target(self, stage: int, key: Key, shape: Sequence[int]) -> NamedSharding:
        context = self.contexts[stage]
        if key.form is Form.GIVEN:
            return context.given_sharding(key.value)
        if key.form is Form.SENT:
            return context.sent_sharding(key.value, shape)
        return NamedSharding(context.mesh, PartitionSpec())

    def _out_sharding(self, function: StageFunction, key: Key, shape: Sequence[int]) -> Any:
        """Where a result shall lie; None leaves it to the compiler."""
        stage = function.program.stage
        context = self.contexts[stage]
        if key.form is Form.TOTAL and context.totals is not None:
            return context.total_sharding(key.value)
        if key.form is Form.SENT and key.value in self._sent_values:
            return context.sent_sharding(key.value, shape)
        if key.form is Form.LATE:
            for value, successor in self._successors.items():
                if successor == key.value and self.home.get(value) == stage:
                    return context.given_sharding(value)
            if key.value in self._sent_late:
                return NamedSharding(context.mesh, PartitionSpec())
        return None

    def _donated(self, k: int, function: StageFunction) -> tuple[int, ...]:
        """Positions of arguments whose place a result may take: totals, and state that nobody reads any more."""
        stage = function.program.stage
        later = {
            key.value
            for f in self.functions[k + 1 :]
            for key in f.takes
            if key.form is Form.GIVEN and (f.program.stage == stage or self._same_mesh(f.program.stage, stage))
        }
        found = []
        for position, key in enumerate(function.takes):
            if key.form is Form.TOTAL and function.program.part is not Part.UPDATE:
                found.append(position)
            elif key.form is Form.GIVEN and function.program.part is Part.UPDATE and key.value not in later:
                successor = self._successors.get(key.value)
                gives = Key(Form.LATE, successor) in function.gives if isinstance(successor, int) else False
                if gives and self.home.get(key.value) == stage and self._alike(key.value, successor):
                    found.append(position)
        return tuple(found)

    def _same_mesh(self, a: int, b: int) -> bool:
        return self.contexts[a].mesh == self.contexts[b].mesh

    def _alike(self, value: int, successor: Any) -> bool:
        a, b = self.graph.values[value], self.graph.values[successor]
        return (a.shape, a.dtype) == (b.shape, b.dtype)

    # ---- compiling ---------------------------------------------------------------------------------------------------

    def compile(self) -> tuple[CompiledStage | None, ...]:
        """Compile every function of this process's stages; once."""
        if not self._stages:
            known: dict[tuple[int, Key], Any] = {}
            self._stages = tuple(self._compile(k, f, known) for k, f in enumerate(self.functions))
            self._prepare(known)
        return self._stages

    def _compile(self, k: int, function: StageFunction, known: dict[tuple[int, Key], Any]) -> CompiledStage | None:
        start = time.perf_counter()
        arguments = tuple(self._struct(function, key, known) for key in function.takes)
        shapes = jax.eval_shape(function.run, *arguments)
        wanted = [self._out_sharding(function, key, s.shape) for key, s in zip(function.gives, shapes, strict=True)]
        donated = self._donated(k, function)
        function.run.__name__ = function.program.name.replace(" ", "_")
        stage = function.program.stage
        if not self._local[stage]:
            for key, shape, sharding in zip(function.gives, shapes, wanted, strict=True):
                known[stage, Key(key.form, key.value)] = _shape(shape.shape, shape.dtype, sharding)
            return None
        jitted = jax.jit(function.run, out_shardings=wanted, donate_argnums=donated, keep_unused=True)
        lowered = jitted.lower(*arguments)
        middle = time.perf_counter()
        compiled = lowered.compile()
        end = time.perf_counter()
        results = tuple(
            _shape(s.shape, s.dtype, sharding) for s, sharding in zip(shapes, compiled.output_shardings, strict=True)
        )
        for key, result in zip(function.gives, results, strict=True):
            known[stage, Key(key.form, key.value)] = result
        return CompiledStage(
            function=function,
            compiled=compiled,
            donated=donated,
            arguments=arguments,
            shapes=results,
            lower_s=middle - start,
            compile_s=end - middle,
        )

    def _prepare(self, known: Mapping[tuple[int, Key], Any]) -> None:
        """What every step starts with: zeros, numbers, constants; and where transfers go."""
        instructions = self.instructions
        for stage, values in instructions.zeros.items():
            context = self.contexts[stage]
            if context.totals is None or not self._local[stage]:
                continue
            order = tuple(values)
            looks = [context.totals.look(v) for v in order]
            shardings = [context.total_sharding(v) for v in order]
            make = jax.jit(lambda looks=looks: [jnp.zeros(*look) for look in looks], out_shardings=shardings)
            self._zeros[stage] = (make, tuple(values.values()))
        for stage, slots in instructions.numbers.items():
            whole = NamedSharding(self.contexts[stage].mesh, PartitionSpec())
            for number, slot in enumerate(slots):
                if self._local[stage]:
                    self._slots[slot] = _put(np.int32(number), whole)
        for stage, values in instructions.given.items():
            for value, slot in values.items():
                if value in self.graph.constants and self._local[stage]:
                    array = self.graph.constants[value]
                    self._constants[slot] = _put(array, self.contexts[stage].given_sharding(value))
        for step in instructions.steps:
            self._moves.append(self._move_of(step, known) if isinstance(step, Send) else None)

    def _move_of(self, step: Send, known: Mapping[tuple[int, Key], Any]) -> tuple[Any, ...]:
        shapes, targets = [], []
        for slot in step.inputs:
            stage, key, _ = self.instructions.slots[slot]
            if key.form is Form.GIVEN:
                value = self.graph.values[key.value]
                shape = _shape(value.shape, self._leaf_dtype(key.value), self.contexts[stage].given_sharding(key.value))
            else:
                shape = known[stage, key]
            shapes.append(shape)
            targets.append(self._target(step.target, key, shape.shape))
        return tuple(shapes), targets

    # ---- running -----------------------------------------------------------------------------------------------------

    def run(self, given: Mapping[int, Any]) -> list[Any]:
        """One step.

        Args:
            given: for each slot of `instructions.given` its array, in place.

        Returns:
            One array for each output of the step; None for those that are inputs or literals.
        """
        stages = self.compile()
        slots, local = self._slots, self._local
        for slot, array in given.items():
            slots[slot] = array
        for slot, array in self._constants.items():
            slots[slot] = array
        for make, places in self._zeros.values():
            for slot, array in zip(places, make(), strict=True):
                slots[slot] = array
        for step, where in zip(self.instructions.steps, self._moves, strict=True):
            if where is None:
                assert isinstance(step, Run)
                if local[step.stage]:
                    stage = stages[step.function]
                    results = stage.compiled(*[slots[i] for i in step.inputs])  # type: ignore[union-attr]
                    for slot, array in zip(step.outputs, results, strict=True):
                        slots[slot] = array
            else:
                arrays = move([slots[i] for i in step.inputs], *where)
                for slot, array in zip(step.outputs, arrays, strict=True):
                    slots[slot] = array
            for slot in step.frees:
                slots[slot] = None
        found: list[Any] = []
        for result in self.results:
            found.append(None if result is None else slots[self.instructions.results[result]])
        for slot in self.instructions.results.values():
            slots[slot] = None
        return found


def _dtype(dtype: Any) -> Any:
    return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)


def _shape(shape: Sequence[int], dtype: Any, sharding: Any) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(tuple(shape), dtype, sharding=sharding)


def _put(array: Any, sharding: NamedSharding) -> jax.Array:
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
