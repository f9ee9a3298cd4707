"""A sum of partial products is reduced once where the compiler merges the reductions, and term by
term elsewhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from aliquot.cluster import Cluster
from aliquot.cost import make_problem
from aliquot.graph import capture


def three_products(params, x):
    return jnp.tanh(x @ params["a"] + x @ params["b"] + x @ params["c"])


@pytest.mark.parametrize(("preset", "reductions"), [("8xH100", 1), ("v5e-8", 1), ("8xcpu", 3)])
def test_a_sum_of_products_is_reduced_as_the_compiler_reduces_it(preset, reductions):
    weight = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    graph = capture(three_products, dict.fromkeys("abc", weight), x)
    edges = make_problem(graph, Cluster.preset(preset)).nodes.edges
    shares = {e.share for e in edges if e.kind == "result"}
    assert len([e for e in edges if e.kind == "result"]) == 3
    assert len(shares) == reductions


def test_a_product_that_something_else_reads_too_is_reduced_by_itself():
    def step(params, x):
        first = x @ params["a"]
        return jnp.tanh(first + x @ params["b"]) * first

    weight = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    graph = capture(step, dict.fromkeys("ab", weight), jax.ShapeDtypeStruct((16, 64), jnp.float32))
    edges = make_problem(graph, Cluster.preset("8xH100")).nodes.edges
    assert len({e.share for e in edges if e.kind == "result"}) == 2


@pytest.mark.parametrize(("num_micro_batches", "reductions"), [(1, 2), (4, 1)])
def test_terms_that_are_converted_first_are_reduced_one_by_one(num_micro_batches, reductions):
    """As XLA for GPUs compiles them; a running total over micro-batches is one array again."""

    def step(params, x):
        return jnp.tanh(
            (x @ params["a"]).astype(jnp.float32) + (x @ params["b"]).astype(jnp.float32)
        )

    weight = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)
    graph = capture(step, dict.fromkeys("ab", weight), jax.ShapeDtypeStruct((16, 64), jnp.bfloat16))
    problem = make_problem(graph, Cluster.preset("8xH100"), num_micro_batches=num_micro_batches)
    assert len({e.share for e in problem.nodes.edges if e.kind == "result"}) == reductions
