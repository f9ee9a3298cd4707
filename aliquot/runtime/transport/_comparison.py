"""Comparison of the step, plan, settings and arrays of all processes, before anything runs.

A process with another step or plan would wait for ever for what the others never send, or train
something else.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ...core import version_of
from ...graph import (
    Graph,
    Literal,
    equation_line,
    graph_fingerprint,
    operator_lines,
    source_line,
    traced_lines,
)
from ...plans import Plan
from ._agreement import exchange
from ._calls import Call, mismatch
from ._describe import describe_whole
from ._given import Given, differences
from ._settings import settings_lines
from ._watchdog import watched

# Lines that are shown, and characters of them.
_SHOWN, _MOST = 3, 180
_OPERATORS, _DECISIONS = "operators in its traced step", "decisions in its plan"
# In lines of a plan's decisions: where the state lies.
_PLACES = ("inputs[", ".axis_names", ".first_device", ".mesh_shape", ".shardings")


def agree(
    parts: Mapping[str, Sequence[str]], shown: Mapping[str, Callable[[int], str]] | None = None
) -> None:
    """Compare lines of text with those of all other processes. All must call it at the same point.

    Args:
        parts: the lines, by what they are called in messages.
        shown: for parts whose lines are hard to read: what to show for a line, by its position.

    Raises:
        PlanMismatchError: raised in every process if one differs; names the process, the part and
            the lines.
    """
    # Only digests are exchanged at first: the texts of a large step are long.
    digests = {}
    for name, lines in parts.items():
        digests[name] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests_of_all = exchange(digests, dict[str, str])
    different: dict[str, list[int]] = {}
    for name in dict.fromkeys(itertools.chain(*digests_of_all)):
        seen = [of.get(name) for of in digests_of_all]
        if len(set(seen)) > 1:
            different[name] = [k for k, digest in enumerate(seen) if digest != seen[0]]
    if not different:
        return
    # All processes see the same digests, so either all of them make these exchanges or none.
    sums = {}
    for name in different:
        sums[name] = [zlib.crc32(line.encode()) for line in parts.get(name, ())]
    sums_of_all = exchange(sums, dict[str, list[int]])
    told: dict[str, list[str]] = {}
    for name, others in different.items():
        own = sums[name]
        first = sums_of_all[0][name]
        known = {*(sums_of_all[others[0]][name] if own == first else first)}
        odd = [k for k, number in enumerate(own) if number not in known]
        show = (shown or {}).get(name, list(parts.get(name, ())).__getitem__)
        texts = [text for k in odd[: _SHOWN + 1] if (text := show(k))]
        told[name] = texts[:_SHOWN] + ["..."] * (len(texts) > _SHOWN)
    told_by_all = exchange(told, dict[str, list[str]])
    problems = []
    for name, others in different.items():
        first_lines, other_lines = told_by_all[0][name], told_by_all[others[0]][name]
        problems.append(_difference(name, others, first_lines, other_lines))
    raise mismatch(problems)


def _difference(
    name: str, others: Sequence[int], first: Sequence[str], other: Sequence[str]
) -> str:
    """Message: which processes differ from process 0 in a part, and the first lines that differ."""
    several = len(others) > 1
    who = (
        f"process{'es' * several} {', '.join(map(str, others))} {'have' if several else 'has'}"
        f" other {name} than process 0"
    )
    shown = []
    for k, text in ((0, "; ".join(first)), (others[0], "; ".join(other))):
        if text:
            cut = f"{text[:_MOST]} ..." if len(text) > _MOST else text
            shown.append(f"process {k}: {cut}")
    return f"{who}: {'; '.join(shown) or 'the same in another order or nesting'}"


def agree_on_step(graph: Graph, plan: Plan | None) -> None:
    """`agree` on a traced step with the arrays that it holds, its plan, and settings."""
    report(f"compiling {graph.name}")
    parts, shown = _traced_parts(graph)
    decisions = [] if plan is None else plan.decisions()
    agree({**_surroundings(), **parts, _DECISIONS: decisions}, shown)


def _traced_parts(
    graph: Graph,
) -> tuple[dict[str, Sequence[str]], dict[str, Callable[[int], str]]]:
    """A traced step with the arrays that it holds, for `agree`."""
    inputs = []
    for item in graph.inputs:
        value = graph.values[item.value]
        inputs.append(f"takes {item.path} as {value.dtype}{list(value.shape)}, {item.role.value}")
    operators = operator_lines(graph)
    parts: dict[str, Sequence[str]] = {
        "arguments or results": [*inputs, *(f"returns {output.path}" for output in graph.outputs)],
        # Equal operators may still be nested otherwise.
        _OPERATORS: [*operators, graph_fingerprint(graph)],
        "arrays that its step holds": constant_lines(graph.constants.values()),
    }
    return parts, {_OPERATORS: lambda k: _operator(graph, k) if k < len(operators) else ""}


def _operator(graph: Graph, k: int) -> str:
    """An operator as a reader knows it: `mul of float32[16, 16], 0.1 at train.py:12 (update)`."""
    op = graph.ops[k]
    operands = []
    for operand in op.inputs:
        if isinstance(operand, Literal):
            operands.append(str(operand.value))
        else:
            value = graph.values[operand]
            operands.append(f"{value.dtype}{list(value.shape)}")
    return _shown(op.name, operands, source_line(op))


def _shown(name: str, operands: Sequence[str], where: str) -> str:
    return f"{name} of {', '.join(operands)}{f' at {where}' if where else ''}"


def agree_on_init(
    plan: Plan | None,
    traced: Any,
    arguments: Mapping[str, Any],
    statics: Mapping[str, Any],
    graph: Graph | None = None,
) -> None:
    """`agree` on a function that makes the state, what it is given, where the plan puts the state,
    and settings.

    Args:
        traced: the function's closed jaxpr.
        arguments: its arrays, by what they are called in messages.
        statics: its other arguments.
        graph: the step as the plan was made for it, if that is known.
    """
    report("step.init")
    lines, constants = traced_lines(traced)
    name = "operators in what it calls in step.init"

    def show(k: int) -> str:
        _, eqn = lines[k]
        if eqn is None:
            return ""
        operands = [str(getattr(v, "val", v.aval)) for v in eqn.invars]
        called = f"({eqn.params['name']})" if "name" in eqn.params else ""
        return _shown(f"{eqn.primitive.name}{called}", operands, equation_line(eqn))

    given = []
    for path, value in statics.items():
        # As text that is the same in all processes.
        is_plain = value is None or isinstance(value, bool | int | float | str)
        given.append(f"{path} = {repr(value) if is_plain else f'a {type(value).__qualname__}'}")
    parts = {
        **_surroundings(),
        name: [line for line, _ in lines],
        "arrays that the function given to step.init holds": constant_lines(constants),
        "arguments of step.init that are no arrays": given,
    }
    placed, shown = _placed_parts(plan, graph)
    agree({**parts, **placed}, {name: show, **shown})
    agree_on_arrays({k: d for k, leaf in arguments.items() if (d := describe_whole(leaf))})


class _Placed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the plan of a process puts the state, as a digest, and whether its step is known."""

    digest: str
    is_traced: bool


def _placed_parts(
    plan: Plan | None, graph: Graph | None
) -> tuple[dict[str, Sequence[str]], dict[str, Callable[[int], str]]]:
    """Where plans put the state, for `agree`. The rest of a plan is compared with the traced step,
    at the first call; if states lie elsewhere, that call never comes, and whatever may be the cause
    is compared here.
    """
    decisions = () if plan is None else plan.decisions()
    places = [line for line in decisions if any(name in line for name in _PLACES)]
    digest = hashlib.sha256("\n".join(places).encode()).hexdigest()
    of_all = exchange(_Placed(digest=digest, is_traced=graph is not None), _Placed)
    if len({placed.digest for placed in of_all}) == 1:
        return {}, {}
    if graph is None or not all(placed.is_traced for placed in of_all):
        return {_DECISIONS: decisions}, {}
    parts, shown = _traced_parts(graph)
    return {**parts, _DECISIONS: decisions}, shown


def report(what: str) -> None:
    """Tell the others what this process calls next: if they call something else, nobody waits."""
    peers = watched()
    if peers is not None:
        peers.report(Call(what=what))


def agree_on_arrays(given: dict[str, Given]) -> None:
    """Compare descriptions of arrays. All must call it at the same point.

    Raises:
        PlanMismatchError: in every process.
    """
    problems = differences(dict(enumerate(exchange(given, dict[str, Given]))))
    if problems:
        raise mismatch(problems)


def _surroundings() -> dict[str, list[str]]:
    """The versions and settings that determine what a program computes, for `agree`."""
    versions = [f"{name} {version_of(name)}" for name in ("aliquot", "jax", "jaxlib")]
    return {"versions": versions, "settings": settings_lines()}


def constant_lines(constants: Iterable[Any]) -> list[str]:
    """One line for each array that a traced function holds, with its digest."""
    lines = []
    for k, constant in enumerate(constants):
        if not hasattr(constant, "dtype"):
            continue
        # Of an array in pieces, each process has others.
        is_whole = getattr(constant, "is_fully_addressable", True) or constant.is_fully_replicated
        given = describe_whole(constant) if is_whole else None
        if given is None:
            lines.append(f"array {k}, {constant.dtype}{list(constant.shape)}")
        else:
            lines.append(f"array {k}, {given} (digest {' '.join(given.digests.values())})")
    return lines
