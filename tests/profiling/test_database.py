"""The profile database: kept, merged, killed, and refused where it is none."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from aliquot.core import InputError
from aliquot.profiling import Measurement, ProfileDatabase, ProgramKey
from aliquot.profiling._database import failed


def key(number: int, **changes: object) -> ProgramKey:
    fields = {
        "program": f"p{number}",
        "device": "cpu, 2 cores",
        "num_devices": 8,
        "mesh": "8",
        "jax_version": "0.12",
    }
    return ProgramKey(**{**fields, **changes})


def test_what_is_put_is_got(tmp_path):
    found = Measurement(
        seconds=0.5, spread=0.1, repeats=7, memory_bytes=3.0, grade="measured", label="layer [0, 1]"
    )
    lost = Measurement(seconds=None, repeats=0, outcome="out of memory")
    with ProfileDatabase(tmp_path / "p.sqlite") as database:
        database.put(key(1), found)
        database.put(key(2), lost)
        assert database.get(key(1)) == found and database.get(key(2)) == lost and len(database) == 2
    with ProfileDatabase(tmp_path / "p.sqlite", must_exist=True) as again:
        assert dict(again.rows()) == {key(1): found, key(2): lost}


def test_a_launch_shorter_than_the_clock_resolves_is_kept(tmp_path):
    with ProfileDatabase(tmp_path / "p.sqlite") as database:
        database.put(key(1), Measurement(seconds=0.0))
    with ProfileDatabase(tmp_path / "p.sqlite", must_exist=True) as again:
        assert again.get(key(1)).seconds == 1e-9 and len(list(again.rows())) == 1


@pytest.mark.parametrize(
    "change", [{"device": "H100"}, {"num_devices": 4}, {"mesh": "4x2"}, {"jax_version": "0.10.2"}]
)
def test_another_machine_or_compiler_is_another_program(tmp_path, change):
    with ProfileDatabase(tmp_path / "p.sqlite") as database:
        database.put(key(1), Measurement(seconds=1.0))
        assert database.get(key(1, **change)) is None


def test_merging_adds_what_is_missing_and_keeps_what_is_there(tmp_path):
    with (
        ProfileDatabase(tmp_path / "a.sqlite") as one,
        ProfileDatabase(tmp_path / "b.sqlite") as other,
    ):
        one.put(key(1), Measurement(seconds=1.0))
        other.put(key(1), Measurement(seconds=9.0))
        other.put(key(2), Measurement(seconds=2.0))
        assert one.merge(tmp_path / "b.sqlite") == 1
        assert [m.seconds for _, m in sorted(one.rows(), key=lambda row: row[0].program)] == [
            1.0,
            2.0,
        ]


def test_merging_puts_what_another_measured_in_place_of_a_failure(tmp_path):
    with (
        ProfileDatabase(tmp_path / "a.sqlite") as one,
        ProfileDatabase(tmp_path / "b.sqlite") as other,
    ):
        one.put(key(1), Measurement(seconds=None, outcome=failed("no port")))
        one.put(key(2), Measurement(seconds=None, outcome=failed("no port")))
        one.put(key(3), Measurement(seconds=None, outcome="out of memory"))
        other.put(key(1), Measurement(seconds=9.0))
        other.put(key(2), Measurement(seconds=None, outcome=failed("no link")))
        other.put(key(3), Measurement(seconds=9.0))
        assert one.merge(tmp_path / "b.sqlite") == 1
        assert one.get(key(1)) == Measurement(seconds=9.0)
        assert one.get(key(2)).outcome == failed("no port")
        assert one.get(key(3)).outcome == "out of memory"


def test_readers_do_not_wait_for_a_writer(tmp_path):
    with ProfileDatabase(tmp_path / "p.sqlite") as database:
        database.put(key(1), Measurement(seconds=1.0))
        writer = sqlite3.connect(tmp_path / "p.sqlite", isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")
        try:
            start = time.perf_counter()
            assert database.get(key(1)) == Measurement(seconds=1.0)
            assert time.perf_counter() - start < 1.0
        finally:
            writer.close()


_WRITER = """
import sys
from aliquot.profiling import Measurement, ProfileDatabase, ProgramKey
with ProfileDatabase(sys.argv[1]) as database:
    for k in range(10**6):
        key = ProgramKey(program=f"p{k}", device="cpu", num_devices=1, mesh="1", jax_version="0")
        if database.get(key) is None:
            database.put(key, Measurement(seconds=float(k + 1)))
            print(k, flush=True)
"""


def test_killed_at_any_moment_it_keeps_what_was_finished(tmp_path):
    path, moments = tmp_path / "p.sqlite", random.Random(0)
    reported: set[int] = set()
    for _ in range(3):
        command = [sys.executable, "-c", _WRITER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            first = writer.stdout.readline()
            time.sleep(moments.uniform(0, 0.2))
            os.kill(writer.pid, signal.SIGKILL)
            reported |= {int(line) for line in [first, *writer.stdout] if line.endswith("\n")}
        with ProfileDatabase(path, must_exist=True) as database:
            held = {int(k.program[1:]): m.seconds for k, m in database.rows()}
        assert reported <= set(held) and all(seconds == k + 1 for k, seconds in held.items())
    assert reported


def test_what_is_no_database_is_refused(tmp_path):
    with pytest.raises(
        InputError,
        match=r"There is no profile database .*aliquot profile run .*aliquot blocks profile",
    ):
        ProfileDatabase(tmp_path / "none.sqlite", must_exist=True)
    (tmp_path / "text.sqlite").write_text("seconds,bytes\n" * 1000)
    with pytest.raises(InputError, match="no profile database, or it is damaged"):
        ProfileDatabase(tmp_path / "text.sqlite")
    with pytest.raises(InputError, match="cannot be opened"):
        ProfileDatabase(tmp_path / "folder" / "p.sqlite")


def test_a_truncated_file_is_refused(tmp_path):
    with ProfileDatabase(tmp_path / "p.sqlite") as database:
        for k in range(500):
            database.put(key(k), Measurement(seconds=1.0, label="x" * 100))
    data = (tmp_path / "p.sqlite").read_bytes()
    (tmp_path / "p.sqlite").write_bytes(data[: len(data) // 2])
    with (
        pytest.raises(InputError, match=r"damaged|cannot be opened"),
        ProfileDatabase(tmp_path / "p.sqlite") as cut,
    ):
        list(cut.rows())


def test_a_newer_format_is_refused(tmp_path):
    ProfileDatabase(tmp_path / "p.sqlite").close()
    with contextlib.closing(
        sqlite3.connect(tmp_path / "p.sqlite", isolation_level=None)
    ) as connection:
        connection.execute("UPDATE format SET version = 9")
    with pytest.raises(InputError, match="has format 9"):
        ProfileDatabase(tmp_path / "p.sqlite")


def test_a_file_that_another_process_writes_is_said_to_be_locked(tmp_path, monkeypatch):
    monkeypatch.setattr("aliquot.profiling._database._WAIT_S", 0.1)
    with ProfileDatabase(tmp_path / "p.sqlite") as database:
        writer = sqlite3.connect(tmp_path / "p.sqlite", isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")
        try:
            with pytest.raises(InputError, match="locked by another process"):
                database.put(key(1), Measurement(seconds=1.0))
        finally:
            writer.close()


def test_a_full_disk_loses_nothing(tmp_path):
    with ProfileDatabase(tmp_path / "p.sqlite") as database:
        database.put(key(0), Measurement(seconds=1.0))
        pages = database._connection.execute("PRAGMA page_count").fetchone()[0]
        database._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(InputError, match="disk is full"):
            for k in range(1, 1000):
                database.put(key(k), Measurement(seconds=1.0, label="x" * 500))
        assert database.get(key(0)) == Measurement(seconds=1.0)
