"""A step under a plan, called as the user's own."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from ..core import PlanMismatchError
from ..graph import Graph
from ..plans import Plan
from ..sharding import Choice, NodeGraph
from ._agreement import agree_on_step, spans_processes
from ._arguments import Arguments
from ._check import StepCheck, compare, plain_results
from ._init import init_state
from ._pieces import PiecedArray, places_of
from ._plan_program import build_plan_program
from ._spmd import Program
from ._state import local_part, place
from ._stats import Stats, compiled_stats
from ._watchdog import watched


class ParallelStep:
    """A training step that runs on many devices with the user's signature.

    Made by `build`. The program is compiled when it is first needed. State that the step replaces is donated: after a
    call, use the state that it returned.
    """

    def __init__(self, *, graph: Graph, plan: Plan, mesh: Mesh, program: Program) -> None:
        self._graph, self._plan, self._mesh, self._program = graph, plan, mesh, program
        self._compiled: Any = None
        self._stats: Stats | None = None
        self._is_agreed = not spans_processes(mesh.devices.flat)
        self._number = 0
        self._lower_s = self._compile_s = 0.0
        self._lock = threading.Lock()
        self._arguments = Arguments(graph)
        self._donated = frozenset(program.donated)
        self.__name__ = graph.name
        self.__doc__ = graph.calling.fn.__doc__

    @classmethod
    def build(
        cls,
        graph: Graph,
        nodes: NodeGraph,
        choices: Sequence[Choice],
        plan: Plan,
        devices: Sequence[Any] | None = None,
    ) -> ParallelStep:
        """The step of a plan.

        Args:
            graph: the step on its whole batch.
            nodes: its decisions, of the whole batch or of a micro-batch.
            choices: what the plan decided, one for each node.
            plan: mesh, micro-batches and data axes are read from it.
            devices: in the mesh's order, row by row; by default the first of `jax.devices()`.

        Raises:
            PlanMismatchError: there are fewer devices than the plan needs.
            CaptureError: the step does not decompose into the plan's micro-batches.
        """
        (stage,) = plan.stages
        mesh = make_mesh(stage.mesh_shape, stage.axis_names, devices)
        program = build_plan_program(graph, nodes, choices, plan, mesh)
        return cls(graph=graph, plan=plan, mesh=mesh, program=program)

    @property
    def plan(self) -> Plan:
        """What it runs."""
        return self._plan

    @property
    def mesh(self) -> Mesh:
        """The devices it runs on."""
        return self._mesh

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        """Where each input lies, by path."""
        return {i.path: s for i, s in zip(self._graph.inputs, self._program.in_shardings, strict=True)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step. Returns at once with arrays that are still being computed, as JAX does.

        Takes plain or placed arrays. With several processes, a host array may be the process's own part.

        Raises:
            PlanMismatchError: the arguments are not those that were planned for; lists every difference.
            CaptureError: other arguments are passed.
        """
        outputs = self._program_on(self._arguments.leaves(args, kwargs), keep=False)
        return self._graph.calling.finish(outputs, args, kwargs)

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the user's function that makes the state, so that every device makes only what it holds.

        Args:
            init_fn: returns the step's state argument, or a tuple of its state arguments in order.
            *args, **kwargs: its arguments; the same in all processes.

        Raises:
            PlanMismatchError: what it returns is not what the step takes; names the paths that differ.
        """
        self._agree()
        places = places_of(self.shardings)
        return init_state(self._graph.calling.fn, self._plan.inputs, places, init_fn, args, kwargs)

    def place(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The arguments with every array where the step wants it, for loops that prepare their next batch early.

        Positional arguments come back in order, then keyword arguments. Raises as a call does.
        """
        call = self._arguments.call(args, kwargs)
        by_leaf = {id(leaf): self._place(position, leaf, keep=False) for position, leaf in enumerate(call.leaves)}
        return tuple(jax.tree.map(lambda leaf: by_leaf.get(id(leaf), leaf), (*args, *kwargs.values())))

    def local_part(self, batch: Any, argument: str | None = None) -> Any:
        """The part of a batch (a tree of whole host arrays) that this process must feed.

        Args:
            batch: one argument of the step.
            argument: its name; by default the last positional one.
        """
        calling = self._graph.calling
        name = argument or calling.names[calling.num_positional - 1]
        shardings = [
            sharding
            for parts, sharding in zip(calling.call.parts, self._program.in_shardings, strict=True)
            if parts[0] == name
        ]
        leaves, tree = jax.tree.flatten(batch)
        return jax.tree.unflatten(tree, [local_part(leaf, s) for leaf, s in zip(leaves, shardings, strict=True)])

    def stats(self) -> Stats:
        """Memory on each device, collectives and compile time of the compiled program. Compiles it if need be."""
        if self._stats is None:
            compiled = self._compile()
            names = [str(name) for name in self._mesh.axis_names]
            self._stats = compiled_stats(
                compiled,
                names,
                [self._mesh.shape[name] for name in names],
                lower_s=self._lower_s,
                compile_s=self._compile_s,
            )
        return self._stats

    def check(self, *args: Any, **kwargs: Any) -> StepCheck:
        """Run one step here and plainly on one device, and compare every output. The arguments stay as they are.

        The plain step must fit on one device. With several processes, pass whole arrays, the same in all.
        """
        call = self._arguments.call(args, kwargs)
        found = self._program_on(call.leaves, keep=True)
        wanted = plain_results(self._graph, call.leaves)
        return compare([o.path for o in self._graph.outputs], found, wanted)

    def as_text(self) -> str:
        """The optimized program, as the compiler prints it."""
        text: str = self._compile().as_text()
        return text

    def lower(self) -> Any:
        """The program before the compiler's optimizations, as `jax.jit(...).lower(...)` returns it."""
        structs = [_struct(t, s) for t, s in zip(self._arguments.types, self._program.in_shardings, strict=True)]
        return self._program.jitted.lower(*structs)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Compare with what other processes are about to run, once."""
        if not self._is_agreed:
            agree_on_step(self._graph, self._plan)
            self._is_agreed = True

    def _compile(self) -> Any:
        with self._lock:
            if self._compiled is None:
                self._agree()
                start = time.perf_counter()
                lowered = self.lower()
                middle = time.perf_counter()
                self._compiled = lowered.compile()
                self._lower_s, self._compile_s = middle - start, time.perf_counter() - middle
            return self._compiled

    def _program_on(self, leaves: Sequence[Any], *, keep: bool) -> list[Any]:
        # First, since moving arrays may need the other processes as well.
        compiled, peers = self._compile(), watched()
        shared = Counter(id(leaf) for leaf in leaves)
        placed = [
            self._place(position, leaf, keep=keep or (position in self._donated and shared[id(leaf)] > 1))
            for position, leaf in enumerate(leaves)
        ]
        if peers is not None:
            self._number += 1
            peers.describe = self._describe
        return list(compiled(*placed))

    def _describe(self, _: int) -> str:
        return f"Process {jax.process_index()} had issued step {self._number}."

    def _place(self, position: int, leaf: Any, *, keep: bool) -> jax.Array:
        shape = self._arguments.types[position][0]
        sharding = self._program.in_shardings[position]
        donated = position in self._donated
        if isinstance(leaf, PiecedArray):
            leaf = jnp.asarray(leaf)
        moved = not isinstance(leaf, jax.Array) or not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        path = self._graph.inputs[position].path
        # What had to be moved here is still the caller's where it came from.
        return place(leaf, sharding, shape, keep=donated and (keep or moved), path=path)


def make_mesh(shape: Sequence[int], axis_names: Sequence[str], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over the first devices, numbered row by row, that leaves splits to the compiler where a plan is silent.

    Raises:
        PlanMismatchError: there are too few devices.
    """
    needed = math.prod(shape)
    available = list(jax.devices() if devices is None else devices)
    if len(available) < needed:
        raise PlanMismatchError(
            f"the plan is for {needed} devices ({'x'.join(map(str, shape))}), and there are {len(available)}",
            asked="the plan does not fit these devices",
            advice="Plan for the devices at hand (Cluster.detect()), or on CPUs set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed} before starting Python.",
        )
    grid = np.array(available[:needed], dtype=object).reshape(tuple(shape))
    return Mesh(grid, tuple(axis_names), axis_types=(AxisType.Auto,) * len(tuple(shape)))


def _struct(kind: tuple[tuple[int, ...], Any], sharding: NamedSharding) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(kind[0], kind[1], sharding=sharding)
