"""Predicted throughput of the GPTs of Alpa's suite beside what its artifact published."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from _alpa_step import SIZES, alpa_step
from _alpa_suite import (
    UNLIMITED,
    answer,
    cluster_of,
    described,
    judge_theirs,
    make_chains,
    name_of,
    of_2022,
    own_counts,
)
from _results import Journal

import aliquot as aq
from aliquot.cost import UNIT_FIGURES, Chain, ChainPlan
from aliquot.graph import Layers, cut_layers
from aliquot.planners import PipeshardParallel
from aliquot.planners._base import Decision, Task
from aliquot.planners._solve_stages import CutStep, _solve_stages
from aliquot.planners.inter import Grid, StageDP
from aliquot.suites import Case, GivenStage, alpa_suites, operations, stage_bounds


def _grouped(graph: Any, groups: int) -> Layers:
    """Layers that are Alpa's: equal groups of blocks, with what comes before and behind."""
    layers = cut_layers(graph)
    edges = stage_bounds([1] * groups, layers.names)
    return dataclasses.replace(
        layers,
        starts=tuple(layers.starts[first] for first, _ in edges),
        names=tuple(f"layers[{k}]" for k in range(groups)),
        boundary_bytes=tuple(layers.boundary_bytes[last - 1] for _, last in edges),
        costs=tuple(sum(layers.costs[first:last]) for first, last in edges),
    )


class Fidelity:
    """One GPT of the suite, priced as Alpa ran it: plans of it, with every stage solved as a whole.

    `groups` is how many of Alpa's layers there are, each worked out again as a whole; then stages
    are cut between them alone.
    """

    def __init__(self, case: Case, groups: int | None) -> None:
        self.case, self.cluster = case, of_2022(cluster_of(case))
        sizes = {name: getattr(case.config, name) for name in SIZES}
        step = alpa_step(
            {**sizes, "batch": case.global_batch}, recompute=case.recompute, groups=groups
        )
        self.graph = aq.capture(*step)
        own = own_counts(self.graph, self.cluster)
        counts = sorted({*own, case.num_micro_batches})
        self.layers = None if groups is None else _grouped(self.graph, groups)
        self.sketch, self.chains, self.kinds = make_chains(
            self.graph, self.cluster, counts, self.layers
        )
        self._cut: dict[int, CutStep] = {}

    def row(
        self, label: str, published: float, plan: ChainPlan | None, *, counted: bool
    ) -> dict[str, Any]:
        """A published figure beside what is predicted for a plan."""
        head = {
            "GPUs": self.case.num_devices,
            "model": self.case.model,
            "row": label,
            "published TFLOP/s": published,
        }
        chain = self.chains[0] if plan is None else self._chain(plan.num_micro_batches)
        found = self._solved(plan, chain) if plan else None
        if plan is None or found is None or found.pipeline is None:
            return {
                **head,
                "predicted TFLOP/s": None,
                "counted": "no",
                "plan": "none that we can make",
            }
        flops = operations(self.case) / self.case.num_devices / 1e12
        result = found.pipeline.prediction
        parts = result.costs
        slowest = max(range(len(parts)), key=lambda k: parts[k].forward_s + parts[k].backward_s)
        longest, count = parts[slowest], plan.num_micro_batches
        share = longest.compute_s / (longest.compute_s + longest.communication_s)
        work = count * (longest.forward_s + longest.backward_s)
        return {
            **head,
            "predicted TFLOP/s": flops / found.step_time_s,
            "error": flops / found.step_time_s / published - 1,
            "counted": "yes" if counted else "no: our plan under its restriction",
            "plan": described(plan, [chain]),
            "step s": found.step_time_s,
            "passes of the slowest stage s": work,
            "of it communication": 1 - share,
            "bubble and waiting s": found.step_time_s - work - longest.once_s,
            "update s": longest.once_s,
            "transfers s": count * 2 * sum(stage.transfer_s for stage in result.stages),
            "from layers alone TFLOP/s": flops / plan.step_time_s,
            "peak memory / usable": float(result.times.peak_bytes.max()) / chain.memory_limit_bytes,
        }

    def _chain(self, count: int) -> Chain:
        return next(c for c in self.chains if c.num_micro_batches == count)

    def _solved(self, plan: ChainPlan, chain: Chain) -> Decision | None:
        count = plan.num_micro_batches
        if count not in self._cut:
            task = Task(
                graph=self.graph,
                cluster=self.cluster,
                on_missing_rule="error",
                memory_limit_bytes=UNLIMITED,
            )
            self._cut[count] = CutStep(task=task, kinds=self.kinds, layers=self.sketch.layers)
        result = _solve_stages(PipeshardParallel(), self._cut[count], chain, plan, ())
        return result if isinstance(result, Decision) else None

    def restricted(self, method: str) -> ChainPlan | None:
        """The best plan under what a method of the artifact is restricted to."""
        only_1f1b = StageDP(schedules=("1f1b",))
        match method:
            case "megatron":
                return answer(Grid(), self.chains)
            case "alpa.intra_only":
                return answer(dataclasses.replace(only_1f1b, num_stages=1), self.chains)
            case "alpa.inter_only":
                single = [
                    _with_options(c, [o.num_devices == 1 for o in c.options]) for c in self.chains
                ]
                return self._renamed(answer(only_1f1b, single), single[0])
            case "alpa.equal_mesh":
                sizes = sorted(
                    {
                        o.num_devices
                        for o in self.chains[0].options
                        if o.num_devices < self.case.num_devices
                    }
                )
                found = []
                for size in sizes:
                    equal = [
                        _with_options(c, [o.num_devices == size for o in c.options])
                        for c in self.chains
                    ]
                    found.append(self._renamed(answer(only_1f1b, equal), equal[0]))
                return min((p for p in found if p), key=lambda p: p.step_time_s, default=None)
        return answer(only_1f1b, self.chains)

    def _renamed(self, plan: ChainPlan | None, narrow: Chain) -> ChainPlan | None:
        if plan is None:
            return None
        place = {option: k for k, option in enumerate(self.chains[0].options)}
        stages = tuple(
            dataclasses.replace(s, option=place[narrow.options[s.option]]) for s in plan.stages
        )
        return dataclasses.replace(plan, stages=stages)


def _with_options(chain: Chain, kept: Sequence[bool]) -> Chain:
    mask = np.array(kept)
    return dataclasses.replace(
        chain,
        options=tuple(o for o, keep in zip(chain.options, kept, strict=True) if keep),
        **{name: getattr(chain, name)[:, mask] for name in UNIT_FIGURES},
    )


# Of the artifact, without ablations that we cannot tell from these or cannot make.
_METHODS = ("megatron", "alpa.intra_only", "alpa.inter_only", "alpa.auto", "alpa.equal_mesh")


def fidelity_rows(
    suite: Mapping[str, Any], journal: Journal, chosen: Sequence[Case]
) -> list[dict[str, Any]]:
    published = [
        r
        for name in ("e2e", "inter_ablation")
        for r in suite["published_results"][name]
        if r["model"] == "gpt"
    ]
    table = []
    for case in chosen:
        wanted = {
            r["method"]: r["tflops"]
            for r in published
            if r["gpus"] == case.num_devices and r["method"] in _METHODS
        }
        made: list[Fidelity] = []

        def model(case: Case = case, made: list[Fidelity] = made) -> Fidelity:
            if not made:
                made.append(Fidelity(case, sum(stage.layers for stage in case.stages)))
            return made[0]

        for method, tflops in wanted.items():

            def make(
                method: str = method, tflops: float = tflops, case: Case = case
            ) -> dict[str, Any]:
                priced = model()
                if method != "alpa.auto":
                    return priced.row(method, tflops, priced.restricted(method), counted=False)
                theirs, _ = judge_theirs(case, priced._chain(case.num_micro_batches))
                return priced.row(method, tflops, theirs, counted=True)

            table.append(journal.row(f"fidelity {name_of(case)} {method}", make))
    if any(case.num_devices == 8 for case in chosen):
        table.append(journal.row("fidelity regression", _regression))
    return table


def _regression() -> dict[str, Any]:
    """The uniform plan that Alpa's repository gives a time for."""
    (given,) = (c for c in alpa_suites()["gpt.perf_test_manual"].cases if c.published_s)
    assert given.layout is not None and given.published_s is not None
    data, tensor, pipeline = given.layout
    stages = (GivenStage(layers=1, mesh=(data, tensor)),) * pipeline
    case = dataclasses.replace(given, layout=None, stages=stages)
    # Manual stages, in which Alpa's models recompute block by block.
    priced = Fidelity(case, None)
    theirs, _ = judge_theirs(case, priced._chain(case.num_micro_batches))
    published = operations(given) / given.published_s / given.num_devices / 1e12
    return priced.row("regression", published, theirs, counted=True)
