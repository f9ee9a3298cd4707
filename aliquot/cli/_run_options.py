"""Options of a training run: where it is kept, and what is done how often."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..core import InputError
from ._groups import option


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run besides its step and its data."""

    title: ClassVar[str] = "Run"

    out: Path | None = option(
        "Folder of the run: log, plan and checkpoints, from which it goes on by itself. Without"
        " it nothing is written.",
        metavar="RUN",
    )
    resume: str = option(
        "auto: from the newest checkpoint in RUN, if there is one. no: RUN must have none. STEP:"
        " from that one; later ones are removed. PATH: from another run's newest.",
        "auto",
        metavar="auto|no|STEP|PATH",
    )
    init_from: Path | None = option(
        "Begin with the weights of a checkpoint: a run, a folder of checkpoints, or one of"
        " Hugging Face with config.json and *.safetensors.",
        metavar="PATH",
    )
    save_every: int = option("Steps between two checkpoints in RUN.", 500, metavar="N")
    keep: int = option("Checkpoints to keep, the newest.", 3, metavar="N")
    log_every: int | None = option("Steps of a line of the log; by default up to 10.", metavar="N")
    log_to: str | None = option(
        "Call this function with each line of the log, a dict, such as to send it to W&B.",
        metavar="MODULE:FUNCTION",
    )
    eval_every: int | None = option(
        "Steps between two evaluations on the part of the text for validation; by default none.",
        metavar="N",
    )
    eval_steps: int = option(
        "Batches of an evaluation; by default 10, if there are.", 10, metavar="N"
    )
    split: str = option(
        "Shares of the text for training, validation and test; 1 to train on everything.",
        "949,50,1",
        metavar="SHARES",
    )

    def check(self, steps: int) -> None:
        """Check what can be checked before JAX is imported.

        Raises:
            InputError: everything that is out of range, or does not go together.
        """
        counts = {
            "--save-every": self.save_every,
            "--keep": self.keep,
            "--log-every": self.log_every,
            "--eval-every": self.eval_every,
            "--eval-steps": self.eval_steps,
        }
        faults = [
            f"{option} must be at least 1, got {count}"
            for option, count in counts.items()
            if count is not None and count < 1
        ]
        is_step = self.resume.isdecimal()
        if self.out is None and (is_step or self.resume == "no"):
            faults.append(f"--resume {self.resume} is about the checkpoints in RUN: add --out RUN")
        if self.init_from is not None and self.resume not in ("auto", "no"):
            faults.append(
                "--init-from begins a run and --resume goes on with one: leave one of them out"
            )
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            faults.append(f"--out {str(self.out)!r} is a file: name a folder for the run")
        if faults:
            raise InputError(f"{'; '.join(faults)}.")
