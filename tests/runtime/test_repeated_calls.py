"""Steps called again and again: what is donated, what is returned as it was given, and several
threads.
"""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from flax.training.train_state import TrainState

import aliquot as aq
from aliquot.core import InputError

METHODS = {
    "one_program": (aq.ShardParallel(), 1),
    "micro_batches": (aq.Zero2Parallel(), 2),
    "pipeline": (aq.PipeshardParallel(num_stages=2, num_micro_batches=2), None),
}


def train_step(state, batch):
    def loss(params):
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    params = jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], grads)
    metrics = {"loss": value, "step": state["step"], "first": state["params"][0]}
    return {"params": params, "step": state["step"] + 1}, metrics


def start():
    keys = jax.random.split(jax.random.key(0), 4)
    return {"params": [jax.random.normal(k, (16, 16)) / 4 for k in keys], "step": jnp.int32(0)}


BATCH = np.ones((16, 16), np.float32)


def parallel(method):
    chosen, count = METHODS[method]
    plan = aq.plan(
        train_step,
        start(),
        BATCH,
        cluster=aq.Cluster.preset("8xcpu"),
        method=chosen,
        num_micro_batches=count,
    )
    return aq.parallelize(train_step, plan)


def assert_close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


@pytest.mark.parametrize("method", METHODS)
def test_state_that_is_also_returned_as_it_was_survives(method):
    step, plain = parallel(method), jax.jit(train_step)
    state = wanted = start()
    for _ in range(3):
        state, metrics = step(state, BATCH)
        wanted, expected = plain(wanted, BATCH)
        assert_close(metrics, expected)
    assert_close(state, wanted)


@pytest.mark.parametrize("method", METHODS)
def test_state_that_was_donated_before_is_refused_by_name(method):
    step = parallel(method)
    second, _ = step(start(), BATCH)
    third, _ = step(second, BATCH)
    with pytest.raises(
        InputError, match=r"no longer exist: state\.params\[.\].*state that the last call returned"
    ):
        step(second, BATCH)
    step(third, BATCH)


@pytest.mark.parametrize("method", METHODS)
def test_shapes_in_place_of_arrays_are_refused(method):
    step = parallel(method)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), BATCH)
    with pytest.raises(InputError, match="batch.* is a jax.ShapeDtypeStruct.*holds no numbers"):
        step(start(), shapes)
    with pytest.raises(InputError, match="holds no numbers. Pass arrays"):
        step.check(start(), shapes)


@pytest.mark.parametrize("method", METHODS)
def test_threads_share_a_fresh_step(method):
    step = parallel(method)
    wanted, _ = jax.jit(train_step)(start(), BATCH)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: step(start(), BATCH)[0], range(8)))
    for state in found:
        assert_close(state, wanted)


class NamedState(TrainState):
    """A state with a field that is no array."""

    name: str = struct.field(pytree_node=False, default="run")


def flax_step(state, batch, turns):
    for _ in range(turns):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(state.params)
        state = state.apply_gradients(grads=grads)
    return state, {"loss": loss, "turns": turns}


@pytest.mark.parametrize(("count", "turns"), [(1, 2), (2, 1)])
def test_a_fresh_train_state_counts(count, turns):
    """Its step is the Python number 0, and an array from the first call on."""
    create = NamedState.create(apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=optax.sgd(0.1))
    method = aq.DataParallel()
    plan = aq.plan(
        flax_step,
        create,
        BATCH[:, :8],
        turns,
        cluster=aq.Cluster.preset("8xcpu"),
        method=method,
        num_micro_batches=count,
    )
    step = aq.parallelize(flax_step, plan)
    state = wanted = create
    for call in range(3):
        state, metrics = step(state, BATCH[:, :8], turns)
        wanted, expected = flax_step(wanted, BATCH[:, :8], turns)
        assert isinstance(state.step, jax.Array) and int(state.step) == turns * (call + 1)
        assert isinstance(metrics["turns"], jax.Array)
        assert_close((state.params, metrics), (wanted.params, expected))


@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_copied_as_functions_are_and_refuses_to_be_pickled(method):
    step = parallel(method)
    assert copy.deepcopy({"step": step})["step"] is step and copy.copy(step.plan) == step.plan
    with pytest.raises(InputError, match=r"cannot be pickled. Save its plan"):
        pickle.dumps(step)
    assert pickle.loads(pickle.dumps(step.plan)) == step.plan


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        pytest.param(jax.make_jaxpr, marks=pytest.mark.slow),
        pytest.param(lambda f: lambda *args: jax.eval_shape(f, *args), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_a_step_inside_a_traced_function_is_refused(method, transform):
    step = parallel(method)
    with pytest.raises(InputError, match="inside a function that JAX traces"):
        transform(step)(start(), BATCH)
    assert_close(step(start(), BATCH), jax.jit(train_step)(start(), BATCH))


@pytest.mark.parametrize("method", METHODS)
def test_numbers_that_are_none_are_found_where_jax_is_told_to_look(method):
    step = parallel(method)
    broken = jax.tree.map(lambda x: x * np.float32("nan") if x.ndim else x, start())
    with jax.debug_nans(True):
        assert_close(step(start(), BATCH), jax.jit(train_step)(start(), BATCH))
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(step(broken, BATCH))


def placings(step, monkeypatch):
    """The positions of the arrays that calls of a step look at to place them, as they are made."""
    seen = []
    plain = step.runner._placed

    def placed(position, leaf, *, keep):
        seen.append(position)
        return plain(position, leaf, keep=keep)

    monkeypatch.setattr(step.runner, "_placed", placed)
    return seen


@pytest.mark.parametrize("method", ["one_program", "micro_batches"])
def test_what_the_last_call_returned_is_passed_without_a_look(method, monkeypatch):
    """Placing and checking take longer than the call itself for hundreds of arrays."""
    step = parallel(method)
    state, _ = step(start(), BATCH)
    checked = []
    alive = step._arguments.check_alive
    monkeypatch.setattr(
        step._arguments,
        "check_alive",
        lambda leaves, positions: (checked.append(list(positions)), alive(leaves, positions)),
    )
    seen = placings(step, monkeypatch)
    for _ in range(3):
        state, _ = step(state, BATCH)
    batch = len(jax.tree.leaves(state))
    assert checked == [[batch]] * 3
    assert seen == [batch] * 3
    # A batch that is where it belongs is looked at once, too.
    _, placed = step.place(state, BATCH)
    state, _ = step(state, placed)
    seen.clear()
    step(state, placed)
    assert seen == []


@pytest.mark.parametrize("method", ["one_program", "micro_batches"])
def test_other_arrays_than_the_last_call_returned_are_looked_at(method, monkeypatch):
    step = parallel(method)
    state, _ = step(start(), BATCH)
    mine = jax.tree.map(lambda x: np.asarray(jnp.copy(x)), state)
    seen = placings(step, monkeypatch)

    def same_as_from_the_host(given):
        seen.clear()
        result, metrics = step(given, BATCH)
        new = [*seen]
        want, loss = train_step(jax.tree.map(jnp.asarray, mine), jnp.asarray(BATCH))
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
        assert float(metrics["loss"]) == pytest.approx(float(loss["loss"]), rel=1e-6)
        return new

    # One array of the host, one that lies on one device, and one that is returned in another place.
    num_arrays = len(jax.tree.leaves(state))
    other = {**state, "params": [mine["params"][0], *state["params"][1:]]}
    assert same_as_from_the_host(other) == [0, num_arrays]
    # The array that was replaced by one of the host is the only one that still exists.
    assert not state["params"][0].is_deleted()
    with pytest.raises(InputError, match=r"no longer exist: .*params\[1\].* and 1 more"):
        step(state, BATCH)
    assert same_as_from_the_host(mine) == [*range(num_arrays), num_arrays]
    assert same_as_from_the_host(jax.device_put(mine, jax.devices()[3]))[0] == 0


@pytest.mark.parametrize("method", ["one_program", "micro_batches"])
def test_arrays_that_were_returned_are_checked_when_they_are_swapped_or_gone(method):
    step = parallel(method)
    state, _ = step(start(), BATCH)
    w = state["params"][1]
    wrong = {**state, "params": [state["params"][0], state["step"], *state["params"][2:]]}
    with pytest.raises(aq.core.PlanMismatchError, match=r"planned \(16, 16\)"):
        step(wrong, BATCH)
    with pytest.raises(aq.core.PlanMismatchError, match="planned float32"):
        step({**state, "params": [w.astype(jnp.int32), *state["params"][1:]]}, BATCH)
    # Both arrays are of the last call, and one of them is passed twice: neither is donated.
    twice = {**state, "params": [w, w, *state["params"][2:]]}
    step(twice, BATCH)
    assert not w.is_deleted()
    step.dry_run({**state, "params": [w, w, w, w], "step": np.int32(1)}, BATCH)
    assert not w.is_deleted()
    state, _ = step(start(), BATCH)
    step.dry_run(state, BATCH)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    state["params"][2].delete()
    with pytest.raises(InputError, match=r"no longer exist: .*params\[2\]"):
        step(state, BATCH)


def test_a_state_that_is_dropped_is_freed():
    step = parallel("one_program")
    state, _ = step(start(), BATCH)
    held = weakref.ref(state["params"][0])
    del state, _
    gc.collect()
    assert held() is None
