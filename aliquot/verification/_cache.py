"""Cache of compilers' answers, by a hash of the request: program, target, flags and releases."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from ..core import AliquotError, write_atomic

_MOST_ENTRIES = 500


def default_cache() -> Path:
    """The folder of cached answers: `aliquot/verify` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "aliquot" / "verify"


def read_answer(folder: Path, key: str) -> dict[str, Any] | None:
    """The answer cached under a key; None if there is none that can be read."""
    try:
        answer: dict[str, Any] = json.loads((folder / f"{key}.json").read_text())
    except (OSError, ValueError):
        return None
    return answer


def keep_answer(folder: Path, key: str, answer: dict[str, Any]) -> str:
    """Cache an answer. Returns the reason if that was not possible, else an empty text; does not
    raise, since an answer is of use without a cache.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / f"{key}.json", json.dumps(answer))
    except (OSError, AliquotError) as error:
        return f"the result is not kept for the next time: {error}"
    # Another process may clear the folder at the same time.
    with contextlib.suppress(OSError):
        _forget_oldest(folder)
    return ""


def _forget_oldest(folder: Path) -> None:
    entries = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in entries[_MOST_ENTRIES:]:
        path.unlink(missing_ok=True)
