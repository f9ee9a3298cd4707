"""Every `pip install` in messages and pages can be typed: this project is not on the index, where
its name is another one's, so that it is installed from its folder.
"""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from aliquot.core import MissingExtraError
from aliquot.core._errors import _EXTRAS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
#: What the extra of JAX for GPUs installs, a browser for tests, and pip itself.
ALSO = {"jax-cuda12-plugin", "jax-cuda12-pjrt", "pyside6-webengine", "pip", "jaxlib"}
PLACES = ("aliquot/**/*.py", "benchmarks/*.py", "docs/*.md", "examples/*", "*.md", "Makefile")


def names(requirements):
    return {Requirement(text).name.lower() for text in requirements}


def advised():
    """(file, word) of everything that a text says to install: names, folders with extras."""
    for path in sorted({path for place in PLACES for path in ROOT.glob(place)}):
        if path.name == "CHANGELOG.md" or not path.is_file():
            continue
        for rest in re.findall(r"pip install +([^`#\n(]*)", path.read_text()):
            words = iter(rest.split())
            for word in words:
                if word == "--target":
                    next(words)
                elif not word.startswith("-"):
                    yield path.relative_to(ROOT), word.strip("'\";,.:)") or "."
                # Here the sentence goes on.
                if re.search(r"[,:;.)\"]$", word) and word != ".":
                    break


def test_only_this_folder_and_packages_of_others_are_installed():
    third_party = ALSO | names(PROJECT["dependencies"])
    for requirements in EXTRAS.values():
        third_party |= names(requirements)
    found, wrong = list(advised()), []
    for file, word in found:
        name = re.split(r"[\[=<>]", word)[0].lower()
        # Or a field of a message that says the folder or the names.
        if name not in third_party and not re.match(r"$|\.$|[{$]", name):
            wrong.append(f"{file}: {word}")
    assert not wrong
    assert PROJECT["name"] == "jax-aliquot" and len(found) > 20
    assert {"README.md", "aliquot/core/_errors.py"} <= {str(file) for file, _ in found}


def test_extras_that_texts_name_exist():
    named = {
        extra
        for _, word in advised()
        if word.startswith((".[", "["))
        for extra in word.partition("[")[2].rstrip("]").split(",")
    }
    assert {"zoo", "train"} <= named <= {*EXTRAS}


def test_messages_name_what_an_extra_installs(monkeypatch):
    code = "".join(path.read_text() for path in (ROOT / "aliquot").rglob("*.py"))
    asked = set(re.findall(r'MissingExtraError\(\s*"([\w-]+)"|"(verify-\w+)"', code))
    assert {first or second for first, second in asked} <= {*_EXTRAS}
    # Installed as a package, it has no folder to install from.
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    for extra in _EXTRAS:
        said = str(MissingExtraError(extra, "x")).partition("pip install ")[2]
        typed = names(word.strip("'") for word in said.split())
        assert typed == names(EXTRAS[extra]), extra
