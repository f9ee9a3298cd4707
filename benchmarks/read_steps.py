"""How far are steps that `aliquot read` predicts from settings' own files from reported ones?

    python benchmarks/read_steps.py public-steps.json MAXTEXT MEGATRON-BRIDGE

The first is a table of reported steps (see `_public_rows.py`), the others are folders with the
sources of these frameworks, in which the files of settings lie. Each reported step whose settings
are there as a file, with the same degrees and batch, is a row. Nothing was fitted to these rows
here; which of them the cost model was fitted to is said in `public_steps`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

from _results import Report, options, say

import aliquot as aq
from aliquot.core import AliquotError

LIMIT = 0.08
TPU = "src/maxtext/configs/tpu"
RECIPES = "src/megatron/bridge/perf_recipes/llama"
# By the beginning of a row's name: the file in its framework's folder, a recipe, and the device.
MAXTEXT = {
    **{f"maxtext-v5p-64b-{n}x128": (f"{TPU}/v5p/64b.sh", "v5p") for n in (1, 2)},
    **{f"maxtext-v5p-128b-{n}x256": (f"{TPU}/v5p/128b.sh", "v5p") for n in (1, 2)},
    **{f"maxtext-v5p-128b-{n}x512": (f"{TPU}/v5p/128b.sh", "v5p") for n in (1, 2)},
    **{f"maxtext-v5e-64b-{n}x256": (f"{TPU}/v5e/64b.sh", "v5e") for n in (1, 2, 4)},
    **{f"maxtext-v5e-128b-{n}x256": (f"{TPU}/v5e/128b.sh", "v5e") for n in (1, 2, 4)},
}
# Of several releases, the newest with the degrees and the batch of the recipe.
BRIDGE = {
    "mbridge-25.11-llama3-8b-DGX-H100-FP8-CS-8": ("h100", "llama3_8b_pretrain_8gpu_h100_fp8cs"),
    "mbridge-26.04.01-llama3-70b-DGX-H100-FP8-64": (
        "h100",
        "llama3_70b_pretrain_64gpu_h100_fp8cs",
    ),
    "mbridge-25.11-llama3-8b-DGX-B200-FP8-CS (FP8-MX)-8": (
        "b200",
        "llama3_8b_pretrain_8gpu_b200_fp8mx",
    ),
    "mbridge-25.11-llama3-8b-DGX-GB200-FP8-CS (FP8-MX)-8": (
        "gb200",
        "llama3_8b_pretrain_8gpu_gb200_fp8mx",
    ),
    "mbridge-26.04.01-llama3-70b-DGX-GB200-FP8-64": (
        "gb200",
        "llama3_70b_pretrain_64gpu_gb200_fp8cs",
    ),
    "mbridge-26.04.01-llama3-70b-DGX-GB200-MXFP8-64": (
        "gb200",
        "llama3_70b_pretrain_64gpu_gb200_fp8mx",
    ),
}


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, _more)
    known = {row["id"]: row for row in json.loads(chosen.rows.read_text())["rows"]}
    report = Report(
        name="read_steps",
        question="Steps predicted from the frameworks' own files beside reported ones",
        bar=f"median error of the step time within {LIMIT:.0%} of MaxText's and Megatron's rows",
        method=(
            "Files as the frameworks' repositories have them in August 2026, read by `aq.read` for"
            " the reported devices; nothing is added but the number of slices. `not followed` are"
            " the settings that `read` lists as lost. Memory is predicted; `fits` is `read`'s word."
            " Rows whose layout or batch differs from what was reported are shown and not counted."
        ),
    )
    rows = []
    for name in [*MAXTEXT, *BRIDGE]:
        if chosen.only and not re.search(chosen.only, name):
            continue
        rows.append(_row(known[name], chosen))
        say(f"{rows[-1]}")
    counted = [row for row in rows if isinstance(row["error"], float) and row["same layout"]]
    errors = {
        kind: [abs(row["error"]) for row in counted if row["framework"] == kind]
        for kind in ("MaxText", "Megatron")
    }
    report.tables["Steps"] = rows
    medians = {kind: statistics.median(each) for kind, each in errors.items() if each}
    every = [error for each in errors.values() for error in each]
    report.summary = {
        **{f"{k}, {len(errors[k])} rows: median error": f"{m:.1%}" for k, m in medians.items()},
        f"all {len(every)} rows: median error": f"{statistics.median(every):.1%}",
        "called unfit": f"{sum(row['fits'] == 'no' for row in rows)} of {len(rows)}",
    }
    return report.finish(chosen, met=statistics.median(every) <= LIMIT)


def _row(row: dict[str, Any], chosen: argparse.Namespace) -> dict[str, Any]:
    name, devices = row["id"], row["cluster"]["devices"]
    per_host = row["cluster"]["devices_per_host"] or 8
    if name in MAXTEXT:
        file, device = MAXTEXT[name]
        files = [str(chosen.maxtext / file)]
        slices = int(name.rpartition("-")[2].partition("x")[0])
        files += [f"num_slices={slices}"] if slices > 1 else []
        recipe, framework = None, "MaxText"
    else:
        device, recipe = BRIDGE[name]
        recipe += "_config"
        files, framework = [str(chosen.bridge / RECIPES / device / "llama3.py")], "Megatron"
        device = device.upper()
    hosts = f"{devices // per_host}x" if devices > per_host else ""
    cluster = aq.Cluster.preset(f"{hosts}{min(devices, per_host)}x{device}")
    started = time.process_time()
    try:
        found = aq.read(*files, cluster=cluster, recipe=recipe)
    except AliquotError as error:
        return {"row": name, "framework": framework, "error": str(error)[:200], "fits": ""}
    measured_s = row["measured"]["step_s"]
    said = {key: row["parallelism"].get(key) or 1 for key in ("tp", "pp", "cp")}
    zero = row["parallelism"].get("zero")
    got = found.settings
    same = said == {"tp": got.tensor, "pp": got.pipeline, "cp": got.context}
    same &= got.global_batch == row["batch"]["global_sequences"]
    same &= zero is None or got.zero_stage == zero
    plan = found.plan
    predicted_s = plan.prediction.step_time_s if plan else float("nan")
    return {
        "row": name,
        "framework": framework,
        "layout": got.name,
        "recomputation": got.recompute,
        "same layout": same,
        "predicted_s": round(predicted_s, 3),
        "reported_s": measured_s,
        "error": predicted_s / measured_s - 1 if plan else found.refusal[:100],
        "memory_gib": round(plan.prediction.peak_memory_bytes / 2**30, 1) if plan else None,
        "fits": found.fits,
        "not followed": "; ".join(found.found.lost)[:300],
        "cpu_s": round(time.process_time() - started, 1),
    }


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rows", type=Path, help="a table of reported steps")
    parser.add_argument("maxtext", type=Path, help="the folder of MaxText's sources")
    parser.add_argument("bridge", type=Path, help="the folder of Megatron-Bridge's sources")
    parser.add_argument("--only", default="", help="rows whose name matches")


if __name__ == "__main__":
    raise SystemExit(main())
