"""Megatron-LM's own grid: every stage has as many layers and devices as the others and the same two
degrees, and all is recomputed or nothing.

References: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", SC 2021. G. Liu et al., "Aceso", EuroSys 2024, section 5.1, which compares
    with the best point of this grid.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .._chain import OperatorChain
from .._configuration import Configuration, StageConfiguration
from ._problem import OnProgress, SearchProblem, SearchResult, judge_each


@dataclass(frozen=True, slots=True, kw_only=True)
class Megatron:
    """Judge every point of Megatron-LM's grid: pipeline, tensor and data degree, micro-batch of a
    rank, and whether layers are recomputed.

    The micro-batches of the problem are taken as those of a rank, as in Megatron-LM, and as those
    of all ranks together. The first and the last operator of the model, its embedding and its loss,
    are never recomputed.

    Attributes:
        keep: number of distinct configurations to return.
        budget_s: seconds after which the search ends.
    """

    keep: int = 1
    budget_s: float | None = None

    def search(
        self,
        problem: SearchProblem,
        *,
        start: Sequence[Configuration] = (),
        on_progress: OnProgress | None = None,
    ) -> SearchResult:
        """Judge all points. The best is the optimum of the grid, so it is its own bound."""
        return judge_each(
            problem,
            lambda best: _points(problem),
            space="stages of equal layers, devices and degrees, recomputed as a whole or not",
            start=start,
            keep=self.keep,
            budget_s=self.budget_s,
            on_progress=on_progress,
        )


def _points(problem: SearchProblem) -> Iterator[Configuration]:
    num = len(problem.chain.operators)
    layers = first_of_layers(problem.chain)
    algorithm = min(problem.database.algorithms)
    for devices in problem.stage_sizes():
        stages = problem.num_devices // devices
        if problem.num_devices % devices or stages > problem.max_stages or len(layers) % stages:
            continue
        each = len(layers) // stages
        cuts = [0, *layers[each::each], num]
        for tensor, rank_batch, recomputed in itertools.product(
            problem.database.tensor_degrees, problem.database.micro_batches, (False, True)
        ):
            data = devices // tensor
            micro_batch = rank_batch * data
            if (
                devices % tensor
                or micro_batch > problem.global_batch
                or not {rank_batch, micro_batch} & set(problem.micro_batches)
            ):
                continue
            again = [recomputed and 0 < k < num - 1 for k in range(num)]
            configured = [
                StageConfiguration(
                    num_devices=devices,
                    tensor=(tensor,) * (last - first),
                    data=(data,) * (last - first),
                    algorithm=(algorithm,) * (last - first),
                    recompute=tuple(again[first:last]),
                )
                for first, last in itertools.pairwise(cuts)
            ]
            yield problem.configuration(micro_batch, tuple(configured))


def first_of_layers(chain: OperatorChain) -> list[int]:
    """The first operator of each layer: those that the chain says, and in every stretch of
    operators that occur several times each occurrence of its first.
    """
    names = [operator.name for operator in chain.operators]
    counts = Counter(names)
    firsts = {
        name
        for before, name in itertools.pairwise(["", *names])
        if counts[name] > 1 and counts[before] <= 1
    }
    return [k for k, each in enumerate(chain.operators) if each.starts_layer or each.name in firsts]
