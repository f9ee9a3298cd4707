"""`aliquot train`: plan a model of the zoo unless there is a plan, and train it on your data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import typer

from ..core import InputError, counted, format_bytes, format_count, format_seconds
from ._devices import use_devices
from ._groups import option
from ._interrupts import INTERRUPTED, TERMINATED
from ._launch_options import (
    LaunchOptions,
    has_been_restarted,
    joined,
    launch_again,
)
from ._model_options import MemoryLimit, ModelOptions, read_memory_limit
from ._optimizer_options import OptimizerOptions, RateOptions
from ._options import Json, NetworkGbps, PlannedCluster, VirtualDevices, ZooName
from ._options_file import FileOptions
from ._plan_options import MethodOptions
from ._run_options import RunOptions
from ._session import Session, session

if TYPE_CHECKING:
    from ..data import Images, Mixture, Windows
    from ..plans import Plan
    from ..zoo import Workload
    from ._training import Run

    Examples: TypeAlias = Windows | Mixture | Images


def train(
    *,
    model: ZooName,
    data: list[Path] = option(
        "A file of tokens (see aliquot data), indexed data of Megatron-LM, or files and folders"
        " of text; repeatable, and as WEIGHT:PATH a mixture. For models of images a folder of"
        " images, or arrays.",
        ...,
        metavar="[WEIGHT:]PATH",
    ),
    steps: int = option("How many steps to train.", ...),
    model_options: ModelOptions,
    method_options: MethodOptions,
    optimizer_options: OptimizerOptions,
    rate_options: RateOptions,
    file_options: FileOptions,
    run_options: RunOptions,
    launch_options: LaunchOptions,
    plan_file: Path | None = option(
        "A plan file; by default a plan is made first.", names="--plan", metavar="PLAN"
    ),
    cluster: PlannedCluster = "detect",
    network_gbps: NetworkGbps = None,
    memory_limit: MemoryLimit = None,
    devices: VirtualDevices = None,
    seed: int = option("Seed of the initial weights and of the order of the text.", 0),
    as_json: Json = False,
) -> None:
    """Train a model of the zoo on your text or images, as a plan says. A run with --out goes on
    where it stopped.
    """
    from ._model import find_function

    with session(as_json) as say:
        if steps < 1:
            raise InputError(f"--steps must be at least 1, got {steps}.")
        if seed < 0:
            raise InputError(f"--seed must not be negative, got {seed}.")
        run_options.check(steps)
        method_options.check(model_options.global_batch)
        update = optimizer_options.read() | rate_options.read(steps)
        launch_options.check(devices=devices, has_plan=plan_file is not None)
        if launch_options.starts_others:
            launch_again(launch_options, run_options.out, say)
            return
        if has_been_restarted() and (run_options.resume == "no" or run_options.resume.isdecimal()):
            # That was said of the run as it was before.
            run_options = dataclasses.replace(run_options, resume="auto")
        from ._train_plan import Wanted, check_devices, find_plan, given_plan

        with joined(launch_options):
            here = use_devices(devices)
            if run_options.log_to is not None:
                # Before the search: a name that is wrong is refused at once.
                find_function(run_options.log_to)
            if plan_file is not None:
                plan, workload = given_plan(model, plan_file, model_options, method_options, update)
                check_devices(plan, len(here))
            else:
                wanted = Wanted(
                    name=model,
                    cluster=cluster,
                    network_gbps=network_gbps,
                    model=model_options.read(update),
                    method=method_options,
                    memory_limit_bytes=read_memory_limit(memory_limit),
                )
                plan, workload = find_plan(
                    wanted,
                    run_options.out,
                    here,
                    lambda built: _examples(built, data, run_options, seed),
                    say,
                )
            texts = _examples(workload, data, run_options, seed)
            done = _train(plan, workload, texts, steps, seed, run_options, say)
            if done.ended_by:
                kept = (
                    ""
                    if run_options.out is None
                    else f" Go on with the same command ({run_options.out})."
                )
                say.note(f"interrupted; {done.done} of {steps} steps are done.{kept}")
                raise typer.Exit(TERMINATED if done.ended_by == "SIGTERM" else INTERRUPTED)


def _examples(
    workload: Workload, paths: list[Path], options: RunOptions, seed: int
) -> dict[str, Examples]:
    """The parts of the data that the run needs.

    Raises:
        InputError: a part is missing, or the data are not for this model.
    """
    from ..data import Split
    from ..zoo import images_for, text_for, tokens_of

    split = Split.read(options.split)
    if is_of_images := workload.config.examples == "images":
        if len(paths) > 1:
            raise InputError(f"--data takes one folder or file of images, got {len(paths)}.")
    else:
        tokens = tokens_of(paths)
    made: dict[str, Examples] = {}
    faults = []
    for part in ("train", *(["validation"] if options.eval_every else [])):
        try:
            made[part] = (
                images_for(workload, paths[0], seed=seed, split=split, part=part)
                if is_of_images
                else text_for(workload, tokens, seed=seed, split=split, part=part)
            )
        except InputError as error:
            faults.append(str(error))
    if faults:
        raise InputError("\n  ".join(dict.fromkeys(faults)))
    return made


def _train(
    plan: Plan,
    workload: Workload,
    texts: dict[str, Examples],
    steps: int,
    seed: int,
    options: RunOptions,
    say: Session,
) -> Run:
    """Go on from the newest checkpoint, or begin, train to the end, and say how it went."""
    import jax

    from .._api import parallelize
    from ..data import Feed
    from ._model import find_function
    from ._resume import Resumed, begin, open_checkpoints
    from ._training import Training

    text = texts["train"]
    say.voice.doing = "creating or reading the state"
    step = parallelize(workload.train_step, plan)
    with open_checkpoints(options, say) as checkpoints:
        begun: Resumed = begin(checkpoints, step, workload, text, options, seed, say)
        if begun.done >= steps:
            say.note(f"{options.out} holds all {steps} steps; nothing is left to do.")
        if options.out is not None and jax.process_index() == 0:
            plan.save(options.out / "plan.json")
        rate = workload.settings["learning_rate"]
        rows = None
        if jax.process_count() > 1:
            rows = step.prepare(workload.state, workload.batch).local_rows()
        feed = Feed(text, step=begun.done, position=begun.position, rows=rows)

        def save(number: int, state: Any) -> None:
            assert checkpoints is not None
            meta = begun.meta | {"position": feed.position}
            checkpoints.save(step, state, number, meta=meta, force=True)

        training = Training(
            step=step,
            feed=feed,
            steps=steps,
            label=workload.config.name,
            say=say,
            tokens_per_step=text.tokens_per_step,
            images_per_step=0 if text.tokens_per_step else text.batch,
            log={
                "folder": options.out,
                "plan": plan,
                "every": options.log_every or max(1, min(10, steps // 10)),
                "hook": find_function(options.log_to) if options.log_to else None,
                "constants": {} if isinstance(rate, dict) else {"learning_rate": rate},
            },
            evaluate=_evaluation(step, workload, texts, begun.state, options),
            eval_every=options.eval_every or 0,
            save=None if checkpoints is None else save,
            save_every=options.save_every,
        )
        done = training.run(begun.state)
        # A last checkpoint that cannot be written is an error, which comes behind the summary.
        _tell(done, plan, options, say)
    return done


def _evaluation(
    step: Any, workload: Workload, texts: dict[str, Examples], state: Any, options: RunOptions
) -> Any:
    """The mean loss of the first batches for validation, alike whenever it is asked; None if there
    are none.
    """
    if "validation" not in texts:
        return None
    from .._evaluation import evaluator

    text = texts["validation"]
    most = min(options.eval_steps, max(1, text.num_windows // text.batch))
    evaluate = evaluator(step, workload.evaluate, workload.state, workload.batch)

    def mean_loss(state: Any) -> float:
        losses = [evaluate(state, text.batch_at(k))["loss"] for k in range(most)]
        return sum(map(float, losses)) / most

    return mean_loss


def _tell(done: Run, plan: Plan, options: RunOptions, say: Session) -> None:
    """The summary: loss, speed, and what was predicted, with the curve of the loss."""
    from ..plans import plan_devices
    from ..report import loss_chart, read_metrics

    rows = list(done.rows) if options.out is None else read_metrics(options.out)
    compiled = [row["compiled_memory_bytes"] for row in rows if "compiled_memory_bytes" in row]
    curve = [float(row["loss"]) for row in rows if "loss" in row]
    if len(curve) > 1:
        say.show(loss_chart({"loss": curve}, steps=max(row["step"] for row in rows)))
    if done.losses:
        # The first step compiles, so that one step alone has no time.
        speed, measured = "", "too few steps to measure it here"
        if done.step_time_s:
            devices = counted(plan_devices(plan), "device")
            speed = (
                f", {format_count(round(done.examples_per_s))} {done.examples}/s on {devices}"
                " together (measured)"
            )
            times = [row["step_s"] for row in done.rows if "step_s" in row]
            measured = (
                f"{format_seconds(done.step_time_s)} measured here without compilation (median of"
                f" {counted(len(times), 'line')} of the log, {format_seconds(min(times))} to"
                f" {format_seconds(max(times))}), {done.data_share:.1%} of it waiting for data"
            )
        lines = [
            f"{counted(len(done.losses), 'step')}: loss {done.losses[0]:.4f} ->"
            f" {done.losses[-1]:.4f}{speed}",
            f"step time: {format_seconds(plan.prediction.step_time_s)} predicted for"
            f" {plan.cluster.get('name')}, {measured}",
        ]
        if done.validation_losses:
            number, loss = list(done.validation_losses.items())[-1]
            lines.append(f"validation loss: {loss:.4f} after step {number}")
        if compiled:
            lines.append(
                f"memory: {format_bytes(plan.prediction.peak_memory_bytes)} on each device"
                f" predicted, {format_bytes(compiled[-1])} compiled"
            )
        if options.out is not None:
            lines.append(f"written to {options.out}: metrics.jsonl, checkpoints, plan.json")
        say.show("\n".join(lines))
    else:
        say.show("No step was done.")
    say.finish(
        {
            "steps_done": done.done,
            "interrupted": bool(done.ended_by),
            "losses": list(done.losses),
            "validation_losses": done.validation_losses,
            # Not known after one step, which compiles.
            f"measured_{done.examples}_per_s": done.examples_per_s or None,
            "measured_step_time_s": done.step_time_s or None,
            "predicted_step_time_s": plan.prediction.step_time_s,
            "data_share": done.data_share,
            "run": None if options.out is None else str(options.out.resolve()),
        }
    )
