"""A line of the table of rules, and the arrays that lines are made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """`fn(*args)` produces the primitive.

    `runs` is false where it cannot be run here or has nothing to split. `unplanned` is a
    collective, beside the all-reduce of reduced factors, that the compiler emits all the same, and
    `why`.
    """

    primitive: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    runs: bool = True
    unplanned: str = ""
    why: str = ""
    label: str = ""
    tolerance: float = 1e-5

    def __post_init__(self) -> None:
        assert bool(self.unplanned) == bool(self.why)

    def __str__(self) -> str:
        return f"{self.primitive}-{self.label}" if self.label else self.primitive


def floats(*shape, low=0.1, high=0.9):
    return (
        np.random.default_rng(sum(shape) + len(shape)).uniform(low, high, shape).astype(np.float32)
    )


def ints(*shape, low=0, high=8):
    return np.random.default_rng(sum(shape) + 1).integers(low, high, shape).astype(np.int32)


def bools(*shape):
    return ints(*shape, high=2).astype(bool)


def words(*shape):
    return np.random.default_rng(3).integers(0, 2**32, (*shape, 2), dtype=np.uint32)


def keys(raw):
    return jax.random.wrap_key_data(raw)


# Elements of many lines.
X, Y, N, M, B, C = floats(8), floats(16)[8:], ints(8), ints(16)[8:], bools(8), bools(16)[8:]


def adder(cases: list[Case]) -> Callable[..., None]:
    """A function that adds a line to some cases."""

    def case(primitive, label, fn, *args, **options):
        cases.append(Case(primitive=primitive, label=label, fn=fn, args=args, **options))

    return case
