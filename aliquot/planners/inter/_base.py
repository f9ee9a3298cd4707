"""The interface of inter planners, and the limits that their answers must keep to."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...core import InfeasibleError, InputError, counted, nearest
from ...cost import AbstractChain, ChainPlan, StageChoice, StageMemory, find_stage_faults
from ...plans import training_schedules
from .._helper import HelperProcess

"""The work that a search has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """Limits that the answer must keep to; None leaves a choice to the planner.

    Attributes:
        num_stages: the number of stages, interleaved ones counted one by one.
        schedule: a name of `plans.SCHEDULES`.
        faster_than_s: stages that take this long or longer are of no use: a planner may leave them
            out and raise `NoFasterStages`, or still return them.

    Raises:
        InputError: fewer than one stage, or no such schedule.
    """

    num_stages: int | None = None
    schedule: str | None = None
    faster_than_s: float = math.inf

    def __post_init__(self) -> None:
        if self.num_stages is not None and self.num_stages < 1:
            raise InputError(f"{self.num_stages} stages were asked for; a pipeline has at least 1.")
        if self.schedule is not None and self.schedule not in training_schedules():
            raise InputError(
                f"There is no schedule {self.schedule!r}:"
                f" {nearest(self.schedule, training_schedules())}"
            )


NO_LIMITS = StageLimits()


class NoFasterStages(InfeasibleError):
    """Stages may fit, but none were found that take less than `StageLimits.faster_than_s`."""


class AbstractInter(abc.ABC):
    """A way to cut a chain into stages. Inter planners are frozen, pure and deterministic: no
    devices, clocks or files.
    """

    @abc.abstractmethod
    def solve(
        self,
        chains: Sequence[AbstractChain],
        *,
        limits: StageLimits = NO_LIMITS,
        helper: HelperProcess | None = None,
        start: ChainPlan | None = None,
    ) -> ChainPlan:
        """Stages, with their submeshes and options, a number of micro-batches and a schedule.

        Args:
            chains: of the same step and cluster, one for each number of micro-batches to choose
                from.
            limits: the limits that the stages must keep to; `check_limits` has accepted them.
            helper: a second process that may take part; answers must not depend on it.
            start: stages to start from, such as those of another planner; the answer is no slower.
                A planner whose answer follows from its settings ignores them.

        Raises:
            InfeasibleError: nothing fits; describes the stages that need the least memory.
            NoFasterStages: nothing takes less than `limits.faster_than_s`.
            InputError: the chains do not go together, or the planner cannot keep to the limits.
        """

    @property
    def method(self) -> str:
        """The short name that plans show for a method with this planner."""
        return "pipeshard"

    @property
    def own_way(self) -> str:
        """A verb phrase for messages on how it chooses stages and schedule itself: "tries ..."."""
        return "has its own number of stages and schedule"

    @property
    def searches(self) -> bool:
        """True if it searches for the fastest stages; one stage, or one program, may then be the
        answer.
        """
        return False

    @property
    def of_whole_layers(self) -> bool:
        """True if its stages have equally many layers, so that no operator can be its unit."""
        return False

    @property
    def asked_stages(self) -> int | None:
        """The number of stages that its settings ask for; None if they leave it open."""
        return None

    def for_one_search(self) -> AbstractInter:
        """The planner to use for all solves of one search, which then share a limit on work; by
        default itself.
        """
        return self

    def check_limits(self, limits: StageLimits) -> None:
        """Refuse limits that this planner cannot keep to; by default, all. Raises `InputError`."""
        limited = [name for name in ("num_stages", "schedule") if getattr(limits, name) is not None]
        if limited:
            raise InputError(
                f"{' and '.join(limited)}: a planner that searches stages, such as StageDP, keeps"
                f" to these; {type(self).__name__} has its own. Leave them out."
            )

    def required_profiles(self, chains: Sequence[AbstractChain]) -> tuple[str, ...]:
        """Names of measurements that this planner needs and the chains lack; none by default."""
        return ()


def check_chains(chains: Sequence[AbstractChain]) -> None:
    """Refuse chains that are not of one step on one cluster. Raises `InputError`."""
    if not chains:
        raise InputError(
            "No chain was given to be cut into stages: give one for each number of micro-batches to"
            " try."
        )
    facts = {(c.num_units, c.num_hosts, c.devices_per_host) for c in chains}
    counts = [c.num_micro_batches for c in chains]
    if len(facts) > 1:
        listed = ", ".join(f"{u} units on {h}x{d} devices" for u, h, d in sorted(facts))
        raise InputError(
            f"The chains to choose from are of different steps or clusters ({listed}); give those"
            " of one."
        )
    if len(set(counts)) < len(counts):
        raise InputError(
            f"Two chains have the same number of micro-batches ({counts}); give each number once."
        )


def check_num_stages(chain: AbstractChain, num_stages: int | None) -> None:
    """Refuse more stages than there are units. Raises `InputError`."""
    if num_stages is None:
        return
    if num_stages > chain.num_units:
        count = chain.num_units
        fewer = (
            f"Ask for num_stages={count} (--stages {count}) or less"
            if count > 1
            else "Use a method without stages"
        )
        raise InputError(
            f"{num_stages} stages were asked for, but the step has {counted(count, 'layer')}, and a"
            f" stage holds one at least.\n  {fewer}, or ask for more layers: name them by a pattern"
            " of parameter paths, or cut between operators (layers='operators', --layers"
            " operators)."
        )


def starts_in(
    chains: Sequence[AbstractChain],
    start: ChainPlan | None,
    schedules: Sequence[str],
    num_stages: int | None,
) -> list[ChainPlan]:
    """The plan to start from, perhaps of another planner, if it is among those searched."""
    if start is None or start.schedule not in schedules:
        return []
    its_chains = [c for c in chains if c.num_micro_batches == start.num_micro_batches]
    if not its_chains or num_stages not in (None, len(start.stages)):
        return []
    faults = find_stage_faults(
        its_chains[0], start.stages, start.schedule, num_submeshes=start.num_submeshes
    )
    return [] if faults else [start]


def proposed(
    chain: AbstractChain,
    option: int,
    first: int,
    last: int,
    *,
    first_device: int,
    in_flight: float,
    chunks: int = 1,
) -> StageChoice | None:
    """A stage as its chain proposes it (see `AbstractChain.propose`), within the memory limit if
    possible, so that errors can say how much it needs; None if the option cannot run its units.
    """
    for limit_bytes in (chain.memory_limit_bytes, math.inf):
        memory = StageMemory(in_flight=in_flight, limit_bytes=limit_bytes, chunks=chunks)
        choice = chain.propose(option, first, last, first_device=first_device, memory=memory)
        if choice is not None:
            return choice
    return None


def no_layout(chain: AbstractChain, num_stages: int | None) -> str:
    """The reason why there are no stages even without a memory limit."""
    sizes = ", ".join(sorted({f"{o.submesh[0]}x{o.submesh[1]}" for o in chain.options}))
    subject = "no stages use" if num_stages is None else f"no {num_stages} stages use"
    return (
        f"With the submeshes offered ({sizes}), {subject} all of"
        f" {chain.num_hosts}x{chain.devices_per_host} devices and run all {chain.num_units}"
        " units.\n  Offer submeshes that fill the cluster, such as one of all devices, or another"
        " number of stages."
    )


class WorkLeft:
    """The number of table entries that the solves of one search may still compute."""

    def __init__(self, limit: float) -> None:
        self.left = limit

    def spend(self, work: float) -> None:
        """Subtract work; what is left never goes below zero."""
        self.left = max(0.0, self.left - work)
