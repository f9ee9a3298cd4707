"""Places of operators in the user's code."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from ._types import Op


def source_line(op: Op, *, short: bool = True) -> str:
    """File, line and function of an operator, such as `gpt.py:46 (attend)`; empty where JAX knows
    none (some transposed operators).

    Args:
        short: only the file's name without its folder, so that the text is the same on every
            machine.
    """
    return equation_line(op.eqn, short=short)


def named_operator(op: Op) -> str:
    """An operator's name and number, and where the user's code asks for it, if JAX knows."""
    where = source_line(op)
    return f"{op.name}:{op.index}{f' at {where}' if where else ''}"


def equation_line(eqn: Any, *, short: bool = True) -> str:
    """The same of one of JAX's equations; empty for None."""
    if eqn is None:
        return ""
    from jax.extend import source_info_util

    line = str(source_info_util.summarize(eqn.source_info))
    match = re.fullmatch(r"(.*):(\d+):(\d+) \((.*)\)", line)
    if not short or match is None:
        return line
    return f"{posixpath.basename(match[1].replace(chr(92), '/'))}:{match[2]} ({match[4]})"
