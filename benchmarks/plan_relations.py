r"""Do plans keep the relations that must hold between them?

Plans small steps (residual networks and models of the zoo, written out and scanned) on seeded
clusters and batches by every method, and compares them: a freer search is never slower, nor is a
plan with more memory, faster links or more hosts; twice the batch takes between one and two times
as long; bounds lie below step times; parts add up; a plan file that is read and saved keeps its
text; parameters in another order give the same plan; a pipeline of one stage is one program; and
what plans and errors advise is so when it is tried.

    python benchmarks/plan_relations.py [--quick] [--seed 0] [--scenarios 25] [--zoo 8] \
        [--journal FILE]
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from _results import Journal, Report, options

import aliquot as aq
from aliquot import zoo
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
    "program": aq.WholeProgram(),
    "auto": aq.Auto(),
    "pipeshard": aq.PipeshardParallel(),
    "pipeshard, 2 stages": aq.PipeshardParallel(num_stages=2),
    "pipeshard, 1f1b": aq.PipeshardParallel(schedule="1f1b"),
    "pipeshard, 1 stage": aq.PipeshardParallel(num_stages=1),
}
FREE = ("auto", "pipeshard", "pipeshard, 2 stages", "pipeshard, 1f1b")
CLUSTERS = (
    "4xV100-16GB",
    "8xH100",
    "7xA100-40GB",
    "2x4xA100-40GB",
    "2x8xH100",
    "4x8xA100-80GB",
    "2x8xV100-16GB",
)
SIZES = {
    "hidden_size": 256,
    "num_heads": 8,
    "ffn_size": 1024,
    "vocab_size": 2048,
    "seq_len": 128,
    "num_layers": 2,
}
ZOO: dict[str, dict[str, int]] = {"gpt-125m": SIZES, "llama-7b": SIZES, "wide-resnet-250m": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step, a cluster, a method and its options.

    Attributes:
        model: a name of the zoo; empty for a residual network of `depth` layers of `width`.
        count: number of micro-batches; None lets methods that search it choose.
        memory_share: of a device that a plan may use.
    """

    model: str = ""
    width: int = 0
    depth: int = 0
    scanned: bool
    batch: int
    cluster: str
    method: str = "auto"
    count: int | None = None
    memory_share: float | None = None
    faster_links: bool = False
    more_hosts: bool = False
    permuted: bool = False

    @property
    def key(self) -> str:
        """What the journal calls it."""
        flags = [
            name
            for name in ("scanned", "faster_links", "more_hosts", "permuted")
            if getattr(self, name)
        ]
        flags += [f"{self.memory_share:g} of the memory"] if self.memory_share else []
        counts = "free" if self.count is None else str(self.count)
        size = f"{self.model or f'{self.depth}x{self.width}'} batch {self.batch} on {self.cluster}"
        return " ".join([size, self.method, f"micro-batches {counts}", *flags])


def step_of(case: Case) -> tuple[Any, Any, Any]:
    """The step of a case, and shapes of its arguments."""
    if case.model:
        work = zoo.build(
            case.model, case.batch, overrides=ZOO[case.model], dtype="bf16", scan=case.scanned
        )
        return work.train_step, work.state, work.batch
    return residual_step(case)


def residual_step(case: Case) -> tuple[Any, Any, Any]:
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
        return {
            "params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mu),
            "mu": mu,
        }, value

    lead = (case.depth,) if case.scanned else ()
    shapes = ((case.width, 4 * case.width), (4 * case.width, case.width))
    weights = {
        n: jax.ShapeDtypeStruct((*lead, *s), jnp.float32)
        for n, s in zip(names, shapes, strict=True)
    }
    params: Any = weights if case.scanned else [weights] * case.depth
    return (
        train_step,
        {"params": params, "mu": params},
        jax.ShapeDtypeStruct((case.batch, case.width), jnp.float32),
    )


def cluster_of(case: Case) -> aq.Cluster:
    """The cluster of a case."""
    cluster = aq.Cluster.preset(case.cluster)
    if case.faster_links:
        links = {k: getattr(cluster, k) for k in ("intra", "inter")}
        double = {
            k: replace(v, bandwidth_bytes_per_s=2 * v.bandwidth_bytes_per_s)
            for k, v in links.items()
        }
        cluster = replace(
            cluster, **double, wires=tuple(tuple(2 * w for w in row) for row in cluster.wires)
        )
    return replace(cluster, num_hosts=2 * cluster.num_hosts) if case.more_hosts else cluster


def planned(case: Case) -> dict[str, Any]:
    """The figures of a plan that relations are about."""
    cluster = cluster_of(case)
    limit = case.memory_share and case.memory_share * cluster.device.memory_bytes
    asked: dict[str, Any] = {
        "cluster": cluster,
        "num_micro_batches": case.count,
        "memory_limit_bytes": limit,
    }
    try:
        plan = aq.plan(*step_of(case), method=METHODS[case.method], **asked)
    except InfeasibleError as error:
        return {
            "refused": "InfeasibleError",
            "advice_holds": advice_holds(case, asked),
            "says": str(error),
        }
    except (InputError, CaptureError) as error:
        return {"refused": type(error).__name__}
    p, text = plan.prediction, plan.to_json()
    parts_s = p.compute_s + p.communication_s + p.gradient_s - p.hidden_s + p.bubble_s
    return {
        "step_s": p.step_time_s,
        "bound_s": plan.provenance.lower_bound_s,
        "closed_form": plan.provenance.bound_holds_for.startswith("closed forms"),
        "parts_add_up": (
            math.isclose(parts_s, p.step_time_s, rel_tol=1e-6)
            and math.isclose(sum(p.memory_bytes.values()), p.peak_memory_bytes, rel_tol=1e-6)
        ),
        "fits": p.peak_memory_bytes <= p.memory_limit_bytes * (1 + ROUNDING),
        "stable": Plan.from_json(text).to_json() == text,
        "advice_holds": advice_holds_of(plan),
        "stages": len(plan.stages),
        "micro_batches": plan.num_micro_batches,
        "meshes": [stage.mesh_shape for stage in plan.stages],
    }


def advice_holds(case: Case, asked: dict[str, Any]) -> bool:
    """Tries again what is said to help where nothing fits."""
    tried = aq.find_remedies(*step_of(case), method=METHODS[case.method], budget_s=30.0, **asked)
    plans = [each.plan.prediction for each in tried if each.plan is not None]
    return all(p.peak_memory_bytes <= p.memory_limit_bytes * (1 + ROUNDING) for p in plans)


def advice_holds_of(plan: Plan) -> bool:
    """Tries the batches that a plan says its devices would divide."""
    sizes = [int(n) for note in plan.notes for n in re.findall(r"a size of (\d+)", note)]
    devices = math.prod(plan.stages[0].mesh_shape)
    return all(size % devices == 0 for size in sizes)


def scenarios(seed: int, count: int, of_zoo: int) -> Iterator[list[Case]]:
    """Cases that are compared with each other; the first is planned by `Auto` with all free."""
    chance = random.Random(seed)
    for _ in range(count):
        base = Case(
            width=chance.choice((512, 1024, 2048, 4096)),
            depth=chance.choice((2, 4)),
            scanned=chance.random() < 0.5,
            batch=chance.choice((64, 256, 1024, 8192)),
            cluster=chance.choice(CLUSTERS),
        )
        yield cases_of(base)
    for k in range(of_zoo):
        model = list(ZOO)[k % len(ZOO)]
        base = Case(
            model=model,
            scanned="resnet" not in model and chance.random() < 0.5,
            batch=chance.choice((32, 64, 256)),
            cluster=chance.choice(CLUSTERS),
        )
        yield cases_of(base)


def cases_of(base: Case) -> list[Case]:
    """The cases of a scenario."""
    cases = [
        base,
        *(
            replace(base, method=name)
            for name in METHODS
            if name not in ("auto", "pipeshard, 1 stage")
        ),
    ]
    cases += [
        replace(base, method=name, count=2) for name in (*FREE, "program", "pipeshard, 1 stage")
    ]
    cases += [
        replace(base, method=name, count=1) for name in ("auto", "program", "pipeshard, 1 stage")
    ]
    cases += [
        replace(base, faster_links=True),
        replace(base, more_hosts=True),
        replace(base, batch=2 * base.batch),
    ]
    cases += [replace(base, memory_share=0.4), replace(base, memory_share=1e-3)]
    return cases if base.model else [*cases, replace(base, permuted=True)]


Finding = tuple[str, Case, str, bool]


def broken(cases: list[Case], rows: dict[Case, dict[str, Any]]) -> Iterator[Finding]:
    """Every relation of a scenario: its name, a case, the figures, and whether it holds."""
    base = cases[0]
    of = functools.partial(replace, base)

    def no_slower(name: str, free: Case, fixed: Case) -> Iterator[Finding]:
        a, b = rows[free].get("step_s"), rows[fixed].get("step_s")
        if b is not None:
            yield (
                name,
                free,
                f"{a} s against {b} s ({fixed.key})",
                a is not None and a <= b * (1 + GAP),
            )

    for case in cases:
        if (
            case.memory_share is None
            and not (case.faster_links or case.more_hosts)
            and case.batch == base.batch
        ):
            yield from no_slower(f"auto is no slower than {case.method}", base, case)
    for name in ("pipeshard, 2 stages", "pipeshard, 1f1b", "auto", "program"):
        yield from no_slower(
            f"pipeshard is no slower than {name}", of(method="pipeshard"), of(method=name)
        )
    for name in FREE:
        both = of(method=name), of(method=name, count=2)
        yield from no_slower(
            f"{name} is no slower than with a fixed number of micro-batches", *both
        )
    for count in (1, 2):
        both = of(method="program", count=count), of(method="pipeshard, 1 stage", count=count)
        yield from no_slower("one program is no slower than one stage", *both)
        yield from no_slower("one stage is no slower than one program", *both[::-1])
        yield from no_slower(
            "auto is no slower than one program at its number", of(count=count), both[0]
        )
    for share in (0.4, 1e-3):
        yield from no_slower("more memory is no slower", base, of(memory_share=share))
    yield from no_slower("faster links are no slower", of(faster_links=True), base)
    yield from no_slower("more hosts are no slower", of(more_hosts=True), base)
    one_s = rows[base].get("step_s")
    double = of(batch=2 * base.batch)
    two_s = rows[double].get("step_s")
    if one_s and two_s:
        holds = one_s * (1 - GAP) <= two_s <= 2 * one_s * (1 + GAP)
        yield "double batch takes one to two times", double, f"{two_s} s, {one_s} s", holds
    if one_s and not base.model:
        other = rows[of(permuted=True)]
        shown = f"{one_s} s, {other.get('step_s')} s; {rows[base]['meshes']}, {other.get('meshes')}"
        same = all(other.get(k) == rows[base][k] for k in ("stages", "micro_batches", "meshes"))
        yield (
            "other names, same plan",
            base,
            shown,
            same and abs(other["step_s"] - one_s) <= GAP * one_s,
        )
    yield from of_each(cases, rows)


def of_each(cases: list[Case], rows: dict[Case, dict[str, Any]]) -> Iterator[Finding]:
    """Relations within each plan."""
    for case in cases:
        row = rows[case]
        if "advice_holds" in row:
            yield "advice is true when tried", case, row.get("says", ""), row["advice_holds"]
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
        parser.add_argument("--scenarios", type=int, default=25, help="of residual networks")
        parser.add_argument("--zoo", type=int, default=8, help="scenarios of models of the zoo")
        parser.add_argument(
            "--journal",
            type=Path,
            help="plans that are done, one a line; a later run goes on there",
        )

    chosen = options(__doc__, more)
    report = Report(
        name="plan_relations",
        question="Relations between plans",
        bar="at least 400 plans, 0 violations",
        method=(
            "Residual networks of two products a layer with momentum and small models of the zoo,"
            f" written out and scanned, by seed {chosen.seed}; every method with free and given"
            " numbers of micro-batches, then less memory, faster links, more hosts, twice the"
            f" batch and other names. A freer search may be {GAP:.1%} slower. Bounds of closed"
            " forms are not compared with simulated step times."
        ),
    )
    journal = Journal(chosen.journal)
    checked: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    violations: list[dict[str, Any]] = []
    plans, pipelines, refused = set(), 0, 0
    for cases in scenarios(
        chosen.seed, *((2, 1) if chosen.quick else (chosen.scenarios, chosen.zoo))
    ):
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
        "Relations": [
            {"relation": n, "checked": k, "violated": failed[n]} for n, k in checked.items()
        ],
        "Violations": violations,
    }
    return report.finish(chosen, met=len(plans) >= 400 and not violations)


if __name__ == "__main__":
    raise SystemExit(main())
