"""Do predicted step times hold for the accelerators that people own?

Plans publicly reported training steps (GPT and Llama on A100, H100, H200, B200, TPU v5e, v5p, v6e,
V100) with the model, cluster, method, recomputation and number of micro-batches of each row, and
compares predicted with reported step times. Rows are split in halves by source and model family:
the sustained share of each device is fitted to one half (`--fit`), the other half is held out; that
of H100 and H200 is fitted to steps that were measured for it (`gpu_steps.py`).
PyTorch's rows on Hopper, of 2023 and 2024, ran older libraries than JAX does, and have figures of
their own, fitted to the same half.
Pipelines, with stages as deep as each other and 1f1b or interleaved, split sequences and products
of 8 bits are never fitted.

    python benchmarks/public_steps.py FOLDER [--quick] [--fit] [--only TEXT] [--again REGEX]

FOLDER holds `public-steps.json`. Rows that cannot be expressed are listed with their reason. Also
writes `docs/accuracy.md`. `--quick` takes every tenth row.
`--again` predicts only rows whose "id, device, framework, method" matches, as after a change that
concerns these alone, and takes the others from the result file.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _calibration_files import update
from _public_rows import Case, express, is_harder
from _results import RESULTS, Report, options, say
from numpy.typing import NDArray
from published_steps import tau_b

import aliquot as aq
from aliquot._fit_steps import SUSTAINED_SHARES, at_share, step_times
from aliquot.cluster import TARGETS
from aliquot.core import AliquotError, InputError
from aliquot.cost import make_problem, predict
from aliquot.planners import Task
from aliquot.zoo import build

UNLIMITED_BYTES = 1e15
# Steps of two plans that differ by less say nothing about their order.
_DIFFERENT = 0.05
FILES = {
    "A100-40GB": "a100",
    "A100-80GB": "a100",
    "H100": "h100",
    "H200": "h100",
    "B200": "b200",
    "v5e": "v5e",
    "v5p": "v5p",
    "v6e": "v6e",
}


# Devices whose share is fitted to steps that were measured for it: `gpu_steps.py`.
MEASURED = ("h100",)
# What is printed of rows with the figures `PYTORCH_ON_HOPPER`, which are written there by hand.
OLDER = "PyTorch on Hopper"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case with its predictions.

    `times` are those of `step_times`, by the device's sustained share.
    """

    case: Case
    step_s: float
    times: NDArray[np.float64]
    parts: dict[str, float]
    memory_bytes: float
    cpu_s: float

    @property
    def error(self) -> float:
        """Predicted over reported, less 1."""
        return self.step_s / self.case.measured_s - 1


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(
        __doc__,
        lambda parser: parser.add_argument("folder", type=Path),
        lambda parser: parser.add_argument("--fit", action="store_true"),
        lambda parser: parser.add_argument("--only", default=""),
        lambda parser: parser.add_argument("--again", default=""),
    )
    reported = json.loads((chosen.folder / "public-steps.json").read_text())["rows"]
    cases, left_out = [], collections.Counter[str]()
    for each in reported:
        try:
            cases.append(express(each))
        except InputError as error:
            left_out.update(str(error).split("; "))
    expressed = {case.id for case in cases}
    harder = [each["id"] in expressed for each in reported if is_harder(each)]
    say(
        f"{sum(harder)} of {len(harder)} rows with pipelines, split sequences, experts or products"
        f" of 8 bits or fewer can be expressed: {np.mean(harder):.0%}"
    )
    cases = [case for case in cases if chosen.only in case.id + case.device]
    if chosen.quick:
        cases = cases[::10]
    kept: list[Row] = []
    if chosen.again:
        kept = _kept([case for case in cases if not _matches(case, chosen.again)])
        cases = [case for case in cases if _matches(case, chosen.again)]
    rows = _predict_all([case for case in cases if case.pipeline == 1], left_out)
    shares: dict[str, float] = {}
    if chosen.fit:
        rows, shares = _fit(rows)
    # Pipelines are predicted with what was fitted.
    rows += _predict_all([_at_share(case, shares) for case in cases if case.pipeline > 1], left_out)
    rows += kept
    if chosen.fit or chosen.again:
        _write_errors([row for row in rows if row.case.pipeline == 1])
    report = _report(rows, left_out)
    if not (chosen.quick or chosen.only):
        _write_page(rows, left_out)
    held = np.array([row.error for row in _flat(rows) if not row.case.is_fitted])
    piped = np.array([row.error for row in rows if _parallelism(row.case) == "pipeline"])
    met = None
    if len(held) and len(piped):
        sizes = np.abs(held)
        met = bool(
            abs(np.median(held)) <= 0.06
            and np.median(sizes) <= 0.10
            and np.quantile(sizes, 0.9) <= 0.25
            and np.median(np.abs(piped)) <= 0.18
        )
    return report.finish(chosen, met=met)


def _matches(case: Case, pattern: str) -> bool:
    method = getattr(case.method, "name", "")
    return bool(re.search(pattern, f"{case.id}, {case.device}, {case.framework}, {method}"))


def _kept(cases: Sequence[Case]) -> list[Row]:
    """The rows of these cases as they stand in the newest result file."""
    path = max(RESULTS.glob("public_steps_*.json"), key=lambda file: file.stem[-7:])
    tables = json.loads(path.read_text())["tables"]
    memory = {row["row"]: row["predicted GiB"] for row in tables["Memory, where it was reported"]}
    rows = {row["row"]: row for row in tables["Rows"]}
    parts = ("compute", "collectives", "hidden", "bubble")
    return [
        Row(
            case=case,
            step_s=rows[case.id]["predicted s"],
            times=np.empty((0, 0)),
            parts={
                part: rows[case.id][f"{part} s"] for part in parts if f"{part} s" in rows[case.id]
            },
            memory_bytes=memory.get(case.id, 0.0) * 2**30,
            cpu_s=rows[case.id]["CPU s"],
        )
        for case in cases
        if case.id in rows
    ]


def _predict_all(cases: Sequence[Case], left_out: collections.Counter[str]) -> list[Row]:
    """Rows of all cases that can be planned; the others are counted by the reason."""
    rows = []
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(mp_context=spawn) as pool:
        for number, (case, row) in enumerate(zip(cases, pool.map(_predicted, cases), strict=True)):
            if isinstance(row, str):
                left_out[row.splitlines()[0][:140]] += 1
                say(f"{case.id}: {row}")
            else:
                rows.append(row)
                say(f"{number + 1}/{len(cases)} {case.id}: {row.error:+.0%}")
    return rows


def _predicted(case: Case) -> Row | str:
    """A row, or the reason why there is none."""
    target = TARGETS["gpu"]
    TARGETS["gpu"] = dataclasses.replace(
        target,
        repeats_cheap_work=target.repeats_cheap_work and not case.by_operator,
        # Others than JAX have kernels for grouped products on GPUs.
        groups_products=not case.framework.startswith("MaxText"),
    )
    try:
        return _predict_pipeline(case) if case.pipeline > 1 else _predict(case)
    except AliquotError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        TARGETS["gpu"] = target


def _at_share(case: Case, shares: Mapping[str, float]) -> Case:
    """A case whose devices have the share that was fitted to them."""
    share = shares.get(_fitted_with(case))
    if share is None:
        return case
    device = case.cluster.device
    calibration = {**device.calibration, "sustained_share": share}
    device = dataclasses.replace(device, calibration=calibration)
    return dataclasses.replace(case, cluster=dataclasses.replace(case.cluster, device=device))


def _fitted_with(case: Case) -> str:
    """The calibration file with whose rows a case is fitted, or the libraries that it has in place
    of the target's; empty for devices that are not fitted.
    """
    return (
        OLDER
        if "sustained_share" in case.cluster.device.calibration
        else FILES.get(case.device, "")
    )


def _flat(rows: Sequence[Row]) -> list[Row]:
    """Rows of data parallelism and FSDP, without V100."""
    return [
        r
        for r in rows
        if _parallelism(r.case) == "data, FSDP" and not r.case.device.startswith("V100")
    ]


def _predict(case: Case) -> Row:
    start = time.process_time()
    workload = build(**case.settings, device=case.cluster.device)
    whole = aq.capture(workload.train_step, workload.state, workload.batch)
    count = case.num_micro_batches
    graph = whole
    if count > 1:
        settings = {**case.settings, "global_batch": case.settings["global_batch"] // count}
        smaller = build(**settings, device=case.cluster.device)
        graph = aq.capture(smaller.train_step, smaller.state, smaller.batch)
    problem = make_problem(
        graph,
        case.cluster,
        num_micro_batches=count,
        memory_limit_bytes=UNLIMITED_BYTES,
        whole=whole if count > 1 else None,
    )
    decision = case.method.solve(problem)
    found = predict(decision.priced, decision.picks, UNLIMITED_BYTES, graph)
    return Row(
        case=case,
        step_s=found.step_time_s,
        times=step_times(problem, decision, [decision.priced.target.overlap_fraction]),
        parts={
            "compute": found.compute_s,
            "collectives": found.communication_s + found.gradient_s,
            "hidden": found.hidden_s,
        },
        memory_bytes=found.peak_memory_bytes,
        cpu_s=time.process_time() - start,
    )


def _predict_pipeline(case: Case) -> Row:
    start = time.process_time()
    workload = build(**case.settings, device=case.cluster.device)
    graph = aq.capture(workload.train_step, workload.state, workload.batch)
    task = Task(graph=graph, cluster=case.cluster, memory_limit_bytes=UNLIMITED_BYTES)
    decision = case.method.decide(task)
    assert decision.pipeline is not None
    found = decision.pipeline.prediction.step
    return Row(
        case=case,
        step_s=found.step_time_s,
        times=np.full((len(SUSTAINED_SHARES), 1), found.step_time_s),
        parts={
            "compute": found.compute_s,
            "collectives": found.communication_s + found.gradient_s,
            "hidden": found.hidden_s,
            "bubble": found.bubble_s,
        },
        memory_bytes=found.peak_memory_bytes,
        cpu_s=time.process_time() - start,
    )


def _fit(rows: Sequence[Row]) -> tuple[list[Row], dict[str, float]]:
    """Write the sustained share of each device, the one with the least median error on the rows
    that may be fitted; returns all rows with what they are then predicted to take, and the shares
    by file.
    """
    found: dict[str, float] = {}
    fitted = {row.case.id: row for row in rows}
    shares = np.linspace(SUSTAINED_SHARES[0], 1.0, 141)
    for file in (*dict.fromkeys(FILES.values()), OLDER):
        mine = [row for row in rows if _fitted_with(row.case) == file]
        some = [row for row in mine if row.case.is_fitted]
        if not some or file in MEASURED:
            continue
        errors = [
            np.median([abs(at_share(row.times, s)[0] / row.case.measured_s - 1) for row in some])
            for s in shares
        ]
        share = found[file] = float(f"{shares[int(np.argmin(errors))]:.3g}")
        origin = f"{len(some)} publicly reported steps: benchmarks/public_steps.py"
        if file != OLDER:
            update(file, {"sustained_share": (share, f"least median error over {origin}")})
        say(f"{file}: sustained share {share:.3f}, {len(some)} rows, error {min(errors):.1%}")
        for row in mine:
            again = float(at_share(row.times, share)[0])
            fitted[row.case.id] = dataclasses.replace(row, step_s=again)
    return list(fitted.values()), found


def _write_errors(rows: Sequence[Row]) -> None:
    """Write how far the rows that were not fitted are off, for those who plan for a device."""
    for file in dict.fromkeys(FILES.values()):
        held = [row for row in rows if FILES.get(row.case.device) == file]
        # Context parallelism, of which one framework reported nearly all rows, stands by itself.
        held = [row for row in held if not row.case.is_fitted and row.case.context == 1]
        held = [r for r in held if not (r.case.is_fp8 or "num_experts" in r.case.model)]
        errors = np.array([abs(row.error) for row in held])
        if len(errors):
            figures = [len(errors), round(float(np.median(errors)), 3)]
            figures.append(round(float(np.quantile(errors, 0.9)), 3))
            source = "rows, median error, error of 90 %: benchmarks/public_steps.py"
            update(file, {"reported_steps": (figures, source)})


def _figures(rows: Iterable[Row]) -> dict[str, Any]:
    errors = np.array([row.error for row in rows])
    if not len(errors):
        return {"rows": 0}
    return {
        "rows": len(errors),
        "signed median": f"{np.median(errors):+.0%}",
        "median": f"{np.median(np.abs(errors)):.0%}",
        "90 %": f"{np.quantile(np.abs(errors), 0.9):.0%}",
        "worst": f"{errors[np.argmax(np.abs(errors))]:+.0%}",
    }


def _by(rows: Sequence[Row], what: str, key: Callable[[Row], str]) -> list[dict[str, Any]]:
    table = []
    for name in sorted({key(row) for row in rows}):
        mine = [row for row in rows if key(row) == name]
        for half, fitted in (("fitted", True), ("held out", False)):
            some = [row for row in mine if row.case.is_fitted is fitted]
            if some:
                table.append({what: name, "half": half, **_figures(some)})
    return table


def _parallelism(case: Case) -> str:
    if "num_experts" in case.model:
        return "experts"
    bits = ", 8 bits" if case.is_fp8 else ""
    if case.pipeline > 1:
        return ("pipeline" if case.chunks == 1 else "pipeline, interleaved") + bits
    if case.context > 1:
        return "context" + bits
    return ("tensor" if case.tensor > 1 else "data, FSDP") + bits


def _tables(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    flat = _flat(rows)
    others = [
        row
        for row in rows
        if row.case.context == 1
        and row.case.chunks == 1
        and not row.case.is_fp8
        and "num_experts" not in row.case.model
    ]
    return {
        "Data parallel and FSDP, without V100": [
            {"half": half, **_figures(r for r in flat if r.case.is_fitted is fitted)}
            for half, fitted in (("fitted", True), ("held out", False))
        ],
        "By device": _by(others, "device", lambda r: r.case.device),
        "By framework": _by(others, "framework", lambda r: r.case.framework),
        "By parallelism": _by(rows, "parallelism", lambda r: _parallelism(r.case)),
        "Pipelines": _by(
            [r for r in rows if _parallelism(r.case).startswith("pipeline")],
            "framework, device",
            lambda r: (
                f"{r.case.framework}, {r.case.device}"
                f"{_parallelism(r.case).removeprefix('pipeline')}"
            ),
        ),
        "Order of plans for one step, where reports differ by 5 % or more": [_orders(rows)],
        "By sequence": _by(others, "tokens", lambda r: f"{r.case.seq_len:>7,}"),
    }


def _orders(rows: Sequence[Row]) -> dict[str, Any]:
    """Whether predictions order plans as reported steps do: of rows of one framework, device, model
    and batch, those that differ in nothing but the plan.
    """
    groups = collections.defaultdict[str, dict[Any, Row]](dict)
    for row in rows:
        case = row.case
        settings = dict(case.settings)
        recompute, _ = settings.pop("recompute"), settings.pop("scan")
        where = [case.release, case.group, case.device, case.cluster.num_devices, case.is_fp8]
        plan = [getattr(case.method, "name", ""), case.num_micro_batches, recompute]
        key = json.dumps([where, settings], sort_keys=True, default=str)
        groups[key].setdefault(json.dumps(plan), row)
    found = [list(group.values()) for group in groups.values() if len(group) > 1]
    far = [
        (slow, fast)
        for group in found
        for slow, fast in itertools.permutations(group, 2)
        if slow.case.measured_s >= (1 + _DIFFERENT) * fast.case.measured_s
    ]
    return {
        "groups": len(found),
        "pairs": len(far),
        "tau-b": round(
            tau_b([[(r.case.measured_s, r.step_s) for r in group] for group in found], _DIFFERENT),
            3,
        ),
        "in the wrong order": "; ".join(
            f"{slow.case.id} before {fast.case.id}"
            for slow, fast in far
            if slow.step_s <= fast.step_s
        )
        or "none",
    }


def _report(rows: Sequence[Row], left_out: collections.Counter[str]) -> Report:
    report = Report(
        name="public_steps",
        question="Do predicted step times hold for the accelerators that people own?",
        bar=(
            "data parallel and FSDP, held out: signed median within 6 %, median 10 %, 90 % within"
            " 25 %; pipelines: median 18 %"
        ),
        method=(__doc__ or "").split("\n\n")[1],
    )
    report.tables.update(_tables(rows))
    report.tables["Memory, where it was reported"] = [
        {
            "row": row.case.id,
            "predicted GiB": row.memory_bytes / 2**30,
            "reported GiB": row.case.measured_bytes / 2**30,
            "error": f"{row.memory_bytes / row.case.measured_bytes - 1:+.0%}",
        }
        for row in rows
        if row.case.measured_bytes
    ]
    report.tables["Rows"] = [
        {
            "row": row.case.id,
            "half": "fitted" if row.case.is_fitted else "held out",
            "method": row.case.method.name if hasattr(row.case.method, "name") else "",
            "recompute": row.case.settings["recompute"],
            "reported s": row.case.measured_s,
            "predicted s": row.step_s,
            "error": f"{row.error:+.1%}",
            **{f"{name} s": seconds for name, seconds in row.parts.items()},
            "CPU s": row.cpu_s,
        }
        for row in sorted(rows, key=lambda r: -abs(r.error))
    ]
    report.tables["Left out"] = [{"reason": why, "rows": n} for why, n in left_out.most_common()]
    return report


def _write_page(rows: Sequence[Row], left_out: collections.Counter[str]) -> None:
    page = Path(__file__).parent.parent / "docs" / "accuracy.md"
    lines = [
        "# How far predictions are from reported steps",
        "",
        "Step times of training runs that others reported, beside what aliquot predicts for the "
        "same model, cluster, parallelism, recomputation and batch. Rows are split in halves by "
        "source and model family. To one half a figure of each device was fitted, the share of "
        "single products' speed that whole steps sustain (of H100 and H200, to steps that were "
        "measured on one H100: `gpu_steps`); the other half was held out, and so were all "
        "pipelines. Two more figures come from reported steps: the share of the peak that "
        "fused attention reaches (of A100, fitted to the same half; of H100, from measured "
        "kernels; of TPUs, from before this split), and the share of "
        "collectives that runs beside compute (one for all GPUs, one for all TPUs). PyTorch's rows "
        "on H100, of 2023 and 2024, ran older libraries than JAX does: they have figures of their "
        "own, fitted to the same half. Frameworks of 2020 to 2022 run operator by operator, and "
        "most compute nothing beside collectives. Layers are scanned over where the framework does "
        "so. Rows with "
        "context parallelism, interleaved pipelines, experts or products of 8 bits are in the"
        " table by "
        "parallelism alone. Made by `benchmarks/public_steps.py`; none of these rows was measured "
        "by aliquot.",
    ]
    for title, table in _tables(rows).items():
        lines += ["", f"## {title}", "", *_markdown(table)]
    worst = sorted(rows, key=lambda r: -abs(r.error))[:12]
    lines += ["", "## The worst rows", ""]
    lines += _markdown(
        [
            {
                "row": r.case.id,
                "reported s": f"{r.case.measured_s:.3g}",
                "predicted s": f"{r.step_s:.3g}",
                "error": f"{r.error:+.0%}",
            }
            for r in worst
        ]
    )
    lines += [
        "",
        "## Rows that were left out",
        "",
        "A row may be left out for several reasons.",
        "",
    ]
    lines += _markdown([{"reason": why, "rows": n} for why, n in left_out.most_common()])
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _markdown(table: Sequence[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in table for key in row))
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return head + [f"| {' | '.join(str(row.get(c, '')) for c in columns)} |" for row in table]


if __name__ == "__main__":
    sys.exit(main())
