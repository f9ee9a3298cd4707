"""Training steps of other packages as people write them: a table by name, and what the families of
steps share.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROWS = 32
NUM_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ThirdPartyStep:
    """A step `(state, batch) -> (state, metrics)` with its first state and its batches.

    Attributes:
        layers: whether it has layers that a pipeline may be cut between.
        mixes: why examples depend on one another, so that micro-batches cannot give the same
            numbers; empty if they do not.
        tolerance: the largest difference of a leaf, relative to its largest magnitude.
    """

    fn: Callable[[Any, Any], Any]
    state: Any
    batches: tuple[Any, ...]
    layers: bool = False
    mixes: str = ""
    tolerance: float = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """How to make a step, and the modules that must be installed for that."""

    make: Callable[[], ThirdPartyStep]
    modules: tuple[str, ...]

    def missing(self) -> list[str]:
        """Modules that are not installed."""
        return [name for name in self.modules if importlib.util.find_spec(name) is None]


STEPS: dict[str, Entry] = {}


def third_party(
    *modules: str,
) -> Callable[[Callable[[], ThirdPartyStep]], Callable[[], ThirdPartyStep]]:
    """Put a step into the table under the name of the function that makes it."""

    def add(make: Callable[[], ThirdPartyStep]) -> Callable[[], ThirdPartyStep]:
        STEPS[make.__name__] = Entry(make=make, modules=modules)
        return make

    return add


def optimizer(rate: float = 1e-2) -> optax.GradientTransformation:
    """Adam, with an epsilon that keeps gradients of rounding alone from becoming steps."""
    return optax.adam(rate, eps=1e-3)


def doubled(tree: Any) -> Any:
    """A tree with its floating-point arrays in double precision."""
    return jax.tree.map(lambda x: x.astype(jnp.float64) if _is_floating(x) else x, tree)


def _is_floating(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def normal(seed: int, *shape: int) -> Any:
    """Random numbers."""
    return np.random.default_rng(seed).standard_normal(shape)


def integers(seed: int, high: int, *shape: int) -> Any:
    """Random indices below `high`."""
    return np.random.default_rng(seed).integers(0, high, shape).astype(np.int32)


def batches(make: Callable[[int], Any]) -> tuple[Any, ...]:
    """One batch for each step, from seeds."""
    return tuple(make(seed) for seed in range(1, NUM_STEPS + 1))


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Mean over examples."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def plain_layers(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Weights of a multi-layer perceptron."""
    return [
        {"w": jnp.asarray(normal(k, a, b) / np.sqrt(a)), "b": jnp.zeros(b)}
        for k, (a, b) in enumerate(zip(sizes, sizes[1:]))
    ]


def perceptron(params: Sequence[dict[str, Any]], x: Any) -> Any:
    """Its result."""
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]
