"""Experts without a capacity, on the pieces that each device has.

Where experts are split, so are the tokens, over the same devices. Each device gathers the tokens of
all of these, computes what its own experts make of them, and the results are summed and scattered
back to where the tokens lie. No weight of an expert leaves its device, and no token is dropped,
however unequally experts are chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...graph import EXPERTS, run_experts, run_gradients

_OF_TOKENS = 2

Axes: TypeAlias = tuple[str, ...]
Scattered: TypeAlias = Callable[[Sequence[Axes], Sequence[Axes], Collection[str]], dict[int, Axes]]
"""From the axes that split each dim of a partial sum, those that shall, and those along which it is
partial: the axes along which to reduce-scatter each dim.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnPieces:
    """A function of each device's pieces, and how its operands and results are split."""

    run: Callable[..., list[Any]]
    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]


def experts_on_pieces(
    eqn: Any,
    given: Sequence[Sequence[Axes]],
    wanted: Sequence[Sequence[Axes]],
    scattered: Scattered,
    *,
    wide_sums: bool,
) -> OnPieces:
    """The operator of experts, or that of their gradients, as each device runs it.

    Args:
        given: the axes that split each dim of the operands; of all but tokens and the last matrix
            they follow from these.
        wanted: those that shall split each dim of the results.
        scattered: see `Scattered`.
        wide_sums: see `Pins`.
    """
    is_backward = eqn.primitive.name != EXPERTS[0]
    num_matrices = len(eqn.invars) - 3 - is_backward
    lead, (of_experts, of_inner, _) = given[0][:-1], given[2 + num_matrices]
    # Only along axes that split tokens, too, is there anything to exchange.
    dim = next((d for d, axes in enumerate(lead) if set(axes) & set(of_experts)), 0)
    exchanged = tuple(axis for axis in of_experts if lead and axis in lead[dim])
    others = tuple(axis for axis in (*of_experts, *of_inner) if axis not in exchanged)
    of_tokens = tuple(axis for axis in itertools.chain(*lead) if axis not in exchanged)
    by_token = (*lead, ())
    matrices = [(of_experts, (), of_inner)] * (num_matrices - 1) + [(of_experts, of_inner, ())]
    operands = [*[by_token] * 3, *matrices, *[by_token] * is_backward]
    results = [by_token, by_token, *matrices] if is_backward else [by_token]
    # Gradients of matrices, behind those of tokens and weights, are sums over tokens.
    sums = [others if k < _OF_TOKENS else of_tokens for k in range(len(results))]
    scatters = [
        scattered(split, goal, axes)
        for split, goal, axes in zip(results, wanted, sums, strict=True)
    ]

    def gathered(piece: Any) -> Any:
        return jax.lax.all_gather(piece, exchanged, axis=dim, tiled=True) if exchanged else piece

    def summed(k: int, piece: Any) -> Any:
        """A result, summed over all devices that have a part of it."""
        dtype = piece.dtype
        if wide_sums and jnp.issubdtype(dtype, jnp.inexact):
            piece = piece.astype(jnp.promote_types(dtype, jnp.float32))
        if exchanged and k < _OF_TOKENS:
            piece = jax.lax.psum_scatter(piece, exchanged, scatter_dimension=dim, tiled=True)
        for d, axes in scatters[k].items():
            piece = jax.lax.psum_scatter(piece, axes, scatter_dimension=d, tiled=True)
        done = set(itertools.chain(*scatters[k].values()))
        rest = tuple(axis for axis in sums[k] if axis not in done)
        return (jax.lax.psum(piece, rest) if rest else piece).astype(dtype)

    def run(*pieces: Any) -> list[Any]:
        tokens, chosen, weights = map(gathered, pieces[:3])
        rest = list(pieces[3:])
        if of_experts:
            # Numbers of experts that lie elsewhere leave the range of those here.
            chosen = chosen - jax.lax.axis_index(of_experts) * rest[0].shape[0]
        if not is_backward:
            return [summed(0, run_experts(tokens, chosen, weights, *rest, **eqn.params))]
        rest[-1] = gathered(rest[-1])
        made = run_gradients(tokens, chosen, weights, *rest, **eqn.params)
        return [summed(k, piece) for k, piece in enumerate(made)]

    def as_spec(split: Sequence[Axes], more: dict[int, Axes]) -> PartitionSpec:
        return PartitionSpec(*(axes + more.get(d, ()) for d, axes in enumerate(split)))

    return OnPieces(
        run=run,
        operands=tuple(as_spec(split, {}) for split in operands),
        results=tuple(map(as_spec, results, scatters)),
    )
