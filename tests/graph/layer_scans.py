"""Steps whose layers are a scan, in the forms that people write: the table `SCANS` that cutting is
tested on.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

LAYERS, WIDTH, ROWS = 5, 4, 6

_MOMENTUM = optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(0.1, momentum=0.9))
_ADAMW = optax.chain(optax.clip_by_global_norm(1e6), optax.adamw(1e-2))


def params():
    """Stacked parameters, one more array, and nothing that is zero."""
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "w": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 3,
        "b": jax.random.normal(keys[1], (LAYERS, WIDTH)) / 3,
        "head": jax.random.normal(keys[2], (WIDTH, 1)),
    }


def batch(rows=ROWS):
    """Examples and what they should become."""
    x = jax.random.normal(jax.random.key(1), (rows, WIDTH))
    return {"x": x, "y": x.sum(axis=-1, keepdims=True)}


def block(x, layer):
    """One layer as the body of a scan."""
    return jnp.tanh(x @ layer["w"] + layer["b"]) + x, None


def layers_of(p):
    """What is stacked over layers."""
    return {"w": p["w"], "b": p["b"]}


def _error(p, x, data):
    return jnp.mean((x @ p["head"] - data["y"]) ** 2)


def plain(p, data):
    """A scan and nothing else."""
    return _error(p, jax.lax.scan(block, data["x"], layers_of(p))[0], data)


def remat_in_body(p, data):
    """Each layer computed again in the backward pass."""
    return _error(p, jax.lax.scan(jax.checkpoint(block), data["x"], layers_of(p))[0], data)


def remat_around(p, data):
    """The whole scan computed again in the backward pass."""
    return jax.checkpoint(plain)(p, data)


def summed_auxiliary(p, data):
    """Each layer has a loss of its own."""

    def body(x, layer):
        y, _ = block(x, layer)
        return y, jnp.mean(y**2)

    x, each = jax.lax.scan(body, data["x"], layers_of(p))
    return _error(p, x, data) + 0.01 * each.sum()


def more_than_parameters(p, data):
    """The layers also take constants, keys made on the spot, their own numbers, and a mask that all
    share.
    """
    scales = 1 + jnp.arange(LAYERS, dtype=jnp.float32) / 10
    keys = jax.random.split(jax.random.key(7), LAYERS)
    mask = jnp.arange(data["x"].shape[0])[:, None] > 1

    def body(x, item):
        layer, scale, key, number = item
        y, _ = block(x, layer)
        kept = jax.random.bernoulli(key, 0.8, (WIDTH,))
        return jnp.where(mask & kept, y * scale, x + number), None

    return _error(
        p, jax.lax.scan(body, data["x"], (layers_of(p), scales, keys, jnp.arange(LAYERS)))[0], data
    )


_CLOSED_OVER = np.linspace(0.5, 1.5, LAYERS, dtype=np.float32)


def constants_closed_over(p, data):
    """An array outside of the step has one row for each layer."""

    def body(x, item):
        layer, scale = item
        return block(x, layer)[0] * scale, None

    return _error(p, jax.lax.scan(body, data["x"], (layers_of(p), _CLOSED_OVER))[0], data)


def cast_outside(p, data):
    """Parameters in float32, layers in bfloat16."""
    small = jax.tree.map(lambda a: a.astype(jnp.bfloat16), layers_of(p))
    x, _ = jax.lax.scan(block, data["x"].astype(jnp.bfloat16), small)
    return _error(p, x.astype(jnp.float32), data)


def backwards_unrolled(p, data):
    """The last layer first, three at a time."""
    return _error(p, jax.lax.scan(block, data["x"], layers_of(p), reverse=True, unroll=3)[0], data)


def loop_in_body(p, data):
    """Each layer holds a loop of as many rounds as there are layers, which must not be cut."""

    def body(x, layer):
        return (
            jax.lax.scan(lambda c, _: (jnp.tanh(c @ layer["w"]), None), x, None, length=LAYERS)[0]
            + layer["b"],
            None,
        )

    return _error(p, jax.lax.scan(body, data["x"], layers_of(p))[0], data)


def layers_mixed(p, data):
    """Each layer's weight is the sum of all before it."""
    summed = {"w": jnp.cumsum(p["w"], axis=0), "b": p["b"]}
    return _error(p, jax.lax.scan(block, data["x"], summed)[0], data)


def twice(p, data):
    """Two scans over the same layers."""
    x, _ = jax.lax.scan(block, data["x"], layers_of(p))
    return _error(p, jax.lax.scan(block, x, layers_of(p))[0], data)


def side_by_side(p, data):
    """Two batches pass through the same layers."""
    first, _ = jax.lax.scan(block, data["x"], layers_of(p))
    second, _ = jax.lax.scan(block, jnp.sin(data["x"]), layers_of(p))
    return _error(p, first * second, data)


LOSSES = (
    plain,
    remat_in_body,
    remat_around,
    summed_auxiliary,
    more_than_parameters,
    constants_closed_over,
    cast_outside,
    backwards_unrolled,
    loop_in_body,
    layers_mixed,
    twice,
    side_by_side,
)


def training(loss, update=None, optimizer=_MOMENTUM):
    """A step with an update of its own, or with an optimizer under a clipped global norm; returns
    `(step, state)`.
    """

    def train_step(state, data):
        value, grads = jax.value_and_grad(loss)(state["params"], data)
        if update is not None:
            return {**state, "params": update(state["params"], grads)}, {"loss": value}
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, {
            "loss": value
        }

    start = params()
    return train_step, (
        {
            "params": start,
            "opt_state": optimizer.init(start),
        }
        if update is None
        else {"params": start}
    )


def _descend(p, grads):
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads)


def guarded(p, grads):
    """Nothing happens where a gradient is not finite: a branch around the update."""
    finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
    return jax.lax.cond(finite, _descend, lambda p, grads: p, p, grads)


def orthogonal(p, grads):
    """Products of each layer's gradient with itself, other dims transposed, reshaped and sorted."""
    g = grads["w"]
    g = jnp.einsum("lij,lkj->lik", g, g).transpose(0, 2, 1).reshape(LAYERS, -1)
    g = jnp.sort(g, axis=-1).reshape(LAYERS, WIDTH, WIDTH)[:, ::-1]
    return {**p, "w": p["w"] - 0.1 * g / (1 + jnp.max(jnp.abs(g), axis=(1, 2), keepdims=True))}


def searched(p, grads):
    """A loop that looks at all layers at once decides on the step."""
    size = jax.lax.while_loop(lambda s: jnp.abs(s * grads["b"]).max() > 0.1, lambda s: s / 2, 1.0)
    return jax.tree.map(lambda a, g: a - size * g, p, grads)


def by_layer_number(p, grads):
    """Later layers learn more slowly; the update is a scan itself."""
    rates = 0.1 / (1 + jax.lax.broadcasted_iota(jnp.float32, (LAYERS, 1), 0))
    b = jax.lax.scan(
        lambda total, row: (total + row[0].sum(), row[0] - row[1]),
        0.0,
        (p["b"], rates * grads["b"]),
    )[1]
    return {**p, "b": b}


def row_by_row(p, grads):
    """Many operators that stay within a layer, and reductions over all layers that need no
    rounding.
    """
    w, g = p["w"], grads["w"]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(3), jnp.arange(LAYERS))
    drawn = jax.vmap(lambda key: jax.random.uniform(key, (WIDTH,)))(keys)
    left, right = jnp.split(jax.lax.pad(g, 0.0, ((0, 0, 0), (0, 0, 0), (1, 1, 0))), 2, axis=2)
    g = jnp.concatenate([left[:, :, 1:], right[:, :, :-1]], axis=2)
    g = jnp.cumsum(g, axis=1) + jax.lax.dynamic_slice_in_dim(g, 1, 1, axis=2) + jnp.flip(g, axis=2)
    g = jnp.where(jnp.argmax(g, axis=2)[:, :, None] == 1, g, jax.lax.clamp(-1.0, g, 1.0))
    bits = jax.lax.bitcast_convert_type(g, jnp.int32)
    g = jnp.where(bits % 2 == 0, g, g @ p["head"])
    largest, smallest = (
        g.max(axis=(0, 2)),
        jnp.minimum(g.min(), (g < 0).all(axis=0).sum() + (g > 3).any(axis=0).sum()),
    )
    return {**p, "w": w - 0.1 * g / (1 + largest[:, None] + smallest**2), "b": p["b"] + 0.1 * drawn}


UPDATES = (guarded, orthogonal, searched, by_layer_number, row_by_row)

SCANS = {loss.__name__: partial(training, loss) for loss in LOSSES}
SCANS |= {update.__name__: partial(training, plain, update) for update in UPDATES}
SCANS["adamw"] = partial(training, plain, optimizer=_ADAMW)
