"""Choices worth pricing on meshes of three or more axes, which have too many to price all.

Neighbouring axes are first joined to two in every possible way, and each such mesh is solved. Its
solution is a choice on the finer mesh too. Priced on the finer mesh are these choices, their
mixtures axis by axis, and all choices that differ from one of them in one axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..cluster import AXIS_NAMES, LogicalMesh
from ..cost import MeshUse, Problem, can_split, enumerate_choices, price
from ..sharding import Choice, Node
from .intra import AbstractIntra, Space, fixed

Ints = NDArray[np.int64]
FEW_AXES = 2


def choices_to_try(
    problem: Problem,
    use: MeshUse,
    intra: AbstractIntra,
    also: frozenset[int] = frozenset(),
) -> list[Ints]:
    """For each node, the choices to price on a mesh: all of them if it has at most two axes.

    Args:
        intra: solves the meshes of two axes.
        also: nodes whose choices are all priced on any mesh.
    """
    nodes, mesh = problem.nodes.nodes, use.mesh
    if len(mesh.shape) <= FEW_AXES:
        return [enumerate_choices(node, mesh.shape) for node in nodes]
    seeds = list(_seeds(problem, use, intra.coarser(relative_gap=1e-2, node_limit=100)))
    choices = []
    for node in nodes:
        if node.index in also:
            choices.append(enumerate_choices(node, mesh.shape))
            continue
        near = _near(node, [seed[node.index] for seed in seeds], len(mesh.shape))
        fitting = [c for c in near if can_split(node, c, mesh.shape)]
        choices.append(np.array(sorted(fitting), np.int64).reshape(len(fitting), len(mesh.shape)))
    return choices


def _near(node: Node, seeds: Sequence[Choice], num_axes: int) -> set[Choice]:
    """Seeds, their mixtures, choices that differ from a seed in one axis, and in any case the
    choice that splits nothing.
    """
    whole: Choice = (-1,) * num_axes
    # The choice that splits nothing is always possible, so every node has at least one.
    near = {
        whole,
        *itertools.product(*({seed[a] for seed in seeds or (whole,)} for a in range(num_axes))),
    }
    for seed in {whole, *seeds}:
        for a in range(num_axes):
            near |= {(*seed[:a], f, *seed[a + 1 :]) for f in range(-1, len(node.factors))}
    return near


def _seeds(problem: Problem, use: MeshUse, intra: AbstractIntra) -> Iterator[list[Choice]]:
    """The best choices on every mesh of two axes that joins neighbouring axes of this one."""
    kinds, mesh = fixed.kinds_of(problem), use.mesh
    for cut in range(1, len(mesh.shape)):
        groups = (range(cut), range(cut, len(mesh.shape)))
        shape = tuple(math.prod(mesh.shape[a] for a in group) for group in groups)
        # A joined axis splits the batch alone only if all its parts do.
        joined = frozenset(k for k, group in enumerate(groups) if set(group) <= use.data_axes)
        coarse = LogicalMesh(shape=shape, axis_names=AXIS_NAMES[:2], cluster=mesh.cluster)
        coarse_use = MeshUse(mesh=coarse, data_axes=joined)
        priced = price(problem, coarse_use, repeats=problem.num_micro_batches)
        rows = [node.choices for node in priced.nodes]
        masks = fixed.data_axes_restriction(problem.nodes, rows, kinds, joined)
        if masks is None:
            continue
        space = Space(name=f"{intra.name} on {coarse}", priced=priced, allowed=masks)
        solution = intra.solve(problem, space, memory_limit_bytes=problem.memory_limit_bytes)
        if solution is None:
            continue
        yield [
            # All axes that a joined axis stands for take its choice.
            tuple(choice[k] for k, group in enumerate(groups) for _ in group)
            for choice in solution.picked.choices
        ]
