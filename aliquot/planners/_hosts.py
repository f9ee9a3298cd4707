"""Plans on fewer hosts of a cluster: a small step may be faster if some hosts stay idle.

The network between hosts, or collectives among more devices, can cost a small step more time than
the further devices save. The search on fewer hosts treats them as a smaller cluster and finds the
plan that it would find if the other hosts did not exist, so that a step is never slower on more
hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ._base import Task
from ._search import AbstractFamily, Search

Families = Callable[[Task], Sequence[AbstractFamily]]
"""The families of plans of a task on all hosts of its cluster."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Hosts(AbstractFamily):
    """The plans on a number of hosts, and on fewer.

    Attributes:
        task: the step on these hosts.
        of: the step on the whole cluster.
        families: makes the families of plans on a number of hosts.
        fewer: the other numbers of hosts, from the largest down.
    """

    task: Task
    of: Task
    families: Families
    fewer: Sequence[int]
    lower_bound_s: float

    @classmethod
    def below(cls, task: Task, families: Families, least_s: float) -> list[Hosts]:
        """The family of the plans on fewer hosts than a task has; none if no host may be idle.

        Args:
            least_s: the least that the step takes on all hosts.
        """
        if not task.may_idle:
            return []
        counts = fewer_hosts(task.cluster.num_hosts)
        whole = cls(task=task, of=task, families=families, fewer=counts, lower_bound_s=least_s)
        return whole._next()

    def open(self, search: Search) -> Iterable[AbstractFamily]:
        """See `AbstractFamily.open`. What does not fit on all hosts is not tried on fewer."""
        # Problems that were made since then are reused.
        task = self.of.on_hosts(self.task.cluster.num_hosts)
        if search.best is None or not task.holds_state:
            return ()
        return (*self.families(task), *self._next())

    def _next(self) -> list[Hosts]:
        if not self.fewer:
            return []
        hosts, *fewer = self.fewer
        # Compute at best is shared evenly by fewer devices.
        least_s = self.lower_bound_s * self.task.cluster.num_hosts / hosts
        task = self.of.on_hosts(hosts)
        return [replace(self, task=task, fewer=fewer, lower_bound_s=least_s)]


def fewer_hosts(total: int) -> list[int]:
    """Numbers of hosts below `total` that are tried: its half, quarter, ... and the powers of two,
    from the largest down. Twice the total has all of them, too, and the total itself.
    """
    halves = {total >> k for k in range(1, total.bit_length())}
    powers = {1 << k for k in range(total.bit_length())}
    return sorted((n for n in halves | powers if 0 < n < total), reverse=True)
