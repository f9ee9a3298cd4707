"""Are layouts that experts published priced as they run, and is the default as fast?

Ten layouts of Megatron-Bridge, NeMo, MaxText and torchtitan with their reported step times, each
planned as `public_steps.py` does. Beside each stands what aliquot takes by default for the same
model, batch and cluster, with the term of the price in which the two differ most: one judge prices
both.

    python benchmarks/published_layouts.py FOLDER [--journal FILE] [--most-devices N]

FOLDER holds `public-steps.json` and `fresh-steps.json`. `--most-devices` leaves out the default on
larger clusters. A journal keeps each plan as soon as it is there, as that of `public_steps.py`.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from _public_rows import Case
from _results import Journal, Report, options, say
from public_steps import Row, parts_of, plan_row, read_cases

import aliquot as aq
from aliquot.cluster import figures_digest
from aliquot.core import AliquotError
from aliquot.zoo import build

LAYOUTS = (
    "dgxc-v25.04.01-llama3-8b-bf16-8gpu",
    "dgxc-v24.11.1-gpt3-175b-bf16-256gpu",
    "mbridge-26.04.01-llama3-70b-DGX-H100-FP8-64",
    "mbridge-26.04.01-qwen3-30b-a3b-DGX-H100-FP8-16",
    "jaxtoolbox-maxtext-llama2-7b-8xH100",
    "gpurecipes-a3u-70b-256",
    "maxtext-v5p-128b-1x256",
    "maxtext-v5e-64b-1x256",
    "torchtitan-7a04053-llama3-8b-bf16",
    "torchtitan-70b-256gpu-tp8-async-bf16",
)


def main() -> int:
    """Run, and write the answer."""
    chosen = options(
        __doc__,
        lambda parser: parser.add_argument("folder", type=Path),
        lambda parser: parser.add_argument("--journal", type=Path),
        lambda parser: parser.add_argument("--most-devices", type=int, default=512),
    )
    journal = Journal(chosen.journal)
    cases = {case.id: case for case in read_cases(chosen.folder)[0]}
    rows, errors, unfit = [], [], 0
    for name in LAYOUTS[:1] if chosen.quick else LAYOUTS:
        case = cases[name]
        row = plan_row(case, journal)
        default = None
        if case.cluster.num_devices <= chosen.most_devices:
            default = default_of(case, journal)
        rows.append(shown(row, default))
        unfit += not row.fits
        errors += [abs(row.error)] if row.step_s else []
        say(f"{name}: {rows[-1]}")
    median = statistics.median(errors) if errors else 1.0
    report = Report(
        name="published_layouts",
        question="Are layouts that experts published priced as they run?",
        bar="steps within 12 % in the median, all on their cards",
        method=" ".join((__doc__ or "").split("\n\n")[1].split()),
        summary={
            "error of steps, median": f"{median:.1%}",
            "on their cards": f"{len(rows) - unfit} of {len(rows)}",
            "faster than the default": sum(
                row["layout / default"] is not None and row["layout / default"] < 1 for row in rows
            ),
        },
        tables={"Published layouts": rows},
    )
    return report.finish(chosen, met=median <= 0.12 and not unfit)


def default_of(case: Case, journal: Journal) -> dict[str, Any]:
    """The plan that aliquot makes without being told a layout: `method`, `step_s`, `needed_bytes`
    and `parts`.
    """
    key = json.dumps([case.id, "default", figures_digest(case.device)])
    return journal.row(key, lambda: _planned(case))


def _planned(case: Case) -> dict[str, Any]:
    settings = {**case.settings, "recompute": "none", "scan": True}
    work = build(**settings, device=case.cluster.device)
    try:
        plan = aq.plan(work.train_step, work.state, work.batch, cluster=case.cluster)
    except AliquotError as error:
        return {"method": str(error).splitlines()[0][:140], "step_s": None}
    found = plan.prediction
    return {
        "method": f"{plan.method}, {plan.num_micro_batches} micro-batches, {plan.recompute}",
        "step_s": found.step_time_s,
        "needed_bytes": found.peak_memory_bytes,
        "parts": parts_of(plan),
    }


def shown(row: Row, default: dict[str, Any] | None) -> dict[str, Any]:
    """A line of the table: the layout beside what was reported, and beside the default."""
    case = row.case
    told = {
        "row": case.id,
        "framework": case.framework,
        "layout": getattr(case.method, "name", type(case.method).__name__),
        "recompute": case.settings["recompute"],
        "reported s": case.measured_s,
        "predicted s": row.step_s,
        "error": f"{row.error:+.1%}" if row.step_s else "does not fit",
        "GiB": (row.needed_bytes or 0) / 2**30,
        "card GiB": case.cluster.device.memory_bytes / 2**30,
        "default": "" if default is None else default["method"],
        "default s": None if default is None else default["step_s"],
        "layout / default": None,
        "most of it": "",
    }
    if row.step_s and default and default["step_s"]:
        terms = {name: row.parts[name] - default["parts"][name] for name in row.parts}
        # What is hidden takes no time.
        terms["collectives"] -= terms.pop("hidden")
        name = max(terms, key=lambda name: abs(terms[name]))
        told |= {
            "layout / default": row.step_s / default["step_s"],
            "most of it": f"{name} {terms[name]:+.3g} s",
        }
    return told


if __name__ == "__main__":
    sys.exit(main())
