"""Blocks of examples: operators that join batches, take them apart, or cut them into chunks.

A dim that micro-batches cut may hold several blocks one after another, of which each part has an
equal share (see `TimeSpec`). These operators move whole blocks, so that they move shares of them
alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...graph import Op
from .._spec import differing_dims
from ._time_specs import ANY, EQUAL, Followed, Shape, TimeKind, TimeSpec, split_at


def move_blocks(
    op: Op,
    own: Mapping[str, Any],
    specs: Sequence[TimeSpec],
    shapes: Sequence[tuple[Shape, Shape]],
    parts: int,
) -> Followed | None:
    """Results of an operator that moves whole blocks; None if it is no such operator.

    Args:
        op, specs, shapes, parts: see `follow`.
        own: the operator's parameters on a part.
    """
    if op.name not in _MOVES or op.eqn is None or any(0 in result for result, _ in shapes):
        return None
    whole = [tuple(v.aval.shape) for v in op.eqn.invars]
    # A pad's second operand is the value that it fills with.
    given = specs[:1] if op.name == "pad" and list(specs[1:]) == [EQUAL] else specs
    cuts = {(spec.kind, spec.dim) for spec in given}
    if op.name == "reshape":
        found = _reshaped(op, specs[0], whole[0], shapes[0], parts)
        return Followed(results=(found,)) if found else None
    if len(cuts) != 1 or given[0].kind is not TimeKind.CONCATENATE:
        return None
    dim = given[0].dim
    size = _block_size(given, [shape[dim] for shape in whole[: len(given)]])
    starts = _starts(op.name, op.params, whole[0], dim)
    on_part = _starts(op.name, own, whole[0], dim)
    # A part must be cut at the same blocks as the whole batch.
    if (
        size is None
        or starts is None
        or on_part is None
        or starts[0] != on_part[0]
        or starts[1] != [parts * n for n in on_part[1]]
        or any(_cut_dim(pair, parts) != dim for pair in shapes)
    ):
        return None
    if op.name in ("slice", "split") and given[0].blocks == ANY:
        return Followed(results=(split_at(dim, ANY),) * len(shapes))
    blocks = [result[dim] // size for result, _ in shapes]
    if any(n % size for n in starts[1]) or any(
        result[dim] % size or part[dim] % k
        for k, (result, part) in zip(blocks, shapes, strict=True)
    ):
        return None
    return Followed(results=tuple(split_at(dim, k) for k in blocks))


_MOVES = frozenset({"concatenate", "pad", "reshape", "slice", "split", "tile"})


def finer_chunks(spec: TimeSpec, whole: Shape, shapes: tuple[Shape, Shape], parts: int) -> int:
    """How many times as many chunks of the batch a reshape needs to be the same reshape of each
    part: 1 if it does not cut the batch into chunks.

    Args:
        spec, whole: of its operand, with its shape on the whole batch.
        shapes: of its result, on the whole batch and on a part.
    """
    dim = _cut_dim(shapes, parts)
    if spec.kind is not TimeKind.CONCATENATE or dim is None:
        return 1
    outer = math.prod(shapes[0][:dim])
    return outer // math.gcd(outer, _outer(spec, whole)) if outer else 1


def _reshaped(
    op: Op, spec: TimeSpec, whole: Shape, shapes: tuple[Shape, Shape], parts: int
) -> TimeSpec | None:
    """The spec of a reshaped array.

    All elements in their order are `(outer, parts, rest)`, whatever the shape, and a part has its
    own of the `parts`; `outer` is what the dims before the cut one and its blocks multiply to.
    """
    dim = _cut_dim(shapes, parts)
    if (
        spec.kind is not TimeKind.CONCATENATE
        or dim is None
        or op.params.get("dimensions") is not None
    ):
        return None
    result, part = shapes
    before, after = math.prod(whole[: spec.dim]), math.prod(result[:dim])
    if (
        spec.blocks == ANY
        and whole[spec.dim + 1 :] == result[dim + 1 :]
        and whole[spec.dim] % result[dim] == 0
    ):
        return split_at(dim, ANY)
    blocks, rest = divmod(_outer(spec, whole), after) if after else (0, 0)
    if before == 0 or rest or not blocks or part[dim] % blocks:
        return None
    return split_at(dim, blocks)


def _outer(spec: TimeSpec, whole: Shape) -> int:
    return math.prod(whole[: spec.dim]) * (spec.blocks or 1)


def _cut_dim(shapes: tuple[Shape, Shape], parts: int) -> int | None:
    """The only dim that a part has a share of; None if there is no such dim."""
    whole, part = shapes
    differing = differing_dims(whole, part)
    if len(differing) != 1 or whole[differing[0]] != parts * part[differing[0]]:
        return None
    return differing[0]


def _block_size(specs: Sequence[TimeSpec], lengths: Sequence[int]) -> int | None:
    """Length of a block of the whole batch; None if there is none that all operands share."""
    sizes = {n // s.blocks for s, n in zip(specs, lengths, strict=True) if s.blocks != ANY}
    size = min(sizes or lengths)
    # Arrays that are the same all along the dim are read as blocks of this length.
    fits = len(sizes) <= 1 and size and not any(n % size for n in lengths)
    return size if fits else None


def _starts(
    name: str, params: Mapping[str, Any], shape: Shape, dim: int
) -> tuple[object, list[int]] | None:
    """Where an operator cuts the dim or fills it up, after what it does to other dims; None if it
    does more than that.
    """
    match name:
        case "concatenate":
            return ((), []) if params["dimension"] == dim else None
        case "split":
            return ((), list(params["sizes"])) if params["axis"] == dim else None
        case "tile":
            return list(params["reps"]), []
        case "pad":
            low, high, interior = params["padding_config"][dim]
            others = [c for d, c in enumerate(params["padding_config"]) if d != dim]
            return (others, [low, high]) if interior == 0 else None
    starts, limits, strides = (
        list(params[key] or [1] * len(shape))
        for key in ("start_indices", "limit_indices", "strides")
    )
    others = [c for d, c in enumerate(zip(starts, limits, strides, strict=True)) if d != dim]
    return (others, [starts[dim], limits[dim]]) if strides[dim] == 1 else None
