"""Primitives for which no rule is declared, as a library or a later release of JAX may bring
them.
"""

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir


def primitive(name, fn, results=1):
    """A primitive that computes `fn(*arrays, **params)`, with no rule for `vmap` and no
    derivative.
    """
    made = Primitive(name)
    made.multiple_results = results > 1
    made.def_impl(fn)

    def abstract(*avals, **params):
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        out = jax.eval_shape(lambda *arrays: fn(*arrays, **params), *structs)
        shaped = [
            avals[0].update(shape=o.shape, dtype=o.dtype, weak_type=False)
            for o in jax.tree.leaves(out)
        ]
        return shaped if results > 1 else shaped[0]

    made.def_abstract_eval(abstract)
    mlir.register_lowering(made, mlir.lower_fun(fn, multiple_results=results > 1))
    return made


def row_norm(x, scale):
    return scale * x / jnp.sqrt(1e-3 + jnp.mean(x * x, axis=-1, keepdims=True))


def row_norm_gradients(x, scale, g):
    return jax.vjp(row_norm, x, scale)[1](g)[0], g * x / jnp.sqrt(
        1e-3 + jnp.mean(x * x, axis=-1, keepdims=True)
    )


row_norm_p = primitive("row_norm_test", row_norm)
row_norm_gradients_p = primitive("row_norm_gradients_test", row_norm_gradients, results=2)
soft_cap_p = primitive("soft_cap_test", lambda x, *, cap: cap * jnp.tanh(x / cap))
soft_cap_gradient_p = primitive(
    "soft_cap_gradient_test", lambda x, g, *, cap: g * (1 - jnp.tanh(x / cap) ** 2)
)
# Each element depends on all of them, though shapes do not show it.
shared_scale_p = primitive("shared_scale_test", lambda x: x / (1 + jnp.max(jnp.abs(x))))


@jax.custom_vjp
def normed(x, scale):
    """Rows over their root mean square."""
    return row_norm_p.bind(x, scale)


def _normed_backward(kept, g):
    x, scale = kept
    dx, dscale = row_norm_gradients_p.bind(x, scale, g)
    return dx, jnp.sum(dscale, axis=tuple(range(x.ndim - 1)))


normed.defvjp(lambda x, scale: (row_norm_p.bind(x, scale), (x, scale)), _normed_backward)


@jax.custom_vjp
def capped(x):
    """Numbers between -2 and 2."""
    return soft_cap_p.bind(x, cap=2.0)


capped.defvjp(lambda x: (capped(x), x), lambda x, g: (soft_cap_gradient_p.bind(x, g, cap=2.0),))


def train_step(params, batch):
    """A small network of which two layers are such primitives."""

    def loss(params):
        hidden = capped(normed(batch["x"] @ params["up"], params["scale"]))
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value
