"""Independent micro-batches compute what `independent_cases.reference` does: on one device and on
eight, as one program and as a pipeline.
"""

import functools
import itertools

import jax
import numpy as np
import pytest
from runtime.independent_cases import CASES, plain, reference, start
from runtime.pipelines import pipeline
from runtime.random_steps import random_step
from runtime.test_random_steps import _differences, _results

import aliquot as aq
from aliquot.core import CaptureError
from aliquot.graph import capture
from aliquot.runtime._check import compare
from aliquot.sharding import plan_micro_batches

COUNT = 4


@functools.cache
def wanted(name):
    """The state and results of two steps of a case, as its definition says."""
    case = CASES[name]()
    return two_steps(jax.jit(reference(case, COUNT)), case)


def two_steps(step, case):
    state, results = start(case), []
    for _ in range(2):
        state, metrics = step(state, case.batch)
        state = jax.tree.map(np.array, state)
        results.append((state, jax.tree.map(np.array, metrics)))
    return results


def assert_same(found, want):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(want)]
    check = compare(paths, jax.tree.leaves(found), jax.tree.leaves(want))
    off = {x.path: x.largest for x in check.leaves if x.largest > 1e-9 * max(x.magnitude, 1e-5)}
    assert not off, off


def planned(case, method, devices, count=COUNT):
    plan = aq.plan(
        plain(case),
        start(case),
        case.batch,
        cluster=aq.Cluster.preset(f"{devices}xcpu"),
        method=method,
        num_micro_batches=count,
        micro_batch_semantics="independent",
    )
    return aq.parallelize(plain(case), plan, devices=jax.devices()[:devices])


SLOW = {"hardest_examples", "mean_of_examples", "sum_of_examples", "summed_batch_norm"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES],
)
def test_a_pipeline_is_the_definition(name, x64):
    case = CASES[name]()
    made = pipeline(
        plain(case),
        start(case),
        case.batch,
        micro_batches=COUNT,
        anywhere=True,
        semantics="independent",
    )
    assert_same(two_steps(made, case), wanted(name))


_FAST = [("batch_norm", "zero3"), ("contrastive", "dp"), ("sum_of_examples", "shard")]
_METHODS = {"dp": aq.DataParallel(), "zero3": aq.Zero3Parallel(), "shard": aq.ShardParallel()}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *_FAST,
        *(
            pytest.param(name, method, marks=pytest.mark.slow)
            # One method for each; the pipelines above run all of them.
            for name, method in zip(CASES, itertools.cycle(_METHODS))
            if (name, method) not in _FAST
        ),
    ],
)
def test_the_number_of_devices_does_not_change_the_numbers(name, method, x64):
    case = CASES[name]()
    try:
        made = planned(case, _METHODS[method], 8)
    except aq.AliquotError as error:
        # Groups of four rewards, or chunks of two, are fewer than eight devices.
        assert name in ("grouped_rewards", "chunks") and "cannot be split over 8" in str(error)
        return
    assert_same(two_steps(made, case), wanted(name))


def test_one_device_is_the_definition(x64):
    case = CASES["normalised_by_running_statistics"]()
    made = planned(case, aq.DataParallel(), 1)
    assert_same(two_steps(made, case), wanted("normalised_by_running_statistics"))


@pytest.mark.parametrize(("sizes", "schedule"), [((2, 2), "zero-bubble"), ((1, 2), "1f1b")])
def test_stages_of_several_devices_hand_statistics_on(sizes, schedule, x64):
    case = CASES["batch_norm"]()
    made = pipeline(
        plain(case),
        start(case),
        case.batch,
        sizes=sizes,
        schedule=schedule,
        micro_batches=COUNT,
        anywhere=True,
        semantics="independent",
    )
    assert_same(two_steps(made, case), wanted("batch_norm"))


def test_state_that_several_stages_read_is_refused(x64):
    def train_step(state, batch):
        def loss(w):
            h = jax.numpy.tanh((batch["x"] - state["center"]) @ w)
            center = h.mean()
            return jax.numpy.mean(((h @ w.T) @ w) ** 2), center

        (value, center), grads = jax.value_and_grad(loss, has_aux=True)(state["w"])
        return {"w": state["w"] - 0.1 * grads, "center": center}, value

    state = {"w": np.ones((6, 4)), "center": np.zeros(())}
    args = train_step, state, {"x": np.ones((8, 6))}
    with pytest.raises(CaptureError, match=r"hands state\.center on to the next micro-batch"):
        pipeline(*args, anywhere=True, semantics="independent")


def test_a_plan_says_how_results_are_combined_and_runs_from_its_file(tmp_path, x64):
    case = CASES["batch_norm"]()
    made = planned(case, aq.DataParallel(), 2)
    made.plan.save(tmp_path / "plan.json")
    read = aq.Plan.load(tmp_path / "plan.json")
    assert read.combine["[0].stats.mean"] == "handed on" and read.combine["[1].loss"] == "mean"
    assert "independent" in str(read)
    step = aq.parallelize(plain(case), read, devices=jax.devices()[:2])
    assert_same(two_steps(step, case), wanted("batch_norm"))


@pytest.mark.parametrize("seed", [2, 9, 10, 14])
def test_a_random_step_is_the_definition(seed, x64):
    step = random_step(seed)
    graph = capture(step.fn, step.state, step.batches[0])
    combine = plan_micro_batches(graph, 2, semantics="independent").combine
    sums = combine["[1].loss"] == "sum"
    assert not sums or step.loss == "sum"
    made = pipeline(
        step.fn,
        step.state,
        step.batches[0],
        micro_batches=2,
        anywhere=True,
        semantics="independent",
    )
    off = _differences(
        _results(made, step), _results(jax.jit(step.independent(2, sums)), step), step.tolerance
    )
    assert not off, (step.text, off)
