"""Timing of compiled programs on the devices of this process."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import InputError, reuse_freed_memory
from ..graph import key_generator
from ._database import Measurement, failed
from ._programs import CompiledPart, is_out_of_memory
from ._together import NotRun, slowest

_LARGER_THAN_CACHES_BYTES = 1 << 28
_MOST_SETS = 64
_LEAST_S = 1e-9
_OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How often a program is run to time it. Its time is the median of the timed runs.

    Attributes:
        warm_up: number of runs before those that are timed.
        repeats: the fewest timed runs.
        most_repeats: the most timed runs.
        least_s: short programs are repeated until their timed runs together take this long, or
            number `most_repeats`.
        early_stop: a program whose fastest warm-up run takes more than this many times as long as
            the best program that does the same work is not timed further; infinite for never.
        retries: how many times a failed or noisy measurement is repeated. Of noisy measurements the
            least noisy one is kept.
        noisy: a measurement is noisy if half its interquartile range is more than this share of the
            median.

    Reference: arXiv 2504.00598, whose profiler stops early at the same factor.
    """

    warm_up: int = 2
    repeats: int = 5
    most_repeats: int = 1000
    least_s: float = 0.2
    early_stop: float = 1.5
    retries: int = 1
    noisy: float = 0.3

    def runs_left(self, times: Sequence[float]) -> int:
        """How many timed runs are to follow those that took `times`, as far as these tell."""
        if len(times) < self.repeats:
            return self.repeats - len(times)
        missing_s = self.least_s - sum(times)
        if missing_s <= 0:
            return 0
        wanted = math.ceil(missing_s * len(times) / max(sum(times), _LEAST_S))
        return max(min(wanted, self.most_repeats - len(times)), 0)

    def __post_init__(self) -> None:
        faults = [
            f"{name}={value!r} must be at least {least}"
            for name, value, least in (
                ("warm_up", self.warm_up, 1),
                ("repeats", self.repeats, 1),
                ("most_repeats", self.most_repeats, self.repeats),
                ("least_s", self.least_s, 0),
                ("early_stop", self.early_stop, 1),
                ("retries", self.retries, 0),
                ("noisy", self.noisy, 0),
            )
            if not value >= least
        ]
        if faults:
            raise InputError(f"These numbers of runs are impossible: {'; '.join(faults)}.")


def time_part(
    part: CompiledPart,
    timing: Timing | None = None,
    *,
    best_s: float = math.inf,
    evicts: bool = False,
) -> Measurement:
    """Run a program and time it.

    If the program does not fit in memory, or fails, the measurement says so. Where several
    processes work together, all must call this for the same program, and get the same measurement.
    On CPU devices the process keeps the memory that programs free; see
    `aliquot.core.reuse_freed_memory`.

    Args:
        best_s: seconds of the fastest program so far that does the same work; see
            `Timing.early_stop`.
        evicts: whether runs alternate between several sets of arguments, so that none is in a cache
            when it is read, as with single operators in a step. Not for programs with donated
            arguments.
    """
    timing = timing or Timing()
    if jax.devices()[0].platform == "cpu":
        # Otherwise a program that needs a little more memory than another would get fresh pages, at
        # a page fault each.
        reuse_freed_memory()
    best = _attempt(part, timing, best_s, evicts)
    for _ in range(timing.retries):
        if best.outcome == "ok" and best.spread <= timing.noisy:
            break
        if best.outcome != "ok" and not best.has_failed:
            break
        again = _attempt(part, timing, best_s, evicts)
        if best.has_failed or (again.outcome == "ok" and again.spread < best.spread):
            best = again
    return best


def _attempt(part: CompiledPart, timing: Timing, best_s: float, evicts: bool) -> Measurement:
    """One measurement, without retries. Several processes each run their part of the program, and
    the slowest of them counts.
    """
    turns: list[Iterator[list[Any]]] = []

    def prepare() -> list[float]:
        if part.compiled is None:
            raise NotRun(failed(part.failure) if part.failure else _OUT_OF_MEMORY)
        turns.append(_arguments_in_turn(part, evicts))
        return []

    def run(count: int, *, first: int = 0) -> list[float]:
        seconds = [_run(part, next(turns[0])) for _ in range(first + count)][first:]
        return [each / part.times for each in seconds]

    def together(act: Callable[[], list[float]]) -> list[float]:
        def named() -> list[float]:
            try:
                return act()
            except jax.errors.JaxRuntimeError as error:
                said = str(error)
                raise NotRun(_OUT_OF_MEMORY if is_out_of_memory(error) else failed(said)) from None

        return slowest(named, part.label)

    # What processes exchange leaves them at different points; a first run brings them in step.
    first = 1 if jax.process_count() > 1 else 0
    try:
        together(prepare)
        before = together(lambda: run(timing.warm_up))
        if min(before) > timing.early_stop * best_s:
            return Measurement(
                seconds=min(before),
                memory_bytes=part.memory_bytes,
                outcome="stopped early",
                label=part.label,
            )
        times: list[float] = []
        while count := timing.runs_left(times):
            times += together(functools.partial(run, count, first=first))
    except NotRun as error:
        return Measurement(
            seconds=None,
            repeats=0,
            memory_bytes=part.memory_bytes,
            outcome=error.outcome,
            label=part.label,
        )
    low, median, high = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
    return Measurement(
        seconds=median,
        spread=(high - low) / 2 / median,
        repeats=len(times),
        memory_bytes=part.memory_bytes,
        label=part.label,
    )


def run_repeatedly(
    part: CompiledPart, timing: Timing, during: Callable[[], AbstractContextManager[Any]]
) -> list[float]:
    """Seconds of each run of a program, after runs to warm up.

    Args:
        during: what to do while the timed runs go on, such as a trace.
    """
    turns = _arguments_in_turn(part, evicts=False)
    for _ in range(timing.warm_up):
        _run(part, next(turns))
    with during():
        return [_run(part, next(turns)) for _ in range(timing.repeats)]


def _arguments_in_turn(part: CompiledPart, evicts: bool) -> Iterator[list[Any]]:
    """The arguments of one run after another: always the same arrays, or with `evicts` so many sets
    in turn that none stays in a cache.
    """
    leaves: list[Any] = []
    for shape in part.arguments:
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            key = jax.random.key(0, impl=key_generator(shape.dtype))
            keys = jnp.broadcast_to(key, shape.shape)
            leaves.append(jax.device_put(keys, shape.sharding))
        else:
            leaves.append(_fill_program(shape.shape, shape.dtype, shape.sharding)())
    num_bytes = sum(math.prod(a.shape) * a.dtype.itemsize for a in part.arguments)
    wanted = math.ceil(_LARGER_THAN_CACHES_BYTES / max(num_bytes, 1)) if evicts else 1
    copies = []
    for _ in range(min(wanted, _MOST_SETS) - 1):
        copies.append(list(map(jnp.copy, leaves)))
    return itertools.cycle([leaves, *copies])


def _run(part: CompiledPart, leaves: list[Any]) -> float:
    start = time.perf_counter()
    results = jax.block_until_ready(part.compiled(*leaves))
    seconds = time.perf_counter() - start
    # A donated argument cannot be used again; the result that succeeds it takes its place.
    for position, result in part.successors.items():
        leaves[position] = results[result]
    return seconds


# Every measurement fills new arguments, many of them of the same shape, so programs are cached.
@functools.lru_cache(maxsize=1024)
def _fill_program(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[], Any]:
    """The compiled program that fills an array with small numbers: with zeros a program may be
    faster, and with denormal numbers slower, than in training.
    """

    def fill() -> Any:
        if jnp.issubdtype(dtype, jnp.floating):
            flat = jnp.sin(jnp.arange(math.prod(shape), dtype=jnp.float32)) * 0.1 + 0.2
            return flat.reshape(shape).astype(dtype)
        return jnp.zeros(shape, dtype)

    return jax.jit(fill, out_shardings=sharding)
