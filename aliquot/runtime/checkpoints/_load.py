"""The module that needs Orbax, imported when it is first needed."""

from __future__ import annotations

from typing import Any

from ...core import MissingExtraError


def load_orbax() -> Any:
    """The module that saves and restores with Orbax. Raises `MissingExtraError` without Orbax."""
    try:
        import orbax.checkpoint  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("train", "orbax-checkpoint") from error
    from . import _orbax

    return _orbax
