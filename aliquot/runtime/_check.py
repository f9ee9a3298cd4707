"""Comparison of one step under a plan with the plain step on one device."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from ..graph import Graph, widened
from .transport import PiecedArray, gather

TF32 = "tensorfloat32"
_TOLERANCES = {"bfloat16": 3e-2, "float16": 5e-3, TF32: 5e-3, "float32": 1e-5, "float64": 1e-12}
# Formats to which accelerators round the operands of products in float32, unless asked not to.
_PRODUCTS = {"gpu": TF32, "tpu": "bfloat16"}
_TRIALS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafDifference:
    """Difference of one output from the plain step's.

    `relative` is the largest difference divided by the plain output's largest magnitude (by 1 where
    that is zero); infinite where one side is NaN and the other is not. A difference of up to
    `allowed` may come from rounding.
    """

    path: str
    largest: float
    magnitude: float
    allowed: float = 0.0

    @property
    def relative(self) -> float:
        """The largest difference, relative to the magnitude of the output."""
        return self.largest / (self.magnitude or 1.0)

    @property
    def is_equal(self) -> bool:
        """True if rounding explains the difference."""
        return self.largest <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
    """Differences of all outputs, in the order of the step's result, and whether they come from
    rounding alone.

    An output may differ by the tolerance of the step's `rounding`, relative to its magnitude, and
    by twice as much as the plain step's own output changes if its arguments are rounded otherwise.
    The latter matters where an optimizer divides by what is nearly zero: Adam's first step is as
    large for a gradient of 1e-12 as for one of 1, and has its sign. In 16 bits an output may also
    differ by twice as much as the plain step's own differs from the same step in float32: long sums
    in 16 bits, such as a bias's gradient over all tokens, lose more than one rounding.

    Attributes:
        rounding: the coarsest number format in the step, such as `bfloat16`.
    """

    leaves: tuple[LeafDifference, ...]
    rounding: str = ""

    @property
    def is_equal(self) -> bool:
        """True if rounding explains all differences."""
        return all(leaf.is_equal for leaf in self.leaves)

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
        unequal = [leaf for leaf in self.leaves if not leaf.is_equal]
        if unequal:
            first = unequal[0]
            scale = first.magnitude or 1.0
            return (
                f"not equal: {first.path or 'the result'} differs by {first.relative:.1e} of its"
                f" largest value, and {self.rounding} rounding explains {first.allowed / scale:.1e}"
                f" ({len(unequal)} of {len(self.leaves)} outputs differ by more than rounding)"
            )
        worst = self.worst
        text = (
            f"equal: all {len(self.leaves)} outputs agree with the plain step as closely as"
            f" {self.rounding} allows; the largest relative difference is {worst.relative:.2e}, at"
            f" {worst.path or 'the result'}"
        )
        if worst.largest > _tolerance(self.rounding) * worst.magnitude:
            text += (
                f" (values up to {worst.magnitude:.1e}), where rounding alone changes the plain"
                " step by as much"
            )
        return text


def plain_results(graph: Graph, leaves: Sequence[Any]) -> list[Any]:
    """Results of the user's own step for flat arrays, on one device; nothing is donated."""
    calling = replace(graph.calling)
    with jax.default_device(jax.local_devices()[0]):
        return list(jax.jit(lambda *flat: calling.run(flat))(*map(_whole, leaves)))


def wide_results(graph: Graph, leaves: Sequence[Any], narrow: str) -> list[Any]:
    """Results of the user's own step, with float32 in place of a narrower format."""
    calling = replace(graph.calling)
    with jax.default_device(jax.local_devices()[0]):
        on_one = [*map(_whole, leaves)]
        jaxpr = widened(jax.make_jaxpr(lambda *flat: calling.run(flat))(*on_one), narrow)
        wide = [leaf.astype(jnp.float32) if leaf.dtype == narrow else leaf for leaf in on_one]
        return list(jax.jit(jaxpr_as_fun(jaxpr))(*wide))


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


def compare(
    paths: Sequence[str], results: Sequence[Any], wanted: Sequence[Any], rounding: str = "float32"
) -> StepCheck:
    """Differences of all outputs between two flat lists of results. Waits for both.

    Args:
        rounding: number format whose tolerance is allowed.
    """
    leaves = []
    for path, result, plain in zip(paths, results, wanted, strict=True):
        # Compared in double precision at least, so that the difference itself is not rounded.
        a, b = np.asarray(gather(result)), np.asarray(gather(plain))
        a = a.astype(np.result_type(a.dtype, np.float64), copy=False)
        b = b.astype(np.result_type(b.dtype, np.float64), copy=False)
        largest = magnitude = 0.0
        if a.size:
            # Infinities of the same sign are equal, although their difference is NaN.
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            with np.errstate(invalid="ignore"):
                gaps = np.where(same, 0.0, np.abs(a - b))
            largest = float(np.where(np.isnan(gaps), np.inf, gaps).max())
            magnitude = float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b)))
        is_rounded = jnp.issubdtype(plain.dtype, jnp.inexact)
        allowed = _tolerance(rounding) * magnitude if is_rounded else 0.0
        leaves.append(
            LeafDifference(path=path, largest=largest, magnitude=magnitude, allowed=allowed)
        )
    return StepCheck(leaves=tuple(leaves), rounding=rounding)


def check_step(graph: Graph, results: Sequence[Any], arguments: Sequence[Any]) -> StepCheck:
    """Compare results of a step with those of the plain step for the same flat arguments.

    Where more than a tolerance differs, the plain step runs twice more, with arguments that are
    rounded otherwise, and a step in 16 bits once more in float32: a difference up to twice what
    that changes is one of rounding.
    """
    wanted = plain_results(graph, arguments)
    arrays = [value for value in graph.values if value.jax_dtype is None]
    kinds = {str(value.dtype) for value in arrays if jnp.issubdtype(value.dtype, jnp.floating)}
    settings: Any = jax.config
    if "float32" in kinds and settings.jax_default_matmul_precision is None:
        kinds |= {_PRODUCTS.get(jax.default_backend(), "float32")}
    found = compare(
        [o.path for o in graph.outputs],
        results,
        wanted,
        max(kinds, key=lambda kind: (_epsilon(kind), kind), default="float32"),
    )
    if found.is_equal:
        return found
    checked = found
    for seed in range(_TRIALS):
        random = np.random.default_rng(seed)
        # Floats are moved by up to two roundings, at random.
        rounded = list(arguments)
        for k, leaf in enumerate(arguments):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                array = np.asarray(gather(leaf))
                moved = 1 + 2 * _epsilon(found.rounding) * random.uniform(-1, 1, array.shape)
                rounded[k] = (array.astype(np.float64) * moved).astype(array.dtype)
        checked = _allowing(checked, found, plain_results(graph, rounded), wanted)
    if not checked.is_equal and found.rounding in ("bfloat16", "float16"):
        # Not every step exists in float32: cuDNN's attention does not, nor do casts of single bits.
        with contextlib.suppress(Exception):
            wide = wide_results(graph, arguments, found.rounding)
            checked = _allowing(checked, found, wide, wanted)
    return checked


def _allowing(
    checked: StepCheck, found: StepCheck, others: Sequence[Any], wanted: Sequence[Any]
) -> StepCheck:
    """A check that also allows twice what other results of the plain step differ by."""
    changes = compare([""] * len(wanted), others, wanted)
    leaves = tuple(
        replace(leaf, allowed=max(leaf.allowed, base.allowed + 2 * change.largest))
        for leaf, base, change in zip(checked.leaves, found.leaves, changes.leaves, strict=True)
    )
    return replace(checked, leaves=leaves)


def _tolerance(rounding: str) -> float:
    """Relative difference that is allowed for a number format: sums in another order round each
    term otherwise.
    """
    return _TOLERANCES.get(rounding, 2 * _epsilon(rounding))


def _epsilon(rounding: str) -> float:
    kind: Any = jnp.finfo  # Without types in JAX.
    return float(kind("float16" if rounding == TF32 else rounding).eps)


def check_numbers(graph: Graph, results: Sequence[Any]) -> None:
    """The check of `jax_debug_nans` and `jax_debug_infs` on a step's results; waits for them.

    Raises:
        FloatingPointError: names the results, and says how to find the operator.
    """
    settings: Any = jax.config
    checks: dict[str, Any] = {"nan": np.isnan} if settings.jax_debug_nans else {}
    checks |= {"inf": np.isinf} if settings.jax_debug_infs else {}
    for kind, test in checks.items():
        found = []
        for output, result in zip(graph.outputs, results, strict=True):
            if jnp.issubdtype(result.dtype, jnp.inexact) and any(
                test(block).any() for block in _local_blocks(result)
            ):
                found.append(output.path or "the result")
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
        return list(itertools.chain.from_iterable(map(_local_blocks, array.pieces)))
    if isinstance(array, jax.Array):
        return [np.asarray(shard.data) for shard in array.addressable_shards]
    return [array]
