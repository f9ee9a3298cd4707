"""The figures of Aceso's paper: our searches beside the published ones.

Reference: G. Liu et al., "Aceso: Efficient Parallel DNN Training through Iterative Bottleneck
    Alleviation", EuroSys 2024, figures 7 to 9.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..core import InputError
from ..interop.aceso import (
    ACESO,
    PAPER_SIZES,
    PAPER_TITLES,
    Configuration,
    Faults,
    PublishedTables,
    accuracy_rows,
    built_in_chains,
    measured_size,
    models_in,
)
from ..interop.aceso.search import Auto, Megatron, SearchProblem, read_problem
from ._results import Results

_OURS, _PREDICTED = "aliquot", "aliquot (predicted)"
_TRANSFORMER, _CONVOLUTIONS = (1, 2, 4, 8), (16, 32, 48, 64)
_DEVICES = ((1, 4), (1, 8), (2, 8), (4, 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class AcesoCase:
    """A case of the paper or of the artifact's small setting.

    Attributes:
        family, size: of the model; `num_layers` where the size leaves them open.
        nodes, gpus_per_node: where it runs.
        global_batch: samples of a step, computed in micro-batches of so many on each rank.
        memory_limit_mb: MiB that a device may use.
    """

    family: str
    size: str
    nodes: int
    gpus_per_node: int
    global_batch: int
    micro_batches: tuple[int, ...]
    num_layers: int | None = None
    memory_limit_mb: float = 28_000.0


def aceso_cases() -> tuple[AcesoCase, ...]:
    """The cases of figures 7 and 8: every family in four sizes, on 4 to 32 GPUs."""
    found = []
    for family, sizes in PAPER_SIZES.items():
        for size, (nodes, per_node) in zip(sizes, _DEVICES, strict=True):
            found.append(
                AcesoCase(
                    family=family,
                    size=size,
                    nodes=nodes,
                    gpus_per_node=per_node,
                    global_batch=1536 if family == "resnet" else 1024,
                    micro_batches=_CONVOLUTIONS if family == "resnet" else _TRANSFORMER,
                )
            )
    return tuple(found)


def small_aceso_cases() -> tuple[AcesoCase, ...]:
    """The cases of the artifact's small setting: a model of each family on 4 GPUs."""
    return tuple(
        AcesoCase(
            family=family,
            size=size,
            nodes=1,
            gpus_per_node=4,
            global_batch=768 if family == "resnet" else 512,
            micro_batches=_CONVOLUTIONS if family == "resnet" else _TRANSFORMER,
            memory_limit_mb=12_000.0,
        )
        for family, size in (("gpt", "1_3B"), ("t5", "770M"), ("resnet", "1B"))
    )


def draw_aceso(
    database: Path,
    published: PublishedTables,
    results: Results,
    *,
    max_layers: int,
    small: bool = False,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Search every case that the database has measured, draw the figures, and return their numbers
    as plain data.

    Args:
        max_layers: the deepest model of figure 9.
        small: whether to make the tables of the small setting instead.

    Raises:
        InputError: the database has no model of the paper, or nothing fits.
    """
    known = models_in(database)
    search = _searches(database, results, note, small=small)
    cases: dict[str, dict[str, Any]] = {}
    missing = []
    for case in small_aceso_cases() if small else aceso_cases():
        name = f"{case.family} {case.size}"
        if f"{case.family}_{measured_size(built_in_chains()[case.family], case.size)}" in known:
            cases[name] = search(case)
        else:
            missing.append(name)
    if not cases:
        raise InputError(
            f"{database} has none of the models of the paper; it has {', '.join(known)}."
        )
    answer: dict[str, Any] = {"cases": cases, "missing": missing}
    for family in () if small else PAPER_SIZES:
        found = {size: cases.get(f"{family} {size}") for size in PAPER_SIZES[family]}
        of_family = {size: row for size, row in found.items() if row}
        if of_family:
            _draw_family(results, published, family, of_family)
    if small:
        _tabulate_small(results, published, cases)
        answer["faults"] = _tabulate_faults(results, cases)
    elif layers := _draw_layers(results, published, search, max_layers):
        answer["layers"] = layers
    if rows := accuracy_rows(published, setting="small" if small else "large"):
        answer["accuracy"] = rows
        results.table(
            "accuracy",
            "Accuracy of Aceso's performance model",
            rows,
            "Iteration time, and memory of the first stage with what the allocator reserves, as"
            " published.",
        )
    results.write_page()
    for name in missing:
        note(f"not measured: {name}")
    return answer


def _searches(
    database: Path, results: Results, note: Callable[[str], None], *, small: bool
) -> Callable[[AcesoCase], dict[str, Any]]:
    """What searches a case, unless its result for a database of these files is known; of the small
    setting also with each fault of the performance model mended.
    """
    digest = hashlib.sha256()
    for path in sorted(database.glob("*.csv")):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    measured = digest.hexdigest()[:16]

    def make(case: AcesoCase) -> dict[str, Any]:
        layers = f", {case.num_layers} layers" if case.num_layers else ""
        note(
            f"searching: {case.family} {case.size}{layers} on"
            f" {case.nodes * case.gpus_per_node} GPUs"
        )
        problem, _ = read_problem(
            database,
            model=case.family,
            size=case.size,
            num_nodes=case.nodes,
            gpus_per_node=case.gpus_per_node,
            global_batch=case.global_batch,
            memory_limit_mb=case.memory_limit_mb,
            micro_batches=case.micro_batches,
            judge=ACESO,
            num_layers=case.num_layers,
        )
        found = Auto().search(problem)
        if not found.best:
            raise InputError(
                f"No configuration of {case.family} {case.size} fits"
                f" {case.memory_limit_mb:,.0f} MiB."
            )
        by_hand = Megatron().search(problem).best
        return {
            "iteration_time_ms": found.best[0][1].iteration_time_ms,
            "megatron_ms": by_hand[0][1].iteration_time_ms if by_hand else None,
            "samples_per_s": case.global_batch / found.best[0][1].iteration_time_ms * 1000,
            "lower_bound_ms": found.lower_bound_ms,
            "search_s": found.search_s,
            "faults": _cost_of_faults(problem, found.best[0][0]) if small else [],
        }

    what = "faults mended, " if small else ""
    return lambda case: results.row(f"{what}database {measured}: {case}", lambda: make(case))


def _cost_of_faults(problem: SearchProblem, winner: Configuration) -> list[dict[str, Any]]:
    """What each fault of Aceso's performance model costs: the configuration that wins with all of
    them, judged with one mended, beside the one that wins then.
    """
    rows = []
    for fault in fields(Faults):
        judge = replace(ACESO, faults=replace(Faults(), **{fault.name: False}))
        mended = replace(problem, judge=judge)
        judged = mended.evaluate(winner)
        fullest_mb = max(stage.memory_mb for stage in judged.stages)
        other = Auto().search(mended, start=[winner]).best
        best_ms = other[0][1].iteration_time_ms if other else None
        rows.append(
            {
                "fault": fault.name,
                "winner_ms": judged.iteration_time_ms,
                "winner_fits": fullest_mb <= problem.memory_limit_mb + 1e-6,
                "best_ms": best_ms,
                "cost": judged.iteration_time_ms / best_ms - 1 if best_ms else None,
            }
        )
    return rows


def _draw_family(
    results: Results, published: PublishedTables, family: str, found: Mapping[str, dict[str, Any]]
) -> None:
    for figure, table, ours, label, unit, figure_of, note in (
        (
            7,
            published.table(f"e2e_norm_thpt_large_{family}"),
            _PREDICTED,
            "throughput, Megatron-LM's best grid point = 1",
            "relative throughput",
            _over_megatron,
            "Published measurements; ours is the ratio of the times that Aceso's performance model"
            " predicts for Megatron-LM's best grid point and for our configuration.",
        ),
        (
            8,
            published.table(f"search_cost_large_{family}"),
            _OURS,
            "search",
            "seconds",
            operator.itemgetter("search_s"),
            "Published wall times of the searches beside ours on this machine.",
        ),
    ):
        if not table:
            continue
        known = set[str]()
        for row in table.values():
            known |= {size for size, value in row.items() if value}
        sizes = [size for size in found if size in known]
        series = _columns(table, sizes)
        series[ours] = [figure_of(found[size]) for size in sizes]
        name, title = f"figure{figure}_{family}", f"{PAPER_TITLES[family]}: {label}"
        groups = [size.replace("_", ".") for size in sizes]
        results.bars(name, title, unit, groups, series, logarithmic=figure == 8)
        results.table(name, title, _transposed("model", groups, series), note)


def _over_megatron(row: Mapping[str, Any]) -> float | None:
    """How many times as fast as Megatron-LM's best grid point; None if none fits."""
    by_hand_ms = row["megatron_ms"]
    return by_hand_ms / row["iteration_time_ms"] if by_hand_ms else None


def _tabulate_small(
    results: Results, published: PublishedTables, cases: Mapping[str, dict[str, Any]]
) -> None:
    """Throughput and cost of the searches, with what a run of the artifact has measured where that
    is given.
    """
    throughput, cost = [], []
    for name, row in cases.items():
        family, size = name.split()
        by_hand_ms = row["megatron_ms"]
        line = {
            "model": f"{PAPER_TITLES[family]} {size}",
            "Megatron-LM, samples/s (predicted)": by_hand_ms
            and row["samples_per_s"] * row["iteration_time_ms"] / by_hand_ms,
            "aliquot, samples/s (predicted)": row["samples_per_s"],
            "over Megatron-LM": _over_megatron(row),
            "at most to be won": max(1 - row["lower_bound_ms"] / row["iteration_time_ms"], 0.0),
        }
        measured = published.table(f"e2e_thpt_small_{family}")
        for system, by_size in measured.items():
            line[f"{system}, samples/s (given)"] = by_size.get(size)
        throughput.append(line)
        seconds = {"model": line["model"], _OURS: row["search_s"]}
        for system, by_size in published.table(f"search_cost_small_{family}").items():
            seconds[system] = by_size.get(size)
        cost.append(seconds)
    results.table(
        "throughput_small",
        "Throughput of the small setting",
        throughput,
        "As Aceso's performance model predicts, of our configuration and of Megatron-LM's best grid"
        " point.",
    )
    results.table(
        "search_cost_small",
        "Seconds of the searches of the small setting",
        cost,
        "On this machine.",
    )


def _tabulate_faults(
    results: Results, cases: Mapping[str, dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    found = {name: row["faults"] for name, row in cases.items()}
    table = []
    for name, rows in found.items():
        for each in rows:
            table.append(
                {
                    "model": name,
                    "fault mended": each["fault"],
                    "that configuration, ms": each["winner_ms"],
                    "fits": "" if each["winner_fits"] else "no",
                    "the best then, ms": each["best_ms"],
                    "the fault costs": None if each["cost"] is None else f"{each['cost']:+.2%}",
                }
            )
    results.table(
        "faults",
        "What each fault of Aceso's performance model costs",
        table,
        "The configuration that wins with all faults, judged with one of them mended, beside the"
        " one that wins then.",
    )
    return found


def _draw_layers(
    results: Results,
    published: PublishedTables,
    search: Callable[[AcesoCase], dict[str, Any]],
    max_layers: int,
) -> dict[str, Any]:
    """Figure 9: a GPT of 8 to 1024 layers on 8 GPUs. Empty if nothing was published."""
    throughput = published.table("e2e_thpt_scale_scale-layer")
    cost = published.table("search_cost_scale_scale-layer")
    if not throughput or not cost:
        return {}
    layers = {name: int(name.removesuffix("layers")) for name in next(iter(throughput.values()))}
    layers = {name: count for name, count in layers.items() if count <= max_layers}
    found = {}
    for name, count in layers.items():
        case = AcesoCase(
            family="gpt",
            size="scale-layer",
            nodes=1,
            gpus_per_node=8,
            global_batch=1024,
            micro_batches=_TRANSFORMER,
            num_layers=count,
        )
        row = search(case)
        samples_per_s = case.global_batch / row["iteration_time_ms"] * 1000
        found[name] = {"samples_per_s": samples_per_s, "search_s": row["search_s"]}
    points = list(layers.values())
    for label, table, unit, ours, key, note in (
        (
            "throughput",
            throughput,
            "samples per second",
            _PREDICTED,
            "samples_per_s",
            "Published measurements; our throughput is a prediction of Aceso's performance model.",
        ),
        (
            "search",
            cost,
            "seconds",
            _OURS,
            "search_s",
            "Published wall times of the searches beside ours on this machine.",
        ),
    ):
        series = _columns(table, list(layers))
        series[ours] = [row[key] for row in found.values()]
        title = f"GPT of 8 to {points[-1]} layers on 8 GPUs: {label}"
        results.lines(f"figure9_{label}", title, "layers", unit, points, series)
        results.table(f"figure9_{label}", title, _transposed("layers", points, series), note)
    return found


def _columns(
    table: Mapping[str, Mapping[str, float]], sizes: Sequence[str]
) -> dict[str, list[float | None]]:
    found = {}
    for name, row in table.items():
        found[name] = [row.get(size) or None for size in sizes]
    return found


def _transposed(
    head: str, points: Sequence[Any], series: Mapping[str, Sequence[float | None]]
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for k, point in enumerate(points):
        found.append({head: point, **{name: values[k] for name, values in series.items()}})
    return found
