"""Exports of a folder that are imported when they are first used."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_exports(
    package: str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a folder whose `__init__.pyi` says what it exports,
    as `from ._file import Name as Name`. Importing the folder then imports none of its files.
    """
    module = sys.modules[package]
    stub = Path(str(module.__file__)).with_suffix(".pyi")
    file_of = {}
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                file_of[alias.name] = node.module

    def get(name: str) -> Any:
        if name not in file_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{file_of[name]}", package), name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *file_of}), sorted(file_of)
