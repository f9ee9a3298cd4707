"""The step with a plan's splits written into it, jitted by its user: the plan's own program."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
