"""A training loop with a log, evaluation and checkpoints, which signals end between two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..data import Feed
from ..report import MetricsLog
from ._interrupts import ending_between_steps
from ._progress import training_progress
from ._session import Session

# So many steps are given to the devices before the first of them has ended.
_AHEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Result of a training run.

    Attributes:
        losses: of each step of this attempt.
        rows: the lines of its log.
        done: steps that are done, with those of earlier attempts.
        tokens_per_step: of the global batch; 0 for images.
        images_per_step: of the global batch; 0 for text.
        ended_by: the signal that ended it before its time, such as "Ctrl-C"; empty if none did.
    """

    losses: tuple[float, ...]
    rows: tuple[Mapping[str, Any], ...]
    done: int
    tokens_per_step: int
    images_per_step: int
    ended_by: str

    @property
    def step_time_s(self) -> float:
        """Median measured time of a step, without the first; 0 if there is none."""
        times = sorted(row["step_s"] for row in self.rows if "step_s" in row)
        return times[len(times) // 2] if times else 0.0

    @property
    def examples(self) -> str:
        """What is counted in a second: "tokens" or "images"."""
        return "images" if self.images_per_step else "tokens"

    @property
    def examples_per_s(self) -> float:
        """Tokens or images per second over all steps but the first, which compiles."""
        times: list[float] = [row["step_s"] for row in self.rows if "step_s" in row]
        return (self.images_per_step or self.tokens_per_step) * len(times) / sum(times or [1.0])

    @property
    def data_share(self) -> float:
        """Share of the time that was spent waiting for batches."""
        waited = [
            (row["data_share"] * row["step_s"], row["step_s"])
            for row in self.rows
            if "step_s" in row
        ]
        return sum(w for w, _ in waited) / sum(s for _, s in waited) if waited else 0.0

    @property
    def validation_losses(self) -> dict[int, float]:
        """The loss on validation data, by the number of steps before it."""
        return {
            row["step"]: row["validation_loss"] for row in self.rows if "validation_loss" in row
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training loop.

    Attributes:
        step: `step(state, batch)` returns the new state and metrics with a `loss`.
        feed: the batches, from its position on.
        steps: how many are done at the end, with those before.
        label: what progress calls the run.
        say: the session, which says what takes long.
        tokens_per_step, images_per_step: of the global batch, one of them 0.
        log: further arguments of `MetricsLog`.
        evaluate: the loss of a state on other data; called every `eval_every` steps and at the end.
        save: writes a checkpoint of `(steps done, state)`; called every `save_every` steps, and at
            the end, however that comes.
    """

    step: Callable[..., Any]
    feed: Feed
    steps: int
    label: str
    say: Session
    tokens_per_step: int
    images_per_step: int = 0
    log: Mapping[str, Any] | None = None
    evaluate: Callable[[Any], float] | None = None
    eval_every: int = 0
    save: Callable[[int, Any], None] | None = None
    save_every: int = 0

    def run(self, state: Any) -> Run:
        """Train from `state` until all steps are done."""
        import jax

        from ..runtime import Step

        step, feed, steps = self.step, self.feed, self.steps
        first = feed.step
        local_part = step.local_part if isinstance(step, Step) and jax.process_count() > 1 else None
        waiting: deque[Any] = deque()
        examples = "images" if self.images_per_step else "tokens"
        with (
            training_progress(self.label, steps, self.say, examples) as show,
            ending_between_steps() as ending,
        ):

            def report(row: Mapping[str, Any]) -> None:
                if "loss" in row:
                    show(row["step"], row["loss"], row.get(f"{examples}_per_s", 0.0))

            record = MetricsLog(
                tokens_per_step=self.tokens_per_step,
                images_per_step=self.images_per_step,
                **{"every": 1, "done": first, **(self.log or {})},
                report=report,
            )
            try:
                while feed.step < steps:
                    number = feed.step + 1
                    with record.timed("data"):
                        batch = next(feed)
                        if local_part is not None:
                            batch = local_part(batch)
                    if number == first + 1:
                        show(0, 0.0, 0.0)
                        with record.timed("compilation"):
                            state, metrics = step(state, batch)
                            jax.block_until_ready(metrics)
                            if isinstance(step, Step):
                                record.note(compiled_memory_bytes=step.stats().peak_bytes)
                    else:
                        state, metrics = step(state, batch)
                    waiting.append(metrics)
                    if len(waiting) > _AHEAD:
                        jax.block_until_ready(waiting.popleft())
                    record.add(number, metrics)
                    if self.evaluate is not None and (
                        number % self.eval_every == 0 or number == steps
                    ):
                        jax.block_until_ready(metrics)
                        with record.timed("evaluation"):
                            loss = self.evaluate(state)
                        record.validated(number, loss)
                    ends = number == steps or ending.asked(number)
                    if self.save is not None and (number % self.save_every == 0 or ends):
                        jax.block_until_ready(metrics)
                        with record.timed("checkpoint"):
                            self.save(number, state)
                    if ends:
                        break
            except KeyboardInterrupt:
                # Within a step, whose state may be gone.
                ending.reason = "Ctrl-C"
            record.close(feed.step)
        done = first + len(record.losses)
        return Run(
            losses=record.losses,
            rows=record.rows,
            done=done,
            tokens_per_step=self.tokens_per_step,
            images_per_step=self.images_per_step,
            ended_by=ending.reason if done < steps else "",
        )
