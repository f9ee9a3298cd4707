"""What a checkpoint says of itself, and which ones a folder holds. Nothing here reads arrays.

A checkpoint is a folder whose name is its number: `state` as Orbax stores trees of arrays, and
`meta/metadata`, the record as JSON. Orbax gives it its name only when all of it is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ...core import HOW_TO_UPDATE, InputError, counted, faults_of

#: Rises when older releases could not read what newer ones write.
FORMAT = 2
#: The first one. Its checkpoints are restored, but nothing tells whether they are still whole.
FORMAT_WITHOUT_CHECKSUMS = 1
# Of a checkpoint that is being written, or whose writing was broken off.
_UNFINISHED = re.compile(r"(\d+)\.orbax-checkpoint-tmp.*")


class SavedArray(msgspec.Struct, frozen=True, kw_only=True):
    """An array of the state: its place in it, such as `params.w`, its shape and dtype."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself.

    Attributes:
        format: see `FORMAT`.
        number: of the checkpoint, mostly that of the next step.
        saved_at: when saving began, as ISO 8601 in UTC.
        versions: of Python and of the packages that wrote it.
        processes: how many wrote it.
        writers: those that wrote arrays.
        arrays: of the state, in its order.
        meta: plain data of the caller.
    """

    format: Annotated[int, msgspec.Meta(ge=1)]
    number: Annotated[int, msgspec.Meta(ge=0)]
    saved_at: str
    versions: dict[str, str]
    processes: int
    writers: tuple[int, ...]
    arrays: tuple[SavedArray, ...]
    meta: dict[str, Any]


def numbers(folder: Path) -> list[int]:
    """The checkpoints in a folder that have their final names, ascending.

    Raises:
        InputError: the folder cannot be listed.
    """
    # Others, such as 007, are not names that we give.
    return sorted(int(name) for name in _names(folder) if re.fullmatch("0|[1-9][0-9]*", name))


def unfinished(folder: Path) -> list[str]:
    """Names of checkpoints whose writing did not end."""
    return sorted(name for name in _names(folder) if _UNFINISHED.fullmatch(name))


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir() if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InputError(
            f"cannot look for checkpoints in {str(folder)!r}: {error.strerror or error}."
        ) from error


def read_record(folder: Path, number: int) -> Record:
    """The record of a checkpoint.

    Raises:
        InputError: there is none that this release understands. It names what is wrong.
    """
    path = folder / str(number) / "meta" / "metadata"
    where = f"checkpoint {number} in {str(folder)!r}"
    try:
        data = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(
            f"{where} has no record {path.relative_to(folder)}: it was not written by aliquot, or"
            " was copied in part."
        ) from error
    except OSError as error:
        raise InputError(f"cannot read {where}: {error.strerror or error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{where} has a damaged record: {error}.") from error
    written = data.get("format") if isinstance(data, dict) else None
    if isinstance(written, int) and written > FORMAT:
        versions = data.get("versions")
        by = versions.get("aliquot", "?") if isinstance(versions, dict) else "?"
        raise NewerError(
            f"{where} has format {written}, and was written by aliquot {by}. This release reads"
            f" formats up to {FORMAT}. {HOW_TO_UPDATE}."
        )
    faults = list(faults_of(data, Record, ""))
    if faults:
        raise InputError(f"{where} has a damaged record: {'; '.join(faults[:3])}.")
    record = msgspec.convert(data, Record)
    if record.number != number:
        raise InputError(
            f"{where} is checkpoint {record.number} by its own record: its folder was copied or"
            f" renamed. Give it its name {record.number} again, in a folder of its own if need be."
        )
    return record


class NewerError(InputError):
    """A checkpoint that only a newer release reads. An older one beside it is not meant instead."""


def missing_parts(folder: Path, record: Record) -> list[str]:
    """Files that a complete checkpoint has and this one lacks."""
    parts = ["_METADATA", "manifest.ocdbt"]
    parts += [f"ocdbt.process_{process}/manifest.ocdbt" for process in record.writers]
    names = [f"{record.number}/state/{part}" for part in parts]
    return [name for name in names if not (folder / name).is_file()]


def differences(saved: Sequence[SavedArray], wanted: Iterable[SavedArray]) -> list[str]:
    """One sentence for each array that is not the same in both."""
    theirs = {array.path: array for array in saved}
    mine = {array.path: array for array in wanted}
    lines = []
    for path, array in mine.items():
        if path not in theirs:
            lines.append(f"{path} ({array}) is not in the checkpoint")
        elif theirs[path] != array:
            lines.append(f"{path} is {theirs[path]} in the checkpoint and {array} here")
    for path, array in theirs.items():
        if path not in mine:
            lines.append(f"{path} ({array}) is in the checkpoint and not here")
    return lines


def known(folder: Path, found: Sequence[int]) -> str:
    """The half-sentence that lists the checkpoints of a folder."""
    if not found:
        left = unfinished(folder)
        half = f", only {counted(len(left), 'unfinished one')}: {', '.join(left)}" if left else ""
        return f"{str(folder)!r} holds no complete checkpoint{half}"
    return f"{str(folder)!r} holds {', '.join(map(str, found))}"


def as_json(record: Record) -> Mapping[str, Any]:
    """The record as plain data."""
    plain: Mapping[str, Any] = msgspec.to_builtins(record)
    return plain


def reason(error: BaseException) -> str:
    """An error in a few words, without places in the source of tensorstore."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).split(" [")[0].rstrip(".")
