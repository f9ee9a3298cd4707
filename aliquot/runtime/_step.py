"""A step under a plan, called as the user's own, whatever the plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core import InputError
from ..cost import PlannedStep
from ..plans import Plan, Trace, headline
from ._arguments import Arguments
from ._check import StepCheck, compare, plain_results
from ._init import init_state
from ._pipeline_runner import PipelineRunner
from ._program_runner import ProgramRunner
from ._runner import AbstractRunner
from .compiled import Stats
from .spmd import make_mesh
from .transport import agree, local_part, places_of, plan_lines, spans_processes


class Step:
    """A training step that runs on many devices with the user's signature: as one program, or as a
    pipeline.

    It is traced, planned if it has no plan yet, and compiled when it is first called. State that
    the step replaces is donated: after a call, use the state that it returned. Made by
    `aliquot.parallelize`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        prepare: Callable[[tuple[Any, ...], dict[str, Any]], PlannedStep] | None = None,
        *,
        plan: Plan | None = None,
        devices: Sequence[Any] | None = None,
        runner: AbstractRunner | None = None,
    ) -> None:
        """
        Args:
            fn: the user's step.
            prepare: the step with its plan, given the arguments of its first call.
            plan: the plan, if there is one before the first call.
            devices: the devices of the plan in order; by default `jax.devices()`.
            runner: the runner of a step that is compiled already; `prepare` is then not called.
        """
        self._fn, self._prepare, self._plan, self._devices = fn, prepare, plan, devices
        self._runner: AbstractRunner | None = None
        self._arguments: Arguments | None = None
        # Two threads may call a step first; one traces and compiles it.
        self._lock = threading.RLock()
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__doc__ = fn.__doc__
        if runner is not None:
            self._use(runner)

    def __deepcopy__(self, memo: Any) -> Step:
        """The step itself, as for functions: it holds no state of the training."""
        return self

    def __reduce__(self) -> Any:
        raise InputError(
            f"{self.__name__} holds compiled programs and devices, and cannot be pickled. Save its"
            " plan, step.plan.save(path), and make the step again where it is needed:"
            " parallelize(train_step, Plan.load(path))."
        )

    # ---- before the first call -------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that it runs. Raises `InputError` for a step that is planned at its first call,
        before that call.
        """
        if self._plan is None:
            raise InputError(
                f"{self.__name__} is planned from the arguments of its first call, and was not"
                " called yet. Call it first, or make a plan with aliquot.plan(step, ...) and pass"
                " it: parallelize(step, plan)."
            )
        return self._plan

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The devices of each stage; a plan of one program has one."""
        if self._runner is not None:
            return self._runner.meshes
        devices = list(jax.devices() if self._devices is None else self._devices)
        return tuple(
            make_mesh(stage.mesh_shape, stage.axis_names, devices[stage.first_device :])
            for stage in self.plan.stages
        )

    @property
    def mesh(self) -> Mesh:
        """The devices it runs on. Raises `InputError` for a pipeline, which has `meshes`."""
        meshes = self.meshes
        if len(meshes) > 1:
            raise InputError(
                f"{self.__name__} runs as {len(meshes)} stages, each on a mesh of its own: see"
                " .meshes."
            )
        return meshes[0]

    @property
    def shardings(self) -> Mapping[str, NamedSharding]:
        """Sharding of each input, by path; of those that several stages read, on the first of
        them.
        """
        if self._runner is not None:
            return self._runner.shardings
        return {
            path: NamedSharding(mesh, PartitionSpec(*[axes or None for axes in dims]))
            for stage, mesh in reversed(list(zip(self.plan.stages, self.meshes, strict=True)))
            for path, dims in stage.shardings.items()
        }

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the user's function that makes the state, so that every device makes only what it
        holds.

        Args:
            init_fn: returns the step's state argument, or a tuple of its state arguments in order.
            *args, **kwargs: its arguments; the same in all processes.

        Raises:
            PlanMismatchError: what it returns is not what the step takes; names the paths that
                differ.
        """
        # Another plan in one process would place other pieces, and hang the first collective.
        if self._plan is not None and spans_processes(
            [d for mesh in self.meshes for d in mesh.devices.flat]
        ):
            agree(plan_lines(self._plan))
        inputs = self._runner.interface if self._runner is not None else self.plan.inputs
        return init_state(self._fn, inputs, places_of(self.shardings), init_fn, args, kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> Step:
        """Trace the step for these arguments (arrays or shapes) without running it; a call does so
        by itself.
        """
        with self._lock:
            if self._runner is None:
                assert self._prepare is not None
                planned = self._prepare(args, kwargs)
                self._plan = planned.plan
                kind = PipelineRunner if planned.plan.is_pipeline else ProgramRunner
                self._use(kind.build(planned, self._devices))
        return self

    def _use(self, runner: AbstractRunner) -> None:
        self._arguments = Arguments(runner.graph)
        self._runner = runner

    # ---- calls -----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step. Returns at once with arrays that are still being computed, as JAX does.

        Takes plain or placed arrays. With several processes, a host array may be the process's own
        part.

        Raises:
            PlanMismatchError: the arguments are not those that were planned for; lists every
                difference.
            CaptureError: other arguments are passed.
        """
        runner, arguments = self.prepare(*args, **kwargs)._ready("call")
        results = runner.run(arguments.leaves(args, kwargs), keep=False)
        return runner.graph.calling.finish(results, args, kwargs)

    def check(self, *args: Any, **kwargs: Any) -> StepCheck:
        """Run one step here and plainly on one device, and compare every output. The arguments stay
        as they are.

        The plain step must fit on one device. With several processes, pass whole arrays, the same
        in all.
        """
        runner, arguments = self.prepare(*args, **kwargs)._ready("check()")
        call = arguments.call(args, kwargs)
        results = runner.run(call.leaves, keep=True)
        return compare(
            [o.path for o in runner.graph.outputs],
            results,
            plain_results(runner.graph, call.leaves),
        )

    def place(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The arguments with every array where the step wants it, for loops that prepare their next
        batch early.

        Positional arguments come back in order, then keyword arguments. Raises as a call does.
        """
        runner, arguments = self.prepare(*args, **kwargs)._ready("place()")
        call = arguments.call(args, kwargs)
        # Leaves that are no arrays of the step, such as flags, come back as they are.
        by_leaf = {
            id(leaf): placed
            for leaf, placed in zip(call.leaves, runner.place(call.leaves), strict=True)
        }
        return tuple(
            jax.tree.map(lambda leaf: by_leaf.get(id(leaf), leaf), (*args, *kwargs.values()))
        )

    def trace(self, *args: Any, **kwargs: Any) -> Trace:
        """Run one step program by program, each waiting for the one before, and return when each
        began and ended.

        Programs and transfers are timed one after the other, after a run that is not timed. Compare
        them with the predicted schedule one by one; their sum is not the time of a step. The
        arguments stay as they are. Each of several processes traces its own stages, and all must
        call this.
        """
        runner, arguments = self.prepare(*args, **kwargs)._ready("trace()")
        title = headline(self._plan) if self._plan is not None else self.__name__
        return runner.trace(arguments.leaves(args, kwargs), title)

    def local_part(self, batch: Any, argument: str | None = None) -> Any:
        """The part of a batch (a tree of whole host arrays) that this process must feed.

        Args:
            batch: one argument of the step.
            argument: its name; by default the last positional one.
        """
        runner, _ = self._ready("local_part()")
        if len(runner.meshes) > 1:
            raise InputError(
                f"{self.__name__} is a pipeline, whose processes each pass whole batches: leave"
                " local_part() out."
            )
        calling = runner.graph.calling
        name = argument or calling.names[calling.num_positional - 1]
        shardings = [
            sharding
            for parts, sharding in zip(calling.call.parts, runner.input_shardings(), strict=True)
            if parts[0] == name
        ]
        leaves, tree = jax.tree.flatten(batch)
        return jax.tree.unflatten(
            tree, [local_part(leaf, s) for leaf, s in zip(leaves, shardings, strict=True)]
        )

    # ---- the compiled programs -------------------------------------------------------------------

    def stats(self) -> Stats:
        """Memory on each device, collectives and compile time, stage by stage. Compiles if need be.

        Raises:
            InputError: before the first call or `prepare`; so do the following.
        """
        return self._ready("stats()")[0].stats()

    def lower(self) -> Any:
        """The program before the compiler's optimizations, as `jax.jit(...).lower(...)` returns it.

        Of a pipeline a dict of its programs by name.
        """
        return self._ready("lower()")[0].lower()

    def as_text(self) -> str:
        """The optimized programs, as the compiler prints them."""
        return self._ready("as_text()")[0].as_text()

    @property
    def runner(self) -> AbstractRunner:
        """The runner of the compiled programs: see `AbstractRunner`. Raises as `stats` does."""
        return self._ready("runner")[0]

    def _ready(self, what: str) -> tuple[AbstractRunner, Arguments]:
        if self._runner is None or self._arguments is None:
            raise InputError(
                f"{self.__name__}.{what} needs the traced step. Call the step once, or"
                " step.prepare(...) with arrays or shapes of its arguments."
            )
        return self._runner, self._arguments
