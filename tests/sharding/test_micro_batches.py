"""How results of micro-batches combine: decided by rules, checked against what the plain step
does.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from sharding.analyses import record_analyses

from aliquot.core import CaptureError, InputError
from aliquot.graph import capture
from aliquot.sharding import Action, TimeKind, dim_rule, plan_micro_batches, runs_in_groups
from aliquot.sharding.micro_batches import _findings, _micro_batches

W = jax.ShapeDtypeStruct((6, 3), jnp.float32)
BATCH = {
    "x": jax.ShapeDtypeStruct((8, 6), jnp.float32),
    "y": jax.ShapeDtypeStruct((8,), jnp.int32),
    "mask": jax.ShapeDtypeStruct((8,), jnp.float32),
}


def sgd_on(loss_fn, has_aux=False):
    def train_step(w, batch):
        value, grads = jax.value_and_grad(loss_fn, has_aux=has_aux)(w, batch)
        return w - 0.1 * grads, value

    return train_step


def plan(loss_fn, num_micro_batches=4, *, has_aux=False, **settings):
    graph = capture(sgd_on(loss_fn, has_aux), W, BATCH)
    return plan_micro_batches(graph, num_micro_batches, **settings)


def losses(w, batch):
    logits = batch["x"] @ w
    return (
        jax.nn.logsumexp(logits, axis=1)
        - jnp.take_along_axis(logits, batch["y"][:, None], axis=1)[:, 0]
    )


def test_a_mean_is_a_sum_of_summands():
    found = plan(lambda w, b: losses(w, b).mean())
    assert found.combine == {"[0]": "equal", "[1]": "sum"}


def test_a_sum_over_the_batch_is_a_sum_of_summands():
    assert plan(lambda w, b: losses(w, b).sum()).combine["[1]"] == "sum"


def test_results_for_each_example_are_concatenated():
    found = plan(
        lambda w, b: (losses(w, b).mean(), {"each": losses(w, b), "top": losses(w, b).max()}),
        has_aux=True,
    )
    assert found.combine == {
        "[0]": "equal",
        "[1][0]": "sum",
        "[1][1].each": "concatenate 0",
        "[1][1].top": "max",
    }


def test_a_sum_over_the_batch_alone_is_known_beforehand():
    found = plan(
        lambda w, b: jnp.sum(losses(w, b) * b["mask"]) / jnp.maximum(jnp.sum(b["mask"]), 1.0)
    )
    assert found.combine["[1]"] == "sum"
    assert "early" in set(found.conversions.values())


def test_weight_decay_counts_once():
    found = plan(lambda w, b: losses(w, b).mean() + 0.01 * jnp.sum(w**2))
    assert found.combine["[1]"] == "sum"
    assert "once" in set(found.conversions.values())


def test_a_metric_of_the_loss_is_computed_at_the_end():
    def with_perplexity(w, b):
        loss = losses(w, b).mean()
        return loss, jnp.exp(loss)

    found = plan(with_perplexity, has_aux=True)
    assert found.combine["[1][1]"] == "equal"


def test_random_numbers_are_those_of_the_whole_batch():
    def loss(w, b):
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, b["x"].shape)
        return jnp.mean((jnp.where(kept, b["x"], 0.0) @ w) ** 2)

    assert Action.SLICE in plan(loss).actions.values()


def test_lookups_of_an_examples_own_row_are_local():
    def loss(w, b):
        logits = jax.nn.log_softmax(b["x"] @ w)
        return -logits[jnp.arange(logits.shape[0]), b["y"]].mean()

    found = plan(loss)
    assert found.combine["[1]"] == "sum"
    assert "local" in set(found.conversions.values())


def batch_norm(w, b):
    h = b["x"] @ w
    return jnp.mean(((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)) ** 4)


def log_of_mean(w, b):
    return jnp.log(losses(w, b).mean())


def contrastive(w, b):
    h = b["x"] @ w
    return jnp.mean(jax.nn.logsumexp(h @ h.T, axis=1) - jnp.sum(h * h, axis=1))


@pytest.mark.parametrize("loss_fn", [batch_norm, log_of_mean, contrastive])
def test_operators_that_do_not_decompose_are_refused_with_their_line(loss_fn):
    with pytest.raises(CaptureError) as error:
        plan(loss_fn)
    message = str(error.value)
    assert "test_micro_batches.py:" in message
    assert f"({loss_fn.__name__})" in message
    assert "; [0] " in message
    assert 'micro_batch_semantics="independent"' in message and "the numbers are other" in message


@pytest.mark.parametrize("loss_fn", [batch_norm, contrastive, lambda w, b: losses(w, b).mean()])
def test_whether_a_step_decomposes_is_asked_without_a_refusal(loss_fn, monkeypatch):
    graph = capture(sgd_on(loss_fn), W, BATCH)
    monkeypatch.setattr(_micro_batches, "_refusal", None)
    assert runs_in_groups(graph, 4, 1) == (loss_fn not in (batch_norm, contrastive))
    # The batch has 8 examples.
    assert not runs_in_groups(graph, 3, 1)


def test_a_step_that_decomposes_into_the_finest_parts_is_analysed_once(monkeypatch):
    analysed = record_analyses(monkeypatch)
    of_64 = jax.tree.map(lambda x: jax.ShapeDtypeStruct((64, *x.shape[1:]), x.dtype), BATCH)
    graph = capture(sgd_on(lambda w, b: losses(w, b).mean()), W, of_64)
    assert all(runs_in_groups(graph, count, 2) for count in (1, 2, 4, 8))
    assert analysed == [32]
    # A single example may be another program, and is asked for by itself.
    assert runs_in_groups(graph, 64, 1) and analysed == [32, 64]
    # Where the finest parts say no, others may still say yes.
    graph = capture(sgd_on(batch_norm), W, of_64)
    assert not runs_in_groups(graph, 4, 1) and analysed == [32, 64, 32, 4]


def test_independent_micro_batches_are_advised_only_where_they_are_possible():
    def loss(w, b):
        h = b["x"] @ w
        return jnp.mean((h - h.mean(0)) ** 4), h @ h.T

    with pytest.raises(CaptureError) as error:
        plan(loss, has_aux=True)
    assert "independent micro-batches are no way out: [1][1] is [8, 8]" in str(error.value)


def test_a_batch_that_is_no_multiple():
    with pytest.raises(
        InputError,
        match=r"num_micro_batches=3 needs a batch that is a multiple of 3.*batch\.mask holds 8",
    ):
        plan(lambda w, b: losses(w, b).mean(), 3)
    with pytest.raises(
        InputError, match="on 4 data-parallel groups needs a batch that is a multiple of 16"
    ):
        plan(lambda w, b: losses(w, b).mean(), 4, num_groups=4)


def test_a_step_without_a_batch():
    with pytest.raises(InputError, match="no batch"):
        plan_micro_batches(capture(lambda w: w - 0.1 * jax.grad(lambda w: (w**2).sum())(w), W), 2)


def test_code_that_looks_at_the_size():
    def loss(w, b):
        scale = 2.0 if b["x"].shape[0] > 4 else jnp.sum(w)
        return losses(w, b).mean() * scale

    with pytest.raises(CaptureError, match="another program on a micro-batch"):
        plan(loss)


@pytest.mark.parametrize(
    ("of_size", "said"),
    [
        (lambda h, n: jax.lax.integer_pow(h, n), "y=8 on the whole batch and y=2"),
        (lambda h, n: jnp.tile(h, (1, 8))[:, n : n + 3], r"start_indices=\(0, 8\) on the whole"),
        (lambda h, n: jnp.pad(h, ((0, 0), (n, 9 - n)))[:, 1:5], r"padding_config=\(.* \(8, 1, 0\)"),
        (lambda h, n: jax.lax.cumsum(h, axis=1, reverse=n > 4), "reverse=True on the whole batch"),
        (lambda h, n: jnp.flip(h, 1 if n > 4 else 0), r"dimensions=\(1\) on the whole batch"),
    ],
    ids=["power", "cut", "pad", "order", "flip"],
)
def test_other_parameters_on_a_micro_batch_are_refused(of_size, said):
    """Shapes are the same, but each micro-batch would compute something else."""

    def loss(w, b):
        h = of_size(b["x"] @ w, b["x"].shape[0])
        return jnp.mean(h * jnp.arange(h.shape[1]))

    with pytest.raises(CaptureError, match=said):
        plan(loss)


def test_code_that_writes_the_size_down():
    with pytest.raises(CaptureError, match="cannot be traced on a micro-batch"):
        plan(lambda w, b: losses(w, b).reshape(8, 1).mean())


def test_unknown_semantics():
    with pytest.raises(InputError, match="exact"):
        plan(lambda w, b: losses(w, b).mean(), semantics="loose")


def test_the_update_runs_at_the_end():
    found = plan(lambda w, b: losses(w, b).mean())
    late = {found.whole.ops[k].name for k, action in found.actions.items() if action is Action.LATE}
    assert late == {"mul", "sub"}
    assert TimeKind.SUM in {s.kind for s in found.specs}


def test_equal_layers_are_walked_through_by_one_rule(monkeypatch):
    """Layers that JAX traced once share their equations."""
    asked = []
    monkeypatch.setattr(
        _findings,
        "dim_rule",
        lambda op, *args, **more: asked.append(op) or dim_rule(op, *args, **more),
    )
    layer = jax.jit(lambda w, h: jnp.tanh(h @ w))

    def step(ws, x):
        def loss(ws):
            h = x
            for w in ws:
                h = layer(w, h)
            return jnp.mean(h**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))

    counts = []
    for depth in (4, 12):
        asked.clear()
        plan_micro_batches(capture(step, [jnp.eye(8)] * depth, jnp.ones((16, 8))), 4)
        counts.append(len(asked))
    assert counts[0] == counts[1]


def test_a_branch_that_only_the_update_needs_is_taken_at_the_end():
    """What looks at the loss to set a learning rate, as `optax.contrib.reduce_on_plateau` does."""

    def train_step(state, batch):
        w, best, scale = state
        loss, grads = jax.value_and_grad(lambda w: losses(w, batch).mean())(w)
        best, scale = jax.lax.cond(
            scale > 0.1,
            lambda: (jnp.minimum(best, loss), jnp.where(loss < best, scale, 0.5 * scale)),
            lambda: (best, scale),
        )
        return (w - scale * grads, best, scale), loss

    number = jax.ShapeDtypeStruct((), jnp.float32)
    found = plan_micro_batches(capture(train_step, (W, number, number), BATCH), 4)
    assert len(found.late_calls) == 1
    assert found.combine["[1]"] == "sum"


def test_a_reshape_of_nothing_is_linear():
    """As `associative_scan` does with the odd elements that a short sequence does not have."""

    def combined(one, other):
        return one[0] * other[0], one[1] * other[0] + other[1]

    @jax.checkpoint
    def scanned(w, x):
        return jax.vmap(
            lambda row: jax.lax.associative_scan(combined, (w, jnp.outer(row[:2], row[:3])))[1]
        )(x)

    assert (
        plan(lambda w, b: jnp.mean(scanned(jnp.tanh(w[:2]), b["x"]) ** 2)).combine["[1]"] == "sum"
    )


def test_examples_without_numbers_may_be_flattened():
    def loss(w, b):
        h = jnp.tanh(b["x"] @ w)
        nothing = h[:, :0, None].reshape(-1, 1) * w[0, 0]
        return jnp.mean(h**2) + jnp.sum(nothing.reshape(h.shape[0], 0, 1))

    assert plan(loss).combine["[1]"] == "sum"


def test_a_loop_over_two_examples_is_refused_for_each():
    def loss(w, b):
        return jnp.mean(jax.lax.map(lambda row: jnp.sum(jnp.tanh(row @ w)), b["x"]))

    def step(w, b):
        return w - jax.grad(loss)(w, b)

    two = {"x": jax.ShapeDtypeStruct((2, W.shape[0]), jnp.float32)}
    with pytest.raises(CaptureError, match="loops over the batch"):
        plan_micro_batches(capture(step, W, two), 2)


def test_checks_are_made_part_by_part():
    """Whether any example is wrong is known once every part has looked, and which message is shown
    does not matter.
    """

    def loss(w, b):
        checked = eqx.error_if(b["x"], jnp.any(b["x"] > 9), "too large")
        each = jax.vmap(lambda x: eqx.error_if(x, x.sum() > 99, "sums to too much"))(checked)
        return losses(w, {**b, "x": each}).mean()

    found = plan(loss)
    assert found.combine == {"[0]": "equal", "[1]": "sum"}
    assert len(list(found.part_eqns)) == 2 and not found.late_calls


@pytest.mark.parametrize(
    ("made", "combine"),
    [
        (lambda r: jnp.logical_not(jnp.any(r > 0)), "and"),
        (lambda r: jnp.any(r > 0).astype(jnp.int32), "max"),
        (lambda r: jnp.maximum(jnp.max(r), 0.0).reshape(1), "max"),
        (lambda r: jnp.any(r > 0) | jnp.any(r < -9), "or"),
        (lambda r: 2 * jnp.max(r), "equal"),
    ],
)
def test_monotonic_functions_of_maxima_are_maxima(made, combine):
    """The other results are computed from the maximum itself, after the last part."""
    found = plan(lambda w, b: (losses(w, b).mean(), made(b["x"] @ w)), has_aux=True)
    assert found.combine["[1][1]"] == combine


def test_sorted_rows_are_refused_with_the_operator_that_does_without():
    def loss(w, batch):
        order = jnp.argsort(batch["y"])
        sizes = jnp.bincount(batch["y"], length=4)
        made = jax.lax.ragged_dot(batch["x"][order], jnp.stack([w] * 4), sizes)
        return jnp.mean(made**2)

    with pytest.raises(CaptureError, match=r"aliquot\.experts in place of the sort"):
        plan(loss)


def test_an_operator_without_a_line_is_found_by_its_neighbour():
    """Of operators inside of `jnp.cumsum` JAX knows no line."""

    def loss_fn(w, batch):
        summed = jnp.cumsum(batch["x"] @ w, axis=0)
        return jnp.mean(summed**2)

    with pytest.raises(CaptureError, match=r"`cumsum` near test_micro_batches\.py:\d+ "):
        plan(loss_fn)


def test_weights_of_classes_that_come_as_an_argument():
    """A mean that they weigh is exact, as with weights that the step holds itself."""

    def train_step(w, batch, of_classes):
        def loss_fn(w):
            weights = of_classes[batch["y"]]
            return jnp.sum(losses(w, batch) * weights) / jnp.sum(weights)

        value, grads = jax.value_and_grad(loss_fn)(w)
        return w - 0.1 * grads, value

    graph = capture(train_step, W, BATCH, jax.ShapeDtypeStruct((3,), jnp.float32))
    found = plan_micro_batches(graph, 4)
    assert TimeKind.SUM in {s.kind for s in found.specs}
