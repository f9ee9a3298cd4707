"""What a release needs besides code: one version everywhere, and the pages that people look for."""

import re
import tomllib
from pathlib import Path

import aliquot

ROOT = Path(__file__).parents[1]


def test_all_files_say_the_same_version():
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited and cited[1] == aliquot.__version__
    assert aliquot.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_people_find_whom_to_tell():
    assert "maintainers" in (ROOT / "SECURITY.md").read_text()
    assert "aliquot report" in (ROOT / ".github/ISSUE_TEMPLATE/report.md").read_text()


def test_the_oldest_python_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least = project["requires-python"].removeprefix(">=")
    assert f"Python {least}" in (ROOT / "README.md").read_text()
    assert f"Programming Language :: Python :: {least}" in project["classifiers"]
    for script in ("run", "release-check"):
        assert f"oldest=$(find_python {least} " in (ROOT / ".ci" / script).read_text()
