"""A decoder whose layers have more ParallelBlocks than a segment may have."""

import jax
import jax.numpy as jnp

LAYERS, WIDTH, HEADS = 4, 32, 4


def _attention(params, x, memory):
    def heads(y, name):
        return (y @ params[name]).reshape(*y.shape[:2], HEADS, -1)

    q, k, v = heads(x, "q"), heads(memory, "k"), heads(memory, "v")
    scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
    return jnp.einsum("bhst,bthd->bshd", scores, v).reshape(x.shape) @ params["o"]


def make():
    """`(train_step, state, batch)`."""

    def loss(params, batch):
        x = batch["x"]
        for layer in params:
            x = x + _attention(layer["self"], x, x)
            x = x + _attention(layer["cross"], x, batch["memory"])
            x = x + jax.nn.gelu(x @ layer["t1"]) @ layer["t2"]
        return jnp.mean((x - batch["y"]) ** 2)

    def train_step(params, batch):
        grads = jax.grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    products = {name: array(WIDTH, WIDTH) for name in "qkvo"}
    layer = {
        "self": products,
        "cross": products,
        "t1": array(WIDTH, 4 * WIDTH),
        "t2": array(4 * WIDTH, WIDTH),
    }
    tokens = array(8, 16, WIDTH)
    return train_step, [layer] * LAYERS, {"x": tokens, "memory": tokens, "y": tokens}
