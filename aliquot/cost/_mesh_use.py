"""`MeshUse`: a mesh, and what some of its axes are for."""

from __future__ import annotations

from dataclasses import dataclass

from ..cluster import Cluster, LogicalMesh
from ..plans import StagePlan
from ..sharding import Edge, NodeCollective


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshUse:
    """A mesh, and what some of its axes, by position, are for; see `StagePlan`.

    Attributes:
        data_axes: those that split nothing but the batch, so that gradients are summed over them
            once, after the last micro-batch.
        context_axes: the axis that splits the sequence, if gradients wait over it, too.
        gathers_once: whether casts of parameters are gathered over these axes once in a step.
    """

    mesh: LogicalMesh
    data_axes: frozenset[int] = frozenset()
    context_axes: frozenset[int] = frozenset()
    gathers_once: bool = False

    @classmethod
    def of_stage(cls, stage: StagePlan, cluster: Cluster) -> MeshUse:
        """How a stage of a plan uses its part of a cluster."""
        names = stage.axis_names
        return cls(
            mesh=LogicalMesh(shape=stage.mesh_shape, axis_names=names, cluster=cluster),
            data_axes=frozenset(map(names.index, stage.data_axes)),
            context_axes=frozenset(map(names.index, stage.context_axes)),
            gathers_once=stage.gathers_once,
        )

    def under(self, semantics: str) -> MeshUse:
        """The same with no axes over which gradients wait where micro-batches are independent, as
        each sums its own.
        """
        return MeshUse(mesh=self.mesh) if semantics == "independent" else self

    def waits_over(self, gradient: Edge | NodeCollective) -> frozenset[int]:
        """The axes over which gradients are summed after the last micro-batch. Those of products
        over all tokens wait over the axis that splits the sequence, too.
        """
        return self.data_axes | self.context_axes if gradient.over_tokens else self.data_axes
