"""Tables that tests write: `pytest --report`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOME = """
import os
import pytest

REPORT = {
    "name": "some",
    "question": "Are numbers small?",
    "bar": "each is below 3",
    "method": "Looked at once.",
    "largest": ["number"],
}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_numbers(number, row):
    row("Numbers", number=number / 1, name=f"number {number}")
    assert number < 3


@pytest.mark.parametrize("ends", [False, True])
def test_words(ends, row):
    row("Words", word="first")
    row("Words", word="second")
    if ends:
        os._exit(1)


def test_another_thing():
    assert False
"""
FAST = SOME.replace("[False, True]", "[False]")


@pytest.fixture
def run(tmp_path):
    """Runs pytest on a file of tests, and returns the names of the files that it wrote."""

    def run(text, *options):
        (tmp_path / "test_some.py").write_text(text)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        before = {*tmp_path.iterdir()}
        command = [sys.executable, "-m", "pytest", "-p", "report_rows", "-p", "no:cacheprovider"]
        paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        subprocess.run(
            [*command, *options],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            check=False,
        )
        return sorted(path.name for path in {*tmp_path.iterdir()} - before)

    return run


def test_rows_become_tables_with_what_became_of_their_tests(run, tmp_path):
    assert run(FAST) == []
    assert run(FAST, "--report", "out/tables") == ["out"]
    written, text = sorted((tmp_path / "out/tables").iterdir())
    assert written.name.startswith("some_cpu-") and text.name == written.stem + ".md"
    found = json.loads(written.read_text())
    assert found["tables"] == {
        "Numbers": [
            {"number": 1.0, "name": "number 1", "passed": True},
            {"number": 2.0, "name": "number 2", "passed": True},
            {"number": 3.0, "name": "number 3", "passed": False},
        ],
        "Words": [{"word": "first", "passed": True}, {"word": "second", "passed": True}],
    }
    assert found["summary"] == {
        "Numbers": {"rows": 3, "failed": 1, "largest number": 3.0},
        "Words": {"rows": 2, "failed": 0},
        # That of the test without rows is no part of it.
        "failed tests": 1,
    }
    assert not found["met"] and found["command"].endswith(" --report out/tables")
    assert found["question"] == "Are numbers small?" and found["versions"]["jax"]
    assert "**MISSED**" in text.read_text() and "| 3 | number 3 | False |" in text.read_text()


def test_workers_send_their_rows_and_one_that_ends_is_a_failure(run, tmp_path):
    assert run(SOME, "-n", "2", "--report", ".", "-k", "words or numbers-1") != []
    (written,) = tmp_path.glob("some_*.json")
    found = json.loads(written.read_text())
    assert found["tables"]["Words"] == [
        {"word": "first", "passed": True},
        {"word": "second", "passed": True},
    ]
    assert found["summary"]["failed tests"] == 1 and not found["met"]
