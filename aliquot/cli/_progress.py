"""Progress on standard error: a line for a search, a bar with loss and tokens per second for a training run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..core import format_count
from ._session import Session

_LINES = 10


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
        yield lambda what, done, of: status.update(f"searching: {what} ({done} of {of})" if of else what)


@contextlib.contextmanager
def training_progress(label: str, steps: int) -> Iterator[Callable[[int, float, float], None]]:
    """A function to call as `report(step, loss, tokens_per_s)` after each step, with `step` counted from 1.

    A bar in a terminal; about ten lines elsewhere.
    """
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        every = max(1, steps // _LINES)

        def print_line(step: int, loss: float, tokens_per_s: float) -> None:
            if step == 1 or step % every == 0 or step == steps:
                speed = f"{format_count(round(tokens_per_s))} tokens/s"
                print(f"{label}: step {step}/{steps}  loss {loss:.4f}  {speed}", file=sys.stderr, flush=True)

        yield print_line
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task(label, total=steps, loss="-", speed="-")

        def move(step: int, loss: float, tokens_per_s: float) -> None:
            bar.update(task, completed=step, loss=f"{loss:.4f}", speed=format_count(round(tokens_per_s)))

        yield move
