"""What every inter planner is, and what it is given."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from ...core import InputError
from ...cost import Chain, ChainPlan


class AbstractInter(abc.ABC):
    """A way to cut a chain into stages. Inter planners are frozen, pure and deterministic: no devices, clocks or files."""

    @abc.abstractmethod
    def solve(self, chains: Sequence[Chain]) -> ChainPlan:
        """Stages, with their submeshes and options, a number of micro-batches and a schedule.

        Args:
            chains: of the same step and cluster, one for each number of micro-batches to choose from.

        Raises:
            InfeasibleError: Nothing fits; what needs least is described.
            InputError: The chains, or what is wanted of them, cannot be planned.
        """


def check_chains(chains: Sequence[Chain]) -> None:
    """Refuse chains that are not of one step on one cluster. Raises `InputError`."""
    if not chains:
        raise InputError("No chain was given to be cut into stages: give one for each number of micro-batches to try.")
    facts = {(c.num_units, c.num_hosts, c.devices_per_host) for c in chains}
    counts = [c.num_micro_batches for c in chains]
    if len(facts) > 1:
        listed = ", ".join(f"{u} units on {h}x{d} devices" for u, h, d in sorted(facts))
        raise InputError(f"The chains to choose from are of different steps or clusters ({listed}); give those of one.")
    if len(set(counts)) < len(counts):
        raise InputError(f"Two chains have the same number of micro-batches ({counts}); give each number once.")
