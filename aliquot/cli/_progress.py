"""Progress on standard error: a line for a search, a bar with loss and tokens or images per second
for a training run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..core import format_count
from ._session import Session

_LINES = 10


@contextlib.contextmanager
def search_progress(say: Session) -> Iterator[Callable[[str, int, int], None]]:
    """A function to call as `report(what, done, of)`, with 0 for what is not counted.

    Shows one changing line in a terminal. Elsewhere the voice of the session says it from time to
    time.
    """
    console = Console(file=sys.stderr)
    say.voice.doing = "tracing the step"

    def report(what: str, done: int, of: int) -> None:
        say.voice.doing = f"searching (at {what}, {done} of {of})" if of else what

    if not console.is_terminal:
        yield report
        return
    with say.voice.quiet(), console.status(say.voice.doing) as status:

        def update(what: str, done: int, of: int) -> None:
            report(what, done, of)
            status.update(say.voice.doing)

        yield update


@contextlib.contextmanager
def training_progress(
    label: str, steps: int, say: Session, examples: str = "tokens"
) -> Iterator[Callable[[int, float, float], None]]:
    """A function to call as `report(step, loss, examples_per_s)` after each step, with `step`
    counted from 1; 0 when the step is about to be compiled.

    A bar in a terminal; about ten lines elsewhere.
    """
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        every = max(1, steps // _LINES)
        shown: int | None = None

        def print_line(step: int, loss: float, examples_per_s: float) -> None:
            nonlocal shown
            if not step:
                say.voice.doing = f"{label}: compiling the step"
                return
            say.voice.doing = f"{label}: training (step {step} of {steps} is done)"
            if shown is None or step - shown >= every or step == steps:
                shown = step
                say.voice.heard()
                # The first step compiles, which is no speed.
                rate = format_count(round(examples_per_s))
                speed = f"{rate} {examples}/s" if examples_per_s else ""
                print(
                    f"{label}: step {step}/{steps}  loss {loss:.4f}  {speed}".rstrip(),
                    file=sys.stderr,
                    flush=True,
                )

        yield print_line
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    with say.voice.quiet(), bar:
        task = bar.add_task(label, total=steps, state="reading data")

        def move(step: int, loss: float, examples_per_s: float) -> None:
            state = f"loss {loss:.4f}  {format_count(round(examples_per_s))} {examples}/s"
            bar.update(task, completed=step, state=state if step else "compiling the step")

        yield move


@contextlib.contextmanager
def compiling_progress(say: Session) -> Iterator[Callable[[str], None]]:
    """A function to call with a line about what is going on.

    In a terminal the line changes in place, with the seconds since it all began. Elsewhere each
    stands once, and the voice of the session says again what takes long.
    """
    console = Console(file=sys.stderr)
    say.voice.doing = "tracing the step"
    if not console.is_terminal:
        seen: set[str] = set()

        def tell(line: str) -> None:
            what = line.partition(" (")[0]
            say.voice.doing = what
            if what not in seen:
                seen.add(what)
                say.note(f"{what} ...")

        yield tell
        return
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with say.voice.quiet(), bar:
        task = bar.add_task("tracing the step", total=None)
        yield lambda line: bar.update(task, description=line.partition(" (")[0])
