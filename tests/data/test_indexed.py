"""Indexed data of Megatron-LM: what is read, and what is refused."""

import struct

import numpy as np
import pytest

from aliquot.core import InputError
from aliquot.data import is_indexed, open_indexed

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float32": 7, "uint16": 8}


def indexed(folder, sequences, dtype="int32", name="text_document", version=1, **changed):
    """Write indexed data as `tools/preprocess_data.py` does, one document for each sequence."""
    rows = [np.asarray(row, dtype) for row in sequences]
    lengths = np.array([len(row) for row in rows], "<i4")
    starts = np.array([sum(lengths[:k]) * rows[0].itemsize for k in range(len(rows))], "<i8")
    bounds = np.arange(len(rows) + 1, dtype="<i8")
    parts = {"lengths": lengths, "starts": starts, "bounds": bounds} | changed
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, CODES[dtype], len(rows), len(bounds))
    (folder / f"{name}.bin").write_bytes(b"".join(row.tobytes() for row in rows))
    body = b"".join(part.tobytes() for part in parts.values())
    (folder / f"{name}.idx").write_bytes(header + body)
    return folder / name


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "uint16"])
def test_tokens_are_those_that_were_written(tmp_path, dtype):
    prefix = indexed(tmp_path, [[1, 2, 3], [4], [5, 6]], dtype)
    for path in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        assert is_indexed(path)
        found = open_indexed(path)
        assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6]
        assert (found.tokens.dtype, found.vocabulary, found.documents) == (dtype, 7, 3)


def test_modes_behind_the_index_are_allowed(tmp_path):
    prefix = indexed(tmp_path, [[1, 2], [3]], modes=np.zeros(2, np.int8))
    assert open_indexed(prefix).tokens.tolist() == [1, 2, 3]


def test_other_files_are_not_indexed_data(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"text")
    assert not is_indexed(tmp_path / "a.bin")
    (tmp_path / "a.idx").write_bytes(b"something else")
    assert not is_indexed(tmp_path / "a.bin")
    assert not is_indexed(tmp_path)


def refused(prefix, *parts):
    with pytest.raises(InputError) as error:
        open_indexed(prefix)
    for part in parts:
        assert part in str(error.value)


def test_what_cannot_be_read_is_refused_with_the_file_and_both_figures(tmp_path):
    rows = [[1, 2, 3], [4]]
    prefix = indexed(tmp_path, rows, "float32")
    refused(prefix, "text_document.idx", "dtype float32", "uint16", "preprocess_data.py")
    refused(indexed(tmp_path, rows, version=2), "version 2", "version 1")
    prefix = indexed(tmp_path, rows)
    (tmp_path / "text_document.bin").write_bytes(bytes(12))
    refused(prefix, "text_document.bin has 12 bytes", "4 ids of int32, which have 16")
    refused(indexed(tmp_path, rows, starts=np.array([0], "<i8")), "idx has 74 bytes", "have 82")
    refused(indexed(tmp_path, rows, starts=np.array([4, 0], "<i8")), "one behind the other")
    refused(indexed(tmp_path, [[1, -5, 3]]), "token 1 has id -5")
    index = tmp_path / "text_document.idx"
    index.write_bytes(b"MMIDIDX\0\0")
    refused(prefix, "cut short", "9 bytes")
    index.write_bytes(b"TNTIDX\0\0" + bytes(40))
    assert is_indexed(prefix)
    refused(prefix, "--data-impl mmap")
