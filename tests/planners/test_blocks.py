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
from aliquot.cost import make_problem, price
from aliquot.graph import capture
from aliquot.planners import ILP, Blocks, ShardParallel, Space, Task
from aliquot.planners.intra.blocks import BlockOptions, block_options
from aliquot.planners.intra.blocks._options import allowed_by, restrict_blocks
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
        options.option_of(solution.picks) is not None for options in blocks
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
    planner = Blocks(rest=exact, branch_limit=1000)
    limit = memory_share * planner.solve(problem, space, memory_limit_bytes=np.inf).peak_bytes
    solution = planner.solve(problem, space, memory_limit_bytes=limit)
    blocks = block_options(problem, space, factors="all")
    times = []
    for options in itertools.product(*[range(len(options)) for options in blocks]):
        narrowed = restrict_blocks(space, blocks, {k: (o,) for k, o in enumerate(options)})
        one = (
            exact.solve(problem, narrowed, memory_limit_bytes=limit)
            if allowed_by(narrowed.allowed)
            else None
        )
        times.append(one.step_time_s if one else np.inf)
    assert len(times) >= 25
    assert (solution.step_time_s if solution else np.inf) == pytest.approx(min(times), rel=1e-6)


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


# Steps of which the integer program splits products each its own way that a block splits as one:
# those of sums of weights, and those of experts behind a gate.
_FREER = {"adapters": 1.03, "experts": 1.025}


@pytest.mark.parametrize(
    "step",
    [
        step
        if step in {"perceptron", "heads as dims", "vision transformer", "gated"}
        else pytest.param(step, marks=pytest.mark.slow)
        for step in STEPS
    ],
)
def test_ordinary_steps_are_planned_as_well_as_by_the_integer_program(step):
    asked = Task(
        graph=capture(*step_of(step)), cluster=Cluster.preset("8xA100-40GB"), num_micro_batches=1
    )
    exact = ShardParallel().decide(asked)
    blocks = ShardParallel(intra=Blocks()).decide(asked)
    most = _FREER.get(step, 1.02)
    assert exact.lower_bound_s * (1 - 1e-9) <= blocks.step_time_s <= most * exact.step_time_s


def test_a_search_cut_short_says_so_and_keeps_its_bound(monkeypatch):
    problem = make_problem(capture(*mlp((64, 256, 64), 64)), CLUSTER)
    space = space_on(problem, (2, 2))
    whole = Blocks().solve(problem, space, memory_limit_bytes=np.inf)
    # As if products of a block were always split each its own way.
    monkeypatch.setattr(BlockOptions, "option_of", lambda self, picks: None)
    search = Blocks(branch_limit=1, rest=ILP(relative_gap=0.0)).begin(
        problem, space, memory_limit_bytes=np.inf
    )
    search._rest = ILP(relative_gap=-1.0)  # nothing is near enough to end the search
    assert search.bound() is not None
    solution = search.improve()
    assert search.gave_up and solution.status == "limit of branches reached"
    assert solution.lower_bound_s <= whole.step_time_s <= solution.step_time_s * (1 + 1e-3)


def test_it_is_a_method_of_the_command_line():
    method = aq.planners.method_by_name("blocks")
    assert method == ShardParallel(intra=Blocks())
    assert aq.planners.method_by_name("blocks", (2, 2)) == ShardParallel(
        intra=Blocks(), mesh_shape=(2, 2)
    )
