"""Parts of the verbs that measure: options for how often programs run, shares, progress and the
summary of a run.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ..core import InputError
from ._groups import argument, option
from ._session import Session

if TYPE_CHECKING:
    from ..profiling import ProfileDatabase, ProfileRun, Timing

DatabaseFile = Annotated[Path, argument("A profile database.", metavar="DATABASE")]
Database = Annotated[Path, option("Where measurements are kept.", metavar="FILE")]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringOptions:
    """The options of all verbs that measure programs."""

    title: ClassVar[str] = "Measuring"

    share: str = option("Only every N-th program, from the K-th on.", "1/1", metavar="K/N")
    repeats: int = option("Timed runs of each program, at least.", 5, min=1)
    most_repeats: int = option("Timed runs of each program, at most.", 1000, min=1)
    least_s: float = option(
        "Run short programs until their timed runs took so many seconds.", 0.2, min=0
    )
    warm_up: int = option("Runs before any is timed.", 2, min=1)
    retries: int = option("Measure what fails or is noisy so many times again.", 1, min=0)
    noisy: float = option(
        "Half the spread between quartiles that counts as noisy, of the median.", 0.3, min=0
    )
    budget_s: float = option("Start no program after so many seconds.", math.inf, min=0)

    def timing(self, **more: float) -> Timing:
        """Numbers of runs of each program.

        Args:
            more: further settings of `Timing`.

        Raises:
            InputError: more repetitions are asked for than there may be.
        """
        from ..profiling import Timing

        if self.most_repeats < self.repeats:
            raise InputError(
                f"--repeats {self.repeats} asks for at least {self.repeats} timed runs, and"
                f" --most-repeats {self.most_repeats} allows fewer. Give --most-repeats"
                f" {self.repeats} or more."
            )
        return Timing(
            repeats=self.repeats,
            most_repeats=self.most_repeats,
            least_s=self.least_s,
            warm_up=self.warm_up,
            retries=self.retries,
            noisy=self.noisy,
            **more,
        )


def read_share(text: str) -> tuple[int, int]:
    """`(k, n)` of text such as `1/2`.

    Raises:
        InputError: it is something else.
    """
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise InputError(
            f"--share {text}: write K/N with K from 1 to N, such as 1/2 on one host and 2/2 on the"
            " other."
        )
    return int(number), int(of)


@contextlib.contextmanager
def database_of_all(path: Path) -> Iterator[ProfileDatabase | None]:
    """The database, in process 0 of those that measure together; None in the others.

    Raises:
        InputError: it cannot be opened; in all processes.
    """
    from ..profiling import ProfileDatabase, leads, raised_in_all

    with contextlib.ExitStack() as opened:
        database = None
        with raised_in_all():
            if leads():
                database = opened.enter_context(ProfileDatabase(path))
        yield database


@contextlib.contextmanager
def measuring_progress(
    say: Session, *, is_shown: bool = True
) -> Iterator[Callable[[str, int, int], None]]:
    """A function to call as `report(what, done, of)` after each program, which shows what is done,
    what is left, and about how long that takes.

    A bar in a terminal; elsewhere the voice of the session says it from time to time.

    Args:
        is_shown: False in processes that leave this to another.
    """
    if not is_shown:
        yield lambda what, done, of: None
        return
    console, left = Console(file=sys.stderr), _Left()
    say.voice.doing = "tracing the step"
    if not console.is_terminal:

        def tell(what: str, done: int, of: int) -> None:
            say.voice.doing = (
                f"measuring ({done} of {of} programs known, {left.text(done, of)}: {what})"
            )

        yield tell
        return
    columns = (
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[left]}  {task.description}"),
    )
    with say.voice.quiet(), Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("tracing the step", total=None, left="")
        yield lambda what, done, of: bar.update(
            task, description=what, completed=done, total=of, left=left.text(done, of)
        )


class _Left:
    """About how long the programs that are left take, if they take as long as those that were
    measured.
    """

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def text(self, done: int, of: int) -> str:
        now_s = time.monotonic()
        start_s, before = self._first = self._first or (now_s, done)
        if done == before:
            return f"{of - done} left"
        left_s = (now_s - start_s) / (done - before) * (of - done)
        return (
            f"{of - done} left, about {left_s / 60:.0f} min"
            if left_s >= 90
            else f"{of - done} left, about {left_s:.0f} s"
        )


def show_run(say: Session, run: ProfileRun, what: str) -> dict[str, Any]:
    """Print what a run measured and what is left, and return it as data.

    Args:
        what: was measured, in the plural.
    """
    say.show(
        f"Of {run.num_programs} {what}, {run.num_measured} measured in {run.seconds:.1f} s,"
        f" {run.num_known} known before, {run.num_missing} missing."
    )
    if run.failures:
        say.show(f"{len(run.failures)} of them failed, and are tried again by the next run:")
        for failure in run.failures:
            say.show(f"  {failure}")
    if run.num_missing and not run.num_measured:
        say.show("The budget ended before the first program began: give a larger --budget-s.")
    elif run.num_missing:
        say.show("Run the same command again to go on.")
    return {
        what: run.num_programs,
        "measured": run.num_measured,
        "known": run.num_known,
        "missing": run.num_missing,
        "failures": list(run.failures),
        "seconds": run.seconds,
    }
