"""Cache of compilers' answers, by a hash of the request: program, target, flags and releases."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..core import AliquotError, InputError, read_file, write_atomic
from ..runtime import CompiledCollective
from ._program import Dims

_MOST_ENTRIES = 500
_MOST_BYTES = 64 * 2**20

Whole = Annotated[int, Meta(ge=0, le=2**60)]
Number = Annotated[float, Meta(ge=0.0, le=1e18)]


class AccountedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on each device, as the compiler assigned them; see `CompiledProgram`."""

    argument_bytes: Whole
    output_bytes: Whole
    temp_bytes: Whole
    alias_bytes: Whole
    live_bytes: Whole
    host_bytes: Whole


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """What a compiler says of a program, as the worker writes it and the cache keeps it."""

    memory: AccountedMemory
    collectives: tuple[CompiledCollective, ...]
    out_dims: tuple[Dims | None, ...]
    out_bytes: tuple[Whole, ...]
    cycles: Number
    modelled_compute_s: Number
    unpriced_calls: Number
    compile_s: Number


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """What stands for a program that is too big for its device."""

    refusal: str
    needed_bytes: Number


def account_of(answer: Mapping[str, Any]) -> Account | Refusal:
    """An answer as it was written, read.

    Raises:
        msgspec.ValidationError: it is none.
    """
    kind: type[Account | Refusal] = Refusal if "refusal" in answer else Account
    return msgspec.convert(answer, kind)


def default_cache() -> Path:
    """The folder of cached answers: `aliquot/verify` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "aliquot" / "verify"


def read_answer(folder: Path, key: str) -> dict[str, Any] | None:
    """The answer cached under a key; None if there is none, or if what is there is no answer: it is
    then asked for again.
    """
    try:
        answer = msgspec.json.decode(
            read_file(folder / f"{key}.json", _MOST_BYTES), type=dict[str, Any]
        )
        account_of(answer)
    except (InputError, msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return answer


def keep_answer(folder: Path, key: str, answer: dict[str, Any]) -> str:
    """Cache an answer. Returns the reason if that was not possible, else an empty text; does not
    raise, since an answer is of use without a cache.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / f"{key}.json", json.dumps(answer))
    except (OSError, AliquotError) as error:
        return f"the result is not kept for the next time: {error}"
    # Another process may clear the folder at the same time.
    with contextlib.suppress(OSError):
        entries = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in entries[_MOST_ENTRIES:]:
            path.unlink(missing_ok=True)
    return ""
