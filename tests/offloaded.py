"""Steps that keep arrays in host memory: activations by policies of `jax.checkpoint`, moments by
their memory kind.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

WIDTH, HIDDEN, BATCH = 8, 32, 16
_POLICIES = jax.checkpoint_policies
POLICIES = {
    "names": _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "dots": _POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "save": _POLICIES.save_only_these_names("hidden"),
}


def offloaded_step(policy: str, *, layers: int = 2, scan: bool = True, moments: str = "device"):
    """A step with momentum, and a function that makes its state.

    Args:
        policy: which activations are kept; see `POLICIES`.
        scan: whether layers are a loop; otherwise they are written out.
        moments: "device" or "host": where the momentum lies.
    """

    def layer(w: Any, x: Any) -> Any:
        hidden = checkpoint_name(jnp.tanh(x @ w["up"]), "hidden")
        return x + jnp.sin(hidden @ w["down"])

    def loss(params: Any, x: Any, y: Any) -> Any:
        block = jax.checkpoint(layer, policy=POLICIES[policy])
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (block(w, x), None), x, params)
        else:
            for w in params:
                x = block(w, x)
        return jnp.mean((x - y) ** 2)

    def train_step(state: Any, batch: Any) -> Any:
        params, momentum = state["params"], state["momentum"]
        if moments == "host":
            momentum = jax.device_put(momentum, jax.memory.Space.Device)
        value, grads = jax.value_and_grad(loss)(params, *batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
        if moments == "host":
            momentum = jax.device_put(momentum, jax.memory.Space.Host)
        return {"params": params, "momentum": momentum}, {"loss": value}

    def init(key: jax.Array) -> Any:
        stack = (layers,) if scan else ()

        def weights(key: jax.Array) -> Any:
            up, down = jax.random.split(key)
            return {
                "up": 0.3 * jax.random.normal(up, (*stack, WIDTH, HIDDEN)),
                "down": 0.3 * jax.random.normal(down, (*stack, HIDDEN, WIDTH)),
            }

        params = weights(key) if scan else [weights(k) for k in jax.random.split(key, layers)]
        return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}

    return train_step, init


def shapes_of(state: Any, moments: str = "device") -> Any:
    """Shapes of a state, with the momentum in the given memory."""
    place = None
    if moments == "host":
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

    def shapes(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree
        )

    return {"params": shapes(state["params"], None), "momentum": shapes(state["momentum"], place)}


def batch_of(dtype: Any = jnp.float32) -> Any:
    """A batch of inputs and targets."""
    keys = jax.random.split(jax.random.key(1))
    return tuple(jax.random.normal(key, (BATCH, WIDTH), dtype) for key in keys)
