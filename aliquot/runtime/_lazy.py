"""A step whose plan meets its arguments at the first call: only then is it traced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core import InputError
from ..plans import Plan, Trace
from ._agreement import agree, plan_lines, spans_processes
from ._check import StepCheck
from ._init import init_state
from ._pieces import places_of
from ._pipeline_stats import PipelineStats
from ._pipeline_step import PipelineStep
from ._stats import Stats
from ._step import ParallelStep, make_mesh


class LazyStep:
    """A parallel step with the user's signature that traces, plans if it has no plan yet, and compiles when first called.

    `init`, `plan` and `shardings` need no trace once there is a plan.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        prepare: Callable[[tuple[Any, ...], dict[str, Any]], ParallelStep | PipelineStep],
        *,
        plan: Plan | None,
        devices: Sequence[Any] | None,
    ) -> None:
        self._fn, self._prepare, self._plan, self._devices = fn, prepare, plan, devices
        self._step: ParallelStep | PipelineStep | None = None
        self._meshes: tuple[Mesh, ...] | None = None
        self._lock = threading.RLock()
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__doc__ = fn.__doc__

    def __deepcopy__(self, memo: Any) -> LazyStep:
        """The step itself, as for functions: it holds no state of the training."""
        return self

    def __reduce__(self) -> Any:
        raise InputError(
            f"{self.__name__} holds compiled programs and devices, and cannot be pickled. Save its plan, step.plan.save(path), "
            "and make the step again where it is needed: parallelize(train_step, Plan.load(path))."
        )

    @property
    def plan(self) -> Plan:
        """What it runs. Raises `InputError` for a step that is planned at its first call, before that call."""
        plan = self._step.plan if self._step else self._plan
        if plan is None:
            raise InputError(
                f"{self.__name__} is planned from the arguments of its first call, and was not called yet. Call it first, "
                "or make a plan with aliquot.plan(step, ...) and pass it: parallelize(step, plan)."
            )
        return plan

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The devices of each stage; a plan without a pipeline has one."""
        if self._meshes is None:
            devices = list(jax.devices() if self._devices is None else self._devices)
            self._meshes = tuple(
                make_mesh(stage.mesh_shape, stage.axis_names, devices[stage.first_device :])
                for stage in self.plan.stages
            )
        return self._meshes

    @property
    def mesh(self) -> Mesh:
        """The devices it runs on. Raises `InputError` for a pipeline, which has `meshes`."""
        meshes = self.meshes
        if len(meshes) > 1:
            raise InputError(f"{self.__name__} runs as {len(meshes)} stages, each on a mesh of its own: see .meshes.")
        return meshes[0]

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        """Where each input lies, by path; what several stages read on the first of them."""
        if self._step:
            return self._step.shardings
        return {
            path: NamedSharding(mesh, PartitionSpec(*[axes or None for axes in dims]))
            for stage, mesh in reversed(list(zip(self.plan.stages, self.meshes, strict=True)))
            for path, dims in stage.shardings.items()
        }

    def prepare(self, *args: Any, **kwargs: Any) -> ParallelStep | PipelineStep:
        """Trace the step for these arguments (arrays or shapes) without running it; a call does so by itself."""
        with self._lock:
            if self._step is None:
                self._step = self._prepare(args, kwargs)
        return self._step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step; see `ParallelStep`."""
        return self.prepare(*args, **kwargs)(*args, **kwargs)

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make the state, each part on the devices that hold it; see `ParallelStep.init`."""
        if spans_processes([device for mesh in self.meshes for device in mesh.devices.flat]):
            agree(plan_lines(self.plan))
        return init_state(self._fn, self.plan.inputs, places_of(self.shardings), init_fn, args, kwargs)

    def check(self, *args: Any, **kwargs: Any) -> StepCheck:
        """Compare one step with the plain step; see `ParallelStep.check`."""
        return self.prepare(*args, **kwargs).check(*args, **kwargs)

    def place(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The arguments where the step wants them; see `ParallelStep.place`."""
        self.prepare(*args, **kwargs)
        return self._whole("place()").place(*args, **kwargs)

    def stats(self) -> Stats | PipelineStats:
        """Figures of the compiled program. Raises `InputError` before the first call or `prepare`."""
        return self._ready("stats()").stats()

    def trace(self, *args: Any, **kwargs: Any) -> Trace:
        """One step of a pipeline, timed program by program; see `PipelineStep.trace`.

        Raises:
            InputError: The plan is no pipeline: its step is one program.
        """
        step = self.prepare(*args, **kwargs)
        if not isinstance(step, PipelineStep):
            raise InputError(
                f"{self.__name__}.trace() times the programs of a pipeline, and this plan ({step.plan.method}) has one "
                "program alone. Use jax.profiler.trace for it."
            )
        return step.trace(*args, **kwargs)

    def local_part(self, batch: Any, argument: str | None = None) -> Any:
        """This process's part of a batch; see `ParallelStep.local_part`."""
        return self._whole("local_part()").local_part(batch, argument)

    def as_text(self) -> str:
        """The optimized program, as the compiler prints it."""
        return self._whole("as_text()").as_text()

    def lower(self) -> Any:
        """The program before optimization; see `ParallelStep.lower`."""
        return self._whole("lower()").lower()

    def _whole(self, what: str) -> ParallelStep:
        step = self._ready(what)
        if not isinstance(step, ParallelStep):
            raise InputError(f"{self.__name__}.{what} is not there for a pipeline, which has several programs.")
        return step

    def _ready(self, what: str) -> ParallelStep | PipelineStep:
        if self._step is None:
            raise InputError(
                f"{self.__name__}.{what} needs the traced step. Call the step once, or step.prepare(...) with arrays or "
                "shapes of its arguments."
            )
        return self._step
