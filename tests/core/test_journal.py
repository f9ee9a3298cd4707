"""The journal of rows that a killed run leaves."""

import os
import signal
import subprocess
import sys
import time

import pytest

from aliquot.core import InputError, Journal


def test_a_torn_line_is_taken_away_and_made_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    Journal(path).row("a", lambda: {"n": 1})
    with path.open("a") as file:
        file.write('{"key": "b", "row": {"n"')
    journal = Journal(path)
    assert journal.rows == {"a": {"n": 1}}
    assert journal.row("b", lambda: {"n": 2}) == {"n": 2}
    assert journal.row("a", lambda: pytest.fail("it is known")) == {"n": 1}
    assert Journal(path).rows == {"a": {"n": 1}, "b": {"n": 2}}


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("no journal\n")
    with pytest.raises(InputError, match="is no journal of rows"):
        Journal(path)


def test_runs_killed_in_the_middle_lose_no_row_and_make_none_twice(tmp_path):
    path = tmp_path / "rows.jsonl"
    script = (
        "import sys, time; from pathlib import Path; from aliquot.core import Journal\n"
        f"journal = Journal(Path({str(path)!r}))\n"
        "for k in range(60):\n"
        "    journal.row(str(k), lambda: time.sleep(0.02) or {'n': k})\n"
    )
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", script])
        before = path.stat().st_size if path.exists() else 0
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if path.exists() and path.stat().st_size > before:
                break
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run([sys.executable, "-c", script], check=True)
    assert [row["n"] for row in Journal(path).rows.values()] == list(range(60))
    assert len(path.read_text().splitlines()) == 60
