"""The house's floors: a folder imports only from lower floors, never from a sibling, lazily or
not.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "aliquot"

FLOORS = {
    "core": 1,
    "graph": 2,
    "cluster": 2,
    "data": 2,
    "sharding": 3,
    "plans": 4,
    "cost": 5,
    "planners": 6,
    "runtime": 6,
    "report": 7,
    "profiling": 7,
    "verification": 7,
    "interop": 7,
    "launching": 7,
    "_plan_options": 7,
    "_profiles": 8,
    "_time_limit": 8,
    "_plan_graph": 9,
    "zoo": 9,
    "_captured": 10,
    "_fit_steps": 10,
    "_variants": 10,
    "_api": 11,
    "_questions": 11,
    "_size": 11,
    "_remedies": 11,
    "_layout_search": 11,
    "suites": 12,
    "_reading": 12,
    "_evaluation": 12,
    "_generation": 12,
    "torch": 12,
    "cli": 13,
    "__main__": 14,
}

# Rooms of a folder: each imports those before it, by what their `__init__.py` offers. Files beside
# them import all.
ROOMS = {
    "sharding": ("micro_batches", "programs"),
    "cost": ("memory",),
    "runtime": ("transport", "compiled", "spmd", "pipeline", "checkpoints"),
}

# Where a library that not everybody has, or that may change under us, can be imported.
CONFINED = {
    "flax": ("zoo/", "graph/_nnx.py"),
    "optax": ("zoo/",),
    "matplotlib": ("report/",),
    "equinox": (),
    "ray": ("launching/_ray.py",),
    "orbax": ("runtime/checkpoints/",),
    "tensorstore": ("runtime/checkpoints/",),
    "jax._src": ("graph/_jax_compat.py",),
    "jaxlib": ("graph/_jax_compat.py",),
    "typer": ("cli/",),
    "yaml": ("interop/",),
    "tokenizers": ("data/",),
    "torch": ("torch/",),
    "tensorboardX": ("report/",),
    "highspy": ("planners/",),
    "sqlite3": ("cost/", "profiling/", "interop/"),
}
JAX_FREE_AT_IMPORT = (
    "core/",
    "cluster/",
    "data/",
    "plans/",
    "launching/",
    "cli/",
    "__init__.py",
    "__main__.py",
)


def package_files() -> list[str]:
    """Every module, as a path inside the package."""
    return sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def source_of(path: str) -> str:
    """The text of a module."""
    return (PACKAGE / path).read_text()


def room(path: str) -> str:
    """The folder on the package's first level, or the file's own name there."""
    first = path.split("/")[0]
    return first.removesuffix(".py")


def imported(tree: ast.Module, path: str) -> list[tuple[int, str]]:
    """Every import at any depth, with its line. A name from inside the package starts with
    `aliquot.`.
    """
    here = ["aliquot", *path.split("/")[:-1]]
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{stem}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and _is_import_call(node.func) and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                name = target.value
                found.append(
                    (
                        node.lineno,
                        ".".join([*here, name.lstrip(".")]) if name.startswith(".") else name,
                    )
                )
    return found


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def violations(source: str, path: str) -> list[str]:
    """What a file imports that its place in the house does not allow."""
    own = room(path)
    if own == "__init__":
        return []
    if own not in FLOORS:
        return [
            f"{path}: `{own}` stands on no floor; give it one in FLOORS and in docs/architecture.md"
        ]
    wrong = []
    for line, name in imported(ast.parse(source), path):
        where = f"{path}:{line}"
        parts = name.split(".")
        if parts[0] == "aliquot":
            other = parts[1] if len(parts) > 1 else ""
            if other == own:
                continue
            if FLOORS.get(other, 99) >= FLOORS[own]:
                wrong.append(
                    f"{where}: `{own}` (floor {FLOORS[own]}) imports `{name}` (floor"
                    f" {FLOORS.get(other)})"
                )
        for library, places in CONFINED.items():
            if (name + ".").startswith(library + ".") and not any(
                path.startswith(place) for place in places
            ):
                wrong.append(
                    f"{where}: `{library}` belongs only in {', '.join(places) or 'user code'}"
                )
    return wrong


def room_violations(source: str, path: str) -> list[str]:
    """What a file imports of another room of its folder that it may not."""
    folder, *inner = path.split("/")
    rooms = ROOMS.get(folder, ())
    own = inner[0] if len(inner) > 1 else ""
    wrong = []
    for line, name in imported(ast.parse(source), path):
        parts = name.split(".")
        if (
            parts[:2] != ["aliquot", folder]
            or len(parts) < 4
            or parts[2] not in rooms
            or parts[2] == own
        ):
            continue
        if own in rooms and rooms.index(parts[2]) > rooms.index(own):
            wrong.append(f"{path}:{line}: room `{own}` imports `{parts[2]}`, which comes after it")
        if parts[3].startswith("_"):
            wrong.append(f"{path}:{line}: imports `{name}` past the `__init__.py` of its room")
    return wrong


def _runs_at_import(tree: ast.Module) -> list[ast.stmt]:
    """Statements outside functions and outside `if TYPE_CHECKING`, those in classes and branches
    included.
    """
    waiting, found = list(tree.body), []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        found.append(node)
        waiting += [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.ExceptHandler)
        ]
    return found


def test_imports_go_down():
    assert package_files()
    assert [w for path in package_files() for w in violations(source_of(path), path)] == []


def test_rooms_import_those_before_them():
    paths = [path for path in package_files() if path.split("/")[0] in ROOMS]
    assert {path.split("/")[0] for path in paths} == set(ROOMS)
    assert [w for path in paths for w in room_violations(source_of(path), path)] == []


@pytest.mark.parametrize(
    ("path", "source", "count"),
    [
        ("runtime/spmd/_a.py", "from ..transport import place\nfrom ._spmd import Program", 0),
        ("runtime/_step.py", "from .pipeline import Pipeline", 0),
        ("runtime/transport/_a.py", "from ..pipeline import Pipeline", 1),
        ("runtime/_step.py", "from .pipeline._pipeline import Pipeline", 1),
        ("runtime/transport/_a.py", "from ..pipeline._pipeline import Pipeline", 2),
    ],
)
def test_a_wrong_import_between_rooms_is_seen(path, source, count):
    assert len(room_violations(source, path)) == count


def test_no_jax_while_importing():
    paths = [path for path in package_files() if path.startswith(JAX_FREE_AT_IMPORT)]
    assert all(any(path.startswith(place) for path in paths) for place in JAX_FREE_AT_IMPORT)
    wrong = []
    for path in paths:
        at_import = ast.Module(
            body=[
                n
                for n in _runs_at_import(ast.parse(source_of(path)))
                if isinstance(n, ast.Import | ast.ImportFrom)
            ],
            type_ignores=[],
        )
        wrong += [
            f"{path}: {name}"
            for _, name in imported(at_import, path)
            if name.split(".")[0] in ("jax", "flax", "optax")
        ]
    assert wrong == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/_a.py", "from ..graph import Graph"),
        ("graph/_a.py", "from .. import cluster"),
        ("graph/_a.py", "from ..cluster import Cluster"),
        ("planners/intra/_a.py", "def f():\n    from ...runtime import step"),
        ("plans/_a.py", "import aliquot.cost"),
        ("cost/_a.py", "import aliquot"),
        ("zoo/_a.py", "from .._api import plan"),
        ("cost/_a.py", "import importlib\nimportlib.import_module('aliquot.planners')"),
        (
            "cost/_a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..planners import ILP",
        ),
        ("graph/_a.py", "from jax._src import core"),
        ("graph/_a.py", "import jax._src.core as c"),
        ("runtime/_a.py", "import flax.nnx"),
        ("graph/_nnx.py", "import optax"),
        ("attic/_a.py", ""),
    ],
)
def test_a_wrong_import_is_seen(path, source):
    assert len(violations(source, path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("graph/_a.py", "import jax\nfrom ..core import AliquotError\nfrom ._types import Graph"),
        (
            "planners/intra/ilp/_a.py",
            "from ....cost import Problem\nfrom ..._base import AbstractIntra\nimport highspy",
        ),
        ("graph/_nnx.py", "def f():\n    from flax import nnx"),
        ("cli/_a.py", "from .._api import plan\nfrom ..zoo import build\nimport typer"),
        ("zoo/_a.py", "import rayon, jaxtyping"),
    ],
)
def test_a_right_import_passes(path, source):
    assert violations(source, path) == []
