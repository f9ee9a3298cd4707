"""A step under a plan with several stages, called as the user's own."""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..graph import Graph, Literal, Role, Staging
from ..plans import ArrayInterface, Plan, Schedule, Trace, headline
from ..sharding import MicroBatchPlan, Pins, plan_micro_batches
from ._agreement import agree_on_step
from ._arguments import Arguments
from ._check import StepCheck, compare, plain_results
from ._init import init_state
from ._layout import Layout
from ._parts import Parts, cut_graph
from ._phase_parts import phase_parts
from ._pieces import cut_leaves, input_pieces, join_results, original_of, output_pieces, places_of
from ._pipeline import Pipeline
from ._pipeline_stats import PipelineStats, pipeline_stats
from ._programs import StagePrograms
from ._split import split_stages
from ._stage_functions import StageContext
from ._state import place
from ._trace import Span, measured_trace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSetup:
    """Where a stage runs and how it is split.

    Attributes:
        mesh: its devices.
        pins: its splits, for the operators of the whole step.
        data_axes: mesh axes that split nothing but the batch.
        given_specs: how inputs of the step are split, by value.
        sent_specs: how values that it exchanges with other stages are split, by value.
    """

    mesh: Mesh
    pins: Pins
    data_axes: tuple[str, ...]
    given_specs: Mapping[int, PartitionSpec]
    sent_specs: Mapping[int, PartitionSpec]


def build_pipeline(
    graph: Graph,
    staging: Staging,
    setups: Sequence[StageSetup],
    schedule: Schedule,
    *,
    semantics: str = "exact",
    recompute: frozenset[int] = frozenset(),
    processes: Sequence[frozenset[int]] | None = None,
) -> Pipeline:
    """The pipeline of a step.

    Args:
        graph: the step on its whole batch.
        staging: which stage everything runs on.
        setups: of each stage.
        schedule: order of tasks; its number of micro-batches is into how many parts the batch is cut.
        semantics: see `plan_micro_batches`.
        recompute: stages whose backward programs work everything out again.
        processes: that have devices of each stage; by default as the devices say.

    Raises:
        CaptureError: the step does not decompose into so many micro-batches.
        InputError: the batch does not divide.
    """
    count = schedule.num_micro_batches
    groups = [math.prod(s.mesh.shape[a] for a in s.data_axes) if count > 1 else 1 for s in setups]
    shards = math.lcm(*groups)
    split = any(task.kind == "backward-weight" for tasks in schedule.lists for task in tasks)
    cut: dict[int, tuple[Parts, MicroBatchPlan | None, StagePrograms, Layout]] = {}
    for number in sorted(set(groups)):
        plan = None
        layout = Layout()
        if count > 1:
            plan = plan_micro_batches(
                graph, count, num_groups=number, semantics=semantics, on_missing_rule=setups[0].pins.on_missing_rule
            )
            layout = Layout(groups=number, shards=shards // number, micro_batches=count)
        parts = cut_graph(plan, layout) if plan else phase_parts(graph)
        cut[number] = (
            parts,
            plan,
            split_stages(parts, plan, staging, split_backward=split, recompute=recompute),
            layout,
        )
    contexts = [
        StageContext(
            mesh=s.mesh,
            pins=s.pins,
            data_axes=s.data_axes if number > 1 else (),
            parts=cut[number][0],
            plan=cut[number][1],
            layout=cut[number][3],
            given_specs=s.given_specs,
            sent_specs=s.sent_specs,
        )
        for s, number in zip(setups, groups, strict=True)
    ]
    return Pipeline(graph, _mixed([cut[n][2] for n in groups]), contexts, schedule, processes=processes)


def _mixed(by_stage: Sequence[StagePrograms]) -> StagePrograms:
    """Each stage's programs from the cut for its own number of groups, without those that make nothing."""
    first = by_stage[0]
    own = {(p.stage, p.part, p.round): p for k, cut in enumerate(by_stage) for p in cut.programs if p.stage == k}
    programs = [own[p.stage, p.part, p.round] for p in first.programs]
    useful = tuple(p for p in programs if p.exports or p.totals or p.stacked)
    return StagePrograms(programs=useful, made_by=first.made_by, outputs=first.outputs, home=first.home)


class PipelineStep:
    """A training step that runs as a pipeline with the user's signature; see `ParallelStep`, whose interface it has."""

    def __init__(self, *, graph: Graph, plan: Plan, pipeline: Pipeline) -> None:
        self._graph, self._plan, self._pipeline = graph, plan, pipeline
        self._original = original_of(graph)
        self._arguments = Arguments(self._original)
        self._inputs, self._outputs = input_pieces(graph), output_pieces(graph)
        self._paths = [item.path for item in self._original.inputs]
        self._places = [pipeline.given_slots(item.value) for item in graph.inputs]
        self._donated = frozenset(k for k, item in enumerate(graph.inputs) if item.value in pipeline.donated_values())
        self._stats: PipelineStats | None = None
        self._is_agreed = not pipeline.is_shared
        self._lock = threading.RLock()
        self.__name__ = graph.name
        self.__doc__ = graph.calling.fn.__doc__

    @property
    def plan(self) -> Plan:
        """What it runs."""
        return self._plan

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The devices of each stage."""
        return tuple(context.mesh for context in self._pipeline.contexts)

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        """Where each input lies, by path; a batch that several stages read on the first of them.

        What lies in pieces on several stages has one path for each, such as `params.w[0:4]` and `params.w[4:8]`.
        """
        return {
            item.path: next(iter(places.values()))[1] if places else self._anywhere()
            for item, places in zip(self._graph.inputs, self._places, strict=True)
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step. Returns at once with arrays that are still being computed, as JAX does.

        Raises:
            PlanMismatchError: the arguments are not those that were planned for; lists every difference.
            CaptureError: other arguments are passed.
        """
        outputs = self._run(self._arguments.leaves(args, kwargs), keep=False)
        return self._graph.calling.finish(outputs, args, kwargs)

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make the state, each part on the stage that keeps it; see `ParallelStep.init`.

        What is stacked over layers that several stages run comes as `PiecedArray`s.
        """
        self._agree()
        original = self._original
        inputs = [
            ArrayInterface(path=i.path, shape=v.shape, dtype=v.dtype, role=i.role.value)
            for i in original.inputs
            for v in [original.values[i.value]]
        ]
        return init_state(original.calling.fn, inputs, places_of(self.shardings), init_fn, args, kwargs)

    def check(self, *args: Any, **kwargs: Any) -> StepCheck:
        """Run one step here and plainly on one device, and compare every output. The arguments stay as they are."""
        call = self._arguments.call(args, kwargs)
        found = self._run(call.leaves, keep=True)
        return compare([o.path for o in self._original.outputs], found, plain_results(self._original, call.leaves))

    def stats(self) -> PipelineStats:
        """Memory, collectives and compile times of the compiled programs, stage by stage. Compiles if need be."""
        if self._stats is None:
            self._compile()
            self._stats = pipeline_stats(self._pipeline)
        return self._stats

    def trace(self, *args: Any, **kwargs: Any) -> Trace:
        """Run one step program by program, each waiting for the one before, and say when each began and ended.

        So the times are those of each program and transfer by itself, one after the other: compare programs with the
        predicted schedule; their sum is not the time of a step. The arguments stay as they are. Programs run
        once before they are timed. Of several processes each sees its own stages, and all must call this.
        """
        leaves = self._arguments.leaves(args, kwargs)
        jax.block_until_ready(self._run(leaves, keep=True))
        spans: list[Span] = []
        timed = functools.partial(self._pipeline.run_timed, record=lambda *span: spans.append(span))
        self._run(leaves, keep=True, run=timed)
        return measured_trace(self._pipeline, spans, title=headline(self._plan) if self._plan else self.__name__)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Compare with what other processes are about to run, once."""
        if not self._is_agreed:
            agree_on_step(self._original, self._plan)
            self._is_agreed = True

    def _compile(self) -> None:
        self._agree()
        self._pipeline.compile()

    def _anywhere(self) -> NamedSharding:
        return NamedSharding(self.meshes[0], PartitionSpec())

    def _run(self, whole: Sequence[Any], *, keep: bool, run: Callable[..., list[Any]] | None = None) -> list[Any]:
        """The user's results from the user's arrays."""
        # All threads must issue the instructions of a step in one order, and donated arrays have one reader.
        with self._lock:
            self._arguments.check_alive(whole)
            return self._run_alone(whole, keep=keep, run=run)

    def _run_alone(self, whole: Sequence[Any], *, keep: bool, run: Callable[..., list[Any]] | None) -> list[Any]:
        self._compile()
        leaves = cut_leaves(whole, self._inputs, self._paths)
        shared = Counter(id(leaf) for leaf in leaves)
        given: dict[int, Any] = {}
        first: list[Any] = []
        for position, (leaf, places) in enumerate(zip(leaves, self._places, strict=True)):
            donated = position in self._donated
            mine = keep or (donated and shared[id(leaf)] > 1)
            arrays = []
            for slot, sharding in places.values():
                moved = not isinstance(leaf, jax.Array) or not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
                item = self._graph.inputs[position]
                shape = self._graph.values[item.value].shape
                arrays.append(place(leaf, sharding, shape, keep=donated and (mine or moved), path=item.path))
                given[slot] = arrays[-1]
            first.append(arrays[0] if arrays else place(leaf, self._anywhere(), np.shape(leaf)))
        results = (run or self._pipeline.run)(given)
        by_value = {item.value: array for item, array in zip(self._graph.inputs, first, strict=True)}
        found = []
        for output, result in zip(self._graph.outputs, results, strict=True):
            if result is None:
                value = output.value
                result = np.asarray(value.value) if isinstance(value, Literal) else by_value[value]
            found.append(result)
        return join_results(found, self._outputs)


def batch_values(graph: Graph) -> frozenset[int]:
    """The values of a step's batch."""
    return frozenset(i.value for i in graph.inputs if i.role is Role.BATCH)
