"""Conversion of Aceso's configuration to a plan of a GPT, T5 or Wide-ResNet."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from ...cluster import Cluster, LogicalMesh, subcluster, target_for
from ...core import InfeasibleError, InputError, format_bytes, listing, shortened
from ...cost import (
    MeshUse,
    PipelinePrediction,
    PricedStage,
    make_problem,
    predict_stages,
    price,
    price_stage,
)
from ...graph import Graph, cut_between, named_places
from ...planners import ILP, Decision, PipelineParts, Space, StageDecision, Task, write_plan
from ...plans import ModelReference, Plan, make_schedule
from ...sharding import LayeredStep, layer_step, stage_step
from ._configuration import Configuration
from ._operator_map import OperatorMap
from ._stage_splits import DATA, StageSplits, layers_differ, mesh_axes

_ASKED = "the configuration does not fit this model and this cluster"
_SCHEDULE = "1f1b"


def configuration_faults(
    configuration: Configuration,
    family: str,
    names: Sequence[str],
    shape: Mapping[str, Any],
    options: Mapping[str, str],
    cluster: Cluster,
) -> list[str]:
    """Messages on everything in a configuration that does not fit a model or a cluster.

    Args:
        family: the model's family, as configurations name it.
        names: names of the operators of the model's chain.
        shape: the model's sizes, by Aceso's keys.
        options: for each key, its name on the command line.
    """
    return [
        *_model_faults(configuration, family, names, shape, options),
        *_device_faults(configuration, names, cluster),
    ]


def _model_faults(
    configuration: Configuration,
    family: str,
    names: Sequence[str],
    shape: Mapping[str, Any],
    options: Mapping[str, str],
) -> Iterator[str]:
    """Messages on family, sizes, number of operators and micro-batches that do not fit the
    model.
    """
    if configuration.model_name != family:
        given_family = shortened(configuration.model_name, 60)
        yield f"it is of a model of family {given_family!r}, and the model is of family {family!r}"
    for key, option in options.items():
        given = configuration.settings.get(key, shape[key])
        if isinstance(shape[key], list):
            if given != shape[key]:
                shown = shortened(repr(given), 60)
                yield (
                    f"{key} is {shown}, and the model's {shape[key]}: choose another --model, or"
                    f" its number of layers with --set {option}=..."
                )
        elif type(given) is not int or given < 1:
            yield f"{key} must be a positive number, got {shortened(repr(given), 60)}"
        elif given != shape[key]:
            yield f"{key} is {given}, and the model's {shape[key]}: add --set {option}={given}"
    if configuration.num_operators != len(names):
        yield f"it has {configuration.num_operators} operators, and the model's chain {len(names)}"
    if configuration.global_batch % configuration.micro_batch:
        yield (
            f"micro-batches of {configuration.micro_batch} do not make up a global batch of"
            f" {configuration.global_batch}: micro_batch_size must divide global_batch_size"
        )


def _device_faults(
    configuration: Configuration, names: Sequence[str], cluster: Cluster
) -> Iterator[str]:
    """Messages on stages that do not fit the cluster, and degrees that do not fit their stage."""
    used = sum(stage.num_devices for stage in configuration.stages)
    if used != cluster.num_devices:
        yield (
            f"it is for {used} GPUs, and {cluster.name} has {cluster.num_devices}: give a --cluster"
            f" of {used}"
        )
    first_device = first = 0
    for k, stage in enumerate(configuration.stages):
        each = cluster.devices_per_host
        fits = (
            (first_device % each == 0 and stage.num_devices % each == 0)
            if stage.num_devices > each
            else first_device % each + stage.num_devices <= each
        )
        if not fits:
            last_device = first_device + stage.num_devices - 1
            yield f"stage {k} on devices {first_device} to {last_device} straddles hosts of {each}"
        first_device += stage.num_devices
        if mesh_axes(stage.num_devices, stage.tensor) is None:
            shown = ", ".join(map(str, sorted(set(stage.tensor))))
            yield (
                f"stage {k} has tensor degrees {shown}, which must divide each other, and its"
                f" {stage.num_devices} devices"
            )
        wrong: dict[int, list[int]] = {}
        for o, data in enumerate(stage.data, first):
            if configuration.micro_batch % data:
                wrong.setdefault(data, []).append(o)
        for data, operators in wrong.items():
            named = names[operators[0]] if operators[0] < len(names) else "unknown"
            more = f" and {len(operators) - 1} more" if len(operators) > 1 else ""
            yield (
                f"stage {k}, operator {operators[0]}, {named}{more}: micro-batches of"
                f" {configuration.micro_batch} samples cannot be split over data degree {data}"
            )
        first += len(stage.tensor)


def plan_of(
    configuration: Configuration,
    operators: OperatorMap,
    task: Task,
    *,
    model: ModelReference,
    version: str,
    trace_s: float,
) -> Plan:
    """The plan of a captured model that corresponds to a configuration.

    Operators are split as their degrees say; splits that the degrees leave open are chosen for the
    least cost. The residual stream has one split in each stage, that of most operators on it, and
    so have the arrays between two convolutions; notes of the plan name operators whose degrees ask
    for another one.

    Args:
        configuration: one for which `configuration_faults` found nothing.
        operators: the map of the step's operators.
        task: the step, the cluster, the memory limit and the meaning of several micro-batches, of
            which the configuration says the number.

    Raises:
        InputError: degrees do not divide what they split, or a stage has no operator that the model
            computes; all are listed.
        InfeasibleError: a stage does not fit in memory.
    """
    started = time.perf_counter()
    count = configuration.global_batch // configuration.micro_batch
    semantics = task.semantics if count > 1 else "exact"
    task = replace(task, num_micro_batches=count, semantics=semantics)
    lengths = [len(stage.tensor) for stage in configuration.stages]
    firsts = [sum(lengths[:k]) for k in range(len(lengths))]
    layers = _cut(task.graph, operators, firsts)
    layered = layer_step(task.graph, count, layers=layers, semantics=task.semantics)
    decision, notes = _decide(configuration, operators, firsts, layered, task)
    plan = write_plan(
        decision,
        task,
        model=model,
        version=version,
        trace_s=trace_s,
        search_s=time.perf_counter() - started,
        layers=layers,
    )
    return msgspec.structs.replace(plan, notes=(*plan.notes, *notes))


def _cut(graph: Graph, operators: OperatorMap, firsts: Sequence[int]) -> str | int:
    """The places where stages begin, in the form that `cut_layers` takes."""
    if len(firsts) == 1:
        return 1
    computing = [
        (k, operators.of_op[k]) for k, computes in enumerate(operators.computes) if computes
    ]
    present = {operator for _, operator in computing}
    ends = [*firsts[1:], len(operators.names)]
    empty = [
        f"stage {k} has only {', '.join(operators.names[a:b])}, of which the model computes nothing"
        for k, (a, b) in enumerate(zip(firsts, ends, strict=True))
        if present.isdisjoint(range(a, b))
    ]
    if empty:
        raise InputError(
            listing(_ASKED, empty, "Move an operator there from a neighbouring stage.")
        )
    pairs = []
    for first in firsts[1:]:
        last_before = max(k for k, operator in computing if operator < first)
        pairs.append((last_before, min(k for k, operator in computing if operator >= first)))
    return named_places(cut_between(graph, pairs))


def _decide(
    configuration: Configuration,
    operators: OperatorMap,
    firsts: Sequence[int],
    layered: LayeredStep,
    task: Task,
) -> tuple[Decision, list[str]]:
    """The decision that a configuration stands for, and notes on what it overrules. All stages are
    checked before any is solved, so that all faults are reported together.
    """
    staged = stage_step(layered, range(len(firsts)))
    faults: list[str] = []
    notes: list[str] = []
    splits = []
    for k, (stage, first, extract) in enumerate(
        zip(configuration.stages, firsts, staged.extracts, strict=True)
    ):
        make = functools.partial(
            make_problem,
            extract.graph,
            task.cluster,
            num_micro_batches=layered.num_micro_batches,
            memory_limit_bytes=task.limit_bytes,
            on_missing_rule=task.on_missing_rule,
            semantics=task.semantics,
            of_stage=True,
        )
        problem = make()
        folded = not layers_differ(problem, operators, extract.ops, stage, first)
        # If the configuration splits layers differently, they cannot be folded.
        problem = problem if folded else make(repeats=False)
        each = task.cluster.devices_per_host
        # Hosts of the stage, and devices of each.
        submesh = max(1, stage.num_devices // each), min(stage.num_devices, each)
        problem = replace(problem, cluster=subcluster(task.cluster, submesh))
        axes = mesh_axes(stage.num_devices, stage.tensor)
        assert axes is not None
        split = StageSplits(
            problem=problem,
            operators=operators,
            ops=extract.ops,
            stage=stage,
            first=first,
            axes=axes,
        )
        choices = split.choices()
        faults += [f"stage {k}, {fault}" for fault in split.faults]
        splits.append((split, choices, folded))
        notes += _notes(k, split)
    if faults:
        raise InputError(
            listing(_ASKED, list(dict.fromkeys(faults)), "Use degrees that divide what they split.")
        )
    solved = [_solve(split, choices, folded, task) for split, choices, folded in splits]
    first_devices = np.cumsum([0, *(stage.num_devices for stage in configuration.stages)]).tolist()
    schedule = make_schedule(_SCHEDULE, len(solved), layered.num_micro_batches)
    overlaps = target_for(task.cluster.device).overlaps_transfers
    prediction = predict_stages(
        [
            replace(priced, first_device=first)
            for (_, priced), first in zip(solved, first_devices, strict=False)
        ],
        schedule,
        task.cluster,
        crossing=staged.crossing,
        memory_limit_bytes=task.limit_bytes,
        overlaps_transfers=overlaps,
    )
    _require_memory(prediction, task)
    stages = tuple(
        replace(
            stage,
            first_device=first_devices[k],
            first_layer=k,
            layer_names=(_name(operators, configuration, firsts, k),),
        )
        for k, (stage, _) in enumerate(solved)
    )
    return (
        Decision(
            method="aceso",
            planner="imported",
            stages=stages,
            step_time_s=prediction.step.step_time_s,
            lower_bound_s=None,
            bound_holds_for="a configuration of Aceso's",
            status="cheapest found",
            pipeline=PipelineParts(
                layered=layered,
                staged=staged,
                schedule=schedule,
                overlaps_transfers=overlaps,
                prediction=prediction,
            ),
            combine=layered.combine,
        ),
        notes,
    )


def _solve(
    split: StageSplits, choices: Sequence[Any], folded: bool, task: Task
) -> tuple[StageDecision, PricedStage]:
    """A stage with the cheapest of the choices that its configuration leaves open."""
    problem, axes = split.problem, split.axes
    waits = problem.num_micro_batches > 1
    use = MeshUse(
        mesh=LogicalMesh(shape=axes.sizes, axis_names=axes.names, cluster=problem.cluster),
        data_axes=frozenset(
            a
            for a, name in enumerate(axes.names)
            if waits and name.startswith(DATA) and axes.sizes[a] > 1
        ),
    )
    priced = price(problem, use, repeats=problem.num_micro_batches, choices=choices)
    space = Space.whole("imported", priced)
    # The splits that the degrees leave open matter little, so a wide gap is good enough.
    planner = ILP().coarser(relative_gap=1e-2, node_limit=50)
    solution = planner.solve(problem, space, memory_limit_bytes=task.limit_bytes)
    if solution is None:
        # Without a limit, so that the error can say how much memory is needed.
        solution = planner.solve(problem, space, memory_limit_bytes=math.inf)
    assert solution is not None
    repeat = split.repeat()
    recompute = "operators" if repeat else "none"
    decision = StageDecision(
        problem=problem,
        picked=solution.picked,
        recompute=recompute,
        repeat=repeat,
        folded=folded,
    )
    return decision, price_stage(solution.picked, problem.graph, recompute, repeat)


def _require_memory(prediction: PipelinePrediction, task: Task) -> None:
    peaks = [stage.peak_memory_bytes for stage in prediction.stages]
    over = [k for k, peak in enumerate(peaks) if peak > task.limit_bytes]
    if over:
        listed = "".join(f"\n  - stage {k} needs {format_bytes(peaks[k])}" for k in over)
        raise InfeasibleError(
            f"The configuration does not fit, with {format_bytes(task.limit_bytes)} on each"
            f" device:{listed}\n  Recompute more operators, use more tensor parallelism or smaller"
            " micro-batches, or raise --memory-limit.",
            required_bytes=max(peaks),
            available_bytes=task.limit_bytes,
        )


def _name(
    operators: OperatorMap, configuration: Configuration, firsts: Sequence[int], k: int
) -> str:
    last = firsts[k] + len(configuration.stages[k].tensor) - 1
    return f"{operators.names[firsts[k]]} ({firsts[k]}) to {operators.names[last]} ({last})"


def _notes(k: int, split: StageSplits) -> Iterator[str]:
    """A note on the operators of a stage whose splits differ from its configuration, if any."""
    others, degree = split.overruled()
    if others:
        where = "between convolutions" if split.has_images else "on the residual stream"
        yield (
            f"stage {k}: sums and norms {where} are split over data degree {degree};"
            f" operators {', '.join(map(str, others[:6]))}{', ...' if len(others) > 6 else ''}"
            " asked for another"
        )
