"""A small model in layers, for tests of cutting: an embedding that is used twice, and equal
residual layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from aliquot.graph import Graph, capture

ROWS, WIDTH, INNER, WORDS = 8, 6, 16, 10


def layered(num_layers: int = 4, *, skip: bool = False, nested: bool = True) -> Graph:
    """Its AdamW step; `skip` adds the first layer's result before the last one, `nested` puts the
    parameters in a state.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))

    def loss_fn(params, batch):
        x = first = params["embed"][batch["inputs"]]
        for number, layer in enumerate(params["layers"]):
            if skip and number == num_layers - 1:
                x = x + first
            x = x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]
            first = x if number == 0 else first
        scores = x @ params["embed"].T
        picked = jnp.take_along_axis(scores, batch["targets"][:, None], axis=1)[:, 0]
        return (jax.nn.logsumexp(scores, axis=1) - picked).mean()

    def update(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def train_step(state, batch):
        params, opt_state, loss = update(state["params"], state["opt_state"], batch)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, {"loss": loss}

    float32 = jax.ShapeDtypeStruct
    layer = {
        "up": float32((WIDTH, INNER), np.float32),
        "bias": float32((INNER,), np.float32),
        "down": float32((INNER, WIDTH), np.float32),
    }
    params = {"embed": float32((WORDS, WIDTH), np.float32), "layers": [layer] * num_layers}
    opt_state = jax.eval_shape(optimizer.init, params)
    batch = {name: float32((ROWS,), np.int32) for name in ("inputs", "targets")}
    if not nested:
        return capture(update, params, opt_state, batch)
    return capture(
        train_step, {"params": params, "opt_state": opt_state, "step": float32((), np.int32)}, batch
    )
