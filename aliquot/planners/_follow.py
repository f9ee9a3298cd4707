"""Questions about an existing plan: the best choices that keep its splits of the inputs, and the
cost of other splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cost import MeshUse, Picked, Priced, Problem, price
from ..graph import wildcard
from ..plans import StagePlan
from ..sharding import Choice, format_spec, project, without_partial
from ._neighbourhood import choices_to_try
from ._race import Entry, Race
from .intra import ILP, AbstractIntra, Space, fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSplit:
    """One array split in another way, and the step time of the best plan with that split (None if
    none fits).
    """

    subject: str
    chosen: str
    alternative: str
    step_time_s: float | None


def follow(
    problem: Problem, stage: StagePlan, intra: AbstractIntra | None = None
) -> tuple[Choice, ...]:
    """The best choices that split the inputs as a stage does; `intra` finds them, by default
    `ILP()`.

    Raises:
        InputError: no choice splits some input that way.
        InfeasibleError: nothing fits in memory.
    """
    intra = intra or ILP()
    pinned = frozenset(port.node for port in problem.nodes.input_ports if port.node >= 0)
    priced = _priced(problem, stage, (), intra, pinned)
    kinds = fixed.kinds_of(problem)
    pins = fixed.pinned(problem, priced, stage.shardings, stage.axis_names)
    open_choices = _open_choices(priced, kinds)
    # Where the data axes rule out a node's pinned choice, the plan's own split takes precedence.
    masks = [a & b if (a & b).any() else b for a, b in zip(open_choices, pins, strict=True)]
    entry = Entry(space=Space(name="follow", priced=priced, allowed=masks), intra=intra)
    decision = Race(problem=problem, method="follow", intra=intra).best([entry])
    return decision.picked.choices


def _open_choices(priced: Priced, kinds: fixed.Kinds) -> fixed.Masks:
    """Masks under which the data axes split only the batch, if they divide it."""
    choices = [node.choices for node in priced.nodes]
    masks = fixed.data_axes_restriction(priced.graph, choices, kinds, priced.use.data_axes)
    return masks or fixed.everything(priced)


def find_alternatives(
    problem: Problem,
    stage: StagePlan,
    choices: Sequence[Choice],
    *,
    most: int = 5,
    intra: AbstractIntra | None = None,
) -> list[OtherSplit]:
    """For each of the largest inputs, the best plan on the same mesh that splits it in another way;
    `intra` finds them, by default `ILP()`.
    """
    # An explanation needs estimates for many arrays, not a proof for each.
    quick = (intra or ILP()).coarser(relative_gap=1e-2, node_limit=20)
    priced = _priced(problem, stage, choices, quick, frozenset())
    picked = Picked.of_choices(priced, choices)
    kinds = fixed.kinds_of(problem)
    masks = _open_choices(priced, kinds)
    weight: dict[int, tuple[int, int]] = {}
    for k, (item, port) in enumerate(
        zip(problem.graph.inputs, priced.graph.input_ports, strict=True)
    ):
        if port.node >= 0:
            total, first = weight.get(port.node, (0, k))
            weight[port.node] = total + problem.graph.values[item.value].num_bytes, first
    # Largest first, ties in program order, so that the list is the same each time.
    largest = sorted(weight, key=lambda n: (-weight[n][0], n))[:most]
    alternatives = [_without(problem, picked, masks, n, weight[n][1], quick) for n in largest]
    return [alternative for alternative in alternatives if alternative is not None]


def _priced(
    problem: Problem,
    stage: StagePlan,
    choices: Sequence[Choice],
    intra: AbstractIntra,
    also: frozenset[int],
) -> Priced:
    """The problem on a stage's mesh, with the stage's own choices among those that are priced."""
    use = MeshUse.of_stage(stage, problem.cluster)
    tried = choices_to_try(problem, use, intra, also)
    if choices:
        tried = [
            # Choices are sorted, so that equal ones are priced once.
            np.unique(np.vstack([some, [mine]]), axis=0)
            for some, mine in zip(tried, choices, strict=True)
        ]
    return price(problem, use, repeats=problem.num_micro_batches, choices=tried)


def _without(
    problem: Problem,
    picked: Picked,
    masks: fixed.Masks,
    node: int,
    k: int,
    intra: AbstractIntra,
) -> OtherSplit | None:
    """The best choices that split input `k` in another way than those picked; None if there is no
    other way.
    """
    priced = picked.priced
    item, port = problem.graph.inputs[k], priced.graph.input_ports[k]
    rank = len(problem.graph.values[item.value].shape)
    table = priced.nodes[node].choices
    specs = []
    for c in table:
        specs.append(without_partial(project(tuple(int(f) for f in c), port.projection)))
    chosen = specs[int(picked.picks[node])]
    is_other_split = masks[node] & np.array([s != chosen for s in specs])
    if not is_other_split.any():
        return None
    open_choices = list(masks)
    open_choices[node] = is_other_split
    space = Space(name="another split", priced=priced, allowed=open_choices)
    solution = intra.solve(problem, space, memory_limit_bytes=problem.memory_limit_bytes)
    names = priced.mesh.axis_names
    spec = specs[int(solution.picked.picks[node])] if solution else None
    return OtherSplit(
        subject=wildcard(item.path),
        chosen=format_spec(chosen, names, rank),
        alternative=format_spec(spec, names, rank) if spec else "any other split",
        step_time_s=solution.step_time_s if solution else None,
    )
