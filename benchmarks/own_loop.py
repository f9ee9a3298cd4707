"""Is a training loop of one's own the plan? `jax.jit(aq.constrain(step, plan))` beside
`aq.parallelize(step, plan)`, as programs and in numbers.

With the wheels of `jax-cuda12-plugin`, `jax-cuda12-pjrt` and `nvidia-cuda-nvcc-cu12` on
`PYTHONPATH`, both are also compiled for GPUs that are not there.

    python benchmarks/own_loop.py [--quick] [--only TEXT] [--journal FILE]
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from _results import Journal, Report, options, use_eight_devices, with_rows

use_eight_devices(fast_code=False)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from _workloads import small  # noqa: E402
from jax import export  # noqa: E402

import aliquot as aq  # noqa: E402
from aliquot import verification  # noqa: E402
from aliquot.planners import AbstractMethod, apply_plan  # noqa: E402
from aliquot.runtime import compiled_stats  # noqa: E402

BAR = 0.02
STEPS = 2
CLUSTERS = {"virtual devices": "8xcpu", "compiler for 8xH100": "8xH100"}
Methods = dict[str, tuple[AbstractMethod, int]]
METHODS: Methods = {
    "dp": (aq.DataParallel(), 1),
    "zero2": (aq.Zero2Parallel(), 4),
    "fsdp": (aq.Zero3Parallel(), 1),
    "tp:2": (aq.TensorParallel(degree=2), 2),
    "shard 4x2": (aq.ShardParallel(mesh_shape=(4, 2)), 1),
    "program": (aq.WholeProgram(), 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan, and what runs or compiles it."""

    where: str
    family: str
    method: str

    def __str__(self) -> str:
        return f"{self.family}, {self.method}, {self.where}"


def main() -> int:
    """Compare, and write or print the answer."""
    chosen = options(__doc__, with_rows)
    every = [
        Case(where=where, family=family, method=method)
        for where, families in _places()
        for family in families
        for method in METHODS
    ]
    report = Report(
        name="own_loop",
        question=(
            "Is `jax.jit(aq.constrain(step, plan))` the program that `aq.parallelize` runs, and are"
            " its numbers the same?"
        ),
        bar=f"equal numbers; memory and bytes of collectives within {BAR:.0%}",
        method=(
            "A GPT of one layer and a scan over 2 layers of Llama in float32, under 6 methods"
            " with 1 to 4 micro-batches. On virtual devices both run"
            f" {STEPS} steps from one state: the largest difference of a loss, relative, and of a"
            " leaf of the state, relative to its largest entry. Memory: temporaries, own loop /"
            " step; for GPUs, where those of the GPT are compiled and not run, arguments and"
            " results too."
            " Collectives: their number in a step, and their bytes, own loop / step."
        ),
    )
    journal = Journal(chosen.journal)
    rows = [
        journal.row(str(case), functools.partial(_row, case))
        for case in every[:: 5 if chosen.quick else 1]
        if chosen.only in str(case)
    ]
    report.summary = {
        where: f"{sum(row['within'] for row in mine)} of {len(mine)}"
        for where, _ in _places()
        if (mine := [row for row in rows if row["where"] == where])
    }
    report.summary["beyond the bar"] = sum(not row["within"] for row in rows)
    report.tables = {"Cases": rows}
    return report.finish(chosen, met=all(row["within"] for row in rows))


def _places() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Where programs are compared, and of which families."""
    yield "virtual devices", ("gpt", "llama")
    try:
        verification.require_compiler(
            verification.resolve_target(None, aq.Cluster.preset("8xH100"))
        )
    except verification.CompilerMissingError:
        return
    yield "compiler for 8xH100", ("gpt",)


def _row(case: Case) -> dict[str, Any]:
    scan = case.family == "llama"
    work = small(case.family, scan=scan, num_layers=1 + scan, recompute="none")
    method, parts = METHODS[case.method]
    plan = aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=aq.Cluster.preset(CLUSTERS[case.where]),
        method=method,
        num_micro_batches=parts,
    )
    own = jax.jit(aq.constrain(work.train_step, plan), donate_argnums=0)
    compare = _run_both if case.where == "virtual devices" else _compile_both
    found = compare(work, plan, own)
    shares = found["memory"], found["collective bytes"]
    same = found["collectives own"] == found["collectives step"]
    close = all(abs(share - 1) <= BAR for share in shares)
    equal = found["loss"] == found["leaf"] == 0.0
    return {
        **{name: getattr(case, name) for name in ("where", "family", "method")},
        "micro-batches": parts,
        **found,
        "within": same and close and equal,
    }


def _run_both(work: Any, plan: Any, own: Any) -> dict[str, Any]:
    """Both programs and their numbers on virtual devices."""
    step = aq.parallelize(work.train_step, plan).prepare(work.state, work.batch)
    rng = np.random.default_rng(0)
    batch = {
        name: rng.integers(0, work.config.vocab_size, array.shape).astype(array.dtype)
        for name, array in work.batch.items()
    }
    mine = theirs = None
    losses = []
    for run in (own, step):
        state = step.init(work.init, jax.random.key(0))
        for _ in range(STEPS):
            state, metrics = run(state, jax.device_put(batch, plan.shardings(batch)))
        losses.append(float(metrics["loss"]))
        mine, theirs = theirs, jax.tree.map(np.asarray, state)
    compiled = own.lower(
        _placed(work.state, plan), jax.device_put(batch, plan.shardings(batch))
    ).compile()
    (ours,) = compiled_stats(
        compiled, step.mesh.axis_names, list(step.mesh.shape.values()), lower_s=0, compile_s=0
    ).stages
    (its,) = step.stats().stages
    return {
        **_collectives(ours.collectives, its.collectives),
        "memory": ours.temp_bytes / its.temp_bytes,
        "loss": abs(losses[0] - losses[1]) / abs(losses[1]),
        "leaf": max(map(_difference, jax.tree.leaves(mine), jax.tree.leaves(theirs))),
    }


def _difference(mine: Any, theirs: Any) -> float:
    most = float(np.abs(theirs).max()) if theirs.size else 0.0
    return float(np.abs(mine - theirs).max()) / most if most else 0.0


def _compile_both(work: Any, plan: Any, own: Any) -> dict[str, Any]:
    """Both programs as the compiler for GPUs makes them."""
    graph = aq.capture(work.train_step, work.state, work.batch)
    theirs = verification.portable_program(apply_plan(plan, graph), "cuda")
    structs, tree = jax.tree.flatten((_placed(work.state, plan), _placed(work.batch, plan)))
    donated = tuple(range(len(jax.tree.leaves(work.state))))

    # `jax.export` knows no containers of optax.
    def flat(*leaves: Any) -> Any:
        return jax.tree.leaves(own(*jax.tree.unflatten(tree, leaves)))

    exported = export.export(
        jax.jit(flat, donate_argnums=donated),
        platforms=["cuda"],
        disabled_checks=[export.DisabledSafetyCheck.custom_call("LayoutConstraint")],
    )(*structs)
    # Where its results lie is the compiler's choice, as it is for one's own `jax.jit`.
    mine: verification.PortableProgram = replace(
        theirs,
        module=bytes(exported.serialize()),
        out_dims=(None,) * len(exported.out_avals),
        out_kinds=(None,) * len(exported.out_avals),
        donated=donated,
    )
    target = verification.resolve_target(None, aq.Cluster.preset("8xH100"))
    with verification.Compiler(target, num_devices=8) as compiler:
        ours, its = (compiler.compile(program, devices_per_host=8) for program in (mine, theirs))
    return {
        **_collectives(ours.collectives, its.collectives),
        "memory": ours.peak_bytes / its.peak_bytes,
        "loss": 0.0,
        "leaf": 0.0,
    }


def _placed(tree: Any, plan: Any) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return jax.tree.map(
        lambda array, sharding: struct(array.shape, array.dtype, sharding=sharding),
        tree,
        plan.shardings(tree),
    )


def _collectives(ours: Any, its: Any) -> dict[str, Any]:
    counts = [sum(each.count for each in found) for found in (ours, its)]
    totals = [sum(each.num_bytes for each in found) for found in (ours, its)]
    return {
        "collectives own": counts[0],
        "collectives step": counts[1],
        "collective bytes": totals[0] / totals[1] if totals[1] else 1.0,
    }


if __name__ == "__main__":
    raise SystemExit(main())
