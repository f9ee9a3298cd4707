"""Files of tokens: one line of JSON that says what they are, and then the ids themselves.

The ids are read through the page cache of the operating system (`numpy.memmap`), so a file may be
larger than the memory, and processes of one machine share it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core import InputError, format_bytes, format_count, open_atomic, shortened
from ._tokenizer import Tokenizer

_FORMAT = "aliquot tokens"
_VERSION = 1
# The header is written twice: before the tokens, and again once these are counted.
_HEADER_BYTES = 1024
_MOST_HEADER_BYTES = 2**16
_DTYPES = ("uint8", "uint16", "uint32")


# Ids of more tokens than these are checked when they are used, not when a file is opened.
MOST_CHECKED = 2**28
_CHECKED_AT_ONCE = 2**24
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: Annotated[int, msgspec.Meta(ge=1)]
    vocabulary: Annotated[int, msgspec.Meta(ge=1)]
    dtype: str
    count: _Count
    documents: _Count
    tokenizer: str
    tokenizer_sha256: str
    end: _Count | None = None
    mask: _Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFile:
    """Token ids in a file.

    Attributes:
        path: of the file.
        tokens: the ids, read from the disk as they are needed.
        vocabulary: ids are below this number.
        documents: how many documents they come from.
        tokenizer, tokenizer_sha256: the name of the tokenizer and the digest of its files; empty
            where the file does not say.
        mask: the id of its mask, None if it has none.
    """

    path: Path
    tokens: NDArray[Any] = field(repr=False)
    vocabulary: int
    documents: int
    tokenizer: str
    tokenizer_sha256: str
    mask: int | None

    @classmethod
    def open(cls, path: str | Path) -> TokenFile:
        """The tokens of a file that `write_tokens` has written.

        Raises:
            InputError: it cannot be read, is no such file, is cut short, or has ids that are not in
                its vocabulary.
        """
        path = Path(path)
        advice = "Make it again: aliquot data TEXT... --out " + str(path)
        try:
            if path.exists() and not path.is_file():
                raise InputError(f"{path} is no file, as tokens need one. {advice}")
            with path.open("rb") as stream:
                line = stream.readline(_MOST_HEADER_BYTES)
            size_bytes = path.stat().st_size
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
        try:
            header = msgspec.json.decode(line, type=_Header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _not_one(path, line, error, advice) from None
        if header.version > _VERSION:
            raise InputError(
                f"{path} is of version {header.version} of the format, and this aliquot reads"
                f" {_VERSION}. Update aliquot, or make the file again with this one."
            )
        for name, number in (("end", header.end), ("mask", header.mask)):
            if number is not None and number >= header.vocabulary:
                raise InputError(
                    f"{path}: its first line says {name} {number}, and ids are below"
                    f" {header.vocabulary}. {advice}"
                )
        if header.format != _FORMAT or header.dtype not in _DTYPES:
            raise InputError(
                f"{path}: its first line says format {header.format!r} and dtype {header.dtype!r};"
                f" known are {_FORMAT!r} with {', '.join(_DTYPES)}. {advice}"
            )
        dtype = np.dtype(header.dtype)
        wanted_bytes = len(line) + header.count * dtype.itemsize
        if size_bytes != wanted_bytes:
            short = "cut short" if size_bytes < wanted_bytes else "too long"
            raise InputError(
                f"{path} is {short}: it has {format_bytes(size_bytes)} ({size_bytes} bytes), and"
                f" {format_count(header.count)} tokens of {header.dtype} with the header have"
                f" {wanted_bytes}. {advice}"
            )
        tokens: NDArray[Any] = (
            np.memmap(path, dtype.newbyteorder("<"), "r", len(line), (header.count,))
            if header.count
            else np.zeros(0, dtype)
        )
        require_known(tokens[:MOST_CHECKED], header.vocabulary, str(path), f" {advice}")
        return cls(
            path=path,
            tokens=tokens,
            vocabulary=header.vocabulary,
            documents=header.documents,
            tokenizer=header.tokenizer,
            tokenizer_sha256=header.tokenizer_sha256,
            mask=header.mask,
        )


def require_known(ids: NDArray[Any], vocabulary: int, where: str, advice: str = "") -> None:
    """Raises `InputError` for the first id that a vocabulary does not have: a model would make nan
    of it.
    """
    known = np.iinfo(ids.dtype)
    if known.min == 0 and known.max < vocabulary:
        return
    for start in range(0, len(ids), _CHECKED_AT_ONCE):
        part = ids[start : start + _CHECKED_AT_ONCE]
        if part.max() < vocabulary and part.min() >= 0:
            continue
        place = int(np.argmax((part >= vocabulary) | (part < 0)))
        raise InputError(
            f"{where}: token {start + place} has id {part[place]}, and ids are below"
            f" {vocabulary}: a model would have no embedding for it.{advice}"
        )


def is_token_file(path: str | Path) -> bool:
    """Whether a file begins as token files do. False also where it cannot be read, and for pipes,
    of which nothing is read.
    """
    beginning = f'{{"format":"{_FORMAT}"'.encode()
    try:
        if not Path(path).is_file():
            return False
        with Path(path).open("rb") as stream:
            return stream.read(len(beginning)) == beginning
    except OSError:
        return False


def write_tokens(path: str | Path, documents: Iterable[bytes], tokenizer: Tokenizer) -> TokenFile:
    """Write the tokens of documents to a file, and open it. The file appears when it is complete.

    Args:
        documents: each as UTF-8.

    Raises:
        InputError: it cannot be written, is a pipe or a device, or there are no tokens; the
            tokenizer gives ids that its vocabulary does not have; or as `documents` raises.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise InputError(
            f"cannot write tokens to {path}: it is a pipe or a device, and training reads them from"
            " any place. Give the name of a file."
        )
    dtype = np.dtype(next(d for d in _DTYPES if tokenizer.vocabulary - 1 <= np.iinfo(d).max))
    stored = dtype.newbyteorder("<")
    count = num_documents = 0
    with open_atomic(path) as stream:
        stream.write(b" " * _HEADER_BYTES)
        for text in documents:
            ids = tokenizer.encode(text)
            where = f"{tokenizer.name}, document {num_documents + 1}"
            require_known(ids, tokenizer.vocabulary, where, " Its files do not belong together.")
            stream.write(np.ascontiguousarray(ids, stored).data)
            count += ids.size
            num_documents += 1
            if tokenizer.end is not None:
                stream.write(np.asarray(tokenizer.end, stored).tobytes())
                count += 1
        if not count:
            raise InputError(f"the text has no tokens, so {path} was not written. Give more text.")
        header = _Header(
            format=_FORMAT,
            version=_VERSION,
            vocabulary=tokenizer.vocabulary,
            dtype=dtype.name,
            count=count,
            documents=num_documents,
            tokenizer=shortened(tokenizer.name, 200),
            tokenizer_sha256=tokenizer.sha256,
            end=tokenizer.end,
            mask=tokenizer.mask,
        )
        line = msgspec.json.encode(header)
        stream.seek(0)
        stream.write(line.ljust(_HEADER_BYTES - 1) + b"\n")
    return TokenFile.open(path)


def _not_one(path: Path, line: bytes, error: Exception, advice: str) -> InputError:
    try:
        is_json = isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        is_json = False
    if is_json:
        return InputError(f"{path}: its first line is no header of tokens: {error}. {advice}")
    return InputError(
        f"{path} is no file of tokens: its first line is not the JSON that says what they are."
        f" {advice}"
    )
