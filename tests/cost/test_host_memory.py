"""What host memory costs: no device memory, but copies, which hide beside compute where there is
enough of it.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
from offloaded import BATCH, HIDDEN, WIDTH, batch_of, offloaded_step, shapes_of

import aliquot as aq
from aliquot.cluster import Host, LogicalMesh, target_for
from aliquot.core import InfeasibleError, PlanFileError
from aliquot.cost import Picked, copy_seconds, evaluate, make_problem, price, queues
from aliquot.graph import capture

LAYERS = 3
GPU = aq.Cluster.preset("1xH100")


def planned(policy, moments="device", cluster=GPU, method=None, **settings):
    step, init = offloaded_step(policy, layers=LAYERS, moments=moments)
    state = shapes_of(init(jax.random.key(0)), moments)
    return aq.plan(
        step, state, batch_of(), cluster=cluster, method=method or aq.DataParallel(), **settings
    )


def with_host(cluster, **changes):
    return replace(cluster, host=replace(cluster.host, **changes))


def test_offloaded_activations_are_host_memory():
    kept, moved = planned("save").prediction, planned("names").prediction
    num_bytes = LAYERS * BATCH * HIDDEN * 4
    assert kept.host_memory_bytes == {} and kept.host_transfer_s == 0
    assert moved.host_memory_bytes == {"activations": num_bytes}
    # The array of one layer at a time still passes through device memory.
    freed = kept.memory_bytes["activations"] - moved.memory_bytes["activations"]
    assert freed == pytest.approx(num_bytes)


@pytest.mark.parametrize("target", ["1xH100", "v5p-2"])
def test_copies_take_the_time_of_their_bytes(target):
    cluster = aq.Cluster.preset(target)
    p = planned("names", cluster=cluster).prediction
    num_bytes = 2 * LAYERS * BATCH * HIDDEN * 4
    efficiency = target_for(cluster.device).bandwidth_efficiency
    assert p.host_transfer_s == pytest.approx(
        num_bytes / (cluster.host.copy_bytes_per_s * efficiency)
    )
    assert 0 <= p.host_hidden_s <= p.host_transfer_s
    assert p.step_time_s == pytest.approx(
        p.compute_s
        + p.communication_s
        + p.gradient_s
        - p.hidden_s
        + p.host_transfer_s
        - p.host_hidden_s
    )


def test_copies_are_exposed_only_where_compute_is_too_short():
    slow, fast = (
        planned("names", cluster=with_host(GPU, copy_bytes_per_s=rate)).prediction
        for rate in (1e6, 1e15)
    )
    assert slow.compute_s == fast.compute_s
    assert slow.host_transfer_s - slow.host_hidden_s > slow.host_transfer_s / 2
    # A layer's copies to the host run beside the rest of the layer, and back beside its beginning.
    assert 0 < slow.host_hidden_s < slow.compute_s
    assert fast.host_hidden_s == pytest.approx(fast.host_transfer_s)


def test_moments_in_host_memory():
    kept, moved = planned("save").prediction, planned("save", "host").prediction
    num_bytes = 2 * LAYERS * WIDTH * HIDDEN * 4
    assert kept.memory_bytes["optimizer state"] == num_bytes
    assert "optimizer state" not in moved.memory_bytes
    assert moved.host_memory_bytes == {"optimizer state": num_bytes}
    rate = GPU.host.copy_bytes_per_s * target_for(GPU.device).bandwidth_efficiency
    # Kernels read the moments while those of others are copied back.
    assert moved.host_transfer_s == pytest.approx(2 * num_bytes / rate)
    assert moved.host_hidden_s == pytest.approx(num_bytes / rate, rel=0.05)


def test_tpus_fetch_moments_ahead():
    cluster = aq.Cluster.preset("v5p-2")
    kept, moved = (planned("save", where, cluster).prediction for where in ("device", "host"))
    # Copies begin with the step, so the moments lie in device memory for all of it.
    assert moved.peak_memory_bytes == pytest.approx(kept.peak_memory_bytes, rel=0.05)
    assert moved.host_hidden_s > 0


def test_split_state_is_copied_in_pieces():
    cluster = aq.Cluster.preset("8xH100")
    whole, split = (
        planned("save", "host", cluster, method).prediction
        for method in (aq.DataParallel(), aq.Zero3Parallel())
    )
    assert split.host_transfer_s == pytest.approx(whole.host_transfer_s / 8)
    assert sum(split.host_memory_bytes.values()) == sum(whole.host_memory_bytes.values()) / 8


def test_pipelines_keep_offloaded_activations_of_micro_batches_in_flight():
    plan = planned(
        "names",
        cluster=aq.Cluster.preset("8xH100"),
        method=aq.Megatron(data=4, tensor=1, pipeline=2),
        num_micro_batches=2,
    )
    layers = [len(range(*r)) for r in zip(plan.scan_bounds, plan.scan_bounds[1:], strict=False)]
    for stage, count in zip(plan.stages, layers, strict=True):
        each = count * (BATCH // 2 // 4) * HIDDEN * 4
        on_host = stage.prediction.host_memory_bytes
        assert on_host == {"activations in flight": stage.prediction.in_flight * each}
    assert plan.prediction.host_transfer_s > 0


def test_the_solver_counts_what_the_judge_counts():
    step, init = offloaded_step("names", layers=LAYERS, moments="host")
    graph = capture(step, shapes_of(init(jax.random.key(0)), "host"), batch_of())
    cluster = with_host(aq.Cluster.preset("2xH100"), copy_bytes_per_s=1e8)
    problem = make_problem(graph, cluster)
    priced = price(problem, LogicalMesh(shape=(2,), cluster=cluster))
    assert {copy.to_host for copy in priced.copies} == {True, False}
    assert len(copy_seconds(priced)) == len(priced.copies)
    assert sum(len(group[-1].members) for group in queues(priced.copies)) == len(priced.copies)
    plan = planned("names", "host", cluster, aq.ShardParallel())
    assert plan.provenance.status.startswith("optimal")
    assert plan.provenance.lower_bound_s == pytest.approx(plan.prediction.step_time_s, rel=1e-4)
    assert evaluate(Picked.first(priced)).host_transfer_s > 0


def test_hosts_that_are_too_small_are_refused():
    with pytest.raises(InfeasibleError, match="host memory of 1xH100 does not hold") as refused:
        planned("save", "host", with_host(GPU, memory_bytes=1000))
    message = str(refused.value)
    assert "it needs 6.0 KiB on each host" in message and "a host has 1000 B" in message
    assert "[host] memory" in message
    assert planned("save", "host", with_host(GPU, memory_bytes=None)).prediction


def test_plans_say_what_lies_in_host_memory():
    plan = planned("names", "host")
    again = aq.Plan.from_json(plan.to_json())
    assert again == plan and again.prediction.host_memory_bytes
    assert {i.memory for i in again.inputs if "momentum" in i.path} == {"host"}
    text = str(plan)
    assert "copies to and from host memory" in text
    assert "6.0 KiB for each device, 12.0 KiB on a host" in text or "on a host" in text
    assert "optimizer state" in text
    wrong = plan.to_json().replace('"memory": "host"', '"memory": "disk"')
    with pytest.raises(PlanFileError, match="lies in the memory 'disk', and can lie in 'device'"):
        aq.Plan.from_json(wrong)


def test_plans_without_host_memory_do_not_mention_it():
    text = planned("save").to_json()
    assert '"memory"' not in text and "host_transfer_s" not in text
    assert "host_memory_bytes" not in text
    assert "host memory" not in str(planned("save"))


def test_what_a_host_holds_must_be_possible():
    from aliquot.core import ClusterError

    with pytest.raises(ClusterError, match="memory must be positive"):
        Host(memory_bytes=0)
    with pytest.raises(ClusterError, match="bandwidth must be positive"):
        Host(copy_bytes_per_s=0.0)
