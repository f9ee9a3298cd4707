"""A step that scans over its layers runs in stages that each scan their own rows of the stacked
parameters.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from runtime.equality import largest
from runtime.pipelines import build, check_steps

from aliquot import zoo
from aliquot.graph import (
    Call,
    Role,
    capture,
    cut_layers,
    range_layers,
    split_scans,
    stage_layers,
)
from aliquot.runtime.pipeline import given_slots
from aliquot.runtime.pipeline._instructions import Run
from aliquot.runtime.transport._pieces import PiecedArray
from aliquot.sharding import Part

BAR = 1e-9
ROWS, WIDTH, LAYERS = 8, 4, 5


def in_stages(fn, *args, bounds, sizes, micro_batches=2, schedule="1f1b"):
    """A step as a pipeline with one stage for each range of layers."""
    graph = split_scans(capture(fn, *args), bounds).graph
    layers = cut_layers(graph)
    begins = [
        next(k for k, n in enumerate(layers.names) if n.endswith(f"[{a}:{b}]"))
        for a, b in ranges(bounds)
    ]
    staging = stage_layers(graph, layers, [0, *begins[1:]])
    return build(graph, staging, sizes=sizes, micro_batches=micro_batches, schedule=schedule)


def ranges(bounds):
    return list(zip(bounds, bounds[1:]))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of six layers in ranges; `sizes` are devices of each submesh."""

    model: str
    bounds: tuple[int, ...]
    sizes: tuple[int, ...]
    schedule: str

    def __str__(self):
        return f"{self.model}-{self.schedule}-{len(self.bounds) - 1}"


CASES = [
    Case(model="llama-7b", bounds=(0, 1, 6), sizes=(2, 1), schedule="zero-bubble"),
    Case(model="gpt-125m", bounds=(0, 4, 6), sizes=(2, 2), schedule="1f1b"),
]


@functools.cache
def work(model):
    sizes = {
        "num_layers": 6,
        "hidden_size": 8,
        "num_heads": 2,
        "ffn_size": 16,
        "vocab_size": 24,
        "seq_len": 4,
    }
    return zoo.build(
        model, 16, overrides=sizes, dtype="float64", learning_rate=1e-3, recompute="none", scan=True
    )


@functools.cache
def batches(model):
    random = np.random.default_rng(0)
    return [
        jax.tree.map(lambda x: random.integers(0, 24, x.shape).astype(x.dtype), work(model).batch)
        for _ in "123"
    ]


@functools.cache
def plain(model):
    start = state = jax.device_get(jax.jit(work(model).init)(jax.random.key(0)))
    step = jax.jit(work(model).train_step)
    losses = []
    for batch in batches(model):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return start, jax.device_get(state), losses


@pytest.mark.parametrize(
    "case", [pytest.param(CASES[0], marks=pytest.mark.slow), CASES[1]], ids=str
)
def test_same_numbers(case, x64):
    """Three AdamW steps; every stage keeps and scans its own layers alone."""
    made = work(case.model)
    step = in_stages(
        made.train_step,
        made.state,
        made.batch,
        bounds=case.bounds,
        sizes=case.sizes,
        micro_batches=4,
        schedule=case.schedule,
    )
    start, wanted, losses = plain(case.model)
    state = start
    for batch, loss in zip(batches(case.model), losses, strict=True):
        state, metrics = step(state, batch)
        assert abs(float(metrics["loss"]) - loss) < BAR * abs(loss)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state["params"]):
        assert isinstance(leaf, PiecedArray) == ("layers" in str(path))
    assert largest("float64", start, jax.device_get(state), wanted)[0] < BAR
    assert_apart(step, case.bounds, case.schedule)


def assert_apart(step, bounds, schedule):
    """No stage is given other layers' parameters or moments, nor gets them sent; loops stay
    loops, once for each pass or half of one.
    """
    pipeline = step.runner.pipeline
    homes = {}
    for item in pipeline.graph.inputs:
        if item.role in (Role.PARAMETER, Role.OPTIMIZER_STATE) and item.path.endswith("]"):
            homes.setdefault(item.path[item.path.rindex("[") :], set()).update(
                given_slots(pipeline, item.value)
            )
    assert homes == {f"[{a}:{b}]": {k} for k, (a, b) in enumerate(ranges(bounds))}
    for stage in step.runner.compiled().stages:
        loops = [
            c
            for c in stage.function.program.graph.body.items
            if isinstance(c, Call) and c.kind == "scan"
        ]
        a, b = ranges(bounds)[stage.function.program.stage]
        assert {c.eqn.params["length"] for c in loops} <= {b - a}
        assert not loops or b - a == 1 or " while(" in stage.compiled.as_text()
    used = {step.function for step in pipeline.instructions.steps if isinstance(step, Run)}
    parts = [pipeline.functions[k].program for k in used]
    with_loops = [p for p in parts if any(isinstance(c, Call) for c in p.graph.body.items)]
    stages = range(len(bounds) - 1)
    loops_of = [(k, Part.FORWARD) for k in stages]
    if schedule == "zero-bubble":
        # Backward loops come in two halves. No stage waits for gradients from the first one.
        loops_of += [(k, Part.BACKWARD_INPUT) for k in stages[1:]]
        loops_of += [(k, Part.BACKWARD_WEIGHT) for k in stages]
    else:
        loops_of += [(k, Part.BACKWARD) for k in stages]
    assert sorted((p.stage, p.part) for p in with_loops) == sorted(loops_of)


def train_step(state, batch):
    def loss_fn(params):
        x, _ = jax.lax.scan(
            lambda x, w: (jnp.tanh(x @ w), None), batch["x"] @ params["first"], params["w"]
        )
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": new, "key": state["key"], "count": state["count"] + 1}, {
        "loss": loss,
        "grads": grads,
    }


def init(key):
    one, two = jax.random.split(key)
    w = jax.vmap(lambda k: jax.random.normal(k, (WIDTH, WIDTH)))(jax.random.split(one, LAYERS))
    params = {"w": w, "first": jax.random.normal(two, (WIDTH, WIDTH))}
    return {"params": params, "key": key, "count": jnp.zeros((), jnp.int32)}


def data():
    random = np.random.default_rng(0)
    return {name: random.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in "xy"}


@functools.cache
def small(bounds=(0, 2, LAYERS)):
    return in_stages(
        train_step, jax.eval_shape(init, jax.random.key(0)), data(), bounds=bounds, sizes=(1, 1)
    )


def test_one_leaf():
    """State, gradients and whatever else is stacked comes as one leaf, readable as a whole."""
    step = small()
    start = init(jax.random.key(0))
    state, metrics = step(start, data())
    assert not start["params"]["w"].is_deleted()
    wanted, plain_metrics = train_step(init(jax.random.key(0)), data())
    for found, want in (
        (state["params"], wanted["params"]),
        (metrics["grads"], plain_metrics["grads"]),
    ):
        assert jax.tree.structure(found) == jax.tree.structure(want)
        np.testing.assert_allclose(found["w"], want["w"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["first"], want["first"], rtol=1e-5, atol=1e-6)
    w = state["params"]["w"]
    assert (w.shape, w.dtype, w.ndim, w.size, w.nbytes) == ((5, 4, 4), np.float32, 3, 80, 320)
    assert [p.devices() for p in w.pieces] == [{jax.devices()[0]}, {jax.devices()[1]}]
    first, second, *_ = jax.devices()
    assert repr(w) == f"PiecedArray(float32[5, 4, 4], rows 0:2 on {first}, rows 2:5 on {second})"
    assert jax.block_until_ready(w) is w
    assert isinstance(jax.device_get(w), np.ndarray)
    np.testing.assert_array_equal(jnp.asarray(w), np.asarray(w))
    assert np.asarray(w, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(w, copy=False)


def test_two_passes():
    """A network that two batches pass through keeps each stage's layers on that stage alone."""

    def siamese(params, batch):
        def net(params, x):
            def layer(x, w):
                return jnp.tanh(x @ w), None

            return jax.lax.scan(layer, x @ params["first"], params["w"])[0]

        def loss_fn(params):
            far = net(params, batch["x"]) - net(params, batch["y"])
            return jnp.mean(jnp.sum(far**2, axis=-1))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = init(jax.random.key(0))["params"]
    wanted, wanted_loss = jax.jit(siamese)(params, data())
    graph = split_scans(capture(siamese, params, data()), (0, 2, LAYERS)).graph
    staging = stage_layers(graph, range_layers(graph), [0, 1])
    step = build(graph, staging, sizes=(1, 1), micro_batches=2, schedule="1f1b")
    found, loss = step(params, data())
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    np.testing.assert_allclose(found["w"], wanted["w"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["first"], wanted["first"], rtol=1e-5, atol=1e-6)
    assert [p.devices() for p in found["w"].pieces] == [{jax.devices()[0]}, {jax.devices()[1]}]


def test_pieces_go_round():
    """Pieces in place are used up, as arrays are; others are put together and cut again."""
    step, other = small(), small((0, 3, LAYERS))
    first, _ = step(init(jax.random.key(0)), data())
    kept = jax.tree.map(np.asarray, first["params"])
    lent = {
        "params": {**kept, "w": first["params"]["w"]},
        "key": jax.random.key(0),
        "count": np.int32(1),
    }
    again, _ = other(lent, data())
    assert again["params"]["w"].bounds == (0, 3, 5)
    assert not any(piece.is_deleted() for piece in first["params"]["w"].pieces)
    second, _ = step(first, data())
    assert all(piece.is_deleted() for piece in first["params"]["w"].pieces)
    np.testing.assert_allclose(again["params"]["w"], second["params"]["w"], rtol=1e-6)
    assert not np.array_equal(kept["w"], second["params"]["w"])


@pytest.mark.parametrize(
    "schedule",
    [pytest.param("1f1b", marks=pytest.mark.slow), "interleaved-1f1b", "zero-bubble"],
)
def test_four_stages(schedule):
    """Unequal ranges, two stages on each submesh if the schedule wants that, and examples divided
    within each.
    """
    sizes = (2, 2) if schedule == "interleaved-1f1b" else (1, 2, 1, 2)
    bounds = (0, 1, 3, 4, LAYERS)
    with jax.enable_x64(True):
        state = jax.tree.map(
            lambda x: x.astype(jnp.float64) if x.dtype == np.float32 else x, init(jax.random.key(0))
        )
        batch = jax.tree.map(np.float64, data())
        step = in_stages(
            train_step, state, batch, bounds=bounds, sizes=sizes, micro_batches=4, schedule=schedule
        )
        assert check_steps(train_step, step, state, [batch] * 3).largest < BAR
        assert_apart(step, bounds, schedule)


def test_born_and_checked_in_pieces():
    """Each stage makes its own rows, the same numbers as a plain run makes; a check leaves them as
    they are.
    """
    step = small()
    state = step.init(init, jax.random.key(0))
    w = state["params"]["w"]
    assert [p.devices() for p in w.pieces] == [{jax.devices()[0]}, {jax.devices()[1]}]
    np.testing.assert_array_equal(w, jax.jit(init)(jax.random.key(0))["params"]["w"])
    assert step.check(state, data()).largest < 1e-5
    assert not any(piece.is_deleted() for piece in w.pieces)
    assert {path for path in step.shardings if "w" in path} == {
        "state.params.w[0:2]",
        "state.params.w[2:5]",
    }
    assert step.shardings["state.params.w[2:5]"].device_set == {jax.devices()[1]}


def test_missing_rows():
    state = init(jax.random.key(0))
    state["params"]["w"] = state["params"]["w"][:3]
    with pytest.raises(Exception, match=r"state.params.w is \(3, 4, 4\), planned \(5, 4, 4\)"):
        small()(state, data())


def test_keys_in_pieces():
    keys = jax.random.split(jax.random.key(0), 3)
    pieces = PiecedArray([keys[:1], keys[1:]])
    assert pieces.dtype == keys.dtype
    np.testing.assert_array_equal(pieces, jax.random.key_data(keys))
    assert (jnp.asarray(pieces) == keys).all()


def test_nnx_in_place():
    """Flax NNX objects hold pieces after a step, and take part in the next."""

    def make():
        layers = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))(
            nnx.Rngs(0).split(LAYERS)
        )
        return layers, nnx.Optimizer(layers, optax.adam(1e-2), wrt=nnx.Param)

    def step(layers, optimizer, batch):
        def loss_fn(layers):
            scan = nnx.scan(
                lambda layer, x: jnp.tanh(layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
            )
            return jnp.mean((scan(layers, batch["x"]) - batch["y"]) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(layers)
        optimizer.update(layers, grads)
        return loss

    found, wanted = make(), make()
    pipelined = in_stages(step, *found, data(), bounds=(0, 2, LAYERS), sizes=(1, 1))
    for _ in range(2):
        a, b = pipelined(*found, data()), nnx.jit(step)(*wanted, data())
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert isinstance(found[0].kernel.get_value(), PiecedArray)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
        nnx.state(found[0]),
        nnx.state(wanted[0]),
    )
