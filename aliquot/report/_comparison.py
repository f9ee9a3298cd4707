"""Comparison of several ways to run one step: the predicted cost of each, and in which parts of the
step it is slower than the fastest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ..cluster import NO_PRICE, Cluster, HostPrice, most_error, said_of_data_sheet, said_of_reported
from ..core import counted, format_bytes, format_count, format_seconds, format_share_of_limit
from ..plans import (
    RECOMPUTED_BY_STAGE,
    Plan,
    examples_per_step,
    expected_error,
    explained_names,
    figures,
    how_recomputed,
    is_pipeline,
    mfu,
    parallelism,
    said_of_step_time,
    step_parts,
    step_time_range_s,
    summary_rows,
    time_between_calls_s,
    tokens_per_step,
)
from ._tables import Column, table

"""What stands in tables of prices for a host without one."""
_MOST_PARTS = 3
# Step times that differ by less decide nothing: predictions are off by more.
_EQUAL = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run a step: a plan, or why there is none.

    Attributes:
        method, cluster: their names.
        plan: the plan, if there is one.
        refusal: why there is no plan; empty with a plan.
        required_bytes, available_bytes: if memory is the reason, what the smallest plan found needs
            on each device, and the limit.
        memory_bytes: the parts of the smallest plan's memory.
    """

    method: str
    cluster: str
    plan: Plan | None = None
    refusal: str = ""
    required_bytes: float | None = None
    available_bytes: float | None = None
    memory_bytes: tuple[tuple[str, float], ...] = ()

    @property
    def step_time_s(self) -> float | None:
        """Predicted step time; None without a plan."""
        return self.plan.prediction.step_time_s if self.plan else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Candidates, fastest first; those without a plan come last.

    Attributes:
        objective: "throughput" if the fastest is the one with the least time between calls; else
            it is the one with the least step time.
        prices, prices_from: of hosts, for what candidates cost, and where they come from.
        left_out: what was not compared, and what would compare it.
    """

    model: str
    candidates: tuple[Candidate, ...]
    objective: str | None = None
    prices: tuple[HostPrice, ...] = ()
    prices_from: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def best(self) -> Plan | None:
        """The fastest plan."""
        return self.candidates[0].plan if self.candidates else None

    def why_not(self, candidate: Candidate) -> str:
        """The parts of the step in which a candidate is slower than the fastest, or why it has no
        plan; empty for the fastest.
        """
        if candidate.plan is None:
            return candidate.refusal
        plan, best, objective = candidate.plan, self.best, self.objective
        if best is None or plan is best:
            return ""
        if is_same_plan(plan, best):
            return f"same plan as {self.candidates[0].method}"
        if objective == "throughput":
            mine_s, theirs_s = seconds_of(plan, objective), seconds_of(best, objective)
            if mine_s <= theirs_s:
                return "as fast as the fastest"
            return (
                f"{mine_s / theirs_s:.2f}x as long: a call every {format_seconds(mine_s)},"
                f" not every {format_seconds(theirs_s)}"
            )
        extra_s = plan.prediction.step_time_s - best.prediction.step_time_s
        if extra_s <= _EQUAL * best.prediction.step_time_s:
            return f"as fast as the fastest, within {_EQUAL:.1%}"
        mine, theirs = step_parts(plan), step_parts(best)
        more = sorted(((mine[name] - theirs[name], name) for name in mine), reverse=True)
        said = []
        for s, name in more[:_MOST_PARTS]:
            if s > extra_s / 20:
                said.append(f"+{format_seconds(s)} {name}")
        less = [f"-{format_seconds(-s)} {name}" for s, name in reversed(more) if -s > extra_s / 20]
        ratio = plan.prediction.step_time_s / best.prediction.step_time_s
        ways = [how_recomputed(plan), how_recomputed(best)]
        way = ways[0] if RECOMPUTED_BY_STAGE in str(ways[0]) else f"with --recompute {ways[0]}"
        again = f", {way}" if ways[0] != ways[1] and ways[0] else ""
        worst = _dearest(plan) if more[0][1] == "exposed communication" else ""
        most = f" (largest collective: {worst} with what overlaps)" if worst else ""
        return f"step {ratio:.2f}x as long: {', '.join([*said, *less])}{most}{again}"

    def seconds(self, candidate: Candidate) -> float:
        """What is least in the fastest candidate; 0 without a plan."""
        return seconds_of(candidate.plan, self.objective) if candidate.plan else 0.0

    def cost(self, candidate: Candidate) -> float | None:
        """What a candidate costs for 10**9 tokens (10**6 examples where a step has no tokens), idle
        hosts included; None without a plan or a price.
        """
        plan = candidate.plan
        if plan is None:
            return None
        cluster = Cluster.from_dict(plan.cluster)
        host = cluster.device.name, cluster.devices_per_host
        price = next((p for p in self.prices if (p.device, p.devices_per_host) == host), None)
        step_s, tokens = seconds_of(plan, self.objective), tokens_per_step(plan)
        done = tokens / 1e9 if tokens else examples_per_step(plan) / 1e6
        if price is None or not done:
            return None
        hosts = cluster.num_devices // cluster.devices_per_host + plan.idle_hosts
        return price.price_per_hour * hosts * step_s / 3600 / done

    @property
    def cost_unit(self) -> str:
        """Of `cost`, such as `USD/1B tokens`."""
        tokens = any(c.plan and tokens_per_step(c.plan) for c in self.candidates)
        money = next((price.currency for price in self.prices if price.currency), "price")
        return f"{money}/{'1B tokens' if tokens else '1M examples'}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. Times in seconds, sizes in bytes."""
        rows = list(map(self._row, self.candidates))
        return {"model": self.model, "candidates": rows, "notes": notes_of(self)}

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        plan = candidate.plan
        used_s = seconds_of(plan, self.objective) if plan else None
        found = figures(plan, seconds=used_s)
        if plan is None:
            found |= {
                "peak_memory_bytes": candidate.required_bytes,
                "memory_limit_bytes": candidate.available_bytes,
                "memory_bytes": dict(candidate.memory_bytes),
            }
        return {
            "method": candidate.method,
            "cluster": candidate.cluster,
            "feasible": plan is not None,
            **found,
            "time_between_calls_s": used_s if self.objective == "throughput" else None,
            "mesh": list(plan.stages[0].mesh_shape) if plan else None,
            "num_stages": len(plan.stages) if plan else None,
            "num_micro_batches": plan.num_micro_batches if plan else None,
            "recompute": how_recomputed(plan) if plan else None,
            "cost": self.cost(candidate),
            "cost_unit": self.cost_unit if self.prices else None,
            "loses": self.why_not(candidate),
        }

    def __str__(self) -> str:
        from ._tables import as_text

        return as_text(comparison_table(self), width=100)


def comparison_table(comparison: Comparison) -> Group:
    """What to take, a table of the candidates, and a line for each that is not the fastest."""
    several, methods = _several(comparison)
    named = methods or not several
    where = f" on {comparison.candidates[0].cluster}" if comparison.candidates else ""
    rows = []
    for c in comparison.candidates:
        row = comparison._row(c)
        row["cost_said"] = format_cost(row["cost"]) or (NO_PRICE if row["feasible"] else None)
        rows.append({**row, "layout": layout(c.plan) if c.plan else None})
    what = "tokens" if any(row["tokens_per_s"] for row in rows) else "examples"
    counted = any(row["mfu"] is not None for row in rows)
    between = comparison.objective == "throughput"
    shown = table(
        f"{comparison.model}{'' if several else where}: fastest first (predicted)",
        rows,
        Column("cluster", "cluster", shown=several),
        Column("method", "method", shown=named),
        Column("mesh", "layout"),
        Column("step", step_said, number=True),
        Column("between calls", "time_between_calls_s", format_seconds, number=True, shown=between),
        Column("MFU", "mfu", "{:.1%}".format, number=True, shown=counted),
        Column(f"{what}/s", f"{what}_per_s", rate_said, number=True),
        Column(comparison.cost_unit, "cost_said", number=True, shown=comparison.prices),
        Column("memory", memory_said, number=True),
        narrow=True,
    )
    lines: list[RenderableType] = []
    for row in rows:
        names = (row["cluster"] if several else "", row["method"] if named else "")
        if why := row["loses"]:
            lines.append(Padding(Text(f"{' '.join(filter(None, names))}: {why}"), (0, 0, 0, 2)))
    parts: list[RenderableType] = list(map(Text, recommendation(comparison)))
    parts += ["", shown]
    parts += [Text("Why not", style="bold"), *lines] if lines else []
    notes = notes_of(comparison)
    if notes:
        parts.append(Text("Notes", style="bold"))
    for note in notes:
        parts.append(Padding(Text(note), (0, 0, 0, 2)))
    return Group(*parts)


def recommendation(comparison: Comparison) -> list[str]:
    """What to take, in sentences: the fastest, how sure its lead is, and the cheapest."""
    planned = [c for c in comparison.candidates if c.plan]
    if not planned:
        return ["No candidate fits. Why not is listed below, with what each would need."]
    best, *others = planned
    assert best.plan is not None
    said = [
        f"Take {name_of(best, comparison)}: {format_seconds(comparison.seconds(best))} a"
        f" {'call' if comparison.objective == 'throughput' else 'step'} (predicted)."
    ]
    said += _described(best.plan)
    known = expected_error(best.plan)
    if known:
        said.append(f"Expected error of predicted step times: {said_of_reported(known)}.")
    if step_time_range_s(best.plan):
        said.append(f"It takes {said_of_step_time(best.plan)} a step: {said_of_data_sheet()}.")
    elif not known and not best.plan.provenance.profiles:
        said.append("Expected error of predicted step times: not known.")
    best_s = comparison.seconds(best)
    equal = [c for c in others if comparison.seconds(c) <= (1 + _EQUAL) * best_s]
    if equal:
        same: list[Candidate] = []
        near: list[Candidate] = []
        for c in equal:
            is_same = c.plan is not None and is_same_plan(c.plan, best.plan)
            (same if is_same else near).append(c)
        if same:
            said.append(f"The same plan is found by {_names(same, comparison)}.")
        if near:
            said.append(
                f"As fast within {_EQUAL:.1%}: {_names(near, comparison)}; any of these will do."
            )
        others = others[len(equal) :]
    if others and best_s:
        second = others[0]
        behind = comparison.seconds(second) / best_s - 1
        lead = f"{name_of(second, comparison)} is next, {behind:.1%} slower"
        errors = []
        for c in (best, second):
            if c.plan and (error := most_error(expected_error(c.plan))) is not None:
                errors.append(error)
        if len(errors) < 2:
            said.append(f"{lead}; how far predictions are off here is not known, so measure both.")
        elif behind <= max(errors):
            said.append(f"{lead}: within that error, so measure both, or take the simpler one.")
        else:
            said.append(f"{lead}: beyond that error.")
    costs = [(cost, c) for c in planned if (cost := comparison.cost(c)) is not None]
    if costs:
        cost, cheapest = min(costs, key=lambda item: item[0])
        own = comparison.cost(best)
        if cheapest is best or own is None:
            said.append(f"It is the cheapest, too: {format_cost(cost)} {comparison.cost_unit}.")
        else:
            said.append(
                f"The cheapest is {name_of(cheapest, comparison)}: {format_cost(cost)}"
                f" {comparison.cost_unit}, and {format_cost(own)} for the fastest."
            )
    return said


def _described(plan: Plan) -> list[str]:
    """What a plan splits over what, and what it recomputes, in sentences."""
    how = [f"{which}: {roles}." if which else f"{roles}." for which, roles in parallelism(plan)]
    said = [f"Its parallelism: {roles}" for roles in how]
    if is_pipeline(plan):
        stages = counted(len(plan.stages), "stage")
        parts = counted(plan.num_micro_batches, "micro-batch")
        said = [f"It is a pipeline of {stages} ({plan.schedule}) with {parts}."]
        said += [f"  {line}" for line in how]
    again = dict(summary_rows(plan)).get("recomputation", "none")
    return said if again == "none" else [*said, f"Recomputation: {again}."]


def is_same_plan(plan: Plan, other: Plan) -> bool:
    """Whether two plans run a step in the same way."""
    return (
        plan.prediction.step_time_s == other.prediction.step_time_s
        and plan.stages == other.stages
        and plan.num_micro_batches == other.num_micro_batches
        and plan.schedule == other.schedule
        and plan.model.settings == other.model.settings
    )


def _names(candidates: Sequence[Candidate], comparison: Comparison) -> str:
    return ", ".join(name_of(each, comparison) for each in candidates)


def name_of(candidate: Candidate, comparison: Comparison) -> str:
    """What a candidate is called: its cluster, its method, or both."""
    several, methods = _several(comparison)
    if not several:
        return candidate.method
    return f"{candidate.cluster}, {candidate.method}" if methods else candidate.cluster


def _several(comparison: Comparison) -> tuple[bool, bool]:
    """Whether there are several clusters, and several methods."""
    clusters, methods = set(), set()
    for candidate in comparison.candidates:
        clusters.add(candidate.cluster)
        methods.add(candidate.method)
    return len(clusters) > 1, len(methods) > 1


def notes_of(comparison: Comparison) -> list[str]:
    """What names of methods mean, what some candidates recompute and others do not, and notes of
    the plans on batches that the devices do not divide, each once.
    """
    by_way: dict[str, list[str]] = {}
    for c in comparison.candidates:
        if c.plan and (way := how_recomputed(c.plan)):
            by_way.setdefault(way, []).append(c.method)
    notes = explained_names(c.method for c in comparison.candidates)
    if len(by_way) > 1:
        ways = (f"{way}: {', '.join(dict.fromkeys(names))}" for way, names in by_way.items())
        notes.append(f"Recomputation of the fastest plan of each. {'; '.join(ways)}.")
    notes += comparison.left_out
    if comparison.prices_from:
        notes.append(f"Prices: {comparison.prices_from}.")
    of_plans = itertools.chain(*(c.plan.notes for c in comparison.candidates if c.plan))
    notes += [note for note in of_plans if "do not divide" in note]
    return list(dict.fromkeys(notes))


def step_said(row: Mapping[str, Any]) -> str:
    """The step time of a row of an answer, or that there is none."""
    if row["feasible"]:
        return format_seconds(row["step_time_s"])
    return "does not fit" if row["peak_memory_bytes"] else "no plan"


def rate_said(per_s: float) -> str:
    """Tokens or examples per second."""
    return format_count(float(round(per_s)))


def memory_said(row: Mapping[str, Any]) -> str | None:
    """Memory on each device, and its share of the limit if a plan has one."""
    peak, limit = row["peak_memory_bytes"], row["memory_limit_bytes"] if row["feasible"] else None
    share = f" {format_share_of_limit(peak, limit)}" if limit else ""
    return f"{format_bytes(peak)}{share}" if peak else None


def format_cost(cost: float | None) -> str:
    """A price as text; empty if it is not known."""
    return "" if cost is None else f"{cost:,.0f}" if cost >= 100 else f"{cost:.3g}"


def layout(plan: Plan) -> str:
    """Its mesh, or its number of stages, and its micro-batches."""
    mesh = "x".join(map(str, plan.stages[0].mesh_shape)) if plan.stages else ""
    count = plan.num_micro_batches
    batches = f", {counted(count, 'micro-batch')}"
    return f"{len(plan.stages)} stages{batches}" if is_pipeline(plan) else f"{mesh}{batches}"


def seconds_of(plan: Plan, objective: str | None) -> float:
    """What is least in the fastest plan."""
    return time_between_calls_s(plan) if objective == "throughput" else plan.prediction.step_time_s


def mfu_of(plan: Plan, objective: str | None) -> float | None:
    """Model FLOPs utilisation while calls or steps follow one another."""
    used, seconds = mfu(plan), seconds_of(plan, objective)
    return used * plan.prediction.step_time_s / seconds if used and seconds else used


def _dearest(plan: Plan) -> str:
    uses = [*plan.prediction.collectives]
    if not uses and is_pipeline(plan):
        for stage in plan.stages:
            uses += stage.prediction.collectives if stage.prediction else ()
    sums: dict[tuple[str, tuple[str, ...]], float] = {}
    for use in uses:
        sums[use.kind, use.axes] = sums.get((use.kind, use.axes), 0.0) + use.seconds
    if not sums:
        return ""
    (kind, axes), seconds = max(sums.items(), key=lambda item: item[1])
    return f"{kind} over {', '.join(axes)}, {format_seconds(seconds)}"


def sorted_candidates(
    candidates: Sequence[Candidate], objective: str | None = None
) -> tuple[Candidate, ...]:
    """The candidates, fastest first; those without a plan last, in their given order."""
    seconds = {id(c): seconds_of(c.plan, objective) for c in candidates if c.plan}
    return tuple(sorted(candidates, key=lambda c: seconds.get(id(c), math.inf)))
