"""The interface of methods, and how those plan that make one program."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any, Self

from ..core import InfeasibleError, refuse_arguments
from ..cost import Problem
from ._base import Decision, Progress, Task
from ._programs import Programs
from ._race import RaceInParts
from ._search import AbstractFamily, Search


class AbstractMethod(abc.ABC):
    """A way to parallelize a step. Methods are frozen, pure and deterministic: no devices, no
    clocks, no files.

    Attributes:
        layers: where methods that make stages may cut the step; see `PipeshardParallel`.
    """

    layers: str | int | None = None

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Refuse arguments that Alpa's methods take, with what to write instead."""
        refuse_arguments(cls.__name__, cls.__init__, settings)
        return super().__new__(cls)

    def decide(self, task: Task) -> Decision:
        """Plan a captured step; by default as one program, in as many micro-batches as the task
        says, or in the fewest in which it fits.

        Raises:
            InfeasibleError, InputError, Interrupted: as `solve` does.
            CaptureError: The step does not decompose into micro-batches.
        """
        return self.searched(Search(task=task), self.programs(task))

    def programs(self, task: Task) -> list[AbstractFamily]:
        """The family of programs that this method makes of a task."""
        return [self.programs_of(task)]

    def programs_of(self, task: Task, **settings: Any) -> Programs:
        """The programs of a task; `settings` are attributes of `Programs`."""
        return Programs.of(
            task,
            self,
            task.num_micro_batches,
            fewest=1 if task.tries_counts else task.own_turns,
            most_programs=None,
            until_fits=not task.tries_counts,
            **settings,
        )

    def searched(self, search: Search, families: Sequence[AbstractFamily]) -> Decision:
        """The best program of some families.

        Raises:
            InfeasibleError, InputError, CaptureError: as `decide` does.
        """
        decision = search.run(families)
        if decision is not None:
            return decision
        task = search.task
        try:
            refusals = [error for each, error in search.refusals if isinstance(each, Programs)]
            if refusals:
                # The program that comes closest says what is missing.
                raise min(
                    refusals, key=lambda each: getattr(each, "required_bytes", None) or math.inf
                )
            # Arrays alone are too large, so that nothing was searched yet.
            return self.solve(task.problem(task.num_micro_batches or task.own_turns), task.progress)
        except InfeasibleError as error:
            raise _that_decomposes(error, task) from None

    def race(
        self, problem: Problem, progress: Progress | None, *, faster_than_s: float, pauses: bool
    ) -> RaceInParts:
        """As `solve`, for methods that search in parts: these may pause, and need not find plans
        that take `faster_than_s` or longer; see `race_in_parts`. By default in one part.

        Raises:
            TooSlowError: no program that fits is known, because the search ended once none could
                be fast enough.
        """
        yield from ()
        return self.solve(problem, progress)

    @abc.abstractmethod
    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        """Plan a step as one program.

        Raises:
            InfeasibleError: Nothing fits; describes the plan that needs the least memory.
            InputError: The method cannot plan this problem.
            Interrupted: Ctrl-C; carries the best decision so far.
        """


def _that_decomposes(error: InfeasibleError, task: Task) -> InfeasibleError:
    """The error without advice to use micro-batches into which the step does not decompose."""
    kept = []
    for change in error.advice:
        number, _, unit = change.partition(" ")
        counts = number.isdecimal() and unit.startswith("micro-batches")
        if not counts or task.decomposes(int(number)):
            kept.append(change)
    if len(kept) == len(error.advice):
        return error
    said = "The step does not decompose into micro-batches, with which it could fit."
    return error.reworded(f"{error.message}\n  {said}", kept)
