"""A state of several arguments has the order of the step's parameters, whatever their names and
whatever holds its arrays.
"""

import inspect
import itertools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import aliquot as aq
from aliquot.core import InputError, PlanMismatchError

WIDTH = 8
BATCH = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
ADAM = optax.adam(1e-2)
ORDERS = list(itertools.permutations(("average", "model", "optimizer")))


def averaged(old, new):
    return jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, old, new)


def of_trees(make, predict):
    """A step whose parameters are any tree of arrays, and what makes its state."""

    def create(key):
        params = make(key)
        return params, ADAM.init(params), jax.tree.map(jnp.zeros_like, params)

    def step(params, moments, average, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(predict(p, batch) ** 2))(params)
        updates, moments = ADAM.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        return params, moments, averaged(average, params), loss

    return step, create


def weight(key):
    return jax.random.normal(key, (WIDTH, WIDTH))


def of_arrays():
    def create(key):
        return weight(key), jnp.zeros(WIDTH), jnp.zeros((1, WIDTH, WIDTH))

    def step(weight, bias, average, batch):
        def loss_of(weight, bias):
            return jnp.mean((batch @ weight + bias - 1) ** 2)

        loss, (by_weight, by_bias) = jax.value_and_grad(loss_of, (0, 1))(weight, bias)
        weight = weight - 0.1 * by_weight
        return weight, bias - 0.1 * by_bias, averaged(average, weight[None]), loss

    return step, create


def of_nnx():
    def create(key):
        model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(key))
        average = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
        return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param), average

    def step(model, optimizer, average, batch):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
        optimizer.update(model, grads)
        return model, optimizer, averaged(average, nnx.state(model, nnx.Param)), loss

    return step, create


KINDS = {
    "arrays": of_arrays,
    "dicts": lambda: of_trees(
        lambda key: {"w": weight(key), "b": jnp.ones(WIDTH)}, lambda p, x: x @ p["w"] + p["b"]
    ),
    "nnx": of_nnx,
    "equinox": lambda: of_trees(
        lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key), lambda p, x: jax.vmap(p)(x)
    ),
    # As Haiku names its parameters.
    "haiku": lambda: of_trees(
        lambda key: {"mlp/~/linear_0": {"w": weight(key), "b": jnp.ones(WIDTH)}},
        lambda p, x: x @ p["mlp/~/linear_0"]["w"] + p["mlp/~/linear_0"]["b"],
    ),
}


def planned(kind, names):
    """A step whose state arguments have these names."""
    plain, create = KINDS[kind]()

    def step(*arguments):
        return plain(*arguments)

    by_name = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in (*names, "rows")]
    step.__signature__ = inspect.Signature(by_name)
    shapes = nnx.eval_shape(create, jax.random.key(0))
    plan = aq.plan(
        step, *shapes, BATCH, cluster=aq.Cluster.preset("8xcpu"), method=aq.DataParallel()
    )
    return aq.parallelize(step, plan), create


def arrays_in(part):
    return jax.tree.leaves(
        nnx.state(part) if isinstance(part, nnx.Module | nnx.Optimizer) else part
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", ORDERS, ids="-".join)
def test_init_and_checkpoints_keep_the_order_of_the_parameters(kind, names, tmp_path):
    step, create = planned(kind, names)
    key = jax.random.key(0)
    made, wanted = step.init(create, key), create(key)
    assert [type(part) for part in made] == [type(part) for part in wanted]
    step.prepare(*made, BATCH)
    assert list(step.flat_state(made).tree(range(len(step.flat_state(made).leaves)))) == [*names]
    if names == ("optimizer", "model", "average"):  # the reverse of the alphabet
        step.save(made, tmp_path)
        made = step.restore(tmp_path)
        assert [type(part) for part in made] == [type(part) for part in wanted]
    for part, like in zip(made, wanted, strict=True):
        for a, b in zip(arrays_in(part), arrays_in(like), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def without_biases(key):
    model = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(key))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param), nnx.state(model, nnx.Param)


@pytest.mark.parametrize("kind", ["arrays", "nnx"])
def test_another_order_is_told_by_places(kind, tmp_path):
    step, create = planned(kind, ("model", "optimizer", "average"))
    places = (
        "at place 1 model is expected, and what the step takes as optimizer is there",
        "at place 2 optimizer is expected, and what the step takes as model is there",
    )
    key = jax.random.key(0)

    def swapped(key):
        model, optimizer, average = create(key)
        return optimizer, model, average

    with pytest.raises(PlanMismatchError, match=re.escape("(model, optimizer, average)")) as init:
        step.init(swapped, key)
    assert init.value.violations == places
    with pytest.raises(PlanMismatchError) as missing:
        step.init(lambda key: create(key)[:2], key)
    assert missing.value.violations == ("at place 3 average is expected, and nothing is there",)
    made = step.init(create, key)
    model, optimizer, average = made
    step.prepare(*made, BATCH)
    with pytest.raises(PlanMismatchError) as call:
        step(optimizer, model, average, BATCH)
    assert call.value.violations == places
    with pytest.raises(InputError, match=re.escape(places[0])):
        step.save((optimizer, model, average), tmp_path)
    # In order, but other arrays: each is named, also in this order.
    if kind == "nnx":
        with pytest.raises(PlanMismatchError) as other:
            step.init(without_biases, key)
        biases = [f"{name}.bias" for name in ("model", "optimizer.opt_state[0].mu")]
        assert other.value.violations[:2] == tuple(f"{name} is missing" for name in biases)
        with pytest.raises(InputError, match=r"(?s)model\.bias .* optimizer\..* average\.bias"):
            step.save(without_biases(key), tmp_path)


def test_arrays_of_other_sizes_beside_those_of_the_batch_are_no_state(tmp_path):
    """Nodes of a graph beside its edges, which a checkpoint does not hold."""

    def step(state, graph):
        def loss_of(weight):
            sent = (graph["nodes"] @ weight)[graph["sender"]]
            return jnp.mean((sent - graph["edges"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state["weight"])
        return {"weight": state["weight"] - 0.1 * grads}, loss

    state = {"weight": jnp.eye(WIDTH)}
    graph = {
        "nodes": jnp.ones((6, WIDTH)),
        "edges": jnp.ones((16, WIDTH)),
        "sender": jnp.arange(16) % 6,
    }
    cluster = aq.Cluster.preset("8xcpu")
    plan = aq.plan(step, state, graph, cluster=cluster, method=aq.Zero3Parallel())
    parallel = aq.parallelize(step, plan).prepare(state, graph)
    new, _ = parallel(state, graph)
    parallel.save(new, tmp_path / "saved")
    found = parallel.restore(tmp_path / "saved")
    np.testing.assert_array_equal(found["weight"], new["weight"])
