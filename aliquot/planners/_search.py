"""The search of every method: best first over families of plans.

A family is a set of plans that are searched together, such as the step as one program, its
pipelines, or both on half of the hosts. It opens into smaller families and finished plans. The best
plan so far, what was tried, why families have no plan, the helper process and Ctrl-C are kept here,
once for all of them.

Plans on fewer hosts are families, too: the network between hosts, or collectives among more
devices, can cost a small step more time than the further devices save. The search on fewer hosts
treats them as a smaller cluster and finds the plan that it would find if the other hosts did not
exist, so that a step is never slower on more hosts.
"""

from __future__ import annotations

import abc
import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..core import CaptureError, InfeasibleError, InputError, counted
from ._base import Candidate, Decision, Interrupted, Task
from ._helper import HelperProcess
from ._tried import on_hosts, tried_decision

# Hosts are left idle only if that shortens the step by more than this share.
_LEAST_GAIN = 1e-3
# The search of a step with fewer operators ends before a helper process is ready.
_MANY_OPS = 1000
_ONE_PROGRAM_SCOPES = {
    "all copies of all layers": "",
    "gap_within_folded_space": " that split all repeated layers the same way",
    "gap_within_blocks": " that split each product by some option of its ParallelBlock",
    "gap_within_neighbourhood": " with choices near the solutions of coarser meshes",
}


def one_program_scope(decision: Decision) -> str:
    """Words for the plans among which the lower bound of one program holds: never pipelines, even
    if these were searched, too.
    """
    if not decision.bound_holds_for:
        return ""
    parts = counted(decision.num_micro_batches, "micro-batch")
    shown = f"plans without a pipeline in {parts}"
    return shown + _ONE_PROGRAM_SCOPES.get(
        decision.bound_holds_for, f", {decision.bound_holds_for}"
    )


class AbstractFamily(abc.ABC):
    """Plans of a step that are searched together.

    Attributes:
        task: the step and the hosts that these plans use.
        lower_bound_s: no plan of the family takes less. A family that cannot beat the best plan is
            not opened.
        expected_s: about as long as its best plan takes; infinite if nothing is known. The family
            with the least is opened first, and it decides nothing else.
        must_open: whether the user asked for just these plans: errors other than a lack of memory
            then end the search.
    """

    task: Task
    lower_bound_s: float = 0.0
    expected_s: float = math.inf
    must_open: bool = False

    @abc.abstractmethod
    def open(self, search: Search) -> Iterable[AbstractFamily]:
        """Search the family: `search.add` takes the plans that are found, and the families that are
        left are returned.

        Raises:
            InfeasibleError, InputError, CaptureError: why the family has no plan.
            KeyboardInterrupt: Ctrl-C.
        """


Refusal = InfeasibleError | InputError | CaptureError
"""Why a family has no plan."""


@dataclass(slots=True, kw_only=True, eq=False)
class Search:
    """A best-first search for the fastest plan of a task.

    Attributes:
        task: the step and the whole cluster.
        relative_gap: families that cannot take less than the best plan by more than this share are
            not opened.
        faster_than_s: plans that take this long or longer are of no use.
        best: the fastest plan so far.
        slower: the other plans, each with its number of hosts; what they were decided from, which
            is large, is not kept.
        tried: what else plans shall say was tried, or was not, each with its number of hosts.
        refusals: families that have no plan, each with the error that says why.
    """

    task: Task
    relative_gap: float = 0.0
    faster_than_s: float = math.inf
    best: Decision | None = None
    slower: list[tuple[int, Candidate]] = field(default_factory=list)
    tried: list[tuple[int, Candidate]] = field(default_factory=list)
    refusals: list[tuple[AbstractFamily, Refusal]] = field(default_factory=list)
    _resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)
    _helper: HelperProcess | None = None

    def run(self, families: Sequence[AbstractFamily], method: str = "") -> Decision | None:
        """Open families until none is left that may be faster, and return the best plan; None if
        there is none, for which `refusals` say why.

        Args:
            families: those that the method allows.
            method: the name that the plan states as its method; by default that of its family.

        Raises:
            InputError, CaptureError: of a family that must be opened.
            Interrupted: Ctrl-C, with the best plan so far.
        """
        numbers = itertools.count()
        frontier: list[tuple[float, int, int, AbstractFamily]] = []

        def push(families: Iterable[AbstractFamily]) -> None:
            for each in families:
                # Of families of which nothing is known, those on more hosts come first.
                hosts = each.task.cluster.num_hosts
                heapq.heappush(frontier, (each.expected_s, -hosts, next(numbers), each))

        push(families)
        with self._resources:
            try:
                while frontier:
                    family = heapq.heappop(frontier)[-1]
                    to_beat_s = self.to_beat_s(family.task) * (1 - self.relative_gap)
                    if family.lower_bound_s >= to_beat_s:
                        continue
                    try:
                        push(family.open(self))
                    except (InfeasibleError, InputError, CaptureError) as error:
                        if family.must_open and not isinstance(error, InfeasibleError):
                            raise
                        self.refusals.append((family, error))
            except KeyboardInterrupt as stopped:
                # What the search of a stage has found is no plan of the step.
                raise Interrupted(self.best and self._written(self.best, method)) from stopped
        return self.best and self._written(self.best, method)

    def refusal_of(self, *kinds: type[AbstractFamily]) -> Refusal | None:
        """Why the first family of some kinds that was refused has no plan; None if none was."""
        return next((error for family, error in self.refusals if isinstance(family, kinds)), None)

    def to_beat_s(self, task: Task) -> float:
        """The step time below which a plan of a task is of use: one that leaves more hosts idle
        than the best so far must be clearly faster.
        """
        if self.best is None:
            return self.faster_than_s
        leaves_more = task.cluster.num_hosts < self._hosts(self.best)
        share = 1 - _LEAST_GAIN if leaves_more else 1.0
        return min(self.faster_than_s, self.best.step_time_s * share)

    def add(self, decision: Decision, task: Task) -> None:
        """Add a plan of a task, on all hosts of the search or on fewer."""
        is_better = self.best is None or decision.step_time_s < self.to_beat_s(task)
        if self.best and self.best.status == "interrupted":
            # The finished search of a program may end with the plan that it had when it paused.
            is_better = decision.step_time_s <= self.best.step_time_s
        if decision.pipeline is None:
            decision = replace(decision, combine=task.combine(decision.num_micro_batches))
        idle_hosts = self.task.cluster.num_hosts - task.cluster.num_hosts
        decision = replace(decision, idle_hosts=idle_hosts)
        slower = self.best if is_better else decision
        if is_better:
            self.best = decision
        if slower is not None and slower.status != "interrupted":
            self.slower.append((self._hosts(slower), tried_decision(slower, "slower")))

    def mention(self, candidate: Candidate, task: Task) -> None:
        """Let plans on as many hosts as a task has list what was tried, or was not."""
        self.tried.append((task.cluster.num_hosts, candidate))

    @property
    def helper(self) -> HelperProcess:
        """The second process, which the first use starts if there is enough work for it."""
        if self._helper is None:
            wanted = len(self.task.graph.ops) >= _MANY_OPS
            self._helper = self._resources.enter_context(HelperProcess(wanted=wanted))
        return self._helper

    def _hosts(self, decision: Decision) -> int:
        return self.task.cluster.num_hosts - decision.idle_hosts

    def _written(self, best: Decision, method: str) -> Decision:
        """The best plan as one of the method, with all else that was tried among its candidates."""
        method = method or best.method
        hosts = self._hosts(best)
        own = best.candidates if best.pipeline is None else (tried_decision(best, "simulated"),)
        beside = [each for on, each in (*self.slower, *self.tried) if on == hosts]
        fastest_s: dict[int, float] = {}
        for on, each in self.slower:
            assert each.step_time_s is not None
            fastest_s[on] = min(each.step_time_s, fastest_s.get(on, math.inf))
        beside += [
            Candidate(name=on_hosts(method, on), step_time_s=step_time_s, outcome="slower")
            for on, step_time_s in sorted(fastest_s.items(), reverse=True)
            if on != hosts
        ]
        scope = best.bound_holds_for
        if best.pipeline is None:
            scope = one_program_scope(best)
        if scope and best.idle_hosts:
            scope = f"{scope} on {counted(hosts, 'host')}"
        return replace(best, method=method, bound_holds_for=scope, candidates=(*own, *beside))


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
        """The plans on this number of hosts, then on fewer; what does not fit on all hosts is not
        tried on fewer.
        """
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
