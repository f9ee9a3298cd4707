"""The module that needs Orbax, imported when it is first needed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ...core import MissingExtraError


def require_orbax() -> None:
    """Raises `MissingExtraError` without Orbax, which is not imported."""
    try:
        found = find_spec("orbax.checkpoint")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise MissingExtraError("train", "orbax-checkpoint")


def load_orbax() -> Any:
    """The module that saves and restores with Orbax."""
    require_orbax()
    from . import _orbax

    return _orbax
