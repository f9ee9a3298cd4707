"""Do measured segments rank the plans of a whole step, and tell its time?

On 8 virtual devices, for a GPT and a mixture of experts of two layers: every combination of options
of a layer's blocks (of the mixture of experts a seeded sample) is run as a whole step, and beside
it stand the time composed of measured segments and the analytic model's.

    python benchmarks/segment_profiles.py [--quick] [--database FOLDER] [--only gpt|moe]

Measurements of segments are kept in FOLDER, those of whole steps in the journal, so that it can go
on where it was.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _results import Journal, Report, options, say, use_eight_devices

use_eight_devices()

import jax  # noqa: E402

from aliquot.cluster import Cluster  # noqa: E402
from aliquot.cost import make_problem, picked_choices  # noqa: E402
from aliquot.graph import capture  # noqa: E402
from aliquot.profiling import (  # noqa: E402
    Combination,
    MeasuredStep,
    ProfileDatabase,
    SegmentedStep,
    Timing,
    compile_part,
    compose,
    measured_step,
    priced_combinations,
    profile_segments,
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
_ROUNDS = 3


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
            f" that share this machine's cores; median of {_ROUNDS} rounds, in which programs take"
            " turns, of the median of at least 5 runs; nothing stopped early. Everything but the"
            " options is split as the integer program finds best. Programs are counted in the"
            " order of `aliquot blocks profile`, most promising first."
        ),
    )
    journal = Journal(chosen.journal)
    rows, met = [], True
    for name, (model, overrides, sample) in _MODELS.items():
        if chosen.only in (None, name):
            found = _model(
                name, model, overrides, 5 if chosen.quick else sample, chosen.database, journal
            )
            report.tables[name] = found["combinations"]
            rows.append(found["summary"])
            met &= found["met"]
    report.tables["Models"] = rows
    report.summary = {row["model"]: f"tau {row['tau, composed']:.3f}" for row in rows}
    return report.finish(chosen, met=None if chosen.quick or chosen.only else met)


def _more(parser: Any) -> None:
    parser.add_argument(
        "--database", type=Path, default=Path("."), help="folder of the measured segments"
    )
    parser.add_argument("--journal", type=Path, help="file of the whole steps measured so far")
    parser.add_argument("--only", choices=sorted(_MODELS))


def _model(
    name: str, model: str, overrides: dict[str, Any], sample: int, folder: Path, journal: Journal
) -> dict[str, Any]:
    workload = build(model, _BATCH, overrides=overrides, dtype="float32", recompute="none")
    graph = capture(workload.train_step, workload.state, workload.batch)
    step = segment_step(make_problem(graph, Cluster.detect(jax.devices())), (8,))
    combinations = priced_combinations(step)
    layers = [k for k, kind in enumerate(step.kinds) if len(kind.blocks) > 1]
    chosen = list(itertools.product(*[[c.options for c in combinations[k]] for k in layers]))
    if sample:
        chosen = random.Random(0).sample(chosen, min(sample, len(chosen)))
    measured = _measured(name, step, combinations, folder)
    rows = []
    for options_of_layers in chosen:
        fixed = dict(zip(layers, options_of_layers, strict=True))
        alone = [
            [c for c in some if k not in fixed or c.options == fixed[k]]
            for k, some in enumerate(combinations)
        ]
        # The head follows what the analytic model finds fastest with these layers.
        (planned,) = compose(step, alone, most=1)
        exact = [
            [c for c in some if c.options == o]
            for some, o in zip(alone, planned.options, strict=True)
        ]
        (composed,) = compose(step, exact, measured, most=1)
        rows.append(
            {
                "options": " | ".join(" ".join(map(str, o)) for o in options_of_layers),
                "composed s": composed.seconds,
                "measured share": composed.measured_share,
                "chosen": planned.options,
            }
        )
    whole = journal.row(
        name, functools.partial(_whole, name, step, [row.pop("chosen") for row in rows])
    )
    for row, times_s, model_s in zip(rows, whole["seconds"], whole["model_s"], strict=True):
        row |= {"measured s": float(np.median(times_s)), "model s": model_s}
    return _judged(name, rows, np.array(whole["seconds"]), step.num_programs)


def _measured(
    name: str, step: SegmentedStep, combinations: Sequence[Sequence[Combination]], folder: Path
) -> MeasuredStep:
    """Medians of several runs of the profiler."""
    rounds = []
    for number in range(_ROUNDS):
        with ProfileDatabase(folder / f"segments_{name}_{number}.sqlite") as database:
            profile_segments(
                step,
                database,
                timing=Timing(early_stop=math.inf),
                progress=lambda what, done, of: say(f"{name}, round {number}: {done}/{of} {what}"),  # noqa: B023
            )
            rounds.append(measured_step(step, combinations, database))
    return MeasuredStep(
        kinds=tuple(
            {
                options: float(np.median([r.kinds[k][options] for r in rounds]))
                for options in rounds[0].kinds[k]
            }
            for k in range(len(step.kinds))
        ),
        conversions={
            c: float(np.median([r.conversions[c] for r in rounds])) for c in rounds[0].conversions
        },
        launch_s=float(np.median([r.launch_s for r in rounds])),
    )


def _whole(name: str, step: SegmentedStep, chosen: Sequence[Any]) -> dict[str, list[Any]]:
    """Seconds of every round and of the analytic model for whole steps, which take turns."""
    parts, model_s = [], []
    for number, options_of_kinds in enumerate(chosen):
        solution = step.whole(options_of_kinds)
        assert solution is not None
        choices = picked_choices(step.space.priced, solution.picks)
        parts.append(compile_part(step.problem, choices, step.mesh.shape, step.mesh.axis_names))
        model_s.append(solution.step_time_s)
        say(f"{name}: {number + 1}/{len(chosen)} whole steps compiled")
    times: list[list[float]] = [[] for _ in parts]
    for number in range(_ROUNDS):
        for k, part in enumerate(parts):
            found = time_part(part, Timing(warm_up=1))
            assert found.seconds is not None
            times[k].append(found.seconds)
        say(f"{name}: {number + 1}/{_ROUNDS} rounds of whole steps")
    return {"seconds": times, "model_s": model_s}


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
