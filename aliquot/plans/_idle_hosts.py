"""Hosts that a plan leaves idle: how many devices they have, and which processes may run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core import PlanMismatchError, counted
from ._plan import Plan


def plan_devices(plan: Plan) -> int:
    """Number of devices of the plan's cluster, without those of idle hosts; 0 if the description is
    unusable.
    """
    hosts, each = plan.cluster.get("num_hosts"), plan.cluster.get("devices_per_host")
    return hosts * each if isinstance(hosts, int) and isinstance(each, int) else 0


def idle_devices(plan: Plan) -> int:
    """Number of devices of the hosts that the plan leaves idle."""
    each = plan.cluster.get("devices_per_host")
    return plan.idle_hosts * each if isinstance(each, int) else 0


def require_busy_processes(plan: Plan, devices: Sequence[Any]) -> None:
    """Refuse processes that have only devices of idle hosts: with nothing to do, they could not
    take part in a step.

    Args:
        devices: those of all processes, in the cluster's order; the plan uses the first ones.

    Raises:
        PlanMismatchError: says on which hosts to start processes.
    """
    if not plan.idle_hosts:
        return
    busy = {device.process_index for device in devices[: plan_devices(plan)]}
    idle = sorted({device.process_index for device in devices} - busy)
    if not idle:
        return
    hosts = int(plan.cluster["num_hosts"])
    which = "the first host" if hosts == 1 else f"the first {hosts} hosts"
    raise PlanMismatchError(
        f"the plan leaves {counted(plan.idle_hosts, 'host')} of {hosts + plan.idle_hosts} idle, and"
        f" process{'es' if len(idle) > 1 else ''} {', '.join(map(str, idle))} of"
        f" {len(idle) + len(busy)} would have nothing to do",
        asked="the plan does not fit these processes",
        advice=(
            f"Start processes on {which} only, or make the plan in this run, where all hosts are"
            " used."
        ),
    )
