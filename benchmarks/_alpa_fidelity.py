"""Predicted throughput of the GPTs of Alpa's suite beside what its artifact published."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from _alpa_chains import answer, described, make_chains, own_counts
from _alpa_step import alpa_step
from _alpa_suite import UNLIMITED, Case, judge_theirs, of_2022
from _results import Journal

import aliquot as aq
from aliquot.cost import UNIT_FIGURES, Chain, ChainPlan
from aliquot.graph import Layers, cut_layers
from aliquot.planners import PipeshardParallel
from aliquot.planners._base import Decision, Task
from aliquot.planners._solve_stages import _solve_stages
from aliquot.planners._stage_cache import StageCache
from aliquot.planners.inter import Grid, StageDP
from aliquot.sharding import LayeredStep, layer_step


def _grouped(graph: Any, case: Case, groups: int) -> Layers:
    """Layers that are Alpa's: equal groups of blocks, with what comes before and behind."""
    layers = cut_layers(graph)
    single = {
        **case.plan,
        "num_auto_layers": groups,
        "forward_stage_layer_ids": [[k] for k in range(groups)],
    }
    edges = dataclasses.replace(case, plan=single).boundaries(layers.names)
    return dataclasses.replace(
        layers,
        starts=tuple(layers.starts[first] for first, _ in edges),
        names=tuple(f"layers[{k}]" for k in range(groups)),
        boundary_bytes=tuple(layers.boundary_bytes[last - 1] for _, last in edges),
        costs=tuple(sum(layers.costs[first:last]) for first, last in edges),
    )


def gpt_flops(spec: Mapping[str, Any], batch: int) -> float:
    """Operations of a step as the artifact counts them: with one recomputation, and the
    vocabulary's product counted once.

    >>> sizes = {"seq_len": 1024, "hidden_size": 2560, "num_layers": 32, "vocab_size": 51200}
    >>> round(gpt_flops(sizes, 1024) / 1e15, 2)
    23.34
    """
    tokens, hidden = batch * spec["seq_len"], spec["hidden_size"]
    layers = 96 * tokens * hidden**2 * spec["num_layers"] * (1 + spec["seq_len"] / (6 * hidden))
    return layers + 6 * tokens * hidden * spec["vocab_size"]


class Fidelity:
    """One GPT of the suite, priced as Alpa ran it: plans of it, with every stage solved as a whole.

    `groups` is how many of Alpa's layers there are, each worked out again as a whole; then stages
    are cut between them alone.
    """

    def __init__(self, case: Case, groups: int | None) -> None:
        self.case, self.cluster = case, of_2022(case.cluster())
        self.batch = case.plan["batch_size"]
        step = alpa_step(
            {**case.spec, "batch": self.batch}, recompute=case.plan["use_remat"], groups=groups
        )
        self.graph = aq.capture(*step)
        own = own_counts(self.graph, self.cluster)
        counts = sorted({*own, case.plan["num_micro_batches"]})
        self.layers = None if groups is None else _grouped(self.graph, case, groups)
        self.sketch, self.chains, self.kinds = make_chains(
            self.graph, self.cluster, counts, self.layers
        )
        self._layered: dict[int, LayeredStep] = {}

    def row(
        self, label: str, published: float, plan: ChainPlan | None, *, counted: bool
    ) -> dict[str, Any]:
        """A published figure beside what is predicted for a plan."""
        head = {
            "GPUs": self.case.gpus,
            "model": self.case.plan["model"],
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
        flops = gpt_flops(self.case.spec, self.batch) / self.cluster.num_devices / 1e12
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
            "plan": described(plan, chain),
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
        if count not in self._layered:
            self._layered[count] = layer_step(self.graph, count, layers=self.sketch.layers)
        task = Task(
            graph=self.graph,
            cluster=self.cluster,
            on_missing_rule="error",
            memory_limit_bytes=UNLIMITED,
        )
        layered = self._layered[count]
        result = _solve_stages(
            PipeshardParallel(), task, layered, chain, plan, self.kinds, StageCache()
        )
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
                        if o.num_devices < self.case.gpus
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
            if r["gpus"] == case.gpus and r["method"] in _METHODS
        }
        made: list[Fidelity] = []

        def model(case: Case = case, made: list[Fidelity] = made) -> Fidelity:
            if not made:
                made.append(Fidelity(case, case.plan["num_auto_layers"]))
            return made[0]

        for method, tflops in wanted.items():

            def make(
                method: str = method, tflops: float = tflops, case: Case = case
            ) -> dict[str, Any]:
                priced = model()
                if method != "alpa.auto":
                    return priced.row(method, tflops, priced.restricted(method), counted=False)
                theirs, _ = judge_theirs(case, priced._chain(case.plan["num_micro_batches"]))
                return priced.row(method, tflops, theirs, counted=True)

            table.append(journal.row(f"fidelity {case.name} {method}", make))
    if any(case.gpus == 8 for case in chosen):
        table.append(journal.row("fidelity regression", lambda: _regression(suite)))
    return table


def _regression(suite: Mapping[str, Any]) -> dict[str, Any]:
    """The uniform plan that Alpa's repository gives a time for."""
    (given,) = suite["regression_reference"].values()
    stages, mesh = given["pp"], [given["dp"], given["op"]]
    size = math.prod(mesh)
    plan = {
        **suite["pre_found_solutions"]["gpt"]["8"][0],
        "batch_size": given["batch"],
        "num_micro_batches": given["num_micro_batches"],
        "num_auto_layers": stages,
        "forward_stage_layer_ids": [[k] for k in range(stages)],
        "submesh_physical_shapes": [[1, size]] * stages,
        "submesh_logical_shapes": [mesh] * stages,
        "submesh_autosharding_option_dicts": [{"force_batch_dim_to_mesh_dim": 0}] * stages,
    }
    case = Case(
        family="gpt",
        gpus=stages * size,
        spec=suite["model_specs"]["gpt"][given["model"]],
        plan=plan,
    )
    # Manual stages, in which Alpa's models recompute block by block.
    priced = Fidelity(case, None)
    theirs, _ = judge_theirs(case, priced._chain(given["num_micro_batches"]))
    return priced.row("regression", given["tflops_per_gpu"], theirs, counted=True)
