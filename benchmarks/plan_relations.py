r"""Do plans keep the relations that must hold between them?

Plans small steps (residual networks and models of the zoo, written out and scanned) on seeded
clusters and batches by every method, and compares them: a freer search is never slower, nor is a
plan with more memory, faster links, faster devices or more hosts; twice the batch takes between one
and two times as long; bounds lie below step times, and so do the products at the devices' peak;
memory holds the state; parts add up; a plan file that is read and saved keeps its text; parameters
under other names, in another order, are split alike; a pipeline of one stage is one program; and
what plans and errors advise is so when it is planned again.

    python benchmarks/plan_relations.py [--quick] [--seed 0] [--scenarios 25] [--zoo 8] \
        [--journal FILE]
"""

from __future__ import annotations

import argparse
import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from _relation_advice import (
    GAP,
    ROUNDING,
    advice_of_command,
    advice_of_plan,
    advice_of_refusal,
)
from _relation_cases import FREE, METHODS, RENAMED, Case, cluster_of, scenarios, step_of
from _results import Journal, Report, options

import aliquot as aq
from aliquot.core import CaptureError, InfeasibleError, InputError
from aliquot.plans import Plan, StagePlan, placed_arrays


def planned(case: Case) -> dict[str, Any]:
    """The figures of a plan that relations are about."""
    cluster, step = cluster_of(case), step_of(case)
    limit = case.memory_share and case.memory_share * cluster.device.memory_bytes
    asked: dict[str, Any] = {
        "cluster": cluster,
        "num_micro_batches": case.count,
        "memory_limit_bytes": limit,
    }
    try:
        plan = aq.plan(*step.arguments, method=METHODS[case.method], **asked)
    except InfeasibleError as error:
        of_command = advice_of_command(case) if case.model else []
        return {
            "refused": "InfeasibleError",
            "advice": [*advice_of_refusal(case, asked, error), *of_command],
        }
    except (InputError, CaptureError) as error:
        return {"refused": type(error).__name__}
    p, text = plan.prediction, plan.to_json()
    parts_s = p.compute_s + p.communication_s + p.gradient_s - p.hidden_s + p.bubble_s
    device = cluster.device
    # Products of float32 may use the units for tf32.
    kinds = (step.dtype, "tf32") if step.dtype == "float32" else (step.dtype,)
    row = {
        "step_s": p.step_time_s,
        "bound_s": plan.provenance.lower_bound_s,
        "closed_form": plan.provenance.bound_holds_for.startswith("closed forms"),
        "flops_s": step.flops / (cluster.num_devices * max(map(device.peak, kinds))),
        "memory_bytes": p.peak_memory_bytes,
        "state_share_bytes": step.state_bytes / cluster.num_devices,
        "state_held": all(state_bytes(plan, s) <= peak_bytes(plan, s) for s in plan.stages),
        "parts_add_up": (
            math.isclose(parts_s, p.step_time_s, rel_tol=1e-6)
            and math.isclose(sum(p.memory_bytes.values()), p.peak_memory_bytes, rel_tol=1e-6)
        ),
        "fits": p.peak_memory_bytes <= p.memory_limit_bytes * (1 + ROUNDING),
        "stable": Plan.from_json(text).to_json() == text,
        "advice": list(advice_of_plan(case, asked, plan)),
        "stages": len(plan.stages),
        "micro_batches": plan.num_micro_batches,
        "meshes": [stage.mesh_shape for stage in plan.stages],
    }
    compared = not case.model and case == replace(base_of(case), permuted=case.permuted)
    return {**row, "arrays": [shardings(stage, case) for stage in plan.stages]} if compared else row


def base_of(case: Case) -> Case:
    """The first case of its scenario that has the same step and cluster."""
    return Case(
        model=case.model,
        width=case.width,
        depth=case.depth,
        scanned=case.scanned,
        batch=case.batch,
        cluster=case.cluster,
    )


def peak_bytes(plan: Plan, stage: StagePlan) -> float:
    """Predicted memory of a stage on each device."""
    return (stage.prediction or plan.prediction).peak_memory_bytes


def state_bytes(plan: Plan, stage: StagePlan) -> float:
    """The bytes of the step's state that a stage holds on each device, by the plan's shardings."""
    sizes = dict(zip(stage.axis_names, stage.mesh_shape, strict=True))
    total = 0.0
    for item in placed_arrays(plan.inputs, stage.shardings):
        if item.role != "batch":
            spec = stage.shardings[item.path]
            shards = [math.prod(sizes[axis] for axis in axes) for axes in spec]
            dims = [-(-n // k) for n, k in zip(item.shape, shards, strict=True)]
            total += math.prod(dims) * jnp.dtype(item.dtype).itemsize
    return total


def shardings(stage: StagePlan, case: Case) -> dict[str, list[list[str]]]:
    """The `PartitionSpec` of each array that goes in or out, under the names of the case that is
    not permuted.
    """
    named = {}
    for side, specs in (("in", stage.shardings), ("out", stage.outputs)):
        for path, spec in specs.items():
            for name, other in RENAMED.items() if case.permuted else ():
                path = path.replace(other, name)
            named[f"{side} {path}"] = [list(axes) for axes in spec]
    return dict(sorted(named.items()))


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
            and not (case.faster_links or case.faster_devices or case.more_hosts)
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
    yield from no_slower("faster devices are no slower", of(faster_devices=True), base)
    yield from no_slower("more hosts are no slower", of(more_hosts=True), base)
    one_s = rows[base].get("step_s")
    double = of(batch=2 * base.batch)
    two_s = rows[double].get("step_s")
    if one_s and two_s:
        holds = one_s * (1 - GAP) <= two_s <= 2 * one_s * (1 + GAP)
        yield "double batch takes one to two times", double, f"{two_s} s, {one_s} s", holds
    if one_s and not base.model:
        yield from same_plan(base, rows[base], rows[of(permuted=True)])
    yield from of_each(cases, rows)


def same_plan(base: Case, one: dict[str, Any], other: dict[str, Any]) -> Iterator[Finding]:
    """Permuted names lead to the same plan, array by array."""
    same = all(other.get(k) == one[k] for k in ("stages", "micro_batches", "meshes"))
    times = one["step_s"], other.get("step_s", math.inf)
    shown = f"{times[0]} s, {times[1]} s; {one['meshes']}, {other.get('meshes')}"
    holds = same and abs(times[1] - times[0]) <= GAP * times[0]
    yield "other names, same plan", base, shown, holds
    pairs = zip(one["arrays"], other.get("arrays", []), strict=False)
    unlike = [
        f"stage {k} {path}: {a[path]}, {b.get(path)}"
        for k, (a, b) in enumerate(pairs)
        for path in a
        if b.get(path) != a[path]
    ]
    yield "other names, same split of every array", base, "; ".join(unlike[:3]), not unlike


def of_each(cases: list[Case], rows: dict[Case, dict[str, Any]]) -> Iterator[Finding]:
    """Relations within each plan."""
    for case in cases:
        row = rows[case]
        for each in row.get("advice", ()):
            shown = f"{each['says']}; tried: {each['found']}"
            yield "advice is true when taken", case, shown, each["holds"]
        if "step_s" not in row:
            continue
        for name in ("parts_add_up", "fits", "stable"):
            yield name.replace("_", " "), case, "", row[name]
        step_s, memory_bytes = row["step_s"] * (1 + ROUNDING), row["memory_bytes"] * (1 + ROUNDING)
        shown = f"{row['flops_s']} s of products at their peak, step {row['step_s']} s"
        yield "no step is faster than its products", case, shown, row["flops_s"] <= step_s
        shown = f"{row['state_share_bytes']} bytes of {row['memory_bytes']}"
        holds = row["state_share_bytes"] <= memory_bytes
        yield "devices hold the state together", case, shown, holds
        yield "memory holds the shards of the state", case, "", row["state_held"]
        if row["bound_s"] is not None and not row["closed_form"]:
            shown = f"bound {row['bound_s']} s, step {row['step_s']} s"
            yield "bounds lie below", case, shown, row["bound_s"] <= step_s


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
            "Residual networks of two products a layer with momentum"
            f"{' and small models of the zoo' if chosen.zoo else ''}, written out and scanned, by"
            f" seed {chosen.seed}; every method with free and given"
            " numbers of micro-batches, then less memory, faster links and devices, more hosts,"
            f" twice the batch and other names. A freer search may be {GAP:.1%} slower. Bounds of"
            " closed forms are not compared with simulated step times."
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
