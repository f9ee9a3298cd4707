"""Heads narrower than a tensor degree, such as those that make one value of a token, stay whole."""

import jax
import jax.numpy as jnp
import pytest
from planners.small_steps import array, momentum_step

import aliquot as aq
from aliquot.core import InputError
from aliquot.planners import method_by_name


def value_head(width):
    """Layers with a head of the given width beside another."""

    def loss(params, batch):
        h = batch["x"] + jax.nn.gelu(batch["x"] @ params["up"]) @ params["down"]
        return jnp.mean((h @ params["value"] - batch["y"]) ** 2) + jnp.mean(
            (h @ params["out"]) ** 2
        )

    params = {
        "up": array(64, 256),
        "down": array(256, 64),
        "value": array(64, width),
        "out": array(64, 128),
    }
    return momentum_step(loss, params, {"x": array(32, 64), "y": array(32, width)})


@pytest.mark.parametrize("method", ["tp:2", "megatron:dp4,tp2", "megatron:dp2,tp2,fsdp"])
def test_a_head_narrower_than_the_tensor_degree_stays_whole(method):
    devices = 4 if "fsdp" in method else 8
    plan = aq.plan(
        *value_head(1),
        cluster=aq.Cluster.preset(f"{devices}xH100"),
        method=method_by_name(method),
    )
    shardings = plan.stages[0].shardings
    assert "tensor" not in [a for dim in shardings["state.params.value"] for a in dim]
    assert shardings["state.params.up"][1] == ("tensor",)
    assert (
        "params.value has 1 output feature, fewer than tp 2: it stays whole on each of these"
        " devices, and all compute its products."
    ) in [note.removeprefix("state.") for note in plan.notes]


def test_a_wider_head_that_the_degree_does_not_divide_is_refused():
    with pytest.raises(InputError, match="value: 5 rows or columns cannot be split over tp 2"):
        aq.plan(
            *value_head(5), cluster=aq.Cluster.preset("8xH100"), method=aq.TensorParallel(degree=2)
        )
