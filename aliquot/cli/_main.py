"""The process of the command line, with its handling of a full disk and of Ctrl-C."""

from __future__ import annotations

import errno
import gc
import os
import sys

from ._interrupts import end_at_interrupts, leave_at_interrupts

_BAD_INPUT = 2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EPIPE)


def main() -> None:
    """Run the command line with this process's arguments. Ends the process with the verb's exit
    code.
    """
    leave_at_interrupts()
    from ..core import collect_seldom
    from ._app import app

    collect_seldom()
    try:
        app()
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        # What is left to write would be tried again, and fail again, when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if error.errno == errno.EPIPE:
            # Who reads has seen enough.
            raise SystemExit(1) from None
        print(
            f"error: the answer cannot be written to standard output: {error.strerror}.",
            file=sys.stderr,
        )
        raise SystemExit(_BAD_INPUT) from None
    finally:
        end_at_interrupts()
        # Garbage is not worth collecting when the process ends, as Python would do.
        gc.freeze()
