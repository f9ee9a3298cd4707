"""`aliquot profile`: measure operators on the devices at hand, and what follows from them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import InputError, parse_bytes, write_atomic
from ..plans import Plan
from ._devices import use_host_only, use_seen_devices, use_virtual_devices
from ._measuring import (
    BudgetS,
    LeastS,
    MostRepeats,
    Noisy,
    Repeats,
    Retries,
    Share,
    WarmUp,
    measuring_progress,
    read_share,
    read_timing,
    show_run,
)
from ._model_options import BatchSize, Dtype, Recompute, Scan, SeqLen, Settings, model_options
from ._options import (
    Json,
    ModelOfPlan,
    PlanFile,
    TrustPlan,
    check_destination,
    read_cluster,
    read_mesh,
)
from ._session import session

if TYPE_CHECKING:
    from ..cluster import Cluster

ModelName = Annotated[
    str, typer.Argument(help="A name from the zoo, or package.module:factory.", show_default=False)
]
Database = Annotated[
    Path,
    typer.Option(
        "--database", metavar="FILE", help="Where measurements are kept.", show_default=False
    ),
]
DatabaseFile = Annotated[
    Path, typer.Argument(metavar="DATABASE", help="A profile database.", show_default=False)
]
OfCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster", help="Whose cost model to compare with: a preset, a TOML file, or detect."
    ),
]


def run(
    model: ModelName,
    database: Database,
    devices: Annotated[
        int | None,
        typer.Option(
            help="Virtual CPU devices; by default all devices that JAX sees.", show_default=False
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help=(
                "Measure, on one device here, what each device of this cluster would compute: a"
                " preset or a TOML file. "
                "Collectives stay as modelled."
            ),
            show_default=False,
        ),
    ] = None,
    global_batch: BatchSize = None,
    mesh: Annotated[
        str | None, typer.Option(help="Only this logical mesh, such as 4x2; by default all.")
    ] = None,
    seq_len: SeqLen = None,
    dtype: Dtype = None,
    recompute: Recompute = None,
    scan: Scan = False,
    settings: Settings = None,
    share: Share = "1/1",
    repeats: Repeats = 5,
    most_repeats: MostRepeats = 1000,
    least_s: LeastS = 0.2,
    warm_up: WarmUp = 2,
    retries: Retries = 1,
    noisy: Noisy = 0.3,
    budget_s: BudgetS = math.inf,
    largest_in_host: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest message inside a host.")
    ] = "1GiB",
    largest_between_hosts: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest between hosts.")
    ] = "1GiB",
    as_json: Json = False,
) -> None:
    """Measure the products, traffic and collectives that plans of a model are made of, most useful
    first. Run it again to go on.
    """
    with session(as_json) as say:
        part = read_share(share)
        timing = read_timing(
            repeats, most_repeats, warm_up=warm_up, least_s=least_s, retries=retries, noisy=noisy
        )
        limits = parse_bytes(largest_in_host), parse_bytes(largest_between_hosts)
        seen = use_seen_devices() if devices is None else use_virtual_devices(devices)
        from ..cluster import MEASURED, MEASURED_COMPUTE, Cluster, logical_mesh_shapes
        from ..cost import make_problem
        from ..graph import capture
        from ..profiling import (
            ProfileDatabase,
            alone_on_one_device,
            profile_operators,
            required_operators,
        )
        from ._model import resolve, user_code

        here = Cluster.detect(seen)
        where = here if cluster is None else _cluster_of_this_device(cluster, here)
        options, _ = model_options(global_batch, seq_len, dtype, recompute, scan, settings, None)
        built = resolve(model, options, where)
        with user_code(built.name):
            graph = capture(built.step, built.state, built.batch)
        shape = read_mesh(mesh)
        if shape is not None and math.prod(shape) != where.num_devices:
            raise InputError(
                f"--mesh {mesh} has {math.prod(shape)} devices, {where.name} has"
                f" {where.num_devices}."
            )
        operators = required_operators(
            make_problem(graph, where),
            [shape] if shape is not None else logical_mesh_shapes(where.num_devices),
            largest_in_host_bytes=limits[0],
            largest_between_hosts_bytes=limits[1],
        )
        if cluster is not None:
            operators = alone_on_one_device(operators)
        with ProfileDatabase(database) as known, measuring_progress() as report:
            done = profile_operators(
                operators,
                known,
                share=part,
                timing=timing,
                budget_s=budget_s,
                grade=MEASURED if cluster is None else MEASURED_COMPUTE,
                progress=report,
            )
        answer = show_run(say, done, "operators")
        if not done.num_missing:
            say.show(
                f"Plan from them with: aliquot plan {built.name} --cluster {cluster or 'detect'}"
                f" --profiles {database}"
            )
        say.finish(answer)


def _cluster_of_this_device(spec: str, here: Cluster) -> Cluster:
    """A cluster of which this process has one device at least.

    Raises:
        InputError: its devices are of another kind.
    """
    asked = read_cluster(spec)
    if asked.device.name != here.device.name:
        raise InputError(
            f"--cluster {spec} is made of {asked.device.name}, and this process has {here.name}."
            " One device can only stand for others of its kind: run this where there is a"
            f" {asked.device.name}, or give a cluster of {here.device.name}."
        )
    return asked


def show(
    database: DatabaseFile,
    cluster: OfCluster = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw the curves into this folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a database holds, what is noisy in it, and how it differs from the cost model."""
    with session(as_json) as say:
        if cluster != "detect":
            use_host_only()
        from ..profiling import ProfileDatabase, describe_profiles, measured_curves
        from ..report import draw_profiles, profiles_text

        where = None if cluster is None else read_cluster(cluster)
        with ProfileDatabase(database, must_exist=True) as known:
            answer = describe_profiles(known, where)
            curves = measured_curves(known)
        say.show(profiles_text(answer))
        written = draw_profiles(curves, plots) if plots is not None else []
        if plots is not None:
            say.show(f"\nCurves are in {plots}: {', '.join(path.name for path in written)}.")
        say.finish({**answer, "curves": curves, "plots": [str(path) for path in written]})


def check(
    plan_file: PlanFile,
    database: Database,
    model: ModelOfPlan = None,
    trust_plan: TrustPlan = False,
    as_json: Json = False,
) -> None:
    """Show the share of a plan's time that a database covers, and what is missing."""
    with session(as_json) as say:
        use_host_only()
        plan = Plan.load(plan_file)
        from .._profiles import check_profiles
        from ..report import check_text
        from ._model import rebuild, user_code

        workload = rebuild(plan.model, named=model, trusted=trust_plan)
        with user_code(workload.name):
            answer = check_profiles(plan, database, workload.step, workload.state, workload.batch)
        say.show(check_text(answer))
        say.finish(answer)


def fit(
    database: DatabaseFile,
    out: Annotated[Path, typer.Option(help="The cluster file to write.", show_default=False)],
    cluster: Annotated[
        str, typer.Option(help="Whose figures to fit: a preset, a TOML file, or detect.")
    ] = "detect",
    as_json: Json = False,
) -> None:
    """Fit the figures of the cost model to measurements, and write a cluster file with them."""
    with session(as_json) as say:
        check_destination(out)
        if cluster != "detect":
            use_host_only()
        where = read_cluster(cluster)
        from ..profiling import ProfileDatabase, fit_profiles, to_toml
        from ..report import fit_text

        with ProfileDatabase(database, must_exist=True) as known:
            fitted = fit_profiles(known, where)
        write_atomic(out, to_toml(fitted))
        answer = {"figures": dict(fitted.figures), "errors": list(fitted.errors), "file": str(out)}
        say.show(fit_text(answer))
        say.show(f"\nWritten to {out}. Plan with it: aliquot plan MODEL --cluster {out}")
        say.finish(answer)


def merge(
    databases: Annotated[
        list[Path],
        typer.Argument(
            metavar="DATABASE...", help="What other hosts have measured.", show_default=False
        ),
    ],
    into: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The database that takes it over.", show_default=False),
    ],
    as_json: Json = False,
) -> None:
    """Take over what other databases have measured and this one has not."""
    with session(as_json) as say:
        from ..profiling import ProfileDatabase

        missing = [str(path) for path in databases if not path.exists()]
        if missing:
            raise InputError(f"There is no {', no '.join(missing)}. Nothing was merged.")
        taken: dict[str, Any] = {}
        with ProfileDatabase(into) as known:
            for path in databases:
                taken[str(path)] = known.merge(path)
            total = len(known)
        for name, count in taken.items():
            say.show(f"{count} measurements taken over from {name}")
        say.show(f"{into} holds {total}.")
        say.finish({"new": taken, "total": total})
