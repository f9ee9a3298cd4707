"""One random problem planned and tried out."""

from dataclasses import dataclass, replace

import numpy as np
from planners.brute_force import AllCombinations, count_combinations, try_all
from planners.random_steps import random_cluster, random_step

from aliquot.cluster import LogicalMesh
from aliquot.core import InfeasibleError
from aliquot.cost import Priced, Problem, make_problem, price
from aliquot.planners import ILP, ShardParallel
from aliquot.planners.intra.fixed import everything
from aliquot.planners.intra.ilp import Search

MESHES = ((2,), (4,), (2, 2))
# Solutions known beforehand, as multiples of the least step time: the best itself, and one that is
# worse.
_KNOWN = (1.0, 1.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Relative differences between planned and least step time, the largest for each memory limit;
    what the problem was.

    `num_infeasible` limits were below the smallest peak, and `num_refused` of them were answered by
    `InfeasibleError`.
    """

    seed: int
    mesh: tuple[int, ...]
    target: str
    text: str
    num_nodes: int
    num_combinations: int
    differences: tuple[float, ...]
    num_infeasible: int
    num_refused: int


def compare(seed: int, *, most: int = 300_000, least: int = 30) -> Comparison | None:
    """Plan the random problem of a seed without and with memory limits; None if it is too small or
    large to try out.
    """
    rng = np.random.default_rng(seed)
    step = random_step(rng)
    shape = MESHES[seed % len(MESHES)]
    cluster = random_cluster(rng, int(np.prod(shape)))
    mesh = LogicalMesh(shape=shape, cluster=cluster)
    problem = make_problem(step.capture(), cluster, repeats=False)
    count = count_combinations(problem, mesh)
    if not least <= count <= most:
        return None
    tried = try_all(problem, mesh)
    priced = price(problem, mesh)
    outcomes = [_difference(problem, priced, tried, limit) for limit in (1e12, *tried.limits())]
    infeasible = [d for limit, d in outcomes if tried.best(limit) is None]
    return Comparison(
        seed=seed,
        mesh=shape,
        target=cluster.device.kind,
        text=step.text,
        num_nodes=len(problem.nodes.nodes),
        num_combinations=count,
        differences=tuple(d for limit, d in outcomes if tried.best(limit) is not None),
        num_infeasible=len(infeasible),
        num_refused=sum(d == 0.0 for d in infeasible),
    )


def _difference(
    problem: Problem, priced: Priced, tried: AllCombinations, limit_bytes: float
) -> tuple[float, float]:
    """The limit, and by how much the plan misses the least step time; infinite where one of the two
    finds nothing.
    """
    limited = replace(problem, num_micro_batches=1, memory_limit_bytes=limit_bytes)
    best = tried.best(limit_bytes)
    method = ShardParallel(
        mesh_shape=priced.mesh.shape, intra=ILP(relative_gap=0.0, node_limit=100_000)
    )
    try:
        decision = method.solve(limited)
    except InfeasibleError:
        return limit_bytes, 0.0 if best is None else np.inf
    if best is None:
        return limit_bytes, np.inf
    # The bound must not exceed the optimum either.
    assert decision.lower_bound_s is not None and decision.lower_bound_s <= best * (1 + 1e-9)
    found = [decision.step_time_s, *(_below(priced, limit_bytes, known * best) for known in _KNOWN)]
    return limit_bytes, max(abs(seconds - best) / best for seconds in found)


def _below(priced: Priced, limit_bytes: float, ceiling_s: float) -> float:
    """The least step time that a search finds which was told of a solution."""
    search = Search(
        priced,
        everything(priced),
        limit_bytes=limit_bytes,
        planner=ILP(relative_gap=0.0, node_limit=100_000, work_limit=np.inf),
        ceiling_s=ceiling_s,
    )
    search.bound()
    found = search.improve()
    return found.step_time_s if found else np.inf
