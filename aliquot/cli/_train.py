"""`aliquot train`: run a plan on text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import InputError, PlanMismatchError, format_count, format_seconds
from ._devices import use_seen_devices, use_virtual_devices
from ._interrupts import INTERRUPTED
from ._options import Json, read_plan
from ._session import session

if TYPE_CHECKING:
    from ..plans import Plan
    from ..zoo import Workload
    from ._training import Run


def train(
    model: Annotated[str, typer.Argument(help="A name from the zoo.", show_default=False)],
    data: Annotated[
        list[Path], typer.Option(help="A file or folder of text; repeatable.", show_default=False)
    ],
    plan_file: Annotated[
        Path, typer.Option("--plan", metavar="PLAN", help="A plan file.", show_default=False)
    ],
    steps: Annotated[int, typer.Option(help="How many steps to train.", show_default=False)],
    devices: Annotated[
        int | None, typer.Option(help="Run on this many virtual CPU devices.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the initial weights and of the order of the text.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Train a model of the zoo on the bytes of your files, as a plan says."""
    with session(as_json) as say:
        if steps < 1:
            raise InputError(f"--steps must be at least 1, got {steps}.")
        if seed < 0:
            raise InputError(f"--seed must not be negative, got {seed}.")
        plan = read_plan(plan_file)
        if devices is not None:
            _check_devices(plan, devices)
            use_virtual_devices(devices)
        else:
            _check_devices(plan, len(use_seen_devices()))
        workload = _workload(model, plan)
        from ..zoo import text_for, tokens_of

        text = text_for(workload, tokens_of(data), seed=seed)
        if model != plan.model.name:
            _check_interface(workload, plan)
        done = _run(workload, plan, text, steps, seed)
        say.show(_summary(done, plan))
        say.finish(_data(done, plan))
        if done.interrupted:
            say.note(f"interrupted; {len(done.losses)} of {steps} steps are done.")
            raise typer.Exit(INTERRUPTED)


def _check_devices(plan: Plan, num_devices: int) -> None:
    from ..plans import idle_devices, plan_devices

    needed = plan_devices(plan)
    if num_devices not in (needed, needed + idle_devices(plan)):
        raise PlanMismatchError(
            f"it is for {needed} devices ({plan.cluster.get('name')}), and there are {num_devices}",
            asked="the plan does not fit these devices",
            advice=(
                f"Add --devices {needed} for virtual CPU devices, or make a plan with --cluster"
                " detect."
            ),
        )


def _workload(name: str, plan: Plan) -> Workload:
    """The model with the settings that the plan was made with."""
    from ._model import named_model, workload_of

    if plan.model.kind != "zoo":
        raise InputError(
            f"this plan is for {plan.model.name or 'a function'}, which is not of the zoo, so its"
            " first state and data are not known here. Run it from Python:"
            " aliquot.parallelize(train_step, plan)."
        )
    return workload_of(plan.model if name == plan.model.name else named_model(plan.model, name))


def _check_interface(workload: Workload, plan: Plan) -> None:
    """Another model than the plan's must have the same inputs."""
    from ..graph import capture
    from ..plans import ArrayInterface, require_match

    graph = capture(workload.train_step, workload.state, workload.batch)
    inputs = [
        ArrayInterface(
            path=item.path,
            shape=graph.values[item.value].shape,
            dtype=graph.values[item.value].dtype,
        )
        for item in graph.inputs
    ]
    require_match(
        plan,
        inputs=inputs,
        asked=f"the plan is for {plan.model.name}, not for {workload.config.name}",
    )


def _run(workload: Workload, plan: Plan, text: Any, steps: int, seed: int) -> Run:
    import jax

    from .._api import parallelize
    from ._training import run

    step = parallelize(workload.train_step, plan)
    state = step.init(workload.init, jax.random.key(seed))
    return run(step, state, text, steps, label=workload.config.name)


def _summary(done: Run, plan: Plan) -> str:
    if not done.losses:
        return "No step was done."
    return (
        f"{len(done.losses)} steps: loss {done.losses[0]:.4f} -> {done.losses[-1]:.4f},"
        f" {format_count(round(done.tokens_per_s))} tokens/s (measured)\nstep time:"
        f" {format_seconds(plan.prediction.step_time_s)} predicted for {plan.cluster.get('name')},"
        f" {format_seconds(done.step_time_s)} measured here (median)"
    )


def _data(done: Run, plan: Plan) -> dict[str, Any]:
    return {
        "steps_done": len(done.losses),
        "interrupted": done.interrupted,
        "losses": list(done.losses),
        "tokens_per_s_measured": done.tokens_per_s,
        "step_time_s_measured": done.step_time_s,
        "step_time_s_predicted": plan.prediction.step_time_s,
    }
