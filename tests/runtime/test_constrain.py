"""The step with a plan's splits written into it, jitted by its user: the plan's own program."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import aliquot as aq

CLUSTER = aq.Cluster.preset("8xcpu")


def train_step(state, batch, rate=0.1):
    def loss_fn(params):
        hidden = jnp.tanh(batch["x"] @ params["in"])
        return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], grads)
    params = jax.tree.map(lambda p, m: p - rate * m, state["params"], mu)
    return {"params": params, "mu": mu}, {"loss": loss}


def arguments():
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(64, 128)), "out": rng.normal(size=(128, 64)) / 11}
    state = {"params": params, "mu": jax.tree.map(np.zeros_like, params)}
    return state, {"x": rng.normal(size=(32, 64)), "y": rng.normal(size=(32, 64))}


def planned(method, **options):
    return aq.plan(train_step, *arguments(), cluster=CLUSTER, method=method, **options)


@pytest.mark.parametrize(
    ("method", "num_micro_batches"),
    [
        (aq.DataParallel(), 1),
        (aq.Zero2Parallel(), 2),
        (aq.Zero3Parallel(), 1),
        (aq.TensorParallel(degree=8), 1),
        (aq.ShardParallel(mesh_shape=(4, 2)), 2),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_it_is_the_program_of_the_plan_and_computes_the_plain_numbers(
    method, num_micro_batches, x64
):
    state, batch = arguments()
    plan = planned(method, num_micro_batches=num_micro_batches)
    jitted = jax.jit(aq.constrain(train_step, plan), donate_argnums=0)
    compiled = jitted.lower(
        jax.device_put(state, plan.shardings(state)), jax.device_put(batch, plan.shardings(batch))
    ).compile()
    step = aq.parallelize(train_step, plan).prepare(state, batch)
    found = aq.runtime.compiled_stats(
        compiled, step.mesh.axis_names, list(step.mesh.shape.values()), lower_s=0, compile_s=0
    )
    (ours,), (own,) = found.stages, step.stats().stages
    assert unnamed(ours.collectives) == unnamed(own.collectives)
    assert ours.temp_bytes == pytest.approx(own.temp_bytes, rel=0.02)
    assert ours.memory.alias_bytes == own.memory.alias_bytes

    plain_state, found = state, jax.device_put(state, plan.shardings(state))
    for _ in range(3):
        plain_state, plain = train_step(plain_state, batch)
        found, metrics = jitted(found, batch)
        assert metrics["loss"] == pytest.approx(float(plain["loss"]), rel=1e-12)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found, plain_state
    )
    # Its results stay where the next call needs them.
    wanted = plan.shardings(state)
    assert jax.tree.all(jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, 2), found, wanted))


def unnamed(collectives):
    return sorted(str(replace(each, label="")) for each in collectives)


def test_it_keeps_the_signature_and_may_stand_in_a_loop_of_jax(x64):
    state, batch = arguments()
    plan = planned(aq.Zero3Parallel())
    step = aq.constrain(train_step, plan)
    assert step.__name__ == "train_step"

    @jax.jit
    def three_steps(state):
        return jax.lax.fori_loop(0, 3, lambda _, state: step(state, batch)[0], state)

    found, wanted = three_steps(state), state
    for _ in range(3):
        wanted, _ = train_step(wanted, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), found, wanted)


def test_pipelines_and_other_arguments_are_refused(x64):
    state, batch = arguments()
    stages = planned(aq.PipeshardParallel(num_stages=2, num_micro_batches=2))
    with pytest.raises(aq.InputError, match=r"a pipeline of 2 stages.*aliquot\.parallelize"):
        aq.constrain(train_step, stages)
    step = jax.jit(aq.constrain(train_step, planned(aq.Zero3Parallel())))
    with pytest.raises(aq.PlanMismatchError):
        step(state, jax.tree.map(lambda a: a[:16], batch))


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(64, 128, rngs=rngs)
        self.second = nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def create_nnx(key):
    model = Layers(nnx.Rngs(key))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def step_nnx(model, optimizer, batch):
    def loss_fn(model):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return model, optimizer, loss


def create_equinox(key):
    model = eqx.nn.MLP(64, 64, 128, 1, activation=jnp.tanh, key=key)
    return model, optax.adam(1e-2).init(eqx.filter(model, eqx.is_inexact_array))


def step_equinox(model, moments, batch):
    def loss_fn(model):
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, moments = optax.adam(1e-2).update(grads, moments)
    return eqx.apply_updates(model, updates), moments, loss


@pytest.mark.parametrize(
    ("create", "step", "shapes_of", "jit"),
    [
        (create_nnx, step_nnx, nnx.eval_shape, jax.jit),
        (create_equinox, step_equinox, eqx.filter_eval_shape, eqx.filter_jit),
    ],
    ids=["nnx", "equinox"],
)
def test_one_call_makes_a_sharded_model_for_a_loop_of_ones_own(create, step, shapes_of, jit):
    rows = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    batch = {"x": rows, "y": rows[::-1]}
    shapes = shapes_of(create, jax.random.key(0))
    plan = aq.plan(step, *shapes, batch, cluster=CLUSTER, method=aq.Zero3Parallel())
    found = aq.parallelize(step, plan).init(create, jax.random.key(0))
    wanted = create(jax.random.key(0))
    largest = max(jax.tree.leaves(found[0]), key=lambda leaf: getattr(leaf, "size", 0))
    assert len(largest.sharding.device_set) == 8
    assert largest.addressable_shards[0].data.size == largest.size / 8
    constrained, plain = jit(aq.constrain(step, plan)), jit(step)
    for _ in range(3):
        *found, loss = constrained(*found, batch)
        *wanted, plain_loss = plain(*wanted, batch)
        assert float(loss) == pytest.approx(float(plain_loss), rel=1e-5)
