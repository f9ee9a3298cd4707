"""What whole steps cost on eight virtual devices that share a CPU, fitted to what the judge counts
in them.

Operators timed alone find their arrays in caches and their peers waiting at every collective; in a
step they do not. So whole steps of a GPT and a Llama are timed under many plans, and their times
fitted, without negative terms and in relative errors, as seconds per FLOP of products, per byte of
memory traffic, per byte that rings pass on in each kind of collective, per byte of all-to-alls and
per collective. A product counts by its FLOP or by its bytes, whichever the judge finds longer. The
fits on one family are also judged on the other.

    python benchmarks/calibrate_steps.py [--quick] [--rounds 8]
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from _results import Report, options, say, use_eight_devices

use_eight_devices()

import jax  # noqa: E402
from _hlo import sent_bytes  # noqa: E402
from _workloads import BASE, megatron  # noqa: E402
from scipy.optimize import nnls  # noqa: E402

import aliquot as aq  # noqa: E402
from aliquot import zoo  # noqa: E402
from aliquot.cluster import LogicalMesh  # noqa: E402
from aliquot.cost import (  # noqa: E402
    Picked,
    collective_line,
    collective_uses,
    decode_interior,
    make_problem,
    price,
    shards,
)
from aliquot.graph import Phase  # noqa: E402
from aliquot.planners import (  # noqa: E402
    AbstractMethod,
    DataParallel,
    ManualParallel,
    ShardParallel,
    Zero2Parallel,
    Zero3Parallel,
)

# Other sizes than those of any comparison.
SIZES: dict[str, tuple[int, dict[str, int]]] = {
    "many tokens": (
        32,
        {"hidden_size": 192, "num_heads": 8, "ffn_size": 768, "vocab_size": 512, "seq_len": 64},
    ),
    "even": (
        8,
        {"hidden_size": 384, "num_heads": 8, "ffn_size": 1536, "vocab_size": 1536, "seq_len": 64},
    ),
    "wide": (
        8,
        {"hidden_size": 640, "num_heads": 8, "ffn_size": 2560, "vocab_size": 1024, "seq_len": 16},
    ),
}
TERMS = (
    "FLOP of products",
    "bytes in forward and backward",
    "bytes in the update",
    "bytes in all-reduces",
    "bytes in reduce-scatters",
    "bytes in gathers and permutes",
    "bytes in all-to-alls",
    "collectives",
)
STEPS = 2


@dataclass(slots=True, kw_only=True, eq=False)
class Timed:
    """One plan: what each device does in a step by the judge's count, and the seconds it takes."""

    family: str
    size: str
    method: str
    counts: tuple[float, ...]
    predicted_s: float
    measured_s: float


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, lambda parser: parser.add_argument("--rounds", type=int, default=8))
    sizes = dict(list(SIZES.items())[:1]) if chosen.quick else SIZES
    report = Report(
        name="calibrate_steps",
        question="Speeds of eight virtual devices that share a CPU, in whole steps",
        bar="none: these are the constants of detected CPU clusters",
        method=(
            f"Two layers, {sizes} (sequences, sizes), float32, blocks recomputed, AdamW; median of"
            f" {chosen.rounds} interleaved samples of {STEPS} steps. Counts are those of the judge"
            " on each device; rings count an all-reduce twice."
        ),
    )
    rows = [
        row for family in ("gpt", "llama") for size in sizes for row in _timed(family, size, chosen)
    ]
    both = _fit(rows)
    report.tables["Fits, seconds per thousand million"] = [
        {
            "fitted on": name,
            **{t: f * 1e9 for t, f in zip(TERMS, fit, strict=True)},
            "median error": error,
            "on the other": other,
        }
        for name, fit, error, other in _fits(rows, both)
    ]
    report.tables["Plans"] = [
        {
            "model": f"{r.family}, {r.size}",
            "method": r.method,
            "measured ms": r.measured_s * 1e3,
            "fitted ms": float(np.dot(r.counts, both)) * 1e3,
            "predicted ms": r.predicted_s * 1e3,
            **{f"{t}, millions": c / 1e6 for t, c in zip(TERMS, r.counts, strict=True)},
        }
        for r in rows
    ]
    report.summary = {
        "per device": {
            t: f"{1e-9 / s:.3g} G/s" if s else "free" for t, s in zip(TERMS, both, strict=True)
        },
        "median error of the fit": _error(rows, both),
        "median error of today's constants": float(
            np.median([abs(r.predicted_s / r.measured_s - 1) for r in rows])
        ),
    }
    return report.finish(chosen, met=None)


def _timed(family: str, size: str, chosen: Any) -> list[Timed]:
    """Every method's plan for one model, compiled and timed in turns."""
    global_batch, sizes = SIZES[size]
    work = zoo.build(
        zoo.configure(BASE[family], num_layers=2, **sizes), global_batch, dtype="float32"
    )
    assert isinstance(work.config, zoo.ModelConfig)
    cluster = aq.Cluster.detect()
    graph = aq.capture(work.train_step, work.state, work.batch)
    rng = np.random.default_rng(0)
    tokens = rng.integers(
        0, work.config.vocab_size, (global_batch, work.config.seq_len + 1)
    ).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    steps, states, rows = [], [], []
    for name, method in _methods(work).items():
        plan = aq.plan(work.train_step, work.state, work.batch, cluster=cluster, method=method)
        step = aq.parallelize(work.train_step, plan)
        steps.append(step)
        states.append(step.init(work.init, jax.random.key(0)))
        rows.append(
            (name, _counts(plan, make_problem(graph, cluster)), plan.prediction.step_time_s)
        )
    seconds: list[list[float]] = [[] for _ in steps]
    for round_ in range(chosen.rounds + 1):
        for k in rng.permutation(len(steps)):
            start = time.perf_counter()
            for _ in range(STEPS):
                states[k], metrics = steps[k](states[k], batch)
            jax.block_until_ready((states[k], metrics))
            if round_:
                seconds[k].append((time.perf_counter() - start) / STEPS)
    say(
        f"{family}, {size}: "
        + ", ".join(
            f"{r[0]} {np.median(s) * 1e3:.0f} ms" for r, s in zip(rows, seconds, strict=True)
        )
    )
    return [
        Timed(
            family=family,
            size=size,
            method=name,
            counts=counts,
            predicted_s=p,
            measured_s=float(np.median(s)),
        )
        for (name, counts, p), s in zip(rows, seconds, strict=True)
    ]


def _methods(work: Any) -> dict[str, AbstractMethod]:
    found: dict[str, AbstractMethod] = {
        "dp": DataParallel(),
        "zero2": Zero2Parallel(),
        "zero3": Zero3Parallel(),
    }
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(work.state)[0]]
    layers = {str(getattr(path[-2], "key", "")) for path in paths if len(path) > 1} | {"embed"}
    for shape in ((8,), (4, 2), (2, 4)):
        specs = megatron(shape, scan=False).specs
        kept = {
            p: s for p, s in specs.items() if p.startswith("batch") or p.split(".")[-2] in layers
        }
        name = "x".join(map(str, shape))
        found[f"megatron {name}"] = ManualParallel(specs=kept, mesh_shape=shape)
        # The same without ZeRO-1, to which the method above is free.
        whole = {p.replace("state.params.", "state.*"): s for p, s in kept.items()}
        found[f"megatron {name}, whole updates"] = ManualParallel(specs=whole, mesh_shape=shape)
        found[f"shard {name}"] = ShardParallel(mesh_shape=shape)
    return found


def _counts(plan: Any, problem: Any) -> tuple[float, ...]:
    """What each device does in a step, in the order of `TERMS`."""
    (stage,) = plan.stages
    mesh = LogicalMesh(shape=stage.mesh_shape, axis_names=stage.axis_names, cluster=problem.cluster)
    priced = price(problem, mesh)
    picked = Picked.of_choices(priced, decode_interior(stage, problem.nodes))
    device, target = problem.cluster.device, priced.target
    flops = across = collectives = 0.0
    rings = {"all-reduce": 0.0, "reduce-scatter": 0.0, "all-gather": 0.0}
    memory = {True: 0.0, False: 0.0}
    for _, work, _, choice in picked.works():
        updates = work.phase is Phase.UPDATE
        own_flops = 0.0
        if work.flops:
            own_flops = work.flops / float(shards(choice, work.split_by, mesh.shape)[0])
        own_bytes = sum(b / float(shards(choice, by, mesh.shape)[0]) for b, by in work.arrays)
        own_s = own_bytes / target.memory_bytes_per_s(device)
        if work.flops and own_flops / target.product_flops_per_s(device, work.dtype) > own_s:
            flops += own_flops
        else:
            memory[updates] += own_bytes
    axis_sizes = dict(zip(stage.axis_names, stage.mesh_shape, strict=True))
    for use in collective_uses(picked):
        n = int(np.prod([axis_sizes[a] for a in use.axes]))
        collectives += use.count
        # What the judge adds to a collective's own time is copies around it.
        latency_s, per_byte_s = collective_line(
            use.kind, [stage.axis_names.index(a) for a in use.axes], mesh, target
        )
        whole = use.num_bytes * (n if use.kind == "reduce-scatter" else 1)
        entering = whole / n if use.kind == "all-gather" else whole
        copies_s = max(0.0, use.seconds - use.count * latency_s - entering * per_byte_s)
        memory[False] += copies_s * target.memory_bytes_per_s(device)
        sent = sent_bytes(use.kind, use.num_bytes, n)
        if use.kind == "all-to-all":
            across += sent
        else:
            rings["all-gather" if use.kind == "collective-permute" else use.kind] += sent
    return flops, memory[False], memory[True], *rings.values(), across, collectives


def _fit(rows: list[Timed]) -> np.ndarray[Any, Any]:
    counts = np.array([r.counts for r in rows])
    measured = np.array([r.measured_s for r in rows])
    scale = counts.max(axis=0)
    # Relative errors count, or the slowest plans alone would decide.
    fitted, _ = nnls(counts / scale / measured[:, None], np.ones(len(rows)))
    return np.asarray(fitted / scale)


def _error(rows: list[Timed], fit: Any) -> float:
    return float(np.median([abs(float(np.dot(r.counts, fit)) / r.measured_s - 1) for r in rows]))


def _fits(rows: list[Timed], both: Any) -> list[tuple[str, Any, float, Any]]:
    halves = {family: [r for r in rows if r.family == family] for family in ("gpt", "llama")}
    fits = {family: _fit(half) for family, half in halves.items()}
    found: list[tuple[str, Any, float, Any]] = [("both", both, _error(rows, both), "")]
    for family, other in (("gpt", "llama"), ("llama", "gpt")):
        found.append(
            (
                family,
                fits[family],
                _error(halves[family], fits[family]),
                _error(halves[other], fits[family]),
            )
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
