"""What every verb does alike: an answer on standard output, everything else on standard error, errors as exit codes."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console, RenderableType

from ..core import AliquotError

INTERRUPTED = 130
_WIDTH = 180


class Session:
    """Where a verb puts its words.

    With `--json` nothing but the final object reaches standard output, whatever libraries or the user's code print.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.answer: dict[str, Any] | None = None

    def show(self, renderable: RenderableType) -> None:
        """Part of the answer, for people; left out with `--json`."""
        if self.as_json:
            return
        console = Console()
        if isinstance(renderable, str):
            print(renderable, flush=True)
        elif console.is_terminal:
            console.print(renderable)
        else:
            from ..report import as_text

            print(as_text(renderable, width=_WIDTH), flush=True)

    def note(self, text: str) -> None:
        """A remark that is no part of the answer."""
        print(text, file=sys.stderr, flush=True)

    def finish(self, answer: dict[str, Any]) -> None:
        """The answer as plain data, printed with `--json` when the verb ends."""
        self.answer = answer


@contextlib.contextmanager
def session(as_json: bool = False) -> Iterator[Session]:
    """Run a verb's body: a known error or Ctrl-C becomes a message and an exit code, never a traceback.

    Raises:
        typer.Exit: With the code that the process should leave with, if that is not 0.
    """
    own = Session(as_json)
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            try:
                yield own
            except AliquotError as error:
                own.note(f"error: {error}")
                raise typer.Exit(error.exit_code) from None
            except KeyboardInterrupt:
                own.note("interrupted; nothing was written.")
                raise typer.Exit(INTERRUPTED) from None
    finally:
        if as_json and own.answer is not None:
            typer.echo(json.dumps(own.answer, ensure_ascii=False, default=_plain))


def _plain(value: Any) -> Any:
    # NumPy's and JAX's scalars.
    return value.item() if hasattr(value, "item") else str(value)
