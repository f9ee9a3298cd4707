"""State that a step returns in another shape or dtype than it takes it in."""

import jax
import jax.numpy as jnp
import pytest

import aliquot as aq
from aliquot.graph import capture, changed_state

HALF = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
RATE = jax.ShapeDtypeStruct((), jnp.float32)


def loss(w, batch):
    return jnp.mean((batch @ w) ** 2)


def drifting(state, batch):
    """A rate in float32 makes float32 of parameters in bfloat16."""
    value, grad = jax.value_and_grad(loss)(state["w"], batch)
    return {"w": state["w"] - state["rate"] * grad, "rate": state["rate"]}, value


def found(step, *args):
    return [(one.path, one.taken, one.returned) for one in changed_state(capture(step, *args))]


def test_beside_an_array_that_keeps_its_dtype():
    assert found(drifting, {"w": HALF, "rate": RATE}, HALF) == [
        ("state.w", "bfloat16[8, 8]", "float32[8, 8]")
    ]


def test_an_argument_that_changes_as_a_whole():
    def step(params, batch):
        grads = jax.grad(lambda params: loss(params["w"], batch))(params)
        return {"w": params["w"] - jnp.float32(0.1) * grads["w"].astype("float32")}, 0.0

    assert found(step, {"w": HALF}, HALF) == [("params.w", "bfloat16[8, 8]", "float32[8, 8]")]


def test_a_log_that_grows():
    def step(state, batch):
        value, grad = jax.value_and_grad(loss)(state["w"], batch)
        log = jnp.concatenate([state["log"], value[None].astype("float32")])
        return {"w": state["w"] - 0.1 * grad, "log": log}

    state = {"w": HALF, "log": jax.ShapeDtypeStruct((3,), jnp.float32)}
    assert found(step, state, HALF) == [("state.log", "float32[3]", "float32[4]")]
    (one,) = changed_state(capture(step, state, HALF))
    assert one.advice == "Return float32[3]: state of another shape needs another plan."


def test_a_state_that_stays_and_a_batch_that_is_no_state():
    def step(w, batch):
        value, grad = jax.value_and_grad(loss)(w, batch)
        return w - 0.1 * grad, {"loss": value, "batch": batch.astype("float32")}

    assert found(step, HALF, HALF) == []


def test_the_plan_and_the_second_step_say_so():
    cluster = aq.Cluster.preset("1xcpu")
    args = ({"w": HALF, "rate": RATE}, HALF)
    plan = aq.plan(drifting, *args, cluster=cluster, method=aq.DataParallel())
    assert any(note.startswith("The step takes state.w as bfloat16[8, 8]") for note in plan.notes)
    step = aq.parallelize(drifting, plan)
    state, batch = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), args)
    state, _ = step(state, batch)
    with pytest.raises(aq.PlanMismatchError, match="The step itself takes state.w as bfloat16"):
        step(state, batch)
