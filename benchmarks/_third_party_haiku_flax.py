"""Steps of Haiku and Flax (Linen and NNX), after the packages' own examples."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _third_party import (
    ROWS,
    ThirdPartyStep,
    batches,
    cross_entropy,
    doubled,
    integers,
    normal,
    optimizer,
    third_party,
)

_WIDTH, _HEADS, _LENGTH, _VOCABULARY = 16, 2, 6, 24


def _tokens(seed: int) -> dict[str, Any]:
    return {
        "inputs": integers(seed, _VOCABULARY, ROWS, _LENGTH),
        "targets": integers(seed + 9, _VOCABULARY, ROWS, _LENGTH),
    }


def _images(seed: int) -> dict[str, Any]:
    return {"image": normal(seed, ROWS, 8, 8, 1), "label": integers(seed, 10, ROWS)}


def _haiku_step(
    net: Any, example: Any, loss_of: Any, make_batch: Any, **more: Any
) -> ThirdPartyStep:
    """A transformed function with dropout keys, in the form of Haiku's examples."""
    params = doubled(net.init(jax.random.key(0), example))
    tx = optimizer()

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: Any, batch: Any) -> Any:
        rng, use = jax.random.split(state["rng"])
        loss, grads = jax.value_and_grad(lambda p: loss_of(net.apply(p, use, batch), batch))(
            state["params"]
        )
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "rng": rng}, {
            "loss": loss
        }

    state = {"params": params, "opt": tx.init(params), "rng": jax.random.PRNGKey(1)}
    return ThirdPartyStep(fn=update, state=state, batches=batches(make_batch), **more)


@third_party("haiku")
def haiku_mnist() -> ThirdPartyStep:
    import haiku as hk

    def forward(batch: Any) -> Any:
        return hk.Sequential([hk.Flatten(), hk.Linear(24), jax.nn.relu, hk.Linear(10)])(
            batch["image"]
        )

    net = hk.transform(forward)
    return _haiku_step(net, _images(0), lambda y, batch: cross_entropy(y, batch["label"]), _images)


@third_party("haiku")
def haiku_transformer() -> ThirdPartyStep:
    import haiku as hk

    def norm(x: Any) -> Any:
        return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)

    def forward(batch: Any) -> Any:
        x = hk.Embed(_VOCABULARY, _WIDTH)(batch["inputs"])
        x = x + hk.get_parameter(
            "positions", [_LENGTH, _WIDTH], init=hk.initializers.TruncatedNormal(0.02)
        )
        mask = jnp.tril(jnp.ones((1, 1, _LENGTH, _LENGTH)))
        for _ in range(2):
            attention = hk.MultiHeadAttention(
                _HEADS, _WIDTH // _HEADS, w_init=hk.initializers.VarianceScaling(1.0)
            )
            h = norm(x)
            x = x + attention(h, h, h, mask=mask)
            h = hk.Linear(4 * _WIDTH)(norm(x))
            x = x + hk.Linear(_WIDTH)(jax.nn.gelu(h))
        return hk.Linear(_VOCABULARY)(norm(x))

    net = hk.transform(forward)
    return _haiku_step(
        net, _tokens(0), lambda y, batch: cross_entropy(y, batch["targets"]), _tokens, layers=True
    )


@third_party("haiku")
def haiku_lstm() -> ThirdPartyStep:
    import haiku as hk

    def forward(batch: Any) -> Any:
        x = hk.Embed(_VOCABULARY, _WIDTH)(batch["inputs"])
        core = hk.DeepRNN([hk.LSTM(_WIDTH), jax.nn.relu, hk.LSTM(_WIDTH)])
        y, _ = hk.dynamic_unroll(core, x.swapaxes(0, 1), core.initial_state(x.shape[0]))
        return hk.Linear(_VOCABULARY)(y).swapaxes(0, 1)

    net = hk.transform(forward)
    return _haiku_step(
        net, _tokens(0), lambda y, batch: cross_entropy(y, batch["targets"]), _tokens
    )


@third_party("haiku")
def haiku_resnet() -> ThirdPartyStep:
    """With the running statistics of its BatchNorm as state."""
    import haiku as hk

    def forward(batch: Any, is_training: bool) -> Any:
        net = hk.nets.ResNet(
            blocks_per_group=(1, 1, 1, 1),
            num_classes=10,
            channels_per_group=(8, 8, 16, 16),
            bottleneck=False,
        )
        return net(batch["image"], is_training=is_training)

    net = hk.without_apply_rng(hk.transform_with_state(forward))
    params, stats = doubled(net.init(jax.random.key(0), _images(0), True))
    tx = optax.sgd(0.05, momentum=0.9)

    def loss_fn(params: Any, stats: Any, batch: Any) -> Any:
        logits, stats = net.apply(params, stats, batch, True)
        return cross_entropy(logits, batch["label"]), stats

    def train_step(state: Any, batch: Any) -> Any:
        params, stats, opt = state
        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, stats, batch)
        updates, opt = tx.update(grads, opt)
        return (optax.apply_updates(params, updates), stats, opt), {"loss": loss}

    return ThirdPartyStep(
        fn=train_step,
        state=(params, stats, tx.init(params)),
        batches=batches(_images),
        mixes="BatchNorm",
        # Of statistics over few examples.
        tolerance=1e-7,
    )


def _train_state_step(
    net: Any, example: Any, loss_of: Any, make_batch: Any, **more: Any
) -> ThirdPartyStep:
    """A `TrainState` and `apply_gradients`, in the form of Flax's examples."""
    from flax.training.train_state import TrainState

    params = doubled(net.init(jax.random.key(0), example)["params"])
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optimizer())

    @jax.jit
    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return loss_of(state.apply_fn({"params": params}, batch), batch)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "step": state.step}

    return ThirdPartyStep(fn=train_step, state=state, batches=batches(make_batch), **more)


@third_party("flax")
def flax_mnist() -> ThirdPartyStep:
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, batch: Any) -> Any:
            x = nn.avg_pool(nn.relu(nn.Conv(8, (3, 3))(batch["image"])), (2, 2), strides=(2, 2))
            x = nn.avg_pool(nn.relu(nn.Conv(16, (3, 3))(x)), (2, 2), strides=(2, 2))
            return nn.Dense(10)(nn.relu(nn.Dense(24)(x.reshape(x.shape[0], -1))))

    return _train_state_step(
        Net(), _images(0), lambda y, batch: cross_entropy(y, batch["label"]), _images
    )


@third_party("flax")
def flax_language_model() -> ThirdPartyStep:
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            h = nn.LayerNorm()(x)
            mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
            x = x + nn.MultiHeadDotProductAttention(num_heads=_HEADS)(h, h, mask=mask)
            return x + nn.Dense(_WIDTH)(nn.gelu(nn.Dense(2 * _WIDTH)(nn.LayerNorm()(x)))), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, batch: Any) -> Any:
            embed = nn.Embed(_VOCABULARY, _WIDTH)
            x = embed(batch["inputs"]) + self.param(
                "positions", nn.initializers.normal(0.02), (_LENGTH, _WIDTH)
            )
            blocks = nn.scan(
                nn.remat(Block, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            x, _ = blocks()(x, None)
            return embed.attend(nn.LayerNorm()(x))

    net = Net()
    return _train_state_step(
        net, _tokens(0), lambda y, b: cross_entropy(y, b["targets"]), _tokens, layers=True
    )


@third_party("flax")
def flax_sequence_to_sequence() -> ThirdPartyStep:
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, batch: Any) -> Any:
            embed = nn.Embed(_VOCABULARY, _WIDTH, param_dtype=jnp.float64)
            encoder, decoder = (nn.LSTMCell(_WIDTH, param_dtype=jnp.float64) for _ in range(2))
            carry, _ = nn.RNN(encoder, return_carry=True)(embed(batch["inputs"]))
            outputs = nn.RNN(decoder)(embed(batch["targets"]), initial_carry=carry)
            return nn.Dense(_VOCABULARY)(outputs)

    return _train_state_step(
        Net(), _tokens(0), lambda y, b: cross_entropy(y, b["targets"]), _tokens
    )


@third_party("flax")
def flax_vae() -> ThirdPartyStep:
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, batch: Any) -> Any:
            x = batch["x"]
            h = nn.relu(nn.Dense(24)(x))
            mean, log_variance = nn.Dense(4)(h), nn.Dense(4)(h)
            z = mean + jnp.exp(0.5 * log_variance) * batch["noise"]
            return nn.Dense(x.shape[-1])(nn.relu(nn.Dense(24)(z))), mean, log_variance

    def loss(found: Any, batch: Any) -> Any:
        logits, mean, log_variance = found
        reconstruction = optax.sigmoid_binary_cross_entropy(logits, batch["x"]).sum(-1).mean()
        divergence = (
            -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), axis=-1).mean()
        )
        return reconstruction + divergence

    def make_batch(seed: int) -> Any:
        return {"x": 1.0 * (normal(seed, ROWS, 12) > 0), "noise": normal(seed + 5, ROWS, 4)}

    return _train_state_step(Net(), make_batch(0), loss, make_batch)


@third_party("flax")
def flax_resnet() -> ThirdPartyStep:
    """BatchNorm's statistics beside the parameters in a `TrainState` of its own, as in Flax's
    ImageNet example.
    """
    from flax import linen as nn
    from flax.training import train_state

    class TrainState(train_state.TrainState):
        batch_stats: Any

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            x = nn.Conv(8, (3, 3))(x)
            y = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
            x = x + nn.Conv(8, (3, 3))(y)
            return nn.Dense(10)(nn.relu(x).mean((1, 2)))

    net = Net()
    variables = doubled(net.init(jax.random.key(0), _images(0)["image"], train=True))
    state = TrainState.create(
        apply_fn=net.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(0.1, 0.9),
    )

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = state.apply_fn(
                variables, batch["image"], train=True, mutable=["batch_stats"]
            )
            return cross_entropy(logits, batch["label"]), (new, logits)

        (loss, (new, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        state = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
        return state, {"loss": loss, "accuracy": accuracy}

    return ThirdPartyStep(
        fn=train_step, state=state, batches=batches(_images), mixes="BatchNorm", tolerance=1e-7
    )


@third_party("flax")
def nnx_transformer() -> ThirdPartyStep:
    """Split into a graph and its state, as NNX's functional form does."""
    from flax import nnx

    def double(rngs: Any) -> dict[str, Any]:
        return {"param_dtype": jnp.float64, "rngs": rngs}

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first, self.second = (
                nnx.LayerNorm(_WIDTH, **double(rngs)),
                nnx.LayerNorm(_WIDTH, **double(rngs)),
            )
            self.attention = nnx.MultiHeadAttention(
                _HEADS, _WIDTH, decode=False, use_bias=False, **double(rngs)
            )
            self.up, self.down = (
                nnx.Linear(_WIDTH, 32, **double(rngs)),
                nnx.Linear(32, _WIDTH, **double(rngs)),
            )

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.first(x), mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
            return x + self.down(nnx.gelu(self.up(self.second(x))))

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(_VOCABULARY, _WIDTH, **double(rngs))
            self.blocks = nnx.List([Block(rngs), Block(rngs)])
            self.head = nnx.Linear(_WIDTH, _VOCABULARY, **double(rngs))

        def __call__(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    net = Net(nnx.Rngs(0))
    parts: Any = nnx.split(net, nnx.Param, ...)
    graph, params, rest = parts
    tx = optimizer()

    def train_step(state: Any, batch: Any) -> Any:
        params, opt = state

        def loss_fn(params: Any) -> Any:
            return cross_entropy(nnx.merge(graph, params, rest)(batch["inputs"]), batch["targets"])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    # NNX takes the softmax in single precision. A bias of the keys, which it does not see, would be
    # rounding alone.
    return ThirdPartyStep(
        fn=train_step,
        state=(params, tx.init(params)),
        batches=batches(_tokens),
        layers=True,
        tolerance=1e-6,
    )


@third_party("flax", "qwix")
def qwix_lora() -> ThirdPartyStep:
    """Low-rank adapters beside frozen weights; only the adapters are trained."""
    import qwix
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.up, self.down = nnx.Linear(_WIDTH, 32, rngs=rngs), nnx.Linear(32, 10, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.down(nnx.gelu(self.up(x)))

    provider = qwix.LoraProvider(module_path=".*", rank=4, alpha=2.0)
    net = qwix.apply_lora_to_model(
        Net(nnx.Rngs(0)), provider, normal(0, ROWS, _WIDTH), rngs=nnx.Rngs(1)
    )
    parts: Any = nnx.split(net, nnx.LoRAParam, ...)
    graph, adapters, frozen = parts
    adapters, frozen, tx = doubled(adapters), doubled(frozen), optimizer()

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(adapters: Any) -> Any:
            return cross_entropy(
                nnx.merge(graph, adapters, state["frozen"])(batch["x"]), batch["y"]
            )

        loss, grads = jax.value_and_grad(loss_fn)(state["adapters"])
        updates, opt = tx.update(grads, state["opt"])
        adapters = optax.apply_updates(state["adapters"], updates)
        return {"adapters": adapters, "frozen": state["frozen"], "opt": opt}, {"loss": loss}

    state = {"adapters": adapters, "frozen": frozen, "opt": tx.init(adapters)}
    made = batches(lambda seed: {"x": normal(seed, ROWS, _WIDTH), "y": integers(seed, 10, ROWS)})
    return ThirdPartyStep(fn=train_step, state=state, batches=made)
