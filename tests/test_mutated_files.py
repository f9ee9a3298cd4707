"""Whatever is in a file, it is used within its bounds, used in part, or refused with a message."""

import json
import os
import sqlite3
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import pytest
from file_mutations import ANSWER, make_database, outcome
from sample_plans import sample_plan

from aliquot.cluster import Cluster
from aliquot.core import ClusterError, InputError, PlanFileError
from aliquot.plans import Plan
from aliquot.profiling import ProfileDatabase, check_database
from aliquot.verification._cache import read_answer

_KINDS = ("database", "cluster", "answer", "plan")
_NUM_EACH = 250
REPORT = {
    "name": "mutated_files",
    "question": "Profile databases, clusters, compilers' answers and plans with mistakes in them",
    "bar": "no file ends in a traceback, and what is used of each is within the bounds declared",
    "method": (
        f"{_NUM_EACH} files of each kind, seeds 0 to {_NUM_EACH - 1}. A file is used, used without"
        " the rows that cannot be right, refused with a message, or (a cached answer) asked for"
        " again. Bounds are compared after reading; seconds are processor time."
    ),
    "largest": ["fault", "longest_s"],
}


@pytest.mark.parametrize("kind", _KINDS)
def test_mutated_files_are_used_within_bounds_or_refused(kind, tmp_path):
    make_database(tmp_path / "original.sqlite")
    originals = [sample_plan().to_json()]
    found = {outcome(kind, seed, tmp_path, originals) for seed in range(1000, 1040)}
    assert len(found) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
def test_no_mutated_file_is_a_fault(kind, tmp_path, row):
    make_database(tmp_path / "original.sqlite")
    plans = sorted((Path(__file__).parent / "plans").glob("golden*.json"))
    originals = [path.read_text() for path in plans]
    counts, faults, longest_s = Counter(), [], 0.0
    for seed in range(_NUM_EACH):
        started_s = time.process_time()
        try:
            counts[outcome(kind, seed, tmp_path, originals)] += 1
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error}"[:200]
            faults.append(
                {"seed": seed, "error": said, "at": f"{Path(last.filename).name}:{last.lineno}"}
            )
        longest_s = max(longest_s, time.process_time() - started_s)
    row(
        "Files",
        kind=kind,
        used=counts["used"],
        used_in_part=counts["used in part"],
        asked_for_again=counts["asked for again"],
        refused=counts["refused"],
        fault=len(faults),
        longest_s=round(longest_s, 2),
    )
    for fault in faults:
        row("Faults", kind=kind, **fault)
    assert faults == []


def test_rows_that_are_no_measurements_are_named_and_left_out(tmp_path):
    path = tmp_path / "p.sqlite"
    make_database(path)
    connection = sqlite3.connect(path)
    odd = (-1.0, 0.0, float("inf"), "fast", 1e300, None)
    for number, seconds in enumerate(odd):
        connection.execute(
            "UPDATE measurements SET seconds = ?, label = ? WHERE rowid = ?",
            (seconds, f"row {number}", number + 1),
        )
    connection.execute("UPDATE measurements SET program = 'other', label = 'moved' WHERE rowid = 7")
    connection.commit()
    connection.close()
    with (
        ProfileDatabase(path, must_exist=True) as database,
        pytest.warns(UserWarning, match="rows that are no measurements") as said,
    ):
        rows = list(database.rows())
    assert len(rows) == 12 - 7
    text = str(said[0].message)
    assert "row 'row 0': `seconds`: expected" in text and "got -1.0" in text and "2 more" in text


def test_databases_that_cannot_be_written_are_read(tmp_path, monkeypatch):
    path = tmp_path / "p.sqlite"
    make_database(path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    before = path.read_bytes()
    with ProfileDatabase(path, must_exist=True) as database:
        assert len(list(database.rows())) == 12
        with pytest.raises(InputError, match="readonly"):
            database.put(*next(database.rows()))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["p.sqlite"]


def test_databases_with_programs_in_them_are_refused(tmp_path):
    path = tmp_path / "p.sqlite"
    make_database(path)
    connection = sqlite3.connect(path)
    connection.execute("ALTER TABLE measurements RENAME TO m")
    connection.execute("CREATE VIEW measurements AS SELECT * FROM m")
    connection.commit()
    connection.close()
    with pytest.raises(InputError, match="views or triggers"):
        check_database(path)


READERS = {
    "plan": (Plan.load, PlanFileError),
    "cluster": (Cluster.load, ClusterError),
    "database": (check_database, InputError),
}


@pytest.mark.parametrize("reader", READERS)
def test_folders_pipes_and_devices_are_refused_soon(reader, tmp_path, monkeypatch):
    read, error = READERS[reader]
    monkeypatch.setattr("aliquot.core._files._WAIT_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    started_s = time.monotonic()
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        if (reader, path) != ("plan", "/dev/zero"):
            with pytest.raises(error):
                read(path)
    assert time.monotonic() - started_s < 30
    assert read_answer(tmp_path, "pipe") is None


@pytest.mark.parametrize("name", ["temp_bytes", "live_bytes", "host_bytes"])
def test_cached_answers_that_lack_a_figure_are_asked_for_again(name, tmp_path):
    (tmp_path / "key.json").write_text(json.dumps(ANSWER))
    assert read_answer(tmp_path, "key") == ANSWER
    memory = {key: value for key, value in ANSWER["memory"].items() if key != name}
    (tmp_path / "key.json").write_text(json.dumps({**ANSWER, "memory": memory}))
    assert read_answer(tmp_path, "key") is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the folder")
def test_a_working_folder_that_is_gone_is_said(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(InputError, match="working folder is gone"):
        sample_plan().save("plan.json")
    with pytest.raises(PlanFileError, match="cannot be read"):
        Plan.load("plan.json")
    with pytest.raises(InputError):
        ProfileDatabase("p.sqlite")


def test_a_plan_with_a_million_notes_is_read_or_refused_soon():
    text = sample_plan().to_json()
    notes = ", ".join(['"note"'] * 1_000_000)
    at = text.index('"notes": [') + len('"notes": [')
    started_s = time.process_time()
    with pytest.raises(PlanFileError, match="notes"):
        Plan.from_json(text[:at] + notes + text[text.index("]", at) :])
    assert time.process_time() - started_s < 10
