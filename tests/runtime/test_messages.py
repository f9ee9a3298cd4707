"""Messages among processes carry values of declared types, and nothing else gets through."""

import pickle
import re
from pathlib import Path

import msgspec
import pytest

import aliquot
from aliquot.runtime import CompiledCollective, StageStats
from aliquot.runtime.transport._messages import MessageError, decode, encode

STATS = StageStats(
    stage=1,
    held_bytes=2**40,
    temp_bytes=3,
    peak_bytes=4,
    in_flight=1,
    collectives=(
        CompiledCollective(kind="all-reduce", axes=("x",), num_bytes=8, count=2, in_loop=True),
    ),
    num_programs=2,
    compile_s=0.25,
)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([STATS], list[StageStats]),
        ({"a": "b"}, dict[str, str]),
        (("host", 80, b"\x00\xff"), tuple[str, int, bytes]),
        (None, type(None)),
    ],
    ids=["stats", "texts", "tuple", "nothing"],
)
def test_values_arrive_as_they_were(value, kind):
    assert decode(encode(value), kind) == value


@pytest.mark.parametrize("kind", [list[StageStats], dict[str, str], int, bytes])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[" * 60_000,
        b"\x91" * 60_000,
        b"\x81\xa1a" * 60_000,
        b"\x91\x81\xa1a" + b"\x91" * 60_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode([{"stage": "one"}]),
        msgspec.msgpack.encode({"a": "b"}) + b"x",
        b"\x81\xa1a\xa2\xff\xfe",
        pickle.dumps([STATS]),
    ],
    ids=range(13),
)
def test_anything_else_is_refused(data, kind):
    with pytest.raises(MessageError):
        decode(data, kind)


def test_sizes_are_limited_at_both_ends():
    with pytest.raises(MessageError, match="a message of 103 bytes, at most 20 can be sent"):
        encode(b"x" * 101, 20)
    with pytest.raises(MessageError, match="103 bytes, where a message has at most 20"):
        decode(encode(b"x" * 101), bytes, 20)


def test_the_runtime_pickles_nothing():
    files = sorted((Path(aliquot.__file__).parent / "runtime").rglob("*.py"))
    assert len(files) > 30
    code = [
        re.compile(r"\b(import|from) (pickle|marshal|dill|cloudpickle)|pickle\.loads?|\beval\(")
    ]
    assert not [path.name for path in files for one in code if one.search(path.read_text())]
