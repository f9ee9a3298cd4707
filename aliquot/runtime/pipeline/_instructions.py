"""Instructions of a pipeline, from a schedule and the programs of its stages: one list, the same in
every process.

Arrays live in numbered slots. An instruction runs a program on slots, or moves slots from one stage
to another, and says which slots nobody reads afterwards; there is nothing left to decide while a
step runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from ...graph import StageId, ValueId
from ...plans import Schedule, TaskKind
from ...sharding import Part
from ._stage_functions import Form, Key, StageFunction

PART_OF = {
    TaskKind.FORWARD: Part.FORWARD,
    TaskKind.BACKWARD: Part.BACKWARD,
    TaskKind.BACKWARD_INPUT: Part.BACKWARD_INPUT,
    TaskKind.BACKWARD_WEIGHT: Part.BACKWARD_WEIGHT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run a stage's function.

    Attributes:
        function: its position in the list of functions.
        stage, micro_batch: the task that it belongs to; the micro-batch is -1 for a program that
            runs once a step.
        inputs, outputs: slots.
        frees: slots that nobody reads afterwards.
    """

    function: int
    stage: StageId
    micro_batch: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Move arrays from one stage's mesh to another's, all in one transfer."""

    source: StageId
    target: StageId
    micro_batch: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...] = ()


class Instructions(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Instructions of one step.

    Attributes:
        steps: in the order in which they are issued.
        slots: what each slot holds, and on which stage: `(stage, key, micro-batch)`.
        given: for each stage, by value, the slots of the inputs and constants of the step that must
            lie there.
        zeros: for each stage, by value, the slots of its running totals, which start at zero.
        numbers: for each stage the slots of the micro-batch numbers.
        results: for each (stage, value) that the user gets, its slot.
    """

    steps: tuple[Run | Send, ...]
    slots: tuple[tuple[StageId, Key, int], ...]
    given: dict[int, dict[ValueId, int]]
    zeros: dict[int, dict[ValueId, int]]
    numbers: dict[int, tuple[int, ...]]
    results: dict[tuple[StageId, ValueId], int]


def write_instructions(
    functions: Sequence[StageFunction],
    schedule: Schedule,
    *,
    home: Mapping[ValueId, StageId],
    results: Iterable[tuple[StageId, ValueId]],
) -> Instructions:
    """Instructions of a step.

    Args:
        functions: of all stages.
        schedule: the order of the tasks.
        home: for each input that is kept on one stage, that stage; other inputs are given to every
            stage that reads them.
        results: stages and values that the user gets.
    """
    writer = _Writer(functions, schedule.num_micro_batches)
    writer.spread_inputs(home)
    # Early programs run first, as any task may read their results.
    writer.once(Part.EARLY)
    early_after = schedule.early_after()
    for task in schedule.order():
        writer.task(task.stage, PART_OF[task.kind], task.micro_batch)
        if task in early_after:
            writer.early_update(task.stage)
    for number in sorted({f.program.round for f in functions if f.program.part is Part.UPDATE}):
        writer.once(Part.UPDATE, number)
    slots_of_results = {}
    for stage, value in results:
        slots_of_results[stage, value] = writer.slot(stage, Key(Form.LATE, value), -1)
    # A slot is freed after its last reader, or after the instruction that fills it if nobody
    # reads it.
    done = set(slots_of_results.values()) | writer.kept()
    freed = []
    # In reverse, so that the first use met is the last one.
    for step in reversed(writer.steps):
        touched = dict.fromkeys([*step.inputs, *step.outputs])
        last = tuple(slot for slot in touched if slot not in done)
        done.update(last)
        freed.append(replace(step, frees=last))
    return Instructions(
        steps=tuple(freed[::-1]),
        slots=tuple(writer.slots),
        given=writer.by_stage(Form.GIVEN),
        zeros=writer.by_stage(Form.TOTAL),
        numbers=writer.numbers(),
        results=slots_of_results,
    )


class _Writer:
    """Collects instructions in order, and numbers the slots that they use."""

    def __init__(self, functions: Sequence[StageFunction], num_micro_batches: int) -> None:
        self._functions, self._num_micro_batches = functions, num_micro_batches
        self.steps: list[Run | Send] = []
        self.slots: dict[tuple[StageId, Key, int], int] = {}
        self._moved: set[int] = set()
        self._updated: set[int] = set()
        self._readers: dict[tuple[Form, ValueId], list[StageId]] = {}
        for f in functions:
            for key in f.takes:
                # The first micro-batch takes the state from the step's inputs.
                form = Form.GIVEN if key.form is Form.HANDED_ON else key.form
                readers = self._readers.setdefault((form, key.value), [])
                if f.program.stage not in readers:
                    readers.append(f.program.stage)

    def slot(self, stage: StageId, key: Key, micro_batch: int) -> int:
        # A value of the whole step has one slot; one of a micro-batch has a slot for each
        # micro-batch.
        if key.form in (Form.GIVEN, Form.EARLY, Form.TOTAL, Form.LATE, Form.PACKED):
            micro_batch = -1
        elif key == Key(Form.HANDED_ON, key.value) and micro_batch == 0:
            return self.slot(stage, Key(Form.GIVEN, key.value), -1)
        # A program that takes several micro-batches names them in its keys.
        elif key.micro_batch >= 0:
            micro_batch, key = key.micro_batch, Key(key.form, key.value)
        return self.slots.setdefault((stage, key, micro_batch), len(self.slots))

    def spread_inputs(self, home: Mapping[ValueId, StageId]) -> None:
        """Send each stage the inputs that it reads but another stage keeps."""
        wanted: dict[tuple[StageId, StageId], list[ValueId]] = {}
        for (form, value), readers in self._readers.items():
            if form is Form.GIVEN and value in home:
                self.slot(home[value], Key(form, value), -1)
                for stage in sorted(readers):
                    if stage != home[value]:
                        wanted.setdefault((home[value], stage), []).append(value)
        # Sorted, so that every process issues the same transfers in the same order.
        for (source, target), values in sorted(wanted.items()):
            self._send(source, target, -1, [Key(Form.GIVEN, v) for v in values])

    def once(self, part: Part, number: int = 0) -> None:
        """Run the programs of all stages that run once a step, and send the results that other
        stages read.
        """
        for k, f in enumerate(self._functions):
            if f.program.part is part and f.program.round == number and k not in self._updated:
                self._run(k, f, -1)
                self._send_all(f, -1)

    def early_update(self, stage: int) -> None:
        """Run those programs of a stage's update that read nothing of other stages' updates."""
        own: set[Key] = set()
        for k, f in enumerate(self._functions):
            if (f.program.stage, f.program.part) != (stage, Part.UPDATE):
                continue
            if own.issuperset(key for key in f.takes if key.form in (Form.LATE, Form.PACKED)):
                self._run(k, f, -1)
                self._send_all(f, -1)
                self._updated.add(k)
                own.update(f.gives)

    def task(self, stage: int, part: Part, micro_batch: int) -> None:
        """Run one task of the schedule, and send the results that other stages read."""
        for k, f in enumerate(self._functions):
            if (f.program.stage, f.program.part) == (stage, part):
                self._run(k, f, micro_batch)
                self._send_all(f, micro_batch)

    def _run(self, k: int, f: StageFunction, micro_batch: int) -> None:
        stage = f.program.stage
        self.steps.append(
            Run(
                function=k,
                stage=stage,
                micro_batch=micro_batch,
                inputs=tuple(self.slot(stage, key, micro_batch) for key in f.takes),
                outputs=tuple(self._made(stage, key, micro_batch) for key in f.gives),
            )
        )

    def _made(self, stage: StageId, key: Key, micro_batch: int) -> int:
        """The slot of a result; state is for the next micro-batch."""
        return self.slot(stage, key, micro_batch + (key.form is Form.HANDED_ON))

    def _send_all(self, f: StageFunction, micro_batch: int) -> None:
        source = f.program.stage
        targets: dict[StageId, list[Key]] = {}
        for key in f.gives:
            if key.form in (Form.SENT, Form.LATE, Form.PACKED):
                for stage in self._readers.get((key.form, key.value), []):
                    if stage != source:
                        targets.setdefault(stage, []).append(key)
        for target, keys in sorted(targets.items()):
            self._send(source, target, micro_batch, keys)

    def _send(
        self, source: StageId, target: StageId, micro_batch: int, keys: Sequence[Key]
    ) -> None:
        outputs = tuple(self.slot(target, key, micro_batch) for key in keys)
        self._moved.update(outputs)
        self.steps.append(
            Send(
                source=source,
                target=target,
                micro_batch=micro_batch,
                inputs=tuple(self.slot(source, key, micro_batch) for key in keys),
                outputs=outputs,
            )
        )

    def by_stage(self, form: Form) -> dict[int, dict[ValueId, int]]:
        """Slots of values of a form that must be filled before the first instruction, by stage and
        value.
        """
        stages: dict[int, dict[ValueId, int]] = {}
        for (stage, key, _), slot in self.slots.items():
            # Slots that another stage fills by a transfer are not given.
            if key.form is form and slot not in self._moved:
                stages.setdefault(stage, {})[key.value] = slot
        return stages

    def numbers(self) -> dict[int, tuple[int, ...]]:
        """Slots of the micro-batch numbers, by stage."""
        stages = sorted({stage for stage, key, _ in self.slots if key.form is Form.NUMBER})
        every = range(self._num_micro_batches)
        number = Key(Form.NUMBER)
        return {s: tuple(self.slot(s, number, m) for m in every) for s in stages}

    def kept(self) -> set[int]:
        """Slots that are filled once and never freed."""
        return {slot for (_, key, _), slot in self.slots.items() if key.form is Form.NUMBER}
