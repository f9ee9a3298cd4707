"""Do measured segments rank the plans of a whole step, and tell its time?

On 8 virtual devices, for a GPT and a mixture of experts of two layers: every combination of options
of a layer's blocks (of the mixture of experts a seeded sample) is run as a whole step, and beside
it stand the time composed of measured segments and the analytic model's.

    python benchmarks/segment_profiles.py [--quick] [--journal FILE] [--model gpt|moe]

What was measured is kept in the journal, so that a run can go on where it was. Of one model alone
the result is a file of its own.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from _results import Journal, Report, options, say, use_eight_devices

from aliquot.core import num_cores, reuse_freed_memory

use_eight_devices()
reuse_freed_memory()

import jax  # noqa: E402

from aliquot.cluster import Cluster  # noqa: E402
from aliquot.cost import make_problem  # noqa: E402
from aliquot.graph import capture  # noqa: E402
from aliquot.profiling import (  # noqa: E402
    Combination,
    CompiledPart,
    Conversion,
    MeasuredStep,
    SegmentedStep,
    Timing,
    all_conversions,
    compile_conversion,
    compile_part,
    compose,
    conversions_between,
    priced_combinations,
    segment_step,
    time_part,
)
from aliquot.zoo import build  # noqa: E402

_TAU, _ERROR, _PROGRAMS, _NEAR = 0.8, 0.08, 40, 0.02
_MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "gpt": ("gpt-10m", {"num_layers": 2, "hidden_size": 256, "num_heads": 8, "seq_len": 128}, 0),
    "moe": (
        "moe-380m",
        {
            "num_layers": 2,
            "hidden_size": 128,
            "num_heads": 8,
            "seq_len": 64,
            "num_experts": 8,
            "vocab_size": 256,
        },
        60,
    ),
}
_BATCH = 16
_QUICK = 6
# Combinations whose programs are compiled, and then take turns.
_TOGETHER = 8
_ROUNDS = 2
# Programs whose rounds differ by more take one more turn.
_SPREAD = 0.03


def main() -> int:
    """Run, and write what came out; 1 if a bar is missed."""
    chosen = options(__doc__, _more)
    report = Report(
        name="segment_profiles",
        question="Do measured segments rank the plans of a whole step, and tell its time?",
        bar=(
            f"Kendall's tau at least {_TAU} with measured segments; median error of the composed"
            f" time at most {_ERROR:.0%}; at most {_PROGRAMS} programs to find a winner within"
            f" {_NEAR:.0%} of the best"
        ),
        method=(
            "Every segment's program and every whole step is compiled and run on 8 virtual devices"
            f" that share this machine's cores. Programs of {_TOGETHER} combinations are compiled;"
            f" then each combination's whole step and its segments take turns, {_ROUNDS} rounds of"
            f" at least 3 runs, and one more where two rounds differ by more than {_SPREAD:.0%};"
            " medians of rounds of medians of runs. The process keeps the memory that it frees."
            " Everything but the options is split as the integer program finds best. Programs are"
            " counted in the order of `aliquot blocks profile`, most promising first."
        ),
    )
    journal = Journal(chosen.journal)
    rows, met = [], True
    for name, (model, overrides, sample) in _MODELS.items():
        if chosen.model in (None, name):
            found = _model(name, model, overrides, _QUICK if chosen.quick else sample, journal)
            report.tables[name] = found["combinations"]
            rows.append(found["summary"])
            met &= found["met"]
    report.tables["Models"] = rows
    report.summary = {row["model"]: f"tau {row['tau, composed']:.3f}" for row in rows}
    if chosen.model:
        chosen.hardware += f"-{chosen.model}"
    return report.finish(chosen, met=None if chosen.quick else met)


def _more(parser: Any) -> None:
    parser.add_argument("--journal", type=Path, help="file of what was measured so far")
    parser.add_argument("--model", choices=sorted(_MODELS), help="only this one")


def _model(
    name: str, model: str, overrides: dict[str, Any], sample: int, journal: Journal
) -> dict[str, Any]:
    workload = build(model, _BATCH, overrides=overrides, dtype="float32", recompute="none")
    graph = capture(workload.train_step, workload.state, workload.batch)
    step = segment_step(make_problem(graph, Cluster.detect(jax.devices())), (8,))
    combinations = priced_combinations(step)
    layers = [k for k, kind in enumerate(step.kinds) if len(kind.blocks) > 1]
    chosen = list(itertools.product(*[[c.options for c in combinations[k]] for k in layers]))
    if sample:
        chosen = random.Random(0).sample(chosen, min(sample, len(chosen)))
    plans = []
    for options_of_layers in chosen:
        fixed = dict(zip(layers, options_of_layers, strict=True))
        alone = [
            [c for c in some if k not in fixed or c.options == fixed[k]]
            for k, some in enumerate(combinations)
        ]
        # The head follows what the analytic model finds fastest with these layers.
        (planned,) = compose(step, alone, most=1)
        plans.append(
            [
                next(c for c in some if c.options == o)
                for some, o in zip(alone, planned.options, strict=True)
            ]
        )
    measured = []
    for first in range(0, len(plans), _TOGETHER):
        measured += _rows(f"{name} {first}", step, plans[first : first + _TOGETHER], journal)
        say(f"{name}: {len(measured)}/{len(plans)} combinations")
    known = _medians(step, plans, measured)
    rows = []
    for options_of_layers, plan, found in zip(chosen, plans, measured, strict=True):
        (composed,) = compose(step, [[c] for c in plan], known, most=1)
        rows.append(
            {
                "options": " | ".join(" ".join(map(str, o)) for o in options_of_layers),
                "composed s": composed.seconds,
                "measured share": composed.measured_share,
                "measured s": statistics.median(found["programs"]["whole"]),
                "model s": found["model_s"],
            }
        )
    rounds = np.array([found["programs"]["whole"][:_ROUNDS] for found in measured])
    return _judged(name, rows, rounds, step.num_programs)


Plan = Sequence[Combination]
"""One combination for each kind of segment."""


def _programs(step: SegmentedStep, plan: Plan) -> Iterator[tuple[str, Callable[[], CompiledPart]]]:
    """Name and compilation of all that is measured of a plan but the whole step."""
    mesh = step.mesh.shape, step.mesh.axis_names
    for k, (kind, c) in enumerate(zip(step.kinds, plan, strict=True)):
        yield _of_segment(k, c), functools.partial(compile_part, kind.problem, c.choices, *mesh)
    for conversion in (_launch(step, plan), *_conversions(step, plan)):
        yield str(tuple(conversion)), functools.partial(compile_conversion, conversion, *mesh)


def _of_segment(kind: int, combination: Combination) -> str:
    return f"segment {kind} {list(combination.options)}"


def _launch(step: SegmentedStep, plan: Plan) -> Conversion:
    """A program that does next to nothing."""
    return all_conversions(step, [[c] for c in plan])[0]


def _conversions(step: SegmentedStep, plan: Plan) -> set[Conversion]:
    """All that the neighbours of a step need."""
    return {
        conversion
        for a, b in itertools.pairwise(step.sequence)
        for _, conversion in conversions_between(step.crossings[a, b], plan[a], plan[b])
    }


def _rows(
    name: str, step: SegmentedStep, plans: Sequence[Plan], journal: Journal
) -> list[dict[str, Any]]:
    """For each plan seconds of its programs, round after round, and the analytic model's."""

    def make() -> dict[str, Any]:
        compiling: dict[str, Callable[[], CompiledPart]] = {}
        model_s = []
        for number, plan in enumerate(plans):
            solution = step.whole([c.options for c in plan])
            assert solution is not None
            choices = solution.picked.choices
            compiling[f"whole {number}"] = functools.partial(
                compile_part, step.problem, choices, step.mesh.shape, step.mesh.axis_names
            )
            compiling |= dict(_programs(step, plan))
            model_s.append(solution.step_time_s)
        with ThreadPoolExecutor(num_cores()) as pool:
            waiting = {key: pool.submit(compile_one) for key, compile_one in compiling.items()}
            parts = {key: future.result() for key, future in waiting.items()}
        times: dict[str, list[float]] = defaultdict(list)
        for turn in range(_ROUNDS + 1):
            for number, plan in enumerate(plans):
                for key in (f"whole {number}", *[key for key, _ in _programs(step, plan)]):
                    if len(times[key]) == turn and (turn < _ROUNDS or _differ(times[key])):
                        found = time_part(parts[key], Timing(warm_up=1, repeats=3))
                        assert found.seconds is not None, found.outcome
                        times[key].append(found.seconds)
        return {
            "rows": [
                {
                    "programs": {"whole": times[f"whole {number}"]}
                    | {key: times[key] for key, _ in _programs(step, plan)},
                    "model_s": model_s[number],
                }
                for number, plan in enumerate(plans)
            ]
        }

    return list(journal.row(name, make)["rows"])


def _differ(times: Sequence[float]) -> bool:
    return max(times) > min(times) * (1 + _SPREAD)


def _medians(
    step: SegmentedStep, plans: Sequence[Plan], measured: Sequence[dict[str, Any]]
) -> MeasuredStep:
    """What was measured of the segments and of what crosses between them."""
    times: dict[str, list[float]] = defaultdict(list)
    for found in measured:
        for key, seconds in found["programs"].items():
            times[key] += seconds
    return MeasuredStep(
        kinds=tuple(
            {plan[k].options: statistics.median(times[_of_segment(k, plan[k])]) for plan in plans}
            for k in range(len(step.kinds))
        ),
        conversions={
            conversion: statistics.median(times[str(tuple(conversion))])
            for plan in plans
            for conversion in _conversions(step, plan)
        },
        launch_s=statistics.median(times[str(tuple(_launch(step, plans[0])))]),
    )


def _judged(
    name: str, rows: list[dict[str, Any]], rounds: np.ndarray, num_programs: int
) -> dict[str, Any]:
    from scipy.stats import kendalltau

    measured = np.array([row["measured s"] for row in rows])
    composed = np.array([row["composed s"] for row in rows])
    model = np.array([row["model s"] for row in rows])
    tau, tau_model = float(kendalltau(measured, composed)[0]), float(kendalltau(measured, model)[0])
    errors = np.abs(composed / measured - 1)
    # Most promising first by the model; the winner is the best of those composed of measurements so
    # far.
    order, programs = np.argsort(model, kind="stable"), len(rows)
    for count in range(1, len(rows) + 1):
        winner = order[:count][composed[order[:count]].argmin()]
        if measured[winner] <= measured.min() * (1 + _NEAR):
            programs = count
            break
    summary = {
        "model": name,
        "combinations": len(rows),
        "programs": num_programs,
        "tau, composed": tau,
        "tau, model": tau_model,
        "tau, one round of whole steps and the next": float(
            np.mean([kendalltau(a, b)[0] for a, b in itertools.pairwise(rounds.T)])
        ),
        "median error, composed": float(np.median(errors)),
        "median error, model": float(np.median(np.abs(model / measured - 1))),
        "layers profiled to be within 2 % of the best": programs,
        "spread of measured times": float(measured.max() / measured.min()),
    }
    met = tau >= _TAU and float(np.median(errors)) <= _ERROR and programs <= _PROGRAMS
    return {"combinations": rows, "summary": summary, "met": met}


if __name__ == "__main__":
    raise SystemExit(main())
