"""Planning from measurements: read those of a cluster's devices, and measure the operators that the
best plan still lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ._plan_options import PlanOptions
from .cluster import MEASURED, MEASURED_COMPUTE, Cluster
from .core import InputError, nearest
from .cost import estimate
from .graph import Graph, capture
from .planners import apply_plan
from .plans import Plan

_MOST_ROUNDS = 10


def with_profiles(cluster: Cluster, profiles: str | Path, *, of_any: bool = False) -> Cluster:
    """The cluster with a database's measurements of its devices. Touches no device.

    Raises:
        InputError: there is no such database, or it holds no measurements of such devices.
    """
    from .profiling import ProfileDatabase, read_measured

    with ProfileDatabase(profiles, must_exist=True) as database:
        return replace(cluster, measured=read_measured(database, cluster, of_any=of_any))


def plan_measured(find: Callable[[Cluster], Plan], graph: Graph, asked: PlanOptions) -> Plan:
    """The plan that `find` makes for the cluster with the measurements of a database.

    With `measure`, the operators of the best plan that the database lacks are measured and the step
    is planned again, until the best plan lacks none, but at most ten times. Prices of operators
    that were not measured are corrected by the nearest measurement.

    Raises:
        InputError: a smaller share of the plan was measured than required; or with `measure`, the
            cluster's devices are not those of this process.
    """
    from .profiling import (
        LAUNCH,
        Operator,
        ProfileDatabase,
        operators_of_plan,
        profile_operators,
    )

    cluster, profiles, grade = asked.cluster, asked.profiles, asked.require_grade
    assert cluster is not None and profiles is not None
    if grade not in (MEASURED, MEASURED_COMPUTE):
        raise InputError(f"require_grade={grade!r}: {nearest(grade, (MEASURED, MEASURED_COMPUTE))}")
    if asked.measure:
        here = Cluster.detect()
        if (here.device.name, here.num_devices) != (cluster.device.name, cluster.num_devices):
            raise InputError(
                "To measure, the plan must be for the devices of this process: they are"
                f" {here.name}, and the plan is for {cluster.name}. Use --cluster detect, or"
                " measure there and copy the database."
            )
        # Measure a launch and one operator if the database lacks them, so that it can be read.
        alone = (cluster.num_devices,)
        with ProfileDatabase(profiles) as database:
            profile_operators(
                [(LAUNCH, alone), (Operator("traffic", "float32", (1 << 20,)), alone)], database
            )
    for _ in range(_MOST_ROUNDS if asked.measure else 1):
        measured = with_profiles(cluster, profiles, of_any=asked.profiles_of_any)
        best = find(measured)
        if not asked.measure:
            break
        planned = apply_plan(best, graph, asked.on_missing_rule, measured.measured)
        with ProfileDatabase(profiles) as database:
            missing = operators_of_plan(planned)
            run = profile_operators(missing, database, budget_s=math.inf, progress=asked.progress)
        if not run.num_measured:
            break
    _require(best, asked.require_measured, grade, profiles)
    return best


def _require(plan: Plan, least: float, grade: str, profiles: str | Path) -> None:
    """Raise InputError if a smaller share of a plan was measured than required."""
    measured, alone = plan.prediction.measured_share, plan.prediction.measured_compute_share
    counts_alone = grade == MEASURED_COMPUTE
    if measured + alone * counts_alone >= least:
        return
    also = ""
    if alone:
        also = f" and {alone:.0%} on one device alone (grade {MEASURED_COMPUTE}"
        also += ")" if counts_alone else f", which counts with --require-grade {MEASURED_COMPUTE})"
    raise InputError(
        f"{measured:.0%} of the plan's compute and communication was measured{also}, and"
        f" {least:.0%} is required. Measure what it needs: aliquot profile run MODEL --database"
        f" {profiles}, or plan with measure=True (--measure)."
    )


def check_profiles(
    plan: Plan, profiles: str | Path, step: Callable[..., Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Coverage of a plan's time by a database, as plain data: the share that was measured and its
    error, the step time with and without the measurements, and the missing operators, most useful
    first.

    Args:
        step, *args, **kwargs: what the plan was made for.

    Raises:
        InputError: there is no such database, or it holds no measurements of such devices.
        PlanMismatchError: the plan was made for another step.
    """
    from .profiling import ProfileDatabase, fitting_rows, is_measured, operators_of_plan

    graph = capture(step, *args, **kwargs)
    cluster = with_profiles(Cluster.from_dict(plan.cluster), profiles)
    with_them = estimate(apply_plan(plan, graph, measured=cluster.measured))
    planned = apply_plan(plan, graph)
    operators = operators_of_plan(planned)
    with ProfileDatabase(profiles) as database:
        rows, _ = fitting_rows(database, cluster)
    # Operators that the launch of a program hides count as measured, though they keep their
    # modelled time.
    held = {(str(operator), key.mesh_shape if operator.axes else ()) for operator, key, _ in rows}
    missing = [
        (operator, shape)
        for operator, shape in operators
        if (str(operator), shape if operator.axes else ()) not in held
        and not is_measured(operator, shape, cluster)
    ]
    return {
        "measured_share": with_them.measured_share,
        "measured_compute_share": with_them.measured_compute_share,
        "measured_error": with_them.measured_error,
        "step_time_s": with_them.step_time_s,
        "modelled_step_time_s": estimate(planned).step_time_s,
        "operators": len(operators),
        "missing": len(missing),
        "most_wanted": [(str(operator), "x".join(map(str, shape))) for operator, shape in missing],
    }
