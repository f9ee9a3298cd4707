"""The loss on other data, computed where the state of a training step lies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._api import parallelize, plan
from .cluster import Cluster
from .core import InputError
from .graph import calling_of
from .planners import ManualParallel
from .plans import partition_specs

if TYPE_CHECKING:
    from .runtime import Step


def evaluator(
    step: Step, evaluate: Callable[[Any, Any], Mapping[str, Any]], state: Any, batch: Any
) -> Callable[[Any, Any], Mapping[str, Any]]:
    """A function `(state, batch) -> metrics` that computes `evaluate` under a training step's plan.
    The state stays where it is, and usable.

    Under a plan of one program this is a program of its own, forward only, in as many micro-batches
    as the step. In a pipeline it is a training step whose new state is dropped, so its devices need
    memory for a second state, and its metrics must be among those of the step.

    Args:
        step: as `parallelize` returned it, with a plan.
        evaluate: such as `Workload.evaluate`.
        state: as the step takes it, or a tuple of several in the order of the step's parameters;
            shapes are enough.
        batch: what `evaluate` takes beside the state. Where it is the batch of the step, it is
            split as there.

    Raises:
        InputError: the plan is a pipeline, and the step does not return these metrics; the
            function that is returned raises it.
    """
    if step.plan.is_pipeline:
        return _last_metrics(step, evaluate, state, batch)
    (stage,) = step.plan.stages
    made = plan(
        evaluate,
        state,
        batch,
        cluster=Cluster.from_dict(step.plan.cluster),
        method=ManualParallel(
            specs=_specs(step, evaluate, state, batch),
            mesh_shape=stage.mesh_shape,
            axis_names=stage.axis_names,
            # Arrays that only the evaluation combines element by element need to be split alike.
            where_possible=True,
        ),
        num_micro_batches=step.plan.num_micro_batches,
    )
    forward: Callable[[Any, Any], Mapping[str, Any]] = parallelize(
        evaluate, made, devices=list(step.mesh.devices.flat)
    )
    return forward


def _specs(
    step: Step, evaluate: Callable[[Any, Any], Any], state: Any, batch: Any
) -> dict[str, Sequence[Any]]:
    """For each array of `evaluate` that the step takes too, how the step's plan splits it; the
    largest first.
    """
    from .runtime import argument_of

    call = calling_of(evaluate, (state, batch), {})
    given = {path: x.shape for path, x in zip(call.call.paths, call.call.leaves, strict=True)}
    # An argument of the step is a parameter of `evaluate`, or has a place in its tuple.
    places = {}
    for parameter, arguments in zip(call.names, _arguments(step), strict=True):
        for k, name in enumerate(arguments):
            places[name] = f"{parameter}[{k}]" if len(arguments) > 1 else parameter
    found: dict[str, Sequence[Any]] = {}
    specs = partition_specs(step.plan)
    for item in sorted(step.plan.inputs, key=lambda item: -math.prod(item.shape)):
        name = argument_of(item.path)
        path = places.get(name, "") + item.path.removeprefix(name)
        if given.get(path) == item.shape:
            found[path] = tuple(specs[item.path])
    return found


def _arguments(step: Step) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the step's arguments that are state, and of those that hold a batch."""
    from .runtime import argument_of

    found = dict.fromkeys(argument_of(i.path) for i in step.plan.inputs if i.role == "batch")
    of_state = step.state_arguments
    return of_state, tuple(name for name in found if name not in of_state)


def _last_metrics(
    step: Step, evaluate: Callable[[Any, Any], Any], state: Any, batch: Any
) -> Callable[[Any, Any], Mapping[str, Any]]:
    """The metrics of a training step that keeps the old state, those alone that `evaluate` has."""
    import jax

    call = calling_of(evaluate, (state, batch), {})
    jax.eval_shape(call.run, call.call.leaves)
    wanted = list(jax.tree.unflatten(call.out_tree, [None] * call.out_tree.num_leaves))
    of_state, of_batch = _arguments(step)

    def metrics(state: Any, batch: Any) -> Mapping[str, Any]:
        states = state if len(of_state) > 1 else (state,)
        batches = batch if len(of_batch) > 1 else (batch,)
        result = step.dry_run(*states, *batches)
        last = result[-1] if isinstance(result, tuple) else None
        found = last if isinstance(last, Mapping) else {}
        missing = [name for name in wanted if name not in found]
        if missing:
            raise InputError(
                f"the plan of {step.__name__} is a pipeline, where an evaluation is a training step"
                f" whose new state is dropped, and that step does not return {', '.join(missing)}."
                " Return it from the step among its metrics, or evaluate under a plan of one"
                " program: method=WholeProgram()."
            )
        return {name: found[name] for name in wanted}

    return metrics
