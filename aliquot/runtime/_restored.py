"""What comes out of a checkpoint, and how it is compared with what is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec

from ..core import InputError, listing
from .checkpoints import Record, SavedArray, Target, differences
from .transport import PiecedArray, Rows, struct


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A checkpoint that was read.

    Attributes:
        state: as the step takes it.
        number: of the checkpoint.
        meta: what the caller saved with it.
        skipped: one sentence for each newer checkpoint that cannot be restored.
        notes: what else there is to say of it.
        read_bytes: what this process has read.
        new: places of the arrays that the checkpoint does not have, where it was restored partly.
        left_out: places of the arrays that only the checkpoint has.
    """

    state: Any
    number: int
    meta: dict[str, Any]
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    read_bytes: int = 0
    new: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def saved_array(name: str, leaf: Any) -> SavedArray:
    """An array as a record tells of it."""
    return SavedArray(path=name, shape=tuple(leaf.shape), dtype=str(leaf.dtype))


def target_of(leaf: Any) -> Target:
    """An array of a tree: with its sharding, or those of its pieces, and else of NumPy."""
    described = struct(leaf.shape, leaf.dtype, None)
    if isinstance(leaf, PiecedArray):
        pieces: Sequence[Any] = leaf.pieces
        ends = zip(pieces, leaf.bounds[:-1], leaf.bounds[1:], strict=True)
        places = tuple(Rows(piece.sharding, start, stop) for piece, start, stop in ends)
        return Target(described=described, places=places)
    sharding = getattr(leaf, "sharding", None)
    return Target(described=described, places=() if sharding is None else (Rows(sharding),))


def shared(
    record: Record, names: Sequence[str], leaves: Sequence[Any], folder: Path
) -> tuple[dict[str, int], tuple[str, ...], tuple[str, ...]]:
    """The arrays that a checkpoint and a tree both have, with their positions in the tree; those
    that only the tree has, and those that only the checkpoint has.

    Raises:
        InputError: some have other shapes in the tree, or dtypes that are not both of floats, or
            there are none.
    """
    theirs = {array.path: array for array in record.arrays}
    both = {name: k for k, name in enumerate(names) if name in theirs}
    where = f"checkpoint {record.number} in {str(folder)!r}"
    if not both:
        raise InputError(
            listing(
                f"{where} has none of the arrays that are wanted",
                [
                    f"wanted are {', '.join(names[:3])}, ...",
                    f"it has {', '.join(list(theirs)[:3])}, ...",
                ],
                "Name a checkpoint of the same model, or pass the tree by the checkpoint's names.",
            )
        )
    mine = []
    for name, k in both.items():
        saved, wanted = theirs[name], saved_array(name, leaves[k])
        # Floats are wanted in the dtype in which they were saved.
        if all(jnp.issubdtype(jnp.dtype(each.dtype), jnp.floating) for each in (saved, wanted)):
            wanted = msgspec.structs.replace(wanted, dtype=saved.dtype)
        mine.append(wanted)
    differing = differences([theirs[name] for name in both], mine)
    if differing:
        raise InputError(
            listing(
                f"{where} has other shapes",
                differing,
                "Only arrays of the same shape are restored, floats also in another width: build"
                " the model as it was saved.",
            )
        )
    new = tuple(name for name in names if name not in both)
    return both, new, tuple(name for name in theirs if name not in both)
