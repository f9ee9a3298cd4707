"""Flax NNX, Flax Linen and Equinox, as their tutorials write a step."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState
from graph.step_base import WIDTH, Step, batch, step


class Net(nnx.Module):
    """Two dense layers, on request with dropout, batch statistics, or the first layer under a
    second name.
    """

    def __init__(
        self, rngs: nnx.Rngs, *, dropout: float = 0.0, norm: bool = False, tied: bool = False
    ):
        self.first = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.again = self.first if tied else None
        self.norm = nnx.BatchNorm(16, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.last = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.first(x))
        if self.again is not None:
            x = x + self.again.kernel[...].sum() + self.again(jnp.zeros(WIDTH))
        x = self.norm(x) if self.norm is not None else x
        x = self.dropout(x) if self.dropout is not None else x
        return self.last(x)


def _loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def _in_place(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(_loss)(model, batch)
    optimizer.update(model, grads)
    return loss


def _made(**settings):
    model = Net(nnx.Rngs(0), **settings)
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@step
def nnx_in_place() -> Step:
    roles = {"parameter": 4, "optimizer_state": 10, "batch": 2}
    return Step(fn=_in_place, args=(*_made(), batch()), roles=roles, gradients=4, results=1)


@step
def nnx_in_place_jit() -> Step:
    roles = {"parameter": 4, "optimizer_state": 10, "batch": 2}
    return Step(
        fn=nnx.jit(_in_place), args=(*_made(), batch()), roles=roles, gradients=4, results=1
    )


@step
def nnx_in_place_dropout_norm() -> Step:
    model, optimizer = _made(dropout=0.2, norm=True)
    # Two running statistics, a key and its count.
    roles = {"parameter": 6, "optimizer_state": 14, "state": 4, "batch": 2}
    return Step(
        fn=nnx.jit(_in_place), args=(model, optimizer, batch()), roles=roles, gradients=6, results=1
    )


@step
def nnx_in_place_tied() -> Step:
    roles = {"parameter": 4, "optimizer_state": 10, "batch": 2}
    return Step(
        fn=_in_place, args=(*_made(tied=True), batch()), roles=roles, gradients=4, results=1
    )


@step
def nnx_in_place_metrics() -> Step:
    def train_step(model, optimizer, metrics, batch):
        loss = _in_place(model, optimizer, batch)
        metrics.update(loss=loss)

    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    roles = {"parameter": 4, "optimizer_state": 11, "batch": 2, "state": 1}
    return Step(fn=train_step, args=(*_made(), metrics, batch()), roles=roles, results=0)


@step
def nnx_in_one_tuple() -> Step:
    def train_step(state, batch):
        return {"loss": _in_place(*state, batch)}

    roles = {"parameter": 4, "optimizer_state": 10, "batch": 2}
    return Step(fn=train_step, args=(_made(), batch()), roles=roles, gradients=4, results=1)


@step
def nnx_functional() -> Step:
    def train_step(graphdef, state, batch):
        model, optimizer = nnx.merge(graphdef, state)
        loss = _in_place(model, optimizer, batch)
        return nnx.state((model, optimizer)), loss

    graphdef, state = nnx.split(_made())
    roles = {"parameter": 4, "optimizer_state": 10, "batch": 2}
    return Step(
        fn=train_step, args=(graphdef, state, batch()), roles=roles, gradients=4, results=15
    )


@step
def nnx_functional_closed_over() -> Step:
    model, optimizer = _made(dropout=0.2)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    tx = optax.adam(1e-2)

    @jax.jit
    def train_step(params, rest, opt_state, batch):
        def loss_fn(params):
            model = nnx.merge(graphdef, params, rest, copy=True)
            loss = _loss(model, batch)
            return loss, nnx.state(model, nnx.Not(nnx.Param))

        (loss, new_rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new_rest, opt_state, loss

    roles = {"parameter": 4, "optimizer_state": 9, "state": 2, "batch": 2}
    args = (params, rest, tx.init(params), batch())
    return Step(fn=train_step, args=args, roles=roles, gradients=4, results=16)


@step
def nnx_evaluation() -> Step:
    def evaluate(model, batch):
        return _loss(model, batch)

    return Step(
        fn=evaluate,
        args=(_made()[0], batch()),
        roles={"parameter": 4, "batch": 2},
        trains=False,
        results=1,
    )


class LinenNet(linen.Module):
    width: int = 16

    @linen.compact
    def __call__(self, x, train: bool):
        x = linen.Dense(self.width)(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        x = linen.Dropout(0.2, deterministic=not train)(linen.relu(x))
        return linen.Dense(3)(x)


class LinenState(TrainState):
    batch_stats: dict


@step
def linen_train_state() -> Step:
    net = LinenNet()
    variables = net.init(jax.random.key(0), batch()["x"], train=False)
    state = LinenState.create(
        apply_fn=net.apply,
        params=variables["params"],
        tx=optax.adam(1e-2),
        batch_stats=variables["batch_stats"],
    )

    @jax.jit
    def train_step(state, batch, key):
        def loss_fn(params):
            out, new = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["x"],
                train=True,
                rngs={"dropout": jax.random.fold_in(key, state.step)},
                mutable=["batch_stats"],
            )
            return jnp.mean((out - batch["y"]) ** 2), new

        (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads).replace(batch_stats=new["batch_stats"]), loss

    # The step's number, a Python integer at first, is read by the dropout: state, as the running
    # statistics are.
    roles = {"parameter": 6, "optimizer_state": 13, "state": 3, "batch": 2, "other": 1}
    return Step(
        fn=train_step,
        args=(state, batch(), jax.random.key(1)),
        roles=roles,
        gradients=6,
        results=23,
    )


class EqxNet(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear
    activation: object
    slope: float
    name: str = eqx.field(static=True)

    def __call__(self, x):
        return self.last(self.activation(self.first(x)) * self.slope)


def _equinox(jitted) -> Step:
    keys = jax.random.split(jax.random.key(0), 2)
    first, last = eqx.nn.Linear(WIDTH, 16, key=keys[0]), eqx.nn.Linear(16, 3, key=keys[1])
    model = EqxNet(first=first, last=last, activation=jax.nn.gelu, slope=0.5, name="net")
    tx = optax.adam(1e-2)

    @jitted
    def train_step(model, opt_state, batch):
        @eqx.filter_value_and_grad
        def loss_fn(model):
            return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

        loss, grads = loss_fn(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    roles = {"parameter": 4, "optimizer_state": 9, "batch": 2}
    return Step(
        fn=train_step, args=(model, opt_state, batch()), roles=roles, gradients=4, results=14
    )


@step
def equinox_filter_jit() -> Step:
    return _equinox(eqx.filter_jit)


@step
def equinox_plain() -> Step:
    return _equinox(lambda fn: fn)
