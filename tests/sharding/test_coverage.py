"""Every primitive that ordinary models and optimizers produce has a rule. Each step here is
captured, none is run.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from aliquot import sharding, zoo
from aliquot.graph import capture

STRUCTURED = frozenset({"scan", "while", "cond"})
STEPS = {}


def step(make):
    """Registers a maker of (step, arguments)."""
    STEPS[make.__name__] = make
    return make


def arrays(*shapes, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def trained(loss, params, *batch, optimizer=None):
    """One training step of `loss(params, *batch)`, with its arguments."""
    optimizer = optimizer or optax.adamw(1e-3)

    def train_step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return train_step, (params, jax.eval_shape(optimizer.init, params), *batch)


def mlp(params, x):
    return jnp.mean(jnp.square(jax.nn.gelu(x @ params["w"] + params["b"]) @ params["v"]))


def mlp_params():
    w, b, v = arrays((16, 32), (32,), (32, 16))
    return {"w": w, "b": b, "v": v}


@pytest.mark.parametrize("model", ["gpt-125m", "llama-7b"])
@pytest.mark.parametrize("dtype", ["float32", "bf16", "float16"])
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_zoo_is_covered(model, dtype, scan, recompute):
    small = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "ffn_size": 64,
        "vocab_size": 64,
        "seq_len": 16,
    }
    if model == "llama-7b":
        small["num_kv_heads"] = 2
    work = zoo.build(model, 8, overrides=small, dtype=dtype, scan=scan, recompute=recompute)
    assert missing(capture(work.train_step, work.state, work.batch)) == set()


OPTIMIZERS = {
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "clipped_adamw": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)),
    ),
    "adamw_bf16_moments": lambda: optax.adamw(
        optax.linear_schedule(1e-3, 1e-4, 50), mu_dtype=jnp.bfloat16
    ),
    "lamb": lambda: optax.lamb(1e-3),
    "lion": lambda: optax.lion(1e-4),
    "momentum": lambda: optax.sgd(
        optax.piecewise_constant_schedule(0.1, {10: 0.1}), momentum=0.9, nesterov=True
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.sgd(1e-2)}, {"w": "a", "b": "b", "v": "a"}
    ),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-3), every_k_schedule=4),
    "noisy": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.rmsprop(1e-3)),
    "skips_bad_updates": lambda: optax.apply_if_finite(optax.adagrad(1e-2), 3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_covered(name):
    fn, args = trained(mlp, mlp_params(), *arrays((8, 16)), optimizer=OPTIMIZERS[name]())
    assert missing(capture(fn, *args)) == set()


@step
def linen_with_batch_norm_and_dropout():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(8, (3, 3), strides=(2, 2))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
            x = nn.Dropout(0.5, deterministic=False)(nn.Conv(8, (3, 3), feature_group_count=4)(x))
            x = nn.avg_pool(x, (2, 2), (1, 1))
            return nn.Dense(10)(x.reshape(x.shape[0], -1))

    net = Net()
    images, labels = arrays((8, 16, 16, 3))[0], arrays((8,), dtype=jnp.int32)[0]
    variables = jax.eval_shape(
        lambda: net.init(
            {"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.zeros((8, 16, 16, 3))
        )
    )
    state = jax.eval_shape(
        lambda: TrainState.create(
            apply_fn=net.apply, params=variables["params"], tx=optax.adam(1e-3)
        )
    )

    def train_step(state, stats, key, images, labels):
        def loss(params):
            logits, changed = net.apply(
                {"params": params, "batch_stats": stats},
                images,
                rngs={"dropout": key},
                mutable=["batch_stats"],
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), (changed, jnp.mean(jnp.argmax(logits, -1) == labels))

        grads, (changed, accuracy) = jax.grad(loss, has_aux=True)(state.params)
        return (
            state.apply_gradients(grads=grads),
            changed["batch_stats"],
            jax.random.split(key)[0],
            accuracy,
        )

    return train_step, (
        state,
        variables["batch_stats"],
        jax.eval_shape(lambda: jax.random.key(0)),
        images,
        labels,
    )


@step
def nnx_in_place():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.norm = nnx.Linear(16, 32, rngs=rngs), nnx.BatchNorm(32, rngs=rngs)
            self.drop, self.last = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)

        def __call__(self, x):
            return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def train_step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    return train_step, (model, optimizer, *arrays((8, 16), (8, 4)))


@step
def equinox_mlp():
    model = eqx.filter_eval_shape(eqx.nn.MLP, 8, 4, 16, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(params, x, y):
        return jnp.mean(jnp.abs(jax.vmap(eqx.combine(params, static))(x) - y))

    return trained(loss, params, *arrays((8, 8), (8, 4)))


@step
def transposed_and_dilated_convolutions():
    def loss(params, x):
        y = jax.lax.conv_transpose(x, params["k"], (2, 2), "SAME")
        y = jax.image.resize(y, (4, 16, 16, 8), "nearest")
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            y, params["d"], (1, 1), "SAME", rhs_dilation=(2, 2), dimension_numbers=numbers
        )
        return jnp.std(jnp.pad(y, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect"))

    k, d = arrays((3, 3, 3, 8), (3, 3, 8, 8))
    return trained(loss, {"k": k, "d": d}, *arrays((4, 4, 4, 3)))


@step
def mixture_of_experts():
    def loss(params, x, key):
        tokens, experts, capacity = x.shape[0], params["up"].shape[0], 4
        gates = jax.nn.softmax(
            x @ params["router"] + 0.01 * jax.random.normal(key, (tokens, experts))
        )
        weight, chosen = jax.lax.top_k(gates, 2)
        hot = jax.nn.one_hot(chosen, experts, dtype=jnp.int32).reshape(tokens * 2, experts)
        place = (jnp.cumsum(hot, axis=0) * hot).max(-1).reshape(tokens, 2) - 1
        kept = place < capacity
        slots = jnp.where(kept, chosen * capacity + place, experts * capacity)
        packed = jnp.zeros((experts * capacity + 1, x.shape[1])).at[slots[:, 0]].add(x, mode="drop")
        packed = packed.at[slots[:, 1]].add(x)[:-1].reshape(experts, capacity, -1)
        hidden = jax.nn.silu(jnp.einsum("ecd,edf->ecf", packed, params["up"]))
        out = jnp.einsum("ecf,efd->ecd", hidden, params["down"]).reshape(experts * capacity, -1)
        out = jnp.concatenate([out, jnp.zeros((1, x.shape[1]))])[slots]
        y = jnp.einsum("tk,tkd->td", weight * kept, out)
        order = jnp.argsort(chosen[:, 0])
        balance = jnp.bincount(chosen.reshape(-1), length=experts) / tokens
        return (
            jnp.mean(y[order] ** 2)
            + jnp.sum(jnp.mean(gates, 0) * balance)
            + jnp.sort(gates, -1)[:, 0].mean()
        )

    router, up, down = arrays((16, 4), (4, 16, 32), (4, 32, 16))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return trained(loss, {"router": router, "up": up, "down": down}, *arrays((8, 16)), key)


@step
def recurrent_network():
    def loss(params, x, lengths):
        def cell(h, xt):
            z, r = jnp.split(jax.nn.sigmoid(xt @ params["wx"] + h @ params["wh"]), 2, axis=-1)
            h = (1 - z) * h + z * jnp.tanh(r * h)
            return h, h

        _, hs = jax.lax.scan(cell, jnp.zeros((x.shape[0], 16)), jnp.swapaxes(x, 0, 1))
        mask = jnp.arange(x.shape[1])[:, None] < lengths
        return jnp.sum(jnp.where(mask[..., None], hs, 0.0) ** 2) / jnp.sum(mask)

    wx, wh = arrays((8, 32), (16, 32))
    lengths = arrays((4,), dtype=jnp.int32)
    return trained(loss, {"wx": wx, "wh": wh}, *arrays((4, 6, 8)), *lengths)


@step
def tied_embedding_with_masked_loss():
    def loss(params, tokens, labels, mask):
        h = jax.checkpoint(lambda h: jax.nn.relu(h @ params["w"]))(params["table"][tokens])
        log_probs = jax.nn.log_softmax(h @ params["table"].T)
        losses = -jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
        return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1)

    table, w = arrays((32, 16), (16, 16))
    return trained(
        loss, {"table": table, "w": w}, *arrays((4, 8), (4, 8), dtype=jnp.int32), *arrays((4, 8))
    )


@step
def loop_and_branch():
    def loss(params, x, flag):
        y = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5), (0, x))[1]
        y = jax.lax.cond(flag, lambda y: y @ params["w"], lambda y: y, y)
        y = jax.lax.fori_loop(
            0, 3, lambda i, y: jax.lax.dynamic_update_index_in_dim(y, y[i] * 2, i, 0), y
        )
        return jnp.sum(jax.lax.dynamic_slice_in_dim(y, 1, 2, axis=0) ** 2)

    return trained(
        loss, {"w": arrays((8, 8))[0]}, *arrays((4, 8)), jax.ShapeDtypeStruct((), jnp.bool_)
    )


@step
def attention_with_cache_and_positions():
    def generate(params, cache, token, position):
        q, k, v = (jnp.einsum("bd,dhk->bhk", params["table"][token], params[n]) for n in "qkv")
        cache = jax.vmap(
            lambda c, new, at: jax.lax.dynamic_update_slice_in_dim(c, new[None], at, 0)
        )(cache, jnp.concatenate([k, v], -1), position)
        keys, values = jnp.split(cache, 2, axis=-1)
        seen = jnp.arange(cache.shape[1]) <= position[:, None]
        scores = jnp.where(seen[:, None], jnp.einsum("bhk,bshk->bhs", q, keys), -jnp.inf)
        out = jnp.einsum("bhs,bshk->bhk", jax.nn.softmax(scores), values)
        logits = jnp.einsum("bhk,hkv->bv", out, params["head"])
        return (
            cache,
            jax.random.categorical(jax.random.key(0), logits),
            jnp.tril(logits),
            jnp.flip(logits, -1),
        )

    shapes = {"table": (16, 8), "q": (8, 2, 4), "k": (8, 2, 4), "v": (8, 2, 4), "head": (2, 4, 16)}
    params = {name: arrays(shape)[0] for name, shape in shapes.items()}
    return generate, (params, *arrays((4, 6, 2, 8)), *arrays((4,), (4,), dtype=jnp.int32))


@step
def random_numbers():
    def draw(key, old_key):
        keys = jax.random.split(key, 4)
        return [
            jax.random.normal(keys[0], (4,)),
            jax.random.truncated_normal(keys[1], -1.0, 1.0, (4,)),
            jax.random.bernoulli(keys[2], 0.5, (4,)),
            jax.random.randint(keys[3], (4,), 0, 10),
            jax.random.permutation(jax.random.fold_in(key, 1), 8),
            jax.random.gumbel(jax.random.wrap_key_data(old_key), (4,)),
            jax.random.gamma(key, 2.0, (4,)),
            jax.random.key_data(jax.random.clone(key)),
            jax.random.key(3),
        ]

    return draw, (jax.eval_shape(lambda: jax.random.key(0)), *arrays((2,), dtype=jnp.uint32))


@step
def numerical_odds_and_ends():
    def loss(params, x):
        w = params["w"]
        y = (
            jnp.logaddexp(x @ w, 0.0)
            + jnp.clip(x, -1, 1)
            + jnp.prod(w)
            + jnp.cumprod(x, 1)
            + jnp.cumsum(x, 0)
        )
        y = (
            y
            + jax.lax.cummax(x, axis=1)
            + jax.nn.logsumexp(x, axis=1, keepdims=True)
            + jnp.var(x, axis=0)
        )
        y = (
            y * jnp.tri(4, 4)[:, :1]
            + jnp.triu(y)
            + jnp.diag(w)[None]
            + jnp.trace(w)
            + jnp.linalg.norm(w, axis=0)
        )
        y = (
            y
            + jnp.roll(x, 1, axis=1)
            + jnp.repeat(x[:, :2], 2, axis=1)
            + jnp.tile(x[:, :1], (1, 4))
            + x[::-1, ::2][:, :1]
        )
        y = (
            y
            + jnp.median(x)
            + jnp.quantile(x, 0.5, axis=1, keepdims=True)
            + jnp.partition(x, 1, axis=1)
        )
        y = (
            y
            + jnp.where(jnp.any(x > 0, 1, keepdims=True) & jnp.all(x < 9), x, -x)
            + jnp.stack([x, y]).min(0)
        )
        y = (
            y
            + jax.nn.softplus(x)
            + jax.nn.elu(x)
            + jax.nn.gelu(x, approximate=False)
            + jnp.arctan2(x, y)
            + jnp.mod(x, 2)
        )
        y = (
            y
            + jnp.searchsorted(jnp.sort(w[0]), x)
            + jnp.floor(x)
            + jnp.round(x)
            + jnp.sign(x)
            + jnp.power(jnp.abs(x), 1.5)
        )
        y = (
            y
            + jnp.argmin(x, axis=1, keepdims=True)
            + jnp.nan_to_num(x)
            + jnp.isnan(x)
            + jnp.take(x, jnp.array([1, 0, 2, 3]), axis=1)
        )
        return jnp.mean(jax.lax.reduce_precision(y, 8, 7) + jax.lax.stop_gradient(x))

    return trained(loss, {"w": arrays((4, 4))[0]}, *arrays((4, 4)))


@step
def two_gradients():
    def train_step(generator, critic, noise, real):
        def critic_loss(critic, generator):
            return jnp.mean(jax.nn.softplus(noise @ generator @ critic)) - jnp.mean(
                jax.nn.log_sigmoid(real @ critic)
            )

        critic = critic - 0.1 * jax.grad(critic_loss)(critic, generator)
        generator = generator + 0.1 * jax.grad(critic_loss, argnums=1)(critic, generator)
        return generator, critic

    return train_step, arrays((4, 8), (8, 1), (16, 4), (16, 8))


@step
def own_accumulation():
    def train_step(params, batch):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(mlp)(params, x)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g / batch.shape[0], params, total)

    return train_step, (mlp_params(), *arrays((4, 8, 16)))


@step
def opaque_kernels():
    def seen(x):
        return None

    def forward(x):
        jax.debug.print("{}", x.sum())
        jax.debug.callback(seen, x)
        y = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((4, 8), jnp.float32), x)
        return jax.lax.optimization_barrier((y, x))

    return forward, arrays((4, 8))


def missing(graph):
    """Primitives of a graph without a rule."""
    return {op.name for op in graph.ops} - sharding.registered_primitives() - STRUCTURED


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_covered(name):
    fn, args = STEPS[name]()
    graph = capture(fn, *args)
    assert missing(graph) == set()
    for op in graph.ops:
        sharding.dim_rule(op, graph)
