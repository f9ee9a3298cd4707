"""The log of a training run: a line of JSON for each interval, and TensorBoard where it is
installed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..core import AliquotWarning, InputError, shortened, write_atomic
from ..plans import Plan, mfu, plan_devices

METRICS_FILE = "metrics.jsonl"
# Their seconds are those of no step.
_ASIDE = ("checkpoint", "evaluation", "compilation")
# So many steps behind a compilation may be given to the devices without waiting for any.
_FILL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interval:
    """The steps of one line, whose metrics may still be computed; `fills` if all of them were given
    to idle devices, so that their time is no measure.
    """

    step: int
    metrics: Sequence[Mapping[str, Any]]
    wall_s: float
    parts_s: Mapping[str, float]
    fills: bool


class MetricsLog:
    """Metrics of a training run, one line for every few steps.

    The numbers of an interval are read when the next one has ended, so that reading them does not
    hold up the devices. Lines hold

    * `step` (counted from 1), `loss`, `grad_norm`, `learning_rate` and whatever else the step
      returns, of the last step of the interval; `mean_loss` of all;
    * `step_s`, seconds of a step without compilation, evaluation and checkpoints (none for the
      first two behind a compilation if these are lines of their own), beside
      `predicted_step_s`; `tokens_per_s` or `images_per_s`, `tflops_per_s_per_device` and `mfu`;
    * `data_s`, seconds that the loop waited for a batch, and their share `data_share`;
      `checkpoint_s` in the whole interval;
    * `memory_bytes`, the most that a device of this process has used so far, where it says so,
      beside `predicted_memory_bytes` and what else `note` was given.

    A line of an evaluation holds `step` and `validation_loss`. Steps of lines never fall. Only
    process 0 writes.

    Args:
        folder: of the run, which is made if it is missing; None to write nothing.
        plan: that the step follows, for what is predicted.
        tokens_per_step, images_per_step: of the global batch; 0 where it has none.
        every: steps of an interval.
        done: steps that were done before; later lines of an earlier attempt are removed.
        constants: figures that are alike in all lines.
        report: called with each line.
        hook: called with each line in process 0, to send it elsewhere. If it raises, a warning
            names the error, and the run goes on without it.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        plan: Plan | None = None,
        tokens_per_step: int = 0,
        images_per_step: int = 0,
        every: int = 10,
        done: int = 0,
        constants: Mapping[str, float] | None = None,
        report: Callable[[Mapping[str, Any]], None] | None = None,
        hook: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        if every < 1:
            raise InputError(f"A log needs every to be at least 1, got {every}.")
        self._plan, self._every = plan, every
        self._examples = {"tokens_per_s": tokens_per_step, "images_per_s": images_per_step}
        self._constants, self._report = dict(constants or {}), report
        self._hook = hook if hook is not None and _is_first_process() else None
        self._losses: list[float] = []
        self._rows: list[dict[str, Any]] = []
        self._metrics: list[Mapping[str, Any]] = []
        self._waiting: _Interval | None = None
        self._parts_s: dict[str, float] = {}
        self._since_compiled = math.inf
        self._since = self._began = time.perf_counter()
        self._file: TextIO | None = None
        self._board: Any = None
        if folder is not None and _is_first_process():
            path = Path(folder) / METRICS_FILE
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"MetricsLog cannot write into {str(folder)!r}: {error.strerror or error}."
                ) from error
            # Leave only the lines of steps up to a number: later ones are done again.
            rows = read_metrics(path.parent)
            kept = [row for row in rows if row.get("step", 0) <= done]
            if path.exists():
                write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
            self._file = path.open("a", encoding="utf-8")
            self._board = _board(Path(folder), done)

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of each step whose metrics were read."""
        return tuple(self._losses)

    @property
    def rows(self) -> tuple[Mapping[str, Any], ...]:
        """The lines so far."""
        return tuple(self._rows)

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Count the time within as "data", or as "checkpoint", "evaluation" or "compilation", which
        are no part of a step.
        """
        started = time.perf_counter()
        try:
            yield
        finally:
            passed_s = time.perf_counter() - started
            self._parts_s[what] = self._parts_s.get(what, 0.0) + passed_s

    def note(self, **figures: float) -> None:
        """Figures that are alike in all later lines, such as `compiled_memory_bytes`."""
        self._constants |= figures

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note the metrics of a step, counted from 1, as the step returned them."""
        self._metrics.append(metrics)
        if step % self._every == 0:
            self._end(step)

    def validated(self, step: int, loss: float) -> None:
        """Write the loss on validation data after a step, behind the lines of steps before it: the
        evaluation has waited for them.
        """
        self._write_waiting()
        self._write({"step": step, "validation_loss": loss})

    def close(self, step: int | None = None) -> None:
        """Write what is left, up to the last step."""
        if self._metrics and step is not None:
            self._end(step)
        self._write_waiting()
        for stream in (self._file, self._board):
            if stream is not None:
                stream.close()
        self._file = self._board = None

    def _end(self, step: int) -> None:
        now = time.perf_counter()
        if "compilation" in self._parts_s:
            self._since_compiled = -1
        self._since_compiled += len(self._metrics)
        ended = _Interval(
            step=step,
            metrics=self._metrics,
            wall_s=now - self._since,
            parts_s=self._parts_s,
            fills=self._every == 1 and self._since_compiled <= _FILL,
        )
        self._metrics, self._parts_s, self._since = [], {}, now
        self._write_waiting()
        self._waiting = ended

    def _write_waiting(self) -> None:
        done, self._waiting = self._waiting, None
        if done is None:
            return
        losses = [float(metrics["loss"]) for metrics in done.metrics]
        self._losses += losses
        row: dict[str, Any] = {"step": done.step, **self._constants}
        row |= {name: float(value) for name, value in done.metrics[-1].items()}
        row["mean_loss"] = math.fsum(losses) / len(losses)
        row |= self._speed(done)
        row["elapsed_s"] = time.perf_counter() - self._began
        self._write(row)

    def _speed(self, done: _Interval) -> dict[str, Any]:
        import jax

        # A first step is no measure: it compiles. Its time stands apart.
        compiled = "compilation" in done.parts_s
        count = len(done.metrics) - compiled
        aside_s = sum(done.parts_s.get(what, 0.0) for what in _ASIDE)
        data_s = done.parts_s.get("data", 0.0)
        found: dict[str, Any] = {}
        if count and not done.fills:
            loop_s = max(done.wall_s - aside_s, 1e-9)
            step_s = loop_s / count
            found = {"step_s": step_s, "data_s": data_s, "data_share": min(data_s / loop_s, 1.0)}
            found |= {name: count / step_s for name, count in self._examples.items() if count}
            found |= self._of_plan(step_s)
        for what in _ASIDE:
            if what in done.parts_s:
                found[f"{what}_s"] = done.parts_s[what]
        peaks = []
        for device in jax.local_devices():
            stats = device.memory_stats() or {}
            # Not all devices say what they have used.
            if "peak_bytes_in_use" in stats:
                peaks.append(stats["peak_bytes_in_use"])
        if peaks:
            found["memory_bytes"] = max(peaks)
        return found

    def _of_plan(self, step_s: float) -> dict[str, Any]:
        """What the plan predicts, and the measured share of the devices' peak."""
        if self._plan is None:
            return {}
        predicted = self._plan.prediction
        found: dict[str, Any] = {
            "predicted_step_s": predicted.step_time_s,
            "predicted_memory_bytes": predicted.peak_memory_bytes,
        }
        share, devices = mfu(self._plan), plan_devices(self._plan)
        if share is not None and devices and self._plan.model.flops_per_step:
            flops_per_s = self._plan.model.flops_per_step / step_s
            found["tflops_per_s_per_device"] = flops_per_s / devices / 1e12
            found["mfu"] = share * predicted.step_time_s / step_s
        return found

    def _write(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if self._file is not None:
            self._file.write(json.dumps(_plain(row)) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in row.items():
                if name != "step":
                    self._board.add_scalar(name, value, row["step"])
        if self._report is not None:
            self._report(row)
        if self._hook is not None:
            try:
                self._hook(_plain(row))
            except Exception as error:
                name = getattr(self._hook, "__qualname__", repr(self._hook))
                self._hook = None
                said = f"{type(error).__name__}: {error}"
                warnings.warn(
                    f"the hook {name} failed at step {row['step']} ({shortened(said, 200)}); the"
                    " run goes on without it.",
                    AliquotWarning,
                    stacklevel=2,
                )


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The lines that a run has written so far. A last line that is cut off, as by a crash, is left
    out.
    """
    path = Path(folder) / METRICS_FILE
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    # JSON has no numbers that are not finite.
    found = {}
    for name, value in row.items():
        found[name] = str(value) if isinstance(value, float) and not math.isfinite(value) else value
    return found


def _board(folder: Path, done: int) -> Any:
    """A writer for TensorBoard; None where it is not installed."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(os.fspath(folder / "tensorboard"), purge_step=done + 1 if done else None)


def _is_first_process() -> bool:
    import jax

    return bool(jax.process_index() == 0)
