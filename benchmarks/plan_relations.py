"""Do plans keep the relations that must hold between them?

Plans small steps (written out and scanned) on seeded clusters and batches by every method, and
compares them: a freer search is never slower, nor is a plan with more memory, faster links or more
hosts; twice the batch takes between one and two times as long; bounds lie below step times; parts
add up; a plan file that is read and saved keeps its text; parameters in another order give the same
step time.

    python benchmarks/plan_relations.py [--quick] [--seed 0] [--scenarios 40] [--journal FILE]
"""

from __future__ import annotations

import argparse
import functools
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from _results import Journal, Report, options

import aliquot as aq
from aliquot.core import CaptureError, InfeasibleError, InputError
from aliquot.planners import AbstractMethod
from aliquot.plans import Plan

GAP = 0.002
ROUNDING = 1e-9
METHODS: dict[str, AbstractMethod] = {
    "dp": aq.DataParallel(),
    "zero2": aq.Zero2Parallel(),
    "zero3": aq.Zero3Parallel(),
    "shard": aq.ShardParallel(),
    "auto": aq.Auto(),
    "pipeshard": aq.PipeshardParallel(),
}
CLUSTERS = ("4xV100-16GB", "8xH100", "7xA100-40GB", "2x4xA100-40GB", "2x8xH100", "4x8xA100-80GB", "2x8xV100-16GB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step, a cluster, a method and its options."""

    width: int
    depth: int
    scanned: bool
    batch: int
    cluster: str
    method: str
    count: int = 1
    tighter: bool = False
    faster_links: bool = False
    permuted: bool = False

    @property
    def key(self) -> str:
        """What the journal calls it."""
        flags = [name for name in ("scanned", "tighter", "faster_links", "permuted") if getattr(self, name)]
        size = f"{self.depth}x{self.width} batch {self.batch} on {self.cluster}"
        return " ".join([size, self.method, f"micro-batches {self.count}", *flags])


def step_of(case: Case) -> tuple[Any, Any, Any]:
    """A residual network of two products a layer with momentum, and shapes of its arguments."""
    names = ("up", "down") if not case.permuted else ("z_up", "a_down")

    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x @ w[names[0]]) @ w[names[1]], None

    def train_step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch
            if case.scanned:
                x, _ = jax.lax.scan(layer, x, params)
            else:
                for w in params:
                    x, _ = layer(x, w)
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], grads)
        return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mu), "mu": mu}, value

    lead = (case.depth,) if case.scanned else ()
    shapes = ((case.width, 4 * case.width), (4 * case.width, case.width))
    weights = {n: jax.ShapeDtypeStruct((*lead, *s), jnp.float32) for n, s in zip(names, shapes, strict=True)}
    params: Any = weights if case.scanned else [weights] * case.depth
    return train_step, {"params": params, "mu": params}, jax.ShapeDtypeStruct((case.batch, case.width), jnp.float32)


def planned(case: Case) -> dict[str, Any]:
    """The figures of a plan that relations are about."""
    cluster = aq.Cluster.preset(case.cluster)
    if case.faster_links:
        links = {k: getattr(cluster, k) for k in ("intra", "inter")}
        double = {k: replace(v, bandwidth_bytes_per_s=2 * v.bandwidth_bytes_per_s) for k, v in links.items()}
        cluster = replace(cluster, **double, wires=tuple(tuple(2 * w for w in row) for row in cluster.wires))
    limit = 0.4 * cluster.device.memory_bytes if case.tighter else None
    try:
        plan = aq.plan(
            *step_of(case),
            cluster=cluster,
            method=METHODS[case.method],
            num_micro_batches=case.count,
            memory_limit_bytes=limit,
        )
    except (InfeasibleError, InputError, CaptureError) as error:
        return {"refused": type(error).__name__}
    p, text = plan.prediction, plan.to_json()
    parts_s = p.compute_s + p.communication_s + p.gradient_s - p.hidden_s + p.bubble_s
    return {
        "step_s": p.step_time_s,
        "bound_s": plan.provenance.lower_bound_s,
        "closed_form": plan.provenance.bound_holds_for.startswith("closed forms"),
        "parts_add_up": math.isclose(parts_s, p.step_time_s, rel_tol=1e-6)
        and math.isclose(sum(p.memory_bytes.values()), p.peak_memory_bytes, rel_tol=1e-6),
        "fits": p.peak_memory_bytes <= p.memory_limit_bytes * (1 + ROUNDING),
        "stable": Plan.from_json(text).to_json() == text,
        "stages": len(plan.stages),
        "micro_batches": plan.num_micro_batches,
    }


def scenarios(seed: int, count: int) -> Iterator[list[Case]]:
    """Cases that are compared with each other; the first six are the methods of `METHODS`."""
    chance = random.Random(seed)
    for _ in range(count):
        base = Case(
            width=chance.choice((512, 1024, 2048, 4096)),
            depth=chance.choice((2, 4)),
            scanned=chance.random() < 0.5,
            batch=chance.choice((64, 256, 1024, 8192)),
            cluster=chance.choice(CLUSTERS),
            method="auto",
        )
        yield [
            *(replace(base, method=name) for name in METHODS),
            replace(base, tighter=True),
            replace(base, faster_links=True),
            replace(base, batch=2 * base.batch),
            replace(base, permuted=True),
            replace(base, count=2),
            replace(base, count=2, method="pipeshard"),
        ]


def broken(cases: list[Case], rows: dict[Case, dict[str, Any]]) -> Iterator[tuple[str, Case, str, bool]]:
    """Every relation of a scenario: its name, a case, the figures, and whether it holds."""
    base = cases[0]
    of = functools.partial(replace, base)

    def no_slower(name: str, free: Case, fixed: Case) -> Iterator[tuple[str, Case, str, bool]]:
        a, b = rows[free].get("step_s"), rows[fixed].get("step_s")
        if b is not None:
            shown = f"{a} s against {b} s ({fixed.key})"
            yield name, free, shown, a is not None and a <= b * (1 + GAP)

    auto, pipes = of(method="auto"), of(method="pipeshard")
    for name in ("dp", "zero2", "zero3", "shard"):
        yield from no_slower("auto is no slower than a fixed method", auto, of(method=name))
    yield from no_slower("pipeshard is no slower than auto", pipes, auto)
    yield from no_slower(
        "pipeshard is no slower with a free number of micro-batches", pipes, of(method="auto", count=2)
    )
    two = of(method="pipeshard", count=2)
    yield from no_slower("pipeshard is no slower than auto at its number", two, of(method="auto", count=2))
    yield from no_slower("pipeshard is no slower than with a fixed number", pipes, two)
    yield from no_slower("auto is no slower than pipeshard", auto, pipes)
    yield from no_slower("more memory is no slower", auto, of(method="auto", tighter=True))
    yield from no_slower("faster links are no slower", of(method="auto", faster_links=True), auto)
    double = of(method="auto", batch=2 * base.batch)
    one_s, two_s = rows[auto].get("step_s"), rows[double].get("step_s")
    if one_s and two_s:
        holds = one_s * (1 - GAP) <= two_s <= 2 * one_s * (1 + GAP)
        yield "double batch takes one to two times", double, f"{two_s} s, {one_s} s", holds
    other = rows[of(method="auto", permuted=True)].get("step_s")
    if one_s and other:
        holds = abs(other - one_s) <= GAP * one_s
        yield "other names, same step time", auto, f"{one_s} s, {other} s", holds
    for case in cases:
        row = rows[case]
        if "step_s" not in row:
            continue
        for name in ("parts_add_up", "fits", "stable"):
            yield name.replace("_", " "), case, "", row[name]
        if row["bound_s"] is not None and not row["closed_form"]:
            shown = f"bound {row['bound_s']} s, step {row['step_s']} s"
            yield "bounds lie below", case, shown, row["bound_s"] <= row["step_s"] * (1 + ROUNDING)


def main() -> int:
    """Plan, compare, and write or print the answer."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--scenarios", type=int, default=40)
        parser.add_argument("--journal", type=Path, help="plans that are done, one a line; a later run goes on there")

    chosen = options(__doc__, more)
    report = Report(
        name="plan_relations",
        question="Relations between plans",
        bar="at least 400 plans, 0 violations",
        method=(
            "Residual networks of two products a layer with momentum, written out and scanned, by seed "
            f"{chosen.seed}; every method, then less memory, faster links, twice the batch, other names and two "
            f"micro-batches. A freer search may be {GAP:.1%} slower. Bounds of closed forms are not compared with "
            "simulated step times."
        ),
    )
    journal = Journal(chosen.journal)
    checked: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    violations: list[dict[str, Any]] = []
    plans, pipelines, refused = set(), 0, 0
    for cases in scenarios(chosen.seed, 2 if chosen.quick else chosen.scenarios):
        rows = {case: journal.row(case.key, functools.partial(planned, case)) for case in cases}
        for case, row in rows.items():
            if case.key not in plans:
                plans.add(case.key)
                refused += "refused" in row
                pipelines += row.get("stages", 1) > 1
        for name, case, shown, holds in broken(cases, rows):
            checked[name] += 1
            if not holds:
                failed[name] += 1
                violations.append({"relation": name, "plan": case.key, "figures": shown})
    report.summary = {
        "plans": len(plans),
        "of these refused, as nothing fits or the batch does not divide": refused,
        "pipelines of several stages": pipelines,
        "relations": sum(checked.values()),
        "violations": len(violations),
    }
    report.tables = {
        "Relations": [{"relation": n, "checked": k, "violated": failed[n]} for n, k in checked.items()],
        "Violations": violations,
    }
    return report.finish(chosen, met=len(plans) >= 400 and not violations)


if __name__ == "__main__":
    raise SystemExit(main())
