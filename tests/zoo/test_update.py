"""The update, layer by layer, is the optimizer's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aliquot as aq
from aliquot.planners import method_by_name
from aliquot.zoo import build
from aliquot.zoo._schedule import schedule
from aliquot.zoo._update import OPTIMIZERS, Update

RATE = {"peak": 0.1, "end": 0.01, "warmup_steps": 2, "decay": "cosine", "steps": 10}


def params_like(seed, scan):
    def draw(key, *shape):
        return jax.random.normal(key, shape)

    keys = jax.random.split(jax.random.key(seed), 4)
    layers = [{"w": draw(key, 3, 2), "b": {"x": draw(key, 2)}} for key in keys[:3]]
    if scan:
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return {"embed": draw(keys[3], 4, 3), "layers": layers}


def test_a_master_copy_is_updated_as_parameters_would_be():
    made = OPTIMIZERS["adamw"](0.1, None, 0.0)
    update = Update(made, dynamic_scale=False, rounded_params="bfloat16", clip_norm=2.0)
    params = params_like(0, scan=False)
    state, opt_state = update.init(params), made.init(params)
    for step in range(1, 4):
        grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), params_like(step, scan=False))
        norm = update.norm(state, grads)
        # Squares are summed in float32, whatever the gradients are in.
        exact = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        assert float(norm) == pytest.approx(float(optax.tree.norm(exact)), rel=1e-6)
        state = update(state, grads, norm)
        exact = jax.tree.map(functools.partial(jnp.multiply, 2.0 / norm), exact)
        updates, opt_state = made.update(exact, opt_state, params)
        params = optax.apply_updates(params, updates)
        assert_equal(state["opt_state"]["master"], params)
        rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16), state["opt_state"]["master"])
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), state["params"], rounded))


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


# Each optimizer with layers written out and stacked, with a loss scale and without.
QUICK = {
    "adamw": [(False, True), (True, False)],
    "sgd": [(False, False), (True, True)],
    "adafactor": [(False, True), (True, False)],
}


@pytest.mark.parametrize(
    ("name", "options", "dynamic_scale", "scan"),
    [
        pytest.param(
            name,
            options,
            dynamic_scale,
            scan,
            marks=() if (dynamic_scale, scan) in QUICK[name] else pytest.mark.slow,
        )
        for name, options in (
            ("adamw", {}),
            ("sgd", {}),
            ("sgd", {"weight_decay": 0.1, "momentum": 0.9}),
            ("adafactor", {"weight_decay": 0.1}),
            ("adafactor", {"scheduled": True, "clip_norm": 2.0}),
            ("adamw", {"scheduled": True, "clip_norm": 2.0}),
        )
        for dynamic_scale in (False, True)
        for scan in (False, True)
    ],
)
def test_update_by_layers_equals_update_at_once(name, options, dynamic_scale, scan):
    rate = schedule(RATE) if options.get("scheduled") else 0.1
    made = OPTIMIZERS[name](rate, options.get("weight_decay"), options.get("momentum", 0.0))
    clip_norm = options.get("clip_norm")
    update = Update(made, dynamic_scale=dynamic_scale, rate=rate, clip_norm=clip_norm)
    clip = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
    params = params_like(0, scan)
    state = {"params": params, **update.init(params)}
    opt_state = made.init(params)
    for step in range(1, 4):
        grads = params_like(step, scan)
        scaled = jax.tree.map(lambda g: g * 2.0**15, grads) if dynamic_scale else grads
        norm = update.norm(state, scaled)
        figures = update.figures(state, norm)
        state = update(state, scaled, norm)
        if clip_norm:
            assert figures["grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-6)
            assert figures["grad_norm"] > clip_norm
            assert figures["learning_rate"] == pytest.approx(float(rate(step - 1)), rel=1e-6)
        else:
            assert not figures
        grads, _ = clip.update(grads, None)
        updates, opt_state = made.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        assert_equal(state["params"], params)
        assert_equal(state["opt_state"], opt_state)


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_a_gradient_that_is_not_finite_anywhere_changes_nothing(bad):
    update = Update(OPTIMIZERS["adamw"](0.1, None, 0.0), dynamic_scale=True)
    params = params_like(0, scan=False)
    state = {"params": params, **update.init(params)}
    grads = params_like(1, scan=False)
    grads["layers"][1]["b"]["x"] = grads["layers"][1]["b"]["x"].at[0].set(bad)
    new = update(state, grads)
    assert_equal(new["params"], params)
    assert_equal(new["opt_state"], state["opt_state"])
    assert float(new["loss_scale"]["scale"]) == 2.0**14


def test_scale_doubles_after_enough_finite_steps():
    update = Update(OPTIMIZERS["sgd"](0.1, None, 0.0), dynamic_scale=True)
    params = params_like(0, scan=True)
    state = {"params": params, **update.init(params)}
    state["loss_scale"]["good_steps"] = jnp.int32(1998)
    grads = params_like(1, scan=True)
    updated = jax.jit(update)
    once = updated(state, grads)["loss_scale"]
    assert (float(once["scale"]), int(once["good_steps"])) == (2.0**15, 1999)
    twice = updated(state | {"loss_scale": once}, grads)["loss_scale"]
    assert (float(twice["scale"]), int(twice["good_steps"])) == (2.0**16, 0)
    assert float(update.scale(state | {"loss_scale": twice}, jnp.float32(2.0))) == 2.0**17


@pytest.mark.parametrize(
    "name", [pytest.param("dp", marks=pytest.mark.slow), "zero2", "megatron:dp2,tp2,pp2"]
)
def test_a_master_copy_under_plans(name):
    """Sums of 16-bit gradients over devices round as those of the plain step."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 64, "seq_len": 16}
    # Of Adam's first step, a gradient of zero has any sign.
    made = build("gpt-10m", 32, overrides=sizes, dtype="bf16-master", optimizer="sgd")
    plan = aq.plan(
        *(made.train_step, made.state, made.batch),
        cluster=aq.Cluster.preset("8xcpu"),
        method=method_by_name(name),
        num_micro_batches=4,
    )
    step = aq.parallelize(made.train_step, plan)
    tokens = jax.random.randint(jax.random.key(1), (32, 16), 0, 64)
    batch = {"inputs": tokens, "targets": jnp.roll(tokens, -1, axis=1)}
    found = step.check(step.init(made.init, jax.random.key(0)), batch)
    assert found.is_equal, found
