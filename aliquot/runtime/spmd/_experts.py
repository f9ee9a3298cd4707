"""Experts without a capacity, on the pieces that each device has.

Where experts are split, so are the tokens, over the same devices. Rows travel to the devices of
their experts by an all-to-all, and results come back by another. Both have room for a quarter more
rows than there would be if all experts were chosen equally often. Rows that find no room travel in
further rounds, of which there are as many as the busiest pair of devices needs. So no token is
dropped, no weight of an expert leaves its device, and memory does not grow with the imbalance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import msgspec
from jax.sharding import PartitionSpec

from ...graph import EXPERTS, ROOM, run_experts, run_gradients

_OF_TOKENS = 2

Axes: TypeAlias = tuple[str, ...]
Scattered: TypeAlias = Callable[[Sequence[Axes], Sequence[Axes], Collection[str]], dict[int, Axes]]
"""From the axes that split each dim of a partial sum, those that shall, and those along which it is
partial: the axes along which to reduce-scatter each dim.
"""


class OnPieces(msgspec.Struct, frozen=True, kw_only=True, eq=False):
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
    is_scaled = eqn.params.get("wide") is not None
    num_matrices = len(eqn.invars) - 3 - is_backward - is_scaled
    lead, (of_experts, of_inner, _) = given[0][:-1], given[2 + num_matrices]
    of_tokens = tuple(itertools.chain(*lead))
    exchanged = tuple(axis for axis in of_experts if axis in of_tokens)
    # Along all other axes, each device adds what its own experts, or parts of them, make of the
    # same tokens.
    others = tuple(axis for axis in (*of_experts, *of_inner) if axis not in exchanged)
    by_token = (*lead, ())
    matrices = [(of_experts, (), of_inner)] * (num_matrices - 1) + [(of_experts, of_inner, ())]
    operands = [*[by_token] * 3, *matrices, *[((), ())] * is_scaled, *[by_token] * is_backward]
    results = [by_token, by_token, *matrices] if is_backward else [by_token]
    largest = len(results) if is_backward and is_scaled else None
    if largest is not None:
        results.append(by_token)
    # Gradients of matrices, behind those of tokens and weights, are sums over tokens.
    elsewhere = tuple(axis for axis in of_tokens if axis not in exchanged)
    sums = [others if k < _OF_TOKENS else elsewhere for k in range(len(results))]
    scatters = [
        scattered(split, goal, axes) if k != largest else {}
        for k, (split, goal, axes) in enumerate(zip(results, wanted, sums, strict=True))
    ]

    def run(*pieces: Any) -> list[Any]:
        tokens, chosen, weights, *rest = pieces
        num_here = rest[0].shape[0]
        device, chosen = _owner(chosen, num_here, of_experts, exchanged)
        compute = run_gradients if is_backward else run_experts
        if exchanged:
            made = _in_rounds(
                compute, eqn.params, device, exchanged, of_tokens, tokens, chosen, weights, *rest
            )
        else:
            made = compute(tokens, chosen, weights, *rest, **eqn.params)
            made = made if is_backward else [made]
        return [summed(k, piece) for k, piece in enumerate(made)]

    def summed(k: int, piece: Any) -> Any:
        """A result, summed over all devices that have a part of it; of magnitudes the largest."""
        if k == largest:
            return jax.lax.pmax(piece, others) if others else piece
        dtype = piece.dtype
        if wide_sums and jnp.issubdtype(dtype, jnp.inexact):
            piece = piece.astype(jnp.promote_types(dtype, jnp.float32))
        for d, axes in scatters[k].items():
            piece = jax.lax.psum_scatter(piece, axes, scatter_dimension=d, tiled=True)
        done = set(itertools.chain(*scatters[k].values()))
        rest = tuple(axis for axis in sums[k] if axis not in done)
        return (jax.lax.psum(piece, rest) if rest else piece).astype(dtype)

    def as_spec(split: Sequence[Axes], more: dict[int, Axes]) -> PartitionSpec:
        return PartitionSpec(*(axes + more.get(d, ()) for d, axes in enumerate(split)))

    return OnPieces(
        run=run,
        operands=tuple(as_spec(split, {}) for split in operands),
        results=tuple(map(as_spec, results, scatters)),
    )


def _owner(chosen: Any, num_here: int, of_experts: Axes, exchanged: Axes) -> tuple[Any, Any]:
    """For each chosen expert the device that has it, counted along the axes of the exchange, and
    its number there: -1 if it lies on a device along another axis.
    """
    number, device, stride = chosen // num_here, jnp.zeros_like(chosen), 1
    is_beside = (chosen >= 0) & (chosen < num_here * _num_devices(of_experts))
    for axis in reversed(of_experts):
        number, place = jnp.divmod(number, jax.lax.axis_size(axis))
        if axis in exchanged:
            device, stride = device + stride * place, stride * jax.lax.axis_size(axis)
        else:
            is_beside &= place == jax.lax.axis_index(axis)
    return device, jnp.where(is_beside, chosen % num_here, -1)


def _num_devices(axes: Axes) -> int:
    return math.prod(map(jax.lax.axis_size, axes))


def _in_rounds(
    compute: Callable[..., Any],
    params: Any,
    device: Any,
    exchanged: Axes,
    of_tokens: Axes,
    *pieces: Any,
) -> list[Any]:
    """The results for the tokens of this device, and the gradients of its matrices.

    Args:
        compute: `run_experts` or `run_gradients`.
        device: to which each choice is sent.
        exchanged, of_tokens: axes along which rows are exchanged, and all that split tokens.
        pieces: tokens, the numbers of the experts chosen on their devices, weights, and the rest.
    """
    tokens, chosen, weights, *rest = pieces
    is_backward, wide = compute is run_gradients, params.get("wide")
    fixed, gradients = (rest[:-1], rest[-1:]) if is_backward else (rest, ())
    matrices = fixed[:-1] if wide else fixed
    count, top, features = _num_devices(exchanged), chosen.shape[-1], tokens.shape[-1]
    chosen, shares = chosen.reshape(-1), weights.reshape(-1)
    rows = [array.reshape(-1, array.shape[-1]) for array in (tokens, *gradients)]
    room = max(1, math.ceil(ROOM * chosen.size / count))
    # Choices by device; those that nobody here sends come last.
    device = jnp.where(chosen >= 0, device.reshape(-1), count)
    order = jnp.argsort(device, stable=True)
    ends = jnp.searchsorted(device[order], jnp.arange(count), side="right")
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    # All devices take part in all rounds.
    rounds = jax.lax.pmax(jnp.max(-((starts - ends) // room)), of_tokens)

    def sent(array: Any) -> Any:
        return jax.lax.all_to_all(array, exchanged, split_axis=0, concat_axis=0, tiled=True)

    def turn(state: tuple[Any, ...]) -> tuple[Any, ...]:
        number, made, totals = state
        places = starts[:, None] + number * room + jnp.arange(room)
        is_row = places < ends[:, None]
        choice = order[jnp.where(is_row, places, 0)]
        arrived = [sent(array[choice // top]) for array in rows]
        here = sent(jnp.where(is_row, chosen[choice], -1))
        share = sent(jnp.where(is_row, shares[choice], 0))
        x, *dy = (array.reshape(-1, array.shape[-1]) for array in arrived)
        # Where all devices send the same, there is room in what arrives.
        results = compute(
            x, here.reshape(-1, 1), share.reshape(-1, 1), *fixed, *dy, **params, room=1.0
        )
        of_matrices = slice(_OF_TOKENS, _OF_TOKENS + len(totals))
        more = results[of_matrices] if is_backward else []
        by_row = [*results[:_OF_TOKENS], *results[of_matrices.stop :]] if is_backward else [results]
        back = [sent(array.reshape(count, room, -1)) for array in by_row]
        # Each choice comes back in one round.
        made = [
            total.at[choice].add(jnp.where(is_row[..., None], array, 0))
            for total, array in zip(made, back, strict=True)
        ]
        return number + 1, made, [a + b for a, b in zip(totals, more, strict=True)]

    dtype = jnp.dtype(wide or tokens.dtype)
    if is_backward:
        kinds = [(features, dtype), (1, weights.dtype)]
        kinds += [(len(matrices), jnp.dtype("float32"))] if wide else []
    else:
        kinds = [(matrices[-1].shape[-1], dtype)]
    made = [jnp.zeros((chosen.size, width), kind) for width, kind in kinds]
    totals = [jnp.zeros(m.shape, dtype) for m in matrices] if is_backward else []
    _, made, totals = jax.lax.while_loop(
        lambda state: state[0] < rounds, turn, (jnp.zeros_like(rounds), made, totals)
    )
    by_choice = made[0].reshape(-1, top, made[0].shape[-1])
    summed = by_choice.astype(jnp.promote_types(dtype, jnp.float32)).sum(1).astype(dtype)
    of_token = summed.reshape(*tokens.shape[:-1], summed.shape[-1])
    largest = [
        array.reshape(*tokens.shape[:-1], top, array.shape[-1]).max(-2)
        for array in made[_OF_TOKENS:]
    ]
    of_weights = [made[1].reshape(weights.shape)] if is_backward else []
    return [of_token, *of_weights, *totals, *largest]
