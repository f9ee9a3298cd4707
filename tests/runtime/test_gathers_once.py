"""Stages 1 and 2 of ZeRO in mixed precision: parameters are stored as optimizer state is, and their
casts are gathered once a step, in programs and pipelines, in prices, memory and collectives.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest

import aliquot as aq
from aliquot import zoo
from aliquot.planners import Megatron, method_by_name
from aliquot.sharding import Part

WIDTH, EXAMPLES, MICRO_BATCHES, NUM_WEIGHTS = 256, 16, 4, 8
WHOLE_BYTES = WIDTH * WIDTH * 4
OPTIMIZER = optax.adam(1e-3)


def block(weights, x):
    up, down = (weight.astype(jnp.bfloat16) for weight in weights)
    return x + jnp.tanh(x @ up) @ down


def loss_of(params, batch):
    """Blocks in bf16, every other one repeated by the backward pass, and a product in float32."""
    x = batch["x"].astype(jnp.bfloat16)
    for k, weights in enumerate(params["layers"]):
        x = (jax.checkpoint(block) if k % 2 else block)(weights, x)
    y = (x.astype(jnp.float32) * params["scale"]) @ params["head"]
    return jnp.mean((y - batch["y"]) ** 2)


def train_step(state, batch):
    params, moments = state
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, moments = OPTIMIZER.update(gradients, moments)
    return (optax.apply_updates(params, updates), moments), loss


def arrays(examples=EXAMPLES):
    keys = jax.random.split(jax.random.key(0), NUM_WEIGHTS + 3)
    params = {
        "layers": [
            [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH for k in keys[number : number + 2]]
            for number in range(0, NUM_WEIGHTS, 2)
        ],
        "scale": jnp.ones(WIDTH),
        "head": jax.random.normal(keys[-3], (WIDTH, 2)) / WIDTH,
    }
    batch = {
        "x": jax.random.normal(keys[-2], (examples, WIDTH)),
        "y": jax.random.normal(keys[-1], (examples, 2)),
    }
    return (params, OPTIMIZER.init(params)), batch


def megatron(zero_stage, **degrees):
    return Megatron(zero_stage=zero_stage, **degrees)


# Each with the same layout that replicates parameters, whose numbers it has.
METHODS = {
    "zero2": (aq.Zero2Parallel(), aq.DataParallel()),
    "groups": (aq.Zero2Parallel(shard_within=2), aq.DataParallel()),
    "tensor": (megatron(1, data=2, tensor=2), megatron(0, data=2, tensor=2)),
    "pipeline": (megatron(1, data=2, pipeline=2), megatron(0, data=2, pipeline=2)),
    "interleaved": (
        megatron(2, data=2, pipeline=2, chunks=2),
        megatron(0, data=2, pipeline=2, chunks=2),
    ),
}
NAMES = pytest.mark.parametrize("name", METHODS)


@functools.cache
def planned(name, which=0, micro_batches=MICRO_BATCHES, limit=None):
    return aq.plan(
        train_step,
        *jax.eval_shape(arrays),
        cluster=aq.Cluster.preset("4xcpu"),
        method=METHODS[name][which],
        num_micro_batches=micro_batches,
        memory_limit_bytes=limit,
    )


@NAMES
def test_same_numbers_as_with_parameters_on_every_device(name):
    plan, replicated = planned(name), planned(name, 1)
    assert all(stage.casts_once and stage.gathers_once for stage in plan.stages)
    assert not any(stage.gathers_once for stage in replicated.stages)
    got, wanted, plain = (
        jax.device_get(step(*arrays()))
        for step in (
            aq.parallelize(train_step, plan),
            aq.parallelize(train_step, replicated),
            jax.jit(train_step),
        )
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(float(got[1]), float(plain[1]), rtol=1e-3)


@NAMES
def test_parameters_are_stored_in_parts_and_their_casts_are_gathered_once(name):
    plan, replicated = planned(name), planned(name, 1)
    for stage in plan.stages:
        blocks = [v for path, v in stage.shardings.items() if path.startswith("state[0]['layers']")]
        blocks += [v for path, v in stage.shardings.items() if path.startswith("state[0].layers")]
        assert blocks and all({"data", "x", "y"} & {a for axes in b for a in axes} for b in blocks)
    gathers = [
        use
        for stage in plan.stages
        for use in (stage.prediction or plan.prediction).collectives
        if use.kind == "all-gather" and "layers" in use.label
    ]
    # Of each weight, whatever the number of micro-batches; CPUs gather bf16 as float32.
    assert sum(use.count for use in gathers) == NUM_WEIGHTS
    whole_bytes = NUM_WEIGHTS * WHOLE_BYTES / (2 if name == "tensor" else 1)
    assert sum(use.num_bytes for use in gathers) == pytest.approx(whole_bytes)
    assert plan.prediction.peak_memory_bytes < replicated.prediction.peak_memory_bytes
    kept_bytes = sum(
        (stage.prediction or plan.prediction).memory_bytes["casts of parameters"]
        for stage in plan.stages
    )
    assert kept_bytes == pytest.approx(whole_bytes / 2, rel=0.01)
    assert aq.estimate(plan, train_step, *jax.eval_shape(arrays)).step_time_s == (
        plan.prediction.step_time_s
    )


@pytest.mark.parametrize("name", ["zero2", "groups", "tensor"])
def test_programs_gather_before_the_loop(name):
    step = aq.parallelize(train_step, planned(name), devices=jax.devices()[:4])
    text = step.prepare(*jax.eval_shape(arrays)).lower().compile().as_text()
    part = WIDTH // 2 if name == "tensor" else WIDTH
    weights = f"f32[{part},{WIDTH}]", f"f32[{WIDTH},{part}]"
    loops, entry = text.split("ENTRY")
    # The loop's body is a computation of its own.
    assert " while(" in text and not _gathers(loops)
    assert sum(any(w in line for w in weights) for line in _gathers(entry)) == NUM_WEIGHTS


def _gathers(text):
    return [line for line in text.splitlines() if "all-gather(" in line]


@pytest.mark.parametrize("name", ["pipeline", "interleaved"])
def test_tasks_of_a_pipeline_receive_what_is_gathered(name):
    step = aq.parallelize(train_step, planned(name), devices=jax.devices()[:4])
    step = step.prepare(*jax.eval_shape(arrays))
    gathers = dict.fromkeys(Part, 0)
    for stage in step.runner.compiled().stages:
        gathers[stage.function.program.part] += stage.compiled.as_text().count("all-gather(")
    assert gathers[Part.EARLY] == NUM_WEIGHTS
    assert gathers[Part.FORWARD] == gathers[Part.BACKWARD] == 0


def test_without_micro_batches_parameters_are_stored_in_parts_too():
    plan, replicated = planned("zero2", micro_batches=1), planned("zero2", 1, micro_batches=1)
    assert not plan.stages[0].gathers_once
    text = " ".join(str(plan).split())
    assert "ZeRO-2: optimizer state and parameters sharded, parameters gathered after" in text
    assert plan.prediction.memory_bytes["parameters"] < (
        replicated.prediction.memory_bytes["parameters"] / 2
    )


def test_parameters_that_are_not_cast_stay_on_every_device():
    def step(params, batch):
        def loss(params):
            return jnp.mean((jnp.tanh(batch["x"] @ params) - batch["x"]) ** 2)

        return params - 0.1 * jax.grad(loss)(params)

    plan = aq.plan(
        step,
        jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        jax.eval_shape(arrays)[1],
        cluster=aq.Cluster.preset("4xcpu"),
        method=aq.Zero2Parallel(),
        num_micro_batches=MICRO_BATCHES,
    )
    assert not plan.stages[0].gathers_once and not any(plan.stages[0].shardings["params"])


def test_the_text_says_what_is_stored_and_what_is_gathered():
    assert (
        "ZeRO-2: optimizer state and parameters sharded, parameters gathered once a step"
        in " ".join(str(planned("zero2")).split())
    )


def test_plan_files_keep_it(tmp_path):
    plan = planned("pipeline")
    plan.save(tmp_path / "plan.json")
    assert aq.Plan.load(tmp_path / "plan.json") == plan
    stages = tuple(msgspec.structs.replace(s, gathers_once=False) for s in plan.stages)
    each = aq.estimate(
        msgspec.structs.replace(plan, stages=stages), train_step, *jax.eval_shape(arrays)
    )
    assert each.step_time_s > plan.prediction.step_time_s


def test_integer_programs_choose_it_where_it_is_faster():
    def batch_of_many():
        return arrays(examples=4096)

    plan = aq.plan(
        train_step,
        *jax.eval_shape(batch_of_many),
        cluster=aq.Cluster.preset("2x2xcpu"),
        method=aq.ShardParallel(),
        num_micro_batches=MICRO_BATCHES,
    )
    assert plan.stages[0].gathers_once and plan.method == "shard"
    got, plain = (
        jax.device_get(step(*batch_of_many()))
        for step in (aq.parallelize(train_step, plan), jax.jit(train_step))
    )
    np.testing.assert_allclose(float(got[1]), float(plain[1]), rtol=1e-3)


@functools.cache
def model(name):
    """A model of the zoo in bf16, sixteen rows of sixteen tokens."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "ffn_size": 128}
    more = {"num_experts": 4, "group_size": 8} if name == "moe-380m" else {}
    config = zoo.configure(name, vocab_size=64, seq_len=16, **sizes, **more)
    work = zoo.build(config, 16, dtype="bf16", learning_rate=1e-3)
    state = jax.device_get(work.init(jax.random.key(0)))
    random = np.random.default_rng(0)
    batch = {k: random.integers(0, 64, x.shape, np.int32) for k, x in work.batch.items()}
    return work, state, batch, jax.device_get(jax.jit(work.train_step)(state, batch))


@pytest.mark.parametrize(
    ("name", "layout", "axes"),
    [
        ("llama-7b", "megatron:dp4,cp2", ("data", "context")),
        pytest.param("llama-7b", "megatron:dp1,cp4,tp2", ("context",), marks=pytest.mark.slow),
        ("moe-380m", "megatron:dp2,ep4", ("data",)),
        ("llama-7b", "megatron:dp2,cp2,pp2", ("data", "context")),
    ],
)
def test_they_are_gathered_over_all_axes_over_which_gradients_wait(name, layout, axes):
    work, state, batch, (_, plain) = model(name)
    results = []
    for method in (f"{layout},zero1", layout):
        step = aq.parallelize(
            work.train_step,
            cluster=aq.Cluster.preset("8xcpu"),
            method=method_by_name(method),
            num_micro_batches=2,
        )
        results.append((step, *jax.device_get(step(state, batch))))
    (step, after, metrics), (replicated, wanted, _) = results
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(metrics["loss"], plain["loss"], rtol=1e-3)
    stages, whole = step.plan.stages, replicated.plan.stages
    assert all(stage.gathers_once for stage in stages)
    assert not any(stage.gathers_once for stage in whole)
    stored = [
        {a for dim in dims for a in dim}
        for stage in stages
        for path, dims in stage.shardings.items()
        if path.startswith("state.params") and path.endswith("q.kernel")
    ]
    assert stored and all(set(axes) <= split for split in stored)
    # Casts that were gathered are as large as those of parameters that nothing splits.
    kept, of_whole = (
        plan.prediction.memory_bytes["casts of parameters"] for plan in (step.plan, replicated.plan)
    )
    assert kept == pytest.approx(of_whole, rel=0.05)
    # The experts' own axis splits them, and no others.
    assert all("expert" not in split for split in stored)
    if name != "moe-380m":
        predicted = [u for s in stages for u in (s.prediction or step.plan.prediction).collectives]
        gathered, compiled = (
            sum(u.num_bytes for u in uses if u.kind == "all-gather" and set(u.axes) == {*axes})
            for uses in (predicted, step.stats().collectives)
        )
        assert gathered and compiled == pytest.approx(gathered, rel=0.05)


def test_kernels_of_8_bits_are_stored_in_parts_and_gathered_in_8_bits():
    sizes = {"num_layers": 2, "hidden_size": 128, "num_heads": 4, "vocab_size": 64, "seq_len": 8}
    stored, kept, gathered = {}, {}, {}
    for dtype in ("bf16", "fp8"):
        work = zoo.build("llama-7b", EXAMPLES, overrides=sizes, dtype=dtype, scan=False)
        plan = aq.plan(
            work.train_step,
            work.state,
            work.batch,
            cluster=aq.Cluster.preset("4xcpu"),
            method=megatron(1, data=4),
            num_micro_batches=MICRO_BATCHES,
        )
        step = aq.parallelize(work.train_step, plan, devices=jax.devices()[:4])
        lowered = step.prepare(work.state, work.batch).lower()
        stored[dtype] = lowered.compile().memory_analysis().argument_size_in_bytes
        kept[dtype] = plan.prediction.memory_bytes["casts of parameters"]
        gathered[dtype] = sum(
            use.num_bytes for use in plan.prediction.collectives if use.kind == "all-gather"
        )
    # The magnitudes are stored besides.
    assert stored["fp8"] == pytest.approx(stored["bf16"], rel=0.01)
    assert kept["fp8"] < 0.6 * kept["bf16"]
    assert gathered["fp8"] < 0.6 * gathered["bf16"]
