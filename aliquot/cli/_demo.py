"""`aliquot demo`: an ordinary step planned, run and compared with one device, on any laptop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..core import InputError, format_count
from ._devices import use_virtual_devices
from ._groups import option
from ._interrupts import INTERRUPTED
from ._next_steps import next_steps
from ._options import Json, check_destination
from ._progress import search_progress
from ._session import Session, session

if TYPE_CHECKING:
    from ..data import Mixture, Windows
    from ..plans import Plan
    from ..zoo import Workload
    from ._training import Run

_MODEL = "gpt-10m"
_BATCH = 8
_SEQ_LEN = 64
_LEARNING_RATE = 1e-3
_DEVICES = 8
_STEPS = 10
_SEED = 0
_TOLERANCE = 1e-4
_TAKES = "in about a minute on a laptop"


def demo(
    data: list[Path] | None = option("Your own text; by default the standard library's sources."),
    steps: int = option("How many steps to train, twice.", _STEPS),
    out: Path = option("File to write the plan to.", Path("demo-plan.json")),
    as_json: Json = False,
) -> None:
    """Plan a small GPT, train it on 8 virtual CPU devices, and compare with the same training on
    one.
    """
    with session(as_json) as say:
        if steps < 2:
            raise InputError(f"--steps must be at least 2, so that the loss can fall; got {steps}.")
        check_destination(out)
        use_virtual_devices(_DEVICES)
        say.note(f"demo: plans, trains twice and compares, {_TAKES}.")
        say.voice.doing = f"building {_MODEL}"
        from .._variants import plan_variants
        from ..cluster import Cluster
        from ..plans import brief
        from ..zoo import build, text_for, tokens_of
        from ._model import from_workload
        from ._recomputation import variants_of

        workload = build(
            _MODEL,
            _BATCH,
            overrides={"seq_len": _SEQ_LEN},
            dtype="float32",
            recompute="none",
            # A loop over the layers compiles in half of the time.
            scan=True,
            learning_rate=_LEARNING_RATE,
        )
        text = text_for(workload, tokens_of(data), seed=_SEED)
        say.show(
            f"{_MODEL}: {format_count(workload.num_parameters)} parameters, {_BATCH} sequences of"
            f" {text.facts['seq_len']} bytes a step, from"
            f" {format_count(text.facts['tokens'])} bytes of"
            f" {', '.join(map(str, data)) if data else 'the Python standard library'}\n"
        )
        with search_progress(say) as report:
            plan = plan_variants(
                variants_of(from_workload(workload)),
                cluster=Cluster.detect(),
                num_micro_batches=1,
                progress=report,
            )
        plan.save(out)
        say.show(f"{brief(plan)}\n")
        figures, many = _train_parallel(workload, plan, text, steps, say)
        _stop_if_interrupted(many, steps, say)
        one = _train_alone(workload, text, steps, say)
        _stop_if_interrupted(one, steps, say)
        _conclude(many, one, plan, out, figures, say)


def _train_parallel(
    workload: Workload, plan: Plan, text: Windows | Mixture, steps: int, say: Session
) -> tuple[dict[str, Any], Run]:
    import jax

    from .._api import parallelize
    from ..data import Feed
    from ..report import compared
    from ._training import Training

    say.voice.doing = "creating the state on 8 devices"
    step = parallelize(workload.train_step, plan)
    state = step.init(workload.init, jax.random.key(_SEED))
    training = Training(
        step=step,
        feed=Feed(text),
        steps=steps,
        label=f"{_DEVICES} devices",
        say=say,
        tokens_per_step=text.tokens_per_step,
    )
    done = training.run(state)
    stats = step.stats()
    return compared(plan, stats.memory, stats.collectives), done


def _train_alone(workload: Workload, text: Windows | Mixture, steps: int, say: Session) -> Run:
    """The plain step, compiled by plain `jax.jit`: nothing of this package takes part."""
    import jax

    from ..data import Feed
    from ._training import Training

    say.voice.doing = "creating the state on one device"
    state = jax.jit(workload.init)(jax.random.key(_SEED))
    step = jax.jit(workload.train_step, donate_argnums=0)
    training = Training(
        step=step,
        feed=Feed(text),
        steps=steps,
        label="1 device ",
        say=say,
        tokens_per_step=text.tokens_per_step,
    )
    return training.run(state)


def _stop_if_interrupted(done: Run, steps: int, say: Session) -> None:
    if done.ended_by:
        say.note(f"interrupted; {len(done.losses)} of {steps} steps are done.")
        raise typer.Exit(INTERRUPTED)


def _conclude(
    many: Run, one: Run, plan: Plan, out: Path, figures: dict[str, Any], say: Session
) -> None:
    from ..report import beside_measured, loss_chart

    largest = 0.0
    for loss, reference in zip(many.losses, one.losses, strict=True):
        difference = abs(loss - reference) / (abs(reference) or 1.0)
        largest = max(largest, difference if math.isfinite(difference) else math.inf)
    agree, fell = largest <= _TOLERANCE, many.losses[-1] < many.losses[0]
    say.show(
        loss_chart({f"loss on {_DEVICES} devices": many.losses, "loss on 1 device": one.losses})
    )
    say.show("")
    say.show(beside_measured(plan, many.step_time_s, figures))
    verb = "gave the same losses as" if agree else "DIFFERS from"
    say.show(
        f"  {_DEVICES} virtual devices share this machine's cores: times say little here.\n\n"
        f"An ordinary training step, split over {_DEVICES} devices, {verb} one device:"
        f" {many.losses[0]:.4f} -> {many.losses[-1]:.4f}, largest relative difference"
        f" {largest:.1e} ({_TOLERANCE:.0e} allowed).\n\n{next_steps(out)}"
    )
    say.finish(
        {
            "plan_file": str(out.resolve()),
            "method": plan.method,
            "mesh": list(plan.stages[0].mesh_shape),
            "losses": list(many.losses),
            "losses_one_device": list(one.losses),
            "max_relative_difference": largest,
            "agrees": agree,
            "predicted_step_time_s": plan.prediction.step_time_s,
            "measured_step_time_s": many.step_time_s,
            "measured_tokens_per_s": many.examples_per_s,
            "data_share": many.data_share,
            "predicted_and_compiled": figures,
        }
    )
    if not agree:
        say.note(
            "error: training on many devices and on one differ by more than rounding. Please report"
            " this."
        )
    if not fell:
        say.note("error: the loss did not fall.")
    if not (agree and fell):
        raise typer.Exit(1)
