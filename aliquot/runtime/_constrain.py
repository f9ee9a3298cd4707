"""The user's step with a plan's splits written into it, for `jax.jit` in a loop of one's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..core import InputError
from ..cost import PlannedStep
from ..graph import plain_context
from ..plans import Plan
from .spmd import build_plan_program, make_mesh


def constrain(
    fn: Callable[..., Any],
    plan: Plan,
    prepare: Callable[[tuple[Any, ...], dict[str, Any]], PlannedStep],
    devices: Sequence[Any] | None = None,
) -> Callable[..., Any]:
    """The step with the plan's splits in it; `prepare` applies the plan, given the arguments."""
    if plan.is_pipeline:
        raise InputError(
            f"the plan is a pipeline of {len(plan.stages)} stages, which is no function for"
            " jax.jit: its stages are programs of their own. Run it with aliquot.parallelize(step,"
            " plan), or plan one program: method=aliquot.WholeProgram()."
        )

    @functools.wraps(fn)
    def constrained(*args: Any, **kwargs: Any) -> Any:
        with plain_context():
            step = prepare(args, kwargs)
            (stage,), graph = step.plan.stages, step.graph
            mesh = make_mesh(stage.mesh_shape, stage.axis_names, devices)
            run = build_plan_program(step, mesh).jitted
            results = run(*graph.calling.flatten(args, kwargs).leaves)
        return graph.calling.finish(list(results), args, kwargs)

    return constrained
