"""Search on fewer hosts of a cluster: a small step may be faster if some hosts stay idle.

The network between hosts, or collectives among more devices, can cost a small step more time than
the further devices save. The search on fewer hosts treats them as a smaller cluster and finds the
plan that it would find if the other hosts did not exist, so that a step is never slower on more
hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..core import CaptureError, InfeasibleError, InputError, counted
from ..graph import Role
from ._base import Candidate, Decision, Interrupted, Task, faster
from ._quick_bounds import least_compute_s
from ._tried import on_hosts

# Hosts are left idle only if that shortens the step by more than this share.
_LEAST_GAIN = 1e-3

Search = Callable[[Task, float], Decision]
"""Finds the best decision for a task. Only one that takes less than the given seconds is of use: if
there is none, it may raise `InfeasibleError`."""


def fastest_on_any_hosts(task: Task, first: Decision, search: Search) -> Decision:
    """The fastest among the decision for all hosts and those that a search finds for fewer hosts.

    A number of hosts is tried only if their devices could compute the step in less time than the
    best decision so far takes, sharing it evenly and without communication, and if they can hold
    the state.

    Args:
        first: the decision for all hosts.

    Raises:
        Interrupted: Ctrl-C; carries the fastest so far.
    """
    total = task.cluster.num_hosts
    best, tried = first, list[Candidate]()
    if total == 1 or not task.may_idle:
        return best
    least_s = least_compute_s(task.problem(1)) * total
    for hosts in fewer_hosts(total):
        aim_s = best.step_time_s * (1 - _LEAST_GAIN)
        # Even fewer hosts would take longer.
        if least_s / hosts >= aim_s:
            break
        part = task.on_hosts(hosts)
        if _state_bytes(task) > part.limit_bytes * part.cluster.num_devices:
            break
        try:
            found = search(part, aim_s)
        except (InfeasibleError, InputError, CaptureError):
            continue
        except Interrupted as interrupted:
            known = interrupted.decision
            interrupted.decision = faster(best, known and _on(hosts, total, known))
            raise
        if found.step_time_s < aim_s:
            tried.append(_slower(best, total - best.idle_hosts))
            best = _on(hosts, total, found)
        else:
            tried.append(_slower(found, hosts))
    return replace(best, candidates=(*best.candidates, *tried)) if tried else best


def fewer_hosts(total: int) -> list[int]:
    """Numbers of hosts below `total` that are tried: its half, quarter, ... and the powers of two,
    from the largest down. Twice the total has all of them, too, and the total itself.
    """
    halves = {total >> k for k in range(1, total.bit_length())}
    powers = {1 << k for k in range(total.bit_length())}
    return sorted((n for n in halves | powers if 0 < n < total), reverse=True)


def _on(hosts: int, total: int, decision: Decision) -> Decision:
    scope = decision.bound_holds_for
    return replace(
        decision,
        idle_hosts=total - hosts,
        bound_holds_for=f"{scope} on {counted(hosts, 'host')}" if scope else "",
    )


def _slower(decision: Decision, hosts: int) -> Candidate:
    return Candidate(
        name=on_hosts(decision.method, hosts),
        mesh="",
        lower_bound_s=None,
        step_time_s=decision.step_time_s,
        outcome="slower",
    )


def _state_bytes(task: Task) -> int:
    """Bytes of the arrays that live from one step to the next, summed over all devices if each
    array is held once.
    """
    values = task.graph.values
    return sum(values[i.value].num_bytes for i in task.graph.inputs if i.role is not Role.BATCH)
