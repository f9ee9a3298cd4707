"""The problem that planners solve: a step to be split over a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..cluster import Cluster, Target, target_for
from ..graph import Graph, ValueId
from ..sharding import NodeGraph, build_nodes, index_nodes, runs_in_groups
from ._host_copies import HostCopy, find_copies
from ._repeated import repeated_operators
from ._work import Work, count_work
from .memory import (
    Held,
    Resident,
    find_storage,
    held_arrays,
    made_arrays,
    residents,
    stored_by_fusion,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """A step to be split over a cluster.

    Attributes:
        graph: the step, traced at the size of one micro-batch.
        nodes: the decisions to make, as a graph.
        work: arithmetic and memory traffic of each node.
        residents: arrays in memory, with their live ranges.
        copies: copies between device and host memory.
        held: arrays that weight gradients read, for schedules that defer these.
        made: for a stage or a layer, arrays that its forward pass makes or that enter it.
        kept: for a stage or a layer, those of them that are kept for its backward pass, if that
            repeats nothing that takes long; otherwise None.
        cluster: the cluster that the step runs on.
        num_micro_batches: how often forward and backward run in a step.
        memory_limit_bytes: memory that a plan may use on each device.
        whole: the step on its whole batch; None if unknown.
        semantics: of several micro-batches, see `plan_micro_batches`; "exact" for a single one.
    """

    graph: Graph
    nodes: NodeGraph
    work: tuple[tuple[Work, ...], ...] = field(repr=False)
    residents: tuple[Resident, ...] = field(repr=False)
    held: tuple[Held, ...] = field(repr=False)
    copies: tuple[HostCopy, ...] = field(repr=False)
    cluster: Cluster
    num_micro_batches: int
    memory_limit_bytes: float
    whole: Graph | None = field(default=None, repr=False)
    semantics: str = "exact"
    made: Mapping[ValueId, Held] = field(default_factory=dict, repr=False)
    kept: tuple[Held, ...] | None = field(default=None, repr=False)

    def runs_in_groups(self, num_groups: int) -> bool:
        """True if each of `num_groups` groups of devices can take a share of every micro-batch and
        accumulate its own gradients until the last one. Without `whole`, this is assumed.
        """
        if self.whole is None or num_groups == 1:
            return True
        return runs_in_groups(
            self.whole,
            self.num_micro_batches,
            num_groups,
            semantics=self.semantics,
            on_missing_rule=self.nodes.on_missing_rule,
        )

    @property
    def target(self) -> Target:
        """The cluster's compiler and runtime."""
        return target_for(self.cluster.device)


def make_problem(
    graph: Graph,
    cluster: Cluster,
    *,
    num_micro_batches: int = 1,
    memory_limit_bytes: float | None = None,
    on_missing_rule: str = "infer",
    repeats: bool = True,
    whole: Graph | None = None,
    semantics: str = "exact",
    of_stage: bool = False,
) -> Problem:
    """The problem of a step traced at the size of one micro-batch. Raises `MissingRuleError`.

    Args:
        memory_limit_bytes: by default the memory that the device's runtime leaves to programs.
        on_missing_rule: see `dim_rule`.
        repeats: fold equal layers into one decision.
        whole, semantics: see `Problem`.
        of_stage: the graph is a stage of a pipeline, or a layer, whose passes are programs of their
            own.
    """
    target = target_for(cluster.device)
    sums_gradients = num_micro_batches > 1
    index = index_nodes(graph, repeats=repeats, on_missing_rule=on_missing_rule)
    nodes = build_nodes(index, target, sums_gradients=sums_gradients, passes_apart=of_stage)
    storage = find_storage(index.cuts, target, sums_gradients=sums_gradients)
    limit = (
        target.usable_bytes(cluster.device) if memory_limit_bytes is None else memory_limit_bytes
    )
    made = made_arrays(index) if of_stage else {}
    kept = None
    if of_stage:
        kept = tuple([made[value] for value in repeated_operators(graph, frozenset()).kept])
    return Problem(
        graph=graph,
        nodes=nodes,
        work=count_work(index, storage),
        residents=tuple(residents(index, storage, target, sums_gradients=sums_gradients)),
        # The runtime decides what halves of a backward pass hand on, whatever compilers do.
        held=tuple(held_arrays(index, stored_by_fusion(index.cuts))),
        copies=find_copies(index, storage.stored, cluster.device, target),
        cluster=cluster,
        num_micro_batches=num_micro_batches,
        memory_limit_bytes=float(limit),
        whole=whole,
        semantics=semantics if sums_gradients else "exact",
        made=made,
        kept=kept,
    )
