"""Collectives of a compiled program, read from its text: independent of the runtime's own reader,
so that each checks the other.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_COLLECTIVE = re.compile(rf"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_CALLED = re.compile(
    r"(body|condition|to_apply|calls|branch_computations)=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One array of one collective: bytes that it leaves on each device each time, and how often a
    step runs it.
    """

    kind: str
    num_bytes: int
    count: int
    dtype: str
    op_name: str


def collectives(text: str) -> list[Collective]:
    """All collectives of an HLO module. One that carries several arrays gives one entry for
    each.
    """
    bodies = _computations(text)
    runs = _runs(bodies)
    found = []
    for name, lines in bodies.items():
        for line in lines:
            match = _COLLECTIVE.match(line)
            if not match or not runs[name]:
                continue
            op_name = _OP_NAME.search(line)
            arrays = [
                (dtype, _num_bytes(dtype, dims)) for dtype, dims in _ARRAY.findall(match.group(1))
            ]
            if match.group(3):
                # The asynchronous form lists operands and results.
                arrays = arrays[len(arrays) // 2 :]
            if match.group(2) == "all-to-all" and match.group(1).startswith("("):
                # In tuple form each entry is what came from one device: together they are the
                # array.
                arrays = [(arrays[0][0], sum(n for _, n in arrays))]
            for dtype, num_bytes in arrays:
                found.append(
                    Collective(
                        kind=match.group(2),
                        num_bytes=num_bytes,
                        count=runs[name],
                        dtype=dtype,
                        op_name=op_name.group(1) if op_name else "",
                    )
                )
    return found


def bytes_by_kind(found: list[Collective]) -> Counter[str]:
    """Bytes of a whole step by kind."""
    total: Counter[str] = Counter()
    for c in found:
        total[c.kind] += c.num_bytes * c.count
    return total


def sent_bytes(kind: str, left_bytes: float, n: int) -> float:
    """What each of `n` devices sends around a ring in a collective that leaves so many bytes on
    it.
    """
    match kind:
        case "all-reduce":
            return 2 * (n - 1) / n * left_bytes
        case "reduce-scatter":
            # It leaves one of n parts of what goes around.
            return (n - 1) * left_bytes
        case "collective-permute":
            return left_bytes
    return (n - 1) / n * left_bytes


def _num_bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.sub(r"\D.*", "", dtype.lstrip("abcfsu")) or 8)
    count = 1
    for dim in dims.split(","):
        count *= int(dim or 1)
    return count * bits // 8


def _computations(text: str) -> dict[str, list[str]]:
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        match = _COMPUTATION.match(line)
        if match:
            name = "ENTRY" if match.group(1) else match.group(2)
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    return bodies


def _runs(bodies: dict[str, list[str]]) -> Counter[str]:
    """How often a step runs each computation: loops count as many times as the compiler says they
    turn.
    """
    calls: dict[str, list[tuple[str, int]]] = {name: [] for name in bodies}
    for name, lines in bodies.items():
        for line in lines:
            trips = _TRIPS.search(line)
            for role, several, one in _CALLED.findall(line):
                for callee in (several or one).replace("%", "").split(","):
                    if callee.strip() in bodies:
                        calls[name].append(
                            (callee.strip(), int(trips.group(1)) if trips and role == "body" else 1)
                        )
    runs: Counter[str] = Counter()

    def visit(name: str, times: int) -> None:
        runs[name] += times
        for callee, trips in calls[name]:
            visit(callee, times * trips)

    visit("ENTRY", 1)
    return runs
