"""All programs of a pipeline, compiled: shapes and shardings of everything that they exchange."""

from __future__ import annotations

import hashlib
import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...core import PlanMismatchError
from ...graph import Graph, StageId, ValueId
from ...plans import Schedule
from ...sharding import Part, StagePrograms, TimeKind, struct_of
from ..transport import Peers, processes_of, watch
from ._instructions import Instructions, Send, write_instructions
from ._issue import Issuer
from ._packing import pack_scalars
from ._pipeline_stats import bytes_on_device
from ._stage_functions import Form, Key, StageContext, StageFunction, build_function


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageForm:
    """A stage's function before it is compiled.

    Attributes:
        jitted: takes and gives flat arrays.
        donated: positions of donated arguments.
        arguments, results: shapes with their shardings; None for one that is left to the compiler.
        wanted: the results' shardings.
    """

    function: StageFunction
    jitted: Any
    donated: tuple[int, ...]
    arguments: tuple[Any, ...]
    results: tuple[Any, ...]
    wanted: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledStage:
    """A stage's function as the compiler left it; `shapes` are those of its results, with their
    shardings.

    Equal functions of stages on the same devices have one `compiled`, which took time for the first
    of them alone.
    """

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
        *,
        processes: Sequence[frozenset[int]] | None = None,
    ) -> None:
        self.graph, self.schedule, self.contexts = graph, schedule, tuple(contexts)
        self._programs = programs
        self.successors = {
            i.value: graph.outputs[i.output].value for i in graph.inputs if i.output is not None
        }
        self.home = self._homes()
        sent, self._sent_late = self._sent(True), self._sent(False)
        self.functions = pack_scalars(
            [
                build_function(p, contexts[p.stage], made_by=programs.made_by, sent=sent)
                for p in programs.programs
            ]
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
        self.processes = (
            tuple(_processes(c) for c in contexts) if processes is None else tuple(processes)
        )
        self.local = tuple(jax.process_index() in group for group in self.processes)
        self.is_shared = len(set().union(*self.processes)) > 1
        self._pulled = self._inputs_that_others_pull()
        self._stages: tuple[CompiledStage | None, ...] = ()
        self._issuer: Issuer | None = None

    def _homes(self) -> dict[ValueId, StageId]:
        """Stage of each input that is kept: that of its successor, else the first one that reads
        it.
        """
        home = dict(self._programs.home)
        for item in self.graph.inputs:
            where = self._programs.outputs[item.output] if item.output is not None else None
            if where is not None:
                home[item.value] = where[0]
            elif item.output is not None and item.value not in home:
                readers = [p.stage for p in self._programs.programs if item.value in p.given]
                home[item.value] = min(readers, default=StageId(0))
        return home

    def _sent(self, in_body: bool) -> frozenset[ValueId]:
        """Values that stages exchange: of micro-batches, or in the update."""
        made_by = self._programs.made_by
        return frozenset(
            v
            for p in self._programs.programs
            if (p.part is not Part.UPDATE) == in_body
            for v in p.imports
            if made_by[v] != p.stage
        )

    def _inputs_that_others_pull(self) -> frozenset[ValueId]:
        """Inputs that other processes read in place. Nothing tells when they have finished, so that
        no result may overwrite them.
        """
        sends = [step for step in self.instructions.steps if isinstance(step, Send)]
        return frozenset(
            self.instructions.slots[slot][1].value
            for step in sends
            if self.processes[step.source] != self.processes[step.target]
            for slot in step.inputs
            if self.instructions.slots[slot][1].form is Form.GIVEN
        )

    # ---- shapes and shardings --------------------------------------------------------------------

    def given_slots(self, value: ValueId) -> dict[int, tuple[int, NamedSharding]]:
        """Slot and sharding of an input by stage: on its home, or on every stage that reads it."""
        return {
            stage: (values[value], self.contexts[stage].given_sharding(value))
            for stage, values in sorted(self.instructions.given.items())
            if value in values
        }

    def donated_values(self) -> frozenset[ValueId]:
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
                shapes |= {
                    (number, Key(k.form, k.value)): s
                    for k, s in zip(stage.function.takes, stage.arguments)
                }
                shapes |= {
                    (number, Key(k.form, k.value)): s
                    for k, s in zip(stage.function.gives, stage.shapes)
                }
        return {
            slot: bytes_on_device(shapes[stage, key])
            for slot, (stage, key, _) in enumerate(self.instructions.slots)
            if (stage, key) in shapes
        }

    def _struct(
        self, function: StageFunction, key: Key, known: Mapping[tuple[int, Key], Any]
    ) -> Any:
        """Shape and sharding of an argument."""
        stage = function.program.stage
        context = self.contexts[stage]
        match key.form:
            case Form.GIVEN:
                value = self.graph.values[key.value]
                return _shape(
                    value.shape,
                    _dtype(self.leaf_dtype(key.value)),
                    context.given_sharding(key.value),
                )
            case Form.NUMBER:
                return _shape((), jnp.int32, NamedSharding(context.mesh, PartitionSpec()))
            case Form.TOTAL if context.totals is not None:
                return _shape(*context.totals.look(key.value), context.total_sharding(key.value))
        plain = Key(key.form, key.value)
        if (stage, plain) in known:
            return known[stage, plain]
        # From another stage: the array that it makes, in this stage's split.
        struct = next(known[s, plain] for s in range(len(self.contexts)) if (s, plain) in known)
        return _shape(struct.shape, struct.dtype, self.target(stage, plain, struct.shape))

    def leaf_dtype(self, value: ValueId) -> Any:
        constants = self.graph.constants
        return (
            constants[value].dtype
            if value in constants
            else struct_of(self.graph.values[value]).dtype
        )

    def target(self, stage: int, key: Key, shape: Sequence[int]) -> NamedSharding:
        context = self.contexts[stage]
        if key.form is Form.GIVEN:
            return context.given_sharding(key.value)
        if key.form is Form.SENT:
            return context.sent_sharding(key.value, shape)
        return NamedSharding(context.mesh, PartitionSpec())

    def _out_sharding(self, function: StageFunction, key: Key, shape: Sequence[int]) -> Any:
        """Sharding of a result; None leaves it to the compiler."""
        stage = function.program.stage
        context = self.contexts[stage]
        if key.form is Form.TOTAL and context.totals is not None:
            return context.total_sharding(key.value)
        if key.form is Form.SENT and key.value in self._sent_values:
            return context.sent_sharding(key.value, shape)
        if key.form is Form.LATE:
            for value, successor in self.successors.items():
                if successor == key.value and self.home.get(value) == stage:
                    return context.given_sharding(value)
            if key.value in self._sent_late:
                return NamedSharding(context.mesh, PartitionSpec())
            if self.is_shared:
                # Processes that do not compile this must know it as well.
                return NamedSharding(context.mesh, self._result_spec(context, key.value, shape))
        if key.form is Form.PACKED:
            return NamedSharding(context.mesh, PartitionSpec())
        return None

    def _result_spec(
        self, context: StageContext, value: ValueId, shape: Sequence[int]
    ) -> PartitionSpec:
        """Split of a result of the whole batch: along the batch if it holds one entry for each
        example.
        """
        specs = context.plan.specs if context.plan is not None else ()
        kind = specs[value] if value < len(specs) else None
        size = math.prod(context.mesh.shape[axis] for axis in context.data_axes)
        if (
            kind is None
            or kind.kind is not TimeKind.CONCATENATE
            or size == 1
            or shape[kind.dim] % size
        ):
            return PartitionSpec()
        return PartitionSpec(*[None] * kind.dim, context.data_axes)

    def _donated(self, k: int, function: StageFunction) -> tuple[int, ...]:
        """Positions of arguments whose place a result may take: totals, and state that nobody reads
        any more.
        """
        stage = function.program.stage
        later = {
            key.value
            for f in self.functions[k + 1 :]
            for key in f.takes
            if key.form is Form.GIVEN and self._same_devices(f.program.stage, stage)
        }
        # What the step returns as it was given stays the caller's.
        returned = {output.value for output in self.graph.outputs if isinstance(output.value, int)}
        kept = later | self._pulled | returned
        donated = []
        for position, key in enumerate(function.takes):
            if key.form is Form.TOTAL and function.program.part is not Part.UPDATE:
                donated.append(position)
            elif (
                key.form is Form.GIVEN
                and function.program.part is Part.UPDATE
                and key.value not in kept
            ):
                successor = self.successors.get(key.value)
                gives = (
                    Key(Form.LATE, successor) in function.gives
                    if isinstance(successor, int)
                    else False
                )
                if (
                    gives
                    and self.home.get(key.value) == stage
                    and self._alike(key.value, successor)
                ):
                    donated.append(position)
        return tuple(donated)

    def _same_devices(self, a: int, b: int) -> bool:
        one, other = self.contexts[a].mesh, self.contexts[b].mesh
        # Meshes without devices may be equal and stand for others.
        return self.schedule.submesh_of(a) == self.schedule.submesh_of(b) or (
            isinstance(one, Mesh) and one == other
        )

    def _alike(self, value: ValueId, successor: Any) -> bool:
        a, b = self.graph.values[value], self.graph.values[successor]
        return (a.shape, a.dtype) == (b.shape, b.dtype)

    # ---- compiling -------------------------------------------------------------------------------

    def compile(self) -> tuple[CompiledStage | None, ...]:
        """Compile every function of this process's stages; once. With several processes all must
        call it.

        Raises:
            PlanMismatchError: the processes do not fit the plan, or do not run the same one.
        """
        if not self._stages:
            peers = watch() if self.is_shared else None
            if self.is_shared or not any(self.local):
                self._check_processes()
            known: dict[tuple[int, Key], Any] = {}
            shared: dict[tuple[Any, ...], Any] = {}
            stages = tuple(self._compile(k, f, known, shared) for k, f in enumerate(self.functions))
            issuer = Issuer(self, stages, known, peers)
            if peers is not None:
                self._agree(peers, issuer)
            self._stages, self._issuer = stages, issuer
        return self._stages

    def _check_processes(self) -> None:
        """Each process has a part."""
        idle = sorted(set(range(jax.process_count())) - set().union(*self.processes))
        if idle:
            used = len({device for c in self.contexts for device in c.mesh.devices.flat})
            raise PlanMismatchError(
                f"processes {', '.join(map(str, idle))} have no device of any stage: the plan is"
                f" for {used} devices, and {jax.process_count()} processes have"
                f" {len(jax.devices())}",
                asked="the plan does not fit these processes",
                advice=(
                    "Start as many processes as the plan has devices for, or plan for all devices."
                ),
            )

    def _agree(self, peers: Peers, issuer: Issuer) -> None:
        """Transfers are matched by order alone: a process with another list would hang, or take
        wrong arrays.
        """
        digests = peers.exchange(hashlib.sha256(issuer.signature().encode()).digest())
        other = [k for k, digest in enumerate(digests) if digest != digests[0]]
        if other:
            raise PlanMismatchError(
                f"processes {', '.join(map(str, other))} would run other instructions than"
                " process 0",
                asked="processes that run a step together must all run the same",
                advice="Give all processes the same step, plan, shapes and versions.",
            )
        issuer.connect()

    def of_all_processes(self, figures: Sequence[Any]) -> tuple[Any, ...]:
        """Figures of all stages, each with its number as `stage`, from the processes that have
        them.
        """
        peers = watch() if self.is_shared else None
        if peers is None:
            return tuple(figures)
        by_stage = {
            item.stage: item
            for data in peers.exchange(pickle.dumps(figures))
            for item in pickle.loads(data)
        }
        return tuple(by_stage[stage] for stage in sorted(by_stage))

    def form_of(
        self, k: int, function: StageFunction, known: dict[tuple[int, Key], Any]
    ) -> StageForm:
        """The `k`th function before it is compiled.

        Args:
            known: shapes, with shardings, of what the functions before it make; gets its own
                results.
        """
        arguments = tuple(self._struct(function, key, known) for key in function.takes)
        shapes = jax.eval_shape(function.run, *arguments)
        wanted = [
            self._out_sharding(function, key, s.shape)
            for key, s in zip(function.gives, shapes, strict=True)
        ]
        donated = self._donated(k, function)
        results = tuple(
            _shape(s.shape, s.dtype, sharding) for s, sharding in zip(shapes, wanted, strict=True)
        )
        for key, result in zip(function.gives, results, strict=True):
            known[function.program.stage, Key(key.form, key.value)] = result
        # Equal stages have equal programs, by which caches know them: a name must not tell them
        # apart.
        function.run.__name__ = function.program.name.split(" ", 2)[2].replace(" ", "_")
        return StageForm(
            function=function,
            jitted=jax.jit(
                function.run, out_shardings=wanted, donate_argnums=donated, keep_unused=True
            ),
            donated=donated,
            arguments=arguments,
            results=results,
            wanted=tuple(wanted),
        )

    def _compile(
        self,
        k: int,
        function: StageFunction,
        known: dict[tuple[int, Key], Any],
        shared: dict[tuple[Any, ...], Any],
    ) -> CompiledStage | None:
        start = time.perf_counter()
        form = self.form_of(k, function, known)
        stage = function.program.stage
        if not self.local[stage]:
            return None
        lowered = form.jitted.lower(*form.arguments)
        middle = time.perf_counter()
        compiled = self._executable(form, lowered, shared)
        end = time.perf_counter()
        results = tuple(
            _shape(s.shape, s.dtype, asked if asked is not None else got)
            for s, asked, got in zip(
                form.results, form.wanted, compiled.output_shardings, strict=True
            )
        )
        for key, result in zip(function.gives, results, strict=True):
            known[stage, Key(key.form, key.value)] = result
        return CompiledStage(
            function=function,
            compiled=compiled,
            donated=form.donated,
            arguments=form.arguments,
            shapes=results,
            lower_s=middle - start,
            compile_s=end - middle,
        )

    def _executable(self, form: StageForm, lowered: Any, shared: dict[tuple[Any, ...], Any]) -> Any:
        """A program compiled, or what an earlier stage on the same devices has compiled of an equal
        one.
        """
        mesh = self.contexts[form.function.program.stage].mesh
        if sum(context.mesh == mesh for context in self.contexts) == 1:
            return lowered.compile()
        # The text leaves out lines of source, and of arrays what only JAX knows, such as a key's
        # kind.
        text = hashlib.sha256(lowered.as_text(debug_info=False).encode()).digest()
        results = tuple((r.shape, r.dtype) for r in form.results)
        key = mesh, text, form.donated, form.arguments, results, form.wanted
        if key not in shared:
            shared[key] = lowered.compile()
        return shared[key]

    def run(self, given: Mapping[int, Any]) -> list[Any]:
        """One step; see `Issuer.run`."""
        self.compile()
        assert self._issuer is not None
        return self._issuer.run(given)

    def run_timed(
        self, given: Mapping[int, Any], record: Callable[[int, float, float], None]
    ) -> list[Any]:
        """One step, timed instruction by instruction; see `Issuer.run_timed`."""
        self.compile()
        assert self._issuer is not None
        return self._issuer.run_timed(given, record)


def _dtype(dtype: Any) -> Any:
    return (
        dtype
        if jnp.issubdtype(dtype, jax.dtypes.extended)
        else jax.dtypes.canonicalize_dtype(dtype)
    )


def _shape(shape: Sequence[int], dtype: Any, sharding: Any) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(tuple(shape), dtype, sharding=sharding)


def _processes(context: StageContext) -> frozenset[int]:
    return processes_of(NamedSharding(context.mesh, PartitionSpec()))
