"""Places of operators in the user's code."""

from __future__ import annotations

import itertools
import posixpath
import re
from typing import Any

from ._segments import wildcard
from ._types import Graph, Op, Role

# Operators after which a parameter is still the same one.
_SAME = frozenset({"convert_element_type", "transpose", "reshape", "squeeze", "copy"})


def source_line(op: Op, *, short: bool = True) -> str:
    """File, line and function of an operator, such as `gpt.py:46 (attend)`; empty where JAX knows
    none (some transposed operators).

    Args:
        short: only the file's name without its folder, so that the text is the same on every
            machine.
    """
    return equation_line(op.eqn, short=short)


def line_or_nearest(graph: Graph, index: int) -> str:
    """The line of an operator or, where JAX knows none, as of some transposed operators and of
    links between a loop and its body, that of the nearest operator which makes or takes its values.
    """
    op = graph.ops[index]
    if line := source_line(op):
        return line
    makers = graph.makers
    takers: dict[int, list[Op]] = {}
    for other in graph.ops:
        for value in other.inputs:
            if isinstance(value, int):
                takers.setdefault(value, []).append(other)
    seen, reached = {op.index}, [op]
    for near in reached:
        if line := source_line(near):
            return f"near {line}"
        before = [makers[v] for v in near.inputs if isinstance(v, int) and v in makers]
        behind = [takers.get(v, ()) for v in near.outputs]
        for other in itertools.chain(before, *behind):
            if other.index not in seen:
                seen.add(other.index)
                reached.append(other)
    return ""


def parameter_of(graph: Graph, index: int) -> str:
    """Path of the one parameter that an operator reads, as it is or cast or rearranged, with `*`
    for numbers; empty if there is none, or several.
    """
    paths = {i.value: i.path for i in graph.inputs if i.role is Role.PARAMETER}
    makers = graph.makers
    found = set()
    for value in graph.ops[index].inputs:
        while isinstance(value, int) and value in makers and makers[value].name in _SAME:
            value = makers[value].inputs[0]
        if value in paths:
            found.add(wildcard(paths[value]))
    return found.pop() if len(found) == 1 else ""


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
