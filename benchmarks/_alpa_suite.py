"""Alpa's benchmark suites for pipelines: models, the plans that it found, and its plans as stages
of ours.

Reference: L. Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed
    Deep Learning", OSDI
2022, and its artifact (Apache-2.0).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aliquot as aq
from aliquot.cost import Chain, ChainPlan
from aliquot.planners.inter import ManualStages

FAMILIES = ("gpt", "moe", "wresnet")
_ZOO = {"gpt": "gpt", "moe": "moe", "wresnet": "wide-resnet"}
_LAYER_RE = re.compile(r"layers\[(\d+)\]")
UNLIMITED = 1e15


def of_2022(cluster: aq.Cluster) -> aq.Cluster:
    """The cluster as the compiler of 2022 used it: XLA's GPU backend ran collectives one by one
    with everything else, and Alpa switched asynchronous all-reduces off besides
    (`alpa/global_env.py`).
    """
    figures = {**cluster.device.calibration, "overlap_fraction": 0.0}
    return replace(cluster, device=replace(cluster.device, calibration=figures))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on so many GPUs, and the plan that Alpa found for it.

    Attributes:
        spec: the model's sizes by the suite's names.
        plan: the solution, by the suite's names.
    """

    family: str
    gpus: int
    spec: Mapping[str, Any]
    plan: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Such as "gpt 2.6B on 8"."""
        return f"{self.family} {self.plan['model']} on {self.gpus}"

    @property
    def model(self) -> str:
        """In the zoo."""
        return f"{_ZOO[self.family]}-{self.plan['model'].lower()}"

    @property
    def dtype(self) -> str:
        """That the model computes in."""
        return "float32" if self.family == "wresnet" else "float16"

    @property
    def recompute(self) -> str:
        """One block at a time; the suite's layers are one or several blocks."""
        return "block" if self.plan["use_remat"] else "none"

    def cluster(self) -> aq.Cluster:
        """p3.16xlarge machines, or a part of one."""
        hosts = max(1, self.gpus // 8)
        return aq.Cluster.preset(f"{hosts}x{self.gpus // hosts}xV100-16GB")

    def boundaries(self, unit_names: Sequence[str]) -> tuple[tuple[int, int], ...]:
        """The units [first, last) of each stage: the suite's layers are equal groups of blocks, its
        cuts the nearest of ours.
        """
        starts, blocks = _block_positions(unit_names)
        firsts, least = [0], 1
        groups = self.plan["forward_stage_layer_ids"]
        for k, group in enumerate(groups[1:], 1):
            wanted = group[0] * blocks / self.plan["num_auto_layers"]
            room = range(least, len(starts) - (len(groups) - 1 - k))
            firsts.append(min(room, key=lambda unit: (abs(starts[unit] - wanted), unit)))
            least = firsts[-1] + 1
        return tuple(itertools.pairwise([*firsts, len(starts)]))


def cases(suite: Mapping[str, Any], family: str) -> list[Case]:
    """All of one family, smallest first."""
    found = suite["pre_found_solutions"][family]
    return [
        Case(
            family=family,
            gpus=int(gpus),
            spec=suite["model_specs"][family][plan["model"]],
            plan=plan,
        )
        for gpus, plans in found.items()
        for plan in plans
    ]


def judge_theirs(case: Case, chain: Chain) -> tuple[ChainPlan | None, str]:
    """Alpa's plan with our costs, whatever its memory, and what it was taken for; None if no option
    of ours can run it.

    A mesh without a forced batch is one free axis to Alpa, which may split the batch in one
    operator and parameters in the next. Ours are told beforehand: all such stages together are
    taken for what is faster and fits, or is faster.
    """
    boundaries = case.boundaries(chain.unit_names)
    best: tuple[tuple[bool, float], ChainPlan, str] | None = None
    for meshes in _meshes(case):
        options = [k for k in _options(chain, case, meshes) if k is not None]
        if len(options) < len(meshes):
            continue
        planner = ManualStages(
            boundaries=boundaries, options=tuple(options), num_micro_batches=chain.num_micro_batches
        )
        try:
            plan = planner.solve([replace(chain, memory_limit_bytes=UNLIMITED)])
        except aq.PlanMismatchError:
            continue
        key = (plan.peak_bytes > chain.memory_limit_bytes, plan.step_time_s)
        if best is None or key < best[0]:
            best = key, plan, describe(plan, chain)
    return (best[1], best[2]) if best else (None, "")


def describe(plan: ChainPlan, chain: Chain) -> str:
    """Stages in a few words, equal neighbours together: `2 x (dp2 tp1), 4 x (...)`."""
    names = [chain.options[stage.option].name for stage in plan.stages]
    return ", ".join(f"{len(list(same))} x ({name})" for name, same in itertools.groupby(names))


def _meshes(case: Case) -> Iterator[list[tuple[int, int]]]:
    shapes = [tuple(shape) for shape in case.plan["submesh_logical_shapes"]]
    free = [not options for options in case.plan["submesh_autosharding_option_dicts"]]
    yield shapes
    if any(free):
        yield [shape[::-1] if loose else shape for shape, loose in zip(shapes, free, strict=True)]


def _options(chain: Chain, case: Case, meshes: Sequence[tuple[int, int]]) -> list[int | None]:
    known = {
        (o.submesh, (o.dp, o.tp)): k for k, o in enumerate(chain.options) if o.recompute == "none"
    }
    submeshes = [tuple(shape) for shape in case.plan["submesh_physical_shapes"]]
    return [known.get(key) for key in zip(submeshes, meshes, strict=True)]


def _block_positions(unit_names: Sequence[str]) -> tuple[list[float], int]:
    """For each unit the block at whose beginning it begins, spread evenly where units share one;
    and how many blocks there are.
    """
    found = [_LAYER_RE.search(name) for name in unit_names]
    blocks = [int(match[1]) if match else None for match in found]
    count = max(block for block in blocks if block is not None) + 1
    positions: list[float] = []
    for unit, block in enumerate(blocks):
        if block is None:
            positions.append(float(count) if positions and positions[-1] > 0 else 0.0)
        else:
            positions.append(block + blocks[:unit].count(block) / blocks.count(block))
    return positions, count
