"""What a workload of the table of training steps is, and the small model and data that many of them
share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

STEPS: dict[str, Callable[[], Step]] = {}

ROWS, WIDTH = 8, 6


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step, arguments for it, and what capture must find out.

    Attributes:
        roles: number of inputs by role; a role that is not named has none.
        trains: whether there is a backward pass.
        gradients: number of values that go from backward to update, where that is exactly the
            gradients; else None.
        results: number of flat outputs of the user's result, without the state of objects changed
            in place.
        stateless: paths without a successor although they are neither batch nor other.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, int]
    trains: bool = True
    gradients: int | None = None
    results: int
    stateless: tuple[str, ...] = ()


def step(make: Callable[[], Step]) -> Callable[[], Step]:
    """Add a workload to the table under its function's name."""
    STEPS[make.__name__] = make
    return make


def shapes(tree: Any) -> Any:
    """Arguments with their arrays replaced by shapes; what NNX objects share stays shared."""

    def shape(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x

    def is_module(x: Any) -> bool:
        return isinstance(x, nnx.Pytree) and not isinstance(x, nnx.Variable)

    if not any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module))):
        return jax.tree.map(shape, tree)
    definition, state = nnx.split(tree)
    return nnx.merge(definition, jax.tree.map(shape, state))


def batch() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(7), 2)
    return {
        "x": jax.random.normal(keys[0], (ROWS, WIDTH)),
        "y": jax.random.normal(keys[1], (ROWS, 3)),
    }


def mlp_params() -> dict[str, dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "in": {"w": jax.random.normal(keys[0], (WIDTH, 16)) / 3, "b": jnp.zeros(16)},
        "out": {"w": jax.random.normal(keys[1], (16, 3)) / 4, "b": jnp.zeros(3)},
    }


def mlp(params: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ params["in"]["w"] + params["in"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def mse(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((mlp(params, batch["x"]) - batch["y"]) ** 2)


def sgd(params: Any, grads: Any, rate: float = 0.1) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def optax_step(
    tx: Any, params: Any = None, loss_fn: Callable[..., Any] = mse
) -> tuple[Callable[..., Any], Any, Any]:
    """A step `(params, opt_state, batch) -> (params, opt_state, loss)` with its first two
    arguments.
    """

    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = mlp_params() if params is None else params
    return train_step, params, tx.init(params)
