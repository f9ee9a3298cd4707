"""A training step that runs under a plan and is called as the user's own step is."""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core import AliquotWarning, InputError
from ..cost import PlannedStep
from ..graph import Graph, memory_kind, plain_context
from ..plans import ArrayInterface, Plan, Trace, headline, require_busy_processes, unranged
from ._arguments import Arguments
from ._check import StepCheck, check_numbers, check_step
from ._init import init_state
from ._pipeline_runner import PipelineRunner
from ._program_runner import ProgramRunner
from ._runner import AbstractRunner
from ._same_calls import remember
from ._state_call import (
    StateCall,
    argument_of,
    misplaced_state,
    name_of,
    state_arguments,
    state_call,
)
from .checkpoints import SavedArray
from .compiled import Stats
from .spmd import make_mesh
from .transport import local_part, own_block, places_of, spans_processes


class Step:
    """A training step that runs on many devices with the user's signature: as one program, or as a
    pipeline.

    Made by `aliquot.parallelize`. The first call traces it, plans it if it has no plan yet, and
    compiles it. State that the step replaces is donated: after a call, use the returned state.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        prepare: Callable[..., PlannedStep] | None = None,
        *,
        plan: Plan | None = None,
        devices: Sequence[Any] | None = None,
        runner: AbstractRunner | None = None,
        traced: Graph | None = None,
    ) -> None:
        """
        Args:
            fn: the user's step.
            prepare: traces and plans a step, given it and the arguments of its first call. It may
                be left out if there is a `runner`.
            plan: the plan, if there is one before the first call.
            devices: the devices of the plan in order; by default `jax.devices()`.
            runner: runs a step that is compiled already; `prepare` is then not called.
            traced: the step as the plan was made for it, if that is known before the first call.
        """
        self._fn, self._trace_and_plan, self._plan, self._devices = fn, prepare, plan, devices
        self._traced, self._given_plan, self._is_method = traced, plan, False
        self._runner: AbstractRunner | None = None
        self._arguments: Arguments | None = None
        # Two threads may make the first call at once; only one of them traces and plans the step.
        self._lock = threading.RLock()
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__doc__ = fn.__doc__
        if runner is not None:
            self._set_runner(runner)

    def __set_name__(self, owner: type, name: str) -> None:
        # A function that was written elsewhere and is kept in a class is no method.
        written = getattr(self._fn, "__qualname__", None)
        self._is_method = written == f"{owner.__qualname__}.{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Step:
        """The step, or for a decorated method the step of this object, which has a plan of its own
        and is kept in the object.

        Raises:
            InputError: the object cannot keep it, as it has slots alone.
        """
        if instance is None or not self._is_method:
            return self
        try:
            kept = vars(instance).setdefault("_aliquot_steps", {})
        except TypeError:
            raise InputError(
                f"{self.__name__} is a method of {type(instance).__name__}, whose objects have"
                " __slots__ and cannot keep a step of their own. Leave out the decorator and call"
                f" aliquot.parallelize(an_object.{self.__name__}), or decorate a function."
            ) from None
        # A copy of an object has the steps of the object that it was made from, too.
        key = self, id(instance)
        if key not in kept:
            kept[key] = Step(
                self._fn.__get__(instance, owner),
                self._trace_and_plan,
                plan=self._given_plan,
                devices=self._devices,
            )
        step: Step = kept[key]
        return step

    def __deepcopy__(self, memo: Any) -> Step:
        """The step itself, as for functions: it holds no state of the training."""
        return self

    def __reduce__(self) -> Any:
        raise InputError(
            f"{self.__name__} holds compiled programs and devices, and cannot be pickled. Save its"
            " plan, step.plan.save(path), and make the step again where it is needed:"
            " parallelize(train_step, Plan.load(path))."
        )

    @property
    def plan(self) -> Plan:
        """The plan that the step follows.

        Raises:
            InputError: there is no plan yet, since the first call makes it.
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
        """The mesh of each stage; one mesh if the plan is no pipeline."""
        if self._runner is not None:
            return self._runner.meshes
        devices = list(jax.devices() if self._devices is None else self._devices)
        require_busy_processes(self.plan, devices)
        meshes = []
        for stage in self.plan.stages:
            own = devices[stage.first_device :]
            meshes.append(make_mesh(stage.mesh_shape, stage.axis_names, own))
        return tuple(meshes)

    @property
    def mesh(self) -> Mesh:
        """The mesh that it runs on. Raises `InputError` if it has several stages: see `meshes`."""
        meshes = self.meshes
        if len(meshes) > 1:
            raise InputError(
                f"{self.__name__} runs as {len(meshes)} stages, each on a mesh of its own: see"
                " .meshes."
            )
        return meshes[0]

    @property
    def shardings(self) -> Mapping[str, NamedSharding]:
        """Sharding of each input, by path. Of an input that several stages read, it is the one on
        the first of these stages.
        """
        if self._runner is not None:
            return self._runner.shardings
        kinds = {array.path: memory_kind(array) for array in self.plan.inputs}
        # In reverse, so that the first stage wins where several read an input.
        found = {}
        for stage, mesh in reversed(list(zip(self.plan.stages, self.meshes, strict=True))):
            for path, dims in stage.shardings.items():
                found[path] = NamedSharding(
                    mesh,
                    PartitionSpec(*[axes or None for axes in dims]),
                    memory_kind=kinds.get(unranged(path)),
                )
        return found

    @property
    def state_arguments(self) -> tuple[str, ...]:
        """Names of the arguments that `init` makes and checkpoints hold, in the order of the step's
        parameters.
        """
        return tuple(state_arguments(self._fn, self._interface()))

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the user's function that makes the state, so that each device computes only its part.

        Args:
            init_fn: returns the step's state argument, or a tuple of its state arguments in the
                order of the step's parameters.
            *args, **kwargs: its arguments; the same in all processes.

        Raises:
            InputError: there is no plan yet: `prepare` with shapes makes one.
            PlanMismatchError: what it returns is not what the step takes; names the paths that
                differ.
        """
        # Processes with different plans would place different pieces, and the first collective
        # would hang; those with other functions, keys or settings would make another state.
        shared = self._plan is not None and spans_processes(
            itertools.chain.from_iterable(mesh.devices.flat for mesh in self.meshes)
        )
        inputs = self._interface()
        state = init_state(
            self._fn,
            inputs,
            places_of(self.shardings),
            init_fn,
            args,
            kwargs,
            compared_with=self._plan if shared else None,
            traced=self._traced,
        )
        if shared:
            remember(self, jax.tree.leaves(state))
        return state

    def save(
        self,
        state: Any,
        folder: str | os.PathLike[str],
        *,
        number: int = 0,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a state as a checkpoint, and wait for it. Within a training run use `Checkpoints`,
        which does not wait.

        Args:
            state: the step's state argument, or a tuple of several in the order of its parameters.
            folder: holds the checkpoint under its number, and perhaps others.
            number: a checkpoint of this number is replaced.
            meta: plain data to be kept with it.

        Raises:
            InputError: it cannot be written, or is not the step's state.
        """
        from ._checkpoints import Checkpoints

        with Checkpoints(folder) as checkpoints:
            checkpoints.save(self, state, number, meta=meta, force=True)

    def restore(self, folder: str | os.PathLike[str], number: int | None = None) -> Any:
        """The state of a checkpoint, under this step's plan, whatever plan it was saved under.

        Each process reads what its devices need. The step must have been called, or prepared with
        shapes.

        Args:
            folder: as for `save`.
            number: of the checkpoint; by default the newest.

        Raises:
            InputError: there is none, it is incomplete, or it is of another state: then it lists
                both shapes of the first arrays that differ.
        """
        from ._checkpoints import Checkpoints

        with Checkpoints(folder) as checkpoints:
            restored = checkpoints.restore(self, number)
        if restored is None:
            raise InputError(f"there is no checkpoint in {os.fspath(folder)!r}.")
        for line in (*restored.skipped, *restored.notes):
            warnings.warn(line, AliquotWarning, stacklevel=2)
        return restored.state

    def flat_state(self, state: Any = None) -> StateCall:
        """The arrays of a state, with their places; by default the shapes that the step takes.

        Raises:
            InputError: without a state, and neither a call nor `prepare` came before.
        """
        if state is None:
            calling = self._require_traced("restore()")[0].graph.calling
            example = calling.arguments(calling.call.leaves)
            given = tuple(example[name] for name in state_arguments(self._fn, self._interface()))
            state = given if len(given) > 1 else given[0]
        runner = self._runner
        statics = frozenset() if runner is None else runner.graph.calling.static_numbers
        return state_call(self._fn, self._interface(), state, statics)

    def misplaced(self, state: Any) -> list[str]:
        """One sentence for each place of a tuple that holds another argument than the step takes
        there; none if a state differs in other ways.
        """
        return misplaced_state(self._fn, self._interface(), state)

    def state_arrays(self) -> list[SavedArray]:
        """The arrays of the step's state as a checkpoint lists them."""
        names = state_arguments(self._fn, self._interface())
        held = [item for item in self._interface() if argument_of(item.path) in names]
        held.sort(key=lambda item: names.index(argument_of(item.path)))
        arrays = []
        for item in held:
            path = name_of(item.path, names)
            arrays.append(SavedArray(path=path, shape=item.shape, dtype=item.dtype))
        return arrays

    def remember(self, state: Any) -> None:
        """Note a state that this process has made as the others have, so that they need not compare
        it.
        """
        remember(self, jax.tree.leaves(state))

    def _interface(self) -> Sequence[ArrayInterface]:
        return self._runner.interface if self._runner is not None else self.plan.inputs

    def prepare(self, *args: Any, **kwargs: Any) -> Step:
        """Trace and, if it has no plan yet, plan the step for these arguments (arrays or shapes),
        without running it. The first call does so by itself. Returns this step.
        """
        if self._runner is None:
            with self._lock:
                # Another thread may have prepared it in the meantime.
                if self._runner is None:
                    assert self._trace_and_plan is not None
                    planned = self._trace_and_plan(self._fn, args, kwargs)
                    self._plan = planned.plan
                    kind = PipelineRunner if planned.plan.is_pipeline else ProgramRunner
                    with plain_context():
                        self._set_runner(kind.build(planned, self._devices))
        return self

    def _set_runner(self, runner: AbstractRunner) -> None:
        """Take a runner, and the check of arguments that belongs to its graph."""
        self._arguments = Arguments(runner.graph, runner.in_place)
        self._runner = runner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step. Returns at once, as JAX does, while the arrays are still being computed.

        Takes host arrays, arrays on one device, or arrays as `place` returns them. With several
        processes, a host array may be whole or this process's part alone.

        Raises:
            PlanMismatchError: the arguments are not those that were planned for; lists every
                difference.
            CaptureError: the call has other arguments than the traced one.
            FloatingPointError: a result is not a number, or not finite, and `jax_debug_nans` or
                `jax_debug_infs` asks for this check.
        """
        runner, arguments = self.prepare(*args, **kwargs)._require_traced("call")
        with plain_context():
            leaves, unknown = arguments.leaves(args, kwargs)
            results = runner.run(leaves, keep=False, unknown=unknown)
        check_numbers(runner.graph, results)
        return runner.graph.calling.finish(results, args, kwargs)

    def check(self, *args: Any, **kwargs: Any) -> StepCheck:
        """Run one step under the plan, and as the user wrote it on one device, and compare all
        outputs. The answer says whether they are equal within rounding (`is_equal`), or the first
        that is not.

        The arguments are not donated. The user's step must fit on one device. With several
        processes, pass whole arrays, the same in all.
        """
        runner, arguments = self.prepare(*args, **kwargs)._require_traced("check()")
        call = arguments.call(args, kwargs)
        with plain_context():
            results = runner.run(call.leaves, keep=True)
        return check_step(runner.graph, results, call.leaves)

    def dry_run(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step, but donate nothing: the arguments stay usable, and their devices hold the
        new state beside the old one. Raises as a call does.
        """
        runner, arguments = self.prepare(*args, **kwargs)._require_traced("dry_run()")
        with plain_context():
            results = runner.run(arguments.leaves(args, kwargs)[0], keep=True)
        return runner.graph.calling.finish(results, args, kwargs)

    def place(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The arguments with every array moved to the devices and sharding that the step needs, for
        loops that prepare their next batch early.

        Positional arguments come back in order, then keyword arguments. Raises as a call does.
        """
        runner, arguments = self.prepare(*args, **kwargs)._require_traced("place()")
        call = arguments.call(args, kwargs)
        # Leaves that are no arrays of the step, such as flags, come back as they are.
        with plain_context():
            arrays = runner.place(call.leaves)
        by_leaf = {id(leaf): array for leaf, array in zip(call.leaves, arrays, strict=True)}
        return tuple(
            jax.tree.map(lambda leaf: by_leaf.get(id(leaf), leaf), (*args, *kwargs.values()))
        )

    def trace(self, *args: Any, **kwargs: Any) -> Trace:
        """Run one step program by program and return the times at which each began and ended.

        Each program and transfer waits for the one before, so their sum is not the time of a step:
        compare them one by one with the predicted schedule. A first run is not timed. The arguments
        are not donated. With several processes, all must call this; each traces its own stages.
        """
        runner, arguments = self.prepare(*args, **kwargs)._require_traced("trace()")
        title = headline(self._plan) if self._plan is not None else self.__name__
        with plain_context():
            return runner.trace(arguments.leaves(args, kwargs)[0], title)

    def local_part(self, batch: Any, argument: str | None = None) -> Any:
        """The part of a batch (a tree of whole host arrays) that this process must feed.

        Args:
            batch: one argument of the step.
            argument: its name; by default the last positional one.
        """
        leaves, tree = jax.tree.flatten(batch)
        needed = self._needed("local_part()", argument)
        return jax.tree.unflatten(
            tree,
            [local_part(leaf, *homes) for leaf, (homes, _) in zip(leaves, needed, strict=True)],
        )

    def local_rows(self, argument: str | None = None) -> slice:
        """The rows of a batch of which this process needs anything, so that it need not read the
        others: those that `local_part` cuts out of the whole. None of them, `slice(0, 0)`, for a
        process whose stages read no batch.

        Args:
            argument: its name; by default the last positional one.

        Raises:
            InputError: neither a call nor `prepare` came before.
        """
        starts, stops = [], []
        for homes, shape in self._needed("local_rows()", argument):
            block = own_block(homes, shape)[0] if shape else slice(0, 0)
            if block.start < block.stop:
                starts.append(block.start)
                stops.append(block.stop)
        return slice(min(starts, default=0), max(stops, default=0))

    def _needed(
        self, asked: str, argument: str | None
    ) -> list[tuple[tuple[NamedSharding, ...], tuple[int, ...]]]:
        """Where each array of an argument is needed, and its shape."""
        runner, arguments = self._require_traced(asked)
        calling = runner.graph.calling
        name = argument or calling.names[calling.num_positional - 1]
        every = zip(calling.call.parts, runner.input_homes(), arguments.types, strict=True)
        return [(homes, shape) for parts, homes, (shape, _) in every if parts[0] == name]

    def stats(self) -> Stats:
        """Memory on each device, collectives and compile time, stage by stage. Compiles if need be.

        Raises:
            InputError: neither a call nor `prepare` came before.
        """
        with plain_context():
            return self._require_traced("stats()")[0].stats()

    def lower(self) -> Any:
        """The program before the compiler's optimizations, as `jax.jit(...).lower(...)` returns it.

        For a pipeline, a dict of its programs by name. Raises as `stats` does.
        """
        with plain_context():
            return self._require_traced("lower()")[0].lower()

    def as_text(self) -> str:
        """The optimized programs, as the compiler prints them. Raises as `stats` does."""
        with plain_context():
            return self._require_traced("as_text()")[0].as_text()

    @property
    def runner(self) -> AbstractRunner:
        """The runner of the compiled programs: see `AbstractRunner`. Raises as `stats` does."""
        return self._require_traced("runner")[0]

    def _require_traced(self, asked: str) -> tuple[AbstractRunner, Arguments]:
        """The runner, and the check of its arguments. Raises `InputError` if there is neither yet.

        Args:
            asked: what needs them, for the message.
        """
        if self._runner is None or self._arguments is None:
            raise InputError(
                f"{self.__name__}.{asked} needs the traced step. Call the step once, or"
                " step.prepare(...) with arrays or shapes of its arguments."
            )
        return self._runner, self._arguments
