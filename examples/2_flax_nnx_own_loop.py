"""A Flax NNX model in a training loop of its own, which takes PartitionSpecs from the plan and
nothing else.

python examples/2_flax_nnx_own_loop.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import aliquot as aq

# Eight virtual devices; leave both lines out where there are real ones.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(1024, 256, rngs=rngs)
        self.hidden = nnx.Linear(256, 1024, rngs=rngs)
        self.head = nnx.Linear(1024, 8, rngs=rngs)

    def __call__(self, tokens):
        return self.head(nnx.gelu(self.hidden(self.embed(tokens).mean(axis=1))))


def create(key):
    model = Classifier(nnx.Rngs(key))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


# The definition is static, the state a tree of arrays. `nnx.eval_shape` makes it of shapes alone.
definition, state_shapes = nnx.split(nnx.eval_shape(create, jax.random.key(0)))


def train_step(state, batch):
    model, optimizer = nnx.merge(definition, state)

    def loss_fn(model):
        logits = model(batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), loss


batch_shapes = {
    "tokens": jax.ShapeDtypeStruct((64, 32), jnp.int32),
    "labels": jax.ShapeDtypeStruct((64,), jnp.int32),
}
plan = aq.plan(train_step, state_shapes, batch_shapes, method=aq.Zero3Parallel())
for path, spec in plan.partition_specs().items():
    print(f"{path:60} {spec}")

# The step with the plan's splits written into it; a pure function, as `train_step` is.
compiled_step = jax.jit(aq.constrain(train_step, plan), donate_argnums=0)

# Each device creates its own pieces of what a constructor returns.
state = aq.parallelize(train_step, plan).init(lambda key: nnx.state(create(key)), jax.random.key(0))

# `NamedSharding`s on the plan's mesh, as a tree like the argument: what `jax.jit` and Orbax take.
batch_shardings = plan.shardings(batch_shapes)
for number in range(5):
    tokens_key, labels_key = jax.random.split(jax.random.key(number))
    labels = jax.random.randint(labels_key, (64,), 0, 8)
    tokens = labels[:, None] + 8 * jax.random.randint(tokens_key, (64, 32), 0, 128)
    batch = jax.device_put({"tokens": tokens, "labels": labels}, batch_shardings)
    state, loss = compiled_step(state, batch)
    print(f"step {number}: loss {float(loss):.4f}")
