"""Arguments to flat arrays and back: what is static, what is traced, what two calls must share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph.step_base import batch, mlp_params, mse, sgd, shapes

from aliquot.graph import Role, capture, evaluate


def train_step(params, batch, rate, flag=True):
    return sgd(params, jax.grad(mse)(params, batch), rate if flag else 0.0)


def test_shapes_are_enough_and_nothing_is_allocated():
    before = len(jax.live_arrays())
    args = shapes((mlp_params(), batch()))
    structs = capture(train_step, *args, 0.1)
    assert len(structs.inputs) == 7
    assert len(jax.live_arrays()) <= before


def test_a_huge_step_is_captured_without_memory():
    struct = jax.ShapeDtypeStruct
    params = {"w": struct((1 << 20, 1 << 20), jnp.float32)}
    graph = capture(
        lambda p, x: sgd(p, jax.grad(lambda p: (x @ p["w"]).sum())(p)),
        params,
        struct((8, 1 << 20), jnp.float32),
    )
    assert graph.values[graph.inputs[0].value].num_bytes == 1 << 42


def test_paths():
    graph = capture(train_step, mlp_params(), batch(), 0.1)
    assert [i.path for i in graph.inputs] == [
        "params.in.b",
        "params.in.w",
        "params.out.b",
        "params.out.w",
        "batch.x",
        "batch.y",
        "rate",
    ]


def test_odd_keys_keep_their_text():
    graph = capture(
        lambda p: p["a/b"]["w.x"] + p["value"], {"a/b": {"w.x": jnp.ones(3)}, "value": jnp.ones(3)}
    )
    assert [i.path for i in graph.inputs] == ["p['a/b']['w.x']", "p.value"]


@pytest.mark.parametrize("declare", [{"static_argnums": (2,)}, {"static_argnames": "rate"}])
def test_numbers_that_a_jitted_step_declares_static_are_static(declare):
    graph = capture(jax.jit(train_step, **declare), mlp_params(), batch(), 0.1)
    call = graph.calling.call
    assert call.static_paths == ("rate",)
    same = graph.calling.flatten((mlp_params(), batch(), 0.1), {})
    other = graph.calling.flatten((mlp_params(), batch(), 0.2), {})
    assert same.skeleton() == call.skeleton() and call.differences(same) == ()
    assert other.skeleton() != call.skeleton()
    assert call.differences(other) == ("rate, which is no array, was 0.1 and is 0.2",)


@pytest.mark.parametrize("later", [0.2, np.float32(0.2), jnp.float32(0.2)])
def test_numbers_that_are_arguments_are_traced(later):
    graph = capture(train_step, mlp_params(), batch(), 0.1)
    assert graph.calling.call.static_paths == ()
    flat = graph.calling.flatten((mlp_params(), batch(), later), {})
    assert flat.skeleton() == graph.calling.call.skeleton()
    found = graph.calling.finish(evaluate(graph, flat.leaves), (mlp_params(), batch(), later), {})
    wanted = train_step(mlp_params(), batch(), 0.2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, wanted)


def test_missing_and_additional_leaves_are_differences():
    graph = capture(train_step, mlp_params(), batch(), 0.1)
    changed = mlp_params()
    changed["new"] = changed.pop("out")
    found = graph.calling.call.differences(graph.calling.flatten((changed, batch(), 0.1), {}))
    assert found == tuple(
        f"params.{p} is {s}"
        for s, n in (("missing", "out"), ("new", "new"))
        for p in (f"{n}.b", f"{n}.w")
    )


def test_keywords_come_in_any_order():
    def step(params, *, batch, rate):
        return train_step(params, batch, rate)

    graph = capture(step, mlp_params(), batch=batch(), rate=0.1)
    other = graph.calling.flatten((mlp_params(),), {"rate": 0.1, "batch": batch()})
    assert other.skeleton() == graph.calling.call.skeleton()


def test_by_position_or_by_name():
    graph = capture(train_step, mlp_params(), batch(), 0.1)
    other = graph.calling.flatten((mlp_params(),), {"batch": batch(), "rate": 0.1})
    assert other.skeleton() == graph.calling.call.skeleton()


def test_numbers_inside_an_argument_are_traced():
    """A fresh `TrainState` counts from a Python 0; freezing it would freeze the count."""

    def step(state, batch):
        grads = jax.grad(mse)(state["params"], batch)
        return {
            "params": sgd(state["params"], grads, 0.1 / (1 + state["step"])),
            "step": state["step"] + 1,
        }

    state = {"params": mlp_params(), "step": 0}
    graph = capture(step, state, batch())
    assert next(i for i in graph.inputs if i.path == "state.step").output is not None
    for count in range(3):
        flat = graph.calling.flatten((state, batch()), {})
        state = graph.calling.finish(evaluate(graph, flat.leaves), (state, batch()), {})
        assert int(state["step"]) == count + 1
        assert flat.skeleton() == graph.calling.call.skeleton()


def test_numbers_that_the_step_needs_are_static():
    def step(params, batch, config):
        for _ in range(config["turns"]):
            params = sgd(params, jax.grad(mse)(params, batch))
        return params

    graph = capture(step, mlp_params(), batch(), {"turns": 2})
    assert graph.calling.call.static_paths == ("config.turns",)
    assert (
        graph.calling.flatten((mlp_params(), batch(), {"turns": 2}), {}).skeleton()
        == graph.calling.call.skeleton()
    )


def test_only_the_numbers_that_the_step_needs_are_static():
    """Beside a number of turns, the count of a fresh state must still become an array."""

    def step(state, batch, config):
        params = state["params"]
        for _ in range(config["turns"]):
            params = sgd(params, jax.grad(mse)(params, batch), config["rate"])
        return {"params": params, "step": state["step"] + 1}

    config = {"turns": 2, "rate": 0.1}
    graph = capture(step, {"params": mlp_params(), "step": 0}, batch(), config)
    assert graph.calling.call.static_paths == ("config.turns",)
    later = graph.calling.flatten(
        ({"params": mlp_params(), "step": jnp.int32(1)}, batch(), config), {}
    )
    assert later.skeleton() == graph.calling.call.skeleton()


def test_numbers_in_the_result_come_back_as_arrays():
    def step(params, batch):
        return {
            "params": sgd(params, jax.grad(mse)(params, batch)),
            "rate": 0.1,
            "done": False,
            "none": None,
        }

    graph = capture(step, mlp_params(), batch())
    flat = graph.calling.flatten((mlp_params(), batch()), {})
    result = graph.calling.finish(evaluate(graph, flat.leaves), (mlp_params(), batch()), {})
    plain = jax.jit(step)(mlp_params(), batch())
    for name in ("rate", "done"):
        assert isinstance(result[name], jax.Array) and result[name] == plain[name]
        assert (result[name].dtype, result[name].weak_type) == (
            plain[name].dtype,
            plain[name].weak_type,
        )
    assert result["none"] is None


def test_a_setting_that_the_step_returns_stays_a_number():
    def step(state, batch):
        params = state["params"]
        for _ in range(state["turns"]):
            params = sgd(params, jax.grad(mse)(params, batch))
        return {"params": params, "turns": state["turns"]}

    state = {"params": mlp_params(), "turns": 2}
    graph = capture(step, state, batch())
    flat = graph.calling.flatten((state, batch()), {})
    result = graph.calling.finish(evaluate(graph, flat.leaves), (state, batch()), {})
    assert graph.calling.flatten((result, batch()), {}).skeleton() == graph.calling.call.skeleton()


def test_a_second_trace_leaves_the_first_alone():
    """A step may return its batch size; a trace on a smaller batch must not change what the first
    graph returns.
    """
    from aliquot.graph import build_graph

    graph = capture(lambda x: (x.sum(), x.shape[0]), jnp.ones((8, 2)))
    small = build_graph(graph.calling, [jax.ShapeDtypeStruct((2, 2), jnp.float32)])
    assert graph.calling.finish([0.0], (None,), {}) == (0.0, 8)
    assert small.calling.finish([0.0], (None,), {}) == (0.0, 2)


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.int8])
def test_numpy_arrays(dtype):
    graph = capture(lambda p, x: (p * x).sum(), np.ones(3, np.float32), np.ones(3, dtype))
    assert len(graph.inputs) == 2


def test_weak_types_survive():
    """A loss scale made from a Python number must not widen what it multiplies."""
    graph = capture(lambda s, x: s * x, jnp.asarray(2.0), jnp.ones(3, jnp.bfloat16))
    assert graph.values[graph.outputs[0].value].dtype == "bfloat16"


def test_arrays_of_one_leading_size_are_the_batch():
    def step(params, batch, weights, key):
        def loss_fn(p):
            noise = jax.random.normal(key, batch["x"].shape)
            return (
                jnp.mean(weights @ (mlp_out(p, batch["x"] + noise) - batch["y"]).T ** 2)
                * batch["scale"]
            )

        return sgd(params, jax.grad(loss_fn)(params))

    def mlp_out(p, x):
        return x @ p["in"]["w"] @ p["out"]["w"]

    data = batch() | {"scale": jnp.float32(1.0)}
    graph = capture(step, mlp_params(), data, jnp.ones(3), jax.random.PRNGKey(0))
    roles = {i.path: i.role for i in graph.inputs}
    assert roles["batch.x"] is Role.BATCH and roles["batch.y"] is Role.BATCH
    assert roles["batch.scale"] is Role.OTHER and roles["key"] is Role.OTHER
    assert roles["weights"] is not Role.BATCH
