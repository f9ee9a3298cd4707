"""The plans that Alpa found, on chains of priced layers as the planner makes them.

Reference: L. Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed
    Deep Learning", OSDI 2022, and its artifact (Apache-2.0).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from _results import say

import aliquot as aq
from aliquot.cluster import target_for
from aliquot.core import AliquotError
from aliquot.cost import Chain, ChainPlan
from aliquot.graph import Layers, cut_alike
from aliquot.planners._counts import counts_to_try
from aliquot.planners._layer_costs import build_chains
from aliquot.planners.inter import Grid, ManualStages, StageDP
from aliquot.sharding import LayeredStep, runs_in_groups, sketch_step
from aliquot.suites import Case, alpa_suites, stage_bounds

FAMILIES = ("gpt", "moe", "wresnet")
UNLIMITED = 1e15
_PER_HOST = 8


def of_2022(cluster: aq.Cluster) -> aq.Cluster:
    """The cluster as the compiler of 2022 used it: XLA's GPU backend ran collectives one by one
    with everything else, and Alpa switched asynchronous all-reduces off besides
    (`alpa/global_env.py`).
    """
    figures = {**cluster.device.calibration, "overlap_fraction": 0.0}
    return replace(cluster, device=replace(cluster.device, calibration=figures))


def cases(family: str) -> tuple[Case, ...]:
    """Those with a plan that Alpa found, smallest first."""
    return alpa_suites()[f"{family}.perf_test_auto"].cases


def name_of(case: Case) -> str:
    """Such as "gpt-2.6b on 8"."""
    return f"{case.model} on {case.num_devices}"


def cluster_of(case: Case) -> aq.Cluster:
    """p3.16xlarge machines, or a part of one."""
    hosts = max(1, case.num_devices // _PER_HOST)
    return aq.Cluster.preset(f"{hosts}x{case.num_devices // hosts}xV100-16GB")


def make_chains(
    graph: Any, cluster: aq.Cluster, counts: Sequence[int], layers: Layers | str | None = None
) -> tuple[LayeredStep, list[Chain], list[int]]:
    """As the planner makes them: priced at the middle one of the numbers of micro-batches."""
    sketch = sketch_step(
        graph, counts[len(counts) // 2], layers=layers if isinstance(layers, str) else None
    )
    if isinstance(layers, Layers):
        sketch = replace(sketch, layers=cut_alike(layers, sketch.part))
    limit = target_for(cluster.device).usable_bytes(cluster.device)
    return sketch, *build_chains(
        sketch, cluster, intra=aq.ILP(), counts=counts, memory_limit_bytes=limit
    )


def own_counts(graph: Any, cluster: aq.Cluster) -> list[int]:
    """The largest numbers of micro-batches that the planner may try, and on which the step can be
    traced: experts choose among the tokens of two sequences.
    """
    counts = [count for group in counts_to_try(graph, cluster) for count in group[-2:]]
    return [n for n in counts if n == 1 or runs_in_groups(graph, n, 1, semantics="independent")]


def answer(planner: StageDP | Grid, chains: Sequence[Chain]) -> ChainPlan | None:
    """What a planner finds, if anything."""
    try:
        return planner.solve(chains)
    except AliquotError as error:
        say(str(error))
        return None


def judge_theirs(case: Case, chain: Chain) -> tuple[ChainPlan | None, str]:
    """Alpa's plan with our costs, whatever its memory, and what it was taken for; None if no option
    of ours can run it.

    A mesh without a forced batch is one free axis to Alpa, which may split the batch in one
    operator and parameters in the next. Ours are told beforehand: all such stages together are
    taken for what is faster and fits, or is faster.
    """
    bounds = stage_bounds([stage.layers for stage in case.stages], chain.unit_names)
    known = {
        (o.submesh, (o.dp, o.tp)): k for k, o in enumerate(chain.options) if o.recompute == "none"
    }
    best: tuple[tuple[bool, float], ChainPlan, str] | None = None
    for meshes in _meshes(case):
        options = [k for mesh in meshes if (k := known.get((_submesh(mesh), mesh))) is not None]
        if len(options) < len(meshes):
            continue
        planner = ManualStages(
            boundaries=bounds, options=tuple(options), num_micro_batches=chain.num_micro_batches
        )
        try:
            plan = planner.solve([replace(chain, memory_limit_bytes=UNLIMITED)])
        except aq.PlanMismatchError:
            continue
        key = (plan.peak_bytes > chain.memory_limit_bytes, plan.step_time_s)
        if best is None or key < best[0]:
            best = key, plan, describe(plan, chain)
    return (best[1], best[2]) if best else (None, "")


def _meshes(case: Case) -> Iterator[list[tuple[int, int]]]:
    yield [stage.mesh for stage in case.stages]
    if not all(stage.forced for stage in case.stages):
        yield [stage.mesh if stage.forced else stage.mesh[::-1] for stage in case.stages]


def _submesh(mesh: tuple[int, int]) -> tuple[int, int]:
    hosts = max(1, mesh[0] * mesh[1] // _PER_HOST)
    return hosts, mesh[0] * mesh[1] // hosts


def describe(plan: ChainPlan, chain: Chain) -> str:
    """Stages in a few words, equal neighbours together: `2 x (dp2 tp1), 4 x (...)`."""
    names = [chain.options[stage.option].name for stage in plan.stages]
    return ", ".join(f"{len(list(same))} x ({name})" for name, same in itertools.groupby(names))


def described(plan: ChainPlan | None, chains: Sequence[Chain]) -> str:
    """The same with schedule and micro-batches, for a plan of one of several chains; empty without
    a plan.
    """
    if plan is None:
        return ""
    (chain,) = (c for c in chains if c.num_micro_batches == plan.num_micro_batches)
    return f"{plan.schedule} x {plan.num_micro_batches}: {describe(plan, chain)}"
