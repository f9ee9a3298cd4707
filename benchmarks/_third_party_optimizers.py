"""Steps of NumPyro, Distrax and optax: variational inference, reinforcement learning, optimizers
with more state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _third_party import (
    ROWS,
    ThirdPartyStep,
    batches,
    doubled,
    integers,
    normal,
    optimizer,
    perceptron,
    plain_layers,
    third_party,
)


def _regression(seed: int) -> dict[str, Any]:
    return {"x": normal(seed, ROWS, 5), "y": normal(seed + 5, ROWS)}


def _svi_step(model: Any, guide: Any) -> ThirdPartyStep:
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.optim import optax_to_numpyro

    svi = SVI(model, guide, optax_to_numpyro(optimizer()), Trace_ELBO())
    example = _regression(0)
    state = svi.init(jax.random.PRNGKey(0), example["x"], example["y"])

    def train_step(state: Any, batch: Any) -> Any:
        state, loss = svi.update(state, batch["x"], batch["y"])
        return state, {"loss": loss}

    return ThirdPartyStep(fn=train_step, state=state, batches=batches(_regression))


@third_party("numpyro")
def numpyro_logistic() -> ThirdPartyStep:
    """Logistic regression with a normal guide."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.autoguide import AutoNormal

    def model(x: Any, y: Any) -> None:
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        with numpyro.plate("examples", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=(y > 0).astype(int))

    return _svi_step(model, AutoNormal(model))


@third_party("numpyro")
def numpyro_bayesian_network() -> ThirdPartyStep:
    """A small network with weights drawn from a guide of full covariance."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.autoguide import AutoMultivariateNormal

    def model(x: Any, y: Any) -> None:
        first = numpyro.sample("first", dist.Normal(0, 1).expand([x.shape[1], 4]).to_event(2))
        second = numpyro.sample("second", dist.Normal(0, 1).expand([4]).to_event(1))
        scale = numpyro.sample("scale", dist.Exponential(1.0))
        with numpyro.plate("examples", x.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.tanh(x @ first) @ second, scale + 0.1), obs=y)

    return _svi_step(model, AutoMultivariateNormal(model))


@third_party("distrax")
def distrax_ppo() -> ThirdPartyStep:
    """Proximal policy optimization: clipped ratios, clipped values, entropy; advantages come with
    the batch.
    """
    import distrax

    params = {"policy": plain_layers([4, 16, 3]), "value": plain_layers([4, 16, 1])}
    tx = optax.chain(optax.clip_by_global_norm(0.5), optimizer())

    def loss_fn(params: Any, batch: Any) -> Any:
        policy = distrax.Categorical(logits=perceptron(params["policy"], batch["observation"]))
        value = perceptron(params["value"], batch["observation"])[:, 0]
        ratio = jnp.exp(policy.log_prob(batch["action"]) - batch["log_prob"])
        clipped = jnp.clip(ratio, 0.8, 1.2)
        actor = -jnp.minimum(ratio * batch["advantage"], clipped * batch["advantage"]).mean()
        near = batch["value"] + jnp.clip(value - batch["value"], -0.2, 0.2)
        errors = jnp.maximum((value - batch["return"]) ** 2, (near - batch["return"]) ** 2)
        entropy = policy.entropy().mean()
        return actor + 0.25 * errors.mean() - 0.01 * entropy, {"entropy": entropy, "actor": actor}

    def train_step(state: Any, batch: Any) -> Any:
        params, opt = state
        (loss, parts), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, opt = tx.update(grads, opt)
        return (optax.apply_updates(params, updates), opt), {"loss": loss, **parts}

    def make_batch(seed: int) -> Any:
        return {
            "observation": normal(seed, ROWS, 4),
            "action": integers(seed, 3, ROWS),
            "log_prob": -1 + 0.1 * normal(seed + 1, ROWS),
            "advantage": normal(seed + 2, ROWS),
            "value": normal(seed + 3, ROWS),
            "return": normal(seed + 4, ROWS),
        }

    return ThirdPartyStep(
        fn=train_step, state=(params, tx.init(params)), batches=batches(make_batch)
    )


def _optax_step(tx: Any, **more: Any) -> ThirdPartyStep:
    def train_step(state: Any, batch: Any) -> Any:
        params, opt = state

        def loss_fn(params: Any) -> Any:
            return jnp.mean((perceptron(params, batch["x"])[:, 0] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(
            grads, opt, params, **{k: v(loss, loss_fn, grads) for k, v in extra.items()}
        )
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    extra: dict[str, Callable[..., Any]] = more.pop("extra", {})
    params = plain_layers([5, 16, 16, 1])
    return ThirdPartyStep(
        fn=train_step, state=(params, tx.init(params)), batches=batches(_regression), **more
    )


_CONTRIB: dict[str, Callable[[Any], ThirdPartyStep]] = {
    "muon": lambda c: _optax_step(c.muon(1e-2), tolerance=1e-7),
    "schedule_free": lambda c: _optax_step(c.schedule_free_adamw(1e-2, eps=1e-3)),
    "prodigy": lambda c: _optax_step(c.prodigy(1.0, eps=1e-3)),
    "dadapt_adamw": lambda c: _optax_step(c.dadapt_adamw(1.0, eps=1e-3)),
    "sam": lambda c: _optax_step(
        c.sam(optax.sgd(0.1), optax.chain(c.normalize(), optax.sgd(0.05)), sync_period=2)
    ),
    "mechanic": lambda c: _optax_step(c.mechanize(optax.sgd(0.1))),
    "ademamix": lambda c: _optax_step(c.ademamix(1e-2, eps=1e-3)),
    "dog": lambda c: _optax_step(c.dog(1.0)),
    "momo": lambda c: _optax_step(c.momo(), extra={"value": lambda loss, fn, grads: loss}),
    "reduce_on_plateau": lambda c: _optax_step(
        optax.chain(optax.sgd(0.1), c.reduce_on_plateau(patience=1)),
        extra={"value": lambda loss, fn, grads: loss},
    ),
    "galore": lambda c: _optax_step(c.galore(1e-2, rank=2), tolerance=1e-6),
}


def _contrib(name: str) -> Callable[[], ThirdPartyStep]:
    def make() -> ThirdPartyStep:
        from optax import contrib

        return _CONTRIB[name](contrib)

    make.__name__ = f"optax_{name}"
    return make


for _name in _CONTRIB:
    third_party("optax")(_contrib(_name))


@third_party("optax")
def optax_accumulated() -> ThirdPartyStep:
    """Gradients of two calls become one update."""
    return _optax_step(optax.MultiSteps(optimizer(), every_k_schedule=2))


@third_party("optax")
def optax_line_search() -> ThirdPartyStep:
    """A line search calls the loss until it has fallen enough."""
    tx = optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)
    )
    extra = {
        "value": lambda loss, fn, grads: loss,
        "grad": lambda loss, fn, grads: grads,
        "value_fn": lambda loss, fn, grads: fn,
    }
    return _optax_step(tx, extra=extra)


@third_party("optax")
def optax_private() -> ThirdPartyStep:
    """Gradients of each example clipped, with noise on their sum."""
    from optax import contrib

    tx = contrib.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=0.1, seed=0)

    def train_step(state: Any, batch: Any) -> Any:
        params, opt = state

        def loss_fn(params: Any, x: Any, y: Any) -> Any:
            return (perceptron(params, x)[0] - y) ** 2

        losses, grads = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0, 0))(
            params, batch["x"], batch["y"]
        )
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": losses.mean()}

    params = plain_layers([5, 16, 1])
    return ThirdPartyStep(
        fn=train_step, state=(params, tx.init(params)), batches=batches(_regression)
    )


@third_party("optax")
def optax_lookahead() -> ThirdPartyStep:
    """Fast and slow weights."""
    tx = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)

    def train_step(state: Any, batch: Any) -> Any:
        params, opt = state

        def loss_fn(params: Any) -> Any:
            return jnp.mean((perceptron(params, batch["x"])[:, 0] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params.fast)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    params = optax.LookaheadParams.init_synced(doubled(plain_layers([5, 16, 1])))
    return ThirdPartyStep(
        fn=train_step, state=(params, tx.init(params)), batches=batches(_regression)
    )
