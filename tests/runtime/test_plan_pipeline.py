"""Plans of pipelines meet the devices and the processes that are there."""

import types

import jax
import jax.numpy as jnp
import pytest

import aliquot as aq
from aliquot.core import PlanMismatchError
from aliquot.runtime import require_devices


def step(state, batch):
    def loss(params):
        x = batch["x"]
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["w"])
        return jnp.mean(x**2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    return {"params": jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], gradients)}, {
        "loss": value
    }


@pytest.fixture(scope="module")
def plan():
    state = {
        "params": {"layers": [{"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)} for _ in range(2)]}
    }
    return aq.plan(
        step,
        state,
        {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)},
        cluster=aq.Cluster.preset("8xcpu"),
        method=aq.PipeshardParallel(num_stages=2, num_micro_batches=2, schedule="1f1b"),
    )


def devices(num_processes):
    return [types.SimpleNamespace(id=k, process_index=k * num_processes // 8) for k in range(8)]


def test_too_few_devices(plan):
    with pytest.raises(
        PlanMismatchError, match="the plan is for 8 devices in 2 stages, and there are 4"
    ):
        require_devices(plan, devices(1)[:4])


def test_processes_that_cannot_share_the_hosts(plan):
    with pytest.raises(
        PlanMismatchError, match="1 host of 8 devices, which 3 processes cannot share equally"
    ):
        require_devices(plan, devices(3))
