"""Models of other families: experts on sorted tokens, linear algebra for each example, layers in frequency space."""

from __future__ import annotations

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
    """Dropless experts: tokens are sorted by the expert that the router chose, and meet its matrix in a ragged product."""
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
    """A Gaussian process for each example: factors, solutions and determinants of small matrices."""

    def loss_fn(params, batch):
        points = (batch["x"] @ params["w"]).reshape(-1, 4, 3)
        near = jnp.exp(-((points[:, :, None] - points[:, None]) ** 2).sum(-1)) + 0.3 * jnp.eye(4)
        lower = jnp.linalg.cholesky(near)
        fit = jax.scipy.linalg.cho_solve((lower, True), points[..., :1])
        direct = jnp.linalg.solve(near + points[..., :1] * 0.1, points[..., 1:])
        frame, _ = jnp.linalg.qr(near)
        shape = jnp.linalg.eigvalsh(near).sum() + jnp.linalg.slogdet(near)[1].sum() + (frame[..., 0] ** 3).sum()
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
