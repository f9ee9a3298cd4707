"""Rows of results: Alpa's columns in its order, then what this package adds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..plans import Plan
from ._operations import operations
from ._suite import Case

GIVEN, OURS = "given", "ours"
"""Whose plan a row is of: the one that the case gives, or that a search of ours finds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is known of one plan of a case. What is not known is None.

    Attributes:
        type: the family, such as `gpt`.
        model: name and sizes that differ from the name's.
        parallel: what the case gives, or how the plan that was found is laid out.
        mean_s, std_s, median_s: measured seconds of a step.
        billion_parameters: of the model.
        tflops: measured, of 1e12 operations per second on each device, as the suite counts them.
        peak_gb: measured memory of the fullest device, of 10^9 bytes; of CPUs the compiler's.
        metadata: what else it took, such as the dtype and the seconds of the search.
        case: suite and number.
        plan_of: `GIVEN` or `OURS`.
        outcome: "predicted", "measured", "does not fit", "not expressible" or "failed".
        reason: of an outcome that is no success.
        one_device_s: measured seconds of the plain step on one device.
        max_difference: the largest relative difference of a loss from one device's.
    """

    type: str
    model: str
    num_micro_batches: int
    num_devices: int
    parallel: str
    mean_s: float | None = None
    std_s: float | None = None
    billion_parameters: float | None = None
    tflops: float | None = None
    peak_gb: float | None = None
    metadata: str = ""
    case: str
    plan_of: str
    outcome: str
    reason: str = ""
    plan_file: str | None = None
    predicted_s: float | None = None
    predicted_tflops: float | None = None
    predicted_gb: float | None = None
    usable_gb: float | None = None
    published_s: float | None = None
    published_tflops: float | None = None
    predicted_to_published: float | None = None
    one_device_s: float | None = None
    max_difference: float | None = None
    median_s: float | None = None


HEADINGS = {
    "type": "Type",
    "model": "Model Config",
    "num_micro_batches": "#Microbatch",
    "num_devices": "#GPU",
    "parallel": "Parallel Config",
    "mean_s": "Mean Time (s)",
    "std_s": "Std Time (s)",
    "billion_parameters": "#Params (Billion)",
    "tflops": "TFLOPs",
    "peak_gb": "Peak Mem (GB)",
    "metadata": "Metadata",
    "case": "Case",
    "plan_of": "Plan of",
    "outcome": "Outcome",
    "reason": "Reason",
    "plan_file": "Plan File",
    "predicted_s": "Predicted (s)",
    "predicted_tflops": "Predicted TFLOPs",
    "predicted_gb": "Predicted Mem (GB)",
    "usable_gb": "Usable Mem (GB)",
    "published_s": "Published (s)",
    "published_tflops": "Published TFLOPs",
    "predicted_to_published": "Predicted / Published",
    "one_device_s": "One Device (s)",
    "max_difference": "Max Difference",
    "median_s": "Median Time (s)",
}
"""The heading of each column of `Row`, in order."""


def row_of(case: Case, plan_of: str, *, outcome: str, **known: Any) -> Row:
    """A row of a case, with what the case says filled in.

    Args:
        outcome, known: fields of `Row`; `predicted_s` and `mean_s` give throughput, too.
    """
    filled = dict(known)
    if not case.not_expressible:
        work = operations(case) / case.num_devices / 1e12
        for seconds, tflops in (("predicted_s", "predicted_tflops"), ("mean_s", "tflops")):
            if filled.get(seconds):
                filled[tflops] = work / filled[seconds]
        predicted_s = filled.get("predicted_s")
        published_s, published_tflops = case.published_s, case.published_tflops
        if published_tflops:
            published_s = published_s or work / published_tflops
        elif published_s:
            published_tflops = work / published_s
        ratio = predicted_s / published_s if predicted_s and published_s else None
        filled |= {
            "published_s": published_s,
            "published_tflops": published_tflops,
            "predicted_to_published": ratio,
        }
    sizes = ", ".join(f"{name}={value}" for name, value in case.overrides.items())
    return Row(
        type=case.suite.partition(".")[0],
        model=f"{case.model}, batch {case.global_batch}" + (f", {sizes}" if sizes else ""),
        num_micro_batches=filled.pop("num_micro_batches", case.num_micro_batches),
        num_devices=case.num_devices,
        parallel=filled.pop("parallel", case.parallel),
        case=f"{case.suite} {case.number}",
        plan_of=plan_of,
        outcome=outcome,
        **filled,
    )


def layout_text(plan: Plan) -> str:
    """Stages and meshes in a few words: `1f1b, 2 x (2x4)`."""
    meshes = ["x".join(map(str, stage.mesh_shape)) for stage in plan.stages]
    if not plan.is_pipeline:
        return f"one program on {meshes[0]}"
    groups = [(mesh, len(list(same))) for mesh, same in itertools.groupby(meshes)]
    return f"{plan.schedule}, " + ", ".join(f"{count} x ({mesh})" for mesh, count in groups)


def as_cells(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows by their headings."""
    cells = []
    for row in rows:
        cells.append({head: getattr(row, name) for name, head in HEADINGS.items()})
    return cells


def shown_columns(rows: Sequence[Row]) -> list[str]:
    """The columns in which some row has a value, in order."""
    found = []
    for name in HEADINGS:
        if any(getattr(row, name) not in (None, "") for row in rows):
            found.append(name)
    return found


def throughput_series(rows: Sequence[Row]) -> tuple[list[int], dict[str, list[float | None]]]:
    """Numbers of devices, and for each kind of plan and figure the highest throughput of all
    devices together, in 1e12 operations per second.
    """
    points = sorted({row.num_devices for row in rows})
    kinds = {
        "the case's plan, measured": (GIVEN, "tflops"),
        "the case's plan, predicted": (GIVEN, "predicted_tflops"),
        "ours, measured": (OURS, "tflops"),
        "ours, predicted": (OURS, "predicted_tflops"),
        "published": (None, "published_tflops"),
    }
    series = {}
    for title, (plan_of, name) in kinds.items():
        highest: dict[int, float] = {}
        for row in rows:
            of_each = getattr(row, name)
            counts = plan_of in (None, row.plan_of) and row.outcome in ("predicted", "measured")
            if counts and of_each:
                point = row.num_devices
                highest[point] = max(highest.get(point, 0.0), of_each * point)
        if highest:
            series[title] = [highest.get(point) for point in points]
    return points, series
