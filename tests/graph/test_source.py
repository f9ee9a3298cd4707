"""Operators are found in the user's code, those without a line of their own by their neighbours."""

import jax
import jax.numpy as jnp

import aliquot as aq
from aliquot.graph import line_or_nearest, source_line


def looked_up(params, batch):
    def one(carry, row):
        return carry + jnp.sum(params["table"][row]), None

    total, _ = jax.lax.scan(one, 0.0, batch)
    return total


def step(params, batch):
    loss, grads = jax.value_and_grad(looked_up)(params, batch)
    return jax.tree.map(lambda p, g: p - g, params, grads), loss


def test_operators_without_a_line_have_that_of_their_nearest():
    table = jax.ShapeDtypeStruct((64, 8), jnp.float32)
    graph = aq.capture(step, {"table": table}, jax.ShapeDtypeStruct((4, 16), jnp.int32))
    lost = [op.index for op in graph.ops if not source_line(op)]
    assert any(graph.ops[index].name == "tie" for index in lost)
    for index in range(len(graph.ops)):
        near = "near " if index in lost else ""
        assert line_or_nearest(graph, index).startswith(f"{near}test_source.py:")
