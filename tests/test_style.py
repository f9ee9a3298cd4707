"""House rules that a machine can check: size, docstrings of what is exported, and texts that hold
no leftovers.
"""

import ast
import importlib
import inspect
import re
import subprocess
from pathlib import Path

import pytest

from aliquot.core import MissingExtraError

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "aliquot"
MAX_LINES = 700

# Written so that this file does not match itself.
LEFTOVERS = {
    "a note to do later (do it, or say why not)": re.compile(r"\b(?:T[O]DO|F[I]XME|X[X]X)\b"),
    "an absolute path of one machine": re.compile(r"(?<![\w.~-])/(?:work|root|home|Users)/"),
    "a banner of comments": re.compile(r"^ *# -{3,}.*-{3,}$", re.MULTILINE),
    "a merge conflict": re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE),
}
TEXT = {".py", ".pyi", ".md", ".toml", ".yml", ".yaml", ".json", ".txt", ".csv", "", ".sh", ".cfg"}


def _project_files() -> list[Path]:
    """Files that git tracks or would track; every file of the package and the tests where there is
    no git.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return [
            path
            for folder in (PACKAGE, ROOT / "tests")
            for path in folder.rglob("*.py*")
            if path.suffix != ".pyc"
        ]
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def _text_files() -> list[Path]:
    return [path for path in _project_files() if path.suffix in TEXT and path.name != "LICENSE"]


def _exported() -> list[tuple[str, str]]:
    """(module, name) of everything that a folder's `__init__.py`, or the `__init__.pyi` beside it,
    exports as `from ._x import Y as Y`.
    """
    found = []
    for init in sorted(PACKAGE.rglob("__init__.py*")):
        module = ".".join(["aliquot", *init.relative_to(PACKAGE).parts[:-1]])
        for node in ast.parse(init.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                found += [
                    (module, alias.asname) for alias in node.names if alias.asname == alias.name
                ]
    return found


def _has_docstring(thing: object) -> bool:
    """Whether a class or function explains itself; the signature that a dataclass writes for itself
    does not count.
    """
    doc = thing.__dict__.get("__doc__") if inspect.isclass(thing) else inspect.getdoc(thing)
    return bool(doc and doc.strip()) and not doc.startswith(f"{getattr(thing, '__name__', '')}(")


def test_no_file_is_long():
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines())
        for path in _project_files()
        if path.suffix == ".py"
    }
    long = {
        path.relative_to(ROOT).as_posix(): count
        for path, count in lengths.items()
        if count > MAX_LINES
    }
    assert long == {}


def test_every_file_says_what_it_is():
    texts = {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert texts
    silent = [
        path.as_posix()
        for path, text in texts.items()
        if text.strip() and not ast.get_docstring(ast.parse(text))
    ]
    assert silent == []


def test_exports_are_spelled_as_exports():
    wrong = []
    for init in PACKAGE.rglob("__init__.py*"):
        for node in ast.parse(init.read_text()).body if init.parent != PACKAGE else []:
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                wrong += [
                    f"{init.parent.name}: {alias.name}"
                    for alias in node.names
                    if alias.asname != alias.name
                ]
    assert wrong == []


def test_every_export_has_a_docstring():
    exported = _exported()
    assert exported
    silent = []
    for module, name in exported:
        try:
            thing = getattr(importlib.import_module(module), name)
        except MissingExtraError:
            # Tests of that extra are skipped, too.
            continue
        if (inspect.isclass(thing) or inspect.isroutine(thing)) and not _has_docstring(thing):
            silent.append(f"{module}.{name}")
    assert silent == []


@pytest.mark.parametrize("what", LEFTOVERS)
def test_no_leftovers(what):
    hits = []
    for path in _text_files():
        text = path.read_text(encoding="utf-8")
        for match in LEFTOVERS[what].finditer(text):
            hits.append(
                f"{path.relative_to(ROOT).as_posix()}:{text.count(chr(10), 0, match.start()) + 1}:"
                f" {match.group()}"
            )
    assert hits == []


def test_no_test_folder_shadows_a_module():
    """`pythonpath` puts tests/ on the import path; a package there would hide the installed library
    of that name.
    """
    assert not list((ROOT / "tests").rglob("__init__.py"))
