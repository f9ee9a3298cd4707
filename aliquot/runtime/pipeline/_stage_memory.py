"""Memory on the devices of a pipeline's stages after each instruction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from ._instructions import Instructions, Run
from ._stage_functions import Form

_KINDS = {
    Form.GIVEN: "arguments",
    Form.LOCAL: "residuals",
    Form.SENT: "residuals",
    Form.TOTAL: "totals",
    Form.HANDED_ON: "totals",
    Form.STACKED: "totals",
    Form.LATE: "update",
    Form.PACKED: "update",
}


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on each device over a step.

    Attributes:
        held_bytes: the most that arrays held between programs take: state, residuals of
            micro-batches in flight, running totals, arrays from other stages.
        peak_bytes: the most that held arrays take together with a running program's results and
            temporaries.
        in_flight: the most micro-batches of which something is held at the same time, from their
            forward pass on.
        parts: what the peak is made of: `arguments` (state and batch), `residuals` (of all
            micro-batches in flight), `totals`, `update`, `other`, and of the program that runs then
            `results` that take no argument's place, and `temporaries`.
    """

    held_bytes: int
    peak_bytes: int
    in_flight: int
    parts: dict[str, int]


def stage_memory(
    instructions: Instructions,
    stages: Collection[int],
    *,
    sizes: Mapping[int, int],
    temps: Mapping[int, int],
    aliases: Mapping[int, int],
    donated: Mapping[int, Sequence[int]],
) -> StageMemory:
    """Memory of the devices of some stages under the instructions of a step.

    Args:
        stages: the stages that share the devices; a single one without interleaving.
        sizes: bytes by slot.
        temps, aliases: bytes by function: its temporaries, and results that lie in donated
            arguments.
        donated: positions of donated arguments by function.
    """
    slots = instructions.slots
    # The caller holds its arrays until the step is over, unless they are donated.
    given: set[int] = set().union(*(instructions.given.get(s, {}).values() for s in stages))
    alive = given.union(*(instructions.zeros.get(s, {}).values() for s in stages))
    held = sum(sizes.get(slot, 0) for slot in alive)
    most = held
    peak, parts = held, _parts(alive, sizes, slots)
    in_flight = 0
    begun: set[tuple[int, int]] = set()
    for step in instructions.steps:
        runs_here = isinstance(step, Run) and step.stage in stages
        written = [slot for slot in step.outputs if slots[slot][0] in stages]
        if isinstance(step, Run) and runs_here:
            # Results in donated arguments take no memory of their own.
            results = sum(sizes.get(slot, 0) for slot in written) - aliases.get(step.function, 0)
            temporaries = temps.get(step.function, 0)
            if held + results + temporaries > peak:
                peak = held + results + temporaries
                parts = {
                    **_parts(alive, sizes, slots),
                    "results": results,
                    "temporaries": temporaries,
                }
            gone = {step.inputs[position] for position in donated.get(step.function, ())}
            held -= sum(sizes.get(slot, 0) for slot in gone & alive)
            alive -= gone
        # A slot that is alive already is overwritten; its bytes are counted already.
        new = set(written) - alive
        alive |= new
        held += sum(sizes.get(slot, 0) for slot in new)
        if held > peak:
            peak, parts = held, _parts(alive, sizes, slots)
        most = max(most, held)
        # A micro-batch is in flight on a stage from the stage's own first task on.
        if isinstance(step, Run) and runs_here and step.micro_batch >= 0:
            begun.add((step.stage, step.micro_batch))
        batches = set()
        for stage, key, number in (slots[slot] for slot in alive):
            if key.form in (Form.LOCAL, Form.SENT) and (stage, number) in begun:
                batches.add(number)
        in_flight = max(in_flight, len(batches))
        gone = alive.intersection(step.frees) - given
        held -= sum(sizes.get(slot, 0) for slot in gone)
        alive -= gone
    return StageMemory(held_bytes=most, peak_bytes=peak, in_flight=in_flight, parts=parts)


def _parts(
    alive: Collection[int], sizes: Mapping[int, int], slots: Sequence[tuple[int, object, int]]
) -> dict[str, int]:
    parts = dict.fromkeys([*_KINDS.values(), "other", "results", "temporaries"], 0)
    for slot in alive:
        key = slots[slot][1]
        parts[_KINDS.get(key.form, "other")] += sizes.get(slot, 0)  # type: ignore[attr-defined]
    return parts
