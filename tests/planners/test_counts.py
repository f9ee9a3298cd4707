"""Numbers of micro-batches of pipelines: which are tried, and that a free number is never slower
than a given one.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot as aq
from aliquot.cluster import Cluster
from aliquot.planners import Task
from aliquot.planners._counts import counts_to_try, drawn_between
from aliquot.planners._helper import HelperProcess
from aliquot.planners._layer_costs import price_layers
from aliquot.planners._pipelines import Pipelines, _price_ends
from aliquot.planners._search import Search
from aliquot.planners._tried import tried_decision


def step(state, batch):
    def loss(params):
        x = batch
        for layer in params:
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
        return jnp.mean(x**2)

    gradients = jax.grad(loss)(state["params"])
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], gradients)
    return {"params": jax.tree.map(lambda w, m: w - 0.1 * m, state["params"], mu), "mu": mu}


def arguments(width, rows, depth=4):
    shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
    params = [
        {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    ] * depth
    return {"params": params, "mu": params}, jax.ShapeDtypeStruct((rows, width), jnp.float32)


def planned(width, rows, cluster, count=None, method=None):
    method = method or aq.PipeshardParallel(num_micro_batches=count)
    return aq.plan(step, *arguments(width, rows), cluster=Cluster.preset(cluster), method=method)


def task_of(width, rows, cluster, **calibration):
    where = Cluster.preset(cluster)
    where = replace(where, device=replace(where.device, calibration=calibration))
    return Task(graph=aq.capture(step, *arguments(width, rows)), cluster=where)


@pytest.mark.parametrize(
    ("width", "rows", "cluster"),
    [
        pytest.param(1024, 1024, "2x4xA100-40GB", marks=pytest.mark.slow),
        (512, 8192, "7xA100-40GB"),
        pytest.param(2048, 256, "4x8xA100-80GB", marks=pytest.mark.slow),
    ],
)
def test_a_free_number_of_micro_batches_is_never_slower_than_a_given_one(width, rows, cluster):
    free = planned(width, rows, cluster)
    for count in (2, 4, 16):
        given = planned(width, rows, cluster, count)
        assert given.num_micro_batches == count
        assert free.prediction.step_time_s <= given.prediction.step_time_s * 1.002


def test_what_was_tried_is_listed():
    tried = planned(1024, 1024, "2x4xA100-40GB").provenance.candidates
    stages = [row for row in tried if "stages" in row["name"]]
    rest = [row for row in tried if "micro-batches" in row["name"] and row not in stages]
    assert stages
    assert "slower, as estimated from its layers" in [row["outcome"] for row in rest]


def test_pipelines_whose_layers_promise_too_little_are_not_looked_at_closely(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("stages were solved")

    monkeypatch.setattr("aliquot.planners._pipelines.solve_with", refuse)
    monkeypatch.setattr("aliquot.planners._pipelines._SMALL", 0)
    task = task_of(1024, 1024, "2x4xA100-40GB")
    search = Search(task=task, faster_than_s=1e-9)
    found = search.run([Pipelines(task=task, method=aq.PipeshardParallel())], "pipeshard")
    ((_, row),) = search.tried
    assert found is None and row.outcome == "slower, as estimated from its layers"
    assert row.step_time_s > 1e-9 and row.name.startswith("pipeshard, 2, 4, 8")
    assert row.name.endswith("128 or 256 micro-batches")


def test_a_bound_of_single_layers_above_a_pipeline_of_whole_stages_is_not_listed():
    task = replace(task_of(1024, 1024, "2x4xA100-40GB"), num_micro_batches=8)
    decision = aq.PipeshardParallel(num_stages=2).decide(task)
    above = replace(decision, lower_bound_s=2 * decision.step_time_s)
    below = replace(decision, lower_bound_s=0.5 * decision.step_time_s)
    assert tried_decision(above, "slower").lower_bound_s is None
    assert tried_decision(below, "slower").lower_bound_s == below.lower_bound_s


def test_devices_that_do_not_divide_the_batch_have_a_plan():
    """The first layer's whole backward pass waits for nothing: rounded, its parts must not exceed
    it.
    """
    method = aq.PipeshardParallel()
    cluster = Cluster.preset("7xA100-40GB")
    args = arguments(2048, 8192)
    plans = [
        aq.plan(step, *args, cluster=cluster, method=each, num_micro_batches=2)
        for each in (method, aq.ShardParallel())
    ]
    assert plans[0].prediction.step_time_s <= plans[1].prediction.step_time_s * 1.002


def test_all_divisors_that_fill_a_host_are_tried_first():
    usual, small = counts_to_try(
        task_of(64, 48, "2x4xA100-40GB").graph, Cluster.preset("2x4xA100-40GB")
    )
    assert usual == [2, 3, 4, 6, 8, 12]
    assert small == [24, 48]


@pytest.mark.parametrize(("overlap", "most"), [(False, 0.2), (True, 0.6)])
def test_chains_between_two_that_were_priced_are_near(overlap, most):
    """Where collectives hide, passes bend at the number of micro-batches from which they no longer
    do, and figures between two numbers are less exact.
    """
    calibration = {} if overlap else {"overlap_fraction": 0.0, "activation_overlap": 0.0}
    task, counts = task_of(512, 1024, "2x4xA100-40GB", **calibration), [2, 8, 64]
    price = functools.partial(
        price_layers, task, intra=aq.ILP(), helper=HelperProcess(wanted=False)
    )
    coarse = price(counts, layers=None)
    exact, fine = (price([count], layers=coarse.sketch.layers).chains[0] for count in counts[1:])
    ends = {2: coarse.chains[0], 64: fine}
    first, drawn, last = drawn_between(coarse.chains, ends)
    assert [chain.num_micro_batches for chain in (first, drawn, last)] == counts
    place = {(o.submesh, o.mesh_shape, o.recompute): k for k, o in enumerate(exact.options)}
    columns = [place[o.submesh, o.mesh_shape, o.recompute] for o in drawn.options]

    def error(chain):
        passes, wanted = (c.forward_s + c.backward_s for c in (chain, exact))
        return np.abs(np.log(passes / wanted[:, columns])).max()

    assert error(drawn) < most < error(coarse.chains[1])


def test_figures_are_drawn_from_the_nearest_numbers_that_were_priced():
    task, counts = task_of(512, 1024, "2x4xA100-40GB"), [2, 8, 16, 64]
    priced = price_layers(
        task, counts, intra=aq.ILP(), layers=None, helper=HelperProcess(wanted=False)
    )
    # Forward seconds that grow with the root of a micro-batch's size.
    rooted = [
        replace(chain, forward_s=np.full_like(chain.forward_s, count**-0.5))
        for chain, count in zip(priced.chains, counts, strict=True)
    ]
    by_count = dict(zip(counts, rooted, strict=True))
    of_ends = drawn_between(rooted, {c: by_count[c] for c in (2, 64)})
    of_three = drawn_between(of_ends, {c: by_count[c] for c in (2, 8, 64)})
    assert of_three[1] is by_count[8]
    share = (1 / 16 - 1 / 64) / (1 / 8 - 1 / 64)
    expected_s = share * 8**-0.5 + (1 - share) * 64**-0.5
    np.testing.assert_allclose(of_three[2].forward_s, expected_s)
    assert (of_ends[2].forward_s < of_three[2].forward_s).all()


def test_all_numbers_are_cut_into_as_many_layers():
    """The smallest micro-batches of this step are one layer, the largest several."""
    task = task_of(512, 8192, "7xA100-40GB")
    counts = counts_to_try(task.graph, task.cluster)[0]
    method, helper = aq.PipeshardParallel(), HelperProcess(wanted=False)
    alone = price_layers(task, counts[-1:], intra=method.intra, layers=None, helper=helper)
    ends = _price_ends(method, task, counts, helper)
    assert len({len(priced.kinds) for priced in ends.values()}) == 1
    assert len(ends[counts[0]].kinds) > len(alone.kinds)


def test_numbers_are_at_least_doubled_on_many_devices():
    task = task_of(512, 3072, "17x8xH100")
    counts, _ = counts_to_try(task.graph, task.cluster)
    all_counts = counts_to_try(task.graph, Cluster.preset("16x8xH100"))[0]
    assert (
        set(counts) < set(all_counts)
        and counts[0] == all_counts[0]
        and counts[-1] == all_counts[-1]
    )
    assert all(2 * low <= high for low, high in zip(counts, counts[1:], strict=False))


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_free_number_of_stages_is_no_slower_than_a_given_one(stages):
    free, fixed = (
        planned(
            2048, 1024, "2x4xA100-40GB", method=aq.PipeshardParallel(num_stages=count)
        ).prediction.step_time_s
        for count in (None, stages)
    )
    assert free <= fixed * (1 + 1e-9)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_number_of_stages_among_the_settings_of_the_inter_planner_is_kept(stages):
    """Small steps are also searched with other numbers of stages, and as one program."""
    method = aq.PipeshardParallel(inter=aq.StageDP(num_stages=stages))
    assert len(planned(2048, 1024, "2x4xA100-40GB", method=method).stages) == stages
