"""Fitting of the cost model to measured steps of models of the zoo: the share of single products'
speed that whole steps sustain, and the share of collectives that runs beside compute.

`profiling.fit_profiles` fits figures to single operators; these two show only in whole steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from .cluster import Cluster, target_for
from .core import AliquotError, InputError, faults_of, read_file, shortened
from .cost import Picked, Problem, evaluate, make_problem, price
from .graph import capture
from .planners import Decision, PipeshardParallel, Progress, method_by_name
from .profiling import Fit
from .zoo import build

SUSTAINED_SHARES = (0.3, 0.45, 0.6, 0.8, 1.0)
"""Sustained shares at which steps are priced; between them times are interpolated."""

_OVERLAPS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.98)
_UNLIMITED_BYTES = 1e15
_FEWEST = 4
_MOST_ROWS = 10_000
_MOST_BYTES = 64 * 2**20


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured step of a model of the zoo; fields as the options of `aliquot plan`.

    `step_s` is the measured time in seconds. `cluster` is a preset or a file of the same devices as
    the cluster that is fitted, by default that cluster.
    """

    model: str
    global_batch: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    step_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    method: str = "zero3"
    micro_batches: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 1
    overrides: dict[str, Any] = {}
    recompute: str = "block"
    dtype: str | None = None
    attention: str = "auto"
    scan: bool = False
    cluster: str | None = None


def read_steps(path: Path) -> list[MeasuredStep]:
    """Measured steps from a JSON file: a list of objects with the fields of `MeasuredStep`.

    Raises:
        InputError: the file cannot be read, or what is wrong with each of its rows.
    """
    try:
        rows = msgspec.json.decode(read_file(path, _MOST_BYTES))
    except InputError as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{path} is no JSON: {error}.") from error
    if not isinstance(rows, list) or not 0 < len(rows) <= _MOST_ROWS:
        raise InputError(
            f"{path} must hold a list of 1 to {_MOST_ROWS} steps, such as"
            ' [{"model": "gpt-1.3b", "global_batch": 64, "method": "zero3", "step_s": 0.61}].'
        )
    faults: list[str] = []
    for number, row in enumerate(rows, 1):
        faults += faults_of(row, MeasuredStep, f"row {number}")
    if faults:
        raise InputError(f"{path}: {'; '.join(faults[:20])}.")
    return msgspec.convert(rows, list[MeasuredStep])


def fit_steps(
    steps: Sequence[MeasuredStep],
    cluster: Cluster,
    *,
    load_cluster: Callable[[str], Cluster] = Cluster.preset,
    progress: Progress | None = None,
) -> Fit:
    """Fit the figures of a cluster's devices to measured steps. Every second step is held out; if
    the fitted figures predict these no better than the figures before, those are kept.

    Raises:
        InputError: too few steps, or steps that cannot be planned; all of them are listed.
    """
    if len(steps) < _FEWEST:
        raise InputError(
            f"{len(steps)} steps are too few to fit: at least {_FEWEST} are needed, as every second"
            " one is held out."
        )
    tables, faults = [], []
    for number, step in enumerate(steps, 1):
        if progress is not None:
            progress(step.model, number - 1, len(steps))
        try:
            where = cluster if step.cluster is None else load_cluster(step.cluster)
            if where.device.name != cluster.device.name:
                raise InputError(
                    f"it ran on {where.device.name}, and {cluster.device.name} is fitted."
                )
            tables.append(_planned(step, where) / step.step_s)
        except AliquotError as error:
            faults.append(f"row {number} ({step.model}): {shortened(str(error), 300)}")
    if faults:
        raise InputError(f"These steps cannot be planned: {'; '.join(faults)}")
    used, held_out = tables[::2], tables[1::2]
    target = target_for(cluster.device)
    names = ("sustained_share", "overlap_fraction")
    before = {name: target.figure(name) for name in names}
    found = dict(zip(names, _least_error(used, *before.values()), strict=True))
    errors = [_error(held_out, *figures.values()) for figures in (before, found)]
    better = errors[1] < errors[0]
    source = f"{len(used)} measured steps on {cluster.device.name}"
    if not better:
        source = f"as before: {source} gave figures that predict the others no better"
    kept = found if better else before
    calibration = {**cluster.device.calibration, **kept}
    return Fit(
        cluster=replace(cluster, device=replace(cluster.device, calibration=calibration)),
        figures={
            name: {"value": value, "before": before[name], "source": source}
            for name, value in kept.items()
        },
        errors=[
            {
                "table": "whole steps",
                "sizes": len(held_out),
                "before": errors[0],
                "after": errors[1] if better else errors[0],
            }
        ],
    )


def step_times(
    problem: Problem, decision: Decision, overlaps: Sequence[float]
) -> NDArray[np.float64]:
    """Step times of a planned step in seconds, `(SUSTAINED_SHARES, overlaps)`."""
    priced = decision.picked.priced
    choices = [node.choices[pick : pick + 1] for node, pick in decision.picked.rows()]
    cluster = priced.mesh.cluster

    def step_s(share: float, overlap: float) -> float:
        figures = {"sustained_share": share, "overlap_fraction": overlap}
        device = replace(cluster.device, calibration={**cluster.device.calibration, **figures})
        mesh = replace(priced.mesh, cluster=replace(cluster, device=device))
        use = replace(priced.use, mesh=mesh)
        again = price(problem, use, repeats=priced.repeats, choices=choices)
        return evaluate(Picked.first(again)).total_s

    times = [step_s(s, overlap) for s, overlap in itertools.product(SUSTAINED_SHARES, overlaps)]
    return np.array(times).reshape(len(SUSTAINED_SHARES), len(overlaps))


def _planned(step: MeasuredStep, cluster: Cluster) -> NDArray[np.float64]:
    """`step_times` of a measured step.

    Raises:
        InputError: the micro-batches do not divide the batch, or the method makes pipelines.
    """
    method = method_by_name(step.method)
    if isinstance(method, PipeshardParallel):
        raise InputError(f"{step.method} makes pipelines, and steps of one program are fitted.")
    if step.global_batch % step.micro_batches:
        raise InputError(
            f"{step.micro_batches} micro-batches do not divide its batch of {step.global_batch}."
        )
    graphs = []
    for batch in dict.fromkeys((step.global_batch, step.global_batch // step.micro_batches)):
        workload = build(
            step.model,
            batch,
            overrides=step.overrides,
            dtype=step.dtype,
            recompute=step.recompute,
            attention=step.attention,
            scan=step.scan,
            device=cluster.device,
        )
        graphs.append(capture(workload.train_step, workload.state, workload.batch))
    problem = make_problem(
        graphs[-1],
        cluster,
        num_micro_batches=step.micro_batches,
        memory_limit_bytes=_UNLIMITED_BYTES,
        whole=graphs[0] if len(graphs) > 1 else None,
    )
    return step_times(problem, method.solve(problem), _OVERLAPS)


def at_share(times: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Step times at one sustained share: products take a time in inverse proportion to it.

    Args:
        times: as `step_times` returns them.
    """
    inverse = 1 / np.array(SUSTAINED_SHARES[::-1])
    return np.array([np.interp(1 / share, inverse, column[::-1]) for column in times.T])


def _error(tables: Sequence[NDArray[np.float64]], share: float, overlap: float) -> float:
    """Median relative error over steps, of tables that are divided by measured seconds."""
    found = [np.interp(overlap, _OVERLAPS, at_share(table, share)) for table in tables]
    return float(np.median(np.abs(np.array(found) - 1)))


def _least_error(
    tables: Sequence[NDArray[np.float64]], share_before: float, overlap_before: float
) -> tuple[float, float]:
    """The sustained share and the overlap with the least median error; of equal ones, those nearest
    to the figures before, which stay where steps say nothing about them.
    """
    shares = np.linspace(SUSTAINED_SHARES[0], 1.0, 71).tolist()
    grid = itertools.product(shares, sorted({*_OVERLAPS, overlap_before}))

    def badness(figures: tuple[float, float]) -> tuple[float, float, float]:
        share, overlap = figures
        error = _error(tables, share, overlap)
        return error, abs(overlap - overlap_before), abs(share - share_before)

    return min(grid, key=badness)
