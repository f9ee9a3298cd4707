"""State that holds rows of examples is cut with the batch, and no other state is."""

import jax
import jax.numpy as jnp
import pytest

from aliquot.graph import capture
from aliquot.sharding import TimeKind, plan_micro_batches

F32 = jnp.float32


def shape(*dims, dtype=F32):
    return jax.ShapeDtypeStruct(dims, dtype)


def cuts(fn, *args, semantics="exact"):
    """The dim along which each input besides the batch is cut, by path."""
    found = plan_micro_batches(capture(fn, *args), 4, semantics=semantics)
    return {
        item.path: found.specs[item.value].dim
        for item in found.whole.inputs
        if found.specs[item.value].kind is TimeKind.CONCATENATE and item.role != "batch"
    }


def decode(params, cache, batch):
    """Each layer writes a row for each example into its cache, and attends to all of it."""
    x, rows = batch["x"], []
    for w, row in zip(params, cache, strict=True):
        here = jnp.arange(row.shape[1]) == batch["position"][:, None]
        row = jnp.where(here[..., None], (x @ w)[:, None], row)
        x = x + jnp.einsum("bt,bth->bh", jnp.einsum("bh,bth->bt", x, row), row)
        rows.append(row)
    return rows, x


def decode_in_a_loop(params, cache, batch):
    def layer(x, each):
        rows, x = decode([each[0]], [each[1]], {**batch, "x": x})
        return x, rows[0]

    x, rows = jax.lax.scan(layer, batch["x"], (params, cache["rows"]))
    return {"rows": rows}, x


BATCH = {"x": shape(8, 6), "position": shape(8, dtype=jnp.int32)}


def test_a_cache_is_cut():
    assert cuts(decode, [shape(6, 6)] * 2, [shape(8, 5, 6)] * 2, BATCH) == {
        "cache[0]": 0,
        "cache[1]": 0,
    }


def test_a_stack_of_caches_is_cut_along_its_batch_although_there_are_as_many_layers():
    assert cuts(decode_in_a_loop, shape(8, 6, 6), {"rows": shape(8, 8, 5, 6)}, BATCH) == {
        "cache.rows": 1
    }


def test_what_is_written_and_not_read_is_cut():
    """The step can be traced either way: a slice may be smaller than what it is written into."""

    def log(params, state, batch):
        y = batch["x"] @ params["w"]
        written = jax.lax.dynamic_update_slice(state["log"], y[:, None], (0, state["step"], 0))
        return {"log": written, "step": state["step"] + 1}, y

    state = {"log": shape(8, 5, 6), "step": shape(dtype=jnp.int32)}
    assert cuts(log, {"w": shape(6, 6)}, state, BATCH) == {"state.log": 0}


def sgd(state, batch, loss):
    (value, kept), grads = jax.value_and_grad(loss, has_aux=True)(state["w"], state, batch)
    return {"w": state["w"] - 0.1 * grads, **kept}, value


def recurrent(state, batch):
    """The state of each example goes on from step to step, as in truncated backpropagation."""

    def loss(w, state, batch):
        carry = jnp.tanh(state["carry"] @ w + batch["x"])
        return jnp.mean(carry**2), {"carry": carry}

    return sgd(state, batch, loss)


@pytest.mark.parametrize("semantics", ["exact", "independent"])
def test_the_state_of_a_recurrent_network_is_cut(semantics):
    state = {"w": shape(6, 6), "carry": shape(8, 6)}
    assert cuts(recurrent, state, BATCH, semantics=semantics) == {"state.carry": 0}


def test_statistics_of_as_many_features_as_examples_are_whole():
    def normalised(state, batch):
        def loss(w, state, batch):
            y = batch["x"] @ w
            new = 0.9 * state["mean"] + 0.1 * y.mean(0)
            return jnp.mean((y - state["mean"]) ** 2), {"mean": new}

        return sgd(state, batch, loss)

    assert cuts(normalised, {"w": shape(6, 8), "mean": shape(8)}, BATCH) == {}


def test_rows_that_a_step_only_reads_are_cut_where_it_needs_them():
    """A decoder reads what an encoder made of each example; a bias of eight stays whole."""

    def attend(params, state, batch):
        y = batch["x"] @ params["w"] + params["bias"]
        out = jnp.einsum("bh,bth->bh", y, state["encoded"])
        return {"encoded": state["encoded"], "sum": state["sum"] + out}, out

    state = {"encoded": shape(8, 5, 8), "sum": shape(8, 8)}
    params = {"w": shape(6, 8), "bias": shape(8)}
    assert cuts(attend, params, state, BATCH) == {"state.encoded": 0, "state.sum": 0}


def test_state_of_as_many_elements_as_examples_may_go_with_them():
    """A bias that only decays has the same numbers cut or whole."""

    def step(state, batch):
        h = jnp.tanh(batch["x"] @ state["w"] + state["hidden"])
        return {"w": state["w"], "hidden": h, "bias": state["bias"] * 0.9}, jnp.mean(h)

    state = {"w": shape(6, 5), "hidden": shape(8, 5), "bias": shape(8)}
    assert cuts(step, state, BATCH)["state.hidden"] == 0
