"""Versions of packages."""

from __future__ import annotations

import importlib.metadata

#: This package's, and the only place that says so: `pyproject.toml` takes it from here.
__version__ = "0.1.0"


def version_of(package: str) -> str:
    """The version of a package that is imported here, or "unknown".

    That of this package is what its source says, since a checkout can be imported without being
    installed, or beside another one that is.

    Args:
        package: `"aliquot"`, or another one's name on the index.
    """
    if package == "aliquot":
        return __version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
