"""Do predicted step times hold for the accelerators that people own?

Each publicly reported training step (GPT and Llama on V100 to GB300, TPU v5e to v6e, and others) is
planned as a user plans it: `aliquot.plan` with the catalogue's cluster, the row's own layout,
recomputation and number of micro-batches, under the limit of the device's memory (that of XLA; for
other frameworks, whose allocators take more, all but 1 GiB). Steps of Megatron's family, of llm.c
and of compiled PyTorch that recompute nothing keep what those kernels keep (`fused`). Layers are
looped over where the framework does so, or where the step fits only so. A row that ran, and whose
plan is predicted not to fit, has no step time; it is counted as a fault of memory.
Rows are split in halves by source and model family; the sustained share of each device is fitted
to one half (`--fit`; that of H100 and H200 to steps that were measured for it, `gpu_steps.py`), the
other half is held out. Pipelines, split sequences, experts and products of 8 bits are never fitted.

    python benchmarks/public_steps.py FOLDER [--most N] [--only TEXT] [--journal FILE] [--fit]

FOLDER holds `public-steps.json` and, with rows that came after all figures were fitted,
`fresh-steps.json`. `--most` takes at most N rows of each framework, device and kind of parallelism,
by a hash of their names, besides all fresh rows and all JAX programs. Writes what commands print of
errors (`aliquot/cluster/reported_steps.json`) and `docs/accuracy.md`, with the result file. A
journal keeps each row as soon as it is there; rows of other constants are planned again.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _calibration_files import update
from _public_rows import Case, express
from _results import Journal, Report, options, say, table
from published_steps import tau_b

import aliquot as aq
from aliquot._fit_steps import SUSTAINED_SHARES, at_share
from aliquot.cluster import (
    ReportedSteps,
    chip_of,
    figures_digest,
    is_calibrated,
    narrowest,
    write_reported_steps,
)
from aliquot.core import AliquotError, InfeasibleError, InputError
from aliquot.planners import AbstractMethod
from aliquot.zoo import build

# Steps of two plans that differ by less say nothing about their order.
_DIFFERENT = 0.05
# Of a GPU's memory, what its context and the buffers of its collectives take.
_OF_CONTEXT_BYTES = 2**30
# Devices whose share is fitted to steps that were measured for it: `gpu_steps.py`.
_MEASURED = ("h100",)
_SHEETS = "Devices known by their data sheets alone"
PAGE = Path(__file__).parent.parent / "docs" / "accuracy.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case with what its plan says.

    Attributes:
        step_s: predicted; None if there is no plan.
        reason: why there is none, else empty.
        needed_bytes: of memory on each device; None where nothing was planned.
        fits: whether that is within the device's limit.
        looped: whether layers are looped over.
    """

    case: Case
    step_s: float | None
    reason: str
    needed_bytes: float | None
    fits: bool
    parts: dict[str, float]
    cpu_s: float
    looped: bool = False

    @property
    def error(self) -> float:
        """Predicted over reported, less 1, with as many digits as the record holds."""
        assert self.step_s is not None
        return round(self.step_s / self.case.measured_s - 1, 4)

    @property
    def half(self) -> str:
        """Of the rows: the one that figures may be fitted to, or the one held out."""
        return "fitted" if self.case.is_fitted else "held out"


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(
        __doc__,
        lambda parser: parser.add_argument("folder", type=Path),
        lambda parser: parser.add_argument("--most", type=int),
        lambda parser: parser.add_argument("--only", default=""),
        lambda parser: parser.add_argument("--journal", type=Path),
        lambda parser: parser.add_argument("--fit", action="store_true"),
    )
    cases, left_out = read_cases(chosen.folder)
    wanted = chosen.only
    cases = [c for c in cases if wanted in f"{c.id}, {c.device}, {c.framework}, {kind_of(c)}"]
    expressed = len(cases)
    cases = _at_most(2 if chosen.quick else chosen.most, cases)
    if chosen.fit:
        _fit(cases)
    journal = Journal(chosen.journal)
    rows = []
    for number, case in enumerate(cases, 1):
        row = plan_row(case, journal)
        rows.append(row)
        told = f"{row.error:+.1%}" if row.step_s else row.reason.splitlines()[0][:120]
        say(f"{number}/{len(cases)} {case.id}: {told}")
    left_out.update(row.reason for row in rows if row.needed_bytes is None)
    rows = [row for row in rows if row.needed_bytes is not None]
    tables = make_tables(rows)
    report = _report(rows, tables, left_out, expressed)
    if not (chosen.quick or wanted):
        write_reported_steps(reported(rows), figures_of(rows))
        _write_page(report, expressed)
    unfit = sum(not row.fits for row in rows)
    ours = [
        abs(row.error) for row in _timed(rows) if not row.case.reason and not row.case.is_fitted
    ]
    met = None
    if ours:
        met = bool(np.median(ours) <= 0.1 and unfit <= 0.05 * len(rows))
    return report.finish(chosen, met=met)


def read_cases(folder: Path) -> tuple[list[Case], collections.Counter[str]]:
    """Steps of all rows of both files that can be expressed, and the number of others by reason."""
    cases, left_out = [], collections.Counter[str]()
    for name in ("public-steps.json", "fresh-steps.json"):
        path = folder / name
        for row in json.loads(path.read_text())["rows"] if path.exists() else ():
            is_fresh = name.startswith("fresh")
            if is_fresh and (row["kind"].startswith("near") or row["grade"] == "C"):
                left_out["a row much like another, or too little of it is known"] += 1
                continue
            try:
                cases.append(express(row, is_fresh=is_fresh))
            except InputError as error:
                left_out.update(str(error).split("; "))
    return cases, left_out


def _at_most(most: int | None, cases: Sequence[Case]) -> list[Case]:
    """At most so many cases of each other framework, device and kind; all JAX programs and all
    fresh rows.
    """
    if most is None:
        return list(cases)
    taken = collections.Counter[tuple[str, ...]]()
    chosen = []
    for case in sorted(cases, key=lambda case: zlib.crc32(case.id.encode())):
        cell = (case.framework, case.device, kind_of(case))
        always = case.is_fresh or not case.reason
        taken[cell] += not always
        if always or taken[cell] <= most:
            chosen.append(case)
    return chosen


def plan_row(case: Case, journal: Journal | None = None) -> Row:
    """The row of a case, planned by the call that users make."""
    journal = journal or Journal(None)
    key = json.dumps(
        [case.id, case.settings, str(case.method), figures_digest(case.device)], default=str
    )
    known = journal.rows.get(key) or journal.row(key, lambda: _planned(case))
    return Row(case=case, **known)


def _planned(case: Case) -> dict[str, Any]:
    """Fields of `Row` but the case."""
    started = time.process_time()
    answer: dict[str, Any] = {"step_s": None, "reason": "", "needed_bytes": None, "fits": False}
    parts: dict[str, float] = {}
    refusals: list[InfeasibleError] = []
    plan = None
    try:
        for looped in sorted({case.settings["scan"], True}):
            settings = {**case.settings, "scan": looped}
            try:
                plan = plan_case(dataclasses.replace(case, settings=settings))
            except InfeasibleError as error:
                refusals.append(error)
                continue
            answer["looped"] = looped
            break
    except AliquotError as error:
        answer |= {"reason": f"{type(error).__name__}: {str(error).splitlines()[0][:140]}"}
    if plan is None and refusals and not answer["reason"]:
        least = min(refusals, key=lambda error: error.required_bytes or math.inf)
        answer |= {"reason": str(least), "needed_bytes": least.required_bytes}
    if plan is not None:
        found = plan.prediction
        answer |= {
            "step_s": found.step_time_s,
            "needed_bytes": found.peak_memory_bytes,
            "fits": True,
        }
        parts = parts_of(plan)
    return {**answer, "parts": parts, "cpu_s": round(time.process_time() - started, 2)}


def parts_of(plan: aq.Plan) -> dict[str, float]:
    """The terms of a plan's step time, in seconds."""
    found = plan.prediction
    return {
        "compute": found.compute_s,
        "collectives": found.communication_s + found.gradient_s,
        "hidden": found.hidden_s,
        "bubble": found.bubble_s,
    }


def plan_case(case: Case) -> aq.Plan:
    """The plan of a row's own layout on the catalogue's devices, within their memory.

    Raises:
        InfeasibleError: the row ran, and is predicted not to fit.
        AliquotError: the row cannot be planned otherwise.
    """
    method: AbstractMethod = case.method
    limit_bytes = None
    if case.reason:
        # XLA leaves a tenth of a device's memory alone. PyTorch's allocator takes all but this.
        limit_bytes = case.cluster.device.memory_bytes - _OF_CONTEXT_BYTES
    workload = build(**case.settings, device=case.cluster.device)
    return aq.plan(
        workload.train_step,
        workload.state,
        workload.batch,
        cluster=case.cluster,
        method=method,
        num_micro_batches=case.num_micro_batches,
        memory_limit_bytes=limit_bytes,
        # Layers and stages recompute what the row says, and nothing more.
        recompute="none",
    )


def _fit(cases: Sequence[Case]) -> None:
    """Write the sustained share of each device: the one with the least median error on the rows
    that may be fitted, and fit its memory.
    """
    shares = np.linspace(SUSTAINED_SHARES[0], 1.0, 141)
    for file in sorted({chip_of(case.device) for case in cases if chip_of(case.device)}):
        times = []
        for case in cases:
            if not case.is_fitted or chip_of(case.device) != file or file in _MEASURED:
                continue
            rows = [plan_row(_at_share(case, share)) for share in SUSTAINED_SHARES]
            if all(row.step_s for row in rows):
                found = np.array([[row.step_s] for row in rows], float)
                times.append(found / case.measured_s)
        if times:
            errors = [np.median([abs(at_share(t, s)[0] - 1) for t in times]) for s in shares]
            share = float(f"{shares[int(np.argmin(errors))]:.3g}")
            origin = f"{len(times)} publicly reported steps: benchmarks/public_steps.py"
            update(file, {"sustained_share": (share, f"least median error over {origin}")})
            say(f"{file}: sustained share {share:.3f}, {len(times)} rows, error {min(errors):.1%}")


def _at_share(case: Case, share: float) -> Case:
    """A case on devices of another sustained share."""
    device = dataclasses.replace(case.cluster.device, calibration={"sustained_share": share})
    return dataclasses.replace(case, cluster=dataclasses.replace(case.cluster, device=device))


def kind_of(case: Case) -> str:
    """The kind of parallelism, by the names of `aliquot.cluster.reported_steps`."""
    if "num_experts" in case.model:
        return "experts"
    bits = ", 8 bits" if case.is_fp8 else ""
    if case.pipeline > 1:
        return ("pipeline" if case.chunks == 1 else "pipeline, interleaved") + bits
    if case.context > 1:
        return "context" + bits
    return ("tensor" if case.tensor > 1 else "data, FSDP") + bits


def reported(rows: Sequence[Row]) -> list[ReportedSteps]:
    """What commands print of errors: of held-out rows, by framework, device and kind."""
    groups = collections.defaultdict[tuple[str, ...], list[Row]](list)
    for row in rows:
        if not row.case.is_fitted:
            case = row.case
            groups[case.framework, case.reason, case.device, kind_of(case)].append(row)
    return [
        ReportedSteps(
            framework=framework,
            reason=reason,
            device=device,
            kind=kind,
            errors=tuple(sorted(row.error for row in _timed(some))),
            unfit=sum(not row.fits for row in some),
        )
        for (framework, reason, device, kind), some in sorted(groups.items())
    ]


def figures_of(rows: Iterable[Row]) -> dict[str, str]:
    """The digest of the figures of each device that rows were planned with."""
    return {device: figures_digest(device) for device in sorted({r.case.device for r in rows})}


def _timed(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.step_s is not None]


def make_tables(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """The tables of the page and of the result file."""
    cells = collections.defaultdict[tuple[str, ...], list[Row]](list)
    for row in rows:
        cells[row.case.framework, row.case.device, kind_of(row.case), row.half].append(row)
    ours, others, fresh = [], [], []
    for (framework, device, kind, half), some in sorted(cells.items()):
        told = {"framework": framework, "device": device, "parallelism": kind, "half": half}
        if some[0].case.reason:
            others.append({**told, **_slower(some), "why": some[0].case.reason})
        else:
            ours.append({**told, **_figures(some)})
    fresh_rows = [row for row in rows if row.case.is_fresh]
    for framework in sorted({row.case.framework for row in fresh_rows}):
        for half in ("fitted", "held out"):
            some = [r for r in fresh_rows if (r.case.framework, r.half) == (framework, half)]
            if some:
                fresh.append({"framework": framework, "half": half, **_figures(some)})
    return {
        "JAX programs": ours,
        "Programs of other frameworks": others,
        "Rows that came after all figures were fitted": fresh,
        _SHEETS: _data_sheets(rows),
        "Order of layouts of one step, where reports differ by 5 % or more": _orders(rows),
        "Memory, where it was reported": [
            {
                "row": row.case.id,
                "predicted GiB": row.needed_bytes / 2**30,
                "reported GiB": row.case.measured_bytes / 2**30,
                "error": f"{row.needed_bytes / row.case.measured_bytes - 1:+.0%}",
            }
            for row in rows
            if row.case.measured_bytes and row.needed_bytes
        ],
        "Steps that ran and are predicted not to fit": [
            {
                "row": row.case.id,
                "layout": getattr(row.case.method, "name", type(row.case.method).__name__),
                "recomputation": row.case.settings["recompute"],
                "predicted GiB": (row.needed_bytes or 0) / 2**30,
                "device GiB": row.case.cluster.device.memory_bytes / 2**30,
            }
            for row in rows
            if not row.fits
        ],
    }


def _figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors of steps; a 90th percentile only of ten or more."""
    errors = np.array([row.error for row in _timed(rows)])
    found: dict[str, Any] = {"steps": len(errors), "do not fit": len(rows) - len(errors)}
    if not len(errors):
        return found | {"signed median": "", "median": "", "90 %": "", "worst": ""}
    many = len(errors) >= 10
    return found | {
        "signed median": f"{np.median(errors):+.0%}",
        "median": f"{np.median(np.abs(errors)):.0%}",
        "90 %": f"{np.quantile(np.abs(errors), 0.9):.0%}" if many else "",
        "worst": f"{errors[np.argmax(np.abs(errors))]:+.0%}",
    }


def _slower(rows: Sequence[Row]) -> dict[str, Any]:
    """How much longer steps took than is predicted of a JAX program."""
    errors = np.array([row.error for row in _timed(rows)])
    found: dict[str, Any] = {"steps": len(errors), "do not fit": len(rows) - len(errors)}
    longer = [""] * 3
    if len(errors):
        longer = [f"{1 / (1 + e) - 1:+.0%}" for e in (np.median(errors), max(errors), min(errors))]
    return found | dict(zip(("slower than predicted, median", "from", "to"), longer, strict=True))


def _data_sheets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """How much longer steps took on devices without calibration, and whether that lies in the range
    of all such devices, and in the range of the others.
    """
    longer = collections.defaultdict[str, list[float]](list)
    for row in _timed(rows):
        if not is_calibrated(row.case.device) and not row.case.is_fitted:
            longer[row.case.device].append(1 / (1 + row.error))
    answer = []
    for device, some in sorted(longer.items()):
        told: dict[str, Any] = {"device": device, "steps": len(some)}
        told |= {"took, from": round(min(some), 2), "to, times as long": round(max(some), 2)}
        for which, without in (("all", None), ("the others", device)):
            known = [t for name, times in longer.items() if name != without for t in times]
            if not known:
                continue
            low, high = narrowest(known)
            told[f"range of {which}"] = f"{low:.2f} to {high:.2f}"
            told[f"in that of {which}"] = sum(low <= t <= high for t in some)
        answer.append(told)
    return answer


def _orders(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Whether predictions order layouts as reported steps do: rows of one framework, device, model
    and batch that differ in nothing but the plan.
    """
    groups = collections.defaultdict[str, dict[str, Row]](dict)
    for row in _timed(rows):
        case = row.case
        settings = dict(case.settings)
        recompute, _ = settings.pop("recompute"), settings.pop("scan")
        where = [case.release, case.group, case.device, case.cluster.num_devices, case.is_fp8]
        plan = [str(case.method), case.num_micro_batches, recompute]
        key = json.dumps([where, settings], sort_keys=True, default=str)
        groups[key].setdefault(json.dumps(plan), row)
    answer: list[dict[str, Any]] = []
    all_pairs = []
    for group in groups.values():
        some = list(group.values())
        far = [
            (slow, fast)
            for slow, fast in itertools.permutations(some, 2)
            if slow.case.measured_s >= (1 + _DIFFERENT) * fast.case.measured_s
        ]
        if not far:
            continue
        pairs = [(r.case.measured_s, float(r.step_s or 0)) for r in some]
        all_pairs.append(pairs)
        wrong = [(slow, fast) for slow, fast in far if (slow.step_s or 0) <= (fast.step_s or 0)]
        answer.append(
            {
                "step": f"{some[0].case.group}, {some[0].case.cluster.num_devices} devices, batch"
                f" {some[0].case.settings['global_batch']}",
                "layouts": len(some),
                "pairs": len(far),
                "in the wrong order": len(wrong),
                "tau-b": round(tau_b([pairs], _DIFFERENT), 2),
            }
        )
    if answer:
        counts = {
            name: sum(int(row[name]) for row in answer)
            for name in ("layouts", "pairs", "in the wrong order")
        }
        together = round(tau_b(all_pairs, _DIFFERENT), 2)
        answer.append({"step": "all", **counts, "tau-b": together})
    return answer


def _report(
    rows: Sequence[Row],
    tables: dict[str, list[dict[str, Any]]],
    left_out: collections.Counter[str],
    expressed: int,
) -> Report:
    held = [row for row in rows if not row.case.is_fitted]
    ours = [row for row in held if not row.case.reason]
    report = Report(
        name="public_steps",
        question="Do predicted step times hold for the accelerators that people own?",
        bar=(
            "held-out steps of JAX programs: median 10 %; at most 5 % of the steps that ran are"
            " predicted not to fit"
        ),
        method=" ".join((__doc__ or "").split("\n\n")[1].split()),
        summary={
            "rows": f"{len(rows)} planned of {expressed} that can be expressed",
            "JAX programs, held out": _figures(ours),
            "predicted not to fit": f"{sum(not row.fits for row in rows)} of {len(rows)}",
            "of JAX programs": f"{sum(not row.fits for row in rows if not row.case.reason)} of"
            f" {sum(not row.case.reason for row in rows)}",
            "CPU s": round(sum(row.cpu_s for row in rows)),
        },
    )
    report.tables.update(tables)
    report.tables["Rows"] = [
        {
            "row": row.case.id,
            "framework": row.case.framework,
            "device": row.case.device,
            "parallelism": kind_of(row.case),
            "half": row.half,
            "fresh": row.case.is_fresh,
            "layout": getattr(row.case.method, "name", str(row.case.method)),
            "micro-batches": row.case.num_micro_batches,
            "recompute": row.case.settings["recompute"],
            "looped": row.looped,
            "reported s": row.case.measured_s,
            "predicted s": row.step_s,
            "error": f"{row.error:+.1%}" if row.step_s else "does not fit",
            "needed GiB": (row.needed_bytes or 0) / 2**30,
            **{f"{name} s": row.parts.get(name) for name in ("compute", "collectives", "hidden")},
            "bubble s": row.parts.get("bubble"),
            "CPU s": row.cpu_s,
        }
        for row in sorted(rows, key=lambda r: -abs(r.error) if r.step_s else 0.0)
    ]
    report.tables["Left out"] = [{"reason": why, "rows": n} for why, n in left_out.most_common()]
    return report


def _write_page(report: Report, expressed: int) -> None:
    planned = len(report.tables["Rows"])
    lines = [
        "# How far predictions are from reported steps",
        "",
        "Training steps that others reported, each planned as you would plan it: `aliquot.plan`"
        " with the cluster by its name, the layout, recomputation and micro-batches that were"
        " reported, and the memory of the device as the limit: what XLA leaves to programs, and for"
        " other frameworks, whose allocators take more, all but 1 GiB. No figure is changed for any"
        " framework. The errors that `aliquot plan` and `aliquot cluster` print are those of the"
        " held-out rows of this page, which `benchmarks/public_steps.py` made; a test fails when a"
        " figure of a device changes and this page was not made anew. None of these steps was"
        " measured by aliquot. Layers are looped over where the framework does so, or where the"
        " step fits only so. Kernels of Megatron-Core, of Transformer Engine, of llm.c and of"
        " compiled PyTorch keep the inputs and results of products and compute norms and activation"
        " functions again in their backward pass: steps of theirs that recompute nothing are"
        " planned with `fused`, which does the same.",
        "",
        "Rows are split in halves by source and model family. To one half a figure of each device"
        " was fitted, the share of single products' speed that whole steps sustain (of H100 and"
        " H200, to steps that were measured on one H100: `gpu_steps`); the other half was held out,"
        " and so were all pipelines, split sequences, experts and products of 8 bits.",
        "",
        f"{planned} of {expressed} rows were planned; where a framework reported many steps of one"
        " kind on one device, some were drawn by a hash of their names.",
    ]
    about = {
        "JAX programs": "Predicted over reported time, less 1: minus is too fast. There is a 90th"
        " percentile of ten steps or more.",
        "Programs of other frameworks": "aliquot predicts what a JAX program takes. Programs of"
        " other frameworks have other kernels and other overlap, so these rows say how much"
        " longer they took than that, and why.",
        "Rows that came after all figures were fitted": "Rows of sources that are in none of the"
        " tables that figures were fitted to. The half called fitted was looked at, and no figure"
        " was fitted to it since.",
        _SHEETS: "Of these devices no figure was fitted. Plans for them print a range of the step"
        " time: the narrowest that holds eight of ten of these steps, held out all. The last two"
        " columns are a test of it: the range that the other devices alone would give.",
        "Steps that ran and are predicted not to fit": "A JAX program keeps more for its backward"
        " pass than some frameworks do. Such rows have no predicted time, and count as faults.",
    }
    pages = {k: v for k, v in report.tables.items() if k != "Rows"}
    for title, rows in pages.items():
        if rows:
            lines += ["", f"## {title}", ""]
            lines += [about[title], ""] if title in about else []
            lines.append(table(rows))
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
