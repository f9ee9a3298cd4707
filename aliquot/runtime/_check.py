"""Comparison of one step under a plan with the plain step on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..graph import Graph
from .transport import PiecedArray, gather


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafDifference:
    """Difference of one output from the plain step's.

    `relative` is the largest difference divided by the plain output's largest magnitude (by 1 where
    that is zero); infinite where one side is NaN and the other is not.
    """

    path: str
    largest: float
    magnitude: float

    @property
    def relative(self) -> float:
        """See the class."""
        return self.largest / (self.magnitude or 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
    """Differences of all outputs, in the order of the step's result."""

    leaves: tuple[LeafDifference, ...]

    @property
    def worst(self) -> LeafDifference:
        """The output with the largest relative difference."""
        return max(self.leaves, key=lambda leaf: leaf.relative)

    @property
    def largest(self) -> float:
        """Largest relative difference of any output."""
        return self.worst.relative if self.leaves else 0.0

    def __str__(self) -> str:
        if not self.leaves:
            return "the step returns no array"
        worst = self.worst
        return (
            f"largest relative difference {worst.relative:.2e} at {worst.path or 'the result'} of"
            f" {len(self.leaves)}"
        )


def plain_results(graph: Graph, leaves: Sequence[Any]) -> list[Any]:
    """Results of the user's own step for flat arrays, on one device; nothing is donated."""
    calling = replace(graph.calling)
    device, *_ = jax.local_devices()
    with jax.default_device(device):
        on_one = [_whole(leaf) for leaf in leaves]
        return list(jax.jit(lambda *flat: calling.run(flat))(*on_one))


def _whole(leaf: Any) -> Any:
    """The whole array on the default device, uncommitted: a step that names devices may move it."""
    if isinstance(leaf, PiecedArray):
        return jnp.asarray(leaf)
    # `gather` returns the words (`key_data`) of random keys.
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jax.device_put(gather(leaf)), impl=jax.random.key_impl(leaf)
        )
    return jax.device_put(gather(leaf))


def compare(paths: Sequence[str], results: Sequence[Any], wanted: Sequence[Any]) -> StepCheck:
    """Differences of all outputs between two flat lists of results. Waits for both."""
    leaves = [
        _difference(p, gather(a), gather(b)) for p, a, b in zip(paths, results, wanted, strict=True)
    ]
    return StepCheck(leaves=tuple(leaves))


def _difference(path: str, result: Any, wanted: Any) -> LeafDifference:
    # Compared in double precision at least, so that the difference itself is not rounded.
    a, b = (
        np.asarray(x).astype(np.result_type(np.asarray(x).dtype, np.float64), copy=False)
        for x in (result, wanted)
    )
    if not a.size:
        return LeafDifference(path=path, largest=0.0, magnitude=0.0)
    # Infinities of the same sign are equal, although their difference is NaN.
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        gaps = np.where(same, 0.0, np.abs(a - b))
    magnitude = float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b)))
    return LeafDifference(
        path=path, largest=float(np.where(np.isnan(gaps), np.inf, gaps).max()), magnitude=magnitude
    )
