r"""Is predicted peak memory what the compiler takes for GPUs, or TPUs, that are not there?

Draws combinations of model, form, method, mesh, recomputation, micro-batches, number type, size and
device so that every pair of choices occurs, plans each for eight devices, compiles the plan for
that device without having one, and compares the peaks. A process of its own compiles each plan.
What is fitted in `aliquot/cluster/_target.py` was fitted on the first half of the plans for GPUs
alone. For TPUs nothing is fitted, but two draws of three were in sight while the model found its
form.

Needs the wheels of `jax-cuda12-plugin`, `jax-cuda12-pjrt` and `nvidia-cuda-nvcc-cu12`, or of
`libtpu`, on `PYTHONPATH`.

    python benchmarks/memory_deviceless.py [--quick] [--count 80] [--journal compiled.jsonl] \
        [--dumps FOLDER]
    python benchmarks/memory_deviceless.py --tpus --count 12  (24 that were in sight, and 12 others)
    python benchmarks/memory_deviceless.py --real --count 40  (models of the zoo at real size)
    python benchmarks/memory_deviceless.py --modern  (12 plans of what people train today)
    python benchmarks/memory_deviceless.py --modern --drawn 30  (pipelines, and ways to recompute)
    python benchmarks/memory_deviceless.py --limit  (the largest batches, and a little larger ones)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _memory_cases import (
    FACTORS,
    SEEDS_OF_REAL_SIZES,
    TPUS,
    cases_near_the_limit,
    cluster_of,
    draw,
    method_of,
    real_cases,
    workload_of,
)
from _memory_modern import PLANS, drawn_plans, modern_row
from _results import Journal, Report, options, say

from aliquot.cluster import DEVICES, target_for

_NO_LIMIT = 1e15
TOO_LARGE = "too large"


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, _more)
    if chosen.case:
        _one_case(json.loads(chosen.case), _journal(chosen.journal), chosen.plans)
        return 0
    if chosen.real:
        return _real_sizes(chosen)
    if chosen.modern:
        return _modern(chosen)
    if chosen.limit:
        return _near_the_limit(chosen)
    devices = TPUS if chosen.tpus else FACTORS["gpu"]
    halves = ("seen", "reported") if chosen.tpus else ("fitted", "reported")
    limits = (0.08, 0.20) if chosen.tpus else (0.05, 0.15)
    report = Report(
        name="memory_deviceless",
        question=f"Predicted against compiled peak memory on {'TPUs' if chosen.tpus else 'GPUs'}",
        bar=(
            f"reported half: median error at most {_percent(limits[0])}, worst at most"
            f" {_percent(limits[1])}, for each device"
        ),
        method=(
            "Peak bytes on each of 8 devices: the plan's prediction, and the compiler's report of"
            " the buffers it assigned (arguments, temporaries, outputs that reuse nothing). Plans"
            " are made without a memory limit, so that they do not depend on what is compared."
            " Combinations are drawn with a seed so that every pair of choices that fits occurs,"
            " while their number allows; "
            + (
                "of three draws, two were in sight while the model found its form, and the last is"
                " reported; no figure was fitted. One run each."
                if chosen.tpus
                else (
                    "odd ones served to fit, even ones are reported; both were in sight while the"
                    " model found its form. One run each."
                )
            )
        ),
    )
    rows = []
    journal = _journal(chosen.journal)
    most = 4 if chosen.quick else None
    cases = draw(chosen.count, FACTORS | {"gpu": devices})
    chosen_cases = list(zip(itertools.cycle(halves), cases, strict=False))[:most]
    if chosen.tpus:
        draws = [
            cases,
            *(draw(chosen.count, FACTORS | {"gpu": devices}, seed=seed) for seed in (1, 2)),
        ]
        chosen_cases = [
            (halves[index == 2], case) for index, some in enumerate(draws) for case in some[:most]
        ]
    for half, case in chosen_cases:
        if chosen.known:
            rows.append({"half": half, **case, **_known(case, chosen.plans, journal)})
            say(" ".join(f"{k}={v}" for k, v in rows[-1].items()))
        elif chosen.half in ("", half):
            rows.append({"half": half, **case, **_in_process(case, chosen)})
            say(" ".join(f"{k}={v}" for k, v in rows[-1].items()))
    met = []
    for gpu, half in itertools.product(devices, halves):
        errors = sorted(
            abs(r["error"]) for r in rows if (r["gpu"], r["half"]) == (gpu, half) and "error" in r
        )
        if errors:
            summary = {
                "plans": len(errors),
                "median": statistics.median(errors),
                "worst": errors[-1],
            }
            report.summary[f"{gpu}, {half}"] = summary
            if half == "reported":
                met.append(summary["median"] <= limits[0] and summary["worst"] <= limits[1])
    report.summary["not compiled"] = sum("error" not in r for r in rows)
    report.tables = {"Plans": rows}
    return report.finish(chosen, met=all(met) and not report.summary["not compiled"])


def _real_sizes(chosen: Any) -> int:
    """Models of the zoo at the size at which people train them, on GPUs of three generations."""
    report = Report(
        name="memory_deviceless",
        question="Does predicted memory hold at the sizes at which people train?",
        bar=(
            "reported draw: median error at most 3 %, worst at most 15 % (Wide-ResNet 20 %), none"
            " predicted more than 8 % too low"
        ),
        method=(
            "As `memory_deviceless`, with models of the zoo, 4,096 or 16,384 tokens (16 or 64"
            " images) of a micro-batch on each of 8 GPUs, fused attention where the GPU has it, and"
            " all methods. Plans predicted to need more than 0.7 of a device's memory are left out:"
            " there the compiler schedules for memory. Two draws: the first was in sight while the"
            " model found its form, the other is reported. One run each."
        ),
    )
    rows: list[dict[str, Any]] = []
    for half in SEEDS_OF_REAL_SIZES:
        if chosen.half in ("", half):
            rows += _real_rows(half, chosen)
    compiled = [row for row in rows if "error" in row]
    reported = [row for row in compiled if row["half"] == "reported"]
    worst = [
        abs(row["error"]) / (0.20 if row["model"].startswith("wide") else 0.15) for row in reported
    ]
    errors = [row["error"] for row in reported]
    groups = {half: [r for r in compiled if r["half"] == half] for half in SEEDS_OF_REAL_SIZES}
    groups |= {
        f"reported, {gpu}": [r for r in reported if r["gpu"] == gpu]
        for gpu in dict.fromkeys(r["gpu"] for r in reported)
    }
    groups |= {
        f"reported, {kind}": [r for r in reported if r["model"].startswith("wide") is wide]
        for kind, wide in (("transformers", False), ("Wide-ResNets", True))
    }
    for name, group in groups.items():
        some = [row["error"] for row in group]
        if some:
            report.summary[name] = _summary(some)
    report.summary["not compiled"] = len(rows) - len(compiled)
    report.tables = {"Plans": rows}
    met = bool(errors) and len(compiled) == len(rows)
    met = met and statistics.median(map(abs, errors)) <= 0.03 and max(worst) <= 1
    return report.finish(chosen, met=met and min(errors) >= -0.08)


def _real_rows(half: str, chosen: Any) -> list[dict[str, Any]]:
    """Plans of one draw of models at real size, without those that are too large."""
    rows: list[dict[str, Any]] = []
    journal = _journal(chosen.journal)
    seen = real_cases(chosen.count, SEEDS_OF_REAL_SIZES["seen"])
    for case in real_cases(chosen.count, SEEDS_OF_REAL_SIZES[half]):
        if half == "reported" and case in seen:
            continue
        if chosen.known:
            found = _known(case, chosen.plans, journal)
            if not found["compiled MiB"]:
                continue
        else:
            found = _in_process(case, chosen)
        row = {"half": half, **case, **found}
        if row.get("outcome") != TOO_LARGE:
            rows.append(row)
            say(" ".join(f"{k}={v}" for k, v in row.items()))
        if len(rows) >= (4 if chosen.quick else chosen.count):
            break
    return rows


def _summary(errors: list[float]) -> dict[str, float]:
    return {
        "plans": len(errors),
        "median": statistics.median(map(abs, errors)),
        "lowest": min(errors),
        "highest": max(errors),
    }


def _modern(chosen: Any) -> int:
    """Plans of what people train today, pipelines too, as `aliquot verify` compiles them."""
    report = Report(
        name="memory_deviceless",
        question="Does predicted memory hold for what people train today?",
        bar=(
            "median error at most 2 %, lowest -5 %, highest 8 %"
            if chosen.drawn
            else "12 plans: median error at most 5 %, worst at most 15 %"
        ),
        method=(
            "Models of the zoo at their size, as `aliquot plan` lays them out by the command of"
            " each row (recomputing blocks and in one micro-batch unless it says otherwise) and"
            " `aliquot verify` compiles them without the devices: half for H100, half for"
            " A100-80GB. A figure is the peak on the fullest devices; below are those of"
            " each stage, of which chunks on the same devices are not all at their"
            " peak at once. "
            + (
                "Four layers, 2,048 tokens; drawn so that every pair of choices occurs while their"
                " number allows, half of them pipelines with sequence parallelism. No error of them"
                " was looked into."
                if chosen.drawn
                else "All were compiled before: six whose errors were then looked into, which is"
                " how the model found its form, and six that were within 5 % from the start."
            )
            + " One run each."
        ),
    )
    journal = Journal(Path(chosen.journal) if chosen.journal else None)
    rows = []
    plans = drawn_plans(chosen.drawn) if chosen.drawn else PLANS
    for name, (half, words) in list(plans.items())[: 2 if chosen.quick else None]:
        if chosen.half in ("", half) and re.search(chosen.only, name):
            known = chosen.known
            rows.append(modern_row(name, half, words, journal, dumps=chosen.dumps, known=known))
            shown = {k: v for k, v in rows[-1].items() if k not in ("half", "command", "stages")}
            say(" ".join(f"{k}={v}" for k, v in shown.items()))
    compiled = [row for row in rows if "error" in row]
    for half in (*dict.fromkeys(row["half"] for row in rows), "all"):
        errors = [row["error"] for row in compiled if half in ("all", row["half"])]
        if errors:
            report.summary[half] = _summary(errors)
    report.summary["not compiled"] = len(rows) - len(compiled)
    errors = [row["error"] for row in compiled]
    median, lowest, highest = (0.02, -0.05, 0.08) if chosen.drawn else (0.05, -0.15, 0.15)
    met = len(errors) == len(plans) and statistics.median(map(abs, errors)) <= median
    met = met and lowest <= min(errors) and max(errors) <= highest
    stages = [
        {"plan": row["plan"], "stage": number, **stage}
        for row in rows
        for number, stage in enumerate(row.pop("stages", ()))
    ]
    report.tables = {"Plans": rows, "Stages": stages}
    return report.finish(chosen, met=met)


def _near_the_limit(chosen: Any) -> int:
    """Largest batches as `aliquot plan --max-batch` finds them, and batches a little larger."""
    report = Report(
        name="memory_deviceless",
        question="Do the largest batches fit, and only they?",
        bar="of 20 plans none is accepted wrongly, and at most two are refused wrongly",
        method=(
            "The largest batch that `aliquot.largest_batch` finds for models of the zoo in one"
            " micro-batch on 8 GPUs, and the smallest that is predicted to need at least 7 % more"
            " than the limit, 0.9 of a device's memory; both are compiled for that GPU without"
            " having one. A verdict is wrong if the compiler's account says otherwise."
        ),
    )
    rows: list[dict[str, Any]] = []
    for known in cases_near_the_limit()[: 1 if chosen.quick else None]:
        if not re.search(chosen.only, " ".join(map(str, known.values()))):
            continue
        limit = target_for(DEVICES[known["gpu"]]).usable_bytes(DEVICES[known["gpu"]]) / 2**20
        for answer, each in _sizes_near_the_limit(known, limit).items():
            case = known | {"per_device": each, "answer": answer}
            found = _in_process(case, chosen)
            row = {**case, **found, "limit MiB": limit}
            if "compiled MiB" in found:
                fits = found["compiled MiB"] <= limit
                row["verdict"] = "right" if fits == (answer == "accepted") else "wrong"
            rows.append(row)
            say(" ".join(f"{k}={v}" for k, v in row.items()))
    wrong = [row for row in rows if row.get("verdict") == "wrong"]
    for answer in ("accepted", "refused"):
        some = [row for row in rows if row["answer"] == answer and "verdict" in row]
        report.summary[answer] = {
            "plans": len(some),
            "wrongly": sum(row["verdict"] == "wrong" for row in some),
        }
    report.summary["not compiled"] = sum("verdict" not in row for row in rows)
    report.tables = {"Plans": rows}
    accepted = sum(row["answer"] == "accepted" for row in wrong)
    met = not accepted and len(wrong) <= 2 and not report.summary["not compiled"]
    return report.finish(chosen, met=met)


def _sizes_near_the_limit(case: dict[str, Any], limit_mib: float) -> dict[str, int]:
    """Tokens (images) on a device in the largest batch that is accepted, and in one that is
    refused.
    """
    import aliquot as aq

    per_sequence = case["seq_len"] or 1

    def make(batch: int) -> tuple[Any, Any, Any]:
        work = workload_of(case | {"per_device": batch // 8 * per_sequence})
        return work.train_step, work.state, work.batch

    found = aq.largest_batch(
        make,
        cluster=aq.Cluster.preset(cluster_of(case)),
        method=method_of(case),
        unit=8,
        num_micro_batches=1,
    )
    if found.largest is None or found.largest.plan is None:
        return {}
    accepted = found.largest.global_batch // 8
    need = found.largest.plan.prediction.peak_memory_bytes / 2**20
    refused = accepted
    while need < 1.07 * limit_mib:
        refused += max(1, accepted // 32)
        need = predicted_now(case | {"per_device": refused * per_sequence}, "")[0]["predicted MiB"]
    return {"accepted": accepted * per_sequence, "refused": refused * per_sequence}


def _more(parser: Any) -> None:
    parser.add_argument("--count", type=int, default=80, help="combinations to draw")
    parser.add_argument("--real", action="store_true", help="models at real size, on GPUs")
    parser.add_argument("--modern", action="store_true", help="what people train today, on GPUs")
    parser.add_argument("--drawn", type=int, default=0, help="of --modern: so many drawn plans")
    parser.add_argument("--limit", action="store_true", help="largest batches, on GPUs")
    parser.add_argument("--tpus", action="store_true", help="for TPUs instead of GPUs")
    parser.add_argument(
        "--journal",
        default="",
        help="keep what was compiled here; the same plan is not compiled again",
    )
    parser.add_argument("--dumps", default="", help="keep the compiler's reports here")
    parser.add_argument(
        "--plans", default="", help="keep plans here; what is planned here is not planned again"
    )
    parser.add_argument(
        "--known", action="store_true", help="compile nothing that the journal does not hold"
    )
    parser.add_argument(
        "--half",
        default="",
        choices=("", "fitted", "seen", "reported"),
        help="only these combinations",
    )
    parser.add_argument("--only", default="", help="any text: write no result file")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one combination")
    parser.add_argument("--case", default="", help="one combination as JSON; prints its figures")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _in_process(case: dict[str, Any], chosen: Any) -> dict[str, Any]:
    """Figures of one combination, from a process of its own.

    It is ended once the compiler has reported its buffers: to make code of the program would take
    as long again.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
        if not chosen.tpus:
            flags += " --xla_gpu_autotune_level=0"
        command = [
            sys.executable,
            __file__,
            "--case",
            json.dumps(case),
            "--journal",
            chosen.journal,
        ]
        command += ["--plans", getattr(chosen, "plans", "")]
        out = Path(folder) / "out"
        with out.open("w") as file, Path(folder, "err").open("w") as errors:
            child = subprocess.Popen(
                command,
                stdout=file,
                stderr=errors,
                env=os.environ | {"ALIQUOT_DUMP": flags},
                start_new_session=True,
            )
            started_s = time.perf_counter()
            report = None
            while child.poll() is None and report is None:
                time.sleep(0.3)
                report = _usage_report(Path(folder))
                if time.perf_counter() - started_s > chosen.timeout:
                    break
            report = report or _usage_report(Path(folder))
            child.kill()
            child.wait()
        lines = out.read_text().splitlines()
        if not lines:
            return {"outcome": _last_error(folder)}
        found: dict[str, Any] = json.loads(lines[-1])
        if "outcome" in found:
            return found
        if not found.pop("known"):
            if report is None:
                late = time.perf_counter() - started_s > chosen.timeout
                return {
                    "outcome": (
                        f"not compiled in {chosen.timeout:.0f} s" if late else _last_error(folder)
                    )
                }
            found["compiled MiB"] = report
            entry = {"case": case, "key": found["key"], "compiled MiB": report}
            entry["seconds"] = round(time.perf_counter() - started_s, 1)
            if chosen.journal:
                with Path(chosen.journal).open("a") as file:
                    file.write(json.dumps(entry) + "\n")
            if chosen.dumps:
                kept = Path(chosen.dumps) / found["key"]
                kept.mkdir(parents=True, exist_ok=True)
                for path in Path(folder).glob("*after_optimizations*.txt"):
                    shutil.copy(
                        path, kept / path.name.split("after_optimizations")[-1].lstrip("-.")
                    )
                (kept / "case.json").write_text(json.dumps(found | case))
    return _compared(found)


def _last_error(folder: str) -> str:
    """What a process wrote last that names an error."""
    lines = Path(folder, "err").read_text().strip().splitlines() or ["no message"]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1])[:200]


def _known(case: dict[str, Any], plans: str, journal: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Figures of one combination that was compiled before, from this process."""
    found: dict[str, Any] = {}
    if any(entry["case"] == case for entry in journal.values()):
        os.environ["JAX_PLATFORMS"] = "cpu"
        found, _, _ = predicted_now(case, plans)
    if found.get("key") not in journal:
        return {"predicted MiB": None, "compiled MiB": None}
    return _compared(found | {"compiled MiB": journal[found["key"]]["compiled MiB"]})


def _compared(found: dict[str, Any]) -> dict[str, Any]:
    error = found["predicted MiB"] / found["compiled MiB"] - 1
    parts = {name: round(num_bytes / 2**20, 1) for name, num_bytes in found["parts"].items()}
    return {
        "predicted MiB": found["predicted MiB"],
        "compiled MiB": found["compiled MiB"],
        "error": error,
        "predicted parts, MiB": parts,
    }


def _usage_report(folder: Path) -> float | None:
    """The peak that the compiler reports, in MiB, once it has gone on from there.

    For TPUs it is what the compiler itself holds against a chip's memory, to the digits that it
    shows where it refuses a program. The temporaries of `memory_analysis` are more than that.
    """
    for path in folder.glob("*.cl_*.after_optimizations-memory-usage-report.txt"):
        if Path(str(path).replace("-memory-usage-report", "_after_buffer_assignment")).exists():
            return _total_mib(path)
    for path in folder.glob("*_gpu_after_optimizations-memory-usage-report.txt"):
        if next(folder.glob(path.name.split(".sm_")[0] + "*.ll"), None):
            return _total_mib(path)
    return None


def _total_mib(report: Path) -> float | None:
    """What a report says of the device's main memory, which comes first."""
    total = re.search(r"Total bytes: (\d+)", report.read_text())
    return int(total[1]) / 2**20 if total else None


def _journal(path: str) -> dict[str, dict[str, Any]]:
    if not path or not Path(path).exists():
        return {}
    return {entry["key"]: entry for entry in map(json.loads, Path(path).read_text().splitlines())}


def _one_case(case: dict[str, Any], known: dict[str, dict[str, Any]], plans: str) -> None:
    """Plan one combination, print the prediction, and compile it unless that was done before."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from aliquot.cluster import Cluster
    from aliquot.verification import require_compiler, resolve_target

    target = resolve_target(case["gpu"], Cluster.preset(cluster_of(case)))
    needed = require_compiler(target)
    os.environ.update(needed)
    os.environ["XLA_FLAGS"] = (
        f"{needed.get('XLA_FLAGS', '')} {os.environ.get('ALIQUOT_DUMP', '')}".strip()
    )
    found, work, plan = predicted_now(case, plans)
    found["known"] = found["key"] in known
    near = "answer" in case
    if (
        "model" in case
        and not near
        and found["predicted MiB"] > 0.7 * DEVICES[case["gpu"]].memory_bytes / 2**20
    ):
        print(json.dumps({"outcome": TOO_LARGE}), flush=True)
        return
    if found["known"]:
        found["compiled MiB"] = known[found["key"]]["compiled MiB"]
    print(json.dumps(found), flush=True)
    if found["known"]:
        return
    _compile(work, plan, target)


def predicted_now(case: dict[str, Any], plans: str) -> tuple[dict[str, Any], Any, Any]:
    """What is predicted for one combination, its step and its plan."""
    import aliquot as aq

    work = workload_of(case)
    plan = _planned(aq, case, work, plans)
    stage = plan.stages[0]
    splits = [
        stage.mesh_shape,
        stage.data_axes,
        [[o.node, sorted(o.splits.items())] for o in stage.interior],
        *(["casts once"] if stage.casts_once else []),
    ]
    text = json.dumps(case, sort_keys=True) + json.dumps(splits)
    found = {
        "key": hashlib.sha256(text.encode()).hexdigest()[:16],
        "predicted MiB": plan.prediction.peak_memory_bytes / 2**20,
        "parts": plan.prediction.memory_bytes,
        "moment": plan.prediction.peak_moment,
    }
    return found, work, plan


def _planned(aq: Any, case: dict[str, Any], work: Any, folder: str) -> Any:
    """The combination's plan; one that was made before with what is predicted for it now."""
    name = "-".join(str(value) for value in case.values())
    path = Path(folder, f"{name}.json") if folder else None
    cluster = aq.Cluster.preset(cluster_of(case))
    if path is None or not path.exists():
        # What was accepted is the plan that fits; a faster one may need more.
        limit_bytes = None if case.get("answer") == "accepted" else _NO_LIMIT
        plan = aq.plan(
            work.train_step,
            work.state,
            work.batch,
            cluster=cluster,
            method=method_of(case),
            num_micro_batches=case["micro_batches"],
            memory_limit_bytes=limit_bytes,
        )
        if path is not None:
            plan.save(path)
        return plan
    import msgspec

    from aliquot.cost import PlannedStep, estimate, make_problem
    from aliquot.sharding import plan_micro_batches

    plan = aq.Plan.load(path)
    graph = aq.capture(work.train_step, work.state, work.batch)
    if case["micro_batches"] > 1:
        graph = plan_micro_batches(graph, case["micro_batches"]).part
    problem = make_problem(
        graph, cluster, num_micro_batches=case["micro_batches"], memory_limit_bytes=_NO_LIMIT
    )
    return msgspec.structs.replace(
        plan, prediction=estimate(PlannedStep.of_program(plan, graph, problem))
    )


def _compile(work: Any, plan: Any, target: Any) -> None:
    from jax.experimental import topologies

    import aliquot as aq

    topology = target.topology(8, 8 if target.kind == "gpu" else 4)
    if target.kind == "gpu":
        described = topologies.get_topology_desc(
            platform="cuda",
            topology_name="eight",
            topology=topology,
            target_config=target.description,
        )
    else:
        described = topologies.get_topology_desc(topology, "tpu")
    aq.parallelize(work.train_step, plan, devices=described.devices).prepare(
        work.state, work.batch
    ).lower().compile()


if __name__ == "__main__":
    sys.exit(main())
