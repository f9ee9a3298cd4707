"""Conventions of all commands: the answer on standard output, the rest on standard error, errors as
exit codes.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

import typer
from rich.console import Console, RenderableType

from ..core import AliquotError, AliquotWarning, printable, shortened
from ._interrupts import INTERRUPTED, raise_at_interrupts
from ._voice import Voice

_WIDTH = 180
_LEAST_WIDTH = 60
_LONGEST_LINE = 1000
# Lines of tables and bars, and the dots of curves.
_PLAINER = {
    **dict.fromkeys(map(ord, "─━╸╺"), "-"),
    **dict.fromkeys(map(ord, "│┃"), "|"),
    **dict.fromkeys(range(10241, 10496), "."),
    0x2800: " ",
}


class Session:
    """Output of one command: the answer and its messages.

    `voice.doing` says what is being done, for when that takes long.

    With `--json` nothing but the final object reaches standard output, whatever libraries or the
    user's code print.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.answer: dict[str, Any] | None = None
        self.voice = Voice()

    def show(self, renderable: RenderableType) -> None:
        """Part of the answer, for people; left out with `--json`."""
        if self.as_json:
            return
        self.voice.heard()
        console = Console()
        if isinstance(renderable, str):
            _write(renderable)
        elif console.is_terminal:
            console.print(renderable)
        else:
            from ..report import as_text

            # A pipe has no width, unless the user gives it one.
            _write(
                as_text(
                    renderable,
                    width=max(shutil.get_terminal_size((_WIDTH, 0)).columns, _LEAST_WIDTH),
                )
            )

    def note(self, text: str) -> None:
        """A remark that is no part of the answer."""
        self.voice.heard()
        lines = "\n".join(shortened(line, _LONGEST_LINE) for line in text.split("\n"))
        print(in_its_encoding(lines, sys.stderr), file=sys.stderr, flush=True)

    def finish(self, answer: dict[str, Any]) -> None:
        """The answer as plain data, printed with `--json` when the verb ends."""
        self.answer = answer


@contextlib.contextmanager
def session(as_json: bool = False) -> Iterator[Session]:
    """Run a verb's body: a known error or Ctrl-C becomes a message and an exit code, never a
    traceback.

    Raises:
        typer.Exit: With the code that the process should leave with, if that is not 0.
    """
    say = Session(as_json)
    raise_at_interrupts()
    try:
        with (
            contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(),
            _warnings_as_remarks(say),
            say.voice.speaking(),
        ):
            try:
                yield say
            except AliquotError as error:
                said = str(error)
                about = "" if error.about in said else f"{error.about}: "
                say.note(f"error: {about}{said}")
                raise typer.Exit(error.exit_code) from None
            except KeyboardInterrupt:
                say.note("interrupted; nothing was written.")
                raise typer.Exit(INTERRUPTED) from None
    finally:
        if as_json and say.answer is not None:
            _write(json.dumps(say.answer, default=_plain))


@contextlib.contextmanager
def _warnings_as_remarks(say: Session) -> Iterator[None]:
    """Within, warnings of this package are remarks, without the file and line that raised them."""
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, AliquotWarning):
            say.note(f"note: {message}")
        else:
            shown(message, category, *where, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown


def _write(text: str) -> None:
    print(in_its_encoding(printable(text, keep="\n"), sys.stdout), flush=True)


def in_its_encoding(text: str, stream: TextIO) -> str:
    """The text in characters that the stream can take: lines of tables by others, the rest as
    Python escapes.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAINER).encode(encoding, "backslashreplace").decode(encoding)
    except LookupError:
        pass
    return text


def _plain(value: Any) -> Any:
    # NumPy's and JAX's scalars.
    return value.item() if hasattr(value, "item") else str(value)
