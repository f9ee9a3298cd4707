"""`Blocks` beside the integer program and beside all combinations of options."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ordinary_steps import STEPS, step_of
from planners.small_steps import experts, mlp

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster, LogicalMesh
from aliquot.core import InputError
from aliquot.cost import make_problem, price
from aliquot.graph import capture
from aliquot.planners import ILP, Blocks, ShardParallel, Space, Task
from aliquot.planners.intra.blocks import (
    BlockOptions,
    block_options,
    blocks_split_apart,
    restrict_blocks,
)
from aliquot.planners.intra.blocks._blocks import BlockSearch
from aliquot.planners.intra.fixed import everything

CLUSTER = Cluster.preset("4xH100")
_MLP, _EXPERTS = mlp((64, 256, 64), 64), experts(4, 64, 32, 64)


def task(
    model: str, batch: int, cluster: Cluster, num_micro_batches: int = 1, **options: object
) -> Task:
    workload = zoo.build(model, batch, **options)
    graph = capture(workload.train_step, workload.state, workload.batch)
    return Task(graph=graph, cluster=cluster, num_micro_batches=num_micro_batches)


@pytest.fixture(scope="module")
def problem():
    workload = zoo.build("gpt-10m", 16, overrides={"num_layers": 2})
    return make_problem(capture(workload.train_step, workload.state, workload.batch), CLUSTER)


def space_on(problem, shape: tuple[int, ...]) -> Space:
    priced = price(
        problem, LogicalMesh(shape=shape, axis_names=("x", "y")[: len(shape)], cluster=CLUSTER)
    )
    return Space(name="all", priced=priced, allowed=everything(priced))


@pytest.mark.parametrize("factors", ["cfp", "all"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["4", "2x2"])
def test_every_block_follows_one_option(problem, shape, factors):
    space = space_on(problem, shape)
    solution = Blocks(factors=factors).solve(problem, space, memory_limit_bytes=np.inf)
    blocks = block_options(problem, space, factors=factors)
    assert len(blocks) == 5 and all(
        options.option_of(solution.picked.picks) is not None for options in blocks
    )


@pytest.mark.parametrize(
    ("step", "memory_share"),
    [
        (_MLP, 1.0),
        (_EXPERTS, 0.8),
        pytest.param(_EXPERTS, 1.0, marks=pytest.mark.slow),
        pytest.param(_MLP, 0.8, marks=pytest.mark.slow),
        pytest.param(_MLP, 0.6, marks=pytest.mark.slow),
        pytest.param(_EXPERTS, 0.6, marks=pytest.mark.slow),
    ],
)
def test_no_combination_of_options_is_better(step, memory_share):
    problem = make_problem(capture(*step), CLUSTER)
    space, exact = space_on(problem, (2, 2)), ILP(relative_gap=0.0)
    free = exact.solve(problem, space, memory_limit_bytes=np.inf)
    limit = memory_share * free.peak_bytes
    solutions = {
        tolerance: Blocks(rest=exact, tolerance=tolerance).solve(
            problem, space, memory_limit_bytes=limit
        )
        for tolerance in (1e-9, 0.01)
    }
    blocks = block_options(problem, space, factors="all")
    times = []
    for options in itertools.product(*[range(len(options)) for options in blocks]):
        narrowed = restrict_blocks(space, blocks, {k: (o,) for k, o in enumerate(options)})
        one = (
            exact.solve(problem, narrowed, memory_limit_bytes=limit)
            if narrowed.has_choices
            else None
        )
        times.append(one.step_time_s if one else np.inf)
    assert len(times) >= 25
    for tolerance, solution in solutions.items():
        found_s, bound_s = (
            (solution.step_time_s, solution.lower_bound_s) if solution else (np.inf, np.inf)
        )
        assert found_s <= (1 + tolerance) * min(times) * (1 + 1e-6)
        assert bound_s <= min(times) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "num_micro_batches"),
    [
        pytest.param("gpt-350m", "8xH100", 64, 1, marks=pytest.mark.slow),
        pytest.param("gpt-1.3b", "2x4xV100-16GB", 64, 4, marks=pytest.mark.slow),
        pytest.param("moe-380m", "8xH100", 64, 1, marks=pytest.mark.slow),
        pytest.param("moe-7.1b", "8x8xH100", 256, 4, marks=pytest.mark.slow),
        ("llama-7b", "8xA100-40GB", 32, 4),
        pytest.param("wide-resnet-250m", "4xV100-16GB", 64, 1, marks=pytest.mark.slow),
        # Its backward pass exchanges the two axes.
        pytest.param("wide-resnet-6.8b", "8x8xH100", 256, 1, marks=pytest.mark.slow),
    ],
)
def test_blocks_come_within_two_percent_of_the_integer_program(
    model, cluster, batch, num_micro_batches
):
    asked = task(
        model,
        batch,
        Cluster.preset(cluster),
        num_micro_batches,
        scan=model in ("llama-7b", "moe-7.1b"),
    )
    exact = ShardParallel().decide(asked)
    blocks = ShardParallel(intra=Blocks()).decide(asked)
    assert exact.lower_bound_s * (1 - 1e-9) <= blocks.step_time_s <= 1.02 * exact.step_time_s


_IN_CI = {
    "perceptron",
    "heads as dims",
    "vision transformer",
    "gated",
    "adapters",
    "residual convolutions",
}


@pytest.mark.parametrize(
    "step",
    [step if step in _IN_CI else pytest.param(step, marks=pytest.mark.slow) for step in STEPS],
)
def test_ordinary_steps_are_planned_as_well_as_by_the_integer_program(step):
    asked = Task(
        graph=capture(*step_of(step)), cluster=Cluster.preset("8xA100-40GB"), num_micro_batches=1
    )
    exact = ShardParallel().decide(asked)
    blocks = ShardParallel(intra=Blocks()).decide(asked)
    # One decision for a block may cost 1 %, beside the gap of the integer programs.
    assert exact.lower_bound_s * (1 - 1e-9) <= blocks.step_time_s <= 1.011 * exact.step_time_s


@pytest.mark.parametrize(
    ("step", "cluster", "tolerance", "apart", "status"),
    [
        # The second product of a layer is worth summing over two devices, but not the first one of
        # the next layer, which is in its block.
        ("adapters", "8xV100-32GB", 0.01, 1, "optimal"),
        ("adapters", "8xV100-32GB", 0.05, 0, "rounded"),
        # One of two blocks would cost 2 %, both together 8 %.
        pytest.param("experts", "8xA100-40GB", 0.05, 1, "rounded", marks=pytest.mark.slow),
    ],
)
def test_a_block_is_split_apart_only_where_one_decision_costs_more_than_the_tolerance(
    step, cluster, tolerance, apart, status
):
    where = Cluster.preset(cluster)
    problem = make_problem(capture(*step_of(step)), where)
    priced = price(problem, LogicalMesh(shape=(4, 2), axis_names=("x", "y"), cluster=where))
    space = Space(name="all", priced=priced, allowed=everything(priced))
    solution = Blocks(tolerance=tolerance).solve(problem, space, memory_limit_bytes=np.inf)
    exact = ILP().solve(problem, space, memory_limit_bytes=np.inf)
    assert len(blocks_split_apart(problem, solution.picked)) == apart
    assert solution.status == status
    assert solution.lower_bound_s <= exact.step_time_s * (1 + 1e-9)
    assert solution.step_time_s <= (1 + tolerance) * exact.step_time_s * (1 + 1e-3)


def test_blocks_that_are_split_apart_are_tried_one_by_one_up_to_a_limit(monkeypatch):
    problem = make_problem(capture(*mlp((64, 256, 64), 64)), CLUSTER)
    space, tried = space_on(problem, (2, 2)), []
    # As if products of a block were always split each its own way, and never fitted together.
    monkeypatch.setattr(BlockOptions, "option_of", lambda self, picks: None)
    monkeypatch.setattr(BlockSearch, "_solve", lambda self, options, _: tried.append(options))
    solution = Blocks(solve_limit=1).solve(problem, space, memory_limit_bytes=np.inf)
    assert [sorted(options) for options in tried] == [[0, 1], [0]]
    assert 0 < solution.lower_bound_s <= solution.step_time_s


@pytest.mark.parametrize("options", [{"tolerance": 0.0}, {"solve_limit": 0}])
def test_a_tolerance_and_a_limit_are_positive(options):
    with pytest.raises(InputError, match=next(iter(options))):
        Blocks(**options)


def test_it_is_a_method_of_the_command_line():
    method = aq.planners.method_by_name("blocks")
    assert method == ShardParallel(intra=Blocks())
    assert aq.planners.method_by_name("blocks", (2, 2)) == ShardParallel(
        intra=Blocks(), mesh_shape=(2, 2)
    )
