"""`aliquot bench aceso`: the figures of Aceso's paper, with our search beside the published
ones.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import InputError, write_atomic
from ._options import Json
from ._session import Session, session

if TYPE_CHECKING:
    from ..interop.aceso.search import SearchResult

_OURS, _PREDICTED = "aliquot", "aliquot (predicted)"


@dataclass(frozen=True, slots=True)
class _Setting:
    """A case of the paper: nodes, GPUs of a node, samples of a step and of the micro-batches;
    28,000 MiB allowed.
    """

    nodes: int
    gpus_per_node: int
    global_batch: int
    micro_batches: tuple[int, ...]


_TRANSFORMER, _CONVOLUTIONS = (1, 2, 4, 8), (16, 32, 48, 64)
_DEVICES = ((1, 4), (1, 8), (2, 8), (4, 8))
_SIZES = {
    "gpt": ("1_3B", "2_6B", "6_7B", "13B"),
    "t5": ("3B", "6B", "11B", "22B"),
    "resnet": ("2B", "4B", "6_8B", "13B"),
}
_LIMIT_MB = 28_000.0
_TITLES = {"gpt": "GPT", "t5": "T5", "resnet": "Wide-ResNet"}


def aceso(
    database: Annotated[
        Path,
        typer.Option(
            "--database", metavar="DIR", help="The database of the V100 nodes with 8 GPUs."
        ),
    ],
    published: Annotated[
        Path,
        typer.Option(
            "--published", metavar="DIR", help="CSV files of the figures of Aceso's artifact."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for PNG, CSV and index.html.")
    ],
    max_layers: Annotated[
        int, typer.Option("--max-layers", min=1, help="The deepest model of figure 9.")
    ] = 1024,
    as_json: Json = False,
) -> None:
    """Draw figures 7, 8 and 9 of Aceso's paper and the accuracy of its performance model; no
    hardware is needed.

    Published throughput is measured; ours is the published one of Aceso, scaled by the ratio of the
    predicted times.
    """
    with session(as_json) as say:
        tables = PublishedTables(published)
        figures = _Figures(out, say)
        results = _search_all(database, say)
        answer: dict[str, Any] = {"cases": {}, "missing": results.missing}
        for family in _SIZES:
            _draw_family(figures, tables, family, results, answer)
        _draw_layers(figures, database, tables, max_layers, say, answer)
        _tabulate_accuracy(figures, tables, answer)
        figures.write_page()
        say.show(
            f"written: {out / 'index.html'}, with {len(figures.drawn)} figures and tables beside it"
        )
        for line in results.missing:
            say.note(f"not measured: {line}")
        say.finish(answer)


@dataclass(frozen=True, slots=True)
class _Results:
    """Our searches by family and size, and the cases without measurements."""

    by_case: dict[tuple[str, str], SearchResult]
    missing: list[str]


def _search_all(database: Path, say: Session) -> _Results:
    from ..interop.aceso import built_in_chains, measured_size, models_in

    known = models_in(database)
    by_case: dict[tuple[str, str], SearchResult] = {}
    missing = []
    for family, sizes in _SIZES.items():
        for size, (nodes, per_node) in zip(sizes, _DEVICES, strict=True):
            if f"{family}_{measured_size(built_in_chains()[family], size)}" not in known:
                missing.append(f"{family} {size}")
                continue
            batches = _CONVOLUTIONS if family == "resnet" else _TRANSFORMER
            setting = _Setting(nodes, per_node, 1536 if family == "resnet" else 1024, batches)
            print(
                f"searching: {family} {size} on {nodes * per_node} GPUs",
                file=sys.stderr,
                flush=True,
            )
            by_case[family, size] = _search(database, family, size, setting)
    if not by_case:
        raise InputError(
            f"{database} has none of the models of the paper; it has {', '.join(known)}."
        )
    return _Results(by_case, missing)


def _search(
    database: Path, family: str, size: str, setting: _Setting, num_layers: int | None = None
) -> SearchResult:
    from ..interop.aceso import ACESO
    from ..interop.aceso.search import Auto, read_problem

    problem, _ = read_problem(
        database,
        model=family,
        size=size,
        num_nodes=setting.nodes,
        gpus_per_node=setting.gpus_per_node,
        global_batch=setting.global_batch,
        memory_limit_mb=_LIMIT_MB,
        micro_batches=setting.micro_batches,
        judge=ACESO,
        num_layers=num_layers,
    )
    result = Auto().search(problem)
    if not result.best:
        raise InputError(f"No configuration of {family} {size} fits {_LIMIT_MB:,.0f} MiB.")
    return result


def _draw_family(
    figures: _Figures,
    published: PublishedTables,
    family: str,
    results: _Results,
    answer: dict[str, Any],
) -> None:
    of_family = {size: result for (name, size), result in results.by_case.items() if name == family}
    for size, result in of_family.items():
        answer["cases"][f"{family} {size}"] = {
            "iteration_time_ms": result.best[0][1].iteration_time_ms,
            "lower_bound_ms": result.lower_bound_ms,
            "search_s": result.search_s,
        }
    throughput = published.table(f"e2e_norm_thpt_large_{family}")
    times = published.table(f"perf_model_time_large_{family}")
    if throughput and times and of_family:
        # Aceso's predicted seconds over ours: how much faster our configuration is under one
        # performance model.
        gains = {
            size: times["predict"][size] * 1000 / of_family[size].best[0][1].iteration_time_ms
            for size in of_family
            if times["predict"].get(size)
        }
        series: dict[str, list[float | None]] = {
            name: [row.get(size) or None for size in gains] for name, row in throughput.items()
        }
        series[_PREDICTED] = [
            gains[size] * (throughput["aceso"].get(size) or 0) or None for size in gains
        ]
        figures.bars(
            f"figure7_{family}",
            f"{_TITLES[family]}: throughput, Megatron-LM's best grid point = 1",
            "relative throughput",
            [size.replace("_", ".") for size in gains],
            series,
            "Published measurements; ours is Aceso's, scaled by the ratio of the times that its"
            " performance model predicts.",
        )
    cost = published.table(f"search_cost_large_{family}")
    if cost and of_family:
        sizes = [size for size in of_family if any(row.get(size) for row in cost.values())]
        series = {name: [row.get(size) or None for size in sizes] for name, row in cost.items()}
        series[_OURS] = [of_family[size].search_s for size in sizes]
        figures.bars(
            f"figure8_{family}",
            f"{_TITLES[family]}: search",
            "seconds",
            [size.replace("_", ".") for size in sizes],
            series,
            "Published wall times of the searches beside ours on this machine.",
            logarithmic=True,
        )


def _draw_layers(
    figures: _Figures,
    database: Path,
    published: PublishedTables,
    max_layers: int,
    say: Session,
    answer: dict[str, Any],
) -> None:
    throughput = published.table("e2e_thpt_scale_scale-layer")
    cost = published.table("search_cost_scale_scale-layer")
    if not throughput or not cost:
        return
    names = [name for name in next(iter(throughput.values())) if _layers(name) <= max_layers]
    setting = _Setting(1, 8, 1024, _TRANSFORMER)
    samples_per_s, seconds = [], []
    for name in names:
        print(f"searching: {_layers(name)} layers on 8 GPUs", file=sys.stderr, flush=True)
        result = _search(database, "gpt", "scale-layer", setting, _layers(name))
        samples_per_s.append(setting.global_batch / result.best[0][1].iteration_time_ms * 1000)
        seconds.append(result.search_s)
    answer["layers"] = {
        name: {"samples_per_s": speed, "search_s": spent}
        for name, speed, spent in zip(names, samples_per_s, seconds, strict=True)
    }
    points = [_layers(name) for name in names]
    for label, table, unit, ours in (
        ("throughput", throughput, "samples per second", samples_per_s),
        ("search", cost, "seconds", seconds),
    ):
        series: dict[str, Sequence[float | None]] = {
            name: [row.get(size) or None for size in names] for name, row in table.items()
        }
        series[_PREDICTED if label == "throughput" else _OURS] = ours
        figures.lines(
            f"figure9_{label}",
            f"GPT of 8 to {points[-1]} layers on 8 GPUs: {label}",
            "layers",
            unit,
            points,
            series,
            (
                "Published measurements; our throughput is a prediction of Aceso's performance"
                " model."
                if label == "throughput"
                else "Published wall times of the searches beside ours on this machine."
            ),
        )


def _layers(name: str) -> int:
    return int(name.removesuffix("layers"))


def accuracy_rows(published: PublishedTables) -> list[dict[str, Any]]:
    """For each model of the paper: iteration time and memory, predicted by Aceso and measured."""
    rows = []
    for family in _SIZES:
        times = published.table(f"perf_model_time_large_{family}")
        memory = published.table(f"perf_model_mem_large_{family}")
        for size, measured_s in (times or {}).get("actual", {}).items():
            memory_rows = memory or {}
            predicted_mb = tuple(
                memory_rows.get(f"predict ({part})", {}).get(size) for part in ("norm", "extra")
            )
            measured_mb = memory_rows.get("actual", {}).get(size)
            total = sum(part or 0 for part in predicted_mb)
            rows.append(
                {
                    "model": f"{_TITLES[family]} {size}",
                    "predicted s": times["predict"][size],
                    "measured s": measured_s,
                    "time off by": f"{times['predict'][size] / measured_s - 1:+.1%}",
                    "predicted MiB": total,
                    "measured MiB": measured_mb,
                    "memory off by": f"{total / measured_mb - 1:+.1%}" if measured_mb else "",
                }
            )
    return rows


def _tabulate_accuracy(
    figures: _Figures, published: PublishedTables, answer: dict[str, Any]
) -> None:
    rows = accuracy_rows(published)
    if rows:
        answer["accuracy"] = rows
        figures.table(
            "accuracy",
            "Accuracy of Aceso's performance model",
            rows,
            "Iteration time, and memory of the first stage with what the allocator reserves, as"
            " published.",
        )


class PublishedTables:
    """The tables of the artifact by name: a row for each system, a column for each size."""

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("*.csv"))
        if not paths:
            raise InputError(f"{folder} holds no CSV files of the artifact's figures.")
        self._tables = {path.stem: _read(path) for path in paths}

    def table(self, name: str) -> dict[str, dict[str, float]]:
        """A table; empty if there is none of this name."""
        return self._tables.get(name, {})


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        rows = list(csv.reader(path.read_text().splitlines()))
        return {
            row[0]: dict(zip(rows[0][1:], map(float, row[1:]), strict=True))
            for row in rows[1:]
            if row
        }
    except (OSError, ValueError, IndexError) as error:
        raise InputError(f"{path} is no table of numbers with a header: {error}.") from None


class _Figures:
    """A folder of charts, each with its numbers as CSV, and a page that shows them."""

    def __init__(self, folder: Path, say: Session) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder} cannot be made: {error.strerror}.") from None
        self._folder, self._say = folder, say
        self.drawn: list[tuple[str, str, str, list[dict[str, Any]]]] = []

    def bars(
        self,
        name: str,
        title: str,
        unit: str,
        groups: Sequence[str],
        series: dict[str, list[float | None]],
        note: str,
        *,
        logarithmic: bool = False,
    ) -> None:
        from ..report import bar_chart

        bar_chart(
            self._folder / f"{name}.png",
            title=title,
            unit=unit,
            groups=groups,
            series=series,
            logarithmic=logarithmic,
        )
        rows = [
            {"model": group, **{s: v[k] for s, v in series.items()}}
            for k, group in enumerate(groups)
        ]
        self.table(name, title, rows, note)

    def lines(
        self,
        name: str,
        title: str,
        horizontal: str,
        unit: str,
        points: Sequence[float],
        series: dict[str, Sequence[float | None]],
        note: str,
    ) -> None:
        from ..report import line_chart

        path = self._folder / f"{name}.png"
        line_chart(
            path, title=title, horizontal=horizontal, unit=unit, points=points, series=series
        )
        rows = [
            {horizontal: point, **{s: v[k] for s, v in series.items()}}
            for k, point in enumerate(points)
        ]
        self.table(name, title, rows, note)

    def table(self, name: str, title: str, rows: list[dict[str, Any]], note: str) -> None:
        from ..report import columns

        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomic(self._folder / f"{name}.csv", text.getvalue())
        self.drawn.append((name, title, note, rows))
        shown = [tuple(_shown(value) for value in row.values()) for row in rows]
        self._say.show(columns(title, tuple(rows[0]), shown, right=range(1, len(rows[0]))))

    def write_page(self) -> None:
        from html import escape

        parts = []
        for name, title, note, rows in self.drawn:
            header = "".join(f"<th>{escape(key)}</th>" for key in rows[0])
            body = "".join(
                "<tr>"
                + "".join(f"<td>{escape(_shown(value))}</td>" for value in row.values())
                + "</tr>"
                for row in rows
            )
            picture = (
                f'<img src="{name}.png" alt="{escape(title)}">'
                if (self._folder / f"{name}.png").exists()
                else ""
            )
            parts.append(
                f"<section><h2>{escape(title)}</h2><p>{escape(note)}</p>{picture}"
                f"<table><tr>{header}</tr>{body}</table><p><a"
                f' href="{name}.csv">{name}.csv</a></p></section>'
            )
        write_atomic(self._folder / "index.html", _PAGE.replace("BODY", "\n".join(parts)))


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>aliquot beside Aceso</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: 0.2rem 0.8rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
</style></head><body><h1>aliquot beside Aceso</h1>
BODY
</body></html>
"""
