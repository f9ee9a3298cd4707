"""Where the seconds of a measured program go: JAX's own trace of some runs, read back."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ._programs import CompiledPart
from ._timing import Timing, run_repeatedly

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# The operators inside these have events of their own.
_CONTAINERS = re.compile(r"(while|call|conditional|async)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Seconds of one run in which a device communicates, and in which it runs other operators; the
    mean of all devices. The wait for the slowest device counts as communication.
    """

    communication_s: float
    compute_s: float


def trace_part(part: CompiledPart, *, runs: int = 3) -> Traced | None:
    """Seconds of a program's collectives and of its other operators, by JAX's profiler.

    Args:
        runs: how many runs are traced, after as many others.

    Returns:
        None if the program did not compile, or the trace shows no operators.
    """
    if part.compiled is None:
        return None
    timing = Timing(warm_up=runs, repeats=runs, most_repeats=runs)
    with tempfile.TemporaryDirectory() as folder:
        run_repeatedly(part, timing, lambda: jax.profiler.trace(folder))
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        events = list(itertools.chain.from_iterable(map(_operators, files)))
    apart: dict[bool, dict[str, list[tuple[float, float]]]] = {
        True: defaultdict(list),
        False: defaultdict(list),
    }
    for device, name, start, end in events:
        apart[name.startswith(_COLLECTIVES)][device].append((start, end))
    devices = {device for device, *_ in events}
    if not devices:
        return None

    def seconds(some: Mapping[str, list[tuple[float, float]]]) -> float:
        return sum(map(_covered, some.values())) * 1e-9 / len(devices) / runs / part.times

    return Traced(communication_s=seconds(apart[True]), compute_s=seconds(apart[False]))


def _operators(file: Path) -> Iterator[tuple[str, str, float, float]]:
    """The events of a trace that are operators: device, name, start and end in nanoseconds."""
    trace: Any = jax.profiler.ProfileData.from_file(str(file))
    for plane in trace.planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                name = str(stats.get("hlo_op", ""))
                if name and not _CONTAINERS.match(name):
                    # CPU devices share a plane; every GPU has one.
                    device = f"{plane.name} {stats.get('device_ordinal', '')}"
                    yield device, name, event.start_ns, event.start_ns + event.duration_ns


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals.

    >>> _covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total
