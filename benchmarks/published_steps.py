"""Are predicted step times those that others measured on GPUs?

Plans the 8-layer GPTs that Alpa's benchmark timed in 2022 on 1 to 8 V100s of a p3.16xlarge, with
the model, mesh and method of each row, and compares step times, memory and ranking with what was
measured. The constants are those of `aliquot/cluster/calibration/v100.toml`, which come from single
operators of other models: no row of this file was fitted.

    python benchmarks/published_steps.py FOLDER [--quick]

FOLDER holds `published-steps.json`. What differs between the compiler that ran these rows and
today's stands in `of_2022` and `Alpa`, and nowhere else.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _alpa_step import alpa_step, of_2022
from _results import Report, options, say
from numpy.typing import NDArray

import aliquot as aq
from aliquot.cluster import LogicalMesh, target_for
from aliquot.core import AliquotError
from aliquot.cost import Priced, Problem, make_problem, predict, price
from aliquot.graph import Phase, Role
from aliquot.planners import AbstractMethod, Auto, Decision, Progress
from aliquot.planners._race import Entry, Race
from aliquot.planners.intra import ILP, Space, fixed
from aliquot.sharding import PARTIAL

UNLIMITED = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class Alpa(AbstractMethod):
    """What Alpa lets its solver choose on a mesh of two axes.

    The first axis splits the batch and, with `zero_stage` 2 and 3, what the update holds;
    parameters are whole along it below stage 3. The second splits parameters, and of activations
    neither batch nor sequence, which Alpa holds as one dim. A product whose sum is split is
    all-reduced at once; only gradients are reduce-scattered (`GenerateReduceScatter`). Each product
    gathers a split parameter for itself, as its transpose and its recomputation are other values:
    as measured, stage 3 takes just two gathers longer than stage 2 at 2 and at 4 GPUs.
    """

    mesh: tuple[int, int]
    zero_stage: int

    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        """See `AbstractMethod.solve`."""
        shape = tuple(n for n in self.mesh if n > 1) or (1,)
        kinds = fixed.kinds_of(problem)
        edges = tuple(
            (
                dataclasses.replace(e, share=len(problem.nodes.edges) + e.index)
                if e.source in kinds.parameters
                else e
            )
            for e in problem.nodes.edges
        )
        nodes = dataclasses.replace(problem.nodes, edges=edges)
        problem = dataclasses.replace(problem, nodes=nodes)
        priced = price(problem, LogicalMesh(shape=shape, cluster=problem.cluster))
        tables = [
            _reduced_at_once(table) if nodes.batch_factors[edge.target] else table
            for edge, table in zip(edges, priced.edges, strict=True)
        ]
        priced = dataclasses.replace(priced, edges=tuple(tables))
        space = Space(name="alpa", priced=priced, allowed=self._allowed(problem, priced, kinds))
        race = Race(problem=problem, method="shard", intra=ILP(), planner="ilp", progress=progress)
        return race.best([Entry(space=space, intra=ILP())])

    def _allowed(self, problem: Problem, priced: Priced, kinds: fixed.Kinds) -> fixed.Masks:
        first = 0 if self.mesh[0] > 1 else None
        second = len(priced.axis_sizes) - 1 if self.mesh[1] > 1 else None
        tokens = _token_factors(problem)
        masks = fixed.everything(priced)
        for node, table, mask in zip(priced.graph.nodes, priced.nodes, masks, strict=True):
            choices, batch = table.choices, list(priced.graph.batch_factors[node.index])
            matrix = len(node.factors) > 1
            if node.index in kinds.parameters or node.index in kinds.update:
                state = node.index in kinds.update
                if first is not None and self.zero_stage < (2 if state else 3):
                    mask &= choices[:, first] == -1
                elif first is not None:
                    _prefer(mask, choices[:, first] >= 0)
                if second is not None and matrix:
                    _prefer(mask, choices[:, second] >= 0)
                continue
            if first is not None and (batch or self.zero_stage < 2):
                mask &= np.isin(choices[:, first], batch) if batch else choices[:, first] == -1
            if second is not None:
                mask &= ~np.isin(choices[:, second], list(tokens[node.index]))
        return masks


def _prefer(mask: NDArray[np.bool_], wanted: NDArray[np.bool_]) -> None:
    if (mask & wanted).any():
        mask &= wanted


def _reduced_at_once(table: Any) -> Any:
    """No conversion of a sum that is still partial into splits."""
    refused = [
        [any(p <= PARTIAL and q >= 0 for p, q in zip(a, b, strict=True)) for b in table.targets]
        for a in table.sources
    ]
    return dataclasses.replace(table, seconds=np.where(np.array(refused), np.inf, table.seconds))


def _token_factors(problem: Problem) -> list[set[int]]:
    """For each node the factors that batch and sequence run through."""
    graph, nodes = problem.graph, problem.nodes
    reached: list[set[int]] = [set(batch) for batch in nodes.batch_factors]
    ports = list(zip(graph.inputs, nodes.input_ports, strict=True))
    parameters = {port.node for item, port in ports if item.role is Role.PARAMETER}
    pending = []
    for item, port in ports:
        if item.role is Role.BATCH and port.node >= 0 and 1 in port.projection:
            pending.append((port.node, port.projection.index(1)))
    ways: dict[int, list[Any]] = {}
    for e in nodes.edges:
        if e.phase is not Phase.UPDATE and not e.gradient:
            ways.setdefault(e.source, []).append(
                (e.target, e.source_projection, e.target_projection)
            )
            ways.setdefault(e.target, []).append(
                (e.source, e.target_projection, e.source_projection)
            )
    while pending:
        node, factor = pending.pop()
        if factor in reached[node]:
            continue
        reached[node].add(factor)
        for other, mine, theirs in ways.get(node, []):
            if mine[factor] >= 0 and mine[factor] in theirs and other not in parameters:
                pending.append((other, theirs.index(mine[factor])))
    return reached


def _combined_gradients_bytes(decision: Decision, parts: dict[str, float]) -> float:
    """Memory where all gradients wait for one collective: Alpa lets its combiner join them without
    a limit.

    Then state, whole gradients and what the collective makes of them are there at once.
    """
    priced = decision.picked.priced
    held = sum(
        n
        for part, n in parts.items()
        if part in ("parameters", "optimizer state", "other state", "batch")
    )
    sizes = priced.axis_sizes

    def local(num_bytes: float, spec: tuple[int, ...]) -> float:
        return num_bytes / math.prod(n for n, dim in zip(sizes, spec, strict=True) if dim >= 0)

    for edge_index, s, t in decision.picked.conversions:
        edge, table = priced.graph.edges[edge_index], priced.edges[edge_index]
        source, target = table.sources[s], table.targets[t]
        if edge.gradient and any(p <= PARTIAL for p in source):
            before, after = local(edge.num_bytes, source), local(edge.num_bytes, target)
            held += edge.count * (before + (after if after < before else 0.0))
    return held


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the judge says of one row."""

    step_s: float
    compute_s: float
    memory_bytes: float
    fits: bool


def _predict(row: dict[str, Any]) -> Predicted:
    step, state, batch = alpa_step(row["spec"], recompute=row["recompute"])
    cluster = of_2022(aq.Cluster.preset(f"{row['gpus']}xV100-16GB"))
    problem = make_problem(aq.capture(step, state, batch), cluster, memory_limit_bytes=UNLIMITED)
    stage = {"dp": 0, "zero2": 2, "zero3": 3, "shard": 2, "shard-largest": 2}[row["method"]]
    decision = Alpa(mesh=tuple(row["mesh"]), zero_stage=stage).solve(problem)
    prediction = predict(decision.picked, UNLIMITED, problem.graph)
    memory = max(
        prediction.peak_memory_bytes, _combined_gradients_bytes(decision, prediction.memory_bytes)
    )
    return Predicted(
        step_s=prediction.step_time_s,
        compute_s=prediction.compute_s,
        memory_bytes=memory,
        fits=memory <= target_for(cluster.device).usable_bytes(cluster.device),
    )


def _best(spec: dict[str, Any], cluster: aq.Cluster) -> tuple[float, str]:
    """The best plan of the planner, in the memory that there is."""
    step, state, batch = alpa_step(spec, recompute=True)
    plan = aq.plan(step, state, batch, cluster=cluster, method=Auto())
    return plan.prediction.step_time_s, "x".join(map(str, plan.stages[0].mesh_shape))


def tau_b(groups: Iterable[Sequence[tuple[float, float]]], least: float = 0.02) -> float:
    """Kendall's tau-b of groups of (measured, predicted), over the pairs inside groups whose
    measurements differ by `least` or more.

    >>> tau_b([[(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)]])
    0.3333333333333333
    """
    agree = disagree = ties = 0
    for group in groups:
        for (m1, p1), (m2, p2) in itertools.combinations(group, 2):
            if abs(m1 - m2) < least * min(m1, m2):
                continue
            product = (m1 - m2) * (p1 - p2)
            agree, disagree, ties = (
                agree + (product > 0),
                disagree + (product < 0),
                ties + (product == 0),
            )
    pairs = agree + disagree
    return (agree - disagree) / math.sqrt(pairs * (pairs + ties)) if pairs else 0.0


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, lambda parser: parser.add_argument("folder", type=Path))
    rows = json.loads((chosen.folder / "published-steps.json").read_text())
    if chosen.quick:
        rows = [row for row in rows if row["gpus"] <= 2]
    table = []
    for row in rows:
        try:
            found = _predict(row)
        except AliquotError as error:
            say(f"{row['method']} {row['mesh']}: {error}")
            raise
        table.append(_shown(row, found))
        say(" ".join(f"{k}={v}" for k, v in table[-1].items()))
    report = _report(table, rows)
    return report.finish(chosen, met=_judge(report, rows, table))


def _shown(row: dict[str, Any], found: Predicted) -> dict[str, Any]:
    step_s, memory = row["step_s"], row["peak_memory_gib"]
    return {
        "GPUs": row["gpus"],
        "method": row["method"],
        "mesh": "x".join(map(str, row["mesh"])),
        "hidden": row["spec"]["hidden_size"],
        "measured s": step_s or "out of memory",
        "predicted s": found.step_s,
        "error": f"{found.step_s / step_s - 1:+.1%}" if step_s else "",
        "of it compute s": round(found.compute_s, 4),
        "measured GiB": memory or "out of memory",
        "predicted GiB": round(found.memory_bytes / 2**30, 2),
        "predicted to fit": "yes" if found.fits else "no",
    }


def _report(table: list[dict[str, Any]], rows: list[dict[str, Any]]) -> Report:
    report = Report(
        name="published_steps",
        question="Predicted against published step times on 1 to 8 V100s",
        bar=(
            "step time: median error at most 8 %, worst at most 20 %; out of memory or not right in"
            " every row; tau-b at least 0.8 at 4 and at 8 GPUs; peak memory: median error at most"
            " 10 %; the best plan for each number of GPUs, on today's compiler at most every row's"
            " measurement, on that of 2022 at most every row's prediction"
        ),
        method=(
            "Rows of Alpa's benchmark (OSDI 2022 artifact, Apache-2.0), with the same model, mesh"
            " and method. Constants from calibration/v100.toml, fitted to operators of other"
            " models; no constant was fitted to a row. The form of those fits (weights, memory"
            " layouts, shares by group size) was settled with these rows in view, so that none of"
            " them is held out in the strict sense; that each product gathers for itself was read"
            " off ZeRO-3 at 2 and 4 GPUs, which takes two gathers longer than ZeRO-2. Arguments of"
            " the comparison, that is what the compiler of 2022 did otherwise: nothing overlaps;"
            " partial activations are all-reduced at once; each product gathers a split parameter"
            " for itself; all gradients wait for one combined collective. The best plans are"
            " predicted for that compiler and for today's. Rows of the heuristic `shard-largest`"
            " are shown and not counted."
        ),
    )
    report.tables["Rows"] = table
    return report


def _judge(report: Report, rows: list[dict[str, Any]], table: list[dict[str, Any]]) -> bool:
    counted = [(r, t) for r, t in zip(rows, table, strict=True) if r["method"] != "shard-largest"]
    timed = [(r, t) for r, t in counted if r["step_s"]]
    errors = [abs(t["predicted s"] / r["step_s"] - 1) for r, t in timed]
    memory = [abs(t["predicted GiB"] / r["peak_memory_gib"] - 1) for r, t in timed]
    wrong = [
        t for r, t in counted if (t["predicted to fit"] == "yes") == r["failed_or_out_of_memory"]
    ]
    of_gpus = {
        n: [(r, t) for r, t in timed if r["gpus"] == n] for n in sorted({r["gpus"] for r in rows})
    }
    taus = {
        n: tau_b([[(r["step_s"], t["predicted s"]) for r, t in some]])
        for n, some in of_gpus.items()
        if n in (4, 8)
    }
    best = []
    for n, some in of_gpus.items():
        spec = some[0][0]["spec"]
        today = aq.Cluster.preset(f"{n}xV100-16GB")
        step_s, mesh = _best(spec, of_2022(today))
        today_s, _ = _best(spec, today)
        fastest = min(r["step_s"] for r in rows if r["gpus"] == n and r["step_s"])
        predicted = min(t["predicted s"] for _, t in some)
        best.append(
            {
                "GPUs": n,
                "best plan, predicted s": step_s,
                "its mesh": mesh,
                "with today's overlap, predicted s": today_s,
                "fastest row, measured s": fastest,
                "fastest row, predicted s": predicted,
            }
        )
    report.tables["Best plans"] = best
    report.summary = {
        "step time, median error": float(np.median(errors)),
        "step time, worst error": max(errors),
        "median error by GPUs": {
            str(n): float(np.median([abs(t["predicted s"] / r["step_s"] - 1) for r, t in some]))
            for n, some in of_gpus.items()
        },
        "rows wrong about memory": len(wrong),
        "tau-b": {str(n): tau for n, tau in taus.items()},
        "peak memory, median error": float(np.median(memory)),
        **{
            f"GPUs whose best plan, on {compiler}, is above the fastest row as {how}": (
                [b["GPUs"] for b in best if b[ours] > b[f"fastest row, {how} s"] * (1 + 1e-9)]
                or "none"
            )
            for compiler, ours in (
                ("today's compiler", "with today's overlap, predicted s"),
                ("that of 2022", "best plan, predicted s"),
            )
            for how in ("measured", "predicted")
        },
    }
    return (
        float(np.median(errors)) <= 0.08
        and max(errors) <= 0.2
        and not wrong
        and all(tau >= 0.8 for tau in taus.values())
        and float(np.median(memory)) <= 0.1
        and report.summary[
            "GPUs whose best plan, on today's compiler, is above the fastest row as measured"
        ]
        == "none"
        and report.summary[
            "GPUs whose best plan, on that of 2022, is above the fastest row as predicted"
        ]
        == "none"
    )


if __name__ == "__main__":
    sys.exit(main())
