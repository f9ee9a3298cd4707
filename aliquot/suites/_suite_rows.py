"""The rows of a suite, case by case, and what is delivered of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..cluster import Cluster
from ..core import InputError, format_seconds, shortened
from ..planners import Progress
from ._make_row import Phase, Timing, predicted_row
from ._plan_case import part_of
from ._results import Results
from ._rows import GIVEN, HEADINGS, OURS, Row, as_cells, shown_columns, throughput_series
from ._suite import Case, Suite

_LEFT_OUT = ("type", "metadata", "reason", "plan_file", "usable_gb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked of a suite.

    Attributes:
        cases: of the suite, that are asked for.
        where: the cluster to plan for; None if cases are run on devices that are here.
        every_size: whether cases for parts of it are made, too.
        searches: whether there is a row of our own plan beside each given one.
        verify: whether plans are compiled for the devices of `where`.
        mode: how cases are run, if they are: rows of other modes are others.
        time_limit_s: that each plan for `where` may take; None for no limit.
    """

    suite: Suite
    cases: Sequence[Case]
    where: Cluster | None
    every_size: bool
    searches: bool
    verify: bool
    mode: str
    timing: Timing
    time_limit_s: float | None = None

    @property
    def what(self) -> str:
        """What is done with each case, where."""
        if self.where is None:
            return self.mode
        return f"predicted for {self.where.name}" + (", verified" if self.verify else "")

    def key(self, case: Case, plan_of: str) -> str:
        """Of a row in the journal. A case that was changed has another."""
        return f"{self.what}, {self.timing}: {plan_of} of {case}"


def mode_of(small: bool, launch: str | None) -> str:
    """How cases are run: small or in full, in one process or in several."""
    mode = "small" if small else "run"
    return f"{mode}, {launch}" if launch else mode


def plans_folder(folder: Path | None) -> Path | None:
    """Where the plans of a folder of results are, which is made; None without one.

    Raises:
        InputError: it cannot be made.
    """
    if folder is None:
        return None
    try:
        (folder / "plans").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder / 'plans'} cannot be made: {error.strerror}.") from None
    return folder / "plans"


def make_suite_rows(
    request: Request,
    results: Results,
    *,
    measure: Callable[[Case, str], Row],
    note: Callable[[str], None],
    progress: Progress,
) -> dict[str, Any]:
    """Rows of all cases as plain data, shown as a table and a chart.

    Args:
        measure: runs a plan of a case, where `request.where` is None.
        note: told of each phase and each row.

    Raises:
        InputError: no case is for the devices that are asked for.
    """
    plans = plans_folder(results.folder)
    rows, skipped = [], []
    for case in request.cases:
        if reason := _not_here(request, case):
            note(f"skipped: {request.suite.name} {case.number}, {reason}")
            skipped.append({"case": case.number, "reason": reason})
            continue
        for plan_of in _plans_of(case, request.searches):

            def make(case: Case = case, plan_of: str = plan_of) -> dict[str, Any]:
                if request.where is None:
                    return asdict(measure(case, plan_of))
                where = part_of(request.where, case.num_devices)
                assert where is not None
                phase = phases(case, plan_of, note)
                return asdict(
                    predicted_row(
                        case,
                        plan_of,
                        where,
                        plans,
                        phase=phase,
                        progress=progress,
                        verify=request.verify,
                        time_limit_s=request.time_limit_s,
                    )
                )

            progress(f"{case.suite} {case.number} ({plan_of})", 0, 0)
            row = Row(**results.row(request.key(case, plan_of), make))
            seconds = row.mean_s or row.predicted_s
            shown = f", {format_seconds(seconds)}" if seconds else ""
            why = f": {shortened(row.reason, 300)}" if row.reason else ""
            note(f"{row.case}, {row.plan_of}: {row.outcome}{shown}{why}")
            rows.append(row)
    if not rows:
        raise InputError(
            f"no case of {request.suite.name} is for these devices. Add --every-size for those on"
            " parts of them, or name a larger cluster."
        )
    title = f"{request.suite.name}, {request.what}"
    points, series = throughput_series(rows)
    if series and len(points) > 1:
        results.lines("rows", title, "devices", "1e12 operations per second", points, series)
    heads = [HEADINGS[name] for name in shown_columns(rows) if name not in _LEFT_OUT]
    results.table("rows", title, as_cells(rows), request.suite.about, shown=heads, tabs=True)
    results.write_page()
    return {
        "suite": request.suite.name,
        "mode": request.what,
        "rows": [asdict(row) for row in rows],
        "skipped": skipped,
    }


def phases(case: Case, plan_of: str, note: Callable[[str], None]) -> Phase:
    """What tells of the phases of a row."""
    label = f"{case.suite} {case.number} ({plan_of})"
    return lambda what, seconds: note(f"{label}: {what} {format_seconds(seconds)}")


def _plans_of(case: Case, searches: bool) -> Sequence[str]:
    if case.not_expressible:
        return (GIVEN,)
    if case.searches:
        return (OURS,)
    return (GIVEN, OURS) if searches else (GIVEN,)


def _not_here(request: Request, case: Case) -> str:
    """Why a case is not for the devices that are asked for; empty if it is."""
    if request.where is None:
        return ""
    if part_of(request.where, case.num_devices) is None:
        return f"it needs {case.num_devices} devices: {request.where.name} has no such part"
    if not request.every_size and case.num_devices != request.where.num_devices:
        return f"it is for {case.num_devices} devices; --every-size takes it, too"
    return ""
