"""Text from files and folders, document by document."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..core import InputError, listing
from ._token_file import is_token_file

_STDLIB_BYTES = 8_000_000


def text_files(paths: Sequence[str | Path]) -> tuple[list[Path], list[Path]]:
    """The files of text that paths name: files themselves, and all files of folders in order of
    name; and the files of tokens in these folders, which are no text.

    Raises:
        InputError: a path is missing, unreadable, has no text, or is a named pipe or a file of
            tokens; every such path is named.
    """
    files: list[Path] = []
    tokens: list[Path] = []
    faults: list[str] = [] if paths else ["no path was given"]
    for path in map(Path, paths):
        # A pipe of the shell's, such as `<(zcat FILE)`, has no name in any folder.
        if Path(os.path.realpath(path)).is_fifo():
            faults.append(f"{path} is a named pipe, for which nobody may ever write")
            continue
        try:
            found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
            size_bytes = sum(file.stat().st_size for file in found)
            for file in found:
                file.open("rb").close()
        except OSError as error:
            faults.append(f"{path} cannot be read ({error.strerror or error})")
            continue
        # A pipe has no size.
        if not size_bytes and (path.is_dir() or path.is_file()):
            faults.append(f"{path} is empty")
        for file in found:
            (tokens if is_token_file(file) else files).append(file)
        if tokens[-1:] == [path]:
            faults.append(f"{path} is a file of tokens and no text")
    if not files and not faults:
        faults.append(f"{listed(tokens)} hold tokens and no text")
    if faults:
        raise InputError(
            f"Training data: {'; '.join(faults)}. Give files, or folders of files, that hold text."
        )
    return files, tokens


def listed(paths: Sequence[Path]) -> str:
    """The first few of some paths, in words.

    >>> listed([Path("a"), Path("b"), Path("c"), Path("d")])
    'a, b, c, ...'
    """
    return ", ".join(map(str, paths[:3])) + ", ..." * (len(paths) > 3)


def documents(paths: Sequence[str | Path], *, json_key: str = "text") -> Iterator[bytes]:
    """The documents of files, as UTF-8: each file is one, and each line of a file `*.jsonl` is an
    object that holds one under `json_key`. Files of tokens in folders are left out.

    Raises:
        InputError: as for `text_files`, or a line is no such object.
    """
    yield from documents_of(text_files(paths)[0], json_key=json_key)


def documents_of(files: Sequence[Path], *, json_key: str = "text") -> Iterator[bytes]:
    """The documents of these files, as `text_files` found them. Empty files hold none.

    Raises:
        InputError: a line is no such object.
    """
    for file in files:
        if file.suffix != ".jsonl":
            if text := file.read_bytes():
                yield text
            continue
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _text_of(line, json_key, f"{file}, line {number}")


def _text_of(line: bytes, key: str, where: str) -> bytes:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is no JSON: {error}. Each line must be one object.") from None
    except RecursionError:
        raise InputError(
            f"{where} is JSON that is nested too deeply to be read. Each line must be one object"
            f" with a text under {key!r}."
        ) from None
    if not isinstance(found, dict) or not isinstance(found.get(key), str):
        keys = f" It has {', '.join(map(str, found))}." if isinstance(found, dict) else ""
        raise InputError(
            f"{where} is no object with a text under {key!r}.{keys} Name the key with --json-key."
        )
    text: str = found[key]
    return text.encode("utf-8", "surrogatepass")


def read_text(paths: Sequence[str | Path]) -> NDArray[np.uint8]:
    """All bytes of files, and of all files of folders in order of name, joined by new lines.

    Raises:
        InputError: a path is missing, unreadable or empty; every such path is named. Or files of
            tokens lie in a folder of text.
    """
    files, tokens = text_files(paths)
    if tokens:
        raise InputError(
            f"Training data: {listed(tokens)} among the texts holds tokens. Train on these, by the"
            " name of the one file, or move them out of the folder."
        )
    text = b"\n".join(file.read_bytes() for file in files)
    if not text.strip(b"\n"):
        raise InputError(listing("training data", ["the files are empty"], "Give files of text."))
    return np.frombuffer(text, np.uint8)


def standard_library() -> NDArray[np.uint8]:
    """The first 8 MB of the Python standard library's own `.py` files: a text that every machine
    with Python has.

    Raises:
        InputError: they are not there.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    chunks: list[bytes] = []
    size_bytes = 0
    for path in sorted(folder.rglob("*.py"), key=lambda p: p.relative_to(folder).as_posix()):
        if size_bytes >= _STDLIB_BYTES:
            break
        if skipped.intersection(path.relative_to(folder).parts):
            continue
        try:
            chunks.append(path.read_bytes())
        except OSError:
            continue
        size_bytes += len(chunks[-1])
    if not chunks:
        raise InputError(
            f"No readable .py file in {folder}, where Python's own sources should be. Give files of"
            " text."
        )
    return np.frombuffer(b"\n".join(chunks)[:_STDLIB_BYTES], np.uint8)
