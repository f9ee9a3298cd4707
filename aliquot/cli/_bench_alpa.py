"""`aliquot bench alpa` and `aliquot bench list`: suites of benchmarks, planned or run case by
case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from ..core import InputError
from ._devices import use_devices, use_host_only, use_virtual_devices
from ._groups import argument, option
from ._launch_options import LaunchOptions, joined, launch_again
from ._options import Json, NetworkGbps, read_cluster, read_time_limit
from ._own_process import RunsHere, row_of_own_process
from ._progress import search_progress
from ._session import Session, session

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..suites import Case, Suite, Timing

# The machines that Alpa was measured on.
_MACHINE = "8xV100-16GB"
_VIRTUAL = 8

SuitesFile = Annotated[
    Path | None, option("A TOML file with suites of your own, added.", metavar="FILE")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What is done with each case."""

    title: ClassVar[str] = "Cases"

    predict: bool = option("Plan every case and predict it; no hardware.", False)
    small: bool = option(
        "Run every case with a tiny model on at most 8 virtual devices, and compare its losses"
        " with one device's.",
        False,
    )
    search: bool = option("A row of our own plan beside each given one.", False)
    verify: bool = option("With --predict: compile each plan for its devices.", False)
    time_limit: str | None = option(
        "With --predict: the time for each plan, such as 60s, after which the best so far is the"
        " row, or that there was none.",
        metavar="TIME",
    )
    niter: int = option("Steps that are timed.", 3, min=1)
    warmup: int = option("Steps before those that are timed.", 1, min=1)
    profile_driver_time: bool = option(
        "Issue all timed steps at once, without waiting for each.", False
    )

    @property
    def timing(self) -> Timing:
        """How steps are timed."""
        from ..suites import Timing

        return Timing(
            warmup=self.warmup,
            repeats=self.niter,
            barrier=not self.profile_driver_time,
            compares=self.small,
        )

    def check(self) -> None:
        """Raise `InputError` for options that do not go together."""
        if self.predict and self.small:
            raise InputError("--predict runs nothing, and --small runs: leave one out.")
        if self.verify and not self.predict:
            raise InputError("--verify compiles what --predict plans: add --predict.")
        if self.time_limit is not None and not self.predict:
            raise InputError("--time-limit is for what --predict plans: add --predict.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _CaseOptions:
    """Which cases of a suite are planned, for which devices, and where rows are written."""

    case: list[int] | None = option("Only this case; repeatable.")
    cluster: str | None = option(
        "Devices to plan for, and cases for as many as it has; by default every size on"
        f" machines of {_MACHINE}. Without --launch, --num-hosts and"
        " --num-devices-per-host take a part of it."
    )
    network_gbps: NetworkGbps = None
    every_size: bool = option("Also cases for parts of the cluster.", False)
    out: Path | None = option(
        "Folder for plans, rows as TSV and a chart; rows that are there are not made again.",
        metavar="DIR",
    )
    suites: SuitesFile = None
    runs_here: RunsHere = ""


def alpa(
    *,
    suite: str = argument(
        "A name that `aliquot bench list` shows, or gpt, moe, wresnet.", metavar="SUITE"
    ),
    run: RunOptions,
    launch_options: LaunchOptions,
    of_cases: _CaseOptions,
    as_json: Json = False,
) -> None:
    """Plan or run the cases of a suite of Alpa's, or of your own: Alpa's columns, then what is
    predicted and published.

    Alpa's own plans are made plans of ours, saved, and judged; --search adds ours beside them. What
    is run is run in a process of its own for each case.
    """
    launch = launch_options.launch
    with session(as_json) as say:
        run.check()
        time_limit_s = read_time_limit(run.time_limit)
        part = launch_options if launch is None else LaunchOptions()
        replace(
            launch_options, **({} if launch else {"num_hosts": None, "num_devices_per_host": None})
        ).check(devices=None, has_plan=False)
        if launch is not None and run.predict:
            raise InputError(f"--launch {launch}: --predict runs nothing. Leave one out.")
        if of_cases.network_gbps is not None and not run.predict:
            raise InputError(
                f"--network-gbps {of_cases.network_gbps} is of a cluster to plan for: add"
                " --predict."
            )
        if run.predict or (run.small and launch is None):
            use_host_only()
        from ..suites import (
            Request,
            Results,
            Row,
            failed_row,
            find_cases,
            find_suite,
            make_suite_rows,
            mode_of,
        )

        chosen = find_suite(suite, _suites(of_cases.suites))
        cases = find_cases(chosen, tuple(of_cases.case or ()))
        if of_cases.runs_here:
            _run_here(cases[0], of_cases.runs_here, run, of_cases.out, launch_options, say)
            return
        where = None
        if run.predict:
            where = _cluster(of_cases, chosen, part)

        def measure(case: Case, plan_of: str) -> Row:
            found = row_of_own_process(case.number, plan_of)
            return failed_row(case, plan_of, found) if isinstance(found, str) else Row(**found)

        with search_progress(say) as report:
            answer = make_suite_rows(
                Request(
                    suite=chosen,
                    cases=cases,
                    where=where,
                    every_size=of_cases.every_size or (of_cases.cluster is None and _whole(part)),
                    searches=run.search,
                    verify=run.verify,
                    mode=mode_of(run.small, launch),
                    timing=run.timing,
                    time_limit_s=time_limit_s,
                ),
                Results(of_cases.out, say.show, title=chosen.name),
                measure=measure,
                note=say.note,
                progress=report,
            )
        say.finish(answer)


def list_suites(
    suite: str | None = argument("A suite whose cases are shown.", None, metavar="[SUITE]"),
    suites: SuitesFile = None,
    as_json: Json = False,
) -> None:
    """List the suites of benchmarks, or the cases of one."""
    with session(as_json) as say:
        from ..report import Column, table
        from ..suites import find_suite

        known = _suites(suites)
        if suite is not None:
            found = find_suite(suite, known)
            say.show(
                table(
                    f"{found.name}: {found.about}",
                    found.cases,
                    Column("case", "number", number=True),
                    Column("model", "model"),
                    Column("devices", "num_devices", number=True),
                    Column("batch", "global_batch", number=True),
                    Column("micro-batches", "num_micro_batches", number=True),
                    Column("plan", lambda case: case.not_expressible or case.parallel),
                )
            )
            say.finish({"suite": found.name, "cases": [asdict(c) for c in found.cases]})
            return
        rows = []
        for each in known.values():
            devices = sorted({case.num_devices for case in each.cases})
            rows.append(
                {
                    "suite": each.name,
                    "cases": len(each.cases),
                    "devices": devices,
                    "kind": each.kind,
                    "about": each.about,
                }
            )
        say.show(
            table(
                "Suites of benchmarks",
                rows,
                Column("suite", "suite"),
                Column("cases", "cases", number=True),
                Column("devices", "devices", lambda sizes: ", ".join(map(str, sizes))),
                Column("plan", "kind"),
                Column("about", "about"),
            )
        )
        say.finish({"suites": rows})


def _suites(path: Path | None) -> Mapping[str, Suite]:
    from ..suites import alpa_suites, load_suites

    return {**alpa_suites(), **(load_suites(path) if path is not None else {})}


def _whole(part: LaunchOptions) -> bool:
    return part.num_hosts is None and part.num_devices_per_host is None


def _cluster(asked: _CaseOptions, suite: Suite, part: LaunchOptions) -> Cluster:
    """The cluster, or the part of it that is asked for; by default as many machines as the largest
    case of the suite needs.
    """
    from ..cluster import subcluster

    most, per_machine = max(c.num_devices for c in suite.cases), int(_MACHINE.partition("x")[0])
    name = asked.cluster or f"{-(-most // per_machine)}x{_MACHINE}"
    whole = read_cluster(name, asked.network_gbps)
    hosts = part.num_hosts or (whole.num_hosts if _whole(part) else 1)
    per_host = part.num_devices_per_host or whole.devices_per_host
    if hosts > whole.num_hosts or per_host > whole.devices_per_host:
        raise InputError(
            f"--num-hosts {hosts} --num-devices-per-host {per_host}: {whole.name} has"
            f" {whole.num_hosts} hosts with {whole.devices_per_host} devices each."
        )
    return subcluster(whole, (hosts, per_host))


def _run_here(
    case: Case,
    plan_of: str,
    run: RunOptions,
    out: Path | None,
    launch_options: LaunchOptions,
    say: Session,
) -> None:
    """Run one plan of one case in this process, or as one of several."""
    from ..suites import measured_row, phases, plans_folder, small_case

    if launch_options.starts_others:
        launch_again(launch_options, None, say, all_say_the_same=True)
        return
    if run.small:
        case = small_case(case, _VIRTUAL)
    with joined(launch_options, ends_at_signals=True):
        virtual = run.small and launch_options.launch is None
        devices = use_virtual_devices(case.num_devices) if virtual else use_devices(None)
        if len(devices) < case.num_devices:
            raise InputError(
                f"the case needs {case.num_devices} devices, and there are {len(devices)}."
            )
        row = measured_row(
            case,
            plan_of,
            devices,
            plans_folder(out),
            timing=run.timing,
            phase=phases(case, plan_of, say.note),
        )
        say.finish({"row": asdict(row)})
