"""Training steps in which one network with biases meets two batches, or in which the
update sums over examples, beside the same steps without biases and tables.
"""

import jax
import jax.numpy as jnp
import optax

DEPTH = 2


def _block(x, layer):
    h = x @ layer["up"] + layer.get("up_bias", 0.0)
    return x + jax.nn.gelu(h) @ layer["down"] + layer.get("down_bias", 0.0)


def network(layers, x):
    """Residual blocks, in a scan if `layers` is a stack."""
    if isinstance(layers, dict):
        return jax.lax.scan(lambda h, layer: (_block(h, layer), None), x, layers)[0]
    for layer in layers:
        x = _block(x, layer)
    return x


def siamese(params, batch):
    """Pairs, each half of which passes through the network apart."""
    return ((network(params["net"], batch["x"]) - network(params["net"], batch["y"])) ** 2).mean()


def discriminator(params, batch):
    """Real and generated examples apart, both losses in one step."""
    made = network(params["generator"], batch["x"])
    real, fake = (network(params["net"], x).mean(1) for x in (batch["y"], made))
    return jax.nn.softplus(fake).mean() + jax.nn.softplus(-real).mean() + made.mean()


def target(params, batch):
    """Two views, of which a slowly moving copy of the network predicts the other's output."""
    views = batch["x"], batch["y"]
    online = [network(params["net"], x) @ params["head"] for x in views]
    fixed = [jax.lax.stop_gradient(network(params["target"], x)) for x in views]
    return sum(((a - b) ** 2).mean() for a, b in zip(online, fixed[::-1], strict=True))


def two_lengths(params, batch):
    """Two lengths of sequences, which read one table of positions."""

    def encode(x):
        x = x.reshape(-1, *x.shape[-2:])
        if "table" in params:
            x = x + params["table"][:, : x.shape[1]]
        return network(params["net"], x).mean(1)

    return ((encode(batch["long"]) - encode(batch["short"])) ** 2).mean()


def gradients_of_examples(params, batch):
    """The gradient of each example, clipped, and their sum over the batch."""

    def of_one(x, y):
        loss, grads = jax.value_and_grad(
            lambda p: ((network(p["net"], x) - y) ** 2).mean(),
        )(params)
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        share = 1 / jnp.maximum(norm, 1.0)
        return loss, jax.tree.map(lambda g: g * share, grads)

    loss, grads = jax.vmap(of_one)(batch["x"], batch["y"])
    return loss.mean(), jax.tree.map(lambda g: g.sum(0) / len(g), grads)


LOSSES = {
    "siamese": siamese,
    "siamese, scanned": siamese,
    "discriminator": discriminator,
    "target": target,
    "two lengths, scanned": two_lengths,
    "gradients of examples": gradients_of_examples,
}


def two_passes(name, *, vectors, rows=16, d=8, length=4, dtype=jnp.float64, arrays=True):
    """`(step, state, batch)` of one of `LOSSES`; `vectors`: with biases and tables."""
    tx = optax.adamw(1e-3, eps=1e-4)
    loss_fn = LOSSES[name]
    gradients = loss_fn if loss_fn is gradients_of_examples else jax.value_and_grad(loss_fn)

    def step(state, batch):
        params, moments = state
        loss, grads = gradients(params, batch)
        updates, moments = tx.update(grads, moments, params)
        new = optax.apply_updates(params, updates)
        if "target" in params:
            moved = jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, params["target"], new["net"])
            new = {**new, "target": moved}
        return (new, moments), loss

    def make():
        keys = iter(jax.random.split(jax.random.key(0), 64))

        def normal(*shape):
            return 0.3 * jax.random.normal(next(keys), shape, dtype)

        def layer():
            weights = {"up": normal(d, 2 * d), "down": normal(2 * d, d)}
            biases = {"up_bias": normal(2 * d), "down_bias": normal(d)}
            return weights | (biases if vectors else {})

        layers = [layer() for _ in range(DEPTH)]
        if "scanned" in name:
            layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        params = {"net": layers}
        batch = {"x": normal(rows, d), "y": normal(rows, d)}
        if name == "discriminator":
            params["generator"] = [layer()]
        if name == "target":
            params |= {"target": jax.tree.map(lambda x: x + 0.1, layers), "head": normal(d, d)}
        if "lengths" in name:
            if vectors:
                params["table"] = normal(1, length, d)
            batch = {"long": normal(rows, length, d), "short": normal(rows, length // 2, d)}
        return (params, tx.init(params)), batch

    state, batch = make() if arrays else jax.eval_shape(make)
    return step, state, batch
