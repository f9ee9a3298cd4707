"""A step together with its plan: cut as the plan says, with the plan's choices for every stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..cluster import Cluster
from ..graph import Graph, OpId, Phase, StageId
from ..plans import SCHEDULES, Plan, Prediction, StagePlan
from ..sharding import (
    Choice,
    LayeredStep,
    NodeId,
    PipelineCut,
    StagedStep,
    cut_pipeline,
    operators_of,
)
from ._estimate import check_choices, decode_interior, predict
from ._mesh_use import MeshUse
from ._picked import Picked
from ._priced import price, work_seconds
from ._problem import Problem
from ._stages import PipelinePrediction, predict_stages, price_stage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedStage:
    """One stage: its operators on its part of the cluster, the plan's choice for each of its nodes,
    and the products that the backward pass may recompute.
    """

    problem: Problem
    choices: tuple[Choice, ...]
    repeat: frozenset[NodeId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedStep:
    """A step and its plan.

    Attributes:
        plan: the decisions.
        graph: the step on its whole batch; for a pipeline, with its scans cut as the plan says.
        stages: one for each stage of the plan.
        layered, staged: how the step was cut into the stages of a pipeline; None for one program.
    """

    plan: Plan
    graph: Graph = field(repr=False)
    stages: tuple[PlannedStage, ...]
    layered: LayeredStep | None = None
    staged: StagedStep | None = None
    _cut: list[PipelineCut] = field(init=False, default_factory=list, repr=False)

    def cut(self) -> PipelineCut:
        """Programs of a pipeline's stages, without devices; made once and kept."""
        if not self._cut:
            plan, staged = self.plan, self.staged
            assert staged is not None
            groups = [
                math.prod(
                    dict(zip(stage.axis_names, stage.mesh_shape, strict=True))[axis]
                    for axis in stage.data_axes
                )
                for stage in plan.stages
            ]
            cut = cut_pipeline(
                staged.graph,
                staged.staging,
                # Without micro-batches no gradients are accumulated, so that stages need no
                # data-parallel groups.
                groups if plan.num_micro_batches > 1 else [1] * len(groups),
                num_micro_batches=plan.num_micro_batches,
                split_backward=SCHEDULES[plan.schedule].splits_backward,
                recompute=self._recompute(),
                casts_once=frozenset(
                    StageId(k) for k, stage in enumerate(plan.stages) if stage.casts_once
                ),
                semantics=plan.micro_batch_semantics,
                on_missing_rule=self.stages[0].problem.nodes.on_missing_rule,
            )
            self._cut.append(cut)
        return self._cut[0]

    def _recompute(self) -> dict[StageId, frozenset[OpId] | None]:
        """For each stage that recomputes, the operators that its backward program may recompute;
        None for all.
        """
        assert self.staged is not None
        recomputed: dict[StageId, frozenset[OpId] | None] = {}
        stages = zip(self.plan.stages, self.stages, self.staged.extracts, strict=True)
        for k, (planned, stage, extract) in enumerate(stages):
            if planned.recompute == "stage":
                recomputed[StageId(k)] = None
            elif planned.recompute == "operators":
                recomputed[StageId(k)] = frozenset(
                    extract.ops[op] for op in operators_of(stage.problem.nodes, stage.repeat)
                )
        return recomputed

    @classmethod
    def of_program(
        cls, plan: Plan, graph: Graph, problem: Problem, choices: Sequence[Choice] | None = None
    ) -> PlannedStep:
        """The planned step for a plan of one program.

        Args:
            problem: the step at the size of one micro-batch.
            choices: by default those of the plan.

        Raises:
            PlanMismatchError: the plan's choices are not those of the step's operators.
        """
        chosen = (
            decode_interior(plan.stages[0], problem.nodes) if choices is None else tuple(choices)
        )
        return cls(plan=plan, graph=graph, stages=(PlannedStage(problem=problem, choices=chosen),))


def estimate(step: PlannedStep) -> Prediction:
    """Price a plan, whoever made it: one program or a pipeline.

    Raises:
        PlanMismatchError: the plan's choices do not divide what they split.
    """
    if step.layered is not None:
        return estimate_stages(step).step
    (stage,), (planned,) = step.stages, step.plan.stages
    limit_bytes, graph = step.plan.prediction.memory_limit_bytes, stage.problem.graph
    return predict(_picked(stage, planned), limit_bytes, graph, planned.casts_once)


def attention_s(step: PlannedStep) -> float:
    """Seconds of fused attention in the compute of a plan of one program."""
    (stage,) = step.stages
    picked = _picked(stage, step.plan.stages[0])
    priced = picked.priced
    return sum(
        float(work_seconds(work, sizes, choice, priced.mesh, priced.target)[0])
        * (1 if work.phase is Phase.UPDATE else priced.repeats)
        for _, work, sizes, choice in picked.works()
        if work.scores is not None
    )


def estimate_stages(step: PlannedStep) -> PipelinePrediction:
    """Price a pipeline and each of its stages. Raises as `estimate` does."""
    plan = step.plan
    assert step.staged is not None
    stages = []
    for stage, planned in zip(step.stages, plan.stages, strict=True):
        picked, graph = _picked(stage, planned), stage.problem.graph
        priced = price_stage(picked, graph, planned.recompute, stage.repeat)
        stages.append(replace(priced, first_device=planned.first_device))
    measured = step.stages[0].problem.cluster.measured
    return predict_stages(
        stages,
        plan.tasks,
        # Plans hold no measurements, so those of the cluster in use are added.
        replace(Cluster.from_dict(plan.cluster), measured=measured),
        crossing=step.staged.crossing,
        memory_limit_bytes=plan.prediction.memory_limit_bytes,
        overlaps_transfers=plan.overlaps_transfers,
        casts_once=[planned.casts_once for planned in plan.stages],
    )


def _picked(stage: PlannedStage, planned: StagePlan) -> Picked:
    """A stage with only the plan's choices priced."""
    problem = stage.problem
    check_choices(problem.nodes, stage.choices, planned.mesh_shape)
    priced = price(
        problem,
        MeshUse.of_stage(planned, problem.cluster),
        repeats=problem.num_micro_batches,
        # To price all choices would take many times as long.
        choices=[np.array([choice], np.int64) for choice in stage.choices],
    )
    return Picked.first(priced)
