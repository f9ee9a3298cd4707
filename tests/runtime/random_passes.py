"""Random training steps whose examples do not depend on one another, as shapes: networks that one
to three batches pass through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Unlike all other sizes, as is half of it, so that no dim is taken for another.
ROWS = 24
_ACTIVATIONS = {"tanh": jnp.tanh, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


def random_passes(seed: int, rows: int = ROWS) -> tuple[str, Callable[..., Any], Any, Any]:
    """`(text, step, state, batch)` of a seed; `state` and `batch` are shapes."""
    rng = np.random.default_rng(seed)

    def often(share: float) -> bool:
        return bool(rng.random() < share)

    def pick(*from_these: Any) -> Any:
        return from_these[int(rng.integers(len(from_these)))]

    width, depth, classes = 8 * pick(1, 2, 4), pick(1, 2, 3), pick(1, 8)
    lengths = [pick(2, 4, 6) for _ in range(pick(1, 2, 2, 2, 3))]
    has_table, scanned, remat = often(0.5), often(0.4), often(0.3)
    turns = pick(1, 1, 2)
    per_example, reports_after = often(0.2), often(0.2)
    update = pick("sgd", "adamw", "clip", "clip")
    activation = pick(*_ACTIVATIONS)
    bias, norm = often(0.8), pick("none", "scale", "layer")
    softened, pooled = often(0.3), pick("mean", "first", "gate")
    text = (
        f"seed {seed}: {width} wide, {depth} deep, lengths {lengths}, bias {bias}, norm {norm},"
        f" table {has_table}, scan {scanned}, remat {remat}, turns {turns}, {activation}, {pooled},"
        f" softened {softened}, {update}, of each example {per_example}, after {reports_after}"
    )

    def layer() -> dict[str, Any]:
        found = {"up": (width, 2 * width), "down": (2 * width, width)}
        if bias:
            found |= {"up_bias": (2 * width,), "down_bias": (width,)}
        if norm != "none":
            found["scale"] = (width,)
        if norm == "layer":
            found["shift"] = (width,)
        return found

    def as_shape(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def is_shape(x: Any) -> bool:
        return isinstance(x, tuple) and all(isinstance(n, int) for n in x)

    layers: Any = [layer() for _ in range(depth)]
    if scanned:
        layers = {key: (depth, *shape) for key, shape in layers[0].items()}
    shapes: dict[str, Any] = {"layers": layers, "head": (width, classes), "head_bias": (classes,)}
    if has_table:
        shapes["table"] = (max(lengths), width)
    if pooled == "gate":
        shapes["gate"] = (width, 1)
    params = jax.tree.map(as_shape, shapes, is_leaf=is_shape)
    batch = {f"x{k}": as_shape((rows, length, width)) for k, length in enumerate(lengths)} | {
        "y": as_shape((rows, classes))
    }

    def block(x: Any, p: Any) -> Any:
        h = x
        if norm == "layer":
            h = h - h.mean(-1, keepdims=True)
        if norm != "none":
            h = h / jnp.sqrt((h**2).mean(-1, keepdims=True) + 1e-3) * p["scale"] + p.get("shift", 0)
        up_bias = p.get("up_bias", 0)
        h = h @ p["up"] + (jax.nn.softplus(up_bias) if bias and softened else up_bias)
        return x + _ACTIVATIONS[activation](h) @ p["down"] + p.get("down_bias", 0)

    block = jax.checkpoint(block) if remat else block

    def network(p: Any, x: Any) -> Any:
        if has_table:
            x = x + p["table"][: x.shape[-2]]
        for _ in range(turns):
            if scanned:
                x, _ = jax.lax.scan(lambda h, w: (block(h, w), None), x, p["layers"])
            else:
                x = functools.reduce(block, p["layers"], x)
        if pooled == "gate":
            x = (jax.nn.softmax(x @ p["gate"], -2) * x).sum(-2)
        else:
            x = x.mean(-2) if pooled == "mean" else x[..., 0, :]
        return x @ p["head"] + p["head_bias"]

    def loss(p: Any, b: Any) -> Any:
        made = [network(p, b[f"x{k}"]) for k in range(len(lengths))]
        apart = sum((((m - made[0]) ** 2).mean() for m in made[1:]), start=0.0)
        return ((made[0] - b["y"]) ** 2).mean() + apart

    tx = {
        "sgd": optax.sgd(0.1),
        "adamw": optax.adamw(1e-3),
        "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    }[update]

    def of_one(p: Any, example: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, example)
        size = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)) + 1e-6)
        return value, jax.tree.map(lambda g: g / jnp.maximum(size, 1.0), grads)

    def step(state: Any, b: Any) -> Any:
        p, moments = state
        if per_example:
            values, grads = jax.vmap(of_one, (None, 0))(p, b)
            value, grads = values.mean(), jax.tree.map(lambda g: g.mean(0), grads)
        else:
            value, grads = jax.value_and_grad(loss)(p, b)
        updates, moments = tx.update(grads, moments, p)
        new = optax.apply_updates(p, updates)
        return (new, moments), (value, loss(new, b) if reports_after else value)

    return text, step, (params, jax.eval_shape(tx.init, params)), batch
