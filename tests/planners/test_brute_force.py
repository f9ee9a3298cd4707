"""The integer program finds the best of all combinations, and says when there is none."""

import itertools
import os
import subprocess
import sys
from collections import Counter

import pytest
from planners.comparing import MESHES, compare

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster
from aliquot.cost import make_problem
from aliquot.planners import ILP, ShardParallel

_SEEDS = 110
_PARTS = 5
_NUM_EACH = 80
_MOST = 1_000_000
# At the limit of the smallest peak of these, presolving by HiGHS 1.12 to 1.15 would not end.
_ENDLESS = (212, 275, 408)
REPORT = {
    "name": "ilp_brute_force",
    "question": "Is the integer program's plan the best of all combinations of choices?",
    "bar": (
        "relative difference of the planned step time to the least of all combinations at most"
        " 1e-9, and every limit below the smallest peak is refused"
    ),
    "method": (
        f"{_NUM_EACH} random small training steps on each mesh: chains of matrix products, batched"
        " products, lookups, reductions, reshapes and residuals with shared weights; forward alone,"
        " SGD, momentum; on random clusters. Nothing is folded; each without a memory limit and"
        " with up to four; all combinations are tried that are 30 to a million."
    ),
    "largest": ["difference", "most_combinations", "most_nodes"],
}


@pytest.mark.parametrize("part", [0, 3, 4])
def test_the_program_finds_the_optimum_of_brute_force(part):
    found = [c for seed in range(part, _SEEDS, _PARTS) if (c := compare(seed)) is not None]
    assert len(found) >= 5
    assert_optimal(found)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_the_program_finds_the_optimum_of_many_problems(mesh, row):
    seeds = itertools.count(MESHES.index(mesh), len(MESHES))
    every = (compare(seed, most=_MOST) for seed in seeds)
    found = [*itertools.islice(filter(None, every), _NUM_EACH)]
    targets = Counter(c.target for c in found)
    tried = sorted(c.num_combinations for c in found)
    row(
        "Meshes",
        mesh="x".join(map(str, mesh)),
        problems=len(found),
        last_seed=found[-1].seed,
        comparisons=sum(len(c.differences) for c in found),
        difference=max(max(c.differences) for c in found),
        limits_below_the_smallest_peak=sum(c.num_infeasible for c in found),
        refused=sum(c.num_refused for c in found),
        median_combinations=tried[len(tried) // 2],
        most_combinations=tried[-1],
        most_nodes=max(c.num_nodes for c in found),
        unequal_seeds=[c.seed for c in found if max(c.differences) > 1e-9],
        targets=", ".join(f"{name} {targets[name]}" for name in sorted(targets)),
    )
    assert {c.mesh for c in found} == {mesh}
    assert_optimal(found)


@pytest.mark.parametrize("seed", _ENDLESS)
def test_the_solver_ends(seed):
    """In a process of its own, which can be stopped."""
    code = f"from planners.comparing import compare; print(max(compare({seed}).differences) < 1e-9)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "True\n"


def assert_optimal(found):
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
