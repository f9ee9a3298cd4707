"""Steps of Equinox, and of what is built on it or beside it: Diffrax, Optimistix, e3nn, Keras."""

from __future__ import annotations

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


def _filtered_step(model: Any, loss_of: Any, make_batch: Any, **more: Any) -> ThirdPartyStep:
    """The arrays of a module are the state; what else it holds is put back inside the step."""
    import equinox as eqx

    arrays, static = eqx.partition(doubled(model), eqx.is_inexact_array)
    tx = optimizer()

    def train_step(state: Any, batch: Any) -> Any:
        arrays, opt, key = state
        key, use = jax.random.split(key)

        @eqx.filter_value_and_grad
        def loss_fn(arrays: Any) -> Any:
            return loss_of(eqx.combine(arrays, static), batch, use)

        loss, grads = loss_fn(arrays)
        updates, opt = tx.update(grads, opt, arrays)
        return (eqx.apply_updates(arrays, updates), opt, key), {"loss": loss}

    state = (arrays, tx.init(arrays), jax.random.key(3))
    return ThirdPartyStep(fn=train_step, state=state, batches=batches(make_batch), **more)


@third_party("equinox")
def equinox_bert() -> ThirdPartyStep:
    """After Equinox's BERT example: one example at a time under `vmap`, with padding masks and a
    pooled first token.
    """
    import equinox as eqx

    class Layer(eqx.Module):
        attention: Any
        norm: Any
        up: Any
        down: Any
        second: Any

        def __init__(self, key: Any) -> None:
            a, b, c = jax.random.split(key, 3)
            self.attention = eqx.nn.MultiheadAttention(_HEADS, _WIDTH, key=a)
            self.up, self.down = eqx.nn.Linear(_WIDTH, 32, key=b), eqx.nn.Linear(32, _WIDTH, key=c)
            self.norm, self.second = eqx.nn.LayerNorm(_WIDTH), eqx.nn.LayerNorm(_WIDTH)

        def __call__(self, x: Any, mask: Any) -> Any:
            square = mask[:, None] * mask[None, :]
            x = jax.vmap(self.norm)(x + self.attention(x, x, x, mask=square > 0))
            return jax.vmap(self.second)(x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x))))

    class Bert(eqx.Module):
        words: Any
        positions: Any
        layers: list[Any]
        pooler: Any
        classifier: Any

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 6)
            self.words = eqx.nn.Embedding(_VOCABULARY, _WIDTH, key=keys[0])
            self.positions = eqx.nn.Embedding(_LENGTH, _WIDTH, key=keys[1])
            self.layers = [Layer(key) for key in keys[2:4]]
            self.pooler = eqx.nn.Linear(_WIDTH, _WIDTH, key=keys[4])
            self.classifier = eqx.nn.Linear(_WIDTH, 2, key=keys[5])

        def __call__(self, tokens: Any, mask: Any) -> Any:
            x = jax.vmap(self.words)(tokens) + jax.vmap(self.positions)(jnp.arange(tokens.shape[0]))
            for layer in self.layers:
                x = layer(x, mask)
            return self.classifier(jnp.tanh(self.pooler(x[0])))

    def make_batch(seed: int) -> Any:
        mask = (normal(seed, ROWS, _LENGTH) > -1).astype("int32")
        mask[:, 0] = 1
        return {
            "tokens": integers(seed, _VOCABULARY, ROWS, _LENGTH),
            "mask": mask,
            "label": integers(seed, 2, ROWS),
        }

    def loss(model: Any, batch: Any, key: Any) -> Any:
        return cross_entropy(jax.vmap(model)(batch["tokens"], batch["mask"]), batch["label"])

    return _filtered_step(Bert(jax.random.key(0)), loss, make_batch, layers=True)


@third_party("equinox")
def equinox_diffusion() -> ThirdPartyStep:
    """After Equinox's score-based diffusion: an MLP-Mixer over patches, times and noise drawn for
    each example.
    """
    import equinox as eqx

    class Mixer(eqx.Module):
        patches: Any
        across: Any
        within: Any
        norm: Any
        back: Any

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 4)
            self.patches = eqx.nn.Conv2d(2, 8, 2, stride=2, key=keys[0])
            self.across = eqx.nn.MLP(16, 16, 24, 1, key=keys[1])
            self.within = eqx.nn.MLP(8, 8, 24, 1, key=keys[2])
            self.norm = eqx.nn.LayerNorm((8, 16))
            self.back = eqx.nn.ConvTranspose2d(8, 1, 2, stride=2, key=keys[3])

        def __call__(self, time: Any, y: Any) -> Any:
            y = jnp.concatenate([y, jnp.broadcast_to(time / 10, y.shape)])
            y = self.patches(y)
            channels, height, width = y.shape
            y = y.reshape(channels, height * width)
            y = y + jax.vmap(self.across)(self.norm(y))
            y = y + jax.vmap(self.within)(y.T).T
            return self.back(y.reshape(channels, height, width))

    def single(model: Any, y: Any, time: Any, noise: Any) -> Any:
        std = jnp.sqrt(jnp.maximum(1 - jnp.exp(-time), 1e-5))
        found = model(time, y * jnp.exp(-0.5 * time) + std * noise)
        return (1 - jnp.exp(-time)) * jnp.mean((found + noise / std) ** 2)

    def loss(model: Any, batch: Any, key: Any) -> Any:
        rows = batch["y"].shape[0]
        first, second = jax.random.split(key)
        times = jax.random.uniform(first, (rows,), minval=0, maxval=10 / rows) + (
            10 / rows
        ) * jnp.arange(rows)
        noise = jax.random.normal(second, batch["y"].shape)
        return jnp.mean(jax.vmap(single, in_axes=(None, 0, 0, 0))(model, batch["y"], times, noise))

    return _filtered_step(
        Mixer(jax.random.key(0)), loss, lambda seed: {"y": normal(seed, ROWS, 1, 8, 8)}
    )


@third_party("equinox")
def equinox_rnn() -> ThirdPartyStep:
    import equinox as eqx

    class Net(eqx.Module):
        cell: Any
        head: Any

        def __init__(self, key: Any) -> None:
            a, b = jax.random.split(key)
            self.cell, self.head = eqx.nn.GRUCell(3, _WIDTH, key=a), eqx.nn.Linear(_WIDTH, 1, key=b)

        def __call__(self, x: Any) -> Any:
            last, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(_WIDTH), x)
            return jax.nn.sigmoid(self.head(last))[0]

    def loss(model: Any, batch: Any, key: Any) -> Any:
        found = jax.vmap(model)(batch["x"])
        return -jnp.mean(batch["y"] * jnp.log(found) + (1 - batch["y"]) * jnp.log(1 - found))

    def make_batch(seed: int) -> Any:
        return {"x": normal(seed, ROWS, 8, 3), "y": 1.0 * integers(seed, 2, ROWS)}

    return _filtered_step(Net(jax.random.key(0)), loss, make_batch)


def _field() -> Any:
    import equinox as eqx

    return eqx.nn.MLP(2, 2, 16, 1, activation=jax.nn.softplus, key=jax.random.key(0))


def _trajectories(seed: int) -> dict[str, Any]:
    return {"start": normal(seed, ROWS, 2), "path": normal(seed + 3, ROWS, 5, 2)}


def _neural_ode(adjoint: Any, controller: Any) -> ThirdPartyStep:
    import diffrax

    def loss(model: Any, batch: Any, key: Any) -> Any:
        def solve(start: Any) -> Any:
            return diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, model: model(y)),
                diffrax.Tsit5(),
                t0=0.0,
                t1=1.0,
                dt0=0.1,
                y0=start,
                args=model,
                stepsize_controller=controller,
                saveat=diffrax.SaveAt(ts=jnp.linspace(0.0, 1.0, 5)),
                adjoint=adjoint,
                max_steps=64,
            ).ys

        return jnp.mean((jax.vmap(solve)(batch["start"]) - batch["path"]) ** 2)

    return _filtered_step(_field(), loss, _trajectories)


@third_party("equinox", "diffrax")
def diffrax_neural_ode() -> ThirdPartyStep:
    """Steps of adaptive size, gradients through checkpoints."""
    import diffrax

    return _neural_ode(
        diffrax.RecursiveCheckpointAdjoint(), diffrax.PIDController(rtol=1e-3, atol=1e-6)
    )


@third_party("equinox", "diffrax")
def diffrax_backsolve() -> ThirdPartyStep:
    """Steps of one size, gradients from an equation solved backwards."""
    import diffrax

    return _neural_ode(diffrax.BacksolveAdjoint(), diffrax.ConstantStepSize())


@third_party("equinox", "diffrax")
def diffrax_stochastic() -> ThirdPartyStep:
    """A neural stochastic differential equation, a Brownian path for each example."""
    import diffrax

    def loss(model: Any, batch: Any, key: Any) -> Any:
        def solve(start: Any, key: Any) -> Any:
            path = diffrax.VirtualBrownianTree(0.0, 1.0, tol=0.05, shape=(2,), key=key)
            terms = diffrax.MultiTerm(
                diffrax.ODETerm(lambda t, y, args: model(y)),
                diffrax.ControlTerm(lambda t, y, args: 0.1 * jnp.diag(jnp.tanh(y)), path),
            )
            found = diffrax.diffeqsolve(terms, diffrax.Euler(), 0.0, 1.0, 0.1, start, max_steps=16)
            return found.ys[-1]

        keys = jax.vmap(jax.random.wrap_key_data)(batch["keys"])
        return jnp.mean((jax.vmap(solve)(batch["start"], keys) - batch["path"][:, -1]) ** 2)

    def make_batch(seed: int) -> Any:
        return {**_trajectories(seed), "keys": integers(seed, 2**30, ROWS, 2).astype("uint32")}

    return _filtered_step(_field(), loss, make_batch)


@third_party("equinox", "optimistix")
def optimistix_fixed_point() -> ThirdPartyStep:
    """A deep equilibrium layer: the fixed point of a network, with implicit gradients."""
    import optimistix as optx

    def loss(model: Any, batch: Any, key: Any) -> Any:
        def solve(x: Any) -> Any:
            solver = optx.FixedPointIteration(rtol=1e-10, atol=1e-10)
            return optx.fixed_point(
                lambda y, x: 0.3 * jnp.tanh(model(y)) + x, solver, x, args=x, max_steps=100
            ).value

        return jnp.mean((jax.vmap(solve)(batch["start"]) - batch["path"][:, 0]) ** 2)

    return _filtered_step(_field(), loss, _trajectories)


@third_party("equinox", "optimistix")
def optimistix_least_squares() -> ThirdPartyStep:
    """A small fit by Levenberg-Marquardt for each example, inside the loss."""
    import optimistix as optx

    def loss(model: Any, batch: Any, key: Any) -> Any:
        times = jnp.linspace(0.0, 1.0, 5)

        def fit(start: Any, path: Any) -> Any:
            def residual(y: Any, args: Any) -> Any:
                return y[0] * jnp.exp(-times * jax.nn.softplus(y[1])) - path[:, 0]

            solver = optx.LevenbergMarquardt(rtol=1e-8, atol=1e-8)
            return optx.least_squares(
                residual, solver, model(start), max_steps=64, throw=False
            ).value

        return jnp.mean(jax.vmap(fit)(batch["start"], batch["path"]) ** 2)

    # Iterations stop at a tolerance of their own.
    return _filtered_step(_field(), loss, _trajectories, tolerance=1e-6)


@third_party("keras")
def keras_classifier() -> ThirdPartyStep:
    """`stateless_call` and `stateless_apply`, as in Keras' guide to custom training loops in
    JAX.
    """
    import keras

    if keras.backend.backend() != "jax":
        raise ImportError("Keras runs on another backend; set KERAS_BACKEND=jax")
    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(24, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    tx = keras.optimizers.Adam(1e-2, epsilon=1e-3)
    tx.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def compute_loss(trainable: Any, fixed: Any, x: Any, y: Any) -> Any:
        logits, fixed = model.stateless_call(trainable, fixed, x, training=True)
        return loss_of(y, logits), fixed

    def train_step(state: Any, batch: Any) -> Any:
        trainable, fixed, opt = state
        x, y = batch
        (loss, fixed), grads = jax.value_and_grad(compute_loss, has_aux=True)(
            trainable, fixed, x, y
        )
        trainable, opt = tx.stateless_apply(opt, grads, trainable)
        return (trainable, fixed, opt), {"loss": loss}

    def values(variables: Any) -> list[Any]:
        return [v.value for v in variables]

    state = (
        values(model.trainable_variables),
        values(model.non_trainable_variables),
        values(tx.variables),
    )
    made = batches(lambda seed: (normal(seed, ROWS, 8, 8, 1), integers(seed, 10, ROWS)))
    # The loss is computed in single precision.
    return ThirdPartyStep(fn=train_step, state=state, batches=made)


@third_party("haiku", "e3nn_jax")
def e3nn_points() -> ThirdPartyStep:
    """Clouds of points, each with messages along its edges, equivariant under rotation."""
    import e3nn_jax as e3nn
    import haiku as hk

    @hk.without_apply_rng
    @hk.transform
    def net(positions: Any) -> Any:
        count = positions.shape[0]
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        senders, receivers = jnp.array(pairs).T
        edges = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
        shapes = e3nn.spherical_harmonics("0e + 1o + 2e", edges, normalize=True)
        features = e3nn.haiku.Linear("4x0e + 4x1o")(shapes)
        features = e3nn.scatter_sum(features, dst=receivers, output_size=count)
        features = e3nn.gate(e3nn.haiku.Linear("8x0e + 4x1o")(features))
        product = e3nn.tensor_product(features, features, filter_ir_out=["0e", "1o"])
        return e3nn.haiku.Linear("3x0e")(product).array.mean(0)

    def make_batch(seed: int) -> Any:
        return {"positions": normal(seed, ROWS, 4, 3), "label": integers(seed, 3, ROWS)}

    params, tx = doubled(net.init(jax.random.key(0), make_batch(0)["positions"][0])), optimizer()

    def train_step(state: Any, batch: Any) -> Any:
        params, opt = state

        def loss_fn(params: Any) -> Any:
            logits = jax.vmap(net.apply, in_axes=(None, 0))(params, batch["positions"])
            return cross_entropy(logits, batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt)
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    return ThirdPartyStep(
        fn=train_step, state=(params, tx.init(params)), batches=batches(make_batch)
    )
