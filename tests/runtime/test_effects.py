"""What a step does besides computing arrays happens as often as in the plain step, or is
refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import aliquot as aq
from aliquot.core import CaptureError

CLUSTER = aq.Cluster.preset("8xcpu")
SEEN = []


def seen_sum(y):
    jax.debug.callback(lambda total: SEEN.append(np.asarray(total)), jnp.sum(y))


def seen_rows(y):
    jax.debug.callback(lambda rows: SEEN.append(np.asarray(rows)), y)


def seen_in_loop(y):
    def turn(carry, row):
        jax.debug.callback(lambda value: SEEN.append(np.asarray(value)), row.sum())
        return carry + row.sum(), None

    jax.lax.scan(turn, 0.0, jnp.stack([y, 2 * y]))


def step_with(effect, after=lambda value: None):
    def step(params, batch):
        def loss(params):
            y = jnp.tanh(batch @ params["up"])
            effect(y)
            return jnp.mean((y @ params["down"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        after(value)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step


def arguments():
    draw = np.random.default_rng(0)
    shapes = {"up": (8, 8), "down": (8, 8)}
    params = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return params, draw.normal(size=(16, 8)).astype(np.float32)


def effects_of(step):
    SEEN.clear()
    result = jax.block_until_ready(step(*arguments()))
    jax.effects_barrier()
    return result, list(SEEN)


def assert_same_effects(step, **options):
    plan = aq.plan(step, *arguments(), cluster=CLUSTER, **options)
    wanted, plain = effects_of(jax.jit(step))
    found, parallel = effects_of(aq.parallelize(step, plan))
    assert len(parallel) == len(plain)
    for a, b in zip(parallel, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, wanted)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("method", [aq.DataParallel(), aq.ShardParallel()], ids=["dp", "shard"])
@pytest.mark.parametrize("effect", [seen_sum, seen_rows])
def test_callbacks_see_the_whole_batch_once(effect, method, count, capfd):
    assert_same_effects(step_with(effect), method=method, num_micro_batches=count)
    # The compiler's warning of arrays that it gathers.
    assert "rematerialization" not in capfd.readouterr().err


def test_callbacks_in_loops_happen_in_each_turn(capfd):
    assert_same_effects(step_with(seen_in_loop), method=aq.DataParallel())
    assert "rematerialization" not in capfd.readouterr().err


def test_results_of_callbacks_are_the_plain_steps(capfd):
    def step(params, batch):
        def loss(params):
            y = jnp.tanh(batch @ params["up"])
            fixed = jax.lax.stop_gradient(y)
            target = jax.pure_callback(lambda rows: np.asarray(rows) / 2, fixed, fixed)
            return jnp.mean((y @ params["down"] - target) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    assert_same_effects(step, method=aq.Zero3Parallel())
    assert "rematerialization" not in capfd.readouterr().err


def test_stages_hand_on_results_of_callbacks():
    def step(params, batch):
        def loss(params):
            rows = jax.pure_callback(lambda rows: np.asarray(rows) / 2, batch, batch)
            return jnp.mean((jnp.tanh(rows @ params["up"]) @ params["down"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    method = aq.PipeshardParallel(num_stages=2, num_micro_batches=2, layers="operators")
    assert_same_effects(step, method=method)


@pytest.mark.parametrize("count", [1, 2])
def test_callbacks_that_write_happen_once(count):
    def write(value):
        io_callback(lambda v: SEEN.append(np.asarray(v)), None, value)

    assert_same_effects(
        step_with(lambda y: None, write), method=aq.DataParallel(), num_micro_batches=count
    )


@pytest.mark.parametrize("semantics", ["exact", "independent"])
def test_effects_that_would_repeat_in_each_micro_batch_are_refused(semantics):
    def loop(params, batch):
        def loss(params):
            def turn(x, w):
                jax.debug.callback(lambda value: SEEN.append(value), x.sum())
                return jnp.tanh(x @ w), None

            return jnp.mean(
                jax.lax.scan(turn, batch, jnp.stack([params["up"], params["down"]]))[0] ** 2
            )

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    options = {
        "num_micro_batches": 2,
        "micro_batch_semantics": semantics,
        "method": aq.DataParallel(),
    }
    with pytest.raises(CaptureError, match="does not decompose into micro-batches"):
        aq.plan(loop, *arguments(), cluster=CLUSTER, **options)


def test_pipelines_refuse_effects_and_say_what_to_do():
    method = aq.PipeshardParallel(num_stages=2, num_micro_batches=2)
    with pytest.raises(CaptureError, match=r"`debug_callback` test_effects\.py.*Take it out"):
        aq.plan(step_with(seen_sum), *arguments(), cluster=CLUSTER, method=method)


def test_ordered_effects_are_refused_on_several_devices():
    def write(value):
        io_callback(lambda v: SEEN.append(v), None, value, ordered=True)

    step = step_with(lambda y: None, write)
    with pytest.raises(CaptureError, match="ordered effect, `io_callback`"):
        aq.plan(step, *arguments(), cluster=CLUSTER)
    assert_one = aq.plan(
        step, *arguments(), cluster=aq.Cluster.preset("1xcpu"), method=aq.DataParallel()
    )
    assert effects_of(aq.parallelize(step, assert_one))[1] == effects_of(jax.jit(step))[1]


def test_steps_written_for_devices_are_refused(mesh):
    def step(params, batch):
        def loss(params, batch):
            return jax.lax.pmean(jnp.mean((batch @ params["up"]) ** 2), "x")

        sharded = jax.shard_map(
            jax.value_and_grad(loss),
            mesh=mesh(8),
            in_specs=(P(), P("x")),
            out_specs=(P(), P()),
            check_vma=False,
        )
        value, grads = sharded(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    with pytest.raises(
        CaptureError,
        match="written for several devices: it runs `shard_map`.*Take out pmap or shard_map",
    ):
        aq.plan(step, *arguments(), cluster=CLUSTER)


def test_a_step_under_pmap_is_refused():
    step = jax.pmap(
        lambda params, batch: params - jax.lax.pmean(batch.mean() * params, "i"), axis_name="i"
    )
    shapes = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    with pytest.raises(CaptureError, match="written for several devices"):
        aq.plan(step, *shapes, cluster=CLUSTER)
