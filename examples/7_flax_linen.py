"""A Flax Linen model with a `TrainState`, planned with FSDP and run without changing its training
step.

python examples/7_flax_linen.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import aliquot as aq

# Eight virtual devices; leave both lines out where there are real ones.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(1024, 256)(tokens).mean(axis=1)
        return nn.Dense(8)(nn.gelu(nn.Dense(1024)(x)))


model = Classifier()


def init_state(key):
    params = model.init(key, jnp.zeros((1, 32), jnp.int32))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))


def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn(params, batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


batch_shapes = {
    "tokens": jax.ShapeDtypeStruct((64, 32), jnp.int32),
    "labels": jax.ShapeDtypeStruct((64,), jnp.int32),
}
plan = aq.plan(
    train_step,
    jax.eval_shape(init_state, jax.random.key(0)),
    batch_shapes,
    method=aq.Zero3Parallel(),
)
print(plan)

step = aq.parallelize(train_step, plan)
# Each device creates its own pieces of the state.
state = step.init(init_state, jax.random.key(0))
for number in range(5):
    tokens_key, labels_key = jax.random.split(jax.random.key(number))
    labels = jax.random.randint(labels_key, (64,), 0, 8)
    tokens = labels[:, None] + 8 * jax.random.randint(tokens_key, (64, 32), 0, 128)
    state, loss = step(state, {"tokens": tokens, "labels": labels})
    print(f"step {number}: loss {float(loss):.4f}")
