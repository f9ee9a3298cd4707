"""Plan a two-layer MLP for eight H100s, then train it on eight virtual CPU devices.

Planning needs shapes only: nothing is allocated, and the cluster need not be here. Run it with

    python examples/1_plan_an_mlp.py
"""

import jax
import jax.numpy as jnp
import optax

import aliquot as aq

# Eight virtual devices, so that this runs on any machine. Leave both lines out where there are real
# ones.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

optimizer = optax.adamw(1e-3)


def init_state(key, width=256):
    up_key, down_key = jax.random.split(key)
    params = {
        "up": jax.random.normal(up_key, (width, 4 * width)) * width**-0.5,
        "down": jax.random.normal(down_key, (4 * width, width)) * width**-0.5,
    }
    return {"params": params, "opt_state": optimizer.init(params)}


def loss_fn(params, batch):
    hidden = jax.nn.gelu(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, {"loss": loss}


def shapes(width, num_rows):
    """The arguments of the step, without their data."""
    rows = jax.ShapeDtypeStruct((num_rows, width), jnp.float32)
    state = jax.eval_shape(lambda: init_state(jax.random.key(0), width))
    return state, {"x": rows, "y": rows}


cluster = aq.Cluster.preset("8xH100")
plan = aq.plan(train_step, *shapes(8192, 4096), cluster=cluster)
print(plan)

# A method of your choice is priced by the same cost model, so the two can be compared.
fsdp = aq.plan(train_step, *shapes(8192, 4096), cluster=cluster, method=aq.Zero3Parallel())
print(f"\nFSDP: {fsdp.prediction.step_time_s / plan.prediction.step_time_s:.2f} times as long\n")

# To run a step, plan it for the devices that are here: those are meant if no cluster is named.
plan = aq.plan(train_step, *shapes(256, 512))
step = aq.parallelize(train_step, plan)
state = step.init(init_state, jax.random.key(0))  # each device creates its own pieces
for number in range(5):
    x = jax.random.normal(jax.random.key(number), (512, 256))
    state, metrics = step(state, {"x": x, "y": x})
    print(f"step {number}: loss {float(metrics['loss']):.4f}")
