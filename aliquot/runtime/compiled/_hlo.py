"""Collectives of a compiled program, read from its text.

The compiler merges, moves and drops collectives that a plan asked for. For each one that is left:
its kind, the mesh axes it runs along, how often a step runs it, and the bytes that it leaves on
each device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from msgspec import Meta

from ._device_groups import device_groups

Amount = Annotated[float, Meta(ge=0.0, le=1e18)]
"""A sum of counts or bytes."""

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONSTANT = re.compile(r"= [su](?:32|64)\[\](?:\{\})? constant\((\d+)\)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCollective:
    """Collectives of one kind along some mesh axes, as the compiler left them.

    Attributes:
        kind: as HLO names it.
        axes: mesh axes along which devices communicate.
        count: how often a step runs them.
        num_bytes: bytes of their results on each device, all runs together.
        dtype: element type of (most of) the result.
        in_loop: whether they stand inside a loop.
        label: the compiler's note (`op_name`) of where one of them comes from.
    """

    kind: str
    axes: tuple[str, ...]
    count: Amount
    num_bytes: Amount
    dtype: str = ""
    in_loop: bool = False
    label: str = ""


@dataclass(slots=True)
class _Computation:
    """Name and lines of one computation."""

    name: str
    lines: list[str] = field(default_factory=list)


def find_collectives(
    text: str, axis_names: Sequence[str], axis_sizes: Sequence[int]
) -> tuple[CompiledCollective, ...]:
    """Every collective instruction of a compiled program, in the order of the text.

    Args:
        text: optimized HLO, as `compiled.as_text()` gives it.
        axis_names, axis_sizes: the mesh, whose devices are numbered row by row.
    """
    computations = _computations(text)
    times, looped = _times(computations)
    collectives = []
    # A computation that the entry does not reach never runs.
    for computation in computations.values():
        count = times.get(computation.name, 0.0)
        for line in computation.lines if count else ():
            parsed = _collective(line)
            if parsed is None:
                continue
            kind, result = parsed
            arrays = _ARRAY.findall(result)
            named = re.search(r'op_name="([^"]*)"', line)
            # The mesh axes along which the members of a group differ.
            moving: set[int] = set()
            for group in device_groups(line, math.prod(axis_sizes)):
                places = [_coordinates(device, axis_sizes) for device in group]
                moving |= {a for a, along in enumerate(zip(*places)) if len(set(along)) > 1}
            collectives.append(
                CompiledCollective(
                    kind=kind,
                    axes=tuple(name for a, name in enumerate(axis_names) if a in moving),
                    count=count,
                    num_bytes=count * num_bytes(result),
                    dtype=max(arrays, key=lambda a: num_bytes(f"{a[0]}[{a[1]}]"))[0]
                    if arrays
                    else "",
                    in_loop=computation.name in looped,
                    label=named.group(1) if named else "",
                )
            )
    return tuple(collectives)


def add_up(collectives: Sequence[CompiledCollective]) -> tuple[CompiledCollective, ...]:
    """Collectives added up by kind, axes and whether they stand in a loop; most bytes first."""
    groups: dict[tuple[str, tuple[str, ...], bool], list[CompiledCollective]] = {}
    for c in collectives:
        groups.setdefault((c.kind, c.axes, c.in_loop), []).append(c)
    summed = []
    for members in groups.values():
        largest = max(members, key=lambda c: c.num_bytes)
        count, num_bytes = sum(c.count for c in members), sum(c.num_bytes for c in members)
        summed.append(replace(largest, count=count, num_bytes=num_bytes))
    return tuple(sorted(summed, key=lambda c: (-c.num_bytes, c.kind, c.axes, c.in_loop)))


def num_bytes(type_text: str) -> int:
    """Bytes of an HLO type, tuples summed.

    >>> num_bytes("(f32[4,8]{1,0}, bf16[16]{0})")
    160
    """
    total = 0
    for name, dims in _ARRAY.findall(type_text):
        elements = math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d)
        bits = _BITS.get(name)
        if bits is None:
            digits = re.match(r"[a-z]+(\d+)", name)
            bits = int(digits.group(1)) if digits else 0
        total += -(-elements * bits // 8)
    return total


def _computations(text: str) -> dict[str, _Computation]:
    computations: dict[str, _Computation] = {}
    current: _Computation | None = None
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        # An instruction may begin like a header, but has an equals sign before its operands.
        if header and " = " not in line.split("(", 1)[0]:
            name = "ENTRY" if header.group(1) else header.group(2)
            current = computations[name] = _Computation(name)
        elif current is not None:
            current.lines.append(line)
    return computations


def _times(computations: Mapping[str, _Computation]) -> tuple[dict[str, float], set[str]]:
    """Number of runs of each computation in a step, and the computations that stand in a loop."""
    times: dict[str, float] = {}
    looped: set[str] = set()

    def visit(name: str, count: float, inside: bool) -> None:
        times[name] = times.get(name, 0.0) + count
        if inside:
            looped.add(name)
        for line in computations[name].lines:
            for called, trips, loop in _calls(line, computations):
                visit(called, count * trips, inside or loop)

    if "ENTRY" in computations:
        visit("ENTRY", 1.0, False)
    return times, looped


def _calls(
    line: str, computations: Mapping[str, _Computation]
) -> Iterator[tuple[str, float, bool]]:
    """Computations that an instruction runs, how often, and whether as a loop's body."""
    named = _CALLED.findall(line)
    if " while(" in line:
        parts = dict(named)
        counts = set(_TRIPS.findall(line)[:1])
        if not counts:
            # The bound of a counted loop is the only integer constant of its condition.
            text = "\n".join(computations[parts["condition"]].lines)
            counts = set(_CONSTANT.findall(text))
        # Once where the text does not tell.
        yield parts["body"], float(counts.pop()) if len(counts) == 1 else 1.0, True
        return
    for _, name in named:
        if name in computations:
            yield name, 1.0, False
    for listed in _BRANCHES.findall(line):
        for part in listed.split(","):
            name = part.strip().lstrip("%")
            if name in computations:
                yield name, 1.0, False


def _collective(line: str) -> tuple[str, str] | None:
    """Kind and result type of a collective instruction; of an asynchronous pair only the start
    counts.
    """
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    rest = line[head.end() :]
    type_end = _end_of_type(rest)
    opcode = rest[type_end:].lstrip().split("(", 1)[0]
    kind = opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    result = rest[:type_end]
    if opcode.endswith("-start"):
        # The start of a pair has its operands and its results; that of an all-reduce had its
        # results alone before 2026.
        elements = _elements(result)
        if len(elements) > 1 and (kind != "all-reduce" or elements[0].startswith("(")):
            result = elements[1]
    return kind, result


def _end_of_type(text: str) -> int:
    """End of the type that a text begins with."""
    if not text.startswith("("):
        return text.index(" ")
    depth = 0
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return position + 1
    return len(text)


def _elements(type_text: str) -> list[str]:
    """The elements of a tuple type."""
    if not type_text.startswith("("):
        return [type_text]
    parts, depth, start = [], 0, 1
    for position, letter in enumerate(type_text):
        # Commas also stand inside shapes and layouts.
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or (depth == 0 and letter == ")"):
            parts.append(type_text[start:position].strip())
            start = position + 1
    return parts


def _coordinates(device: int, axis_sizes: Sequence[int]) -> tuple[int, ...]:
    place = []
    for size in reversed(axis_sizes):
        device, remainder = divmod(device, size)
        place.append(remainder)
    return tuple(reversed(place))
