"""The runner of pipelines."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..cost import PlannedStep
from ..graph import Graph, Literal
from ..plans import ArrayInterface, Plan, Trace
from ._arguments import Arguments
from ._runner import AbstractRunner, interface_of
from ._same_calls import SameCalls, remember
from .compiled import Stats
from .pipeline import (
    CompiledPipeline,
    Known,
    Pipeline,
    Span,
    build_plan_pipeline,
    compile_pipeline,
    donated_values,
    form_of,
    given_slots,
    measured_trace,
    pipeline_stats,
)
from .transport import (
    agree_on_step,
    cut_leaves,
    input_pieces,
    join_results,
    original_of,
    output_pieces,
    place,
)


class PipelineRunner(AbstractRunner):
    """Runs a step as the stages of a pipeline. Its programs are compiled when they are first
    needed.

    Attributes:
        pipeline: see `Pipeline`.
    """

    def __init__(self, graph: Graph, pipeline: Pipeline, plan: Plan | None = None) -> None:
        """
        Args:
            graph: the step on its whole batch, with its scans cut at stages if the pipeline's are.
            plan: the plan, which is compared with that of the other processes, if there are any.
        """
        self.graph, self.pipeline = original_of(graph), pipeline
        self._pieces_graph, self._plan = graph, plan
        self._inputs, self._outputs = input_pieces(graph), output_pieces(graph)
        self._paths = [item.path for item in self.graph.inputs]
        self._places = [given_slots(pipeline, item.value) for item in graph.inputs]
        donated = donated_values(pipeline)
        self._donated = frozenset(k for k, item in enumerate(graph.inputs) if item.value in donated)
        self._arguments = Arguments(self.graph)
        self.in_place = None
        self._stats: Stats | None = None
        self._compiled: CompiledPipeline | None = None
        self._is_agreed = plan is None or not pipeline.is_shared
        self._same = None if self._is_agreed else SameCalls(self.graph, self.input_homes())
        self._lock = threading.RLock()

    @classmethod
    def build(cls, step: PlannedStep, devices: Sequence[Any] | None = None) -> PipelineRunner:
        """The pipeline of a plan; see `build_plan_pipeline`."""
        return cls(step.graph, build_plan_pipeline(step, devices), step.plan)

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        return tuple(context.mesh for context in self.pipeline.contexts)

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        paths = [item.path for item in self._pieces_graph.inputs]
        return dict(zip(paths, self._homes(), strict=True))

    @property
    def interface(self) -> tuple[ArrayInterface, ...]:
        return interface_of(self.graph)

    def input_homes(self) -> list[tuple[NamedSharding, ...]]:
        """The shardings of each input; of one in pieces, those of the first piece."""
        homes = []
        for pieces in self._inputs:
            places = self._places[pieces[0].position].values()
            homes.append(tuple(home for _, home in places) or (self._anywhere(),))
        return homes

    def _homes(self) -> list[NamedSharding]:
        homes = []
        for places in self._places:
            _, sharding = next(iter(places.values()), (-1, self._anywhere()))
            homes.append(sharding)
        return homes

    def _anywhere(self) -> NamedSharding:
        return NamedSharding(self.meshes[0], PartitionSpec())

    def compile(self) -> None:
        if not self._is_agreed:
            assert self._plan is not None
            agree_on_step(self.graph, self._plan)
            self._is_agreed = True
        self.compiled()

    def compiled(self) -> CompiledPipeline:
        """The compiled pipeline; compiled once. With several processes all must call it."""
        if self._compiled is None:
            self._compiled = compile_pipeline(self.pipeline)
        return self._compiled

    def run(
        self, leaves: Sequence[Any], *, keep: bool, unknown: Sequence[int] | None = None
    ) -> list[Any]:
        return self._run(leaves, lambda given: self.compiled().issuer.run(given), keep=keep)

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Each input is put on the first stage that holds it, and in
        pieces where its rows lie on several stages.
        """
        homes, placed = self._homes(), []
        for position, leaf in enumerate(cut_leaves(leaves, self._inputs, self._paths)):
            item = self._pieces_graph.inputs[position]
            shape = self._pieces_graph.values[item.value].shape
            placed.append(
                place(leaf, homes[position], shape, keep=position in self._donated, path=item.path)
            )
        return join_results(placed, self._inputs)

    def stats(self) -> Stats:
        if self._stats is None:
            self.compile()
            self._stats = pipeline_stats(self.compiled())
        return self._stats

    def lower(self) -> dict[str, Any]:
        """The programs by name, as `jax.jit(...).lower(...)` returns each; those of this process's
        stages.
        """
        known: Known = {}
        lowered = {}
        for k, function in enumerate(self.pipeline.functions):
            form = form_of(self.pipeline, k, known)
            if self.pipeline.local[function.program.stage]:
                lowered[function.program.name] = form.jitted.lower(*form.arguments)
        return lowered

    def as_text(self) -> str:
        """Each program under its name."""
        self.compile()
        programs = [stage for stage in self.compiled().stages if stage is not None]
        return "\n".join(f"// {p.function.program.name}\n{p.compiled.as_text()}" for p in programs)

    def trace(self, leaves: Sequence[Any], title: str) -> Trace:
        # A first run, which is not timed, compiles and fills caches.
        jax.block_until_ready(self.run(leaves, keep=True))
        spans: list[Span] = []
        timed = functools.partial(
            self.compiled().issuer.run_timed, record=lambda *span: spans.append(span)
        )
        self._run(leaves, timed, keep=True)
        return measured_trace(self.pipeline, spans, title=title)

    def _run(self, whole: Sequence[Any], run: Callable[..., list[Any]], *, keep: bool) -> list[Any]:
        """The user's results from the user's arrays."""
        # One thread at a time: instructions must be issued in one order, and donated arrays have
        # one reader.
        with self._lock:
            self._arguments.check_alive(whole)
            self.compile()
            if self._same is not None:
                self._same.compare(whole)
            return self._run_alone(whole, run, keep=keep)

    def _run_alone(
        self, whole: Sequence[Any], run: Callable[..., list[Any]], *, keep: bool
    ) -> list[Any]:
        """`_run` under its lock: place the arguments, run the pipeline, and join the results."""
        graph = self._pieces_graph
        leaves = cut_leaves(whole, self._inputs, self._paths)
        # An array that is passed for two inputs is not donated, because the other input still needs
        # it.
        shared = Counter(id(leaf) for leaf in leaves)
        given: dict[int, Any] = {}
        first: list[Any] = []
        for position, (leaf, places) in enumerate(zip(leaves, self._places, strict=True)):
            donated = position in self._donated
            keeps = keep or (donated and shared[id(leaf)] > 1)
            arrays = []
            for slot, sharding in places.values():
                moved = not isinstance(leaf, jax.Array) or not leaf.sharding.is_equivalent_to(
                    sharding, leaf.ndim
                )
                item = graph.inputs[position]
                shape = graph.values[item.value].shape
                arrays.append(
                    place(leaf, sharding, shape, keep=donated and (keeps or moved), path=item.path)
                )
                given[slot] = arrays[-1]
            # An input that no stage reads is placed nevertheless, so that it can be returned.
            if not arrays:
                shape = graph.values[graph.inputs[position].value].shape
                arrays = [place(leaf, self._anywhere(), shape)]
            first.append(arrays[0])
        results = run(given)
        by_value = {item.value: array for item, array in zip(graph.inputs, first, strict=True)}
        fetched = []
        for output, result in zip(graph.outputs, results, strict=True):
            # A result that is an input, a constant or a literal is made by no stage.
            value = output.value
            if result is None:
                if isinstance(value, Literal):
                    result = np.asarray(value.value, value.dtype)
                elif value in graph.constants:
                    constant = graph.constants[value]
                    result = place(constant, self._anywhere(), constant.shape)
                else:
                    result = by_value[value]
            fetched.append(result)
        if self._same is not None:
            remember(self._same, fetched)
        return join_results(fetched, self._outputs)
