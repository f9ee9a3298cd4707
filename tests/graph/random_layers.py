"""Random training steps that repeat layers: written out or scanned, with what gradients pass in odd
ways (custom gradients, `stop_gradient`, straight-through estimators), dropout, callbacks, loops and
branches inside of layers, and values that several layers share.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np

ROWS, LENGTH, WIDTH = 8, 4, 8


@jax.custom_vjp
def _clipped(x):
    return jnp.sin(x)


_clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -0.01, 0.01) * jnp.cos(x),))


@jax.custom_jvp
def _soft(x):
    return jnp.log1p(jnp.exp(x))


_soft.defjvp(lambda primals, tangents: (_soft(*primals), tangents[0] * jnp.tanh(primals[0])))


def _rounded(x):
    """A straight-through estimator."""
    return x + jax.lax.stop_gradient(jnp.round(8 * x) / 8 - x)


def _mlp(p, x, key):
    return x + jnp.tanh(x @ p["a"]) @ p["b"]


def _gated(p, x, key):
    return x + (jax.nn.silu(x @ p["a"]) * jnp.tanh(x @ p["c"])) @ p["b"]


def _attention(p, x, key):
    q, k, v = x @ p["q"], x @ p["k"], x @ p["v"]
    scores = jnp.einsum("bsd,btd->bst", q, k) / WIDTH**0.5
    return x + jnp.einsum("bst,btd->bsd", jax.nn.softmax(scores), v) @ p["q"].T


def _norm(p, x, key):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def _dropout(p, x, key):
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0.0)


def _odd_gradients(p, x, key):
    return (
        x + _clipped(x @ p["q"]) + _soft(_rounded(x)) * jax.lax.stop_gradient(x.mean(-1))[..., None]
    )


def _looped(p, x, key):
    def turn(h, w):
        return jnp.tanh(h @ w), h.sum((1, 2))

    h, sums = jax.lax.scan(turn, x, jnp.stack([p["q"], p["k"]]))
    return x + h * jnp.tanh(sums.mean(0))[:, None, None]


def _branched(p, x, key):
    return jax.lax.cond(p["b"][0, 0] > 0, lambda x: x + jnp.sin(x @ p["q"]), lambda x: x * 1.5, x)


def _called_back(p, x, key):
    jax.debug.callback(lambda n: None, x.sum())
    is_large = jax.pure_callback(
        lambda n: np.asarray(n) > 0,
        jax.ShapeDtypeStruct(x.shape, bool),
        jax.lax.stop_gradient(x),
        vmap_method="sequential",
    )
    return x * jnp.where(is_large, 1.5, 0.5)


_PARTS = (_mlp, _gated, _attention, _norm, _dropout, _odd_gradients, _looped, _branched)


def random_layers(seed):
    """`(text, step, state, batch)`; the step returns the new state and numbers of its layers."""
    draw = random.Random(seed)
    parts = [draw.choice((_mlp, _gated, _attention)), *draw.choices(_PARTS, k=draw.randint(1, 3))]
    if draw.random() < 0.2:
        parts.append(_called_back)
    draw.shuffle(parts)
    num_layers = draw.randint(2, 4)
    scans, counts, shared, twice = (draw.random() < p for p in (0.5, 0.3, 0.3, 0.2))

    def layer(p, x, mask, key):
        for k, part in enumerate(parts):
            x = part(p, x, jax.random.fold_in(key, k))
        return x * mask if shared else x

    def through(layers, x, key):
        mask = jnp.cos(jnp.arange(LENGTH, dtype=x.dtype))[:, None]
        if scans:

            def turn(h, given):
                p, k = given
                h = layer(p, h, mask, jax.random.fold_in(key, k))
                return h, h.mean() if counts else None

            h, means = jax.lax.scan(turn, x, (layers, jnp.arange(num_layers)))
            return h, means.sum() if counts else 0.0
        total = 0.0
        for k, p in enumerate(layers):
            x = layer(p, x, mask, jax.random.fold_in(key, k))
            total = total + (x.mean() if counts else 0.0)
        return x, total

    def loss(params, batch, key):
        h, total = through(params["layers"], batch["x"] @ params["in"], key)
        if twice:
            h, more = through(params["layers"], jnp.tanh(h), key)
            total = total + more
        error = h @ params["out"] - batch["y"]
        return jnp.mean(error**2) + 0.01 * total, total

    def step(state, batch):
        key = jax.random.fold_in(jax.random.key(3), state["count"])
        grads, total = jax.grad(loss, has_aux=True)(state["params"], batch, key)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "count": state["count"] + 1}, {"total": total}

    shapes = {"a": (WIDTH, 16), "b": (16, WIDTH), "c": (WIDTH, 16)}
    shapes |= dict.fromkeys("qkv", (WIDTH, WIDTH))
    rng = np.random.default_rng(seed)
    layers = [
        {name: jnp.asarray(0.2 * rng.normal(size=shape)) for name, shape in shapes.items()}
        for _ in range(num_layers)
    ]
    if scans:
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    params = {"layers": layers}
    params |= {name: jnp.asarray(0.2 * rng.normal(size=(WIDTH, WIDTH))) for name in ("in", "out")}
    batch = {name: jnp.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH))) for name in "xy"}
    names = ", ".join(part.__name__.strip("_") for part in parts)
    flags = {"scanned": scans, "sums of layers": counts, "shared mask": shared, "twice": twice}
    said = "".join(f", {name}" for name, flag in flags.items() if flag)
    return f"{num_layers} x ({names}){said}", step, {"params": params, "count": 0}, batch
