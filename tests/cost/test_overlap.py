"""What runs beside compute, and how much of it: in one program and in a stage of a pipeline."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import aliquot as aq
from aliquot.cluster import Cluster, Link, LogicalMesh
from aliquot.cost import MeshUse, Picked, evaluate, make_problem, phase_costs, price
from aliquot.graph import Phase

WIDTH, ROWS, OVERLAP, OF_SUMS = 256, 512, 0.9, 0.25


def train_step(state, batch):
    """Two products, one after the other."""

    def loss(params):
        return jnp.mean((jnp.tanh(batch @ params["first"]) @ params["second"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def step_on(bandwidth, of_sums):
    """The step and four devices, which hide this share of sums of activations."""
    state = {name: jnp.zeros((WIDTH, WIDTH)) for name in ("first", "second")}
    graph = aq.capture(train_step, state, jnp.zeros((ROWS, WIDTH)))
    cluster = Cluster.preset("4xH100")
    figures = {"overlap_fraction": OVERLAP, "activation_overlap": of_sums}
    device = dataclasses.replace(cluster.device, calibration=figures)
    link = Link(latency_s=1e-7, bandwidth_bytes_per_s=bandwidth)
    return graph, dataclasses.replace(cluster, device=device, intra=link)


def with_batch_split(bandwidth, repeats):
    """The step with its batch split."""
    graph, cluster = step_on(bandwidth, 0.0)
    mesh = LogicalMesh(shape=(4,), axis_names=("x",), cluster=cluster)
    problem = make_problem(graph, cluster, num_micro_batches=repeats)
    priced = price(problem, MeshUse(mesh=mesh, data_axes=frozenset({0})), repeats=repeats)
    decision = aq.DataParallel().solve(problem)
    return Picked.of_choices(priced, decision.picked.choices), graph


@pytest.mark.parametrize("repeats", [1, 8])
@pytest.mark.parametrize("bandwidth", [1e8, 1e14])
def test_gradients_that_are_summed_once_hide_behind_the_last_backward_pass(repeats, bandwidth):
    picked, graph = with_batch_split(bandwidth, repeats)
    time = evaluate(picked)
    backward = sum(n.compute[Phase.BACKWARD, k] for n, k in picked.rows())
    # On slow links all of the last pass hides something, on fast ones all that can be is hidden.
    can_hide = OVERLAP * time.gradient_s
    behind_last = min(can_hide, float(backward) / repeats)
    assert (behind_last < can_hide) == (bandwidth == 1e8)
    assert time.hidden_s == pytest.approx(behind_last, rel=1e-2)
    # A stage of a pipeline hides as much.
    costs = phase_costs(picked, graph)
    assert costs.gradient_s == pytest.approx(time.gradient_s - behind_last, rel=1e-2)
    passes = repeats * (costs.forward_s + costs.backward_s) + costs.once_s
    assert passes == pytest.approx(time.total_s, rel=1e-2)


@pytest.mark.parametrize("bandwidth", [1e4, 1e11])
def test_a_part_of_the_sums_of_activations_hides_behind_compute(bandwidth):
    graph, cluster = step_on(bandwidth, OF_SUMS)
    decision = aq.TensorParallel(degree=4).solve(make_problem(graph, cluster))
    time = evaluate(decision.picked)
    assert time.communication_s > 10 * time.gradient_s
    beside = sum(n.beside_s[k] for n, k in decision.picked.rows())
    can_hide = OF_SUMS * time.communication_s + OVERLAP * time.gradient_s
    assert time.hidden_s == pytest.approx(min(can_hide, float(beside)))
    costs = phase_costs(decision.picked, graph)
    passes = costs.forward_s + costs.backward_s + costs.once_s
    assert passes == pytest.approx(time.total_s, rel=1e-3)


@pytest.mark.parametrize("repeats", [1, 8])
def test_sums_of_gradients_between_hosts_hide_less(repeats):
    """On links as fast, the sums over two hosts hide a smaller share than those inside one."""
    hidden = {}
    for hosts in (1, 2):
        graph, cluster = step_on(1e14, 0.0)
        cluster = dataclasses.replace(
            cluster, num_hosts=hosts, devices_per_host=4 // hosts, inter=cluster.intra
        )
        figures = {"overlap_fraction": OVERLAP, "gradient_overlap_between_hosts": 0.5}
        device = dataclasses.replace(cluster.device, calibration=figures)
        cluster = dataclasses.replace(cluster, device=device)
        problem = make_problem(graph, cluster, num_micro_batches=repeats)
        decision = aq.DataParallel().solve(problem)
        time = evaluate(decision.picked)
        hidden[hosts] = time.hidden_s / time.gradient_s
    assert hidden[1] - hidden[2] == pytest.approx(OVERLAP - 0.5)
