"""The runner of steps that are one program on one mesh."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from ..cost import PlannedStep
from ..graph import Graph
from ..plans import ArrayInterface, Plan, Trace, TraceEvent, require_busy_processes
from ._arguments import types_of
from ._in_place import InPlace
from ._runner import AbstractRunner, interface_of
from ._same_calls import SameCalls, remember
from .compiled import Stats, compiled_stats
from .spmd import Program, axis_names, build_plan_program, make_mesh, require_kernels
from .transport import PiecedArray, agree_on_step, place, spans_processes, watched


class ProgramRunner(AbstractRunner):
    """Runs a step as one program, which is compiled when it is first needed.

    Attributes:
        program: see `Program`.
    """

    def __init__(self, *, graph: Graph, plan: Plan | None, mesh: Mesh, program: Program) -> None:
        self.graph, self.program = graph, program
        self._plan, self._mesh = plan, mesh
        self._compiled: Any = None
        self._stats: Stats | None = None
        self._is_agreed = plan is None or not spans_processes(mesh.devices.flat)
        self._same = None if self._is_agreed else SameCalls(graph, self.input_homes())
        self._number = 0
        self._lower_s = self._compile_s = 0.0
        self._lock = threading.Lock()
        self._types = types_of(graph)
        self._donated = frozenset(program.donated)
        # A donated array has the type and sharding of the result that replaces it.
        outputs = [-1] * len(graph.inputs)
        for position in program.donated:
            output = graph.inputs[position].output
            outputs[position] = -1 if output is None else output
        self.in_place: InPlace = InPlace(outputs)
        self._kept = tuple(sorted({*range(len(graph.inputs))} - self._donated))

    @classmethod
    def build(cls, step: PlannedStep, devices: Sequence[Any] | None = None) -> ProgramRunner:
        """The program of a plan.

        Args:
            devices: in the mesh's order, row by row; by default the first of `jax.devices()`.

        Raises:
            PlanMismatchError: there are fewer devices than the plan needs, they lack a kernel of
                the step, or a process has only devices that the plan leaves idle.
            CaptureError: the step does not decompose into the plan's micro-batches.
        """
        (stage,) = step.plan.stages
        require_busy_processes(step.plan, jax.devices() if devices is None else devices)
        mesh = make_mesh(stage.mesh_shape, stage.axis_names, devices)
        require_kernels(step.graph, list(mesh.devices.flat))
        return cls(
            graph=step.graph, plan=step.plan, mesh=mesh, program=build_plan_program(step, mesh)
        )

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        return (self._mesh,)

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        paths = [item.path for item in self.graph.inputs]
        return dict(zip(paths, self.program.in_shardings, strict=True))

    @property
    def interface(self) -> tuple[ArrayInterface, ...]:
        return interface_of(self.graph)

    def input_homes(self) -> list[tuple[NamedSharding, ...]]:
        return [(sharding,) for sharding in self.program.in_shardings]

    def compile(self) -> None:
        with self._lock:
            if self._compiled is not None:
                return
            if not self._is_agreed:
                assert self._plan is not None
                agree_on_step(self.graph, self._plan)
                self._is_agreed = True
            start = time.perf_counter()
            lowered = self.lower()
            middle = time.perf_counter()
            self._compiled = lowered.compile()
            self._lower_s, self._compile_s = middle - start, time.perf_counter() - middle

    def run(
        self, leaves: Sequence[Any], *, keep: bool, unknown: Sequence[int] | None = None
    ) -> list[Any]:
        # Compile before any array is moved, so that all processes have compared their plans by
        # then.
        self.compile()
        if self._same is not None:
            self._same.compare(leaves)
        peers = watched()
        shared: Counter[int] = Counter()
        if unknown is None or keep or len(set(map(id, leaves))) < len(leaves):
            unknown, shared = range(len(leaves)), Counter(map(id, leaves))
        placed = list(leaves)
        # An array that is passed for two inputs is not donated, because the other input still needs
        # it.
        for k in unknown:
            is_kept = keep or (k in self._donated and shared[id(leaves[k])] > 1)
            placed[k] = self._placed(k, leaves[k], keep=is_kept)
        # What the watchdog prints when another process dies.
        if peers is not None:
            self._number += 1
            peers.describe = self._describe
        results = list(self._compiled(*placed))
        self.in_place.note(results, {k: leaves[k] for k in self._kept if placed[k] is leaves[k]})
        if self._same is not None:
            remember(self._same, results)
        return results

    def _describe(self, _: int) -> str:
        return f"Process {jax.process_index()} had issued step {self._number}."

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        return [self._placed(position, leaf, keep=False) for position, leaf in enumerate(leaves)]

    def _placed(self, position: int, leaf: Any, *, keep: bool) -> jax.Array:
        shape = self._types[position][0]
        sharding = self.program.in_shardings[position]
        donated = position in self._donated
        if isinstance(leaf, PiecedArray):
            leaf = jnp.asarray(leaf)
        moved = not isinstance(leaf, jax.Array) or not leaf.sharding.is_equivalent_to(
            sharding, leaf.ndim
        )
        path = self.graph.inputs[position].path
        # An array that had to be moved remains the caller's where it came from.
        return place(leaf, sharding, shape, keep=donated and (keep or moved), path=path)

    def stats(self) -> Stats:
        # Text and analysis of a large program take seconds, so they are made once.
        if self._stats is None:
            self.compile()
            self._stats = compiled_stats(
                self._compiled,
                axis_names(self._mesh),
                list(self._mesh.shape.values()),
                lower_s=self._lower_s,
                compile_s=self._compile_s,
            )
        return self._stats

    def as_text(self) -> str:
        self.compile()
        text: str = self._compiled.as_text()
        return text

    def lower(self) -> Any:
        """The program, as `jax.jit(...).lower(...)` returns it."""
        make: Any = jax.ShapeDtypeStruct
        structs = [
            make(shape, dtype, sharding=sharding)
            for (shape, dtype), sharding in zip(self._types, self.program.in_shardings, strict=True)
        ]
        return self.program.jitted.lower(*structs)

    def trace(self, leaves: Sequence[Any], title: str) -> Trace:
        """One event, from the call to the last result."""
        # A first run, which is not timed, compiles.
        jax.block_until_ready(self.run(leaves, keep=True))
        start = time.perf_counter()
        jax.block_until_ready(self.run(leaves, keep=True))
        event = TraceEvent(
            kind="step",
            lane="compute",
            submesh=0,
            stage=0,
            micro_batch=-1,
            start_s=0.0,
            end_s=time.perf_counter() - start,
        )
        devices = [device.id for device in self._mesh.devices.flat]
        name = (
            f"devices {min(devices)}-{max(devices)}" if len(devices) > 1 else f"device {devices[0]}"
        )
        return Trace(title=title, source="measured", submeshes=(name,), events=(event,))
