"""Compilers for GPUs combine small collectives, so that each pays a part of a start."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import aliquot as aq
from aliquot.cluster import TARGETS

OPTIMIZER = optax.adam(1e-3)
NUM_LAYERS, WIDTH = 8, 512


def loss_of(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return (x**2).mean()


def train_step(state, x):
    params, moments = state
    updates, moments = OPTIMIZER.update(jax.grad(loss_of)(params, x), moments)
    return optax.apply_updates(params, updates), moments


def state():
    layer = {"kernel": jnp.zeros((WIDTH, WIDTH)), "bias": jnp.zeros(WIDTH)}
    params = [layer] * NUM_LAYERS
    return params, OPTIMIZER.init(params)


def gathers_of_new_biases():
    plan = aq.plan(
        train_step,
        jax.eval_shape(state),
        jax.ShapeDtypeStruct((64, WIDTH), jnp.float32),
        cluster=aq.Cluster.preset("8xA100-80GB"),
        method=aq.Zero2Parallel(),
    )
    found = [
        use
        for use in plan.prediction.collectives
        if use.label.startswith("new") and "bias" in use.label
    ]
    assert sum(use.count for use in found) == NUM_LAYERS
    p = plan.prediction
    listed_s = sum(use.seconds for use in p.collectives)
    assert listed_s == pytest.approx(p.communication_s + p.gradient_s)
    return sum(use.seconds for use in found)


def test_gathers_of_new_parameters_share_a_start(monkeypatch):
    together_s = gathers_of_new_biases()
    alone = dataclasses.replace(TARGETS["gpu"], combined_bytes=0)
    monkeypatch.setitem(TARGETS, "gpu", alone)
    # Each is far smaller than what a link sends while a collective starts.
    assert together_s < gathers_of_new_biases() / NUM_LAYERS
