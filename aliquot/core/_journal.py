"""Rows by key in a file, each written as soon as it is there, so that a run that was killed goes
on where it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._errors import InputError


class Journal:
    """Rows by key. A line that a killed run did not finish is taken away.

    Args:
        path: of the file, made with the first row; None keeps rows in memory alone.

    Raises:
        InputError: the file cannot be read, or is no journal.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: dict[str, dict[str, Any]] = {}
        if path is None or not path.exists():
            return
        try:
            text = path.read_bytes()
            complete = text.rfind(b"\n") + 1
            if complete < len(text):
                os.truncate(path, complete)
            for line in text[:complete].splitlines():
                entry = json.loads(line)
                self.rows[entry["key"]] = entry["row"]
        except OSError as error:
            raise InputError(f"the journal {path} cannot be read: {error.strerror}.") from None
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{path} is no journal of rows; name another folder or take the file away."
            ) from None

    def row(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A row that is known, or is made and written now."""
        if key not in self.rows:
            made = make()
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps({"key": key, "row": made}) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
            self.rows[key] = made
        return self.rows[key]
