"""A step in pipeline stages is the plain step, whatever it is made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from graph.steps import STEPS
from runtime.equality import covering, pairs
from runtime.pipeline_cases import BAR, MICRO_BATCHES, NUM_STEPS, Case, all_cases, compare
from runtime.pipelines import pipeline

from aliquot.core import CaptureError, InputError

REPORT = {
    "name": "pipeline_equality",
    "question": "Equality of pipelines and plain steps",
    "bar": (
        "float64, AdamW: loss and every leaf of the state within 1e-9 of the leaf's largest"
        " magnitude"
    ),
    "method": (
        f"{NUM_STEPS} steps in {MICRO_BATCHES} micro-batches and as many plain ones on one device,"
        " from one state over the same batches; the largest difference of any loss and of any leaf"
        " after the last step. The bias of the keys, whose gradient is rounding alone, is measured"
        " on the scale of the queries' bias beside it. Wide-ResNet, whose BatchNorm sees one"
        " micro-batch at a time, is compared with the SPMD program on the same independent parts."
        " Machine code is not optimized. Deterministic: one run each."
    ),
    "largest": ["loss", "leaf"],
}
ROWS, WIDTH, WORDS = 8, 6, 10


def weights():
    random = np.random.default_rng(1)
    layers = [
        {"w": random.normal(size=(WIDTH, WIDTH)), "b": random.normal(size=WIDTH) / 5}
        for _ in range(4)
    ]
    return {"embed": random.normal(size=(WORDS, WIDTH)), "layers": layers}


def data():
    random = np.random.default_rng(0)
    mask = (random.random(ROWS) < 0.6).astype(np.float64)
    mask[:4] = [1, 0, 0, 0]  # micro-batches count differently
    words = random.integers(0, WORDS, (2, ROWS)).astype(np.int32)
    return {"inputs": words[0], "targets": words[1], "mask": mask}


def block(layer, x):
    return x + jnp.tanh(x @ layer["w"] + layer["b"])


def body(params, batch, block=block):
    x = params["embed"][batch["inputs"]]
    for layer in params["layers"]:
        x = block(layer, x)
    return x


def each(params, batch, x):
    scores = x @ params["embed"].T
    return (
        jax.nn.logsumexp(scores, axis=1)
        - jnp.take_along_axis(scores, batch["targets"][:, None], axis=1)[:, 0]
    )


def tied(params, batch):
    return each(params, batch, body(params, batch)).mean(), {}


def masked_mean(params, batch):
    losses = each(params, batch, body(params, batch))
    return jnp.sum(losses * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1.0), {}


def dropout(params, batch):
    x = params["embed"][batch["inputs"]]
    for number, layer in enumerate(params["layers"]):
        kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(3), number), 0.5, x.shape)
        x = block(layer, jnp.where(kept, x * 2, 0.0))
    return each(params, batch, x).mean(), {}


def skips(params, batch):
    first, second, third, last = params["layers"]
    outer = block(first, params["embed"][batch["inputs"]])
    inner = block(second, outer)
    return each(params, batch, block(last, block(third, inner) + inner) + outer).mean(), {}


def metrics_for_each_example(params, batch):
    x = body(params, batch)
    losses = each(params, batch, x)
    middle = block(params["layers"][0], params["embed"][batch["inputs"]])
    return losses.mean(), {
        "losses": losses,
        "norms": (middle**2).sum(1),
        "largest": jnp.abs(x).max(),
    }


def auxiliary_losses(params, batch):
    x, extra = params["embed"][batch["inputs"]], 0.0
    for layer in params["layers"]:
        x = block(layer, x)
        extra = extra + jnp.mean(x**2)
    return each(params, batch, x).mean() + 0.01 * extra, {"extra": extra}


def remat(params, batch):
    saved = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)
    return each(params, batch, body(params, batch, jax.checkpoint(saved))).mean(), {}


def weight_decay(params, batch):
    return tied(params, batch)[0] + 0.01 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params)), {}


def shared_layer(params, batch):
    """All four layers are the first one."""
    return tied({"embed": params["embed"], "layers": [params["layers"][0]] * 4}, batch)


def train_on(loss_fn, optimizer):
    def train_step(state, batch):
        (loss, extra), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss, **extra}

    params = weights()
    return train_step, {"params": params, "opt_state": optimizer.init(params)}, data()


# Submeshes' sizes, how many stages each runs, micro-batches, schedule.
TWO = {"sizes": (1, 1), "micro_batches": 2}
GROUPS = {"sizes": (2, 2), "micro_batches": 2}
UNEQUAL = {"sizes": (1, 4, 2), "micro_batches": 2, "schedule": "zero-bubble"}
CHUNKS = {"sizes": (1, 2), "chunks": 2, "micro_batches": 4, "schedule": "interleaved-1f1b"}
WHOLE = {"sizes": (1, 2), "micro_batches": 1}

SGD = optax.sgd(0.1)


def limited(updates, params):
    """Gradients below an array that those of equal shape have in common."""
    limits = {}

    def limit(g):
        return jnp.minimum(g, limits.setdefault(g.shape, jnp.full(g.shape, 0.01, g.dtype)))

    return jax.tree.map(limit, updates)


CASES = {
    "tied, clipped by the global norm": (
        tied,
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
        GROUPS,
    ),
    "tied, in one micro-batch": (tied, optax.adam(0.1), WHOLE),
    "tied, in chunks": (tied, SGD, {**CHUNKS, "micro_batches": 2}),
    "clipped by value": (tied, optax.chain(optax.clip(0.01), SGD), TWO),
    "limited by an array that all share": (tied, optax.chain(optax.stateless(limited), SGD), TWO),
    "leaves joined by the optimizer": (tied, optax.flatten(optax.adam(0.1)), TWO),
    "factored moments": (tied, optax.adafactor(0.1, min_dim_size_to_factor=4), GROUPS),
    "masked mean": (masked_mean, SGD, GROUPS),
    "dropout": (dropout, SGD, UNEQUAL),
    "skip connections": (skips, SGD, UNEQUAL),
    "metrics for each example": (metrics_for_each_example, SGD, GROUPS),
    "metrics for each example, of the whole batch": (metrics_for_each_example, SGD, WHOLE),
    "auxiliary losses": (auxiliary_losses, SGD, UNEQUAL),
    "auxiliary losses of the whole batch": (auxiliary_losses, SGD, WHOLE),
    "remat": (remat, SGD, UNEQUAL),
    "weight decay in the loss": (weight_decay, SGD, GROUPS),
    "one layer in all stages": (shared_layer, optax.adam(0.1), {**CHUNKS, "micro_batches": 2}),
}


# The others differ from these in what runs anywhere.
SLOW = {
    "tied, in one micro-batch",
    "clipped by value",
    "metrics for each example, of the whole batch",
    "weight decay in the loss",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES],
)
def test_losses_and_optimizers(name, x64):
    loss_fn, optimizer, settings = CASES[name]
    fn, state, batch = train_on(loss_fn, optimizer)
    found = pipeline(fn, state, batch, anywhere=True, **settings).check(state, batch)
    assert found.largest < 1e-12, str(found)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_programs_of_constants_alone_run_where_their_stage_does(schedule, size, x64):
    """The gradient of a rolled sum is the same for every micro-batch and depends on no array."""

    def step(state, batch):
        def loss(weights):
            x = jnp.tanh(batch + weights["a"])
            x = jnp.tanh((x - x.mean(1, keepdims=True)) * weights["b"])
            return jnp.sum(jnp.roll(x, 2, axis=0)) / len(batch)

        value, gradients = jax.value_and_grad(loss)(state["weights"])
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, state["weights"], gradients)
        state = {"weights": weights, "since": jnp.zeros(3)}
        return state, {"loss": value, "rate": jnp.float64(0.1)}

    state = {"weights": {k: jnp.full(WIDTH, 0.5) for k in "ab"}, "since": jnp.ones(3)}
    batch = np.random.default_rng(0).normal(size=(16, WIDTH))
    # No stage is on the first device, where JAX runs what it is given no place for.
    made = pipeline(
        step, state, batch, sizes=(size, size // 2 or 1), schedule=schedule, anywhere=True,
        backwards=True,
    )  # fmt: skip
    found = made.check(state, batch)
    assert found.largest < 1e-12, str(found)
    new, _ = made(state, batch)
    assert jax.devices()[0] not in new["since"].devices()


STEP_NAMES = {
    "nnx_in_place": GROUPS,
    "plain_loss_scale_where": TWO,
    "plain_loss_scale_cond": GROUPS,
    "plain_dropout_raw_key": TWO,
    "optax_multi_transform_frozen": TWO,
    "optax_multi_steps": TWO,
    "plain_metrics_after": TWO,
    "remat_save_names": TWO,
    "plain_evaluation": {**GROUPS, "schedule": "inference"},
    "while_under_vmap": {**TWO, "schedule": "inference"},
    # Several passes in one step, which only the whole batch goes through.
    "plain_gan": WHOLE,
    "plain_accumulation": WHOLE,
}


@pytest.mark.parametrize("name", STEP_NAMES)
def test_steps_as_people_write_them(name, request):
    # NNX's layers keep single precision.
    single = name.startswith("nnx")
    if not single:
        request.getfixturevalue("x64")
    made = STEPS[name]()
    step = pipeline(made.fn, *made.args, anywhere=True, **STEP_NAMES[name], **made.kwargs)
    found = step.check(*made.args, **made.kwargs)
    assert found.largest < (1e-6 if single else 1e-12), str(found)


def test_batches_that_do_not_divide_are_refused():
    fn, state, batch = train_on(tied, SGD)
    with pytest.raises(InputError, match="micro"):
        pipeline(fn, state, batch, micro_batches=3)
    with pytest.raises(InputError, match="micro"):
        pipeline(fn, state, batch, micro_batches=4, sizes=(4, 1))
    with pytest.raises(CaptureError, match="does not decompose"):
        pipeline(*(lambda s: (s.fn, *s.args))(STEPS["plain_batchnorm"]()), anywhere=True)


# Every schedule, number of stages and mesh once, and a whole model; (slow) all.
_SAMPLE = covering(all_cases(["tiny"]))[:4]
_MODELS = [Case(model="gpt", schedule="1f1b", stages=2, mesh="2")]


@pytest.mark.parametrize("case", [*_SAMPLE, *_MODELS], ids=str)
def test_three_steps_of_a_pipeline_are_three_plain_steps(case):
    loss, leaf, path = compare(case)
    assert loss <= BAR, loss
    assert leaf <= BAR, (leaf, path)


@pytest.mark.slow
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_all_pipelines_are_plain_steps(case, row):
    loss, leaf, path = compare(case)
    row(
        "Cases",
        model=case.model,
        schedule=case.schedule,
        stages=case.stages,
        mesh=case.mesh,
        devices="+".join(map(str, case.sizes)),
        loss=loss,
        leaf=leaf,
        worst_leaf=path,
    )
    assert loss <= BAR, loss
    assert leaf <= BAR, (leaf, path)


def test_every_choice_is_in_the_sample():
    few, every = (
        {choice for case in cases for pair in pairs(case) for choice in pair}
        for cases in (_SAMPLE, all_cases(["tiny"]))
    )
    assert few == every
