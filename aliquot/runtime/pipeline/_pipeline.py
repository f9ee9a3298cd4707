"""Pipelines: a step as instructions over the programs of its stages, with abstract shapes alone,
before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from msgspec import structs

from ...graph import Graph, Operand, StageId, ValueId
from ...plans import Schedule
from ...sharding import Part, PipelineCut, StagePrograms
from ..transport import processes_of
from ._instructions import Instructions, Send, write_instructions
from ._packing import pack_scalars
from ._stage_functions import Form, StageContext, StageFunction, StageSetup, build_function


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pipeline:
    """A step as instructions over the programs of its stages.

    Attributes:
        graph: the step on its whole batch.
        contexts: mesh and splits of each stage.
        schedule: order of tasks.
        functions: one for each program, in an order in which they could run.
        instructions: run the functions, and send arrays between stages.
        results: for each output of the step the stage and the value that hold it; None if it is an
            input or literal.
        home: the stage that keeps an input, by value: that of its successor, else the first one
            that reads it.
        sent, sent_late: values that stages exchange for each micro-batch, and in the update.
        pulled: inputs whose buffers other processes read directly. Nothing tells when they have
            finished, so no result may overwrite these buffers.
        processes: for each stage those that have its devices.
        local: for each stage whether this process is one of them.
        successors: for each input that the step returns in its next state the output that takes its
            place.
    """

    graph: Graph = field(repr=False)
    contexts: tuple[StageContext, ...] = field(repr=False)
    schedule: Schedule
    functions: tuple[StageFunction, ...] = field(repr=False)
    instructions: Instructions = field(repr=False)
    results: tuple[tuple[StageId, ValueId] | None, ...]
    home: Mapping[ValueId, StageId]
    sent: frozenset[ValueId]
    sent_late: frozenset[ValueId]
    pulled: frozenset[ValueId]
    processes: tuple[frozenset[int], ...]
    local: tuple[bool, ...]
    successors: Mapping[ValueId, Operand]

    @property
    def is_shared(self) -> bool:
        """True if several processes run it."""
        return len(set().union(*self.processes)) > 1

    def same_devices(self, a: int, b: int) -> bool:
        """True if two stages run on the same devices."""
        one, other = self.contexts[a].mesh, self.contexts[b].mesh
        # Meshes without devices may be equal and yet stand for different devices.
        return self.schedule.submesh_of(a) == self.schedule.submesh_of(b) or (
            isinstance(one, Mesh) and one == other
        )


def build_pipeline(
    graph: Graph,
    cut: PipelineCut,
    setups: Sequence[StageSetup],
    schedule: Schedule,
    *,
    processes: Sequence[frozenset[int]] | None = None,
) -> Pipeline:
    """The pipeline of a step.

    Args:
        graph: the step on its whole batch.
        cut: the step cut into micro-batches and stages, with the data-parallel groups of `setups`.
        setups: mesh and splits of each stage.
        schedule: order of tasks.
        processes: for each stage those that have its devices; by default read from the meshes.
    """
    programs = cut.programs
    contexts = []
    for k, (setup, time) in enumerate(zip(setups, cut.stages, strict=True)):
        of_stage = [p for p in programs.programs if p.stage == k]
        contexts.append(
            StageContext(
                **{
                    **structs.asdict(setup),
                    # Without several groups there is no dim to split over data axes.
                    "data_axes": setup.data_axes if time.layout.groups > 1 else (),
                },
                bodies=[(p.graph, p.totals) for p in of_stage if p.totals],
                parts=time.parts,
                plan=time.plan,
                layout=time.layout,
            )
        )
    home = _homes(graph, programs)
    sent = _sent(programs, in_body=True)
    functions = []
    for p in programs.programs:
        context = contexts[p.stage]
        functions.append(build_function(p, context, made_by=programs.made_by, sent=sent))
    packed = pack_scalars(functions)
    results: list[tuple[StageId, ValueId] | None] = []
    for output, where in zip(graph.outputs, programs.outputs, strict=True):
        if where is None or not isinstance(output.value, int):
            results.append(None)
        else:
            results.append((where[0], output.value))
    made = dict.fromkeys(r for r in results if r is not None)
    instructions = write_instructions(packed, schedule, home=home, results=made)
    successors = {}
    for item in graph.inputs:
        if item.output is not None:
            successors[item.value] = graph.outputs[item.output].value
    if processes is None:
        processes = [processes_of(NamedSharding(c.mesh, PartitionSpec())) for c in contexts]
    return Pipeline(
        graph=graph,
        contexts=tuple(contexts),
        schedule=schedule,
        functions=packed,
        instructions=instructions,
        results=tuple(results),
        home=home,
        sent=sent,
        sent_late=_sent(programs, in_body=False),
        pulled=_inputs_that_others_pull(instructions, processes),
        processes=tuple(processes),
        local=tuple(jax.process_index() in group for group in processes),
        successors=successors,
    )


def _homes(graph: Graph, programs: StagePrograms) -> dict[ValueId, StageId]:
    home = dict(programs.home)
    for item in graph.inputs:
        where = programs.outputs[item.output] if item.output is not None else None
        if where is not None:
            home[item.value] = where[0]
        elif item.output is not None and item.value not in home:
            readers = [p.stage for p in programs.programs if item.value in p.given]
            home[item.value] = min(readers, default=StageId(0))
    return home


def _sent(programs: StagePrograms, *, in_body: bool) -> frozenset[ValueId]:
    """Values that stages exchange for each micro-batch (`in_body`), or in the update."""
    found = set()
    for p in programs.programs:
        if (p.part is not Part.UPDATE) == in_body:
            for v in p.imports:
                if programs.made_by[v] != p.stage:
                    found.add(v)
    return frozenset(found)


def _inputs_that_others_pull(
    instructions: Instructions, processes: Sequence[frozenset[int]]
) -> frozenset[ValueId]:
    found = set()
    for step in instructions.steps:
        if isinstance(step, Send) and processes[step.source] != processes[step.target]:
            for slot in step.inputs:
                if instructions.slots[slot][1].form is Form.GIVEN:
                    found.add(instructions.slots[slot][1].value)
    return frozenset(found)
