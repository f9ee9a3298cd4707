"""LoRA: the weights of a trained model stay, and small matrices beside them are trained and kept.

python examples/10_lora.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import aliquot as aq

# Eight virtual devices; leave both lines out where there are real ones.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

LAYERS, WIDTH, RANK, ROWS = 4, 256, 8, 64
optimizer = optax.adamw(1e-2)


def init(key):
    """The state: weights of a trained model (drawn here), adapters that change nothing yet."""
    keys = jax.random.split(key, 2 * LAYERS)
    base = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys[:LAYERS]]
    adapters = [
        {
            "down": jax.random.normal(k, (WIDTH, RANK)) / WIDTH**0.5,
            "up": jnp.zeros((RANK, WIDTH)),
        }
        for k in keys[LAYERS:]
    ]
    return {"base": base, "adapters": adapters, "moments": optimizer.init(adapters)}


def train_step(state, batch):
    def loss_fn(adapters):
        x = batch["x"]
        for weight, adapter in zip(state["base"], adapters, strict=True):
            x = x + jnp.tanh(x @ weight + x @ adapter["down"] @ adapter["up"])
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["adapters"])
    updates, moments = optimizer.update(grads, state["moments"], state["adapters"])
    adapters = optax.apply_updates(state["adapters"], updates)
    # The base is returned as it is, so that the whole state is one tree in every loop.
    return {"base": state["base"], "adapters": adapters, "moments": moments}, loss


def batch_at(number):
    x = jax.random.normal(jax.random.key(number), (ROWS, WIDTH))
    return {"x": x, "y": jnp.roll(x, 1, axis=1)}


state = jax.eval_shape(init, jax.random.key(0))
batch = jax.eval_shape(batch_at, 0)
# ZeRO-3 splits the weights that stay as well as those that are trained.
plan = aq.plan(train_step, state, batch, cluster=aq.Cluster.detect(), method=aq.Zero3Parallel())
print(plan)

step = aq.parallelize(train_step, plan).prepare(state, batch)
state = step.init(init, jax.random.key(0))
for number in range(10):
    state, loss = step(state, batch_at(number))
    print(f"step {number}: loss {float(loss):.4f}")

# Only what was trained is kept: 0.1 MB beside a base of 1 MB.
adapters = jax.tree.map(np.asarray, state["adapters"])
np.savez("adapters.npz", **{f"{k}.{n}": x for k, a in enumerate(adapters) for n, x in a.items()})
kept, base = (sum(x.size for x in jax.tree.leaves(state[name])) for name in ("adapters", "base"))
print(f"kept {kept} trained numbers beside {base} that stay")
