"""What every intra planner owes to the methods, the race and the pipelines that call it."""

from __future__ import annotations

import numpy as np
import pytest
from planners.plugins import INTRAS
from planners.small_steps import mlp
from planners.test_pipeshard import plan_of

import aliquot as aq
from aliquot.cluster import Cluster, LogicalMesh
from aliquot.core import InfeasibleError, InputError
from aliquot.cost import evaluate, make_problem, price
from aliquot.planners import Space, find_alternatives, follow
from aliquot.planners.intra.fixed import everything
from aliquot.plans import violations

CLUSTER = Cluster.preset("4xH100")
STEP = mlp((64, 256, 64), 64)


@pytest.fixture(scope="module")
def problem():
    return make_problem(aq.capture(*STEP), CLUSTER)


@pytest.fixture(scope="module")
def space(problem):
    priced = price(problem, LogicalMesh(shape=(4,), cluster=CLUSTER))
    return Space(name="all", priced=priced, allowed=everything(priced))


@pytest.mark.parametrize("intra", INTRAS.values(), ids=INTRAS)
class TestEveryIntraPlanner:
    def test_costs_are_those_of_the_judge(self, intra, problem, space):
        solution = intra.solve(problem, space, memory_limit_bytes=np.inf)
        assert solution.picked.priced is space.priced
        assert solution.step_time_s == evaluate(solution.picked).total_s
        assert solution.peak_bytes == pytest.approx(solution.picked.memory.peak_bytes)
        assert 0 <= solution.lower_bound_s <= solution.step_time_s * (1 + 1e-9)

    def test_picks_are_allowed_choices(self, intra, problem, space):
        free = intra.solve(problem, space, memory_limit_bytes=np.inf)
        for node in range(len(space.allowed)):
            allowed = [mask.copy() for mask in space.allowed]
            allowed[node][free.picked.picks[node]] = False
            rest = Space(name="rest", priced=space.priced, allowed=allowed)
            solution = intra.solve(problem, rest, memory_limit_bytes=np.inf)
            assert solution is None or all(
                mask[p] for mask, p in zip(allowed, solution.picked.picks, strict=True)
            )

    def test_memory_limit_and_ceiling_are_respected(self, intra, problem, space):
        free = intra.solve(problem, space, memory_limit_bytes=np.inf)
        for limit in np.linspace(0.1, 1.0, 5) * free.peak_bytes:
            solution = intra.solve(problem, space, memory_limit_bytes=limit)
            assert solution is None or solution.peak_bytes <= limit * (1 + 1e-9)
        assert intra.solve(problem, space, memory_limit_bytes=1.0) is None
        below = intra.solve(
            problem, space, memory_limit_bytes=np.inf, ceiling_s=free.step_time_s / 2
        )
        assert below is None or below.step_time_s < free.step_time_s / 2

    def test_a_search_in_steps_has_the_result_of_solve(self, intra, problem, space):
        whole = intra.solve(problem, space, memory_limit_bytes=np.inf)
        search = intra.begin(problem, space, memory_limit_bytes=np.inf, notes={})
        search.start()
        bound = search.bound()
        assert bound is not None and bound <= whole.step_time_s * (1 + 1e-9)
        assert search.picked is not None and not search.gave_up
        assert search.improve().step_time_s == pytest.approx(whole.step_time_s, rel=1e-2)

    def test_a_search_without_solution_returns_picks_of_little_memory(self, intra, problem, space):
        search = intra.begin(problem, space, memory_limit_bytes=1000.0)
        assert search.bound() is None
        assert evaluate(search.least_memory()).total_s < np.inf

    def test_no_profiles_are_required_beyond_the_cluster(self, intra, problem):
        assert intra.required_profiles(problem) == ()

    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(aq.ShardParallel, id="shard", marks=pytest.mark.slow),
            pytest.param(aq.WholeProgram, id="program"),
        ],
    )
    def test_methods_use_the_planner(self, intra, make):
        plan = aq.plan(*STEP, cluster=CLUSTER, method=make(intra=intra), num_micro_batches=2)
        assert violations(plan) == [] and intra.name in plan.provenance.planner
        assert plan == aq.plan(
            *STEP, cluster=CLUSTER, method=make(intra=intra), num_micro_batches=2
        )

    def test_the_planner_solves_with_pinned_inputs(self, intra):
        method = aq.ManualParallel(specs={"batch.x": ("x",)}, mesh_shape=(4,), intra=intra)
        plan = aq.plan(*STEP, cluster=CLUSTER, method=method)
        assert violations(plan) == [] and plan.stages[0].shardings["batch.x"][0] == ("x",)

    def test_the_planner_solves_stages_of_a_pipeline(self, intra):
        plan = plan_of(num_stages=2, num_micro_batches=4, intra=intra)
        assert violations(plan) == [] and len(plan.stages) == 2
        assert plan.provenance.planner == f"StageDP, each stage by {intra.name}"

    def test_follow_and_alternatives_use_the_planner(self, intra, problem):
        method = aq.ShardParallel(mesh_shape=(4,), intra=intra)
        (stage,) = aq.plan(*STEP, cluster=CLUSTER, method=method).stages
        choices = follow(problem, stage, intra)
        assert len(choices) == len(problem.nodes.nodes)
        for other in find_alternatives(problem, stage, choices, intra=intra):
            assert other.step_time_s is None or other.step_time_s > 0

    def test_the_planner_solves_seeds_of_meshes_with_three_axes(self, intra):
        step = mlp((64, 256, 64), 64)
        plan = aq.plan(
            *step,
            cluster=Cluster.preset("8xH100"),
            method=aq.ShardParallel(mesh_shape=(2, 2, 2), intra=intra),
        )
        assert violations(plan) == []

    def test_infeasible_problems_raise(self, intra):
        with pytest.raises(InfeasibleError, match="The smallest found"):
            aq.plan(
                *STEP,
                cluster=CLUSTER,
                method=aq.ShardParallel(intra=intra),
                memory_limit_bytes=1000.0,
            )


@pytest.mark.parametrize("name", [name for name in INTRAS if name != "ilp"])
def test_no_planner_beats_the_bound_of_the_integer_program(name, problem, space):
    exact = INTRAS["ilp"].solve(problem, space, memory_limit_bytes=np.inf)
    other = INTRAS[name].solve(problem, space, memory_limit_bytes=np.inf)
    assert other.step_time_s >= exact.lower_bound_s * (1 - 1e-9)


def test_a_rule_that_contradicts_pinned_inputs_is_reported_as_such_and_not_as_lack_of_memory():
    method = aq.ManualParallel(specs={"state.params*": ()}, mesh_shape=(4,), intra=INTRAS["zero3"])
    with pytest.raises(InputError, match=r"fixed has no plan .* open"):
        aq.plan(*STEP, cluster=CLUSTER, method=method)
