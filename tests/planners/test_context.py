"""Context parallelism by name: what it splits, what attention communicates, and what is said where
a sequence, its heads or a kernel cannot be split.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from planners.small_steps import array, momentum_step

import aliquot as aq
from aliquot import zoo
from aliquot.core import InputError
from aliquot.graph import capture
from aliquot.planners import Task, method_by_name, simple_plan

ROWS, SEQ, HIDDEN, LAYERS = 8, 32, 64, 2
CLUSTER = aq.Cluster.preset("8xH100")
SIZES = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_heads": 8,
    "num_kv_heads": 4,
    "ffn_size": 128,
    "vocab_size": 256,
    "seq_len": SEQ,
}


@functools.cache
def llama(attention: str = "plain", recompute: str = "none", **changes: int) -> Any:
    config = zoo.configure("llama-70b", **{**SIZES, **changes})
    return zoo.build(config, ROWS, dtype="bf16", recompute=recompute, attention=attention)


def planned(name: str, work: Any) -> aq.Plan:
    return aq.plan(
        work.train_step, work.state, work.batch, cluster=CLUSTER, method=method_by_name(name)
    )


def over_context(plan: aq.Plan) -> dict[str, float]:
    """How often each kind of collective runs over the context axis, without all-reduces: those of
    gradients, of norms and of the loss.
    """
    counts: dict[str, float] = {}
    for use in plan.prediction.collectives:
        if "context" in use.axes and use.kind != "all-reduce":
            counts[use.kind] = counts.get(use.kind, 0) + use.count
    return counts


@pytest.mark.parametrize(
    ("devices", "found"),
    [("8xH100", "zero"), ("2x8xH100", "megatron:dp8,cp2,fsdp"), ("4x8xH100", "megatron:dp8,cp4")],
)
def test_simple_plans_split_the_sequence_where_rows_are_too_few(devices, found):
    work = llama()
    graph = capture(work.train_step, work.state, work.batch)
    plan = simple_plan(Task(graph=graph, cluster=aq.Cluster.preset(devices), num_micro_batches=1))
    assert plan is not None and plan.method.startswith(found)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_keys_and_values_are_gathered_and_their_gradients_scattered(recompute):
    plan = planned("megatron:dp2,cp4,gather", llama(recompute=recompute))
    (stage,) = plan.stages
    assert (stage.mesh_shape, stage.axis_names) == ((2, 4), ("data", "context"))
    assert stage.shardings["batch.inputs"] == stage.shardings["batch.targets"]
    assert stage.shardings["batch.inputs"] == (("data",), ("context",))
    # In plain attention the backward pass reads keys and values again.
    gathers = 4 * LAYERS if recompute == "block" else 2 * LAYERS
    assert over_context(plan) == {"all-gather": gathers, "reduce-scatter": 2 * LAYERS}
    assert "context parallel: parameters replicated" in " ".join(str(plan).split())


@pytest.mark.parametrize("attention", ["plain", "cudnn"])
def test_ulysses_exchanges_the_sequence_for_heads(attention):
    plan = planned("megatron:dp2,cp4,ulysses", llama(attention))
    found = over_context(plan)
    # Queries, keys, values and the result of attention, and their gradients.
    assert found.pop("all-to-all") == 8 * LAYERS and not found


def test_a_ring_sends_keys_and_values_round():
    found = over_context(planned("megatron:dp2,cp4,ring", llama("cudnn")))
    # Three steps forward with two arrays and backward with four, of which two go home; halves of
    # six arrays forward and of twelve backward are exchanged before or after.
    arrays, halves = 3 * 2 + 3 * 4 + 2, 5 + 9
    assert found == {"collective-permute": LAYERS * (arrays + halves)}


def test_the_cheapest_way_is_taken():
    """Of many heads and few tokens the sequence stays where it is, and of few heads it must."""
    times = {
        way: planned(f"megatron:dp2,cp4{way}", llama("cudnn")).prediction.step_time_s
        for way in ("", ",ring", ",ulysses")
    }
    assert times[""] <= min(times.values()) * 1.001


@pytest.mark.parametrize(
    ("name", "cluster", "shape"),
    [
        pytest.param("megatron:dp2,cp2,pp2", "8xH100", (2, 2), marks=pytest.mark.slow),
        # The ring crosses hosts, tensor parallelism does not.
        ("megatron:dp1,cp4,tp4,pp2,ring", "4x8xH100", (4, 4)),
    ],
)
def test_stages_of_a_pipeline(name, cluster, shape):
    work = llama("cudnn")
    plan = aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=aq.Cluster.preset(cluster),
        method=method_by_name(name),
        num_micro_batches=4,
    )
    assert [stage.mesh_shape for stage in plan.stages] == [shape] * 2
    first, last = plan.stages
    rows = ("data",) if "data" in first.axis_names else ()
    assert first.shardings["batch.inputs"] == (rows, ("context",))
    assert last.shardings["batch.targets"] == (rows, ("context",))
    assert "ring" not in name or over_context(plan).keys() == {"collective-permute"}


def test_parameters_are_sharded_over_context_as_over_data():
    plan = planned("megatron:dp2,cp2,tp2,fsdp", llama())
    up = plan.stages[0].shardings["state.params.layers[0].mlp.up.kernel"]
    assert {axis for dim in up for axis in dim} == {"data", "context", "tensor"}
    assert "FSDP" in str(plan)


@pytest.mark.parametrize("name", ["megatron:dp2,cp4,zero1", "megatron:dp1,cp8,zero1"])
def test_accumulators_of_gradients_that_wait_are_whole(name):
    """Each device sums over its own tokens until the last micro-batch, and then over all."""
    work = llama(seq_len=64)
    once, twice = (
        aq.plan(
            work.train_step,
            work.state,
            work.batch,
            cluster=CLUSTER,
            method=method_by_name(name),
            num_micro_batches=count,
        )
        for count in (1, 2)
    )
    assert (once.stages[0].context_axes, twice.stages[0].context_axes) == ((), ("context",))
    # One sum over both axes, as often as without micro-batches.
    found = [use for use in twice.prediction.collectives if "gradient of" in use.label]
    assert {use.axes for use in found} == {(*twice.stages[0].data_axes, "context")}
    assert sum(use.count for use in found) == sum(
        use.count
        for use in once.prediction.collectives
        if "gradient of" in use.label and "context" in use.axes
    )
    # Accumulated in single precision, and not divided by what splits the optimizer's state.
    assert twice.prediction.memory_bytes["gradients"] >= sum(
        x.size * 4 for x in jax.tree.leaves(work.state["params"])
    )


@pytest.mark.parametrize(
    ("micro_batches", "mesh", "entered"),
    [
        pytest.param(1, (2, 4), [], marks=pytest.mark.slow),
        # Four rows on as many devices, which split the batch rather than the sequence.
        (2, (4,), []),
        (4, (4,), ["shard, x only for the sequence"]),
        (4, (2, 2), ["shard, x only for the batch, y only for the sequence"]),
    ],
)
def test_integer_programs_split_sequences_of_few_rows(micro_batches, mesh, entered):
    work = llama()
    plan = aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=aq.Cluster.preset(f"{math.prod(mesh)}xH100"),
        method=aq.ShardParallel(mesh_shape=mesh),
        num_micro_batches=micro_batches,
    )
    names = [str(each["name"]) for each in plan.provenance.candidates]
    once = ", parameters gathered once"
    assert [n for n in names if "the sequence" in n and not n.endswith(once)] == entered
    assert "shard" in names


def test_integer_programs_refuse_a_sequence_that_an_axis_does_not_divide():
    work = llama(seq_len=34)
    plan = aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=CLUSTER,
        method=aq.ShardParallel(mesh_shape=(2, 4)),
        num_micro_batches=4,
    )
    assert not any("the sequence" in str(each["name"]) for each in plan.provenance.candidates)


@pytest.mark.parametrize(
    ("name", "attention", "changes", "said"),
    [
        ("megatron:dp1,cp8", "plain", {"seq_len": 36}, "36 .* cannot be split over cp 8"),
        ("megatron:dp1,cp8", "plain", {"seq_len": 36}, "divides the sequence, such as .*9 or 12"),
        ("megatron:dp1,cp8,ulysses", "plain", {}, "8 devices.*gather in place of ulysses"),
        ("megatron:dp1,cp4,tp2,ulysses", "cudnn", {}, "4 heads cannot be split over 8 devices"),
        ("megatron:dp2,cp4,gather", "cudnn", {}, "computed by a ring.*ring in place of gather"),
        ("megatron:dp1,cp8,ring", "cudnn", {"seq_len": 24}, "12 .* cannot be split over cp 8"),
        ("megatron:dp2,cp4,ring", "plain", {}, "gathers keys and values"),
    ],
)
def test_what_cannot_be_split_is_said_with_what_can(name, attention, changes, said):
    with pytest.raises(InputError, match=f"(?s){said}"):
        planned(name, llama(attention, **changes))


def test_all_that_cannot_be_split_is_said_at_once():
    with pytest.raises(InputError) as refusal:
        planned("megatron:dp1,cp4,tp2,ulysses", llama(seq_len=34, vocab_size=255))
    for part in ("255 rows or columns", "sequence of 34", "4 heads"):
        assert part in str(refusal.value)


def test_a_step_without_a_sequence():
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    step = momentum_step(loss, {"w": array(8, 8)}, {"x": array(16, 8)})
    with pytest.raises(InputError, match="Leave cp out"):
        aq.plan(*step, cluster=CLUSTER, method=aq.Megatron(context=8))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"context": 4, "attention": "flash"}, "gather, ring, ulysses or None"),
        ({"attention": "ring"}, "a context degree of at least 2"),
        ({"context": 0}, "context=0"),
    ],
)
def test_layouts_that_cannot_be(settings, said):
    with pytest.raises(InputError, match=said):
        aq.Megatron(**settings)


def test_names():
    assert method_by_name("megatron:dp2,cp4,tp4") == aq.Megatron(data=2, context=4, tensor=4)
    ring = aq.Megatron(data=1, context=8, attention="ring", zero_stage=3)
    assert method_by_name("megatron:dp1-cp8-ring-fsdp") == ring
    assert ring.name == "megatron:dp1,cp8,ring,fsdp" and method_by_name(ring.name) == ring
    with pytest.raises(InputError, match="ring and ulysses exclude each other"):
        method_by_name("megatron:dp1,cp8,ring,ulysses")
    with pytest.raises(InputError, match="ulysses is a way to split a sequence, which cp does"):
        method_by_name("megatron:dp8,ulysses")


def test_where_two_numbers_and_the_finest_do_not_fit_no_other_is_looked_at():
    config = zoo.configure("llama-70b", **SIZES)
    work = zoo.build(config, 64, dtype="bf16", recompute="block", attention="plain")
    graph = capture(work.train_step, work.state, work.batch)
    cluster, made = aq.Cluster.preset("8xH100"), []
    least = min(
        aq.plan(
            work.train_step,
            work.state,
            work.batch,
            cluster=cluster,
            method=method,
            num_micro_batches=8,
        ).prediction.peak_memory_bytes
        for method in (aq.Zero2Parallel(), aq.Zero3Parallel())
    )

    class Noted(Task):
        def problem(self, num_micro_batches):
            made.append(num_micro_batches)
            return super().problem(num_micro_batches)

    # A little less than without casts that are kept for the whole step.
    task = Noted(graph=graph, cluster=cluster, memory_limit_bytes=0.9 * least)
    assert simple_plan(task) is None and made[-1] == 8 and set(made) == {1, 4, 8}
