"""Operators are found in the user's code, those without a line of their own by their neighbours."""

import jax
import jax.numpy as jnp

import aliquot as aq
from aliquot.graph import line_or_nearest, parameter_of, source_line


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


def test_a_product_is_known_by_the_parameter_that_it_reads_whatever_its_form():
    def step(params, batch):
        def loss(params):
            hidden = batch.astype(jnp.bfloat16) @ params["up"][0].astype(jnp.bfloat16)
            return jnp.sum(jnp.tanh(hidden).astype(jnp.float32) @ params["down"])

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    params = {"up": [jnp.ones((8, 16))], "down": jnp.ones((16, 8))}
    graph = aq.capture(step, params, jnp.ones((4, 8)))
    products = [op.index for op in graph.ops if op.name == "dot_general"]
    found = [parameter_of(graph, index) for index in products]
    # Two of the forward pass, the one of the input's gradient, and two that read activations.
    assert sorted(found) == ["", "", "params.down", "params.down", "params.up[*]"]
