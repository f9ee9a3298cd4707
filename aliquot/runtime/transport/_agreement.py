"""Comparison of the step, plan and versions of all processes, before anything is compiled.

A process with another step or plan would wait for ever for what the others never send, or train
something else.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...core import PlanMismatchError
from ...graph import Graph, graph_fingerprint
from ...plans import Plan
from ._messages import Value
from ._secret import digest, known_secret
from ._service import exchange_by
from ._watchdog import watched

_SHOWN = 3
_OPERATORS = "operators in its traced step"


def exchange(value: Value, kind: type[Value]) -> list[Value]:
    """The value that each process passes, in order of the processes. Waits until all have called it
    as often as this one: all processes must call it at the same points, with the same `kind`.

    For small values: numbers, names, digests. They go through JAX's coordination service, touch no
    device, and carry no code.

    Args:
        value: this process's; a `msgspec.Struct`, a dataclass, or builtin types.
        kind: its type, such as `dict[str, str]`, in which the values of the others are expected
            too. Declare a struct with `forbid_unknown_fields=True`.

    Raises:
        ConnectionError: what another process passed is no such value; names the process.
    """
    peers = watched()
    # Processes that were not connected by `initialize` share nothing but the secret, if any.
    key = peers.key if peers is not None else digest(known_secret() or b"", "exchange")
    return exchange_by(key, value, kind)


def agree(parts: Mapping[str, Sequence[str]]) -> None:
    """Compare lines of text with those of all other processes. All must call it at the same point.

    Args:
        parts: the lines, by what they are called in messages.

    Raises:
        PlanMismatchError: raised in every process if one differs; names the process, the part and
            the lines.
    """
    # Only digests are exchanged at first: the texts of a large step are long.
    digests = {
        name: hashlib.sha256("\n".join(lines).encode()).hexdigest() for name, lines in parts.items()
    }
    digests_of_all = exchange(digests, dict[str, str])
    names = list(dict.fromkeys(name for of in digests_of_all for name in of))
    different = {
        name: [
            k for k, of in enumerate(digests_of_all) if of.get(name) != digests_of_all[0].get(name)
        ]
        for name in names
    }
    different = {name: others for name, others in different.items() if others}
    if not different:
        return
    # All processes see the same digests, so either all of them make this second exchange or none.
    texts = exchange({n: list(parts.get(n, ())) for n in different}, dict[str, list[str]])
    raise PlanMismatchError(
        [
            _difference(name, others, [text[name] for text in texts])
            for name, others in different.items()
        ],
        asked="processes that run a step together must all run the same",
        advice="Give all processes the same step, plan, shapes and versions.",
    )


def agree_on_step(graph: Graph, plan: Plan | None) -> None:
    """`agree` on a traced step and its plan."""
    inputs = [
        f"takes {item.path} as {value.dtype}{list(value.shape)}, {item.role.value}"
        for item in graph.inputs
        for value in [graph.values[item.value]]
    ]
    agree(
        {
            "arguments or results": [
                *inputs,
                *(f"returns {output.path}" for output in graph.outputs),
            ],
            **plan_lines(plan),
            _OPERATORS: [graph_fingerprint(graph)],
        }
    )


def plan_lines(plan: Plan | None) -> dict[str, list[str]]:
    """A plan and the versions that run it, for `agree`."""
    versions = [
        f"{name} {importlib.metadata.version(name)}" for name in ("aliquot", "jax", "jaxlib")
    ]
    operators, decisions = (
        ([], []) if plan is None else ([plan.graph_fingerprint], list(plan.decisions()))
    )
    return {_OPERATORS: operators, "decisions in its plan": decisions, "versions": versions}


def _difference(name: str, others: Sequence[int], texts: Sequence[Sequence[str]]) -> str:
    """Message: which processes differ from process 0 in a part, and the first lines that differ."""
    several = len(others) > 1
    who = (
        f"process{'es' * several} {', '.join(map(str, others))} {'have' if several else 'has'}"
        f" other {name} than process 0"
    )
    if name == _OPERATORS:
        return f"{who}: another model, or another release of a library that it is made with"
    first, other = texts[0], texts[others[0]]
    here, there = (
        [line for line in a if line not in b] for a, b in ((first, {*other}), (other, {*first}))
    )
    shown = [
        *(f"process 0: {line}" for line in here[:_SHOWN]),
        *(f"process {others[0]}: {line}" for line in there[:_SHOWN]),
    ]
    many = len(here) + len(there) > len(shown)
    return f"{who}: {_cut('; '.join(shown))}{' ...' * many}"


def _cut(text: str, most: int = 900) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."


def spans_processes(devices: Iterable[Any]) -> bool:
    """True if devices belong to several processes."""
    return len({device.process_index for device in devices}) > 1
