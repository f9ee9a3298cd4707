"""Reader of compiled programs' texts beyond that of the runtime: causes of collectives, and what a
compiler expects a step to take.

A collective that splits or gathers an array on its way to another split carries the runtime's own
mark. Its cause is the operator that made the array: the nearest instruction up the chain of
operands that carries a mark of the user's code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..runtime import CompiledCollective, find_collectives

INPUT = "input "
"""The beginning of a cause that is an input of the step; its position follows."""

_COLLECTIVE = re.compile(
    r"\b(?:ragged-all-to-all|all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute|collective-broadcast)"
    r"(?:-start)?\("
)
_STRUCTURE = ("while(", "call(", "conditional(", "[] constant(", "_computation")
_NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPERAND = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OURS = ("sharding_constraint", "call_exported", "run", "")
_LIBRARIES = re.compile(r"[/\\](?:jax|flax|optax|equinox)[/\\]")
_OURSELVES = re.compile(
    r"[/\\]aliquot[/\\](?:(?:runtime|graph|sharding|verification)[/\\]|_api\.py)"
)
_STEPS = 60
_TOTAL = re.compile(r"^Total bytes: (\d+)", re.MULTILINE)


def compiled_collectives(
    text: str, axis_names: Sequence[str], axis_sizes: Sequence[int]
) -> tuple[CompiledCollective, ...]:
    """Every collective of a compiled program; labels name its cause: an operator with its line, or
    `input N`.

    Args:
        text: optimized HLO.
        axis_names, axis_sizes: the mesh, whose devices are numbered row by row.
    """
    lines = text.splitlines()
    causes = _Causes.read(lines)
    kept = []
    for line in lines:
        if not line.startswith(" "):
            kept.append(line)
        elif _COLLECTIVE.search(line):
            cause = causes.of(line).replace('"', "'")
            own = _OP_NAME.search(line)
            start, end = own.span() if own else (len(line), len(line))
            kept.append(f'{line[:start]}{"" if own else ", "}op_name="{cause}"{line[end:]}')
        elif any(word in line for word in _STRUCTURE) and " fusion(" not in line:
            kept.append(line)
    return find_collectives("\n".join(kept), axis_names, axis_sizes)


@dataclass(slots=True, kw_only=True)
class _Causes:
    """Instructions by name, and the tables from which places in source files are read."""

    lines: Mapping[str, str]
    files: Mapping[int, str]
    functions: Mapping[int, str]
    locations: Mapping[int, tuple[int, int, int]]
    frames: Mapping[int, tuple[int, int]]
    places: dict[int, str] = field(default_factory=dict)

    @classmethod
    def read(cls, lines: Sequence[str]) -> _Causes:
        by_name = {match.group(1): line for line in lines if (match := _NAME.match(line))}
        tables: dict[str, list[str]] = {}
        current: list[str] | None = None
        for line in lines:
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                current = tables.setdefault(line, [])
            elif line.startswith(("%", "ENTRY")):
                break
            elif current is not None and line[:1].isdigit():
                current.append(line)
        return cls(
            lines=by_name,
            files=_texts(tables.get("FileNames", [])),
            functions=_texts(tables.get("FunctionNames", [])),
            locations={
                n: (v.get("file_name_id", 0), v.get("function_name_id", 0), v.get("line", 0))
                for n, v in _numbers(tables.get("FileLocations", []))
            },
            frames={
                # A parent is written one higher than it is counted; 1 stands for none.
                n: (v.get("file_location_id", 0), v.get("parent_frame_id", 1) - 1)
                for n, v in _numbers(tables.get("StackFrames", []))
            },
        )

    def of(self, line: str) -> str:
        """The cause of a collective: `operator at file:line (function)`, `input N`, or empty."""
        waiting, position, vague = [line], 0, ""
        operands = len(self._operands(line))
        # Breadth first, so that the nearest instruction with a mark is found first.
        while position < min(len(waiting), _STEPS):
            current = waiting[position]
            position += 1
            number = re.search(r" parameter\((\d+)\)", current)
            named = _OP_NAME.search(current)
            if number and (not named or "/" not in named.group(1)):
                # Parameters of loop bodies are tuples; only a step's inputs are arrays.
                return vague if " = (" in current else f"{INPUT}{number.group(1)}"
            # The innermost of a path such as `jit(run)/jvp()/dot_general`; merged ones are joined
            # by colons.
            innermost = named.group(1).rpartition("/")[2] if named else ""
            name = next(filter(None, re.split(r"[():]", innermost)), "")
            if name not in _OURS:
                frame = _FRAME.search(current)
                place = self._place(int(frame.group(1))) if frame else ""
                more = f", and {operands - 1} more" if operands > 1 and current is not line else ""
                if place:
                    is_backward = named is not None and "transpose(" in named.group(1)
                    phase = " in the backward pass" if is_backward else ""
                    return f"{name}{phase} at {place}{more}"
                vague = vague or name
            made_by = map(self.lines.get, self._operands(current))
            waiting += [each for each in made_by if each is not None and each not in waiting]
        return vague

    def _operands(self, line: str) -> list[str]:
        # Types hold parentheses too, but only operands begin with `%`.
        return _OPERAND.findall("%" + line.partition(" = ")[2].partition("(%")[2].partition(")")[0])

    def _place(self, frame: int) -> str:
        """The innermost line of code that belongs to no library."""
        if frame not in self.places:
            place, current = "", frame
            while current in self.frames:
                location, parent = self.frames[current]
                file, function, line = self.locations.get(location, (0, 0, 0))
                path = self.files.get(file, "")
                if _OURSELVES.search(path):
                    # The operator comes from this package, not from the user's code that called it.
                    break
                if path and not _LIBRARIES.search(path):
                    place = f"{path.rsplit('/', 1)[-1]}:{line} ({self.functions.get(function, '')})"
                    break
                current = parent
            self.places[frame] = place
        return self.places[frame]


def _texts(rows: Sequence[str]) -> dict[int, str]:
    found = {}
    for row in rows:
        number, _, text = row.partition(" ")
        found[int(number)] = text.strip('"')
    return found


def _numbers(rows: Sequence[str]) -> Iterator[tuple[int, dict[str, int]]]:
    for row in rows:
        number, _, rest = row.partition(" ")
        yield int(number), {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", rest)}


_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_BODY = re.compile(r" while\(.*\bbody=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")


def reported_bytes(report: str) -> int | None:
    """Bytes of a device's main memory, which comes first in XLA's memory usage report; None if it
    is not in there.
    """
    match = _TOTAL.search(report)
    return int(match[1]) if match else None


def estimated_cycles(text: str) -> float:
    """Cycles that a TPU's compiler expects all instructions of a step to take, loops by their
    trips; 0 for others.
    """

    def cycles(line: str) -> float:
        return sum(map(int, _CYCLES.findall(line))) if '"estimated_cycles"' in line else 0.0

    return _over_trips(text, cycles)


_COSTS = re.compile(r'"reification_cost":(\[.*?\])')
_UNPRICED_CALL = re.compile(r'custom_call_target="__cudnn\$')


def modelled_compute_s(text: str) -> float:
    """Seconds at full clock that XLA's models of a GPU's kernels expect the kernels of a step to
    take, loops by their trips, collectives and calls of cuDNN left out; 0 for others.

    Each instruction has up to three figures. That of the model of indices is the most exact; that
    of the tables of measured products is next. The one without a name knows no Triton kernels.
    """

    def seconds(line: str) -> float:
        if '"reification_cost"' not in line or _COLLECTIVE.search(line):
            return 0.0
        found = _COSTS.search(line)
        costs = {}
        for each in json.loads(found[1]) if found else ():
            costs[each["name"]] = float(each["exec_time_us"])
        named = [costs[name] for name in ("indexing-cost-model", "sol", "") if name in costs]
        return 1e-6 * named[0] if named else 0.0

    return _over_trips(text, seconds)


def unpriced_calls(text: str) -> float:
    """Calls of cuDNN in a step, loops by their trips, of whose time XLA has no model."""
    return _over_trips(text, lambda line: float(bool(_UNPRICED_CALL.search(line))))


def _over_trips(text: str, figure: Callable[[str], float]) -> float:
    """Sum of a figure of each instruction of a step, loops by their trips."""
    figures: dict[str, float] = {}
    bodies: dict[str, list[tuple[str, int]]] = {}
    entry = current = ""
    for line in text.splitlines():
        header = _HEADER.match(line) if not line.startswith(" ") else None
        if header:
            current = header.group(2)
            entry = current if header.group(1) else entry
        elif current:
            figures[current] = figures.get(current, 0.0) + figure(line)
            body = _BODY.search(line) if " while(" in line else None
            if body:
                trips = _TRIPS.search(line)
                bodies.setdefault(current, []).append(
                    (body.group(1), int(trips.group(1)) if trips else 1)
                )

    def total(name: str) -> float:
        return figures.get(name, 0.0) + sum(
            trips * total(body) for body, trips in bodies.get(name, ())
        )

    return total(entry)
