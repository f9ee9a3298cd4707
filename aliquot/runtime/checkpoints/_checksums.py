"""Whether a checkpoint is still what was written.

Each chunk of an array ends with its own checksum (XXH64, as zstd computes it), which is compared
whenever the chunk is read: a process that restores checks all that it reads, however the arrays
were cut. For the files around the chunks, `checksums.json` holds the size and the CRC-32 of each.
It ties the record to the arrays too: no other ones can take their place.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import msgspec

from ._record import FORMAT_WITHOUT_CHECKSUMS, Record, missing_parts, reason

NAME = "checksums.json"
# Of files in which chunks lie, these bytes at the beginning and at the end.
_END_BYTES = 64 * 2**10
# What the store writes once all else is there, and nobody of us reads.
_NOT_OURS = ("commit_success.txt", "_CHECKPOINT_METADATA", NAME)


def write_checksums(checkpoint: Path) -> None:
    """Write the checksums of a checkpoint's files, before it gets its final name."""
    found = {name: _checksum(path) for name, path in _files(checkpoint).items()}
    (checkpoint / NAME).write_text(json.dumps(found))


def damage(folder: Path, record: Record) -> str:
    """What is wrong with a checkpoint, without reading its chunks; empty if nothing is."""
    missing = missing_parts(folder, record)
    if missing:
        return f"{missing[0]} is missing"
    checkpoint = folder / str(record.number)
    try:
        data = (checkpoint / NAME).read_bytes()
        written = msgspec.json.decode(data, type=dict[str, tuple[int, int]])
        there = _files(checkpoint)
        for name, (size_bytes, checksum) in written.items():
            where = f"{record.number}/{name}"
            if name not in there:
                return f"{where} is missing"
            found_bytes, found = _checksum(there[name])
            if found_bytes != size_bytes:
                return f"{where} has {found_bytes} bytes, and {size_bytes} were written"
            if found != checksum:
                return f"{where} is not what was written: its checksum is another"
    except FileNotFoundError:
        if record.format > FORMAT_WITHOUT_CHECKSUMS:
            return f"{record.number}/{NAME} is missing"
    except OSError as error:
        return f"a file cannot be read: {reason(error)}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"{record.number}/{NAME} is damaged: {error}"
    return ""


def _files(checkpoint: Path) -> dict[str, Path]:
    """The files of a checkpoint by their names in it."""
    files = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.name not in _NOT_OURS and path.is_file():
            files[path.relative_to(checkpoint).as_posix()] = path
    return files


def _checksum(path: Path) -> tuple[int, int]:
    """The size of a file, and its CRC-32."""
    with path.open("rb") as stream:
        size_bytes = path.stat().st_size
        if path.parent.name != "d" or size_bytes <= 2 * _END_BYTES:
            return size_bytes, zlib.crc32(stream.read())
        begun = zlib.crc32(stream.read(_END_BYTES))
        stream.seek(size_bytes - _END_BYTES)
        return size_bytes, zlib.crc32(stream.read(), begun)
