"""`aliquot launch`: start a command in several processes that train together."""

from __future__ import annotations

from pathlib import Path

from ._groups import argument, option
from ._launch_options import ProcessOptions
from ._session import session


def launch(
    *,
    engine: str = argument("local:N for N processes of this machine, or ray for one on each host."),
    command: list[str] = argument(
        "What each process runs, such as: -- python my_script.py --steps 100", metavar="-- COMMAND"
    ),
    how: ProcessOptions,
    logs: Path | None = option("Also keep what each process prints.", metavar="FOLDER"),
) -> None:
    """Start a command in several processes that train together, and again when one fails.

    The command calls aliquot.runtime.initialize() without arguments. Exit code: that of the process
    that failed first, 128 + n if signal n ended it.
    """
    with session() as say:
        from ..launching import launch as launch_processes

        # The processes say themselves what they do.
        with say.voice.quiet():
            launch_processes(
                command,
                engine,
                max_restarts=how.max_restarts or 0,
                **how.hosts,
                logs=logs,
                note=lambda text: say.note(f"aliquot launch: {text}"),
            )
