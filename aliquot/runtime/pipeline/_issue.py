"""The loop that issues a pipeline's instructions. Everything that can be computed before the first
step is computed before it.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..transport import (
    Move,
    Peers,
    channels_of_hosts,
    end_in_order,
    is_key,
    plan_broadcast,
    plan_move,
    struct,
    stub,
)
from ._instructions import Run, Send
from ._pipeline import Pipeline
from ._stage_forms import leaf_dtype, target_sharding
from ._stage_functions import Form, Key

if TYPE_CHECKING:
    from ._compile import CompiledStage

# Results that are no state and not larger than this come to every process.
SHARED_RESULT_BYTES = 65536
# How long the end of a connection may come behind the error that it causes.
_VERDICT_S = 5


class _Action(NamedTuple):
    """An instruction in which this process takes part."""

    number: int
    take: Callable[[list[Any]], tuple[Any, ...]]
    call: Move
    outputs: tuple[int, ...]
    frees: tuple[int, ...]


class Issuer:
    """Runs steps of a compiled pipeline, this process's part of them.

    Args:
        pipeline: its instructions.
        stages: compiled functions; None for those of other processes.
        known: shapes and shardings of what functions give, by stage and key.
        peers: the other processes, if there are any.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stages: Sequence[CompiledStage | None],
        known: Mapping[tuple[int, Key], Any],
        peers: Peers | None,
    ) -> None:
        self._pipeline, self._stages, self._known, self._peers = pipeline, stages, known, peers
        self._slots: list[Any] = [None] * len(pipeline.instructions.slots)
        self._constants: list[tuple[int, Any]] = []
        self._zeros: list[tuple[Callable[[], list[Any]], tuple[int, ...]]] = []
        self._number, self._step = -1, 0
        self._fill()
        self._actions = [
            action
            for number, step in enumerate(pipeline.instructions.steps)
            if (action := self._action(number, step)) is not None
        ]
        self._results = [
            None if r is None else pipeline.instructions.results[r] for r in pipeline.results
        ]
        self._elsewhere = self._stubs()
        # Steps run ahead of the program: Ctrl-C may end it while devices are at work.
        end_in_order()
        self._shares = self._plan_shares()

    # ---- before the first step -------------------------------------------------------------------

    def _fill(self) -> None:
        """Create what every step starts with: zeros, numbers of micro-batches, constants."""
        pipeline, instructions = self._pipeline, self._pipeline.instructions
        for stage, context in enumerate(pipeline.contexts):
            if not pipeline.local[stage]:
                continue
            totals = instructions.zeros.get(stage, {})
            # Without micro-batches nothing is added up.
            if totals and context.totals is not None:
                looks = [context.totals.shape_and_dtype(v) for v in totals]
                shardings = [context.total_sharding(v) for v in totals]
                # Zeros are created where they lie: from the host they would be sent in every step.
                make = jax.jit(
                    lambda looks=looks: [jnp.zeros(*look) for look in looks],
                    out_shardings=shardings,
                )
                self._zeros.append((make, tuple(totals.values())))
            whole = NamedSharding(context.mesh, PartitionSpec())
            for number, slot in enumerate(instructions.numbers.get(stage, ())):
                self._slots[slot] = _put(np.int32(number), whole)
            for value, slot in instructions.given.get(stage, {}).items():
                if value in pipeline.graph.constants:
                    array = pipeline.graph.constants[value]
                    self._constants.append((slot, _put(array, context.given_sharding(value))))

    def _action(self, number: int, step: Run | Send) -> _Action | None:
        call: Move | None
        outputs = step.outputs
        if isinstance(step, Run):
            stage = self._stages[step.function]
            call = None if stage is None else stage.compiled
        else:
            call = plan_move(*self._sent(step))
            outputs = outputs if self._pipeline.local[step.target] else ()
        if call is None:
            return None
        # A slot of another process holds nothing here.
        mine = tuple(
            slot
            for slot in step.frees
            if self._pipeline.local[self._pipeline.instructions.slots[slot][0]]
        )
        return _Action(number, _taker(step.inputs), call, outputs, mine)

    def _sent(self, step: Send) -> tuple[list[Any], list[NamedSharding]]:
        pipeline, looks, targets = self._pipeline, [], []
        for slot in step.inputs:
            stage, key, _ = pipeline.instructions.slots[slot]
            if key.form is Form.GIVEN:
                shape, sharding = (
                    pipeline.graph.values[key.value].shape,
                    pipeline.contexts[stage].given_sharding(key.value),
                )
                looks.append(struct(shape, leaf_dtype(pipeline, key.value), sharding))
            else:
                looks.append(self._known[stage, key])
            targets.append(target_sharding(pipeline, step.target, key, looks[-1].shape))
        return looks, targets

    def _stubs(self) -> dict[int, Any]:
        """Results that lie on other processes, as this one sees them, by slot."""
        stubs = {}
        for result, slot in zip(self._pipeline.results, self._results, strict=True):
            if result is not None and slot is not None and not self._pipeline.local[result[0]]:
                look = self._known[result[0], Key(Form.LATE, result[1])]
                stubs[slot] = stub(look.shape, look.sharding, look.dtype)
        return stubs

    def _plan_shares(self) -> list[tuple[tuple[int, ...], Move]]:
        """Small results that are no state, for all processes to read."""
        if self._peers is None:
            return []
        # State stays where it lies: sharing it would copy the model to every process.
        state = set(self._pipeline.successors.values())
        by_stage: dict[int, dict[int, Any]] = {}
        for result, slot in zip(self._pipeline.results, self._results, strict=True):
            if result is None or slot is None or result[1] in state:
                continue
            look = self._known[result[0], Key(Form.LATE, result[1])]
            if is_key(look) or math.prod(look.shape) * look.dtype.itemsize > SHARED_RESULT_BYTES:
                continue
            if look.sharding.is_fully_replicated:
                by_stage.setdefault(result[0], {})[slot] = look
        return [
            (tuple(of), plan_broadcast(list(of.values()))) for _, of in sorted(by_stage.items())
        ]

    def signature(self) -> str:
        """Text that must be equal in all processes."""
        sends = [
            self._sent(step) for step in self._pipeline.instructions.steps if isinstance(step, Send)
        ]
        shapes = [[(s.shape, str(s.dtype), s.sharding.spec) for s in looks] for looks, _ in sends]
        specs = [[target.spec for target in targets] for _, targets in sends]
        shared = [slots for slots, _ in self._shares]
        return repr((self._pipeline.instructions.steps, shapes, specs, shared, jax.__version__))

    def connect(self) -> None:
        """Connect all processes, pair by pair: each exchanges a message with one other at a time,
        in one direction after the other.

        Where the first transfers of two processes meet that JAX carries, they take seconds, or
        never arrive.
        """
        # Channels through hosts have connected by themselves.
        if self._peers is None or channels_of_hosts() is not None:
            return
        # The first device of each process stands for it.
        first = {device.process_index: device for device in reversed(jax.devices())}
        # All processes walk through the same rounds, also those without a partner in one.
        for pairs in _rounds(len(first)):
            received: list[Any] = []
            for pair in pairs:
                ends = [
                    NamedSharding(Mesh(np.array([first[k]]), ("one",)), PartitionSpec())
                    for k in pair
                ]
                move = plan_move([struct((1,), np.dtype(np.uint8), ends[0])], [ends[1]])
                assert move is not None
                held = (
                    [_put(np.zeros(1, np.uint8), ends[0])] if pair[0] == jax.process_index() else []
                )
                received += move(*held)
            # The next round begins when all have ended this one, so that no two first transfers
            # meet.
            jax.block_until_ready(received)
            self._peers.exchange(b"")

    # ---- steps -----------------------------------------------------------------------------------

    def run(self, given: Mapping[int, Any]) -> list[Any]:
        """One step.

        Args:
            given: for each slot of `instructions.given` its array, in place.

        Returns:
            One array for each output of the step; None for those that are inputs or literals.
        """
        if self._peers is None:
            return self._run(given)
        self._peers.describe = self._describe
        try:
            return self._run(given)
        except (jax.errors.JaxRuntimeError, ConnectionError):
            # If a process has died, this one is about to say so, and to end.
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
        slots = self._slots
        self._step += 1
        for slot, array in given.items():
            slots[slot] = array
        for slot, array in self._constants:
            # Constants are freed in a step as other slots are, and are put back for the next.
            slots[slot] = array
        for make, places in self._zeros:
            for slot, array in zip(places, make(), strict=True):
                slots[slot] = array
        self._loop()
        for slot, array in self._elsewhere.items():
            slots[slot] = array
        for places, share in self._shares:
            held = [slots[slot] for slot in places] if places[0] not in self._elsewhere else []
            for slot, array in zip(places, share(*held), strict=True):
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
        # Locals and tuples, as this loop is what a step costs in Python.
        for number, take, call, outputs, frees in self._actions:
            self._number = number
            for slot, array in zip(outputs, call(*take(slots)), strict=True):
                slots[slot] = array
            for slot in frees:
                slots[slot] = None

    # ---- what is told when a process dies --------------------------------------------------------

    def _describe(self, dead: int) -> str:
        assert self._peers is not None
        steps, process = self._pipeline.instructions.steps, self._peers.process
        text = (
            f"Process {process} ({self._stages_of(process)}) had issued {self._named(self._number)}"
            f" of step {self._step}"
        )
        with_dead = [
            number
            for number, step in enumerate(steps)
            if isinstance(step, Send)
            and {process, dead}
            <= self._pipeline.processes[step.source] | self._pipeline.processes[step.target]
            and self._pipeline.processes[step.source] != self._pipeline.processes[step.target]
        ]
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
            what = self._pipeline.functions[step.function].program.name
        else:
            what = f"stage {step.source} to stage {step.target}, {len(step.inputs)} arrays"
        return f"instruction {number + 1} of {len(steps)} ({what}{batch})"


def _timed(action: _Action, record: Callable[[int, float, float], None]) -> Move:
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
    """Arrays of some slots, as a tuple."""
    if len(inputs) > 1:
        return operator.itemgetter(*inputs)
    if not inputs:
        return lambda slots: ()
    (slot,) = inputs
    return lambda slots: (slots[slot],)


def _put(array: Any, sharding: NamedSharding) -> jax.Array:
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
