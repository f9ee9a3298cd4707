"""`aliquot blocks`: ParallelBlocks of a model, their programs measured, and the plan that
follows.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import write_atomic
from ._blocks_search import compile_whole, composed_rows, costs, run_best, write_plan
from ._devices import use_devices, use_host_only
from ._groups import option
from ._launch_options import LaunchOptions, joined, measured_by_others
from ._measuring import (
    Database,
    MeasuringOptions,
    database_of_all,
    measuring_progress,
    read_share,
    show_run,
)
from ._model_options import ModelOptions, read_memory_limit
from ._options import (
    DescribedCluster,
    Devices,
    Json,
    ModelName,
    NetworkGbps,
    check_destination,
    read_cluster,
    read_mesh,
)
from ._progress import search_progress
from ._session import session

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..profiling import Combination, MeasuredStep, SegmentedStep
    from ._model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOptions:
    """The options that say how a step is split and cut into segments."""

    mesh: str | None = option("The logical mesh, such as 4x2; by default one axis.")
    factors: str = option(
        "cfp: the paper's options of a block. all: every way to split its entry.",
        "cfp",
        metavar="cfp|all",
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """A model on a mesh, cut into segments; seconds to trace it, and to find its segments."""

    model: Model
    step: SegmentedStep
    trace_s: float
    blocks_s: float


def analyze(
    model: ModelName,
    cluster: DescribedCluster,
    model_options: ModelOptions,
    segments: SegmentOptions,
    network_gbps: NetworkGbps = None,
    out: Path | None = option("Folder for blocks.json and segments.json."),
    as_json: Json = False,
) -> None:
    """Show the ParallelBlocks of a model, the segments that repeat, and how many programs there are
    to measure.
    """
    with session(as_json) as say:
        use_host_only()
        check_destination(out)
        asked = _ask(model, read_cluster(cluster, network_gbps), model_options, segments)
        from ..profiling import describe_blocks
        from ..report import blocks_text

        answer = {
            "seconds": asked.trace_s + asked.blocks_s,
            "trace_s": asked.trace_s,
            **describe_blocks(asked.step),
        }
        say.show(blocks_text(answer))
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            for name in ("blocks", "segments"):
                write_atomic(out / f"{name}.json", json.dumps(answer[name], indent=1) + "\n")
        say.finish(answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SegmentMeasuring(MeasuringOptions):
    """The options of measuring the programs of segments."""

    devices: Devices = None
    early_stop: float = option(
        "Do not repeat a program that takes so many times the best of its segment.", 1.5, min=1
    )


def profile(
    model: ModelName,
    database: Database,
    model_options: ModelOptions,
    segments: SegmentOptions,
    measuring: _SegmentMeasuring,
    launch_options: LaunchOptions,
    as_json: Json = False,
) -> None:
    """Measure every combination of options of every distinct segment, most promising first, and
    list their times and memory. Run it again to go on.
    """
    with session(as_json) as say:
        part = read_share(measuring.share)
        timing = measuring.timing(early_stop=measuring.early_stop)
        if measured_by_others(launch_options, measuring.devices, say):
            return
        with joined(launch_options, ends_at_signals=True):
            asked = _ask_here(model, measuring.devices, model_options, segments)
            from ..profiling import (
                describe_combinations,
                leads,
                priced_combinations,
                profile_segments,
            )
            from ..report import combinations_text

            combinations = priced_combinations(asked.step)
            with database_of_all(database) as known:
                with measuring_progress(say, is_shown=leads()) as report:
                    run = profile_segments(
                        asked.step,
                        known,
                        combinations,
                        share=part,
                        timing=timing,
                        budget_s=measuring.budget_s,
                        progress=report,
                    )
                # Process 0 alone has the database.
                kinds = (
                    describe_combinations(asked.step, combinations, known)
                    if known is not None
                    else []
                )
        say.show(combinations_text(kinds))
        say.finish(show_run(say, run, "programs") | {"kinds": kinds})


@dataclass(frozen=True, slots=True, kw_only=True)
class _SearchOptions:
    """What a winner must be, and what is done with it."""

    devices: Devices = None
    memory_limit: str | None = option("Of each device, such as 40GiB.", metavar="SIZE")
    require_measured: float = option(
        "Refuse a winner of which less of the time was measured.", 0.0, min=0, max=1
    )
    top: int = option("How many to show.", 5, min=1)
    run: int = option(
        "Also run the best N as whole steps, take the fastest, and time it thrice.", 0, min=0
    )
    out: Path | None = option("File for the plan of the best.")


def search(
    model: ModelName,
    database: Database,
    model_options: ModelOptions,
    segments: SegmentOptions,
    launch_options: LaunchOptions,
    how: _SearchOptions,
    as_json: Json = False,
) -> None:
    """Compose the whole step from measured segments, and find the fastest that fits."""
    with session(as_json) as say:
        check_destination(how.out)
        limit_bytes = read_memory_limit(how.memory_limit)
        if measured_by_others(launch_options, how.devices, say):
            return
        with joined(launch_options, ends_at_signals=True):
            asked = _ask_here(model, how.devices, model_options, segments)
            from ..profiling import from_first, leads, raised_in_all
            from ..report import composed_text

            if limit_bytes is None:
                limit_bytes = asked.step.problem.memory_limit_bytes
            # Process 0 alone has the database; what it finds runs in all.
            found: list[dict[str, Any]] = []
            with raised_in_all():
                if leads():
                    found = composed_rows(
                        asked,
                        database,
                        limit_bytes,
                        max(how.top, how.run),
                        how.require_measured,
                        say,
                    )
            found = json.loads(from_first(json.dumps(found), str))
            answer: dict[str, Any] = {
                "kinds": [kind.name for kind in asked.step.kinds],
                "found": found,
            }
            if how.run:
                with search_progress(say) as report:
                    answer["found"] = run_best(asked.step, found, how.run, report)
                answer |= costs(asked, answer["found"][0])
            if how.out is not None:
                if leads():
                    options = answer["found"][0]["options"]
                    write_plan(asked, options, segments.factors, limit_bytes, how.out)
                answer["plan"] = str(how.out)
        say.show(composed_text(answer))
        say.finish(answer)


def enumerate_(
    model: ModelName,
    model_options: ModelOptions,
    segments: SegmentOptions,
    devices: Devices = None,
    database: Path | None = option("Also compose from these measurements.", metavar="FILE"),
    run: int = option("Also run the best N by prediction as whole steps.", 0, min=0),
    as_json: Json = False,
) -> None:
    """List every combination that splits all layers alike: bytes moved, predicted, composed and
    measured time, memory.
    """
    with session(as_json) as say:
        asked = _ask_here(model, devices, model_options, segments)
        from ..profiling import ProfileDatabase, measured_step, priced_combinations
        from ..report import enumeration_text

        step = asked.step
        combinations = priced_combinations(step)
        known = (
            contextlib.nullcontext()
            if database is None
            else ProfileDatabase(database, must_exist=True)
        )
        with known as opened, search_progress(say) as report:
            measured = None if opened is None else measured_step(step, combinations, opened)
            rows = _enumerate(step, combinations, measured, run, report)
        answer = {
            "kinds": [kind.name for kind in step.kinds],
            "kind": step.kinds[_most_repeated(step, combinations)].name,
            "rows": rows,
        }
        say.show(enumeration_text(answer))
        say.finish(answer)


def _ask(name: str, where: Cluster, model_options: ModelOptions, segments: SegmentOptions) -> Asked:
    from ..cost import make_problem
    from ..graph import capture
    from ..profiling import segment_step
    from ._model import resolve, user_code

    began = time.perf_counter()
    model = resolve(name, model_options.read(), where)
    with user_code(model.name):
        graph = capture(model.step, model.state, model.batch)
    traced = time.perf_counter()
    shape = read_mesh(segments.mesh, where) or (where.num_devices,)
    step = segment_step(make_problem(graph, where), shape, factors=segments.factors)
    return Asked(model, step, traced - began, time.perf_counter() - traced)


def _ask_here(
    name: str, devices: int | None, model_options: ModelOptions, segments: SegmentOptions
) -> Asked:
    """A model on the devices of this process."""
    from ..cluster import Cluster

    return _ask(name, Cluster.detect(use_devices(devices)), model_options, segments)


def _enumerate(
    step: SegmentedStep,
    combinations: Sequence[Sequence[Combination]],
    measured: MeasuredStep | None,
    run: int,
    report: Any,
) -> list[dict[str, Any]]:
    """A row for each combination of the kinds that repeat; the others follow the fastest that goes
    with it.
    """
    from ..cost import collective_uses
    from ..profiling import compose, time_part, trace_part

    rows: list[dict[str, Any]] = []
    repeated = _most_repeated(step, combinations)
    for done, c in enumerate(combinations[repeated]):
        report("planning combinations", done, len(combinations[repeated]))
        alone = [[c] if k == repeated else some for k, some in enumerate(combinations)]
        (composed,) = compose(step, alone, measured, most=1)
        solution = step.whole(composed.options)
        if solution is None:
            continue
        uses = collective_uses(solution.picked)
        rows.append(
            {
                "options": list(c.options),
                "bytes_moved": sum(use.num_bytes for use in uses),
                "step_time_s": solution.step_time_s,
                "communication_s": sum(use.seconds for use in uses),
                "composed_s": composed.seconds,
                "measured_share": composed.measured_share,
                "peak_memory_bytes": solution.peak_bytes,
                "_solution": solution,
            }
        )
    rows.sort(key=lambda row: row["composed_s" if measured else "step_time_s"])
    for done, row in enumerate(rows):
        solution = row.pop("_solution")
        if done < run:
            report("running whole steps", done, run)
            part = compile_whole(step, solution)
            whole = time_part(part)
            row["measured_s"], row["compiled_bytes"] = whole.seconds, whole.memory_bytes
            traced = None if whole.seconds is None else trace_part(part)
            row["measured_communication_s"] = traced and traced.communication_s
            row["measured_compute_s"] = traced and traced.compute_s
    return rows


def _most_repeated(step: SegmentedStep, combinations: Sequence[Sequence[Combination]]) -> int:
    """The kind of segment that is most often in a step."""
    return max(range(len(step.kinds)), key=lambda k: (step.kinds[k].count, len(combinations[k])))
