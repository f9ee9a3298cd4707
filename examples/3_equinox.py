"""An Equinox model, planned and run without changing its training step.

python examples/3_equinox.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import aliquot as aq

# Eight virtual devices; leave both lines out where there are real ones.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

optimizer = optax.adam(1e-3)


def init_state(key):
    model = eqx.nn.MLP(in_size=64, out_size=64, width_size=256, depth=2, key=key)
    return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))


@eqx.filter_jit
def train_step(model, opt_state, batch):
    @eqx.filter_value_and_grad
    def loss_fn(model):
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

    loss, grads = loss_fn(model)
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, loss


# As a decorator, `parallelize` plans at the first call, from its arguments, for the devices JAX
# sees.
step = aq.parallelize(train_step, method=aq.Zero2Parallel())

model, opt_state = init_state(jax.random.key(0))
for number in range(5):
    x = jax.random.normal(jax.random.key(number), (128, 64))
    batch = {"x": x, "y": jnp.sin(x)}
    model, opt_state, loss = step(model, opt_state, batch)
    print(f"step {number}: loss {float(loss):.4f}")

print(step.plan)
print(step.check(model, opt_state, batch))  # one step beside the plain one
