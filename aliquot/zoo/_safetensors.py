"""Arrays in files of the `safetensors` format, read in pieces from the mapped files.

The library `safetensors` gives no arrays of NumPy in bfloat16, which most published weights have.
The format is an 8-byte length, a JSON header with the dtype, shape and place of each array, and
their bytes.

Reference: the format as https://github.com/huggingface/safetensors describes it.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core import InputError, listing, read_file, shortened

_INDEX = "model.safetensors.index.json"
_MOST_HEADER_BYTES = 100 * 10**6
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _Entry(msgspec.Struct):
    """What a header says of an array; offsets count from the end of the header, in bytes."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    """Which file holds which array."""

    weight_map: dict[str, str]


def safetensors_in(folder: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """The arrays of a folder of Hugging Face by name, mapped: only what is indexed is read.

    Raises:
        InputError: there are no such files, some are missing, or are not what they should be; or
            arrays have a dtype that is not one of 16, 32 or 64 bits.
    """
    folder = Path(folder)
    shown = shortened(str(folder), 200)
    if (folder / _INDEX).is_file():
        try:
            read = msgspec.json.decode(read_file(folder / _INDEX, _MOST_HEADER_BYTES), type=_Index)
        except (InputError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InputError(f"{shown}/{_INDEX} cannot be read: {error}.") from error
        files = sorted(set(read.weight_map.values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in folder.glob("*.bin"))[:1]
        instead = f"{others[0]} can only be read by running what it says. " if others else ""
        raise InputError(
            f"{shown} holds no weights in files *.safetensors. {instead}Save them with"
            " model.save_pretrained(folder), which writes such files."
        )
    arrays: dict[str, NDArray[Any]] = {}
    faults = []
    for name in files:
        try:
            if Path(name).name != name:
                raise InputError("it lies in another folder")
            arrays |= _mapped(folder / name)
        except InputError as error:
            faults.append(f"{shortened(name, 100)}: {error}")
    if faults:
        raise InputError(listing(f"the weights in {shown} cannot be read", faults))
    return arrays


def _mapped(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of one file. Raises `InputError` with a part of a sentence."""
    import ml_dtypes

    try:
        raw = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise InputError(getattr(error, "strerror", None) or "it is empty") from error
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    if start > min(raw.size, _MOST_HEADER_BYTES):
        raise InputError("it is no file of safetensors, or is not complete")
    try:
        header = msgspec.json.decode(raw[8:start].tobytes(), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {n: msgspec.json.decode(each, type=_Entry) for n, each in header.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"its header cannot be read: {error}") from error
    arrays = {}
    for name, entry in entries.items():
        if entry.dtype not in _DTYPES:
            # Such as counters and masks, which are no weights.
            continue
        dtype = np.dtype(getattr(ml_dtypes, _DTYPES[entry.dtype], _DTYPES[entry.dtype]))
        first, last = entry.data_offsets
        expected = math.prod(entry.shape) * dtype.itemsize
        if min([first, *entry.shape]) < 0 or last - first != expected or start + last > raw.size:
            raise InputError(f"{shortened(name, 100)} does not lie in it: it is not complete")
        arrays[name] = raw[start + first : start + last].view(dtype).reshape(entry.shape)
    return arrays
