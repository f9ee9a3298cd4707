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


def check_numbers(graph: Graph, results: Sequence[Any]) -> None:
    """The check of `jax_debug_nans` and `jax_debug_infs` on a step's results; waits for them.

    Raises:
        FloatingPointError: names the results, and says how to find the operator.
    """
    settings: Any = jax.config
    checks: dict[str, Any] = {"nan": np.isnan} if settings.jax_debug_nans else {}
    checks |= {"inf": np.isinf} if settings.jax_debug_infs else {}
    for kind, test in checks.items():
        found = [
            output.path or "the result"
            for output, result in zip(graph.outputs, results, strict=True)
            if jnp.issubdtype(result.dtype, jnp.inexact)
            and any(test(block).any() for block in _local_blocks(result))
        ]
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise FloatingPointError(
                f"invalid value ({kind}) in {', '.join(found[:3])}{more}, which {graph.name}"
                f" returned; jax_debug_{kind}s asks for this check. To find the operator, call the"
                " step as you wrote it with the arguments of this call: JAX then runs it operator"
                " by operator. The state was donated, so keep a copy of it before each call."
            )


def _local_blocks(array: Any) -> list[Any]:
    """The parts of an array that this process holds."""
    if isinstance(array, PiecedArray):
        return [block for piece in array.pieces for block in _local_blocks(piece)]
    if isinstance(array, jax.Array):
        return [np.asarray(shard.data) for shard in array.addressable_shards]
    return [array]


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
