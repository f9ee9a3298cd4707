"""Specs and shardings as trees, for a training loop of one's own."""

from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from sample_plans import sample_pipeline, sample_plan

import aliquot as aq

SDS = jax.ShapeDtypeStruct


def train_step(state, batch):
    def loss_of(params):
        hidden = jnp.tanh(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum, "step": state["step"] + 1}, loss


def arguments():
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(16, 64)), "down": rng.normal(size=(64, 8))}
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    state = {
        "params": params,
        "momentum": jax.tree.map(jnp.zeros_like, params),
        "step": jnp.zeros((), jnp.int32),
    }
    batch = {
        "x": jnp.asarray(rng.normal(size=(32, 16)), jnp.float32),
        "y": jnp.zeros((32, 8), jnp.float32),
    }
    return state, batch


def test_shardings_run_as_they_are_under_jit():
    state, batch = arguments()
    plan = aq.plan(
        train_step, state, batch, cluster=aq.Cluster.preset("8xcpu"), method=aq.Zero3Parallel()
    )
    mesh = plan.mesh()
    assert mesh.shape == {"x": 8}
    of_state, of_batch = plan.shardings(state, mesh=mesh), plan.shardings(batch)
    assert jax.tree.structure(of_state) == jax.tree.structure(state)
    assert of_batch["x"] == NamedSharding(mesh, PartitionSpec("x", None))
    assert not of_state["params"]["up"].is_fully_replicated
    own = jax.jit(train_step, in_shardings=(of_state, of_batch), out_shardings=(of_state, None))
    got, loss = own(jax.device_put(state, of_state), jax.device_put(batch, of_batch))
    want, want_loss = train_step(state, batch)
    assert got["params"]["up"].sharding.is_equivalent_to(of_state["params"]["up"], 2)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def sample_state():
    return {
        "params": {"layers": [{"w": SDS((64, 32), jnp.float32)}] * 2},
        "step": SDS((), jnp.int32),
    }


def test_specs_are_a_tree_like_the_argument():
    specs = sample_plan().partition_specs(sample_state())
    assert specs == {
        "params": {"layers": [{"w": PartitionSpec("x", "y")}] * 2},
        "step": PartitionSpec(),
    }


def test_a_part_of_an_argument_is_found_by_its_paths():
    assert sample_plan().partition_specs(sample_state()["params"])["layers"][1][
        "w"
    ] == PartitionSpec("x", "y")
    weight = SDS((64, 32), jnp.float32)
    with pytest.raises(aq.InputError, match=r"could be any of state.params.layers\[0\].w, state"):
        sample_plan().partition_specs(weight)
    assert sample_plan().partition_specs(weight, path="state.params.layers[0].w") == PartitionSpec(
        "x", "y"
    )


def test_trees_unlike_every_argument_are_refused_with_the_difference():
    state = sample_state()
    state["params"]["layers"] = [{"w": SDS((64, 33), jnp.float32)}] * 2
    with pytest.raises(
        aq.InputError, match=r"layers\[0\].w has shape \(64, 33\), and \(64, 32\) in the plan"
    ):
        sample_plan().partition_specs(state)
    with pytest.raises(aq.InputError, match="state, batch"):
        sample_plan().partition_specs({"nothing": SDS((3,), jnp.float32)})


def test_meshes_of_pipelines_and_too_few_devices_are_refused():
    with pytest.raises(aq.InputError, match="aliquot.parallelize"):
        sample_pipeline().mesh()
    with pytest.raises(aq.PlanMismatchError, match="there are 3"):
        sample_plan().mesh(jax.devices()[:3])


def test_notebooks_show_the_plan():
    shown = sample_plan()._repr_html_()
    assert shown.startswith("<p><b>gpt-10m on 8xH100") and "<module" not in shown
    # A picture of the mesh, with the axes in words and a cell for each device.
    ElementTree.fromstring(f"<div>{shown.replace('<br>', '<br/>')}</div>")
    assert shown.count('class="device"') == 8 and "→ y (2): " in shown and "↓ x (4): " in shown
    assert "<svg" not in sample_pipeline()._repr_html_()
