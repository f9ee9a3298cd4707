"""Are our plans as good as those that Alpa found, and are predicted times those that were measured?

Puts both plans of each case of Alpa's suites (GPT, MoE, Wide-ResNet on 1 to 64 V100s of
p3.16xlarge machines) side by side, as `aliquot bench alpa` predicts them:

    for suite in gpt moe wresnet; do
      aliquot bench alpa $suite.perf_test_auto --predict --search --out FOLDER/$suite
    done
    python benchmarks/pipeline_suite.py FOLDER [--quick]

Then the GPTs are predicted once more, as the step that Alpa's benchmark ran and for the compiler of
2022, beside the throughput that its artifact published. These rows are kept in FOLDER, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _alpa_step import SIZES, alpa_step, of_2022
from _results import Journal, Report, options

import aliquot as aq
from aliquot.cluster import target_for
from aliquot.suites import (
    GIVEN,
    OURS,
    BuiltCase,
    Case,
    GivenStage,
    alpa_suites,
    operations,
    part_of,
    plan_given,
)

_FAMILIES = ("gpt", "moe", "wresnet")
_MACHINES = "8x8xV100-16GB"
_SAME = 1e-6


def _plans(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Both plans of each case that the folders of `aliquot bench alpa` hold, and the cases that
    they lack.
    """
    table, missing = [], []
    for family in _FAMILIES:
        suite = alpa_suites()[f"{family}.perf_test_auto"]
        rows = Journal(folder / family / "rows.jsonl").rows.values()
        known = {(row["case"], row["plan_of"]): row for row in rows}
        for case in suite.cases:
            name = f"{case.suite} {case.number}"
            theirs, ours = (known.get((name, plan_of), {}) for plan_of in (GIVEN, OURS))
            if not theirs.get("predicted_s"):
                missing.append(name)
                continue
            ours_s = ours.get("predicted_s")
            table.append(
                {
                    "case": f"{case.model} on {case.num_devices}",
                    "ours s": ours_s or "no plan",
                    "Alpa's s": theirs["predicted_s"],
                    "ours / Alpa's": ours_s and ours_s / theirs["predicted_s"],
                    "Alpa's fits": "no" if theirs["outcome"] == "does not fit" else "yes",
                    "ours is": _said(ours) if ours_s else "",
                    "Alpa's is": _said(theirs),
                    "ours took": ours.get("metadata", "").partition("planned in ")[2],
                }
            )
    return table, missing


def _said(row: Mapping[str, Any]) -> str:
    """A plan in a few words."""
    return f"{row['parallel']}; {row['num_micro_batches']} micro-batches"


def _as_run(case: Case) -> BuiltCase:
    """The step that Alpa's benchmark ran. What Alpa found recomputes each of its layers, equal
    groups of blocks, as a whole; what was laid out by hand recomputes block by block.
    """
    groups = None if case.layout else sum(stage.layers for stage in case.stages)
    sizes = {name: getattr(case.config, name) for name in SIZES}
    step, state, batch = alpa_step(
        {**sizes, "batch": case.global_batch}, recompute=case.recompute, groups=groups
    )
    return BuiltCase(
        case=case,
        step=step,
        state=state,
        batch=batch,
        init=lambda key: state,
        num_parameters=0,
        graph=aq.capture(step, state, batch),
        reference=None,
        build_s=0.0,
    )


def _of_2022(case: Case) -> dict[str, Any]:
    """A published figure beside what is predicted for the plan, as the compiler of 2022 ran it."""
    built = _as_run(case)
    if case.layout is not None:
        # Alpa's solver splits the operators of its stages, too.
        data, tensor, pipeline = case.layout
        stages = (GivenStage(layers=1, mesh=(data, tensor)),) * pipeline
        built = dataclasses.replace(
            built, case=dataclasses.replace(case, layout=None, stages=stages)
        )
    machines = part_of(aq.Cluster.preset(_MACHINES), case.num_devices)
    assert machines is not None
    cluster = of_2022(machines)
    p = plan_given(built, cluster).prediction
    work = operations(case) / case.num_devices / 1e12
    published = case.published_tflops or work / (case.published_s or np.nan)
    return {
        "GPUs": case.num_devices,
        "model": case.model,
        "plan": case.parallel,
        "published TFLOP/s": published,
        "predicted TFLOP/s": work / p.step_time_s,
        "error": work / p.step_time_s / published - 1,
        "step s": p.step_time_s,
        "compute s": p.compute_s,
        "communication s": p.communication_s + p.gradient_s,
        "bubble s": p.bubble_s,
        "peak memory / usable": (
            p.peak_memory_bytes / target_for(cluster.device).usable_bytes(cluster.device)
        ),
    }


def _ranked_wrongly(table: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """Of pairs on as many GPUs that differ by 5 % or more as published: how many, and which are
    ranked wrongly.
    """
    count, wrong = 0, []
    for a, b in itertools.combinations(table, 2):
        low, high = sorted((a, b), key=lambda row: row["published TFLOP/s"])
        close = high["published TFLOP/s"] < 1.05 * low["published TFLOP/s"]
        if a["GPUs"] != b["GPUs"] or close:
            continue
        count += 1
        if high["predicted TFLOP/s"] <= low["predicted TFLOP/s"]:
            wrong.append(f"{a['GPUs']}: {high['plan']} above {low['plan']}")
    return count, wrong


def main() -> int:
    """Run, and write or print the answer."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("folder", type=Path)

    chosen = options(__doc__, add)
    report = Report(
        name="pipeline_suite",
        question="Our plans and Alpa's on 1 to 64 V100s, and predicted beside published throughput",
        bar=(
            "plans: in every case ours takes at most as long as Alpa's, by one judge; GPT"
            " throughput: the median error is at most 10 %, and pairs on as many GPUs that differ"
            " by 5 % or more are ranked right"
        ),
        method=(
            "Plans: rows of `aliquot bench alpa SUITE.perf_test_auto --predict --search` for GPT,"
            " MoE and Wide-ResNet: blocks recomputed, with the optimizers that they ran with, on"
            " p3.16xlarge machines (8 V100-16GB with NVLink, 25 Gbit/s between machines). Alpa's"
            " plan has the suite's number of micro-batches, 1f1b, its layers taken for equal groups"
            " of blocks; a mesh without a forced batch is one free axis, taken as dp or as tp,"
            " whichever fits and is faster. Ours is what method auto finds, with everything open"
            ' but the recomputation; where a time limit ended its search, "ours took" says so.'
            " GPT throughput: the step that Alpa's benchmark ran, nothing overlaps, Alpa's plan as"
            " above, the artifact's count of operations. Constants are those of"
            " calibration/v100.toml; none was fitted to a row. Rows come from FOLDER: the seconds"
            " below are those of putting them together."
        ),
    )
    table, missing = _plans(chosen.folder)
    report.tables["Plans"] = table
    slower = [
        row["case"]
        for row in table
        if row["ours s"] == "no plan" or row["ours s"] > row["Alpa's s"] * (1 + _SAME)
    ]
    ratios = [row["ours / Alpa's"] for row in table if row["ours / Alpa's"]]
    cases = [
        *alpa_suites()["gpt.perf_test_auto"].cases,
        *(case for case in alpa_suites()["gpt.perf_test_manual"].cases if case.published_s),
    ]
    journal = Journal(chosen.folder / "as-run.jsonl")
    steps = [
        journal.row(f"{case.suite} {case.number}", functools.partial(_of_2022, case))
        for case in cases
        if not chosen.quick or case.num_devices <= 2
    ]
    report.tables["Throughput"] = steps
    errors = [abs(row["error"]) for row in steps]
    count, wrong = _ranked_wrongly(steps)
    report.summary = {
        "cases": len(table),
        "cases not worked out": missing,
        "Alpa's plan is faster": slower,
        "Alpa's plan does not fit by our estimate": [
            row["case"] for row in table if row["Alpa's fits"] == "no"
        ],
        "ours / Alpa's, median": float(np.median(ratios)) if ratios else "none",
        "published rows": len(steps),
        "median error": float(np.median(errors)),
        "worst error": max(errors),
        "pairs of them that differ by 5 % or more": count,
        "of these ranked wrongly": wrong,
    }
    met = not missing and not slower and float(np.median(errors)) <= 0.1 and not wrong
    return report.finish(chosen, met=met)


if __name__ == "__main__":
    sys.exit(main())
