"""Searches where memory depends on many choices together: whether products for gradients run in
turn or wait.
"""

from dataclasses import replace

import numpy as np
import pytest

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster, LogicalMesh
from aliquot.cost import (
    Picked,
    evaluate,
    make_problem,
    may_take_turns,
    memory_model,
    price,
)
from aliquot.planners import ILP
from aliquot.planners.intra.fixed import everything
from aliquot.planners.intra.ilp import Search

_CLUSTER = Cluster.preset("4xH100")


@pytest.fixture(scope="module")
def problem():
    config = zoo.configure(
        "llama-7b",
        num_layers=3,
        hidden_size=256,
        num_heads=4,
        seq_len=32,
        vocab_size=512,
        ffn_size=256,
    )
    work = zoo.build(config, 64, dtype="float32", recompute="block")
    return make_problem(aq.capture(work.train_step, work.state, work.batch), _CLUSTER)


def on_mesh(problem, *shape):
    return price(
        problem, LogicalMesh(shape=shape, axis_names=("x", "y")[: len(shape)], cluster=_CLUSTER)
    )


def test_running_weight_gradients_at_once_fits_where_deferring_does_not(problem):
    """The limit lies between what these choices need and what they would need if all products
    waited that may.
    """
    priced = on_mesh(problem, 2, 2)
    rng = np.random.default_rng(0)
    tried = 0
    for _ in range(40):
        picks = np.array([rng.integers(len(n.choices)) for n in priced.nodes])
        picked = Picked(priced=priced, picks=picks)
        known = picked.memory.peak_bytes
        if not np.isfinite(evaluate(picked).total_s):
            continue
        waiting = memory_model(priced, in_turn=False).under(picked).peak_bytes
        if known * 1.05 > waiting:
            continue
        tried += 1
        allowed = [np.arange(len(n.choices)) == pick for n, pick in zip(priced.nodes, picks)]
        search = Search(priced, allowed, limit_bytes=(known + waiting) / 2)
        assert search.bound() == pytest.approx(evaluate(picked).total_s)
        found = search.improve()
        assert found is not None and found.peak_bytes == known
        assert (found.picked.picks == picks).all()
    assert tried


def test_if_the_best_choices_fit_only_at_once_all_products_are_deferred(problem):
    """The bound is still one of all choices, and the status says what was searched."""
    # Where little is hidden beside compute, splits that need less memory are slower.
    little = replace(_CLUSTER.device, calibration={"overlap_fraction": 0.2})
    cluster = replace(_CLUSTER, device=little)
    priced = price(problem, LogicalMesh(shape=(4,), axis_names=("x",), cluster=cluster))
    free = Search(priced, everything(priced), limit_bytes=1e15)
    free.bound()
    best = free.improve()
    once = memory_model(priced, in_turn=True).under(best.picked).peak_bytes
    limit_bytes = once + 0.3 * (best.peak_bytes - once)
    planner = ILP(relative_gap=1e-4, node_limit=20)
    search = Search(priced, everything(priced), limit_bytes=limit_bytes, planner=planner)
    bound = search.bound()
    found = search.improve()
    assert found.picked.memory.peak_bytes == found.peak_bytes <= limit_bytes
    assert bound <= search.lower_bound_s < found.step_time_s == evaluate(found.picked).total_s
    assert found.status == "optimal if every deferrable product is deferred"


def test_without_overlap_choices_do_not_change_what_is_deferred(problem):
    tpus = Cluster.preset("v5e-4")
    priced = price(problem, LogicalMesh(shape=(4,), axis_names=("x",), cluster=tpus))
    assert may_take_turns(on_mesh(problem, 4)) and not may_take_turns(priced)
    first = Picked.first(priced)
    either = [
        memory_model(priced, in_turn=in_turn).under(first).over_time() for in_turn in (True, False)
    ]
    assert (either[0] == either[1]).all()


def test_a_problem_that_can_never_fit_is_not_solved(problem):
    """Every array at its smallest is too much already."""
    search = Search(on_mesh(problem, 2, 2), everything(on_mesh(problem, 2, 2)), limit_bytes=1e5)
    assert search.bound() is None
    assert search.num_solves == 0
