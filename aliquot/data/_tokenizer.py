"""Tokenizers: text to token ids. Only files are read; nothing is fetched."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core import InputError, MissingExtraError, shortened

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_MASKS = ("[MASK]", "<mask>")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenizer:
    """Turns documents into token ids below `vocabulary`.

    Attributes:
        encode: from a document as UTF-8 to its ids.
        decode: from ids to their text as UTF-8; ids that it does not know are left out.
        name: for readers.
        sha256: of what decides the ids: equal text gives equal ids wherever it is equal.
        vocabulary: the number of ids.
        end: the id behind each document, None for none.
        mask: the id of the mask, None if it has none.
    """

    encode: Callable[[bytes], NDArray[Any]]
    decode: Callable[[Sequence[int]], bytes]
    name: str
    sha256: str
    vocabulary: int
    end: int | None = None
    mask: int | None = None


def byte_tokenizer() -> Tokenizer:
    """Bytes as ids, with a new line behind each document.

    >>> byte_tokenizer().encode(b"ab").tolist(), byte_tokenizer().decode([97, 98])
    ([97, 98], b'ab')
    """
    return Tokenizer(
        encode=lambda text: np.frombuffer(text, np.uint8),
        decode=lambda ids: bytes(k for k in ids if k < 256),
        name="bytes",
        sha256=hashlib.sha256(b"bytes").hexdigest(),
        vocabulary=256,
        end=ord("\n"),
    )


def read_tokenizer(path: str | Path, *, end: str | None = None) -> Tokenizer:
    """A tokenizer from the JSON file of the `tokenizers` library, usually `tokenizer.json`.

    Args:
        end: the token behind each document; by default the first of the usual ones that it has.

    Raises:
        InputError: the file cannot be read, is none, or has no such token.
        MissingExtraError: `tokenizers` is not installed.
    """
    made, content = _made(lambda library: library.Tokenizer.from_file(str(path)), Path(path))
    return _wrapped(made, Path(path).name, content, end)


def read_gpt2_tokenizer(
    vocab: str | Path, merges: str | Path, *, end: str | None = None
) -> Tokenizer:
    """GPT-2's tokenizer from its own two files, `vocab.json` and `merges.txt`.

    Args, Raises: as for `read_tokenizer`.
    """

    def make(library: Any) -> Any:
        model = library.models.BPE.from_file(str(vocab), str(merges))
        made = library.Tokenizer(model)
        made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        return made

    made, content = _made(make, Path(vocab), Path(merges))
    return _wrapped(made, f"{Path(vocab).name} and {Path(merges).name}", content, end)


def _made(make: Callable[[Any], Any], *paths: Path) -> tuple[Any, bytes]:
    """What a function makes with the `tokenizers` library, and the digests of the files."""
    faults, digests = [], []
    for path in paths:
        if path.exists() and not path.is_file():
            faults.append(f"{path} is no file")
            continue
        try:
            digests.append(hashlib.sha256(path.read_bytes()).digest())
        except OSError as error:
            faults.append(f"{path} cannot be read ({error.strerror or error})")
    if faults:
        raise InputError(f"There is no tokenizer: {'; '.join(faults)}.")
    try:
        import tokenizers
        import tokenizers.models
        import tokenizers.pre_tokenizers
    except ImportError:
        raise MissingExtraError("train", "tokenizers") from None
    try:
        return make(tokenizers), b"".join(digests)
    except Exception as error:
        # The library raises plain `Exception`s.
        named = " and ".join(map(str, paths))
        raise InputError(
            f"{named}: not read as a tokenizer: {shortened(str(error), 200)}. --tokenizer takes the"
            " JSON file of the tokenizers library, --vocab-file with --merge-file GPT-2's"
            " vocab.json and merges.txt."
        ) from None


def _wrapped(made: Any, name: str, content: bytes, end: str | None) -> Tokenizer:
    known = made.get_vocab(with_added_tokens=True)
    if not known:
        raise InputError(
            f"{name} has an empty vocabulary: no text becomes tokens with it. Give the files of a"
            " tokenizer that was trained."
        )
    if end is not None and end not in known:
        raise InputError(
            f"{name} has no token {shortened(end, 60)!r} to put behind each document. Leave"
            " --end-of-text out, or name one that it has."
        )
    ending = end or next((token for token in _ENDS if token in known), None)
    number = None if ending is None else known[ending]

    def encode(text: bytes) -> NDArray[Any]:
        decoded = text.decode("utf-8", "replace")
        return np.asarray(made.encode(decoded, add_special_tokens=False).ids, np.uint32)

    def decode(ids: Sequence[int]) -> bytes:
        text: str = made.decode(list(ids), skip_special_tokens=False)
        return text.encode()

    return Tokenizer(
        encode=encode,
        decode=decode,
        name=name,
        sha256=hashlib.sha256(content + str(number).encode()).hexdigest(),
        # Ids need not be without gaps.
        vocabulary=max(known.values()) + 1,
        end=number,
        mask=next((known[token] for token in _MASKS if token in known), None),
    )
