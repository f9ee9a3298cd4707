"""Cost of a pipeline: every stage is priced, and the schedule of all stages is simulated."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..cluster import Cluster
from ..core import counted
from ..graph import Graph, Phase, StageId
from ..plans import CollectiveUse, Prediction, Schedule, StagePrediction
from ..sharding import Crossing, NodeId, num_shards
from ._estimate import MeasuredShare, collective_uses, measured_share, with_source_line
from ._phases import PhaseCosts, phase_costs
from ._picked import Picked
from ._pipeline import Floats, PipelineTimes, StageCosts, simulate
from ._recomputed import NOTHING_AGAIN, Recomputation, recomputation, whole_recomputation
from ._transfers import edge_seconds
from .memory import Held

_ROUNDING = 1e-9
_IN_FLIGHT, _WORKING = "activations in flight", "working memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCosts:
    """What a stage holds whose activations, `[batch, sequence, features]`, are split along the
    sequence and gathered there.

    XLA for GPUs gathers along the first dim: it works on `[sequence, batch, features]`, so that a
    gathered array of several examples is there in both orders, and what a loop of the forward
    program stacked, `[layer, batch, sequence, features]`, is transposed whole where the backward
    program begins. Within one program it chooses the order of its stacks freely.

    Attributes:
        shards: number of parts of the sequence; 1 if it is not gathered.
        gathered_bytes: of a gathered array in the other order, twice; 0 with one example a device.
        stacked_bytes: of transposed stacks of a micro-batch; 0 with one example a device.
    """

    shards: int = 1
    gathered_bytes: float = 0.0
    stacked_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedStage:
    """A stage with its choices priced.

    Attributes:
        graph: the stage's operators at the size of a micro-batch.
        first_device: the stage's first device in the cluster; it uses as many as its mesh has.
        costs: by phase.
        recompute: see `StagePlan`.
        again: costs and savings of recomputation.
        casts_bytes: of casts of parameters that are kept for the whole step; `casts_working_bytes`
            is then what else is needed at the peak, instead of `costs.working_bytes`.
        sequence: what splitting the sequence beside the batch takes.
    """

    picked: Picked
    graph: Graph = field(repr=False)
    costs: PhaseCosts
    first_device: int = 0
    recompute: str = "none"
    again: Recomputation = NOTHING_AGAIN
    casts_bytes: float = 0.0
    casts_working_bytes: float = 0.0
    sequence: SequenceCosts = SequenceCosts()

    @property
    def num_devices(self) -> int:
        """Number of devices of its mesh."""
        return math.prod(self.picked.priced.mesh.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelinePrediction:
    """The prediction for a pipeline: of the step, of each stage, and the times of each task.

    `costs` are those of each stage's operators, without recomputation; `schedule` says which stages
    are updated early; for `casts_once` see `StagePlan`.
    """

    step: Prediction
    stages: tuple[StagePrediction, ...]
    costs: tuple[PhaseCosts, ...]
    schedule: Schedule
    times: PipelineTimes
    casts_once: tuple[bool, ...]


def price_stage(
    picked: Picked,
    graph: Graph,
    recompute: str = "none",
    repeat: frozenset[NodeId] = frozenset(),
) -> PricedStage:
    """Compute a stage's costs by phase, and costs and savings of its recomputation.

    Args:
        recompute: see `StagePlan`.
        repeat: nodes of the products that the backward pass may recompute.
    """
    assert picked.priced.kept is not None, "the problem was not made with `of_stage`"
    costs = phase_costs(picked, graph)
    again = NOTHING_AGAIN
    if recompute == "stage":
        again = whole_recomputation(picked, graph, costs.forward_s)
    elif recompute == "operators":
        again = recomputation(picked, graph, repeat)
    casts_bytes, working_bytes = 0.0, costs.working_bytes
    if sum(costs.casts_s):
        memory = picked.memory.keeping_casts
        casts_bytes = memory.peak_parts.get("casts of parameters", 0.0)
        held_bytes = costs.state_bytes + costs.in_flight_bytes + costs.recomputed_bytes
        working_bytes = max(0.0, memory.peak_bytes - held_bytes - casts_bytes)
    return PricedStage(
        picked=picked,
        graph=graph,
        costs=costs,
        recompute=recompute,
        again=again,
        casts_bytes=casts_bytes,
        casts_working_bytes=working_bytes,
        sequence=_sequence_costs(picked),
    )


def _sequence_costs(picked: Picked) -> SequenceCosts:
    priced = picked.priced
    if not priced.target.gathers_leading_dim:
        return SequenceCosts()
    shards, rows, gathered_bytes = 1, 1.0, 0.0
    for index, source, target in picked.conversions:
        edge, table = priced.graph.edges[index], priced.edges[index]
        before, after = table.sources[source], table.targets[target]
        along = [n for n, p, q in zip(priced.axis_sizes, before, after) if n > 1 and p == 1 != q]
        if edge.rank != 3 or edge.beside_compute or edge.phase is Phase.UPDATE or not along:
            continue
        shards = max(shards, math.prod(along))
        local_bytes = edge.num_bytes / num_shards(after, priced.axis_sizes)
        if local_bytes > gathered_bytes:
            gathered_bytes = local_bytes
            rows = edge.length / math.prod(n for n, p in zip(priced.axis_sizes, before) if p == 0)
    if rows <= 1:
        return SequenceCosts(shards=shards)
    split = [held for held in priced.kept or () if _splits_dim(picked, held, 2)]
    return SequenceCosts(
        shards=shards,
        gathered_bytes=2 * gathered_bytes,
        stacked_bytes=picked.bytes_on_device(split),
    )


def _splits_dim(picked: Picked, held: Held, dim: int) -> bool:
    """Whether arrays are split along a dim under the choice of their node."""
    if held.node < 0:
        return False
    choice = picked.choices[held.node]
    return any(factor >= 0 and held.projection[factor] == dim for factor in choice)


def predict_stages(
    stages: Sequence[PricedStage],
    schedule: Schedule,
    cluster: Cluster,
    *,
    crossing: Crossing,
    memory_limit_bytes: float,
    overlaps_transfers: bool,
    casts_once: Sequence[bool] | None = None,
    may_update_early: frozenset[StageId] = frozenset(),
) -> PipelinePrediction:
    """The prediction for a pipeline.

    The step's times by kind are those of the submesh that is busy longest, and its memory is that
    of the submesh of the fullest stage.

    Args:
        crossing: bytes that neighbouring stages exchange, of the whole micro-batch.
        overlaps_transfers: whether transfers between stages overlap with compute.
        casts_once: for each stage whether it casts its parameters once a step; by default those
            that cast any do, on each submesh that has the memory.
        may_update_early: stages that can be updated early. They are if the step then takes less
            time.
    """
    places = [(stage.first_device, stage.num_devices) for stage in stages]
    intra, inter = cluster.transfer_links
    ahead_s, back_s = (
        edge_seconds(
            num_bytes, places, devices_per_host=cluster.devices_per_host, intra=intra, inter=inter
        )[1:]
        for num_bytes in (crossing.forward_bytes, crossing.backward_bytes)
    )
    # All others would wait for the next backward tasks of the last submesh while the last stage is
    # updated. A submesh with one stage has no task left when it is updated.
    may_update_early -= {StageId(len(stages) - 1)}

    def simulated(casts_once: Sequence[bool]) -> tuple[StageCosts, Schedule, PipelineTimes]:
        costs = _stage_costs(
            stages,
            ahead_s,
            back_s,
            crossing.forward_bytes,
            overlaps_transfers=overlaps_transfers,
            casts_once=casts_once,
        )
        times = simulate(schedule, costs)
        if may_update_early and schedule.num_submeshes < len(stages):
            early = replace(schedule, early_updates=may_update_early)
            with_early = simulate(early, costs)
            if with_early.step_time_s < times.step_time_s * (1 - _ROUNDING):
                return costs, early, with_early
        return costs, schedule, times

    cast = [sum(s.costs.casts_s) > 0 for s in stages] if casts_once is None else casts_once
    costs, chosen, times = simulated(cast)
    if casts_once is None:
        fits = (times.peak_bytes <= memory_limit_bytes).tolist()
        casts_once = [
            once and (fits[schedule.submesh_of(k)] or stages[k].picked.priced.use.gathers_once)
            for k, once in enumerate(cast)
        ]
        if casts_once != cast:
            costs, chosen, times = simulated(casts_once)
    schedule = chosen
    predictions = tuple(
        _stage_prediction(k, stage, schedule, costs, times, casts_once[k])
        for k, stage in enumerate(stages)
    )
    return PipelinePrediction(
        step=_step_prediction(stages, predictions, schedule, times, memory_limit_bytes),
        stages=predictions,
        costs=tuple(stage.costs for stage in stages),
        schedule=schedule,
        times=times,
        casts_once=tuple(casts_once),
    )


def _stage_costs(
    stages: Sequence[PricedStage],
    transfer_s: Floats,
    transfer_back_s: Floats,
    entering_bytes: Sequence[float],
    *,
    overlaps_transfers: bool,
    casts_once: Sequence[bool],
) -> StageCosts:
    """Costs of all stages as the simulation takes them, recomputation and casts of parameters
    included.
    """
    whole = np.array([s.recompute == "stage" for s in stages])
    named = np.array([s.recompute == "operators" for s in stages])
    freed = np.array([s.again.freed_bytes for s in stages])
    most_at_once = np.array([s.again.peak_bytes for s in stages])
    cheap = np.array([s.costs.recomputed_bytes for s in stages])
    once = np.array(casts_once, bool)
    forward = np.array([_forward_s(s) for s in stages])
    forward += np.where(once, 0.0, [s.costs.casts_s[0] for s in stages])
    backward = np.array([s.costs.backward_s + s.again.seconds for s in stages])
    backward += np.where(once, 0.0, [s.costs.casts_s[1] for s in stages])
    # A stage that recomputes does not split its backward pass, because both halves would need the
    # recomputed arrays.
    deferrable = np.array([s.costs.deferrable_s if s.recompute == "none" else 0.0 for s in stages])
    # Of stages on the same devices one runs at a time, and only that one stacks gradients.
    stacked = np.array([s.costs.stacked_bytes for s in stages])
    state = np.array([s.costs.state_bytes for s in stages]) - stacked
    state += np.where(once, [s.casts_bytes for s in stages], 0.0)
    kept = np.array([s.costs.in_flight_bytes for s in stages])
    working = stacked + np.where(
        once, [s.casts_working_bytes for s in stages], [s.costs.working_bytes for s in stages]
    )
    working += [s.sequence.gathered_bytes for s in stages]
    working += np.where(whole, 0.0, [s.sequence.stacked_bytes for s in stages])
    # Each group of data parallelism, and each part of the sequence, holds only its own share of
    # what enters the stage.
    entering = np.array([0.0, *entering_bytes])
    entering /= [_data_parallel_size(s) * s.sequence.shards for s in stages]
    # A stage that may not run takes infinitely long.
    inputs = np.full_like(backward, np.inf)
    np.subtract(backward, deferrable, out=inputs, where=np.isfinite(backward))
    return StageCosts(
        forward_s=forward,
        backward_input_s=np.maximum(inputs, 0.0),
        backward_weight_s=deferrable,
        update_s=np.array([s.costs.once_s for s in stages]),
        transfer_s=transfer_s,
        transfer_back_s=transfer_back_s,
        state_bytes=state,
        in_flight_bytes=np.where(whole, entering, kept - freed),
        # A backward pass that is not split defers nothing.
        deferred_bytes=np.array(
            [s.costs.deferred_bytes if s.recompute == "none" else 0.0 for s in stages]
        ),
        handed_bytes=np.array(
            [s.costs.handed_bytes if s.recompute == "none" else 0.0 for s in stages]
        ),
        # Recomputed arrays are alive while the stage's backward pass runs. Where a plan names the
        # operators to recompute, only the most alive at once counts.
        working_bytes=working + np.where(whole, kept, 0.0) + np.where(named, most_at_once, cheap),
        overlaps_transfers=overlaps_transfers,
    )


def _forward_s(stage: PricedStage) -> float:
    """Seconds of a stage's forward pass. One that recomputes everything stores nothing for the
    backward pass.
    """
    if stage.recompute != "stage":
        return stage.costs.forward_s
    priced = stage.picked.priced
    bandwidth = priced.target.memory_bytes_per_s(priced.mesh.cluster.device)
    return max(0.0, stage.costs.forward_s - stage.costs.in_flight_bytes / bandwidth)


def _data_parallel_size(stage: PricedStage) -> int:
    use = stage.picked.priced.use
    return math.prod(use.mesh.shape[axis] for axis in use.data_axes)


def _stage_prediction(
    k: int,
    stage: PricedStage,
    schedule: Schedule,
    costs: StageCosts,
    times: PipelineTimes,
    casts_once: bool,
) -> StagePrediction:
    in_flight = int(times.in_flight[k])
    kept_bytes = stage.casts_bytes if casts_once else 0.0
    memory = {
        "state": float(costs.state_bytes[k]) - kept_bytes,
        _IN_FLIGHT: float(times.held_bytes[k]),
        _WORKING: float(costs.working_bytes[k]),
        **({"casts of parameters": kept_bytes} if kept_bytes else {}),
    }
    return StagePrediction(
        forward_s=float(costs.forward_s[k]),
        backward_s=float(costs.backward_input_s[k] + costs.backward_weight_s[k]),
        weight_gradient_s=float(costs.backward_weight_s[k]),
        update_s=float(costs.update_s[k]),
        transfer_s=float(costs.transfer_s[k]) if k < len(costs.transfer_s) else 0.0,
        transfer_back_s=float(costs.transfer_back_s[k]) if k < len(costs.transfer_s) else 0.0,
        bubble=float(times.bubble_share[schedule.submesh_of(k)]),
        in_flight=in_flight,
        peak_memory_bytes=sum(memory.values()),
        memory_bytes=memory,
        collectives=tuple(
            with_source_line(use, stage.graph) for use in collective_uses(stage.picked)
        ),
        host_memory_bytes={
            part: num_bytes
            for part, num_bytes in (
                ("state", stage.costs.host_state_bytes),
                (_IN_FLIGHT, in_flight * stage.costs.host_in_flight_bytes),
            )
            if num_bytes
        },
    )


def _step_prediction(
    stages: Sequence[PricedStage],
    predictions: Sequence[StagePrediction],
    schedule: Schedule,
    times: PipelineTimes,
    memory_limit_bytes: float,
) -> Prediction:
    """The prediction for the whole step, from simulated times and the predictions for stages."""
    # The busiest submesh determines the step time, so its seconds explain it best.
    busiest = schedule.stages_of(int(times.busy_s.argmax()))
    gradient = sum(stages[k].costs.gradient_s for k in busiest)
    communication = sum(stages[k].costs.communication_s for k in busiest)
    copied = sum(stages[k].costs.host_transfer_s for k in busiest)
    hidden = sum(stages[k].costs.host_hidden_s for k in busiest)
    busy = sum(
        schedule.num_micro_batches * (predictions[k].forward_s + predictions[k].backward_s)
        + predictions[k].update_s
        for k in busiest
    )
    fullest = max(range(len(stages)), key=lambda k: predictions[k].peak_memory_bytes)
    submesh = schedule.submesh_of(fullest)
    if schedule.num_submeshes < len(stages):
        submesh = int(times.peak_bytes.argmax())
    mine = schedule.stages_of(submesh)
    fullest = max(mine, key=lambda k: predictions[k].peak_memory_bytes)
    kept = counted(int(times.in_flight[fullest]), "micro-batch")
    memory: defaultdict[str, float] = defaultdict(float)
    for k in mine:
        for part, num_bytes in predictions[k].memory_bytes.items():
            memory[part] += num_bytes
    if len(mine) > 1:
        # Interleaved stages run one at a time, and do not all keep the most at the same moment.
        memory[_WORKING] = max(predictions[k].memory_bytes[_WORKING] for k in mine)
        others = sum(num_bytes for part, num_bytes in memory.items() if part != _IN_FLIGHT)
        memory[_IN_FLIGHT] = max(0.0, float(times.peak_bytes[submesh]) - others)
    on_host: dict[str, float] = {}
    for predicted in predictions:
        if sum(predicted.host_memory_bytes.values()) > sum(on_host.values()):
            on_host = predicted.host_memory_bytes
    collectives: list[CollectiveUse] = [use for stage in predictions for use in stage.collectives]
    shares = [measured_share(stage.picked) for stage in stages]
    measured = MeasuredShare(*(sum(column) for column in zip(*shares, strict=True)))
    return Prediction(
        step_time_s=times.step_time_s,
        compute_s=busy - gradient - communication - (copied - hidden),
        communication_s=communication,
        gradient_s=gradient,
        hidden_s=0.0,
        host_transfer_s=copied,
        host_hidden_s=hidden,
        host_memory_bytes=on_host,
        bubble_s=times.step_time_s - busy,
        peak_memory_bytes=sum(memory.values()),
        memory_limit_bytes=memory_limit_bytes,
        memory_bytes=dict(memory),
        peak_moment=f"stage {fullest}, with {kept} in flight",
        collectives=tuple(sorted(collectives, key=lambda use: -use.seconds)),
        measured_share=measured.share,
        measured_compute_share=measured.alone_share,
        measured_error=measured.error,
    )
