"""Ordinary training steps outside the zoo: numbers, pictures and tokens as inputs, with and without
attention, layers that repeat and layers that differ.

Each row of `STEPS` is a loss, its parameters and its batch, all as shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Array = Any
ROWS, LENGTH, WIDTH, LAYERS, CLASSES = 32, 64, 256, 4, 128


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """An array of numbers that is only a shape."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ids(*shape: int) -> jax.ShapeDtypeStruct:
    """The same of tokens or labels."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def step_of(name: str) -> tuple[Callable[[Any, Any], Any], Any, Any]:
    """`(step, state, batch)` of a row of `STEPS`."""
    loss, params, batch = STEPS[name]
    optimizer = optax.adamw(1e-3)

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, moments = optimizer.update(grads, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, value

    return step, {"params": params, "moments": jax.eval_shape(optimizer.init, params)}, batch


# Layers. Each takes its weights and the hidden states.


def _normed(w: Array, h: Array) -> Array:
    h = h - jnp.mean(h, axis=-1, keepdims=True)
    return w * h / jnp.sqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6)


def _dense(w: Any, h: Array) -> Array:
    return jax.nn.relu(h @ w["in"]) @ w["out"]


def _dense_with_bias(w: Any, h: Array) -> Array:
    return jax.nn.relu(_normed(w["scale"], h) @ w["in"] + w["bias"]) @ w["out"]


def _gated(w: Any, h: Array) -> Array:
    return (jax.nn.silu(h @ w["gate"]) * (h @ w["in"])) @ w["out"]


def _of_heads(w: Any, h: Array) -> Array:
    wide = jax.nn.relu(jnp.einsum("rlw,whk->rlhk", h, w["in"]))
    return jnp.einsum("rlhk,hkw->rlw", wide, w["out"])


def _low_rank(w: Any, h: Array) -> Array:
    return jax.nn.relu(h @ w["in"] @ w["between"]) @ w["out"]


def _adapted(w: Any, h: Array) -> Array:
    return jax.nn.relu(h @ (w["in"] + w["a"] @ w["b"])) @ w["out"]


def _halved(w: Any, h: Array) -> Array:
    small = jax.tree.map(lambda x: x.astype(jnp.bfloat16), w)
    return _dense(small, h.astype(jnp.bfloat16)).astype(jnp.float32)


def _mixer(w: Any, h: Array) -> Array:
    along = jax.nn.relu(jnp.einsum("rlw,lm->rmw", h, w["along in"]))
    return _dense(w, h + jnp.einsum("rmw,ml->rlw", along, w["along out"]))


def _expert_layer(w: Any, h: Array) -> Array:
    gates = jax.nn.softmax(h @ w["gate"])
    each = jax.nn.relu(jnp.einsum("rlw,ewk->relk", h, w["in"]))
    return jnp.einsum("relk,ekw,rle->rlw", each, w["out"], gates)


def _attend(w: Any, h: Array, memory: Array, mask: Array | None = None, groups: int = 8) -> Array:
    rows, length, width = h.shape
    size = width // 8
    q = (h @ w["q"]).reshape(rows, length, groups, -1, size)
    k, v = ((memory @ w[n]).reshape(rows, memory.shape[1], groups, size) for n in ("k", "v"))
    scores = jnp.einsum("rlgts,rmgs->rgtlm", q, k) * size**-0.5
    weights = jax.nn.softmax(scores if mask is None else jnp.where(mask, scores, -1e30))
    return jnp.einsum("rgtlm,rmgs->rlgts", weights, v).reshape(rows, length, width) @ w["o"]


def _attention(w: Any, h: Array) -> Array:
    inner = _normed(w["before"], h)
    return _dense(w, _normed(w["scale"], h + _attend(w, inner, inner)))


def _causal(w: Any, h: Array) -> Array:
    mask = jnp.arange(h.shape[1])[:, None] >= jnp.arange(h.shape[1])
    inner = _normed(w["before"], h)
    return _dense(w, _normed(w["scale"], h + _attend(w, inner, inner, mask)))


def _grouped(w: Any, h: Array) -> Array:
    return _attend(w, h, h, groups=2)


def _convolved(x: Array, kernel: Array, stride: int = 1, groups: int = 1) -> Array:
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


_IN_OUT = {"in": f32(WIDTH, 4 * WIDTH), "out": f32(4 * WIDTH, WIDTH)}
_WITH_BIAS = {**_IN_OUT, "bias": f32(4 * WIDTH), "scale": f32(WIDTH)}
_HEADS = {"in": f32(WIDTH, 8, 128), "out": f32(8, 128, WIDTH)}
_Q_K_V_O = {n: f32(WIDTH, WIDTH) for n in "qkvo"}
_ATTENTION = {**_Q_K_V_O, **_IN_OUT, "before": f32(WIDTH), "scale": f32(WIDTH)}
_TWO_GROUPS = {**_Q_K_V_O, "k": f32(WIDTH, WIDTH // 4), "v": f32(WIDTH, WIDTH // 4)}
_LOW_RANK = {"in": f32(WIDTH, 32), "between": f32(32, 4 * WIDTH), "out": f32(4 * WIDTH, WIDTH)}
_ADAPTED = {**_IN_OUT, "a": f32(WIDTH, 8), "b": f32(8, 4 * WIDTH)}
_MIXER = {**_IN_OUT, "along in": f32(LENGTH, 2 * LENGTH), "along out": f32(2 * LENGTH, LENGTH)}
_EXPERTS = {"gate": f32(WIDTH, 8), "in": f32(8, WIDTH, WIDTH), "out": f32(8, WIDTH, WIDTH)}


# Losses of whole models.

_Row = tuple[Callable[[Any, Any], Array], Any, Any]


def _squared(params: Any, h: Array, batch: Any) -> Array:
    return jnp.mean((h @ params["head"] - batch["y"]) ** 2)


def _classified(params: Any, h: Array, batch: Any) -> Array:
    logits = h @ params["head"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


def _stack(
    *layers: tuple[Callable[[Any, Array], Array], Any], tokens: bool = False, count: int = LAYERS
) -> _Row:
    """Layers on a residual stream, `count` times the given ones in turn; a squared error."""

    def loss(params: Any, batch: Any) -> Array:
        h = params["table"][batch["x"]] if tokens else batch["x"]
        for k, w in enumerate(params["layers"]):
            h = h + layers[k % len(layers)][0](w, h)
        return _squared(params, h, batch)

    params: dict[str, Any] = {
        "layers": [dict(w) for _ in range(count) for _, w in layers],
        "head": f32(WIDTH, CLASSES),
    }
    x = f32(ROWS, LENGTH, WIDTH)
    if tokens:
        params["table"], x = f32(1024, WIDTH), ids(ROWS, LENGTH)
    return loss, params, {"x": x, "y": f32(ROWS, LENGTH, CLASSES)}


def _scanned(layer: Callable[[Any, Array], Array], weights: Any, *, remat: bool = False) -> _Row:
    """One layer in a loop over stacked weights."""
    again = jax.checkpoint(layer) if remat else layer

    def loss(params: Any, batch: Any) -> Array:
        h, _ = jax.lax.scan(lambda h, w: (h + again(w, h), None), batch["x"], params["layers"])
        return _squared(params, h, batch)

    stacked = {n: f32(LAYERS, *w.shape) for n, w in weights.items()}
    batch = {"x": f32(ROWS, LENGTH, WIDTH), "y": f32(ROWS, LENGTH, CLASSES)}
    return loss, {"layers": stacked, "head": f32(WIDTH, CLASSES)}, batch


def _shared() -> _Row:
    """The same weights in every layer."""

    def loss(params: Any, batch: Any) -> Array:
        h = batch["x"]
        for _ in range(LAYERS):
            h = h + _attention(params["layer"], h)
        return _squared(params, h, batch)

    batch = {"x": f32(ROWS, LENGTH, WIDTH), "y": f32(ROWS, LENGTH, CLASSES)}
    return loss, {"layer": dict(_ATTENTION), "head": f32(WIDTH, CLASSES)}, batch


def _with_memory() -> _Row:
    """Each layer attends to an array that the batch brings along."""

    def loss(params: Any, batch: Any) -> Array:
        h = batch["x"]
        for w in params["layers"]:
            h = h + _attend(w, h, batch["memory"])
            h = h + _dense(w, h)
        return _squared(params, h, batch)

    params = {"layers": [_Q_K_V_O | _IN_OUT for _ in range(LAYERS)], "head": f32(WIDTH, CLASSES)}
    x, y = f32(ROWS, LENGTH, WIDTH), f32(ROWS, LENGTH, CLASSES)
    return loss, params, {"x": x, "memory": f32(ROWS, 32, WIDTH), "y": y}


def _narrowing(*widths: int) -> _Row:
    """Layers of different widths, as in an autoencoder."""

    def loss(params: Any, batch: Any) -> Array:
        h = batch["x"]
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - batch["x"]) ** 2)

    params = [f32(a, b) for a, b in zip(widths, widths[1:], strict=False)]
    return loss, params, {"x": f32(1024, widths[0])}


def _two_towers() -> _Row:
    """Two stacks whose results are compared within the batch."""

    def tower(layers: Any, h: Array) -> Array:
        for w in layers:
            h = h + _dense(w, h)
        return h

    def loss(params: Any, batch: Any) -> Array:
        a, b = tower(params["a"], batch["a"]), tower(params["b"], batch["b"])
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(a @ b.T)))

    layers = [dict(_IN_OUT) for _ in range(LAYERS)]
    batch = {"a": f32(1024, WIDTH), "b": f32(1024, WIDTH)}
    return loss, {"a": layers, "b": [dict(w) for w in layers]}, batch


def _two_heads() -> _Row:
    """A trunk, and two losses behind it."""

    def loss(params: Any, batch: Any) -> Array:
        h = batch["x"]
        for w in params["layers"]:
            h = h + _dense(w, h)
        return _squared(params, h, batch) + jnp.mean((h @ params["other"] - batch["z"]) ** 2)

    layers = [dict(_IN_OUT) for _ in range(LAYERS)]
    params = {"layers": layers, "head": f32(WIDTH, CLASSES), "other": f32(WIDTH, 64)}
    batch = {"x": f32(ROWS, LENGTH, WIDTH), "y": f32(ROWS, LENGTH, CLASSES)}
    return loss, params, {**batch, "z": f32(ROWS, LENGTH, 64)}


def _recurrent() -> _Row:
    """A loop over time with gates."""

    def loss(params: Any, batch: Any) -> Array:
        def turn(h: Array, x: Array) -> tuple[Array, Array]:
            keep = jax.nn.sigmoid(x @ params["xk"] + h @ params["hk"])
            h = keep * h + (1 - keep) * jnp.tanh(x @ params["xh"] + h @ params["hh"])
            return h, h

        x = jnp.swapaxes(batch["x"], 0, 1)
        _, h = jax.lax.scan(turn, jnp.zeros(x.shape[1:], x.dtype), x)
        return jnp.mean((h @ params["head"] - batch["y"]) ** 2)

    params = {n: f32(WIDTH, WIDTH) for n in ("xk", "hk", "xh", "hh")}
    batch = {"x": f32(ROWS, 16, WIDTH), "y": f32(16, ROWS, CLASSES)}
    return loss, {**params, "head": f32(WIDTH, CLASSES)}, batch


def _patches() -> _Row:
    """A vision transformer, whose hidden states come from a convolution."""

    def loss(params: Any, batch: Any) -> Array:
        h = _convolved(batch["x"], params["patch"], 8)
        h = h.reshape(h.shape[0], -1, WIDTH)
        for w in params["layers"]:
            h = h + _attention(w, h)
        return _classified(params, jnp.mean(h, axis=1), batch)

    layers = [dict(_ATTENTION) for _ in range(LAYERS)]
    params = {"patch": f32(8, 8, 3, WIDTH), "layers": layers, "head": f32(WIDTH, CLASSES)}
    return loss, params, {"x": f32(64, 64, 64, 3), "y": ids(64)}


def _pictures(*sections: int, separable: bool = False) -> _Row:
    """Convolutions on a residual stream; each section halves the picture."""

    def loss(params: Any, batch: Any) -> Array:
        x = batch["x"]
        for section in params["sections"]:
            x = jax.nn.relu(_convolved(x, section["down"], 2))
            for w in section["layers"]:
                groups = x.shape[-1] if separable else 1
                inner = jax.nn.relu(_convolved(x, w["in"], groups=groups))
                x = x + _convolved(inner, w["out"])
        return _classified(params, jnp.mean(x, axis=(1, 2)), batch)

    made, before = [], 3
    for width in sections:
        first = f32(3, 3, 1, width) if separable else f32(3, 3, width, width)
        layer = {"in": first, "out": f32(1, 1, width, width)}
        down = f32(3, 3, before, width)
        made.append({"down": down, "layers": [dict(layer) for _ in range(3)]})
        before = width
    params = {"sections": made, "head": f32(before, CLASSES)}
    return loss, params, {"x": f32(64, 32, 32, 3), "y": ids(64)}


def _tables() -> _Row:
    """Rows of several tables beside numbers, as in recommendation."""

    def loss(params: Any, batch: Any) -> Array:
        rows = [t[batch["ids"][:, k]] for k, t in enumerate(params["tables"])]
        h = jax.nn.relu(jnp.concatenate([batch["x"] @ params["numbers"], *rows], axis=-1))
        for w in params["layers"]:
            h = jax.nn.relu(h @ w)
        return jnp.mean((h @ params["head"] - batch["y"]) ** 2)

    params = {
        "tables": [f32(1 << 14, 64) for _ in range(4)],
        "numbers": f32(16, WIDTH),
        "layers": [f32(512, 512) for _ in range(3)],
        "head": f32(512, 1),
    }
    batch = {"ids": ids(2048, 4), "x": f32(2048, 16), "y": f32(2048, 1)}
    return loss, params, batch


STEPS: dict[str, _Row] = {
    "perceptron": _stack((_dense, _IN_OUT), count=6),
    "perceptron, norm and bias": _stack((_dense_with_bias, _WITH_BIAS)),
    "heads as dims": _stack((_of_heads, _HEADS), count=6),
    "causal attention": _stack((_causal, _ATTENTION)),
    "attention": _stack((_attention, _ATTENTION)),
    "causal attention on tokens": _stack((_causal, _ATTENTION), tokens=True),
    "perceptron on tokens": _stack((_dense, _IN_OUT), tokens=True, count=6),
    "vision transformer": _patches(),
    "gated": _stack((_gated, {**_IN_OUT, "gate": f32(WIDTH, 4 * WIDTH)})),
    "low rank": _stack((_low_rank, _LOW_RANK)),
    "adapters": _stack((_adapted, _ADAPTED)),
    "half precision": _stack((_halved, _IN_OUT)),
    "mixer": _stack((_mixer, _MIXER)),
    "experts": _stack((_expert_layer, _EXPERTS)),
    "grouped queries": _stack((_grouped, _TWO_GROUPS)),
    "two kinds of layers": _stack((_attention, _ATTENTION), (_dense, _IN_OUT), count=2),
    "three kinds of layers": _stack(
        (_attention, _ATTENTION), (_of_heads, _HEADS), (_mixer, _MIXER), count=2
    ),
    "one layer": _stack((_attention, _ATTENTION), count=1),
    "shared layer": _shared(),
    "memory": _with_memory(),
    "loop over perceptrons": _scanned(_dense, _IN_OUT),
    "loop over attention, recomputed": _scanned(_attention, _ATTENTION, remat=True),
    "autoencoder": _narrowing(1024, 512, 128, 512, 1024),
    "two towers": _two_towers(),
    "two heads": _two_heads(),
    "recurrent": _recurrent(),
    "residual convolutions": _pictures(64, 128),
    "separable convolutions": _pictures(64, 128, separable=True),
    "tables and numbers": _tables(),
}
