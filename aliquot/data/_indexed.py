"""Indexed data of Megatron-LM: token ids in `PREFIX.bin`, and where sequences begin in
`PREFIX.idx`.

The index holds, little endian: a magic word, a version, a code of the dtype, the numbers of
sequences and of document bounds; the length of each sequence (int32), its place in bytes (int64),
and the first sequence of each document (int64).

Reference: Megatron-LM, `megatron/core/datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core import InputError
from ._token_file import MOST_CHECKED, TokenFile, require_known

_MAGIC = b"MMIDIDX\0\0"
# Of `--data-impl lazy` and `cached`.
_OLD_MAGIC = b"TNTIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = dict(enumerate("uint8 int8 int16 int32 int64 float64 float32 uint16".split(), 1))
_AGAIN = "Make them again with Megatron-LM's tools/preprocess_data.py, or with aliquot data."


def is_indexed(path: str | Path) -> bool:
    """Whether a path names indexed data of Megatron-LM: by their prefix, as `--data-path` does, or
    by one of their two files.
    """
    index, ids = _files(path)
    try:
        if Path(path).is_dir() or not index.is_file() or not ids.is_file():
            return False
        with index.open("rb") as stream:
            return stream.read(len(_MAGIC)).startswith((_MAGIC, _OLD_MAGIC))
    except OSError:
        return False


def open_indexed(path: str | Path) -> TokenFile:
    """The tokens of indexed data, read from the disk as they are needed.

    These files say nothing of their tokenizer: `tokenizer` is empty, and `vocabulary` is one more
    than the largest of the first 268 million ids.

    Raises:
        InputError: a file cannot be read, is cut short, is of an unknown kind or dtype, or the
            sequences do not stand one behind the other.
    """
    index, ids = _files(path)
    try:
        content = np.memmap(index, np.uint8, "r")
        size_bytes = ids.stat().st_size
    except (OSError, ValueError) as error:
        raise InputError(f"{index} cannot be read: {error}.") from None
    if content[:8].tobytes() == _OLD_MAGIC:
        raise InputError(
            f"{index} was written with --data-impl lazy or cached, and those with --data-impl mmap"
            f" are read here. {_AGAIN}"
        )
    if len(content) < _HEADER.size:
        raise InputError(f"{index} is cut short: it has {len(content)} bytes. {_AGAIN}")
    _, version, code, sequences, bounds = _HEADER.unpack(content[: _HEADER.size].tobytes())
    name = _DTYPES.get(code, f"code {code}")
    if version != 1 or not name.startswith(("int", "uint")):
        raise InputError(
            f"{index} is of version {version} and has ids of dtype {name}; version 1 is read here,"
            f" with ids of {', '.join(d for d in _DTYPES.values() if 'float' not in d)}. {_AGAIN}"
        )
    wanted_bytes = _HEADER.size + 12 * sequences + 8 * bounds
    # A byte more for each sequence is the mode of data that are not only text.
    if len(content) not in (wanted_bytes, wanted_bytes + sequences):
        raise InputError(
            f"{index} has {len(content)} bytes, and {sequences} sequences in {bounds - 1} documents"
            f" have {wanted_bytes}. {_AGAIN}"
        )
    dtype = np.dtype(name)
    places = _HEADER.size + 4 * sequences
    lengths = content[_HEADER.size : places].view("<i4").astype(np.int64)
    starts = content[places : places + 8 * sequences].view("<i8")
    ends = np.cumsum(lengths) * dtype.itemsize
    count = int(lengths.sum())
    if size_bytes != count * dtype.itemsize:
        raise InputError(
            f"{ids} has {size_bytes} bytes, and {index} says {count} ids of {name}, which have"
            f" {count * dtype.itemsize}: these files do not belong together, or one is cut short."
            f" {_AGAIN}"
        )
    if (lengths < 0).any() or (starts != ends - lengths * dtype.itemsize).any():
        raise InputError(
            f"{index}: sequences do not stand one behind the other in {ids.name}, so that it is no"
            f" row of tokens. {_AGAIN}"
        )
    tokens: NDArray[Any] = (
        np.memmap(ids, dtype.newbyteorder("<"), "r", 0, (count,)) if count else np.zeros(0, dtype)
    )
    looked_at = tokens[:MOST_CHECKED]
    vocabulary = int(looked_at.max()) + 1 if count else 1
    require_known(looked_at, vocabulary, str(ids), f" {_AGAIN}")
    return TokenFile(
        path=ids,
        tokens=tokens,
        vocabulary=vocabulary,
        documents=max(0, bounds - 1),
        tokenizer="",
        tokenizer_sha256="",
        mask=None,
    )


def _files(path: str | Path) -> tuple[Path, Path]:
    """The index and the ids that a prefix, or one of the two names, means."""
    prefix = str(path).removesuffix(".idx").removesuffix(".bin")
    return Path(prefix + ".idx"), Path(prefix + ".bin")
