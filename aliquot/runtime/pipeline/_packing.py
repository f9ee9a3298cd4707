"""Scalars that stages send each other in the update, packed into one vector for each dtype.

The norm of all gradients needs one number from every parameter; sent as arrays of their own, they
would cost more than the rest of the exchange.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ...graph import StageId, ValueId
from ...sharding import Part
from ._stage_functions import Form, Key, StageFunction


def pack_scalars(functions: Sequence[StageFunction]) -> tuple[StageFunction, ...]:
    """The functions, with scalars that cross between stages packed into vectors where two or more
    cross together.

    Vectors get value numbers above all others.
    """
    packs: dict[int, dict[Key, list[ValueId]]] = {}
    packed: dict[tuple[StageId, ValueId], tuple[Key, int]] = {}
    keys = itertools.chain.from_iterable((*f.takes, *f.gives) for f in functions)
    number = 1 + max((key.value for key in keys), default=0)
    for k, f in enumerate(functions):
        by_dtype: dict[str, list[ValueId]] = {}
        for value in _scalars_read_elsewhere(f, functions):
            by_dtype.setdefault(f.program.graph.values[value].dtype, []).append(value)
        for values in by_dtype.values():
            if len(values) > 1:
                key, number = Key(Form.PACKED, ValueId(number)), number + 1
                packs.setdefault(k, {})[key] = values
                for position, value in enumerate(values):
                    packed[f.program.stage, value] = key, position
    made_at = {value: stage for stage, value in packed}
    found = []
    for k, f in enumerate(functions):
        found.append(_unpacking(_packing(f, packs.get(k, {})), packed, made_at))
    return tuple(found)


def _scalars_read_elsewhere(f: StageFunction, functions: Sequence[StageFunction]) -> list[ValueId]:
    if f.program.part is not Part.UPDATE:
        return []
    read, own = set(), set()
    for g in functions:
        if g.program.part is Part.UPDATE and g.program.stage != f.program.stage:
            read |= {key.value for key in g.takes if key.form is Form.LATE}
            own |= {key.value for key in g.gives}
    # A stage's own results are not sent to it.
    read -= own
    found = []
    for key in f.gives:
        if key.form is Form.LATE and key.value in read:
            value = f.program.graph.values[key.value]
            # Random keys cannot be stacked with numbers.
            if value.shape == () and not value.dtype.startswith("key<"):
                found.append(key.value)
    return found


def _packing(f: StageFunction, packs: Mapping[Key, Sequence[ValueId]]) -> StageFunction:
    """The function, which returns the packed vectors after its other results."""
    if not packs:
        return f
    place_of = {key.value: place for place, key in enumerate(f.gives) if key.form is Form.LATE}

    # The scalars are returned as well, because their own stage reads them unpacked.
    def run(*arrays: Any) -> list[Any]:
        results = list(f.run(*arrays))
        for values in packs.values():
            results.append(jnp.stack([results[place_of[v]] for v in values]))
        return results

    return replace(f, gives=(*f.gives, *packs), run=run)


def _unpacking(
    f: StageFunction,
    packed_at: Mapping[tuple[StageId, ValueId], tuple[Key, int]],
    made_at: Mapping[ValueId, StageId],
) -> StageFunction:
    """The function, which takes packed vectors in place of scalars from other stages."""
    stage = f.program.stage
    packed = {}
    for key in f.takes:
        if key.form is Form.LATE and made_at.get(key.value, stage) != stage:
            packed[key] = packed_at[made_at[key.value], key.value]
    if not packed:
        return f
    takes = tuple(dict.fromkeys(packed[key][0] if key in packed else key for key in f.takes))

    def run(*arrays: Any) -> list[Any]:
        known = dict(zip(takes, arrays, strict=True))
        for key, (vector, position) in packed.items():
            known[key] = known[vector][position]
        return f.run(*(known[key] for key in f.takes))

    return replace(f, takes=takes, run=run)
