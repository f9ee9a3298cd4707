"""The public names: one table, repeated for type checkers, and nothing heavy imported before a name
is used.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import aliquot

PACKAGE = Path(aliquot.__file__).parent


def _imports_in_stub() -> dict[str, str]:
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: node.module for node in found for alias in node.names}


def test_stub_repeats_the_table():
    assert _imports_in_stub() == aliquot._MODULE_OF


def test_stub_names_the_folders():
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    bare = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module is None
    ]
    assert {alias.name for node in bare for alias in node.names} == set(aliquot._FOLDERS)


@pytest.mark.parametrize("name", aliquot.__all__)
def test_every_name_resolves(name):
    assert getattr(aliquot, name) is not None
    assert name in dir(aliquot)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'paralellize'"):
        _ = aliquot.paralellize


@pytest.mark.parametrize(
    "module",
    [
        "aliquot",
        "aliquot.core",
        "aliquot.cluster",
        "aliquot.plans",
        "aliquot.report",
        "aliquot.interop.aceso.search",
        "aliquot.cli",
    ],
)
def test_import_needs_no_jax(module):
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_planning_imports_nothing_that_runs_plans():
    code = (
        "import sys, aliquot; aliquot.plan; sys.exit(bool({'aliquot.runtime',"
        " 'aliquot.verification', 'scipy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_planning_imports_nothing_that_prints():
    """Texts, pages and their library are imported when something is printed."""
    code = (
        "import sys, aliquot; aliquot.plan; aliquot.parallelize; print(*[name for name in"
        " sys.modules if name == 'rich' or name.startswith(('aliquot.report', 'aliquot.cli'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
