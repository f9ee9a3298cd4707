"""Are bugs found? Puts one at a time into a copy of the package and runs the room's fast tests.

    .venv/bin/python tests/mutants.py               four by hand, forty drawn by a seed
    .venv/bin/python tests/mutants.py --list        which these are
    .venv/bin/python tests/mutants.py --only cli    those in whose name this regular expression is

Not part of the tests: each mutant takes up to `--limit` CPU seconds. Of those drawn at least two
are in each room, each in a function drawn from it, of a kind drawn from those that it allows.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "aliquot"
# Tests that take less than a CPU second in so many seconds hang.
_HANGS_S = 120
_FOLDERS = {"verification": "verify", "torch": "pytorch"}
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "!=", "!=": "=="} | {
    "in": "not in",
    "not in": "in",
    "is": "is not",
    "is not": "is",
}
_COMPARISONS = {
    ast.Lt: "<", ast.Gt: ">", ast.LtE: "<=", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A text of a file that is replaced by another, between two offsets of its bytes."""

    file: str
    function: str
    kind: str
    begin: int
    old: str
    new: str

    @property
    def name(self) -> str:
        """What stays when other lines of the file change."""
        return f"{self.file}, {self.function}: {_line(self.old)} -> {_line(self.new)}"


#: By hand: file, function, what stands there once, and what is put in its place.
BY_HAND = (
    ("cli/_optimizer_options.py", "read", "end=self.min_lr or 0.0", "end=0.0"),
    ("report/_comparison.py", "cost", " + plan.idle_hosts", ""),
    (
        "runtime/spmd/_local.py",
        "scattered_product",
        "jax.lax.psum(piece, axes) if axes",
        "jax.lax.psum(piece, axes[:1]) if axes",
    ),
    ("cost/memory/_model.py", "_summed", "    if r.stacked:\n        yield r\n", ""),
)
#: By name, why no test can find it.
EQUAL: dict[str, str] = {}


def by_hand() -> Iterator[Mutant]:
    """Bugs that were once put in and not found."""
    for file, function, old, new in BY_HAND:
        text = (PACKAGE / file).read_bytes()
        assert text.count(old.encode()) == 1, f"{file} has {old!r} not once"
        begin = text.index(old.encode())
        yield Mutant(file=file, function=function, kind="by hand", begin=begin, old=old, new=new)


def drawn(seed: int, count: int) -> Iterator[Mutant]:
    """Two in each room, then others in any, until there are `count`."""
    files = {file: file.read_bytes() for file in sorted(PACKAGE.glob("**/*.py"))}
    defaults = _defaults(files.values())
    rooms: dict[str, dict[tuple[str, int], list[Mutant]]] = {}
    for file, text in files.items():
        parts = file.relative_to(PACKAGE).parts
        room = rooms.setdefault(parts[0] if len(parts) > 1 else "", {})
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                found = list(_of_function("/".join(parts), text, function, defaults))
                if found:
                    room["/".join(parts), function.lineno] = found
    rng = random.Random(seed)
    named = [name for name in rooms if name]
    others = [rng.choice(sorted(rooms)) for _ in range(count - 2 * len(named))]
    for name in [*named, *named, *others]:
        found = rooms[name].pop(rng.choice(sorted(rooms[name])))
        kind = rng.choice(sorted({mutant.kind for mutant in found}))
        yield rng.choice([mutant for mutant in found if mutant.kind == kind])


def _defaults(texts: Iterator[bytes]) -> dict[str, set[str]]:
    """For each name of a function, the parameters that have a default in all of that name."""
    found: dict[str, set[str]] = {}
    for text in texts:
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                given = function.args
                plain = [a.arg for a in given.args]
                mine = {*plain[len(plain) - len(given.defaults) :]} | {
                    a.arg for a, value in zip(given.kwonlyargs, given.kw_defaults) if value
                }
                found[function.name] = found.get(function.name, mine) & mine
    return found


def _of_function(
    file: str, text: bytes, function: ast.FunctionDef, defaults: dict[str, set[str]]
) -> Iterator[Mutant]:
    """All mutants of what a function does; functions in it are others."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        # Places in formatted texts are wrong before Python 3.12.
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.JoinedStr):
            continue
        fields = {k: v for k, v in ast.iter_fields(node) if k != "annotation"}
        for value in fields.values():
            todo += [x for x in (value if isinstance(value, list) else [value]) if _is_node(x)]
        for kind, place, new in _changes(node, defaults):
            begin = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            old = text[begin:end].decode()
            yield Mutant(
                file=file, function=function.name, kind=kind, begin=begin, old=old, new=new
            )


def _is_node(value: object) -> bool:
    return isinstance(value, ast.AST)


def _changes(node: ast.AST, defaults: dict[str, set[str]]) -> Iterator[tuple[str, ast.expr, str]]:
    """What may be changed in a node: the kind, which expression, and what it becomes."""
    text = ast.unparse
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            turned = _TURNED[_COMPARISONS[type(op)]]
            yield "comparison turned", node, f"{text(left)} {turned} {text(right)}"
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            texts = ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp
            for side in (left, right):
                if isinstance(side, texts) or (
                    isinstance(side, ast.Constant) and not isinstance(side.value, int | float)
                ):
                    return
            other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            yield "+ and - swapped", node, text(ast.BinOp(left=left, op=other, right=right))
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield "min and max swapped", node.func, "max" if name == "min" else "min"
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield "condition negated", test, f"not ({text(test)})"
        case ast.comprehension(ifs=[test]):
            yield "condition negated", test, f"not ({text(test)})"
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield "constant off by one", node, str(value + 1)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), keywords=keywords):
            for k, keyword in enumerate(keywords):
                if keyword.arg in defaults.get(name, ()):
                    kept = [*keywords[:k], *keywords[k + 1 :]]
                    call = ast.Call(func=node.func, args=node.args, keywords=kept)
                    yield "argument dropped", node, text(call)


def tests_of(mutant: Mutant, root: Path) -> list[Path]:
    """The files of tests of a mutant's room, those first that say most of its file."""
    parts = Path(mutant.file).parts
    tests = root / "tests"
    room = tests / _FOLDERS.get(parts[0], parts[0]) if len(parts) > 1 else None
    found = list(room.glob("**/test_*.py") if room else tests.glob("test_*.py"))
    found += (tests / "golden").glob("test_*.py") if parts[0] == "cli" else []
    module = ".".join(parts).removesuffix(".py")
    names = re.findall(r"^(?:def|class) ([A-Za-z]\w+)", (PACKAGE / mutant.file).read_text(), re.M)

    def relevance(file: Path) -> tuple[float, str]:
        text = file.read_text()
        said = sum(bool(re.search(rf"\b{name}\b", text)) for name in names)
        score = 100 * (file.stem == f"test{parts[-1][:-3]}") + 10 * (f".{module}" in text)
        score += 20 * bool(re.search(rf"\b{mutant.function}\b", text)) + said
        return -score, str(file)

    return sorted(found, key=relevance)


def is_found(mutant: Mutant, root: Path, limit_s: int) -> tuple[str, str]:
    """Whether a test fails, and which: by the tests of its room in a copy that has the mutant."""
    if mutant.file.startswith("torch/") and importlib.util.find_spec("torch") is None:
        return "not run", "PyTorch is not installed"
    copy = root / "aliquot" / mutant.file
    text = (PACKAGE / mutant.file).read_bytes()
    end = mutant.begin + len(mutant.old.encode())
    copy.write_bytes(text[: mutant.begin] + mutant.new.encode() + text[end:])
    options = ["-x", "-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", "--tb=no"]
    files = [str(file.relative_to(root)) for file in tests_of(mutant, root)]
    command = [sys.executable, "-m", "pytest", *options, *files]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    try:
        with subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s)),
        ) as process:
            used_s, said = -1.0, None
            while said is None:
                try:
                    said, _ = process.communicate(timeout=_HANGS_S)
                except subprocess.TimeoutExpired:
                    before_s, used_s = used_s, _cpu_s(process.pid)
                    if used_s - before_s < 1:
                        os.killpg(process.pid, signal.SIGKILL)
                        return "found", "a test that hangs"
            if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
                return "not in time", ""
    finally:
        copy.write_bytes(text)
    by = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.*?)(?: - .*)?$", said, re.MULTILINE)
    if process.returncode not in (0, 5):
        return "found", by[1] if by else _line(said[-200:])
    return "not found", ""


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, told[11:13])) / os.sysconf("SC_CLK_TCK")


def _line(text: str) -> str:
    return " ".join(text.split())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="in their names")
    parser.add_argument("--seed", type=int, default=0, help="of those that are drawn")
    parser.add_argument("--count", type=int, default=40, help="how many are drawn")
    parser.add_argument("--limit", type=int, default=120, help="of CPU seconds for each")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, ROOT.name)
        if not asked.list:
            unneeded = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "dist")
            shutil.copytree(ROOT, root, ignore=unneeded)
            (root / ".venv").symlink_to(ROOT / ".venv")
        for mutant in [*by_hand(), *drawn(asked.seed, asked.count)]:
            if not re.search(asked.only, mutant.name):
                continue
            began, found, by = time.monotonic(), "", EQUAL.get(mutant.name, "")
            if not asked.list:
                found, by = ("equal", by) if by else is_found(mutant, root, asked.limit)
            seconds = round(time.monotonic() - began, 1)
            print(f"{found:<12}{seconds:>6}  {mutant.name}", *[f"by {by}"] * bool(by), flush=True)
            row = {"mutant": mutant.name, "kind": mutant.kind, "verdict": found}
            rows.append({**row, "by": by, "seconds": seconds})
    judged = [row for row in rows if row["verdict"] not in ("equal", "not run")]
    print(f"{sum(row['verdict'] == 'found' for row in judged)} of {len(judged)} found")
    if asked.json:
        asked.json.write_text(json.dumps({"seed": asked.seed, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
