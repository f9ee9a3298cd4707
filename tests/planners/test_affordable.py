"""What a known solution rules out is left out of the program, and nothing else."""

import numpy as np
import pytest

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster, LogicalMesh
from aliquot.cost import make_problem, price
from aliquot.planners import ILP, WholeProgram
from aliquot.planners.intra.fixed import everything
from aliquot.planners.intra.ilp import Search, _ilp
from aliquot.planners.intra.ilp._affordable import affordable

CLUSTER = Cluster.preset("2x4xH100")
CONFIG = zoo.configure("gpt-125m")
UNLIMITED = 1e15


@pytest.fixture(scope="module")
def problem():
    workload = zoo.build(CONFIG, 1024, optimizer="sgd")
    graph = aq.capture(workload.train_step, workload.state, workload.batch)
    return make_problem(graph, CLUSTER, memory_limit_bytes=UNLIMITED)


@pytest.fixture(scope="module")
def priced(problem):
    return price(problem, LogicalMesh(shape=(2, 4), cluster=CLUSTER))


@pytest.fixture(scope="module")
def best(priced):
    return search(priced, np.inf)[1]


def search(priced, ceiling_s):
    """The bound and the solution of a search up to a ceiling."""
    found = Search(
        priced,
        everything(priced),
        limit_bytes=UNLIMITED,
        planner=ILP(relative_gap=0.0),
        ceiling_s=ceiling_s,
    )
    return found.bound(), found.improve()


def num_conversions(priced):
    return sum(int(np.isfinite(edge.seconds).sum()) for edge in priced.edges)


def test_a_ceiling_at_the_optimum_keeps_the_optimum(priced, best):
    within, kept = affordable(priced, everything(priced), best.step_time_s)
    assert all(mask[pick] for mask, pick in zip(kept, best.picked.picks, strict=True))
    for table, ends in zip(within.edges, best.picked.ends, strict=True):
        assert np.isfinite(table.seconds[ends])


def test_a_ceiling_leaves_few_conversions(priced, best):
    within, kept = affordable(priced, everything(priced), 1.05 * best.step_time_s)
    assert num_conversions(within) < 0.5 * num_conversions(priced)
    assert sum(mask.sum() for mask in kept) < 0.8 * sum(len(node.choices) for node in priced.nodes)


def test_no_ceiling_leaves_all(priced):
    assert affordable(priced, everything(priced), np.inf)[0] is priced


def test_a_ceiling_below_the_optimum_leaves_no_solution_and_is_a_bound(priced, best):
    for share in (0.999, 0.5, 1e-6):
        bound, found = search(priced, share * best.step_time_s)
        assert bound == pytest.approx(share * best.step_time_s)
        assert found is None or found.step_time_s >= best.step_time_s * (1 - 1e-9)


def test_a_race_passes_incumbents_to_later_meshes_as_ceilings(problem, monkeypatch):
    told = []

    class Told(Search):
        def __init__(self, priced, allowed, **options):
            told.append((len(priced.mesh.shape), options["ceiling_s"]))
            super().__init__(priced, allowed, **options)

    monkeypatch.setattr(_ilp, "Search", Told)
    decision = WholeProgram().solve(problem)
    single = [
        c.step_time_s
        for c in decision.candidates
        if "x" not in c.mesh and c.step_time_s is not None
    ]
    assert told[0] == (1, np.inf)
    several = [ceiling for axes, ceiling in told if axes > 1]
    # The second of them may begin with what the first has found.
    assert len(several) == 2 and several[0] == min(single) and several[1] <= several[0]
