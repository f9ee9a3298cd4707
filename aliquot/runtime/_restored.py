"""What comes out of a checkpoint, and how it is compared with what is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec

from ..core import InputError, counted, listing
from .checkpoints import Record, SavedArray, Target, differences
from .transport import PiecedArray, Rows, struct

_FLOATS = ("float", "bfloat")


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


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint and a tree have in common, by places.

    Attributes:
        both: arrays of both, with their positions in the tree.
        new, left_out: see `Restored`.
        notes: one sentence for each kind of floats that are rounded.
    """

    both: dict[str, int]
    new: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def shared(record: Record, names: Sequence[str], leaves: Sequence[Any], folder: Path) -> Shared:
    """What a checkpoint and a tree have in common.

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
    rounded: dict[tuple[str, str], list[str]] = {}
    for name, k in both.items():
        saved, wanted = theirs[name], saved_array(name, leaves[k])
        if saved.dtype.startswith(_FLOATS) and wanted.dtype.startswith(_FLOATS):
            kinds = saved.dtype, wanted.dtype
            if jnp.promote_types(*kinds) != jnp.dtype(wanted.dtype):
                rounded.setdefault(kinds, []).append(name)
            # Floats are wanted in the dtype in which they were saved.
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
    notes = []
    for (before, after), places in rounded.items():
        some = ", ".join(places[:3]) + (", ..." if len(places) > 3 else "")
        notes.append(f"{counted(len(places), 'array')} rounded from {before} to {after}: {some}.")
    return Shared(
        both=both,
        new=tuple(name for name in names if name not in both),
        left_out=tuple(name for name in theirs if name not in both),
        notes=tuple(notes),
    )
