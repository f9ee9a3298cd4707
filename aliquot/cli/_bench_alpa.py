"""`aliquot bench alpa` and `aliquot bench list`: suites of benchmarks, planned or run case by
case.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import InputError, Journal, format_seconds, shortened, write_atomic
from ._devices import use_devices, use_host_only, use_virtual_devices
from ._groups import takes_groups
from ._launch_options import Engine, LaunchOptions, joined, launch_again, starts_others
from ._options import Json, NetworkGbps, read_cluster
from ._progress import search_progress
from ._session import Session, session

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..suites import Case, Suite, Timing

# The machines that Alpa was measured on.
_MACHINE = "8xV100-16GB"
_VIRTUAL = 8

SuitesFile = Annotated[
    Path | None,
    typer.Option("--suites", metavar="FILE", help="A TOML file with suites of your own, added."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What is done with each case."""

    predict: Annotated[
        bool, typer.Option("--predict", help="Plan every case and predict it; no hardware.")
    ] = False
    small: Annotated[
        bool,
        typer.Option(
            "--small",
            help=(
                "Run every case with a tiny model on at most 8 virtual devices, and compare its"
                " losses with one device's."
            ),
        ),
    ] = False
    search: Annotated[
        bool, typer.Option("--search", help="A row of our own plan beside each given one.")
    ] = False
    verify: Annotated[
        bool, typer.Option("--verify", help="With --predict: compile each plan for its devices.")
    ] = False
    niter: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 3
    warmup: Annotated[int, typer.Option(min=1, help="Steps before those that are timed.")] = 1
    profile_driver_time: Annotated[
        bool,
        typer.Option(
            "--profile-driver-time",
            help="Issue all timed steps at once, without waiting for each.",
        ),
    ] = False

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


@takes_groups
def alpa(
    suite: Annotated[
        str,
        typer.Argument(
            metavar="SUITE", help="A name that `aliquot bench list` shows, or gpt, moe, wresnet."
        ),
    ],
    run: RunOptions,
    launch_options: LaunchOptions,
    case: Annotated[
        list[int] | None, typer.Option("--case", help="Only this case; repeatable.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help=(
                "Devices to plan for, and cases for as many as it has; by default every size on"
                f" machines of {_MACHINE}. Without --launch, --num-hosts and"
                " --num-devices-per-host take a part of it."
            ),
            show_default=False,
        ),
    ] = None,
    network_gbps: NetworkGbps = None,
    every_size: Annotated[
        bool, typer.Option("--every-size", help="Also cases for parts of the cluster.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=(
                "Folder for plans, rows as TSV and a chart; rows that are there are not made again."
            ),
        ),
    ] = None,
    suites: SuitesFile = None,
    launch: Engine = None,
    plan_of: Annotated[str, typer.Option("--plan-of", hidden=True)] = "",
    as_json: Json = False,
) -> None:
    """Plan or run the cases of a suite of Alpa's, or of your own: Alpa's columns, then what is
    predicted and published.

    Alpa's own plans are made plans of ours, saved, and judged; --search adds ours beside them. What
    is run is run in a process of its own for each case.
    """
    with session(as_json) as say:
        from ..suites import find_cases, find_suite

        run.check()
        part = launch_options if launch is None else LaunchOptions()
        replace(
            launch_options,
            **({} if launch else {"num_hosts": None, "num_devices_per_host": None}),
        ).check(launch, devices=None, has_plan=False)
        if launch is not None and run.predict:
            raise InputError(f"--launch {launch}: --predict runs nothing. Leave one out.")
        if network_gbps is not None and not run.predict:
            raise InputError(
                f"--network-gbps {network_gbps} is of a cluster to plan for: add --predict."
            )
        chosen = find_suite(suite, _suites(suites))
        request = _Request(
            suite=chosen,
            cases=find_cases(chosen, tuple(case or ())),
            run=run,
            where=None
            if not run.predict
            else _cluster(cluster or _machines(chosen), network_gbps, part),
            every_size=every_size or cluster is None and _whole(part),
            out=out,
        )
        if plan_of:
            _run_here(request, plan_of, launch, launch_options, say)
            return
        if run.predict:
            use_host_only()
        _make_rows(request, say)


def list_suites(
    suite: Annotated[
        str | None, typer.Argument(metavar="[SUITE]", help="A suite whose cases are shown.")
    ] = None,
    suites: SuitesFile = None,
    as_json: Json = False,
) -> None:
    """List the suites of benchmarks, or the cases of one."""
    with session(as_json) as say:
        from ..report import columns
        from ..suites import find_suite

        known = _suites(suites)
        if suite is not None:
            found = find_suite(suite, known)
            cases = [
                (str(c.number), c.model, str(c.num_devices), str(c.global_batch))
                + (str(c.num_micro_batches), c.not_expressible or c.parallel)
                for c in found.cases
            ]
            header = ("case", "model", "devices", "batch", "micro-batches", "plan")
            say.show(columns(f"{found.name}: {found.about}", header, cases, right=(0, 2, 3, 4)))
            say.finish({"suite": found.name, "cases": [asdict(c) for c in found.cases]})
            return
        sizes = {s.name: sorted({c.num_devices for c in s.cases}) for s in known.values()}
        rows = [
            (s.name, str(len(s.cases)), ", ".join(map(str, sizes[s.name])), s.kind, s.about)
            for s in known.values()
        ]
        heads = ("suite", "cases", "devices", "plan", "about")
        say.show(columns("Suites of benchmarks", heads, rows, right=(1,)))
        say.finish(
            {
                "suites": [
                    {
                        "suite": s.name,
                        "cases": len(s.cases),
                        "devices": sizes[s.name],
                        "kind": s.kind,
                        "about": s.about,
                    }
                    for s in known.values()
                ]
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What is asked for. `where` is the cluster to plan for; None for the devices here."""

    suite: Suite
    cases: Sequence[Case]
    run: RunOptions
    where: Cluster | None
    every_size: bool
    out: Path | None

    @property
    def mode(self) -> str:
        """What is done with each case, where: rows of other modes are others."""
        if self.where is not None:
            return f"predicted for {self.where.name}" + (", verified" if self.run.verify else "")
        return "small" if self.run.small else "run"

    def key(self, case: Case, plan_of: str) -> str:
        """Of a row in the journal. A case that was changed has another."""
        return f"{self.mode}, {self.run.timing}: {plan_of} of {case}"


def _suites(path: Path | None) -> Mapping[str, Suite]:
    from ..suites import alpa_suites, load_suites

    return {**alpa_suites(), **(load_suites(path) if path is not None else {})}


def _whole(part: LaunchOptions) -> bool:
    return part.num_hosts is None and part.num_devices_per_host is None


def _machines(suite: Suite) -> str:
    """As many machines as the largest case of a suite needs."""
    per_machine = int(_MACHINE.partition("x")[0])
    most = max(case.num_devices for case in suite.cases)
    return f"{-(-most // per_machine)}x{_MACHINE}"


def _cluster(name: str, network_gbps: str | None, part: LaunchOptions) -> Cluster:
    """The cluster, or the part of it that is asked for."""
    from ..cluster import subcluster

    whole = read_cluster(name, network_gbps)
    hosts = part.num_hosts or (whole.num_hosts if _whole(part) else 1)
    per_host = part.num_devices_per_host or whole.devices_per_host
    if hosts > whole.num_hosts or per_host > whole.devices_per_host:
        raise InputError(
            f"--num-hosts {hosts} --num-devices-per-host {per_host}: {whole.name} has"
            f" {whole.num_hosts} hosts with {whole.devices_per_host} devices each."
        )
    return subcluster(whole, (hosts, per_host))


def _make_rows(request: _Request, say: Session) -> None:
    from ..suites import GIVEN, OURS, Row

    journal = Journal(_prepared(request.out))
    # What failed is tried again: another row of the same key takes its place.
    journal.rows = {k: r for k, r in journal.rows.items() if r["outcome"] != "failed"}
    rows, skipped = [], []
    for case in request.cases:
        if reason := _not_here(request, case):
            say.note(f"skipped: {request.suite.name} {case.number}, {reason}")
            skipped.append({"case": case.number, "reason": reason})
            continue
        for plan_of in (
            [OURS]
            if case.searches and not case.not_expressible
            else [GIVEN, OURS]
            if request.run.search and not case.not_expressible
            else [GIVEN]
        ):
            make = _maker(request, case, plan_of, say)
            row = Row(**journal.row(request.key(case, plan_of), make))
            say.note(_line(row))
            rows.append(row)
    if not rows:
        raise InputError(
            f"no case of {request.suite.name} is for these devices. Add --every-size for those on"
            " parts of them, or name a larger cluster."
        )
    _deliver(request, rows, skipped, say)


def _prepared(folder: Path | None) -> Path | None:
    """The journal of a folder, which is made."""
    if folder is None:
        return None
    try:
        (folder / "plans").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder} cannot be made: {error.strerror}.") from None
    return folder / "rows.jsonl"


def _not_here(request: _Request, case: Case) -> str:
    """Why a case is not for the devices that are asked for; empty if it is."""
    from ..suites import part_of

    if request.where is None:
        return ""
    if part_of(request.where, case.num_devices) is None:
        return f"it needs {case.num_devices} devices: {request.where.name} has no such part"
    if not request.every_size and case.num_devices != request.where.num_devices:
        return f"it is for {case.num_devices} devices; --every-size takes it, too"
    return ""


def _maker(
    request: _Request, case: Case, plan_of: str, say: Session
) -> Callable[[], dict[str, Any]]:
    """What makes a row, as plain data: here, or in a process of its own if it is run."""
    from ..suites import part_of, predicted_row, small_case

    label = f"{case.suite} {case.number} ({plan_of})"

    def predict() -> dict[str, Any]:
        assert request.where is not None
        where = part_of(request.where, case.num_devices)
        assert where is not None
        with search_progress(say) as report:
            row = predicted_row(
                case,
                plan_of,
                where,
                _plans(request.out),
                phase=_phases(label, say),
                progress=report,
                verify=request.run.verify,
            )
        return asdict(row)

    if request.where is not None:
        return predict
    return lambda: _in_a_process(small_case(case, _VIRTUAL) if request.run.small else case, plan_of)


def _plans(out: Path | None) -> Path | None:
    return None if out is None else out / "plans"


def _phases(label: str, say: Session) -> Callable[[str, float], None]:
    return lambda what, seconds: say.note(f"{label}: {what} {format_seconds(seconds)}")


def _in_a_process(case: Case, plan_of: str) -> dict[str, Any]:
    """The row of a case that this command makes in another process; of one that fails, what it said
    last.
    """
    from ..suites import failed_row

    command = [sys.executable, "-m", "aliquot", *_without_cases(sys.argv[1:])]
    command += ["--case", str(case.number), "--plan-of", plan_of, "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stderr is not None and process.stdout is not None
        said: list[str] = []
        for line in process.stderr:
            said = [*said[-4:], line.strip()]
            print(line, end="", file=sys.stderr, flush=True)
        answer = process.stdout.read()
    if process.returncode == 0 and answer:
        row: dict[str, Any] = json.loads(answer)["row"]
        return row
    last = shortened(" / ".join(said), 400)
    reason = f"its process ended with exit code {process.returncode}: {last}"
    return asdict(failed_row(case, plan_of, reason))


def _without_cases(arguments: Sequence[str]) -> list[str]:
    kept: list[str] = []
    given = iter(arguments)
    for argument in given:
        if argument == "--case":
            next(given, None)
        elif argument != "--json" and not argument.startswith("--case="):
            kept.append(argument)
    return kept


def _run_here(
    request: _Request,
    plan_of: str,
    launch: str | None,
    launch_options: LaunchOptions,
    say: Session,
) -> None:
    """Run one plan of one case in this process, or as one of several."""
    from ..suites import measured_row, small_case

    if launch is not None and starts_others(launch):
        launch_again(launch, launch_options, None, say, all_say_the_same=True)
        return
    (case,) = request.cases
    if request.run.small:
        case = small_case(case, _VIRTUAL)
    with joined(launch, ends_at_signals=True):
        virtual = request.run.small and launch is None
        devices = use_virtual_devices(case.num_devices) if virtual else use_devices(None)
        if len(devices) < case.num_devices:
            raise InputError(
                f"the case needs {case.num_devices} devices, and there are {len(devices)}."
            )
        row = measured_row(
            case,
            plan_of,
            devices,
            _plans(request.out),
            timing=request.run.timing,
            phase=_phases(f"{case.suite} {case.number} ({plan_of})", say),
        )
        say.finish({"row": asdict(row)})


def _line(row: Any) -> str:
    seconds = row.mean_s or row.predicted_s
    shown = f", {format_seconds(seconds)}" if seconds else ""
    reason = f": {shortened(row.reason, 300)}" if row.reason else ""
    return f"{row.case}, {row.plan_of}: {row.outcome}{shown}{reason}"


def _deliver(
    request: _Request, rows: Sequence[Any], skipped: Sequence[Mapping[str, Any]], say: Session
) -> None:
    from ..report import columns, line_chart
    from ..suites import HEADINGS, as_tsv, shown_columns, throughput_series

    left_out = ("type", "metadata", "reason", "plan_file", "usable_gb")
    names = [name for name in shown_columns(rows) if name not in left_out]
    cells = [[_shown(getattr(row, name)) for name in names] for row in rows]
    right = [
        k for k, name in enumerate(names) if any(isinstance(getattr(r, name), float) for r in rows)
    ]
    title = f"{request.suite.name}, {request.mode}"
    say.show(columns(title, [HEADINGS[n] for n in names], cells, right=right, narrow=True))
    if request.out is not None:
        write_atomic(request.out / "rows.tsv", as_tsv(rows))
        points, series = throughput_series(rows)
        say.show(f"\nwritten: {request.out / 'rows.tsv'}, and plans beside it")
        if series and len(points) > 1:
            line_chart(
                request.out / "throughput.png",
                title=title,
                horizontal="devices",
                unit="1e12 operations per second",
                points=points,
                series=series,
            )
    say.finish(
        {
            "suite": request.suite.name,
            "mode": request.mode,
            "rows": [asdict(row) for row in rows],
            "skipped": list(skipped),
        }
    )


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
