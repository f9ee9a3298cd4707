"""What a user installs: the built wheel, in an environment of its own, away from the checkout."""

import json
import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
HELP_BAR_S = 0.6


def _run(*command: object, cwd: Path, **kwargs) -> subprocess.CompletedProcess:
    """Run away from the checkout, with nothing of this process's Python paths."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        **kwargs,
    )


def _requirements(wheel: Path, extras: tuple[str, ...]) -> list[Requirement]:
    """What the wheel itself declares."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    declared = [
        Requirement(line.removeprefix("Requires-Dist: "))
        for line in lines
        if line.startswith("Requires-Dist: ")
    ]
    return [each for each in declared if _applies(each, extras)]


def _applies(requirement: Requirement, extras: tuple[str, ...]) -> bool:
    return requirement.marker is None or any(
        requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
    )


def _closure(requirements: list[Requirement]) -> set[str]:
    """Names of all distributions that the requirements need, directly or not."""
    waiting = [(canonicalize_name(each.name), frozenset(each.extras)) for each in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        item = waiting.pop()
        if item in seen:
            continue
        seen.add(item)
        try:
            texts = distribution(item[0]).requires or []
        except PackageNotFoundError:
            continue
        needed = [Requirement(text) for text in texts]
        waiting += [
            (canonicalize_name(each.name), frozenset(each.extras))
            for each in needed
            if _applies(each, tuple(item[1]))
        ]
    return {name for name, _ in seen}


def _link_dependencies(names: set[str], target: Path) -> None:
    """A folder of links to just these distributions: nothing is downloaded, and nothing undeclared
    can be imported.
    """
    target.mkdir()
    for name in names:
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        for top in {path.parts[0] for path in found.files or ()} - {"..", "__pycache__"}:
            link = target / top
            if not link.exists():
                link.symlink_to(found.locate_file(top))


def _environment(folder: Path, wheel: Path, extras: tuple[str, ...]) -> Path:
    """A fresh environment with the wheel and what it declares; returns its folder of commands."""
    made = _run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    assert made.returncode == 0, made.stderr
    commands = folder / ("Scripts" if os.name == "nt" else "bin")
    installed = _run(
        *(
            sys.executable,
            "-m",
            "pip",
            "--python",
            commands / "python",
            "--disable-pip-version-check",
        ),
        *("install", "--quiet", "--no-deps", "--no-index", wheel),
        cwd=folder.parent,
    )
    assert installed.returncode == 0, installed.stderr
    dependencies = folder / "dependencies"
    _link_dependencies(_closure(_requirements(wheel, extras)), dependencies)
    where = _run(
        commands / "python",
        "-c",
        "import sysconfig; print(sysconfig.get_path('purelib'))",
        cwd=folder.parent,
    )
    Path(where.stdout.strip(), "dependencies.pth").write_text(f"{dependencies}\n")
    return commands


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    built = _run(
        sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = out.glob("jax_aliquot-*.whl")
    return found


@pytest.fixture(scope="module")
def commands(wheel, tmp_path_factory) -> Path:
    """Commands of an environment with `aliquot[zoo]`."""
    return _environment(tmp_path_factory.mktemp("with-zoo") / "env", wheel, ("zoo",))


@pytest.fixture(scope="module")
def bare_commands(wheel, tmp_path_factory) -> Path:
    """Commands of an environment with `aliquot` and no extra."""
    return _environment(tmp_path_factory.mktemp("bare") / "env", wheel, ())


def test_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"aliquot"}
    assert {"aliquot/__init__.pyi", "aliquot/py.typed", "aliquot/cli/__init__.py"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_installed_copy_is_the_wheel(commands, tmp_path):
    code = "import aliquot; print(aliquot.__version__, aliquot.__file__)"
    found = _run(commands / "python", "-c", code, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    version, file = found.stdout.split()
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", version)
    assert Path(file).is_relative_to(commands.parent)


def test_plan_from_the_wheel(commands, tmp_path):
    asked = "plan gpt-125m --cluster 8xH100 --global-batch 8 --set num_layers=2 --method dp --json"
    done = _run(commands / "aliquot", *asked.split(), cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["feasible"] is True
    assert answer["method"] == "dp"
    assert answer["num_stages"] == 1
    assert answer["step_time_s"] > 0
    assert answer["peak_memory_bytes"] > 0


def test_missing_extra_names_the_install_command(bare_commands, tmp_path):
    done = _run(
        bare_commands / "aliquot",
        *"plan gpt-125m --cluster 8xH100 --global-batch 8".split(),
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "flax, which is not installed. Run: pip install flax optax" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_help_imports_no_jax(bare_commands, tmp_path):
    done = _run(
        bare_commands / "python",
        "-X",
        "importtime",
        bare_commands / "aliquot",
        "--help",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    modules = {
        line.rsplit("|", 1)[-1].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "aliquot.cli" in modules
    assert not modules & {"jax", "jaxlib", "flax", "optax", "numpy", "highspy"}


def test_help_is_quick(bare_commands, tmp_path):
    """Processor time, best of three, so that a busy machine does not decide."""
    resource = pytest.importorskip("resource")

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    costs = []
    for _ in range(3):
        before = spent()
        assert _run(bare_commands / "aliquot", "--help", cwd=tmp_path).returncode == 0
        costs.append(spent() - before)
    assert min(costs) <= HELP_BAR_S
