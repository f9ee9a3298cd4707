r"""Are predicted step time and memory what a real GPU takes?

Runs training steps of models of the zoo at their real width, with few layers, on one GPU, and
compares the time of a step and the compiled memory with the prediction. Steps are measured by
`--measure` where there is a GPU, and predicted anywhere from the written file.

    python benchmarks/gpu_steps.py --measure steps.json [--budget-s 400] [--cases REGEX]
    python benchmarks/gpu_steps.py --steps measured/h100_2026-11.json --hardware h100 [--fit]

`--fit` writes the sustained share of the device, fitted to every second step, into its file in
`aliquot/cluster/calibration`.
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec
from _calibration_files import update
from _results import Report, options, say

import aliquot as aq
from aliquot import zoo
from aliquot._fit_steps import MeasuredStep, fit_steps
from aliquot.cluster import DEVICES, Cluster
from aliquot.planners import DataParallel

KINDS = {
    "products": re.compile(r"gemm|nvjet|cutlass|xmma|matmul|sm90_|sm80_|triton_dot", re.I),
    "attention": re.compile(r"flash|sdpa|fmha", re.I),
    "convolutions": re.compile(r"conv(?!ert)|implicit|winograd|fprop|dgrad|wgrad", re.I),
    "copies": re.compile(r"memcpy|memset|copy", re.I),
}
"""Kernels by name; attention and convolutions are asked first."""

_CALL = re.compile(r'custom_call_target="([^"]+)"')


def _case(name: str, model: str, batch: int, **settings: Any) -> dict[str, Any]:
    overrides = settings.pop("overrides", {})
    for key in ("num_layers", "seq_len"):
        if key in settings:
            overrides[key] = settings.pop(key)
    return {"name": name, "model": model, "global_batch": batch, "overrides": overrides, **settings}


def _cases() -> list[dict[str, Any]]:
    gpt = {"num_layers": 6, "seq_len": 2048}
    llama = {"num_layers": 4, "seq_len": 4096}
    return [
        _case("gpt-1.3b", "gpt-1.3b", 8, **gpt, recompute="none"),
        _case("gpt-1.3b block", "gpt-1.3b", 8, **gpt, recompute="block"),
        _case("gpt-1.3b minimal", "gpt-1.3b", 8, **gpt, recompute="minimal"),
        _case("gpt-1.3b scan", "gpt-1.3b", 8, **gpt, recompute="none", scan=True),
        _case("gpt-1.3b scan block", "gpt-1.3b", 8, **gpt, recompute="block", scan=True),
        _case("gpt-1.3b plain", "gpt-1.3b", 8, **gpt, recompute="none", attention="plain"),
        _case("llama-7b", "llama-7b", 4, **llama, recompute="none"),
        _case("llama-7b block", "llama-7b", 4, **llama, recompute="block"),
        _case("llama-7b 4 micro-batches", "llama-7b", 16, **llama, micro_batches=4),
        _case("llama3-8b", "llama3-8b", 2, num_layers=4, seq_len=8192, recompute="block"),
        _case("llama3-8b long", "llama3-8b", 1, num_layers=2, seq_len=32768, recompute="block"),
        _case("mixtral-8x7b", "mixtral-8x7b", 2, num_layers=2, seq_len=4096),
        _case("gpt-6.7b", "gpt-6.7b", 8, num_layers=4, seq_len=2048),
        _case("gpt-6.7b fp8", "gpt-6.7b", 8, num_layers=4, seq_len=2048, dtype="fp8"),
        _case("gpt-350m float32", "gpt-350m", 16, num_layers=6, dtype="float32"),
        _case("gpt-350m whole", "gpt-350m", 32, recompute="none", scan=True),
        _case("gpt-125m whole", "gpt-125m", 32, recompute="none"),
        _case("qwen3-30b-a3b", "qwen3-30b-a3b", 2, num_layers=2, seq_len=4096),
        _case("qwen3-4b", "qwen3-4b", 4, num_layers=4, recompute="minimal"),
        _case("gpt-2.6b", "gpt-2.6b", 16, num_layers=4, seq_len=1024, recompute="none"),
        _case("deepseek-v2-lite", "deepseek-v2-lite", 2, num_layers=3, seq_len=4096),
        _case("moe-1.3b", "moe-1.3b", 16, num_layers=4),
        _case("t5-770m", "t5-770m", 8, recompute="block", scan=True),
        *(_near("gpt-6.7b", size, num_layers=6, seq_len=2048) for size in (20, 22)),
        *(_near("llama-7b", size, num_layers=6, seq_len=4096) for size in (13, 14)),
        *(
            _near("gpt-1.3b", size, num_layers=8, seq_len=2048, recompute="minimal", scan=True)
            for size in (51, 56)
        ),
        _near("gpt-6.7b", 74, num_layers=6, seq_len=2048, recompute="block"),
        # Tuning of their kernels takes minutes.
        _case("bert-large", "bert-large", 64, num_layers=6, recompute="none"),
        _case("wide-resnet-250m", "wide-resnet-250m", 64, recompute="none"),
        *(_near("wide-resnet-250m", size) for size in (256, 280)),
    ]


def _near(model: str, batch: int, **settings: Any) -> dict[str, Any]:
    """A step that is predicted to need about the memory that there is."""
    settings = {"recompute": "none"} | settings
    return _case(
        f"near the limit: {model} {settings['recompute']} {batch}", model, batch, **settings
    )


def main() -> int:
    """Measure, or predict what was measured and write the answer."""
    chosen = options(__doc__, _more)
    if chosen.measure:
        return _measure(chosen)
    path = Path(chosen.steps)
    measured = json.loads((path if path.exists() else Path(__file__).parent / path).read_text())
    steps = [step for step in measured["steps"] if re.search(chosen.cases, step["name"])]
    device = measured["device"]
    today = [step for step in steps if "error" not in step and "changed" not in step]
    if chosen.fit:
        _fit(today, device, measured["jax"])
        say("fitted; run again without --fit to predict with it")
        return 0
    rows = []
    for number, step in enumerate(today):
        rows.append({**_beside(step, device), "half": "held out" if number % 2 else "fitted"})
        say(" ".join(f"{k}={v}" for k, v in rows[-1].items()))
    report = Report(
        name="gpu_steps",
        question="Are predicted step time and memory what a real GPU takes?",
        bar="held out: median error at most 10 % in time and 3 % in memory",
        method=(
            f"{measured['device_kind']}, JAX {measured['jax']}, one device. Models of the zoo at"
            " their real width with few layers; the step as `aliquot.parallelize` runs it, state"
            " donated and passed on, random weights and tokens. All programs are compiled first;"
            " then three steps warm up, and the median of single steps over three seconds counts."
            " Memory is what the compiler reports (arguments, temporaries, outputs that reuse"
            " nothing). One figure, the sustained share of products, was fitted to the time of"
            " every second step; nothing was fitted to memory. Fitted and held-out steps are of the"
            " same models."
        ),
    )
    for what, half in (("time", "held out"), ("time", "fitted"), ("memory", "")):
        errors = [row[f"{what} error"] for row in rows if half in row["half"]]
        report.summary[f"{what}, {half}" if half else what] = {
            "steps": len(errors),
            "signed median": statistics.median(errors),
            "median": statistics.median(map(abs, errors)),
            "worst": max(errors, key=abs),
        }
    others = [step for step in steps if "error" not in step and "changed" in step]
    report.tables = {
        "Steps": rows,
        "Measured with code that has changed since": [
            {**_beside(step, device), "changed": step["changed"]} for step in others
        ],
        "Milliseconds of a step by kind of kernel": [
            {"name": step["name"], **step["milliseconds"]}
            for step in steps
            if "milliseconds" in step
        ],
        "Not measured": [
            {"name": step["name"], "why": step["error"].partition("\n")[0][:200]}
            for step in steps
            if "error" in step
        ],
    }
    time_error = report.summary["time, held out"]["median"]
    met = time_error <= 0.10 and report.summary["memory"]["median"] <= 0.03
    return report.finish(chosen, met=met)


def _fit(steps: list[dict[str, Any]], device: str, jax_version: str) -> None:
    """Write the sustained share that predicts the steps best."""
    asked = [
        {key: step[key] for key in MeasuredStep.__struct_fields__ if key in step} | {"method": "dp"}
        for step in steps
    ]
    found = fit_steps(msgspec.convert(asked, list[MeasuredStep]), Cluster.preset(f"1x{device}"))
    share = found.figures["sustained_share"]["value"]
    source = (
        f"least median error over {len(steps[::2])} steps measured on one {device} with JAX"
        f" {jax_version}: benchmarks/gpu_steps.py"
    )
    update(device.partition("-")[0].lower(), {"sustained_share": (share, source)})


def _more(parser: Any) -> None:
    parser.add_argument("--measure", default="", help="measure here, and write this file")
    parser.add_argument("--budget-s", type=float, default=1e9, help="start no step after that long")
    parser.add_argument("--cases", default="", help="only those whose names match")
    parser.add_argument("--steps", default="", help="the file of measured steps")
    parser.add_argument("--fit", action="store_true", help="fit and write the sustained share")
    parser.add_argument("--device", default="H100", help="what the device is called")
    parser.add_argument("--threads", type=int, default=6, help="programs compiled at a time")


def _workload(case: dict[str, Any], device: str) -> zoo.Workload:
    settings = {k: case[k] for k in ("recompute", "dtype", "attention", "scan") if k in case}
    return zoo.build(
        case["model"],
        case["global_batch"],
        overrides=case["overrides"],
        device=DEVICES.get(device),
        **settings,
    )


def _beside(case: dict[str, Any], device: str) -> dict[str, Any]:
    """A measured step and its prediction."""
    workload = _workload(case, device)
    plan = aq.plan(
        workload.train_step,
        workload.state,
        workload.batch,
        cluster=Cluster.preset(f"1x{device}"),
        method=DataParallel(),
        num_micro_batches=case.get("micro_batches", 1),
        memory_limit_bytes=1e15,
    )
    predicted = plan.prediction
    mib = 2.0**20
    peak = predicted.peak_memory_bytes
    return {
        "name": case["name"],
        "predicted ms": 1e3 * predicted.step_time_s,
        "measured ms": 1e3 * case["step_s"],
        "time error": predicted.step_time_s / case["step_s"] - 1,
        "predicted MiB": peak / mib,
        "compiled MiB": case["memory_bytes"] / mib,
        "memory error": peak / case["memory_bytes"] - 1,
        "MFU": workload.flops_per_step
        / case["step_s"]
        / DEVICES[device].peak_flops_per_s["bfloat16"],
        "compile s": case["compile_s"],
    }


def _by_kind(kernels: Counter[str]) -> dict[str, float]:
    """Milliseconds of a step in each kind of kernel."""
    found = dict.fromkeys(("products", "attention", "convolutions", "copies", "others"), 0.0)
    for name, seconds in kernels.items():
        order = ("attention", "convolutions", "products", "copies")
        kind = next((kind for kind in order if KINDS[kind].search(name)), "others")
        found[kind] += 1e3 * seconds
    return found


def _measure(chosen: Any) -> int:
    """Compile all steps a few at a time, then run one after another. What is measured is written
    after each.
    """
    import jax

    started, path = time.perf_counter(), Path(chosen.measure)
    device = jax.devices()[0]
    answer: dict[str, Any] = {
        "device": chosen.device,
        "device_kind": device.device_kind,
        "jax": jax.__version__,
        "steps": [],
    }
    cases = [case for case in _cases() if re.search(chosen.cases, case["name"])]
    if chosen.quick:
        cases = [_small(case) for case in cases]

    def spent_s() -> float:
        return time.perf_counter() - started

    waves = [cases[:8], cases[8:16], cases[16:25], cases[25:]]
    for wave in filter(None, waves):
        with ThreadPoolExecutor(chosen.threads) as pool:
            running = {pool.submit(_compiled, case, chosen): case for case in wave}
            ready = []
            for future in as_completed(running):
                case = running[future]
                try:
                    ready.append((case, *future.result()))
                except Exception as error:
                    say(f"{case['name']}: {error!r:.500}")
                    answer["steps"].append({**case, "error": repr(error)[:1000]})
        say(f"compiled {len(ready)} of {len(wave)} after {spent_s():.0f} s")
        for case, step, init, workload, compile_s in ready:
            if spent_s() > chosen.budget_s:
                say(f"{case['name']}: no time left")
                continue
            try:
                near = case["name"].startswith("near")
                found = _timed(step, init, workload, profiled=not (chosen.quick or near))
                found["calls"] = Counter(_CALL.findall(step.as_text()))
                figures = step.stats()
                row = {**case, "compile_s": compile_s, **found, "memory_bytes": _peak(figures)}
            except Exception as error:
                row = {**case, "error": repr(error)[:1000]}
            gc.collect()
            answer["steps"].append(row)
            path.write_text(json.dumps(answer, indent=1))
            say(f"{case['name']}: {row.get('step_s') or row['error'][:500]} ({spent_s():.0f} s)")
    path.write_text(json.dumps(answer, indent=1))
    return 0


def _small(case: dict[str, Any]) -> dict[str, Any]:
    small = {"num_layers": 1, "hidden_size": 128, "num_heads": 2, "vocab_size": 256, "seq_len": 64}
    if "resnet" in case["model"]:
        return case | {"global_batch": 4}
    return case | {"overrides": small, "attention": "plain", "global_batch": 8}


def _peak(stats: Any) -> float:
    return float(max(stage.peak_bytes for stage in stats.stages))


def _compiled(case: dict[str, Any], chosen: Any) -> tuple[Any, Any, zoo.Workload, float]:
    """A step, and what makes its state, both compiled."""
    import jax

    began = time.perf_counter()
    workload = _workload(case, chosen.device)
    cluster = Cluster.detect(jax.devices()[:1]) if not chosen.quick else Cluster.preset("1xcpu")
    step = aq.parallelize(
        workload.train_step,
        cluster=cluster,
        method=DataParallel(),
        num_micro_batches=case.get("micro_batches", 1),
        memory_limit_bytes=1e15,
    )
    step.prepare(workload.state, workload.batch)
    step.stats()
    key = jax.ShapeDtypeStruct((2,), "uint32")
    init = jax.jit(workload.init).lower(key).compile()
    return step, init, workload, time.perf_counter() - began


def _timed(step: Any, init: Any, workload: Any, *, profiled: bool) -> dict[str, Any]:
    """Seconds of a step: the median, the quickest and the slowest; seconds by kernel."""
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    most = getattr(workload.config, "vocab_size", 1000)
    batch = {
        name: rng.integers(0, most, a.shape, a.dtype)
        if np.issubdtype(a.dtype, np.integer)
        else rng.standard_normal(a.shape).astype(a.dtype)
        for name, a in workload.batch.items()
    }
    state = init(np.array([0, 1], np.uint32))
    state, batch = step.place(state, batch)
    samples: list[float] = []
    began = None
    for index in range(200):
        if index == 3:
            began = time.perf_counter()
        before = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        if index >= 3:
            samples.append(time.perf_counter() - before)
        if began is not None and len(samples) >= 3 and time.perf_counter() - began > 3:
            break
    found: dict[str, Any] = {
        "step_s": statistics.median(samples),
        "quickest_s": min(samples),
        "slowest_s": max(samples),
        "samples": len(samples),
        "loss": float(metrics["loss"]),
    }
    if profiled:
        with tempfile.TemporaryDirectory() as folder:
            try:
                with jax.profiler.trace(folder):
                    for _ in range(2):
                        state, metrics = step(state, batch)
                    jax.block_until_ready((state, metrics))
                kernels = _kernels(Path(folder), 2)
                found["milliseconds"] = _by_kind(kernels)
                found["longest kernels, ms"] = {
                    name: 1e3 * seconds for name, seconds in kernels.most_common(12)
                }
            except Exception as error:
                found |= {"not profiled": repr(error)[:300]}
    return found


def _kernels(folder: Path, steps: int) -> Counter[str]:
    """Seconds of a step by name of the kernel."""
    (path,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    seconds: Counter[str] = Counter()
    for event in events:
        if event.get("ph") == "X" and "GPU" in names.get(event["pid"], ""):
            hlo = event.get("args", {}).get("hlo_op", "")
            if hlo or event["name"].startswith("Mem"):
                seconds[f"{event['name'][:80]} | {hlo[:60]}"] += event["dur"] * 1e-6 / steps
    return seconds


if __name__ == "__main__":
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.9")
    sys.exit(main())
