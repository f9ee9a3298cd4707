"""Options of the optimizer, alike in verbs that plan and that train, and of its learning rate, on
which no plan depends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..core import InputError, shortened
from ._groups import option


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """The options that say how a model of the zoo is updated. They are part of its step, and so of
    a plan.
    """

    title: ClassVar[str] = "Optimizer"

    optimizer: str | None = option("adamw, adafactor or sgd; by default adamw.")
    weight_decay: float | None = option("By default 0.1 for adamw, and none for other optimizers.")
    momentum: float | None = option("Momentum of sgd.")
    clip_grad: float | None = option(
        "Scale gradients down to this norm, over all arrays, where it is larger."
    )
    grad_norm: bool = option("Log the norm of the gradients also without --clip-grad.", False)

    def read(self) -> dict[str, Any]:
        """The arguments of `aliquot.zoo.build` that are given."""
        given: dict[str, Any] = {
            "optimizer": self.optimizer,
            "weight_decay": self.weight_decay,
            "momentum": self.momentum,
            "clip_norm": self.clip_grad,
            "grad_norm": self.grad_norm or None,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class RateOptions:
    """The learning rate of a run and its schedule. A plan serves every one."""

    title: ClassVar[str] = "Optimizer"

    lr: float | None = option("Learning rate, at its peak; by default 3e-4.")
    min_lr: float | None = option("Learning rate in the end; by default 0.")
    warmup_steps: str | None = option(
        "Steps in which the learning rate rises from 0, or their share of all (or of"
        " --decay-steps), below 1.",
        metavar="N|FRACTION",
    )
    decay: str | None = option(
        "How the learning rate falls from its peak to --min-lr; by default constant.",
        metavar="cosine|linear|constant",
    )
    decay_steps: int | None = option(
        "Steps from the first to the end of the decay, behind which the learning rate is"
        " --min-lr; by default all.",
        metavar="N",
    )

    def read(self, steps: int) -> dict[str, Any]:
        """The argument of `aliquot.zoo.build` for the learning rate, if one is given.

        Args:
            steps: of the run, on which a schedule depends.

        Raises:
            InputError: all that is wrong with a schedule.
        """
        is_constant = self.decay in (None, "constant")
        faults = []
        if self.min_lr is not None and is_constant:
            faults.append(
                f"--min-lr {self.min_lr:g} is where a decay ends: add --decay cosine or --decay"
                " linear."
            )
        if self.decay_steps is not None and is_constant:
            faults.append(
                f"--decay-steps {self.decay_steps} is the length of a decay: add --decay cosine or"
                " --decay linear."
            )
        if self.decay_steps is not None and self.decay_steps < 1:
            faults.append(f"--decay-steps must be at least 1, got {self.decay_steps}.")
        if faults:
            raise InputError("\n  ".join(faults))
        if self.warmup_steps is None and self.decay is None:
            return {} if self.lr is None else {"learning_rate": self.lr}
        from ..zoo import learning_rate

        return {
            "learning_rate": learning_rate(
                3e-4 if self.lr is None else self.lr,
                steps=self.decay_steps or steps,
                end=self.min_lr or 0.0,
                warmup_steps=_number(self.warmup_steps or "0"),
                decay=self.decay or "constant",
            )
        }


def _number(text: str) -> int | float:
    """Steps, or their share below 1."""
    try:
        value = float(text)
        if value >= 0 and (value < 1 or value.is_integer()):
            return value if 0 < value < 1 else int(value)
    except (ValueError, OverflowError):
        pass
    raise InputError(
        f"--warmup-steps {shortened(text, 60)!r} is neither a number of steps nor a share below 1,"
        " such as 0.02."
    )
