"""`aliquot aceso search`: the best configuration over a measured database."""

from __future__ import annotations

import contextlib
import itertools
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from ..core import InfeasibleError, InputError
from ._aceso_options import AcesoChain, AcesoDatabase
from ._groups import option
from ._interrupts import INTERRUPTED as INTERRUPTED_CODE
from ._interrupts import TERMINATED, interrupting_at_sigterm
from ._options import Json
from ._session import Session, session

if TYPE_CHECKING:
    from ..interop.aceso import Configuration, Estimate, Judge
    from ..interop.aceso.search import OnProgress, SearchProblem, SearchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProblemOptions:
    """The options that say what is searched: a database, a model, GPUs and their memory."""

    database: AcesoDatabase
    model: str = option("Family: gpt, t5, resnet, or as the files of the database say.", ...)
    size: str = option("Size, as in the names of the database's files.", ...)
    global_batch: int = option("Samples in a step.", ...)
    memory_limit_mb: float = option("MiB that a device may use.", ...)
    micro_batch_sizes: str = option(
        "Samples of a micro-batch, such as 1,2,4,8.", ..., metavar="LIST"
    )
    nodes: int = option("Number of nodes.", 1)
    gpus_per_node: int = option("GPUs of each node.", 8)
    chain: AcesoChain = None
    num_layers: str | None = option(
        "Layers, instead of what the size says; of a Wide-ResNet blocks of each section, such as"
        " 3,4,6,3."
    )

    def read(self, judge: Judge) -> tuple[SearchProblem, tuple[str, ...]]:
        """The problem, and the measurements that the database lacks."""
        from ..interop.aceso.search import read_problem

        layers: int | list[int] | None = None
        if self.num_layers is not None:
            layers = list(_listed(self.num_layers, "--num-layers", "24, or 3,4,6,3"))
            layers = layers if len(layers) > 1 else layers[0]
        return read_problem(
            self.database,
            model=self.model,
            size=self.size,
            num_nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            global_batch=self.global_batch,
            memory_limit_mb=self.memory_limit_mb,
            micro_batches=_listed(self.micro_batch_sizes, "--micro-batch-sizes", "1,2,4,8"),
            judge=judge,
            chain=self.chain,
            num_layers=layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SearchOptions:
    """How the best configuration is searched, and where it is written."""

    planner: str = option(
        "auto, exact, bottleneck, grid or megatron; auto runs all but the last.", "auto"
    )
    judge: str = option(
        "aceso: its performance model. aliquot: its faults mended, the update counted.", "aceso"
    )
    max_hops: int = option("Moves in a row of the bottleneck planner.", 7, min=1)
    budget_s: float | None = option("Seconds after which the best so far is the answer.", min=0.1)
    top: int = option("How many distinct configurations to return.", 1, min=1)
    out: Path | None = option(
        "Write the configuration, in Aceso's JSON; with --top also FILE.2, ...", metavar="FILE"
    )


def search(options: _ProblemOptions, how: _SearchOptions, as_json: Json = False) -> None:
    """Search for the fastest configuration that fits, and say how far from the optimum it can
    be.
    """
    from ..interop.aceso import configuration_to_dict, find_judge, write_configuration
    from ..interop.aceso.search import BUDGET_SPENT, INTERRUPTED

    with session(as_json) as say:
        problem, left_out = options.read(find_judge(how.judge))
        chosen = _planner(how.planner, max_hops=how.max_hops, budget_s=how.budget_s, keep=how.top)
        with _progress(say) as report, interrupting_at_sigterm() as ending:
            result = chosen.search(problem, on_progress=report)
        interrupted_code = TERMINATED if ending.reason else INTERRUPTED_CODE
        if not result.best:
            if result.ended == INTERRUPTED:
                say.note("interrupted before anything was found; nothing was written.")
                raise typer.Exit(interrupted_code)
            if result.ended == BUDGET_SPENT:
                raise InputError(
                    f"No configuration was found within {how.budget_s:g} s, and nothing was"
                    " written. Give more seconds to --budget-s, or leave it out."
                )
            raise _nothing_fits(problem)
        for rank, (configuration, _) in enumerate(result.best, start=1):
            if how.out is not None:
                path = (
                    how.out
                    if rank == 1
                    else how.out.with_name(f"{how.out.stem}.{rank}{how.out.suffix}")
                )
                write_configuration(configuration, path)
        best, estimate = result.best[0]
        missing = [*left_out, *problem.database.missing, *estimate.missing]
        _show(say, problem, result, missing)
        if how.out is not None:
            say.show(f"written to {how.out}")
        say.finish(
            {
                **_figures(result),
                "stage_time_ms": [stage.busy_ms for stage in estimate.stages],
                "stage_memory_mb": [stage.memory_mb for stage in estimate.stages],
                "config": configuration_to_dict(best),
                "top": [
                    {
                        "iteration_time_ms": each.iteration_time_ms,
                        "config": configuration_to_dict(configuration),
                    }
                    for configuration, each in result.best
                ],
                "missing": missing,
                "judge": how.judge,
            }
        )
        if result.ended == INTERRUPTED:
            say.note("interrupted; this is the best so far.")
            raise typer.Exit(interrupted_code)


def _planner(name: str, *, max_hops: int, budget_s: float | None, keep: int) -> Any:
    from ..interop.aceso.search import PLANNERS, Auto, Bottleneck, Exact, Grid, Megatron

    makers: dict[str, Callable[[], Any]] = {
        "auto": lambda: Auto(
            bottleneck=replace(Auto().bottleneck, max_hops=max_hops, keep=max(3, keep)),
            exact=Exact(keep=keep),
            budget_s=budget_s,
        ),
        "exact": lambda: Exact(budget_s=budget_s, keep=keep),
        "bottleneck": lambda: Bottleneck(max_hops=max_hops, keep=keep, budget_s=budget_s),
        "grid": lambda: Grid(keep=keep, budget_s=budget_s),
        "megatron": lambda: Megatron(keep=keep, budget_s=budget_s),
    }
    if name not in makers:
        raise InputError(f"There is no planner {name!r}. Planners are {', '.join(PLANNERS)}.")
    return makers[name]()


@contextlib.contextmanager
def _progress(say: Session) -> Iterator[OnProgress]:
    """Best, bound and gap: one changing line in a terminal; elsewhere what the voice says."""
    console = Console(file=sys.stderr)
    say.voice.doing = "reading the database"
    with contextlib.ExitStack() as shown:
        status = None
        if console.is_terminal:
            shown.enter_context(say.voice.quiet())
            status = shown.enter_context(console.status(say.voice.doing))

        def show(progress: Any) -> None:
            parts = [f"best {progress.best_ms:,.1f} ms", f"{progress.scored:,} scored"]
            if progress.bound_ms:
                gap = max(1 - progress.bound_ms / progress.best_ms, 0.0)
                parts[1:1] = [f"bound {progress.bound_ms:,.1f} ms", f"gap {gap:.2%}"]
            say.voice.doing = f"searching ({', '.join(parts)})"
            if status is not None:
                status.update(say.voice.doing)

        yield show


def _nothing_fits(problem: SearchProblem) -> InfeasibleError:
    from ..interop.aceso.search import smallest_need

    need = smallest_need(problem)
    asked = (
        f"No configuration was found that fits {problem.memory_limit_mb:,.0f} MiB on each of"
        f" {problem.num_devices} GPUs."
    )
    if need is None:
        return InfeasibleError(
            f"{asked} None fits 64 times as much either; check the micro-batch sizes."
        )
    parts = {
        "parameters, gradients and optimizer state": need.fullest.state_mb,
        "activations": need.fullest.activations_mb,
        "reserved by the allocator": need.fullest.reserved_mb,
    }
    lines = [
        asked,
        f"The smallest that was found needs {need.limit_mb:,.0f} MiB on its fullest GPU:",
    ]
    lines += [f"  {name:42}{value:12,.0f} MiB" for name, value in parts.items()]
    lines.append("What would make it fit:")
    lines.append(f"  - --memory-limit-mb {-(-need.limit_mb // 1):.0f}")
    if need.num_nodes is not None:
        lines.append(f"  - --nodes {need.num_nodes}, which was tried and fits")
    return InfeasibleError(
        "\n".join(lines),
        required_bytes=need.limit_mb * 2**20,
        available_bytes=problem.memory_limit_mb * 2**20,
        parts={name: value * 2**20 for name, value in parts.items()},
    )


def _show(say: Session, problem: SearchProblem, result: SearchResult, missing: list[str]) -> None:
    from ..report import Column, table

    best, estimate = result.best[0]
    seconds = estimate.iteration_time_ms / 1000
    lines = [
        (
            f"iteration time  {estimate.iteration_time_ms:,.2f} ms,"
            f" {best.global_batch / seconds:,.2f} samples/s (judge: {problem.judge.name})"
        ),
        (
            f"micro-batch     {best.micro_batch} samples over all ranks,"
            f" {problem.num_micro_batches(best.micro_batch)} in a step"
        ),
    ]
    if result.lower_bound_ms:
        lines.append(
            f"lower bound     {result.lower_bound_ms:,.2f} ms: at most {result.gap:.2%} can be won"
            " within the space searched"
        )
        lines += textwrap.wrap(
            f"({result.space})", 100, initial_indent=" " * 16, subsequent_indent=" " * 16
        )
    lines.append(
        f"search          {result.search_s:.2f} s, best found after {result.best_found_at_s:.2f} s,"
        f" {result.scored:,} configurations and stages scored; ended: {result.ended}"
    )
    say.show("\n".join(lines))
    say.show(
        table(
            f"Stages, {problem.memory_limit_mb:,.0f} MiB allowed",
            zip(itertools.count(), best.stages, estimate.stages),
            Column("stage", lambda row: row[0], number=True),
            Column("operators", lambda row: len(row[1].tensor), number=True),
            Column("GPUs", lambda row: row[1].num_devices, number=True),
            Column("degrees (tensor x data)", lambda row: row[1], _degrees),
            Column("recomputed", lambda row: sum(row[1].recompute), number=True),
            Column("iteration ms", lambda row: f"{row[2].busy_ms:,.2f}", number=True),
            Column("memory MiB", lambda row: f"{row[2].memory_mb:,.0f}", number=True),
        )
    )
    if len(result.best) > 1:
        _show_others(say, result.best)
    if missing:
        say.note(
            f"{len(missing)} measurements are missing, and what needs them was left out:"
            f" {missing[0]}, ..."
        )


def _show_others(say: Session, best: tuple[tuple[Configuration, Estimate], ...]) -> None:
    from ..report import Column, table

    def of_stages(number: Callable[[Any], int]) -> Callable[[Any], str]:
        return lambda row: " ".join(str(number(stage)) for stage in row[1][0].stages)

    say.show(
        table(
            "The best distinct configurations",
            enumerate(best, start=1),
            Column("rank", lambda row: row[0], number=True),
            Column("iteration ms", lambda row: f"{row[1][1].iteration_time_ms:,.2f}", number=True),
            Column("micro-batch", lambda row: row[1][0].micro_batch, number=True),
            Column("GPUs of each stage", of_stages(lambda stage: stage.num_devices)),
            Column("operators of each stage", of_stages(lambda stage: len(stage.tensor))),
        )
    )


def _degrees(stage: Any) -> str:
    """Tensor and data degrees of a stage with how many operators have them, most first."""
    counts = Counter[str]()
    for t, d, a in zip(stage.tensor, stage.data, stage.algorithm, strict=True):
        counts[f"{t} x {d}{f' algorithm {a}' if a else ''}"] += 1
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name}: {count}" for name, count in counts.most_common())


def _figures(result: SearchResult) -> dict[str, Any]:
    return {
        "iteration_time_ms": result.best[0][1].iteration_time_ms,
        "lower_bound_ms": result.lower_bound_ms,
        "gap": result.gap if result.lower_bound_ms else None,
        "space": result.space,
        "search_s": result.search_s,
        "configurations_scored": result.scored,
        "best_found_at_s": result.best_found_at_s,
        "ended": result.ended,
    }


def _listed(text: str, option: str, example: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"{option} must be numbers with commas between, such as {example}; got {text!r}."
        ) from None
