"""Do measured segments rank the plans of a whole step, and tell its time?

On 8 virtual devices, for a GPT and a mixture of experts of two layers: every combination of options of a layer's blocks (of the
mixture of experts a seeded sample) is run as a whole step, and beside it stand the time composed of measured segments and the
analytic model's.

    python benchmarks/segment_profiles.py [--quick] [--database FOLDER] [--only gpt|moe]

Measurements of segments are kept in FOLDER, those of whole steps in the journal, so that it can go on where it was.
"""

from __future__ import annotations

import functools
import itertools
import random
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
    ProfileDatabase,
    SegmentedStep,
    compile_part,
    compose,
    measured_seconds,
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
        {"num_layers": 2, "hidden_size": 128, "num_heads": 8, "seq_len": 64, "num_experts": 8, "vocab_size": 256},
        60,
    ),
}
_BATCH = 16


def main() -> int:
    """Run, and write what came out; 1 if a bar is missed."""
    chosen = options(__doc__, _more)
    report = Report(
        name="segment_profiles",
        question="Do measured segments rank the plans of a whole step, and tell its time?",
        bar=(
            f"Kendall's tau at least {_TAU} with measured segments; median error of the composed time at most {_ERROR:.0%}; at most "
            f"{_PROGRAMS} programs to find a winner within {_NEAR:.0%} of the best"
        ),
        method=(
            "Every segment's program and every whole step is compiled and run on 8 virtual devices that share this machine's cores; "
            "median of at least 5 runs after 2 to warm up, nothing stopped early. Everything but the options is split as the "
            "integer program finds best. Programs are counted in the order of `aliquot blocks profile`, most promising first."
        ),
    )
    journal = Journal(chosen.journal)
    rows, met = [], True
    for name, (model, overrides, sample) in _MODELS.items():
        if chosen.only in (None, name):
            found = _model(name, model, overrides, 5 if chosen.quick else sample, chosen.database, journal)
            report.tables[name] = found["combinations"]
            rows.append(found["summary"])
            met &= found["met"]
    report.tables["Models"] = rows
    report.summary = {row["model"]: f"tau {row['tau, composed']:.3f}" for row in rows}
    return report.finish(chosen, met=None if chosen.quick or chosen.only else met)


def _more(parser: Any) -> None:
    parser.add_argument("--database", type=Path, default=Path("."), help="folder of the measured segments")
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
    with ProfileDatabase(folder / f"segments_{name}.sqlite") as database:
        profile_segments(
            step, database, stops_early=False, progress=lambda what, done, of: say(f"{name} {done}/{of} {what}")
        )
        measured = measured_seconds(step, combinations, database)
    rows = []
    for options_of_layers in chosen:
        fixed = dict(zip(layers, options_of_layers, strict=True))
        alone = [[c for c in some if k not in fixed or c.options == fixed[k]] for k, some in enumerate(combinations)]
        # The head follows what the analytic model finds fastest with these layers.
        (planned,) = compose(step, alone, [{} for _ in step.kinds], most=1)
        exact = [[c for c in some if c.options == o] for some, o in zip(alone, planned.options, strict=True)]
        (composed,) = compose(step, exact, measured, most=1)
        row = journal.row(f"{name} {options_of_layers}", functools.partial(_whole, step, planned.options))
        label = " | ".join(" ".join(map(str, o)) for o in options_of_layers)
        rows.append(
            {"options": label, "measured s": row["seconds"], "composed s": composed.seconds, "model s": row["model_s"]}
        )
        say(str(rows[-1]))
    return _judged(name, rows, step.num_programs)


def _whole(step: SegmentedStep, chosen: Any) -> dict[str, float]:
    solution = step.whole(chosen)
    assert solution is not None
    choices = picked_choices(step.space.priced, solution.picks)
    found = time_part(compile_part(step.problem, choices, step.mesh.shape, step.mesh.axis_names))
    assert found.seconds is not None
    return {"seconds": found.seconds, "model_s": solution.step_time_s}


def _judged(name: str, rows: list[dict[str, Any]], num_programs: int) -> dict[str, Any]:
    from scipy.stats import kendalltau

    measured = np.array([row["measured s"] for row in rows])
    composed = np.array([row["composed s"] for row in rows])
    model = np.array([row["model s"] for row in rows])
    tau, tau_model = float(kendalltau(measured, composed)[0]), float(kendalltau(measured, model)[0])
    errors = np.abs(composed / measured - 1)
    # Most promising first by the model; the winner is the best of those composed of measurements so far.
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
        "median error, composed": float(np.median(errors)),
        "median error, model": float(np.median(np.abs(model / measured - 1))),
        "layers profiled to be within 2 % of the best": programs,
        "spread of measured times": float(measured.max() / measured.min()),
    }
    met = tau >= _TAU and float(np.median(errors)) <= _ERROR and programs <= _PROGRAMS
    return {"combinations": rows, "summary": summary, "met": met}


if __name__ == "__main__":
    raise SystemExit(main())
