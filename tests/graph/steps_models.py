"""Models of other families: experts on sorted tokens, linear algebra for each example, layers in
frequency space; and steps with what was written for other ways to run them.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from graph.step_base import ROWS, WIDTH, Step, batch, sgd, step


def _train(loss_fn, params, data, *, roles) -> Step:
    def train_step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return sgd(params, grads), loss

    return Step(fn=train_step, args=(params, data), roles=roles, results=len(params) + 1)


@step
def experts_on_sorted_tokens() -> Step:
    """Dropless experts: tokens are sorted by the expert that the router chose, and meet its matrix
    in a ragged product.
    """
    experts = 4

    def loss_fn(params, batch):
        gates = jax.nn.softmax(batch["x"] @ params["router"])
        weight, chosen = jax.lax.top_k(gates, 2)
        order = jnp.argsort(chosen.reshape(-1))
        tokens = jnp.repeat(batch["x"], 2, axis=0)[order]
        sizes = jnp.bincount(chosen.reshape(-1), length=experts)
        hidden = jax.nn.silu(jax.lax.ragged_dot(tokens, params["up"], sizes))
        out = jax.lax.ragged_dot(hidden, params["down"], sizes)[jnp.argsort(order)]
        return jnp.mean((out.reshape(-1, 2, WIDTH) * weight[..., None]).sum(1) ** 2)

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "router": jax.random.normal(keys[0], (WIDTH, experts)),
        "up": jax.random.normal(keys[1], (experts, WIDTH, 8)),
        "down": jax.random.normal(keys[2], (experts, 8, WIDTH)),
    }
    return _train(loss_fn, params, {"x": batch()["x"]}, roles={"parameter": 3, "batch": 1})


@step
def linear_algebra_for_each_example() -> Step:
    """A Gaussian process for each example: factors, solutions and determinants of small
    matrices.
    """

    def loss_fn(params, batch):
        points = (batch["x"] @ params["w"]).reshape(-1, 4, 3)
        near = jnp.exp(-((points[:, :, None] - points[:, None]) ** 2).sum(-1)) + 0.3 * jnp.eye(4)
        lower = jnp.linalg.cholesky(near)
        fit = jax.scipy.linalg.cho_solve((lower, True), points[..., :1])
        direct = jnp.linalg.solve(near + points[..., :1] * 0.1, points[..., 1:])
        frame, _ = jnp.linalg.qr(near)
        shape = (
            jnp.linalg.eigvalsh(near).sum()
            + jnp.linalg.slogdet(near)[1].sum()
            + (frame[..., 0] ** 3).sum()
        )
        return jnp.mean(fit**2) + jnp.mean(direct**2) + shape / batch["x"].shape[0]

    params = {"w": jax.random.normal(jax.random.key(0), (WIDTH, 12)) / 2}
    return _train(loss_fn, params, {"x": batch()["x"]}, roles={"parameter": 1, "batch": 1})


@step
def layers_in_frequency_space() -> Step:
    def loss_fn(params, batch):
        x = batch["x"]
        mixed = jnp.fft.fft2(x).real
        waves = jnp.fft.rfft(x + mixed, axis=1) * (params["gain"] + 1j * params["turn"])
        return jnp.mean(jnp.tanh(jnp.fft.irfft(waves, n=x.shape[1], axis=1)) ** 2)

    x = jax.random.normal(jax.random.key(0), (ROWS, 8, WIDTH))
    params = {"gain": jnp.ones((5, WIDTH)), "turn": jnp.ones((5, WIDTH)) / 2}
    return _train(loss_fn, params, {"x": x}, roles={"parameter": 2, "batch": 1})


@step
def equinox_batch_norm_and_error() -> Step:
    """Statistics by a collective over the examples of a `vmap`, and a check of the inputs as the
    step runs.
    """
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(WIDTH, "batch", mode="ema")
    linear = eqx.nn.Linear(WIDTH, 3, key=jax.random.key(0))

    def train_step(model, state, batch):
        def loss_fn(model, state):
            norm, linear = model
            x = eqx.error_if(batch["x"], jnp.isnan(batch["x"]).any(), "an input is not a number")
            normed, state = jax.vmap(
                norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
            )(x, state)
            return jnp.mean((jax.vmap(linear)(normed) - batch["y"]) ** 2), state

        (loss, state), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, state)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), state, loss

    # Whether it is the first step, the running mean and variance.
    roles = {"parameter": 4, "state": 3, "batch": 2}
    return Step(fn=train_step, args=((norm, linear), state, batch()), roles=roles, results=8)


@step
def placed_by_hand() -> Step:
    """A step written for a mesh of its own, on which it says where its arrays are."""
    rows = jax.NamedSharding(
        jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P("rows")
    )

    def loss_fn(params, batch):
        hidden = jnp.tanh(jax.lax.with_sharding_constraint(batch["x"], rows) @ params["w"])
        return jnp.mean(jax.lax.with_sharding_constraint(hidden, rows) ** 2)

    params = {"w": jax.random.normal(jax.random.key(0), (WIDTH, 4))}
    return _train(loss_fn, params, {"x": batch()["x"]}, roles={"parameter": 1, "batch": 1})


@step
def complex_parameters() -> Step:
    """A linear recurrence with complex weights, which go down the conjugate of what JAX calls their
    gradient.
    """

    def loss_fn(params, batch):
        hidden = batch["x"] @ params["into"]
        _, states = jax.lax.associative_scan(
            lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (0.5j + 0 * hidden, hidden)
        )
        return jnp.mean(jnp.abs(states @ params["out"]) ** 2)

    def train_step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g.conj(), params, grads), loss

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "into": jax.random.normal(keys[0], (WIDTH, 8), jnp.complex64),
        "out": jax.random.normal(keys[1], (8, 3), jnp.complex64),
    }
    x = jax.random.normal(keys[2], (ROWS, 5, WIDTH))
    return Step(
        fn=train_step,
        args=(params, {"x": x}),
        roles={"parameter": 2, "batch": 1},
        gradients=2,
        results=3,
    )


@step
def gradient_of_one_array() -> Step:
    """Nothing but the order of its arguments tells the batch."""

    def gradient(weights, x):
        return jax.grad(lambda w, x: jnp.tanh(x @ w).sum())(weights, x)

    args = (jax.random.normal(jax.random.key(0), (WIDTH, 4)), batch()["x"])
    roles = {"parameter": 1, "batch": 1}
    return Step(fn=gradient, args=args, roles=roles, results=1, stateless=("weights",))


@step
def quantized_base() -> Step:
    """Adapters are trained over frozen weights of eight bits."""

    def loss_fn(lora, base, tokens):
        def layer(x, weights):
            frozen, own = weights
            kernel = frozen["q"].astype(jnp.float32) * frozen["scale"]
            return x + jnp.tanh(x @ kernel + (x @ own["a"]) @ own["b"]), None

        x = base["table"][tokens].astype(jnp.float32) / 127
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, (base["layers"], lora))
        return jnp.square(x).mean()

    def train_step(lora, base, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(lora, base, tokens)
        return jax.tree.map(lambda w, g: w - 0.1 * g, lora, grads), loss

    keys = jax.random.split(jax.random.key(0), 5)
    lora = {
        "a": jax.random.normal(keys[0], (2, WIDTH, 4)),
        "b": jax.random.normal(keys[1], (2, 4, WIDTH)),
    }
    base = {
        "table": jax.random.randint(keys[2], (24, WIDTH), -127, 128, jnp.int8),
        "layers": {
            "q": jax.random.randint(keys[3], (2, WIDTH, WIDTH), -127, 128, jnp.int8),
            "scale": jnp.full((2, WIDTH), 1e-3),
        },
    }
    tokens = jax.random.randint(keys[4], (ROWS, 5), 0, 24)
    return Step(
        fn=train_step,
        args=(lora, base, tokens),
        roles={"parameter": 5, "batch": 1},
        gradients=2,
        results=3,
        stateless=("base.table", "base.layers.q", "base.layers.scale"),
    )
