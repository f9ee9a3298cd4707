"""Splits that an array takes on on its way to products: once for all products that read it, in each
body by itself.
"""

import jax
import jax.numpy as jnp
import numpy as np

from aliquot.graph import capture
from aliquot.runtime import build_program, place
from aliquot.sharding import Pin, Pins


def three_products(w, x):
    """One before a loop, one in it, and one behind it."""
    first = x @ w

    def turn(carry, _):
        return jnp.tanh(carry @ w), None

    last, _ = jax.lax.scan(turn, first, None, length=3)
    return first, last @ w


def test_an_array_is_converted_once_in_each_body(mesh):
    w, x = np.random.default_rng(0).standard_normal((2, 8, 8))
    graph = capture(three_products, w, x)
    pin = Pin(
        operands=(None, (0, 1)),
        between=((), ((-1, 1),)),
        results=(((-1, -1),),),
        minor=((),),
        totals=((),),
    )
    products = [op.index for op in graph.ops if op.name == "dot_general"]
    assert len(products) == 3
    pins = Pins(
        by_class={0: pin},
        op_class=[0 if op.index in products else -1 for op in graph.ops],
        inputs=((0, 0), (-1, -1)),
        outputs=((-1, -1),) * 2,
        values={},
    )
    program = build_program(graph, pins, mesh(2, 4))
    arrays = [
        place(a, sharding, a.shape, keep=True)
        for a, sharding in zip((w, x), program.in_shardings, strict=True)
    ]
    for found, wanted in zip(program.jitted(*arrays), three_products(w, x), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    text = str(jax.make_jaxpr(program.jitted)(*arrays))
    # Before and behind the loop the same one, and another in its body.
    assert (
        text.count(
            "sharding=NamedSharding(mesh=Mesh('x': 2, 'y': 4, axis_types=(Auto, Auto)),"
            " spec=P(None, 'y')"
        )
        == 2
    )
