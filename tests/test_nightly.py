"""The script that runs slow tests in parts."""

import csv
import signal
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def nightly():
    spec = spec_from_loader("nightly", SourceFileLoader("nightly", str(ROOT / ".ci/nightly")))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_file_is_in_one_part(nightly):
    parts = nightly.files_of_parts()
    listed = [file for files in parts.values() for file in files]
    assert all(parts.values())
    assert sorted(listed) == sorted(ROOT.glob("tests/**/test_*.py"))


def test_a_part_is_run_and_recorded(nightly, tmp_path, capfd):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_fast(): assert False\n"
        "@pytest.mark.slow\n"
        "@pytest.mark.parametrize('k', range(3))\n"
        "def test_slow(k): assert k\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: later\n")
    (tmp_path / "test_long.py").write_text(
        "import pytest, time\n@pytest.mark.slow\ndef test_long(): time.sleep(60)\n"
    )
    path = tmp_path / "record.csv"
    # As in the background of a shell.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for name, limit_s in (("some", 50.0), ("long", 5.0)):
            files = [tmp_path / f"test_{name}.py"]
            row = nightly.run(name, files, tmp_path, python=sys.executable, limit_s=limit_s)
            nightly.record(row, path)
    finally:
        signal.signal(signal.SIGINT, before)
    some, long = csv.DictReader(path.read_text().splitlines())
    assert (some["part"], some["passed"], some["failed"], some["stopped"]) == (
        "some",
        "2",
        "1",
        "no",
    )
    assert float(some["minutes"]) < 1
    assert (long["passed"], long["stopped"]) == ("0", "yes")
    assert "1 failed, 2 passed" in capfd.readouterr().out


def test_a_part_hands_the_folder_for_tables_on(nightly, tmp_path, monkeypatch):
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--report')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: later\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.slow\n"
        "def test_some(request):\n"
        f"    assert request.config.getoption('--report') == {str(tmp_path)!r}\n"
    )
    monkeypatch.chdir(tmp_path)
    files = [tmp_path / "test_some.py"]
    found = [
        nightly.run("some", files, tmp_path, python=sys.executable, report=report)["passed"]
        for report in (Path("."), None)
    ]
    assert found == [1, 0]


def test_a_part_that_does_not_exist_is_refused():
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/nightly", "rnutime"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no part is called rnutime. There are random-steps, processes," in done.stderr
