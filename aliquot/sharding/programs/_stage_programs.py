"""Programs of a pipeline's stages as plain data, from `_split_stages` to the runtime."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from ...graph import Graph, StageId, ValueId


class Part(enum.StrEnum):
    """Part of a stage's work that a program does. A backward pass comes whole, or as two
    programs.
    """

    EARLY = "early"
    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward input"
    BACKWARD_WEIGHT = "backward weight"
    UPDATE = "update"


class StageProgram(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One program of one stage.

    Attributes:
        stage, part: the stage that runs it, and which part of that stage's work it is; `round`
            numbers the rounds of the update.
        graph: its operators; inputs are the values that it reads, outputs those that it makes for
            others.
        given: inputs of the step, and constants, that it reads.
        early: values that it reads from its stage's early program, by their names in its graph.
        imports: values that it reads from other programs, of the same micro-batch or of earlier
            rounds.
        exports: values that it makes for other programs, or for the user; `kept` are those that its
            own stage reads again.
        totals, stacked: values that it makes of every micro-batch for the update: added up, or kept
            one by one.
        handed_on: inputs of the step that it takes from its run for the micro-batch before, with
            the values that it makes for the next.
        combines: totals that it turns into the whole batch's values before anything else.
    """

    stage: StageId
    part: Part
    round: int = 0
    graph: Graph
    given: tuple[ValueId, ...]
    early: tuple[ValueId, ...] = ()
    imports: tuple[ValueId, ...] = ()
    exports: tuple[ValueId, ...] = ()
    kept: frozenset[ValueId] = frozenset()
    totals: tuple[ValueId, ...] = ()
    stacked: tuple[ValueId, ...] = ()
    handed_on: tuple[tuple[ValueId, ValueId], ...] = ()
    combines: tuple[ValueId, ...] = ()

    @property
    def name(self) -> str:
        """Name such as `stage 2 backward`."""
        number = f" {self.round}" if self.part is Part.UPDATE else ""
        return f"stage {self.stage} {self.part}{number}"


class StagePrograms(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All programs of a pipeline.

    Attributes:
        programs: in an order in which they could run.
        made_by: for each value that programs exchange, the (first) stage that makes it.
        outputs: for each of the step's outputs the stage and round that hold it, or None if it is
            an input or literal.
        home: for each input that belongs to no batch, the stage that keeps it.
    """

    programs: tuple[StageProgram, ...]
    made_by: Mapping[ValueId, StageId]
    outputs: tuple[tuple[StageId, int] | None, ...]
    home: Mapping[ValueId, StageId]
