"""The integer program finds the best of all combinations, and says when there is none."""

import pytest
from planners.comparing import compare

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster
from aliquot.cost import make_problem
from aliquot.planners import ILP, ShardParallel

_SEEDS = 110
_PARTS = 5


@pytest.mark.parametrize(
    "part", [pytest.param(k, marks=pytest.mark.slow if k in (1, 2) else ()) for k in range(_PARTS)]
)
def test_the_program_finds_the_optimum_of_brute_force(part):
    found = [c for seed in range(part, _SEEDS, _PARTS) if (c := compare(seed)) is not None]
    assert len(found) >= 5
    wrong = [(c.seed, c.mesh, c.differences, c.text) for c in found if max(c.differences) > 1e-9]
    assert wrong == []
    assert sum(c.num_infeasible for c in found) == sum(c.num_refused for c in found) >= len(found)


def test_programs_that_the_solver_calls_unbounded_are_solved():
    """Without presolving, HiGHS 1.15 says so of this problem's least memory."""
    found = compare(284, most=400_000)
    assert found and max(found.differences) <= 1e-9
    assert found.num_infeasible == found.num_refused == 1


# Llama's first layer writes one array less than the others, which share its class: folding counts
# it for all.
@pytest.mark.parametrize(("family", "tolerance"), [("gpt", 1e-6), ("llama", 3e-4)])
@pytest.mark.parametrize(
    "num_layers",
    [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)],
)
def test_folded_optimum_is_that_of_all_layers(family, tolerance, num_layers):
    """Folding restricts choices, so its optimum is no better; without a memory limit it is as
    good.
    """
    folded, apart = (_best(family, num_layers, repeats) for repeats in (True, False))
    assert folded >= apart * (1 - 1e-9)
    assert folded == pytest.approx(apart, rel=tolerance)


def _best(family: str, num_layers: int, repeats: bool) -> float:
    config = zoo.configure(
        {"gpt": "gpt-125m", "llama": "llama-7b"}[family],
        num_layers=num_layers,
        hidden_size=64,
        num_heads=4,
        seq_len=32,
        vocab_size=128,
    )
    workload = zoo.build(config, 8, optimizer="sgd", recompute="none")
    graph = aq.capture(workload.train_step, workload.state, workload.batch)
    problem = make_problem(graph, Cluster.preset("4xcpu"), repeats=repeats, memory_limit_bytes=1e12)
    if repeats:
        assert problem.nodes.folded
    decision = ShardParallel(mesh_shape=(4,), intra=ILP(relative_gap=0.0)).solve(problem)
    assert decision.status == "optimal"
    return decision.step_time_s
