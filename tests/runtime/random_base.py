"""What random training steps are made of: operators by name, each of which draws its arguments from
a seed.

An operator returns a function of an activation. Activations are float64 with the examples in dim 0.
Sizes are read from the arrays, as a step must that is cut into micro-batches. What one example gets
does not depend on the others, except where an operator says that it `mixes` them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

Shape = tuple[int, ...]
Apply = Callable[[jax.Array, "Inputs"], jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the operators of a step see beside the activation."""

    params: dict[str, jax.Array]
    batch: dict[str, jax.Array]
    count: jax.Array
    key: jax.Array


@dataclass(slots=True, kw_only=True)
class Draw:
    """The choices made so far: `shape` is that of the activation now, with `rows` examples at
    first.
    """

    rng: np.random.Generator
    shape: Shape
    params: dict[str, Shape] = field(default_factory=dict)
    tokens: int = 7

    def pick(self, *choices: Any) -> Any:
        """One of the choices."""
        return choices[int(self.rng.integers(len(choices)))]

    def size(self) -> int:
        """A size of a dim: mostly small, often odd, sometimes one that eight devices share."""
        return int(self.pick(1, 2, 3, 4, 5, 6, 8, 8))

    def dim(self, *, rows: bool = False) -> int | None:
        """One of the dims of the activation, not that of examples unless `rows`; None if there is
        none.
        """
        first = 0 if rows else 1
        return int(self.rng.integers(first, len(self.shape))) if len(self.shape) > first else None

    def weight(self, *shape: int) -> str:
        """The name of a parameter of a shape: a new one, or one that there is."""
        same = [name for name, known in self.params.items() if known == shape]
        if same and self.rng.random() < 0.4:
            return str(self.pick(*same))
        name = f"w{len(self.params)}"
        self.params[name] = shape
        return name


Operator = Callable[[Draw], Apply | None]
OPERATORS: dict[str, Operator] = {}
MIXING: set[str] = set()
# Where last digits decide which way a number is rounded, results differ by as much as that.
ROUNDING: dict[str, float] = {}


def operator(*, mixes: bool = False, rounds: float = 0.0) -> Callable[[Operator], Operator]:
    """Adds to the table; see `MIXING` and `ROUNDING`."""

    def add(fn: Operator) -> Operator:
        name = fn.__name__.lstrip("_")
        OPERATORS[name] = fn
        if mixes:
            MIXING.add(name)
        if rounds:
            ROUNDING[name] = rounds
        return fn

    return add


def along_rows(x: jax.Array, h: jax.Array) -> jax.Array:
    """One number for each example, beside an activation."""
    return x.reshape(-1, *(1,) * (h.ndim - 1))


def row_index(given: Inputs, h: jax.Array) -> jax.Array:
    """The tokens as indices for each example of an activation."""
    return given.batch["tokens"].reshape(-1, *(1,) * (h.ndim - 2))
