"""Which sums over tokens may wait for the last micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from aliquot.graph import Graph, capture
from aliquot.sharding import sums_that_wait

W, X = jnp.ones((4, 4)), jnp.ones((2, 8, 4))
LAYERS = jnp.ones((3, 4, 4))


def step_of(
    loss: Callable[[Any, Any], Any], weights: Any = W, change: Callable[[Any], Any] = lambda g: g
) -> Graph:
    """A step with momentum, and a change of the gradient on its way to the update."""

    def train_step(state: Any, x: Any) -> Any:
        value, grad = jax.value_and_grad(loss)(state["w"], x)
        mean = 0.9 * state["m"] + change(grad)
        return {"w": state["w"] - 0.1 * mean, "m": mean}, value

    return capture(train_step, {"w": weights, "m": weights}, X)


def plain(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def waiting(graph: Graph, crossing: list[int] | None = None) -> list[str]:
    return [graph.ops[k].name for k in sums_that_wait(graph, crossing)]


def stacked(w: Any, x: Any) -> Any:
    """A loop over layers, which stacks their gradients."""
    body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return jnp.mean(jax.lax.scan(body, x, w)[0] ** 2)


def shared(w: Any, x: Any) -> Any:
    """A loop whose turns share a weight, the gradient of which it adds up from zeros."""
    return jnp.mean(jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 3)[0] ** 2)


def chosen(w: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.cond(x[0, 0, 0] > 0, lambda: x @ w, lambda: x) ** 2)


def twice(w: Any, x: Any) -> Any:
    """A weight that meets tokens twice, and a penalty that meets none."""
    return plain(w, jnp.tanh(x @ w)) + jnp.sum(w**3)


def bias(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x + w[0]) ** 2)


def rearranged(g: Any) -> Any:
    return g.T.astype(jnp.bfloat16).reshape(-1).reshape(4, 4)


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        (step_of(plain), ["dot_general"]),
        (step_of(plain, change=rearranged), ["dot_general"]),
        (step_of(stacked, LAYERS), ["dot_general"]),
        (step_of(shared), ["dot_general"]),
        (step_of(twice), ["dot_general", "dot_general"]),
        # Its gradient is padded.
        (step_of(bias), []),
        (step_of(chosen), []),
    ],
    ids=["plain", "rearranged", "stacked", "shared", "twice", "bias", "chosen"],
)
def test_gradients_that_only_the_update_reads_may_wait(graph, found):
    assert waiting(graph) == found


def test_a_sum_that_is_read_before_the_update_may_not():
    def train_step(w: Any, x: Any) -> Any:
        grad = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * grad, grad

    graph = capture(train_step, W, X)
    # The caller sees it, unless it is one of the results that are added up.
    assert waiting(graph) == []
    assert waiting(graph, [o.value for o in graph.outputs if isinstance(o.value, int)]) == []
