"""Optax chains, among them factored, frozen and masked ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from graph.step_base import Step, batch, mlp_params, mse, optax_step, step

PLAIN = {"parameter": 4, "batch": 2}


def _step(tx, optimizer_leaves: int, **extra) -> Step:
    fn, params, opt_state = optax_step(tx)
    roles = PLAIN | ({"optimizer_state": optimizer_leaves} if optimizer_leaves else {})
    results = 5 + optimizer_leaves
    args = (params, opt_state, batch())
    return Step(fn=fn, args=args, roles=roles, results=results, **({"gradients": 4} | extra))


@step
def optax_clip_adamw_schedule() -> Step:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 10)
    # Moments of four leaves twice, the count of Adam and that of the schedule.
    return _step(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule)), 10)


@step
def optax_adafactor() -> Step:
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    return _step(tx, len(jax.tree.leaves(tx.init(mlp_params()))))


@step
def optax_lion() -> Step:
    return _step(optax.lion(1e-3), 5)


@step
def optax_momentum() -> Step:
    return _step(optax.sgd(1e-2, momentum=0.9, nesterov=True), 4)


@step
def optax_lamb() -> Step:
    return _step(optax.lamb(1e-2), 9)


@step
def optax_apply_if_finite() -> Step:
    tx = optax.apply_if_finite(optax.adam(1e-2), 3)
    return _step(tx, len(jax.tree.leaves(tx.init(mlp_params()))))


@step
def optax_multi_steps() -> Step:
    tx = optax.MultiSteps(optax.adam(1e-2), 2)
    return _step(tx, len(jax.tree.leaves(tx.init(mlp_params()))))


@step
def optax_multi_transform_frozen() -> Step:
    def labels(params):
        return {
            "in": jax.tree.map(lambda _: "frozen", params["in"]),
            "out": jax.tree.map(lambda _: "adam", params["out"]),
        }

    tx = optax.multi_transform({"adam": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labels)
    return _step(tx, 5, gradients=None)


@step
def optax_mixed_rates() -> Step:
    def labels(params):
        return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "vector", params)

    tx = optax.multi_transform({"matrix": optax.adam(1e-2), "vector": optax.sgd(1e-2)}, labels)
    return _step(tx, 5)


@step
def optax_schedule_in_loss() -> Step:
    """The optimizer's own count decides how the loss is weighted."""
    tx = optax.adam(1e-2)

    def train_step(params, opt_state, batch):
        weight = jnp.minimum(1.0, (opt_state[0].count + 1) / 10)
        loss, grads = jax.value_and_grad(lambda p: weight * mse(p, batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = mlp_params()
    roles = PLAIN | {"optimizer_state": 8, "state": 1}
    return Step(
        fn=train_step, args=(params, tx.init(params), batch()), roles=roles, gradients=4, results=14
    )
