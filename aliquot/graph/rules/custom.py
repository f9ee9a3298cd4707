"""Operators that pass on each array unchanged, and operators of which nothing is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._rule import DimRule, HasShape, register_dim_rule, whole
from .._traits import Traits
from ._factors import Factors


def _pass_all(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Each result is the operand at the same position."""
    f = Factors()
    dims = tuple(f.splits(o.shape) for o in operands)
    return f.rule(dims, dims, linear=(1,) * len(operands))


register_dim_rule("optimization_barrier")(_pass_all)
# Recomputed, an array would lie in device memory after all; so it counts as costly.
register_dim_rule("device_put", traits=Traits(changes_memory=True, costly=True))(_pass_all)


def _opaque(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """A kernel, a callback, or a random generator with a state: every dim stays whole."""
    return whole(operands, results)


# Users know more about their own kernels: their rules replace these.
register_dim_rule(
    "call_exported",
    "debug_callback",
    "debug_print",
    "io_callback",
    "noinline",
    "pure_callback",
    replaceable=True,
)(_opaque)
register_dim_rule(
    "custom_partitioning", "ffi_call", "shard_map", traits=Traits(costly=True), replaceable=True
)(_opaque)

_WHOLE_ROUTINES = (
    "after_all create_token platform_index random_gamma rng_bit_generator rng_uniform".split()
)
register_dim_rule(*_WHOLE_ROUTINES)(_opaque)
