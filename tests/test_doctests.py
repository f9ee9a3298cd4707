"""Examples in docstrings are true."""

import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "aliquot"


def _modules_with_examples() -> list[str]:
    found = [path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text()]
    return sorted(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in found
    )


@pytest.mark.parametrize("name", _modules_with_examples())
def test_examples_run(name):
    result = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert result.attempted and not result.failed
