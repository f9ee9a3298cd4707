"""The interface of methods, and what they answer."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..cost import Priced, Problem
from ..plans import Plan

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called as `progress(what, done, of)` while a method searches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One mesh (or method) that was tried: its bound and, if it was solved, its step time."""

    name: str
    mesh: str
    lower_bound_s: float | None
    step_time_s: float | None
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """A choice for every node on one mesh, with what is proved about it.

    `lower_bound_s` bounds every plan of the space named by `bound_holds_for`; None if nothing is proved.
    """

    method: str
    planner: str
    priced: Priced
    picks: NDArray[np.int64]
    step_time_s: float
    lower_bound_s: float | None
    bound_holds_for: str
    status: str
    candidates: tuple[Candidate, ...] = ()


class AbstractMethod(abc.ABC):
    """A way to parallelize a step. Methods are frozen, pure and deterministic: no devices, no clocks, no files."""

    @abc.abstractmethod
    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        """A decision for the problem.

        Raises:
            InfeasibleError: Nothing fits; what needs least is described.
            InputError: The problem is none that this method can be asked.
            Interrupted: Ctrl-C; carries the best decision until then.
        """


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a search; `decision` is the best found until then, or None, and `plan` what was written of it."""

    def __init__(self, decision: Decision | None) -> None:
        super().__init__("interrupted")
        self.decision = decision
        self.plan: Plan | None = None
