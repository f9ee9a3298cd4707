"""Independent micro-batches compute what `independent_cases.reference` does: on one device and on
eight, as one program and as a pipeline.
"""

import functools
import os
import re
import signal
import subprocess
import sys
from collections import Counter

import jax
import numpy as np
import pytest
from runtime.independent_cases import CASES, plain, reference, start
from runtime.pipelines import pipeline
from runtime.random_steps import random_step
from runtime.test_random_steps import _METHODS, _PAIRS, _SLOW, _differences, _results

import aliquot as aq
from aliquot.core import AliquotError, CaptureError
from aliquot.graph import capture
from aliquot.runtime._check import compare
from aliquot.sharding import plan_micro_batches

COUNT = 4
_NUM_SEEDS = 300
REPORT = {
    "name": "independent_micro_batches",
    "question": "Independent micro-batches and their definition",
    "bar": "no result differs by more than 1e-9 of its largest magnitude, in float64",
    "method": (
        f"Two steps of {_NUM_SEEDS} random steps, under two methods each on four virtual devices"
        " (pipelines: two), and of named losses on eight devices and on one, from one state over"
        " the same batches, against a reference in plain JAX: a loop over the micro-batches that"
        " averages gradients and metrics and hands statistics on, then one update. State and"
        " metrics are compared. Whether a loss is averaged or summed is what the plan says; that"
        " only sums are summed is checked. Refused: the rows of a micro-batch cannot be divided, or"
        " the step depends on how many there are. Deterministic: one run each."
    ),
    "largest": ["differ"],
}
# XLA ends the process while it compiles this one: "Check failed:
# get_first_valid_element_offset_on_dilated_shard(0) == swd->padding_low()".
_ENDED_BY_XLA = [(6, "auto", 4)]
_REFUSALS = {
    "rows_not_divided": "cannot be split over|nothing to split over|a multiple of",
    "depends_on_size": "cannot run on independent micro-batches|is another program on a micro",
}


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


def made(fn, args, method, cluster, count=COUNT):
    """A step on independent micro-batches, under a method by its name; pipelines have two stages of
    a device each.
    """
    if method == "pipeline":
        return pipeline(fn, *args, micro_batches=count, anywhere=True, semantics="independent")
    plan = aq.plan(
        fn,
        *args,
        cluster=cluster,
        method=_METHODS[method],
        num_micro_batches=count,
        micro_batch_semantics="independent",
    )
    return aq.parallelize(fn, plan, devices=jax.devices()[: cluster.num_devices])


def planned(case, method, devices):
    cluster = aq.Cluster.preset(f"{devices}xcpu")
    return made(plain(case), (start(case), case.batch), method, cluster)


def random_differences(seed, method, count):
    """How the results of a random step differ from those of its definition; nothing if they do
    not.
    """
    step = random_step(seed)
    graph = capture(step.fn, step.state, step.batches[0])
    combine = plan_micro_batches(graph, count, semantics="independent").combine
    sums = combine.get("[1].loss") == "sum"
    # A loss of no numbers is a sum in any case.
    if sums and step.loss != "sum" and step.batches[0]["x"].size:
        return f"{step.loss} is summed"
    definition = step.independent(count, sums)
    args = step.state, step.batches[0]
    found = _results(made(step.fn, args, method, _SLOW, count), step)
    off = _differences(found, _results(jax.jit(definition), step), step.tolerance)
    if off:
        # XLA may compute an array twice, in two ways: the definition's maxima then equal none of
        # their elements, and their gradients are off. Operator by operator they are not.
        with jax.disable_jit():
            off = _differences(found, _results(definition, step), step.tolerance)
    return off


def counted(found, differences_of, *case):
    """The differences of a case, which is counted as equal, as different, or by the kind of its
    refusal.
    """
    try:
        differences = differences_of(*case)
    except AliquotError as error:
        (kind,) = [kind for kind, words in _REFUSALS.items() if re.search(words, str(error))]
        found[kind] += 1
        return None
    found["differ" if differences else "equal"] += 1
    return differences


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("pair", range(len(_PAIRS)), ids=[", ".join(pair) for pair in _PAIRS])
def test_random_steps_are_the_definition(pair, count, row, x64):
    off = {}
    for method in _PAIRS[pair]:
        found = Counter()
        for seed in range(pair, _NUM_SEEDS, len(_PAIRS)):
            if (seed, method, count) in _ENDED_BY_XLA:
                continue
            if differences := counted(found, random_differences, seed, method, count):
                off[seed, method] = differences
        row(
            "Random steps",
            method=method,
            seeds=f"{pair}, {pair + len(_PAIRS)}, ...",
            micro_batches=count,
            equal=found["equal"],
            **{kind: found[kind] for kind in _REFUSALS},
            differ=found["differ"],
        )
    assert not off


@pytest.mark.slow
@pytest.mark.xfail(raises=subprocess.CalledProcessError, strict=True)
@pytest.mark.parametrize(("seed", "method", "count"), _ENDED_BY_XLA)
def test_xla_ends_no_process(seed, method, count, row):
    row("Ended by XLA", seed=seed, method=method, micro_batches=count)
    code = (
        "import jax; jax.config.update('jax_enable_x64', True);"
        " from runtime.test_independent_micro_batches import random_differences;"
        f" assert not random_differences({seed}, {method!r}, {count})"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode in (0, -signal.SIGABRT), done.stderr
    done.check_returncode()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_named_losses_are_the_definition(name, row, x64):
    case, found, off = CASES[name](), Counter(), {}
    for count in (2, 4):
        want = two_steps(jax.jit(reference(case, count)), case)

        def differences_under(method, cluster, count=count, want=want):
            args = start(case), case.batch
            step = made(plain(case), args, method, aq.Cluster.preset(cluster), count)
            return _differences(two_steps(step, case), want, 1e-9)

        on_eight = ((method, "8xcpu") for method in ("dp", "zero2", "zero3", "shard", "pipeline"))
        for where in (*on_eight, ("dp", "1xcpu")):
            if differences := counted(found, differences_under, *where):
                off[where, count] = differences
    row(
        "Named losses",
        case=name,
        equal=found["equal"],
        **{kind: found[kind] for kind in _REFUSALS},
        differ=len(off),
    )
    assert not off
    # Groups of four rewards, or chunks of two, are fewer than eight devices.
    assert not found["depends_on_size"]
    assert not found["rows_not_divided"] or name in ("grouped_rewards", "chunks")


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in CASES
        if name
        not in ("hardest_examples", "mean_of_examples", "sum_of_examples", "summed_batch_norm")
    ],
)
def test_a_pipeline_is_the_definition(name, x64):
    case = CASES[name]()
    step = made(plain(case), (start(case), case.batch), "pipeline", None)
    assert_same(two_steps(step, case), wanted(name))


@pytest.mark.parametrize(
    ("name", "method"),
    [("batch_norm", "zero3"), ("contrastive", "dp"), ("sum_of_examples", "shard")],
)
def test_the_number_of_devices_does_not_change_the_numbers(name, method, x64):
    case = CASES[name]()
    assert_same(two_steps(planned(case, method, 8), case), wanted(name))


def test_one_device_is_the_definition(x64):
    case = CASES["normalised_by_running_statistics"]()
    assert_same(two_steps(planned(case, "dp", 1), case), wanted("normalised_by_running_statistics"))


@pytest.mark.parametrize(("sizes", "schedule"), [((2, 2), "zero-bubble"), ((1, 2), "1f1b")])
def test_stages_of_several_devices_hand_statistics_on(sizes, schedule, x64):
    case = CASES["batch_norm"]()
    step = pipeline(
        plain(case),
        start(case),
        case.batch,
        sizes=sizes,
        schedule=schedule,
        micro_batches=COUNT,
        anywhere=True,
        semantics="independent",
    )
    assert_same(two_steps(step, case), wanted("batch_norm"))


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
    planned(case, "dp", 2).plan.save(tmp_path / "plan.json")
    read = aq.Plan.load(tmp_path / "plan.json")
    assert read.combine["[0].stats.mean"] == "handed on" and read.combine["[1].loss"] == "mean"
    assert "independent" in str(read)
    step = aq.parallelize(plain(case), read, devices=jax.devices()[:2])
    assert_same(two_steps(step, case), wanted("batch_norm"))


@pytest.mark.parametrize("seed", [2, 9, 10, 14])
def test_a_random_step_is_the_definition(seed, x64):
    assert not random_differences(seed, "pipeline", 2)
