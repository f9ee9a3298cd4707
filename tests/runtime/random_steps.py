"""Random training steps with arguments: forward pass, loss, update, state and metrics drawn from a
seed.

A forward pass is a chain of operators of `random_base`. The state holds what people keep in it:
parameters, moments, a count, a key, arrays of size zero, None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from runtime import random_arithmetic, random_control, random_moves
from runtime.random_base import MIXING, OPERATORS, ROUNDING, Apply, Draw, Inputs

# Importing them fills the table of operators.
_KINDS = (random_arithmetic, random_moves, random_control)
_TOKENS = 7
_LARGEST = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomStep:
    """A step `(state, batch) -> (state, metrics)` with arguments.

    Attributes:
        text: what it does.
        mixes: the loss is no sum over examples, or could be none: micro-batches may be refused.
        tolerance: how far outputs may be off, relative to the largest magnitude of each.
        loss: name of the loss.
        independent: the step on so many independent micro-batches, as they are defined; with
            `sums`, its loss and gradients are sums.
    """

    fn: Callable[..., Any]
    state: dict[str, Any]
    batches: tuple[dict[str, Any], ...]
    text: str
    mixes: bool
    tolerance: float
    loss: str
    independent: Callable[[int, bool], Callable[..., Any]]

    @property
    def num_rows(self) -> int:
        """Examples in a batch."""
        return len(self.batches[0]["tokens"])


def random_step(seed: int, num_batches: int = 2) -> RandomStep:
    """The step of a seed, in float64."""
    rng = np.random.default_rng(seed)
    shape = _input_shape(rng)
    draw = Draw(rng=rng, shape=shape, tokens=_TOKENS)
    chain = _chain(draw, int(rng.integers(2, 7)), mixes=rng.random() < 0.15)
    if not draw.params:
        chain.append(("bias", OPERATORS["bias"](draw)))
    loss, loss_name = _loss(draw)
    update = str(draw.pick("sgd", "sgd", "momentum", "adam", "clip", "if_finite", "average"))
    metrics = tuple(
        str(name) for name in rng.permutation(list(_METRICS))[: int(rng.integers(0, 4))]
    )
    donates = rng.random() < 0.5
    names = [name for name, _ in chain]
    params = {name: _array(rng, size) for name, size in draw.params.items()}
    passes = [fn for _, fn in chain], loss, update, metrics
    step = _step(*passes)
    return RandomStep(
        fn=jax.jit(step, donate_argnums=0) if donates else step,
        state=_state(params, update, seed),
        batches=tuple(_batch(rng, shape) for _ in range(num_batches)),
        text=(
            f"seed {seed}: {' '.join(names)} | {loss_name}, {update}, {metrics}, donates={donates}"
            f" | {shape} {draw.params}"
        ),
        mixes=loss_name in _MIXING_LOSSES or bool(MIXING.intersection(names)),
        tolerance=max([1e-9, *(ROUNDING.get(name, 0.0) for name in names)]),
        loss=loss_name,
        independent=lambda count, sums: _independent(*passes, count, sums),
    )


def _input_shape(rng: np.random.Generator) -> tuple[int, ...]:
    rows = int(rng.choice([2, 3, 4, 6, 8, 16], p=[0.04, 0.04, 0.06, 0.06, 0.5, 0.3]))
    sizes = [
        int(k)
        for k in rng.choice(
            [0, 1, 2, 3, 4, 5, 7, 8], int(rng.integers(0, 3)), p=[0.03, *[0.97 / 7] * 7]
        )
    ]
    return (rows, *sizes)


def _chain(draw: Draw, length: int, *, mixes: bool) -> list[tuple[str, Apply]]:
    names = [name for name in OPERATORS if mixes or name not in MIXING]
    weights = np.array([6.0 if name in MIXING else 1.0 for name in names])
    chain: list[tuple[str, Apply]] = []
    while len(chain) < length:
        name = str(draw.rng.choice(names, p=weights / weights.sum() if mixes else None))
        if name in ROUNDING and draw.rng.random() < 0.6:
            continue
        before = dict(draw.params)
        fn = OPERATORS[name](draw)
        after = _shape_after(fn, draw) if fn else None
        if after is None or math.prod(after) > _LARGEST:
            draw.params = before
            continue
        chain.append((name, fn))  # type: ignore[arg-type]
        draw.shape = after
    return chain


def _shape_after(fn: Apply, draw: Draw) -> tuple[int, ...]:
    def struct(shape: tuple[int, ...], dtype: Any = jnp.float64) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    given = (
        {name: struct(shape) for name, shape in draw.params.items()},
        {"tokens": struct(draw.shape[:1], jnp.int32), "mask": struct(draw.shape[:1], jnp.bool_)},
        struct((), jnp.int32),
        struct((2,), jnp.uint32),
    )
    return tuple(
        jax.eval_shape(lambda h, *args: fn(h, _inputs(*args)), struct(draw.shape), *given).shape
    )


def _inputs(params: Any, batch: Any, count: Any, key: Any) -> Inputs:
    return Inputs(params=params, batch=batch, count=count, key=key)


_MIXING_LOSSES = {"masked mean", "root", "longest"}


def _loss(draw: Draw) -> tuple[Callable[..., Any], str]:
    losses: dict[str, Callable[..., Any]] = {
        "mean": lambda h, batch: jnp.mean(jnp.square(h)) if h.size else jnp.sum(h),
        "sum": lambda h, batch: jnp.sum(jnp.tanh(h)),
        "by hand": lambda h, batch: jnp.sum(h * h) / h.shape[0],
        "weighted": lambda h, batch: jnp.mean(_per_row(h) * batch["mask"]),
        "masked mean": lambda h, batch: (
            jnp.sum(_per_row(h) * batch["mask"]) / jnp.maximum(batch["mask"].sum(), 1)
        ),
        "root": lambda h, batch: jnp.sqrt(1 + jnp.sum(h * h)),
    }
    if len(draw.shape) == 2 and draw.shape[1] > 1:
        losses["cross entropy"] = _cross_entropy
    name = str(draw.rng.choice(list(losses), p=_weights(losses)))
    return losses[name], name


def _weights(losses: dict[str, Any]) -> Any:
    weights = np.array([0.4 if name in _MIXING_LOSSES else 2.0 for name in losses])
    return weights / weights.sum()


def _per_row(h: jax.Array) -> jax.Array:
    return jnp.square(h).reshape(h.shape[0], math.prod(h.shape[1:])).sum(1)


def _cross_entropy(h: jax.Array, batch: dict[str, Any]) -> jax.Array:
    labels = batch["tokens"] % h.shape[1]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(h), labels[:, None], axis=1))


_METRICS: dict[str, Callable[..., Any]] = {
    "outputs": lambda h, batch, state: h,
    "mean": lambda h, batch, state: jnp.mean(h) if h.size else jnp.zeros(()),
    "largest": lambda h, batch, state: jnp.max(jnp.abs(h), initial=0.0),
    "right": lambda h, batch, state: jnp.sum(
        _per_row(h).astype(jnp.int32) % 3 == batch["tokens"] % 3
    ),
    "count": lambda h, batch, state: state["count"],
    "marked": lambda h, batch, state: jnp.any(batch["mask"]) & jnp.all(jnp.isfinite(h)),
    "tokens": lambda h, batch, state: batch["tokens"] + state["count"],
    "weights": lambda h, batch, state: sum(jnp.sum(w * w) for w in state["params"].values()),
    "by_mask": lambda h, batch, state: jnp.where(batch["mask"], _per_row(h), 0.0),
    "number": lambda h, batch, state: 0.5,
}


def _forward(chain: list[Apply], loss: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        params: dict[str, Any], state: dict[str, Any], batch: dict[str, Any], key: Any
    ) -> Any:
        h = batch["x"]
        for fn in chain:
            h = fn(h, Inputs(params=params, batch=batch, count=state["count"], key=key))
        return loss(h, batch), h

    return jax.value_and_grad(forward, has_aux=True)


def _step(
    chain: list[Apply], loss: Callable[..., Any], update: str, metrics: tuple[str, ...]
) -> Callable[..., Any]:
    def train_step(state: dict[str, Any], batch: dict[str, Any]) -> Any:
        key, use = jax.random.split(state["key"])
        (value, h), grads = _forward(chain, loss)(state["params"], state, batch, use)
        new = _update(update, state, grads)
        found = {name: _METRICS[name](h, batch, state) for name in metrics}
        return {**state, **new, "count": state["count"] + 1, "key": key}, {
            "loss": value,
            "none": None,
            **found,
        }

    return train_step


def _independent(
    chain: list[Apply],
    loss: Callable[..., Any],
    update: str,
    metrics: tuple[str, ...],
    count: int,
    sums: bool,
) -> Callable[..., Any]:
    def train_step(state: dict[str, Any], batch: dict[str, Any]) -> Any:
        key, use = jax.random.split(state["key"])
        parts = [jax.tree.map(lambda x, k=k: jnp.split(x, count)[k], batch) for k in range(count)]
        runs = [_forward(chain, loss)(state["params"], state, part, use) for part in parts]
        share = 1 if sums else count
        value, grads = jax.tree.map(
            lambda *x: sum(x) / share, *((value, grads) for (value, _), grads in runs)
        )
        found = {
            name: _combined(
                name, [_METRICS[name](run[0][1], part, state) for run, part in zip(runs, parts)]
            )
            for name in metrics
        }
        if "marked" in metrics:
            h = jnp.concatenate([run[0][1] for run in runs])
            found["marked"] = _METRICS["marked"](h, batch, state)
        new = _update(update, state, grads)
        return {**state, **new, "count": state["count"] + 1, "key": key}, {
            "loss": value,
            "none": None,
            **found,
        }

    return train_step


def _combined(name: str, parts: list[Any]) -> Any:
    """A metric of the step from those of its micro-batches."""
    if name in ("outputs", "tokens", "by_mask"):
        return jnp.concatenate(parts)
    if name in ("right", "marked"):
        return sum(parts)
    return parts[0] if name in ("count", "weights", "number") else sum(parts) / len(parts)


def _update(update: str, state: dict[str, Any], grads: dict[str, Any]) -> dict[str, Any]:
    params, rate = state["params"], 0.05
    match update:
        case "momentum":
            moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
            return {
                "params": jax.tree.map(lambda p, m: p - rate * m, params, moments),
                "moments": moments,
            }
        case "adam":
            count = state["count"] + 1
            first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["moments"], grads)
            second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["squares"], grads)

            def moved(p: Any, m: Any, v: Any) -> Any:
                # A large epsilon: where a gradient is rounding alone, the usual one would make a
                # step of it.
                return p - rate * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.99**count)) + 0.1)

            return {
                "params": jax.tree.map(moved, params, first, second),
                "moments": first,
                "squares": second,
            }
        case "clip":
            norm = jnp.sqrt(1e-6 + sum(jnp.sum(g * g) for g in grads.values()))
            return {
                "params": jax.tree.map(
                    lambda p, g: p - rate * g / jnp.maximum(norm, 1), params, grads
                )
            }
        case "if_finite":
            finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in grads.values()]))
            taken = lax.cond(
                finite,
                lambda: jax.tree.map(lambda p, g: p - rate * g, params, grads),
                lambda: dict(params),
            )
            return {"params": taken}
        case "average":
            taken = jax.tree.map(lambda p, g: p - rate * g, params, grads)
            return {
                "params": taken,
                "moments": jax.tree.map(lambda m, p: 0.9 * m + 0.1 * p, state["moments"], taken),
            }
    return {"params": jax.tree.map(lambda p, g: p - rate * g, params, grads)}


def _state(params: dict[str, Any], update: str, seed: int) -> dict[str, Any]:
    zeros = jax.tree.map(np.zeros_like, params)
    state = {
        "params": params,
        "count": np.int32(seed % 5),
        "key": np.array([0, seed], np.uint32),
        "none": None,
        "empty": np.zeros((0, 3)),
        "nothing": {},
    }
    if update in ("momentum", "adam", "average"):
        state["moments"] = zeros
    if update == "adam":
        state["squares"] = zeros
    return state


def _batch(rng: np.random.Generator, shape: tuple[int, ...]) -> dict[str, Any]:
    return {
        "x": rng.standard_normal(shape),
        "tokens": rng.integers(0, _TOKENS, shape[:1]).astype(np.int32),
        "mask": rng.random(shape[:1]) < 0.7,
        "none": None,
        "empty": np.zeros((shape[0], 0)),
    }


def _array(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    fan_in = shape[-2] if len(shape) > 1 else 1
    return rng.standard_normal(shape) / math.sqrt(max(fan_in, 1))
