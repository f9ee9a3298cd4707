"""Progress on standard error: a line for a search, a bar with loss and tokens or images per second
for a training run.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
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
_PATIENCE_S = 15.0


@contextlib.contextmanager
def search_progress(say: Session) -> Iterator[Callable[[str, int, int], None]]:
    """A function to call as `report(what, done, of)`, with 0 for what is not counted.

    Shows one changing line in a terminal, and nothing elsewhere.
    """
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda what, done, of: None
        return
    with console.status("tracing the step") as status:
        yield lambda what, done, of: status.update(
            f"searching: {what} ({done} of {of})" if of else what
        )


@contextlib.contextmanager
def training_progress(
    label: str, steps: int, examples: str = "tokens"
) -> Iterator[Callable[[int, float, float], None]]:
    """A function to call as `report(step, loss, examples_per_s)` after each step, with `step`
    counted from 1.

    A bar in a terminal; about ten lines elsewhere.
    """
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        every = max(1, steps // _LINES)
        shown: int | None = None

        def print_line(step: int, loss: float, examples_per_s: float) -> None:
            nonlocal shown
            if shown is None or step - shown >= every or step == steps:
                shown = step
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
        TextColumn("loss {task.fields[loss]}  {task.fields[speed]} " + f"{examples}/s"),
        TimeRemainingColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task(label, total=steps, loss="-", speed="-")

        def move(step: int, loss: float, examples_per_s: float) -> None:
            bar.update(
                task, completed=step, loss=f"{loss:.4f}", speed=format_count(round(examples_per_s))
            )

        yield move


@contextlib.contextmanager
def compiling_progress() -> Iterator[Callable[[str], None]]:
    """A function to call with a line about what is going on.

    In a terminal the line changes in place, with the seconds since it all began. Elsewhere each
    stands once, and again with the seconds for as long as it stays the last.
    """
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        with _said_again(_PATIENCE_S) as say:
            yield say
        return
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("tracing the step", total=None)
        yield lambda line: bar.update(task, description=line.partition(" (")[0])


@contextlib.contextmanager
def _said_again(every_s: float) -> Iterator[Callable[[str], None]]:
    """The lines of a log: each when it is new, and again with the time that it has been the
    last.
    """
    seen: set[str] = set()
    last, since_s = "tracing the step", time.monotonic()
    ended = threading.Event()

    def say(line: str) -> None:
        nonlocal last, since_s
        what = line.partition(" (")[0]
        if what != last:
            last, since_s = what, time.monotonic()
        if what not in seen:
            seen.add(what)
            print(f"{what} ...", file=sys.stderr, flush=True)

    def again() -> None:
        while not ended.wait(every_s):
            passed_s = time.monotonic() - since_s
            if passed_s >= every_s:
                print(f"{last} ... ({passed_s:.0f} s)", file=sys.stderr, flush=True)

    thread = threading.Thread(target=again, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        ended.set()
        thread.join()
