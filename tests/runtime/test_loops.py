"""A step in micro-batches computes what the plain step computes, whatever its loss is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph.steps import STEPS
from runtime.planned import loop_results

import aliquot as aq
from aliquot.graph import capture
from aliquot.runtime._check import compare, plain_results

ROWS = 16
KEY = jax.random.key(3)


def data():
    random = np.random.default_rng(0)
    mask = (random.random(ROWS) < 0.6).astype(np.float64)
    mask[:4] = [1, 0, 0, 0]  # micro-batches count differently
    return {
        "x": random.normal(size=(ROWS, 6)),
        "y": random.integers(0, 3, ROWS).astype(np.int32),
        "mask": mask,
    }


def weights():
    random = np.random.default_rng(1)
    return {"w": random.normal(size=(6, 3)), "v": random.normal(size=(3, 3))}


def train_on(loss_fn):
    def train_step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return train_step


def logits(params, batch):
    return jnp.tanh(batch["x"] @ params["w"]) @ params["v"]


def each(params, batch):
    scores = logits(params, batch)
    return (
        jax.nn.logsumexp(scores, axis=1)
        - jnp.take_along_axis(scores, batch["y"][:, None], axis=1)[:, 0]
    )


def mean(params, batch):
    return each(params, batch).mean()


def total(params, batch):
    return each(params, batch).sum()


def masked_mean(params, batch):
    return jnp.sum(each(params, batch) * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1.0)


def weight_decay(params, batch):
    return mean(params, batch) + 0.1 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


def dropout(params, batch):
    kept = jax.random.bernoulli(KEY, 0.5, (batch["x"].shape[0], 3))
    hidden = jnp.where(kept, jnp.tanh(batch["x"] @ params["w"]), 0.0)
    return jnp.mean((hidden @ params["v"]) ** 2)


def key_for_each_example(params, batch):
    keys = jax.random.split(KEY, batch["x"].shape[0])
    noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)
    return jnp.mean((logits(params, batch) + noise) ** 2)


def rows_by_number(params, batch):
    scores = jax.nn.log_softmax(logits(params, batch))
    return -scores[jnp.arange(scores.shape[0]), batch["y"]].mean()


def position_in_batch(params, batch):
    scores = logits(params, batch)
    return jnp.mean(scores * jnp.linspace(0.0, 1.0, scores.shape[0])[:, None])


def normalised_inputs(params, batch):
    x = batch["x"]
    return mean(params, {**batch, "x": (x - x.mean(0)) / x.std(0)})


def running_sum_of_batch(params, batch):
    return jnp.mean(each(params, batch) * jnp.cumsum(batch["mask"]))


def remat_dropout(params, batch):
    @jax.checkpoint
    def block(w, x):
        kept = jax.random.bernoulli(KEY, 0.5, x.shape)
        return jnp.tanh(jnp.where(kept, x, 0.0) @ w)

    return jnp.mean(block(params["v"], block(params["w"], batch["x"])) ** 2)


def auxiliary_loss_in_a_scan(params, batch):
    def block(carry, _):
        x, extra = carry
        x = jnp.tanh(x @ params["v"])
        return (x, extra + jnp.mean(x**2) + 0.01 * jnp.sum(params["v"] ** 2)), None

    (x, extra), _ = jax.lax.scan(block, (batch["x"] @ params["w"], 0.0), None, length=3)
    return jnp.mean(x) + extra


def recurrent(params, batch):
    def cell(state, x):
        state = jnp.tanh(x[:, None] * params["w"][0] + state @ params["v"])
        return state, state.mean()

    start = jnp.zeros((batch["x"].shape[0], 3), batch["x"].dtype)
    state, means = jax.lax.scan(cell, start, batch["x"].T)
    return jnp.mean(state**2) + means.sum()


LOSSES = [
    mean,
    total,
    masked_mean,
    weight_decay,
    dropout,
    key_for_each_example,
    rows_by_number,
    position_in_batch,
    normalised_inputs,
    running_sum_of_batch,
    remat_dropout,
    auxiliary_loss_in_a_scan,
    recurrent,
]


@pytest.mark.parametrize(
    ("loss_fn", "groups"),
    [
        pytest.param(
            loss_fn,
            groups,
            id=f"{loss_fn.__name__}-{groups}",
            marks=() if groups == 2 or loss_fn in (mean, dropout) else pytest.mark.slow,
        )
        for loss_fn in LOSSES
        for groups in (1, 2)
    ],
)
def test_losses(loss_fn, groups, x64):
    leaves_of = (weights(), data())
    graph = capture(train_on(loss_fn), *leaves_of)
    leaves = jax.tree.leaves(leaves_of)
    found = loop_results(graph, leaves, num_micro_batches=4, groups=groups)
    check = compare([o.path for o in graph.outputs], found, plain_results(graph, leaves))
    assert check.largest < 1e-13, str(check)


# Each sort of step; the slow ones run as pipelines in the quick tests.
SLOW = {
    "nnx_in_place_metrics",
    "remat_save_names",
    "plain_dropout_raw_key",
    "plain_loss_scale_cond",
}
STEP_NAMES = [
    "nnx_in_place",
    "nnx_in_place_metrics",
    "equinox_filter_jit",
    "remat_save_names",
    "scan_layers_remat",
    "switch_of_three",
    "tied_embeddings",
    "optax_clip_adamw_schedule",
    "optax_adafactor",
    "plain_aux",
    "plain_dropout_raw_key",
    "plain_evaluation",
    "plain_loss_scale_cond",
]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in STEP_NAMES],
)
def test_steps(name, request):
    # NNX's layers keep single precision.
    single = name.startswith("nnx")
    if not single:
        request.getfixturevalue("x64")
    made = STEPS[name]()
    graph = capture(made.fn, *made.args, **made.kwargs)
    leaves = graph.calling.flatten(made.args, made.kwargs).leaves
    found = loop_results(graph, leaves, num_micro_batches=2, groups=2)
    check = compare([o.path for o in graph.outputs], found, plain_results(graph, leaves))
    assert check.largest < (1e-5 if single else 1e-13), str(check)


def test_a_result_with_fewer_rows_than_the_batch_is_cut_where_it_has_rows():
    def train_step(params, batch):
        def loss_fn(w):
            h = jnp.tanh(batch["x"] @ w)
            return jnp.mean(h**2), h

        (loss, h), grad = jax.value_and_grad(loss_fn, has_aux=True)(params)
        pairs = h.reshape(h.shape[0] // 2, 2, -1)
        return params - 0.1 * grad, {"loss": loss, "pairs": pairs, "y": jnp.sum(batch["y"] ** 2)}

    params, x = weights()["w"], data()["x"][:8]
    batch = {"x": x, "y": x}
    method = aq.ManualParallel(specs={"batch.y": ("x", None)}, mesh_shape=(4,))
    plan = aq.plan(
        train_step,
        params,
        batch,
        cluster=aq.Cluster.preset("4xcpu"),
        method=method,
        num_micro_batches=2,
    )
    check = aq.parallelize(train_step, plan, devices=jax.devices()[:4]).check(params, batch)
    assert check.largest < 1e-6


@pytest.mark.parametrize("method", [aq.DataParallel(), aq.ShardParallel()], ids=["dp", "shard"])
def test_a_loop_under_vmap_ends_for_each_example_by_itself(method):
    def train_step(params, batch):
        def halved(x):
            return jax.lax.while_loop(
                lambda c: jnp.sum(c[0] ** 2) > 0.5, lambda c: (c[0] / 2, c[1] + 1), (x, 0)
            )

        def loss_fn(params):
            x, turns = jax.vmap(halved)(batch["x"])
            return jnp.mean((x @ params["w"]) ** 2 * (1 + turns[:, None])), turns

        (loss, turns), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss, "turns": turns}

    params, batch = {"w": weights()["w"]}, {"x": data()["x"]}
    cluster = aq.Cluster.preset("8xcpu")
    plan = aq.plan(train_step, params, batch, cluster=cluster, method=method, num_micro_batches=2)
    assert aq.parallelize(train_step, plan).check(params, batch).largest < 1e-6
