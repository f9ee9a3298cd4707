"""Stages that share devices and are updated as soon as their own gradients are complete."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runtime.pipelines import check_steps, pipeline, staging

from aliquot.graph import capture
from aliquot.runtime.pipeline._instructions import Run
from aliquot.sharding import Part, find_early_updates

ROWS, WIDTH = 16, 4


def train_on(optimizer, num_layers=8, is_tied=False):
    """A step of dense layers; the last one is the first one again if `is_tied`."""
    random = np.random.default_rng(2)
    layers = [
        {"w": random.normal(size=(WIDTH, WIDTH)), "b": random.normal(size=WIDTH)}
        for _ in range(num_layers)
    ]
    params = {"layers": layers}

    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["w"] + layer["b"])
        if is_tied:
            x = x @ params["layers"][0]["w"]
        return ((x - batch["y"]) ** 2).mean()

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        new = optax.apply_updates(state["params"], updates)
        return {"params": new, "opt_state": opt_state}, {"loss": loss}

    batches = [dict(zip("xy", random.normal(size=(2, ROWS, WIDTH)), strict=True)) for _ in "ab"]
    return train_step, {"params": params, "opt_state": optimizer.init(params)}, batches


ADAM = optax.adam(0.1, eps=1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAM)


def updated_early(step):
    """Stages that run tasks of other stages on their devices after their update, and programs that
    run once for each.
    """
    made = step._runner.pipeline
    runs = [each for each in made.instructions.steps if isinstance(each, Run)]
    is_update = [made.functions[each.function].program.part is Part.UPDATE for each in runs]
    early = set()
    for k, each in enumerate(runs):
        early |= {each.stage} & {
            each.stage
            for later, update in zip(runs[k + 1 :], is_update[k + 1 :], strict=True)
            if is_update[k] and not update and made.same_devices(later.stage, each.stage)
        }
    once = [(each.function, each.micro_batch) for each in runs]
    assert len(once) == len(set(once))
    return early


@pytest.mark.parametrize(
    ("optimizer", "is_tied", "sizes", "waiting"),
    [
        (ADAM, False, (1, 1), set()),
        (ADAM, False, (2, 2, 2, 2), set()),
        # The norm of all gradients.
        (CLIPPED, False, (2, 2), {0, 1, 2, 3}),
        # The last stage has the loss alone.
        (CLIPPED, False, (1, 1, 1, 1), set(range(7))),
        # The first stage waits for what the last one adds to its gradient.
        (ADAM, True, (2, 4), {0}),
    ],
)
def test_early_updates_compute_what_the_plain_step_does(optimizer, is_tied, sizes, waiting, x64):
    fn, state, batches = train_on(optimizer, is_tied=is_tied)
    settings = {"sizes": sizes, "chunks": 2, "schedule": "interleaved-1f1b", "micro_batches": 4}
    num_stages = 2 * len(sizes)
    graph = capture(fn, state, batches[0])
    stages = staging(graph, num_stages)
    assert find_early_updates(graph, stages) == set(range(num_stages)) - waiting
    step = pipeline(fn, state, batches[0], early=True, **settings)
    late = pipeline(fn, state, batches[0], **settings)
    assert not updated_early(late)
    # The first stages run last on their devices, so that nothing comes after their updates.
    if not waiting or is_tied:
        assert updated_early(step) == set(range(len(sizes), num_stages))
    found = check_steps(fn, step, state, batches)
    assert found.largest < 1e-11, str(found)


def test_all_finite_is_waited_for():
    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: (jnp.tanh(batch @ p[0]) @ p[1]).sum())(state)
        finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in grads]))
        new = [jnp.where(finite, p - 0.1 * g, p) for p, g in zip(state, grads, strict=True)]
        return new, loss

    graph = capture(step, [np.ones((4, 4)), np.ones((4, 4))], np.ones((8, 4)))
    assert find_early_updates(graph, staging(graph, 2, anywhere=True)) == frozenset()
