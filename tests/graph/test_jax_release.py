"""What aliquot reads off JAX's traces. A release that changes any of it must fail here first, by
name.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from aliquot.graph import Phase, capture
from aliquot.graph import _jax_compat as compat


def scopes(loss_fn, wrap=lambda f: f):
    @wrap
    def train_step(w, x):
        with jax.named_scope("update"):
            return w - 0.1 * jax.grad(loss_fn)(w, x)

    return [
        (op.name, op.scope, op.phase)
        for op in capture(train_step, jnp.ones((4, 4)), jnp.ones((2, 4))).ops
    ]


def layer(w, x):
    with jax.named_scope("layer"):
        return jnp.sin(x @ w).sum()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_name_stacks_of_a_gradient(wrap):
    found = scopes(layer, wrap)
    assert [s for n, s, _ in found if n == "sin"] == ["update/jvp(layer)"]
    products = [(s, p) for n, s, p in found if n == "dot_general"]
    assert products == [
        ("update/jvp(layer)", Phase.FORWARD),
        ("update/transpose(jvp(layer))", Phase.BACKWARD),
    ]
    assert [(s, p) for n, s, p in found if n == "sub"] == [("update", Phase.UPDATE)]


def test_names_inside_calls_are_joined_to_the_names_around_them():
    found = scopes(jax.jit(layer))
    assert {p for n, _, p in found if n == "dot_general"} == {Phase.FORWARD, Phase.BACKWARD}
    assert all("jvp(" in s for n, s, _ in found if n == "dot_general")


def test_unlabelled_operators_follow_the_dataflow():
    def train_step(w, x):
        mask = jnp.tril(jnp.ones((4, 4)))
        loss, grad = jax.value_and_grad(lambda w: ((x @ (w * mask)) ** 2).sum())(w)
        return w - 0.1 * grad, jnp.log(loss)

    phases = {
        op.name: op.phase for op in capture(train_step, jnp.ones((4, 4)), jnp.ones((2, 4))).ops
    }
    assert phases["iota"] is Phase.PROLOGUE
    assert phases["log"] is Phase.FORWARD
    assert phases["sub"] is Phase.UPDATE


def primitives(fn, *args):
    return {eqn.primitive.name: eqn for eqn in jax.make_jaxpr(fn)(*args).eqns}


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def test_primitives_that_are_opened():
    x = jnp.ones(3)
    assert compat.inlined_body(primitives(jax.jit(jnp.sin), x)["jit"]) is not None
    assert compat.inlined_body(
        primitives(jax.nn.silu, x).get("jit") or next(iter(primitives(jax.nn.silu, x).values()))
    )
    relu = jax.make_jaxpr(jax.nn.relu)(x).eqns[0]
    assert relu.primitive.name == "custom_jvp_call" and compat.inlined_body(relu) is not None
    assert compat.inlined_body(primitives(doubled, x)["custom_vjp_call"]) is not None


def test_primitives_that_stay():
    x = jnp.ones(3)
    remat = primitives(jax.grad(lambda x: jax.checkpoint(jnp.sin)(x).sum()), x)["remat2"]
    assert compat.is_remat(remat) and set(remat.params) >= {"jaxpr", "policy", "prevent_cse"}
    scan = primitives(lambda x: jax.lax.scan(lambda c, y: (c + y, c), 0.0, x), x)["scan"]
    assert set(scan.params) >= {"jaxpr", "length", "reverse", "unroll"}
    assert compat.scan_counts(scan.params) == (0, 1)
    loop = primitives(lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x), x)[
        "while"
    ]
    assert set(loop.params) >= {"cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"}
    cond = primitives(lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), x)["cond"]
    assert len(cond.params["branches"]) == 2
    wrap = primitives(lambda k: jax.random.bits(k), jax.random.PRNGKey(0))
    assert "random_wrap" in wrap


def test_opaque_kernels_are_one_operator():
    def callback(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    graph = capture(callback, jnp.ones(3))
    assert [op.name for op in graph.ops] == ["pure_callback"]
