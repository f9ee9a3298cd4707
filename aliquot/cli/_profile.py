"""`aliquot profile`: measure operators on the devices at hand, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import InputError, parse_bytes, shortened, write_atomic
from ._devices import use_devices, use_host_only, virtual_flag
from ._groups import argument, option
from ._launch_options import LaunchOptions, joined, measured_by_others
from ._measuring import (
    Database,
    DatabaseFile,
    MeasuringOptions,
    database_of_all,
    measuring_progress,
    read_share,
    show_run,
)
from ._model_options import ModelOptions
from ._options import (
    Devices,
    Json,
    ModelName,
    ModelOfPlan,
    NetworkGbps,
    PlanFile,
    TrustPlan,
    check_destination,
    read_cluster,
    read_mesh,
    read_plan,
)
from ._session import session

if TYPE_CHECKING:
    from ..cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProgramOptions:
    """Which operators are measured, for which devices."""

    devices: Devices = None
    cluster: str | None = option(
        "Measure, on one device here, what each device of this cluster would compute: a preset"
        " or a TOML file. Collectives stay as modelled."
    )
    network_gbps: NetworkGbps = None
    mesh: str | None = option("Only this logical mesh, such as 4x2; by default all.")
    largest_in_host: str = option("Largest message inside a host.", "1GiB", metavar="SIZE")
    largest_between_hosts: str = option("Largest between hosts.", "1GiB", metavar="SIZE")


def run(
    model: ModelName,
    database: Database,
    model_options: ModelOptions,
    measuring: MeasuringOptions,
    launch_options: LaunchOptions,
    of_programs: _ProgramOptions,
    as_json: Json = False,
) -> None:
    """Measure the products, traffic and collectives that plans of a model are made of, most useful
    first. Run it again to go on.
    """
    with session(as_json) as say:
        part, timing = read_share(measuring.share), measuring.timing()
        limits = (
            parse_bytes(of_programs.largest_in_host),
            parse_bytes(of_programs.largest_between_hosts),
        )
        read_mesh(of_programs.mesh)
        if launch_options.launch is not None and of_programs.cluster is not None:
            raise InputError(
                f"--cluster {of_programs.cluster} measures what one device would compute, and"
                f" --launch {launch_options.launch} is for several that work together. Leave one of"
                " them out."
            )
        if measured_by_others(launch_options, of_programs.devices, say):
            return
        with joined(launch_options, ends_at_signals=True):
            seen = use_devices(of_programs.devices)
            from ..cluster import (
                MEASURED,
                MEASURED_COMPUTE,
                Cluster,
                logical_mesh_shapes,
            )
            from ..cost import make_problem
            from ..graph import capture
            from ..profiling import (
                alone_on_one_device,
                leads,
                profile_operators,
                required_operators,
            )
            from ._model import resolve, user_code

            here = Cluster.detect(seen)
            asked = _cluster_of_this_device(of_programs.cluster, of_programs.network_gbps, here)
            where = here if asked is None else asked
            shape = read_mesh(of_programs.mesh, where)
            built = resolve(model, model_options.read(), where)
            with user_code(built.name):
                graph = capture(built.step, built.state, built.batch)
            operators = required_operators(
                make_problem(graph, where),
                [shape] if shape is not None else logical_mesh_shapes(where.num_devices),
                largest_in_host_bytes=limits[0],
                largest_between_hosts_bytes=limits[1],
            )
            if of_programs.cluster is not None:
                operators = alone_on_one_device(operators)
            with (
                database_of_all(database) as known,
                measuring_progress(say, is_shown=leads()) as report,
            ):
                done = profile_operators(
                    operators,
                    known,
                    share=part,
                    timing=timing,
                    budget_s=measuring.budget_s,
                    grade=MEASURED if of_programs.cluster is None else MEASURED_COMPUTE,
                    progress=report,
                )
        answer = show_run(say, done, "operators")
        if not done.num_missing:
            virtual = (
                ""
                if of_programs.devices is None or of_programs.cluster
                else f"XLA_FLAGS={virtual_flag(of_programs.devices)} "
            )
            network = (
                ""
                if of_programs.network_gbps is None
                else f" --network-gbps {of_programs.network_gbps}"
            )
            # Later no process may see all hosts.
            target = of_programs.cluster or (where.name if where.num_hosts > 1 else "detect")
            say.show(
                f"Plan from them, with the same options of the model: {virtual}aliquot plan"
                f" {built.name} --cluster {target}{network} --profiles {database}"
            )
        say.finish(answer)


def _cluster_if_asked(spec: str | None, network_gbps: str | None) -> Cluster | None:
    """`read_cluster` where naming a cluster is optional.

    Raises:
        InputError: A network without a cluster that it joins.
    """
    if spec is not None:
        return read_cluster(spec, network_gbps)
    if network_gbps is not None:
        raise InputError(
            f"--network-gbps {shortened(network_gbps, 60)} is of a cluster, and none is named: add"
            " --cluster, such as --cluster 4x8xA100-80GB."
        )
    return None


def _cluster_of_this_device(
    spec: str | None, network_gbps: str | None, here: Cluster
) -> Cluster | None:
    """A cluster of which this process has one device at least; None if none is asked for.

    Raises:
        InputError: its devices are of another kind.
    """
    asked = _cluster_if_asked(spec, network_gbps)
    if asked is not None and asked.device.name != here.device.name:
        raise InputError(
            f"--cluster {spec} is made of {asked.device.name}, and this process has {here.name}."
            " One device can only stand for others of its kind: run this where there is a"
            f" {asked.device.name}, or give a cluster of {here.device.name}."
        )
    return asked


def show(
    database: DatabaseFile,
    cluster: str | None = option(
        "Whose cost model to compare with: a preset, a TOML file, or detect."
    ),
    network_gbps: NetworkGbps = None,
    plots: Path | None = option("Draw the curves into this folder.", metavar="DIR"),
    as_json: Json = False,
) -> None:
    """Show what a database holds, what is noisy in it, and how it differs from the cost model."""
    with session(as_json) as say:
        if cluster != "detect":
            use_host_only()
        from ..profiling import ProfileDatabase, describe_profiles, measured_curves
        from ..report import draw_profiles, profiles_text

        where = _cluster_if_asked(cluster, network_gbps)
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
        plan = read_plan(plan_file)
        from .._profiles import check_profiles
        from ..report import check_text
        from ._model import rebuild, user_code

        workload = rebuild(plan.model, named=model, trusted=trust_plan)
        with user_code(workload.name):
            answer = check_profiles(plan, database, workload.step, workload.state, workload.batch)
        say.show(check_text(answer))
        say.finish(answer)


def fit(
    out: Path = option("The cluster file to write.", ...),
    database: Path | None = argument("What was measured.", None, metavar="DATABASE"),
    steps: Path | None = option(
        "Fit to measured steps instead: a JSON list of models of the zoo, each with"
        " global_batch, method and step_s.",
        metavar="FILE",
    ),
    cluster: str = option("Whose figures to fit: a preset, a TOML file, or detect.", "detect"),
    network_gbps: NetworkGbps = None,
    as_json: Json = False,
) -> None:
    """Fit the figures of the cost model to measurements, and write a cluster file with them."""
    with session(as_json) as say:
        check_destination(out)
        if (database is None) == (steps is None):
            raise InputError(
                "aliquot profile fit needs either a DATABASE of measured operators, or --steps FILE"
                " with measured steps."
            )
        if cluster != "detect":
            use_host_only()
        where = read_cluster(cluster, network_gbps)
        from ..profiling import ProfileDatabase, fit_profiles, to_toml
        from ..report import fit_text

        if steps is not None:
            from .._fit_steps import fit_steps, read_steps

            with measuring_progress(say) as report:
                fitted = fit_steps(
                    read_steps(steps), where, load_cluster=read_cluster, progress=report
                )
        else:
            assert database is not None
            with ProfileDatabase(database, must_exist=True) as known:
                fitted = fit_profiles(known, where)
        write_atomic(out, to_toml(fitted))
        answer = {"figures": dict(fitted.figures), "errors": list(fitted.errors), "file": str(out)}
        say.show(fit_text(answer))
        say.show(f"\nWritten to {out}. Plan with it: aliquot plan MODEL --cluster {out}")
        say.finish(answer)


def merge(
    databases: list[Path] = argument("What other hosts have measured.", metavar="DATABASE..."),
    into: Path = option("The database that takes it over.", ..., metavar="FILE"),
    as_json: Json = False,
) -> None:
    """Take over what other databases have measured and this one has not."""
    with session(as_json) as say:
        from ..profiling import ProfileDatabase, check_database

        missing = [str(path) for path in databases if not path.exists()]
        if missing:
            raise InputError(f"There is no {', no '.join(missing)}. Nothing was merged.")
        for path in databases:
            check_database(path)
        taken: dict[str, Any] = {}
        with ProfileDatabase(into) as known:
            for path in databases:
                taken[str(path)] = known.merge(path)
            total = len(known)
        for name, count in taken.items():
            say.show(f"{count} measurements taken over from {name}")
        say.show(f"{into} holds {total}.")
        say.finish({"new": taken, "total": total})
