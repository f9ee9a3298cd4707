"""Parameters are cast to the type in which a step computes once a step, not once for each
micro-batch: in programs and pipelines, in prices and in memory, where there is room to keep them.
"""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest

import aliquot as aq
from aliquot.graph import Call
from aliquot.planners import Megatron, apply_plan
from aliquot.sharding import parameter_casts
from aliquot.zoo import build


def block(weight, x):
    return x + jnp.tanh(x @ weight.astype(jnp.bfloat16))


def loss_of(params, batch):
    """Four blocks in bf16, of which the backward pass repeats two, and one in float32."""
    x = batch["x"].astype(jnp.bfloat16)
    for k, weight in enumerate(params["layers"]):
        x = (jax.checkpoint(block) if k % 2 else block)(weight, x)
    y = (x.astype(jnp.float32) * params["scale"]) @ params["head"]
    return jnp.mean((y - batch["y"]) ** 2)


OPTIMIZER = optax.sgd(0.1)


def train_step(state, batch):
    params, moments = state
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, moments = OPTIMIZER.update(gradients, moments)
    return (optax.apply_updates(params, updates), moments), loss


def arrays(width=16, examples=16):
    keys = jax.random.split(jax.random.key(0), 8)
    params = {
        "layers": [jax.random.normal(k, (width, width)) for k in keys[:4]],
        "scale": jnp.ones(width),
        "head": jax.random.normal(keys[4], (width, 2)),
    }
    batch = {
        "x": jax.random.normal(keys[5], (examples, width)),
        "y": jax.random.normal(keys[6], (examples, 2)),
    }
    return (params, OPTIMIZER.init(params)), batch


@functools.cache
def planned(
    method, *, devices=2, micro_batches=4, width=16, examples=16, limit=None, semantics="exact"
):
    state, batch = jax.eval_shape(lambda: arrays(width, examples))
    return aq.plan(
        train_step,
        state,
        batch,
        cluster=aq.Cluster.preset(f"{devices}xcpu"),
        method=(METHODS | WHOLE).get(method) or aq.ShardParallel(),
        num_micro_batches=micro_batches,
        memory_limit_bytes=limit,
        micro_batch_semantics=semantics,
    )


METHODS = {
    "dp": aq.DataParallel(),
    "zero3": aq.Zero3Parallel(),
    "pipeline": Megatron(pipeline=2),
}
WHOLE = {"program": aq.WholeProgram()}


def without(plan):
    """The plan with casts in every micro-batch."""
    stages = tuple(msgspec.structs.replace(stage, casts_once=False) for stage in plan.stages)
    return msgspec.structs.replace(plan, stages=stages)


def test_casts_of_repeated_regions_are_those_of_the_forward_pass():
    graph = aq.capture(train_step, *arrays())
    casts = parameter_casts(graph)
    first = [cast for cast, made in casts.items() if cast == made.first]
    # Two regions are repeated, and each casts its weight again.
    assert len(first) == 4 and len(casts) == 6
    for cast, made in casts.items():
        assert graph.ops[cast].inputs == graph.ops[made.first].inputs == (made.parameter,)
    # What is not narrower is no cast of a parameter, nor is the cast of the batch.
    assert all(graph.values[graph.ops[cast].inputs[0]].dtype == "float32" for cast in casts)


def test_scaled_casts_to_8_bits_take_the_place_of_those_on_the_way():
    sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 32, "seq_len": 8}
    work = build("llama-7b", 4, overrides=sizes, dtype="fp8", recompute="block", scan=False)
    graph = aq.capture(work.train_step, work.state, work.batch)
    casts = parameter_casts(graph)
    # Seven kernels of each layer, again in the backward pass, and the ends in 16 bits.
    made_in = Counter(graph.values[graph.ops[cast].outputs[0]].dtype for cast in casts)
    assert made_in == {"float8_e4m3fn": 28, "bfloat16": 2}
    assert sum(cast == made.first for cast, made in casts.items()) == 16
    paths = {item.value: item.path for item in graph.inputs}
    for made in casts.values():
        read = {paths[value].rpartition(".")[2] for value in made.reads}
        assert read in ({"kernel", "amax_kernel"}, {"kernel"}, {"embedding"})


@pytest.mark.parametrize("method", METHODS)
def test_same_numbers(method):
    state, batch = arrays()
    plan = planned(method)
    assert all(stage.casts_once for stage in plan.stages)
    once, each = (
        jax.device_get(aq.parallelize(train_step, p)(*arrays())) for p in (plan, without(plan))
    )
    for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(each), strict=True):
        np.testing.assert_array_equal(a, b)
    wanted = jax.jit(train_step)(state, batch)
    np.testing.assert_allclose(float(once[1]), float(wanted[1]), rtol=1e-2)


def test_programs_cast_before_the_loop():
    state, batch = jax.eval_shape(arrays)

    def casts_in_loops(plan):
        step = aq.parallelize(train_step, plan, devices=jax.devices()[:2]).prepare(state, batch)
        text = step.lower().as_text()
        loop = text[text.index("stablehlo.while") :]
        weights = "tensor<16x16xf32>) -> tensor<16x16xbf16>"
        return loop.count(weights), text.count(weights)

    plan = planned("dp")
    in_loop, everywhere = casts_in_loops(plan)
    assert (in_loop, everywhere) == (0, 4)
    in_loop, everywhere = casts_in_loops(without(plan))
    assert in_loop == everywhere == 6


def test_tasks_of_a_pipeline_receive_their_casts():
    graph = aq.capture(train_step, *jax.eval_shape(lambda: arrays(1024)))

    def casts_by_part(plan):
        found = {}
        for program in apply_plan(plan, graph).cut().programs.programs:
            inside = _operators(program.graph.body.items)
            casts = [op for op in inside if op in parameter_casts(graph)]
            if casts:
                found[program.part.value, program.stage] = len(casts)
        return found

    plan = planned("pipeline", width=1024)
    assert casts_by_part(plan) == {("early", 0): 2, ("early", 1): 2}
    assert set(casts_by_part(without(plan))) == {
        (part, stage) for part in ("forward", "backward") for stage in (0, 1)
    }


def _operators(items):
    for item in items:
        if isinstance(item, Call):
            yield from (op for block in item.blocks for op in _operators(block.items))
        else:
            yield item


@pytest.mark.parametrize("method", METHODS)
def test_kept_only_where_there_is_memory(method):
    # So many that the first of two stages, with two micro-batches in flight, is the fullest.
    plan = planned(method, width=1024, examples=512)
    step = jax.eval_shape(lambda: arrays(1024, 512))
    kept = plan.prediction.memory_bytes["casts of parameters"]
    # Of four weights; ZeRO-3 splits each, and each of two stages has two.
    assert kept == pytest.approx(4 * 1024 * 1024 * 2 / (1 if method == "dp" else 2), rel=0.01)
    each = aq.estimate(without(plan), train_step, *step)
    assert each.step_time_s > plan.prediction.step_time_s
    assert each.peak_memory_bytes < plan.prediction.peak_memory_bytes
    assert aq.estimate(plan, train_step, *step).step_time_s == plan.prediction.step_time_s
    between = (each.peak_memory_bytes + plan.prediction.peak_memory_bytes) / 2
    tight = planned(method, width=1024, examples=512, limit=between)
    assert tight.prediction.peak_memory_bytes <= between
    assert not all(stage.casts_once for stage in tight.stages)


def test_a_plan_without_room_for_casts_is_not_beaten_by_itself():
    """Its search counts with casts once a step, and the plan with those of each micro-batch."""
    free = planned("shard", devices=1, width=1024)
    limit = free.prediction.peak_memory_bytes - 1
    tight = planned("shard", devices=1, width=1024, limit=limit)
    assert not tight.stages[0].casts_once
    seconds, known = tight.prediction.step_time_s, tight.provenance
    times = [c["step_time_s"] for c in known.candidates if c["step_time_s"] is not None]
    assert seconds in times and min(times) >= seconds * (1 - 1e-3)
    assert known.gap == pytest.approx(seconds / known.lower_bound_s - 1)


def test_no_plan_that_was_tried_is_faster_where_casts_do_not_fit():
    """A search that takes casts for granted finds a plan that has no memory for them."""
    split = planned("zero3", width=1024, examples=8192)
    step = jax.eval_shape(lambda: arrays(1024, 8192))
    limit = aq.estimate(without(split), train_step, *step).peak_memory_bytes
    tight = planned("program", width=1024, examples=8192, limit=limit)
    assert not tight.stages[0].casts_once
    times = [c["step_time_s"] for c in tight.provenance.candidates if c["step_time_s"] is not None]
    assert tight.prediction.step_time_s == min(times)


def test_nothing_is_kept_without_micro_batches_or_for_independent_ones():
    assert not planned("dp", micro_batches=1).stages[0].casts_once
    assert not planned("dp", semantics="independent").stages[0].casts_once
