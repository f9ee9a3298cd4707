"""How often programs run: adaptive repetitions, early stops, retries, and what is kept of those
that fail.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from aliquot.core import InputError
from aliquot.profiling import (
    CompiledPart,
    Measurement,
    Operator,
    ProfileDatabase,
    Timing,
    compile_operator,
    measure_in_turn,
    operator_key,
    profile_operators,
    time_part,
)

_MODULE = "aliquot.profiling._timing"


@pytest.fixture
def part():
    return CompiledPart(
        arguments=(), successors={}, compiled=lambda: jnp.float32(0), memory_bytes=8.0, label="part"
    )


@pytest.fixture
def runs(monkeypatch):
    """Let programs take given seconds, run after run, and count the runs. An error in the list is
    raised.
    """
    count = itertools.count(1)
    seen = []

    def take(times):
        times = iter(times)

        def run(part, leaves):
            seen.append(next(count))
            time = next(times)
            if isinstance(time, Exception):
                raise time
            return time

        monkeypatch.setattr(f"{_MODULE}._run", run)
        return seen

    return take


def test_short_programs_run_until_their_runs_took_long_enough(part, runs):
    seen = runs(itertools.repeat(0.01))
    found = time_part(part, Timing(warm_up=3, repeats=5, least_s=0.195))
    assert (found.repeats, len(seen)) == (20, 23) and found.seconds == 0.01


def test_long_programs_run_as_often_as_asked_at_least(part, runs):
    runs(itertools.repeat(3.0))
    assert time_part(part, Timing(repeats=4, least_s=0.2)).repeats == 4


def test_no_program_runs_more_often_than_it_may(part, runs):
    runs(itertools.repeat(1e-6))
    assert time_part(part, Timing(repeats=2, most_repeats=7)).repeats == 7


@pytest.mark.parametrize(("factor", "is_stopped"), [(1.5, True), (2.5, False), (math.inf, False)])
def test_hopeless_programs_are_stopped_early(part, runs, factor, is_stopped):
    seen = runs(itertools.repeat(2.0))
    found = time_part(part, Timing(early_stop=factor), best_s=1.0)
    assert found.seconds == 2.0 and (found.outcome == "stopped early") == is_stopped
    assert len(seen) == (2 if is_stopped else 7)


def test_noisy_measurements_are_repeated_and_the_least_noisy_is_kept(part, runs):
    noisy, noisier, calm = [1.0, 1.0, 2.0, 3.0], [1.0, 1.0, 5.0, 9.0], [1.0, 1.5, 1.5, 1.5]
    timing = Timing(warm_up=1, repeats=3, least_s=0.0, retries=2, noisy=0.2)
    runs([*noisy, *noisier, *noisier])
    assert time_part(part, timing).seconds == 2.0
    seen = runs([*noisy, *calm, *noisier])
    found = time_part(part, timing)
    assert found.seconds == 1.5 and found.spread == 0.0 and len(seen) == 12 + 8


ERROR = jax.errors.JaxRuntimeError("INTERNAL: the link is down\nmore of it")
FULL = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")


def test_failed_measurements_are_tried_again(part, runs):
    timing = Timing(warm_up=1, repeats=1, least_s=0.0, retries=1)
    runs([ERROR, 1.0, 1.0])
    assert time_part(part, timing).seconds == 1.0
    runs([ERROR, ERROR])
    found = time_part(part, timing)
    assert (
        found.has_failed
        and found.seconds is None
        and found.outcome == "failed: INTERNAL: the link is down"
    )


def test_too_little_memory_is_a_result_and_not_tried_again(part, runs):
    seen = runs([1.0, FULL])
    found = time_part(part, Timing(warm_up=1, repeats=1, retries=3))
    lost = Measurement(
        seconds=None, repeats=0, memory_bytes=8.0, outcome="out of memory", label="part"
    )
    assert found == lost and not found.has_failed and len(seen) == 2


def test_errors_of_the_program_itself_are_not_hidden(part, runs):
    runs([TypeError("a bug")])
    with pytest.raises(TypeError, match="a bug"):
        time_part(part)


def test_a_run_keeps_too_little_memory_and_tries_failures_again(tmp_path, monkeypatch):
    operators = [(Operator("product", "float32", (1, 8, 8, size)), (2,)) for size in (8, 16, 32)]
    outcomes = {"8": [None], "16": [FULL], "32": [ERROR, None]}
    compiles = []

    def compile_one(operator, shape):
        found = compile_operator(operator, shape)
        compiles.append(size := str(operator.sizes[3]))
        error = outcomes[size].pop(0)

        def fail(*args):
            raise error

        return found if error is None else CompiledPart(**{**fields(found), "compiled": fail})

    def fields(part):
        return {
            name: getattr(part, name)
            for name in ("arguments", "successors", "memory_bytes", "label")
        }

    monkeypatch.setattr("aliquot.profiling._run.compile_operator", compile_one)
    timing = Timing(warm_up=1, repeats=1, least_s=0.0, retries=0)
    with ProfileDatabase(tmp_path / "p.sqlite") as database:
        first = profile_operators(operators, database, timing=timing)
        assert (first.num_measured, first.num_known, first.num_missing) == (3, 0, 0)
        assert first.failures == (
            "product float32: 8x32 by 32x8 failed: INTERNAL: the link is down",
        )
        again = profile_operators(operators, database, timing=timing)
        assert (again.num_measured, again.num_known, again.failures) == (1, 2, ())
        kept = [database.get(operator_key(*each)).outcome for each in operators]
    assert kept == ["ok", "out of memory", "ok"] and sorted(compiles) == ["16", "32", "32", "8"]


def test_a_compiler_that_fails_is_a_failure_of_that_program(part):
    broken = CompiledPart(
        arguments=(),
        successors={},
        compiled=None,
        memory_bytes=0.0,
        label="x",
        failure="INTERNAL: no such kernel",
    )
    assert time_part(broken).outcome == "failed: INTERNAL: no such kernel"


def test_impossible_numbers_of_runs_are_refused_together():
    with pytest.raises(
        InputError, match=r"warm_up=0 must be at least 1; most_repeats=3 must be at least 5"
    ):
        Timing(warm_up=0, most_repeats=3)
    with pytest.raises(InputError, match="early_stop"):
        Timing(early_stop=0.5)


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_accelerators_run_one_program_while_the_next_are_compiled(part, monkeypatch, platform):
    """CPU devices, which compile on the cores that they run on, do not."""
    monkeypatch.setattr(
        "aliquot.profiling._programs.jax.devices", lambda: [SimpleNamespace(platform=platform)]
    )
    monkeypatch.setattr("aliquot.profiling._programs.num_cores", lambda: 2)
    compiled = [threading.Event() for _ in range(6)]

    def compile_one(number):
        compiled[number].set()
        return replace(part, label=str(number))

    overlapped = []

    def time_one(one):
        following = compiled[min(int(one.label) // 2 * 2 + 2, 5)]
        overlapped.append(following.wait(5.0 if platform == "gpu" else 0.1))
        return Measurement(seconds=1.0, label=one.label)

    parts = [functools.partial(compile_one, number) for number in range(6)]
    assert [m.label for m in measure_in_turn(parts, time_one)] == list("012345")
    # Behind the last two nothing is left to compile.
    assert overlapped == [platform == "gpu"] * 4 + [True] * 2
