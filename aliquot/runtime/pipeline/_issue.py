"""Issue of a pipeline's instructions to devices. All decisions are made before the first step."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..transport import (
    Move,
    Peers,
    channels_of_hosts,
    end_in_order,
    exchange,
    from_host,
    is_key,
    place,
    plan_broadcast,
    plan_move,
    struct,
    stub,
)
from ._instructions import Run, Send
from ._pipeline import Pipeline
from ._stage_forms import Known, StageForm, leaf_dtype, target_sharding
from ._stage_functions import Form, Key

# Results that are no state and not larger than this are broadcast to every process.
SHARED_RESULT_BYTES = 65536
# After an error, how long to wait for the watchdog to report that another process has died.
_VERDICT_S = 5


class _Action(NamedTuple):
    """An instruction in which this process takes part.

    Attributes:
        number: its position among all instructions.
        take: reads the arguments from the slots.
        call: runs the program or the transfer.
        outputs: slots of the results.
        frees: slots of this process that nobody reads afterwards.
    """

    number: int
    take: Callable[[list[Any]], tuple[Any, ...]]
    call: Move
    outputs: tuple[int, ...]
    frees: tuple[int, ...]


class Issuer:
    """This process's part in running steps of a compiled pipeline.

    Args:
        pipeline: the pipeline, with its instructions.
        stages: compiled functions; None for those of other processes.
        known: shapes and shardings of the functions' results, by stage and key.
        peers: the other processes; None if there are none.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stages: Sequence[StageForm | None],
        known: Known,
        peers: Peers | None,
    ) -> None:
        self._pipeline, self._stages, self._known, self._peers = pipeline, stages, known, peers
        self._slots: list[Any] = [None] * len(pipeline.instructions.slots)
        self._constants: list[tuple[int, Any]] = []
        self._zeros: list[tuple[Callable[[], list[Any]], tuple[int, ...]]] = []
        self._number, self._step = -1, 0
        self._fill()
        self._actions: list[_Action] = []
        for number, step in enumerate(pipeline.instructions.steps):
            action = self._action(number, step)
            if action is not None:
                self._actions.append(action)
        slots = pipeline.instructions.results
        self._results = [None if r is None else slots[r] for r in pipeline.results]
        self._stubs = self._make_stubs()
        # JAX returns before the devices have finished, so Ctrl-C may come while they still compute.
        end_in_order()
        self._broadcasts = self._plan_broadcasts()

    def _fill(self) -> None:
        """Prepare what every step starts with: micro-batch numbers, constants, and programs that
        make the zeros of running totals.
        """
        pipeline, instructions = self._pipeline, self._pipeline.instructions
        for stage, context in enumerate(pipeline.contexts):
            if not pipeline.local[stage]:
                continue
            totals = instructions.zeros.get(stage, {})
            # There are no totals without micro-batches.
            if totals and context.totals is not None:
                types = [context.totals.shape_and_dtype(v) for v in totals]
                shardings = [context.total_sharding(v) for v in totals]
                # Zeros are created on the devices; from the host, they would be sent in every step.
                make = jax.jit(
                    lambda types=types: [jnp.zeros(*each) for each in types],
                    out_shardings=shardings,
                )
                self._zeros.append((make, tuple(totals.values())))
            whole = NamedSharding(context.mesh, PartitionSpec())
            for number, slot in enumerate(instructions.numbers.get(stage, ())):
                self._slots[slot] = from_host(np.asarray(number, np.int32), whole)
            for value, slot in instructions.given.get(stage, {}).items():
                if value in pipeline.graph.constants:
                    constant = pipeline.graph.constants[value]
                    array = constant if is_key(constant) else np.asarray(constant)
                    sharding = context.given_sharding(value)
                    self._constants.append((slot, place(array, sharding, array.shape)))

    def _action(self, number: int, step: Run | Send) -> _Action | None:
        """The action of an instruction; None if this process takes no part in it."""
        call: Move | None
        outputs = step.outputs
        if isinstance(step, Run):
            stage = self._stages[step.function]
            call = None if stage is None else stage.compiled
        else:
            call = plan_move(*self._transfer_ends(step))
            outputs = outputs if self._pipeline.local[step.target] else ()
        if call is None:
            return None
        # In this process, the slots of other processes' stages hold nothing.
        slots = self._pipeline.instructions.slots
        frees = tuple(slot for slot in step.frees if self._pipeline.local[slots[slot][0]])
        return _Action(number, _taker(step.inputs), call, outputs, frees)

    def _transfer_ends(self, step: Send) -> tuple[list[Any], list[NamedSharding]]:
        """For each array of a transfer its shape and sharding at the sender, and its sharding at
        the receiver.
        """
        pipeline, structs, targets = self._pipeline, [], []
        for slot in step.inputs:
            stage, key, _ = pipeline.instructions.slots[slot]
            if key.form is Form.GIVEN:
                shape = pipeline.graph.values[key.value].shape
                sharding = pipeline.contexts[stage].given_sharding(key.value)
                structs.append(struct(shape, leaf_dtype(pipeline, key.value), sharding))
            else:
                structs.append(self._known[stage, key])
            targets.append(target_sharding(pipeline, step.target, key, structs[-1].shape))
        return structs, targets

    def _make_stubs(self) -> dict[int, Any]:
        """Arrays without data in place of results that lie on other processes, by slot."""
        stubs = {}
        for result, slot in zip(self._pipeline.results, self._results, strict=True):
            if result is not None and slot is not None and not self._pipeline.local[result[0]]:
                s = self._known[result[0], Key(Form.LATE, result[1])]
                stubs[slot] = stub(s.shape, s.sharding, s.dtype)
        return stubs

    def _plan_broadcasts(self) -> list[tuple[tuple[int, ...], Move]]:
        """For each stage the slots of its small results, and their broadcast to all processes."""
        if self._peers is None:
            return []
        # State stays where it lies: broadcasting it would copy the model to every process.
        state = set(self._pipeline.successors.values())
        by_stage: dict[int, dict[int, Any]] = {}
        for result, slot in zip(self._pipeline.results, self._results, strict=True):
            if result is None or slot is None or result[1] in state:
                continue
            s = self._known[result[0], Key(Form.LATE, result[1])]
            if is_key(s) or math.prod(s.shape) * s.dtype.itemsize > SHARED_RESULT_BYTES:
                continue
            if s.sharding.is_fully_replicated:
                by_stage.setdefault(result[0], {})[slot] = s
        broadcasts = []
        for _, structs in sorted(by_stage.items()):
            broadcasts.append((tuple(structs), plan_broadcast(list(structs.values()))))
        return broadcasts

    def signature(self) -> str:
        """The instructions, shapes and splits as text, which must be equal in all processes."""
        shapes, specs = [], []
        for step in self._pipeline.instructions.steps:
            if not isinstance(step, Send):
                continue
            structs, targets = self._transfer_ends(step)
            shapes.append([(s.shape, str(s.dtype), s.sharding.spec) for s in structs])
            specs.append([target.spec for target in targets])
        shared = [slots for slots, _ in self._broadcasts]
        return repr((self._pipeline.instructions.steps, shapes, specs, shared, jax.__version__))

    def connect(self) -> None:
        """Open JAX's connections between all processes, one at a time for each process.

        First transfers that overlap at a process take seconds, or never arrive.
        """
        # Channels through hosts are connected already.
        if self._peers is None or channels_of_hosts() is not None:
            return
        # The first device of each process stands for it.
        first = {device.process_index: device for device in reversed(jax.devices())}
        # Processes without a partner in a round take part in its barrier all the same.
        for pairs in _rounds(len(first)):
            received: list[Any] = []
            for pair in pairs:
                meshes = [Mesh(np.array([first[k]]), ("one",)) for k in pair]
                ends = [NamedSharding(mesh, PartitionSpec()) for mesh in meshes]
                move = plan_move([struct((1,), np.dtype(np.uint8), ends[0])], [ends[1]])
                assert move is not None
                sends = pair[0] == jax.process_index()
                received += move(*([from_host(np.zeros(1, np.uint8), ends[0])] if sends else []))
            # A barrier between rounds, so that no two first transfers overlap.
            jax.block_until_ready(received)
            exchange(None, type(None))

    def run(self, given: Mapping[int, Any]) -> list[Any]:
        """One step.

        Args:
            given: for each slot of `instructions.given` its array, with the sharding that it needs
                there.

        Returns:
            One array for each output of the step; None for those that are inputs or literals.
        """
        if self._peers is None:
            return self._run(given)
        self._peers.describe = self._describe
        try:
            return self._run(given)
        except (jax.errors.JaxRuntimeError, ConnectionError):
            # If another process has died, the watchdog is about to say so and to end this one.
            time.sleep(_VERDICT_S)
            raise

    def run_timed(
        self, given: Mapping[int, Any], record: Callable[[int, float, float], None]
    ) -> list[Any]:
        """One step that waits for each instruction before it issues the next.

        Args:
            record: called with the number of each instruction that this process takes part in, and
                when it began and ended, by `time.perf_counter`.
        """
        plain = self._actions
        self._actions = [action._replace(call=_timed(action, record)) for action in plain]
        try:
            return self.run(given)
        finally:
            self._actions = plain

    def _run(self, given: Mapping[int, Any]) -> list[Any]:
        """Run one step: fill the slots, issue all instructions, and broadcast small results."""
        slots = self._slots
        self._step += 1
        for slot, array in given.items():
            slots[slot] = array
        for slot, array in self._constants:
            # Filled in every step, because a step frees the slots of constants like all others.
            slots[slot] = array
        for make, places in self._zeros:
            for slot, array in zip(places, make(), strict=True):
                slots[slot] = array
        self._loop()
        for slot, array in self._stubs.items():
            slots[slot] = array
        for places, broadcast in self._broadcasts:
            sent = [slots[slot] for slot in places] if places[0] not in self._stubs else []
            for slot, array in zip(places, broadcast(*sent), strict=True):
                slots[slot] = array
        results = [None if slot is None else slots[slot] for slot in self._results]
        # The caller alone shall hold the results, so that they can be donated in the next step.
        for slot in self._pipeline.instructions.results.values():
            slots[slot] = None
        return results

    def _loop(self) -> None:
        """Issue all instructions. Nothing is decided here, so that a step costs little more than
        the calls.
        """
        slots = self._slots
        # Only locals and tuples are used: this loop is most of what a step costs in Python.
        for number, take, call, outputs, frees in self._actions:
            self._number = number
            for slot, array in zip(outputs, call(*take(slots)), strict=True):
                slots[slot] = array
            for slot in frees:
                slots[slot] = None

    def _describe(self, dead: int) -> str:
        """The last instruction of this process, and its last exchange with one that died."""
        assert self._peers is not None
        steps, process = self._pipeline.instructions.steps, self._peers.process
        text = (
            f"Process {process} ({self._stages_of(process)}) had issued {self._named(self._number)}"
            f" of step {self._step}"
        )
        with_dead = []
        for number, step in enumerate(steps):
            if isinstance(step, Send):
                source, target = (self._pipeline.processes[k] for k in (step.source, step.target))
                if {process, dead} <= source | target and source != target:
                    with_dead.append(number)
        before = [number for number in with_dead if number <= self._number]
        if with_dead:
            last = before[-1] if before else with_dead[0]
            word = "last" if before else "next"
            text += (
                f"; its {word} exchange with process {dead} ({self._stages_of(dead)}) is"
                f" {self._named(last)}"
            )
        else:
            text += f"; it exchanges nothing with process {dead} ({self._stages_of(dead)}) itself"
        return text + "."

    def _stages_of(self, process: int) -> str:
        stages = [stage for stage, group in enumerate(self._pipeline.processes) if process in group]
        return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"

    def _named(self, number: int) -> str:
        steps = self._pipeline.instructions.steps
        if number < 0:
            return "no instruction"
        step = steps[number]
        batch = f" of micro-batch {step.micro_batch}" if step.micro_batch >= 0 else ""
        if isinstance(step, Run):
            name = self._pipeline.functions[step.function].program.name
        else:
            name = f"stage {step.source} to stage {step.target}, {len(step.inputs)} arrays"
        return f"instruction {number + 1} of {len(steps)} ({name}{batch})"


def _timed(action: _Action, record: Callable[[int, float, float], None]) -> Move:
    """The call of an action that waits for its arguments and results, and records when it ran."""

    def call(*arrays: Any) -> Any:
        jax.block_until_ready(arrays)
        start = time.perf_counter()
        results = jax.block_until_ready(action.call(*arrays))
        record(action.number, start, time.perf_counter())
        return results

    return call


def _rounds(count: int) -> list[list[tuple[int, int]]]:
    """All ordered pairs of numbers below `count`, in rounds in which each number is in one pair at
    most.
    """
    seats = list(range(count + count % 2))
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = [(a, b) for a, b in zip(seats, reversed(seats), strict=True) if a < b < count]
        rounds += [pairs, [(b, a) for a, b in pairs]]
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _taker(inputs: Sequence[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """A function from all slots to a tuple of the arrays in some of them."""
    if len(inputs) > 1:
        return operator.itemgetter(*inputs)
    if not inputs:
        return lambda slots: ()
    (slot,) = inputs
    return lambda slots: (slots[slot],)
