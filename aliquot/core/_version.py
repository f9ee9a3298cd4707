"""Versions of packages."""

from __future__ import annotations

import importlib.metadata


def version_of(package: str) -> str:
    """The version of a package, or "unknown": a checkout can be imported without being installed.

    Args:
        package: its name on the index, such as `"aliquot"`.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
