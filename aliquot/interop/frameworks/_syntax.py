"""Files of settings as lists of names with values: YAML, JSON, TOML, shell scripts and Python.

Files are data. Scripts and recipes are read as text: nothing in them is imported or run, and what a
script would have to run to know stays unknown.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...core import InputError, listing, nearest, read_file, shortened

_MOST_BYTES = 2**21
_MOST_SETTINGS = 20_000
_DEEPEST = 40
# Texts are among the alternatives, so that nothing in them is taken for a comment.
_JSON_COMMENTS = re.compile(r'"(?:\\.|[^"\\])*(?:"|\Z)|//[^\n]*|/\*.*?(?:\*/|\Z)', flags=re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A name with the value that a file gives it.

    Attributes:
        name: with dots between the names of tables: `training.seq_len`.
        value: plain data; `Unknown` where only running the file would tell.
        place: file and line, such as `run.sh:12`.
    """

    name: str
    value: Any
    place: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that is not in the file, as the file writes it."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What one file says.

    Attributes:
        kind: "yaml", "json", "toml", "shell" or "python".
        settings: in the order of the file; a later one replaces an earlier one of that name.
        title: of Python, the name of the function that was read.
        remarks: what was assumed while reading.
    """

    kind: str
    settings: tuple[Setting, ...]
    title: str = ""
    remarks: tuple[str, ...] = ()


def read_text(
    path: str | os.PathLike[str],
    recipe: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> Text:
    """The settings of a file, by the kind that its name ends in; other names are shell scripts.

    Args:
        recipe: of Python files, the function to read, where there are several.
        variables: of shell scripts, which are called with them.

    Raises:
        InputError: the file cannot be read, or is not of that kind.
    """
    name = Path(path).name
    shown = shortened(os.fspath(path), 200)
    try:
        text = read_file(path, _MOST_BYTES).decode()
    except InputError as error:
        raise InputError(f"{shown} cannot be read: {error}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{shown} is no text: {error}.") from error
    suffix = Path(path).suffix.lower()
    try:
        if suffix in (".yaml", ".yml", ".json"):
            settings = _of_yaml(_of_json(text) if suffix == ".json" else text, name)
            return Text(kind="json" if suffix == ".json" else "yaml", settings=tuple(settings))
        if suffix == ".toml":
            return Text(kind="toml", settings=tuple(_of_toml(text, name)))
        if suffix == ".py":
            return read_python(text, name, recipe)
    except (yaml.YAMLError, tomllib.TOMLDecodeError, SyntaxError, RecursionError) as error:
        kind = {".toml": "TOML", ".py": "Python", ".json": "JSON"}.get(suffix, "YAML")
        first = " ".join(_where_and_why(error).split())
        raise InputError(f"{shown} is not {kind}: {shortened(first, 300)}.") from error
    return read_shell(text, name, variables or {})


def _where_and_why(error: Exception) -> str:
    """What is wrong with a file, after the line in which it is."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    why = ", ".join(filter(None, (error.context, error.problem)))
    return f"line {error.problem_mark.line + 1}: {why}"


def _of_json(text: str) -> str:
    """As YAML, line by line: without the comments of Hjson, as which DeepSpeed reads its files."""

    def blank(found: re.Match[str]) -> str:
        part = found.group()
        return part if part.startswith('"') else re.sub(r"[^\n]", " ", part)

    return _JSON_COMMENTS.sub(blank, text.replace("\t", "  "))


def _of_yaml(text: str, name: str) -> Iterator[Setting]:
    """Settings of YAML, of which JSON is a part."""
    counter = iter(range(_MOST_SETTINGS))

    def walk(node: yaml.Node, prefix: str, depth: int) -> Iterator[Setting]:
        # Anchors may name a node many times over.
        if next(counter, None) is None or depth > _DEEPEST:
            raise yaml.YAMLError(f"it has more than {_MOST_SETTINGS} settings, or deeper ones")
        place = f"{name}:{node.start_mark.line + 1}"
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = f"{prefix}.{key.value}" if prefix else str(key.value)
                where = f"{name}:{key.start_mark.line + 1}"
                if isinstance(value, yaml.MappingNode):
                    yield from walk(value, inner, depth + 1)
                else:
                    yield Setting(name=inner, value=plain(value, depth + 1), place=where)
        else:
            yield Setting(name=prefix, value=plain(node, depth + 1), place=place)

    def plain(node: yaml.Node, depth: int) -> Any:
        if next(counter, None) is None or depth > _DEEPEST:
            raise yaml.YAMLError(f"it has more than {_MOST_SETTINGS} settings, or deeper ones")
        if isinstance(node, yaml.SequenceNode):
            return [plain(each, depth + 1) for each in node.value]
        if isinstance(node, yaml.MappingNode):
            return {str(key.value): plain(value, depth + 1) for key, value in node.value}
        tag, said = node.tag.rpartition(":")[2], str(node.value)
        if tag in ("int", "float") or tag == "str" and getattr(node, "style", None) is None:
            return typed(said)
        return {"bool": said.lower() in ("true", "yes", "on"), "null": None}.get(tag, said)

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise yaml.YAMLError("it holds no names with values")
    yield from walk(root, "", 0)


def typed(text: str) -> Any:
    """A number, truth value or nothing where the text says one; else the text.

    >>> typed("8_192"), typed("true"), typed("1e-3"), typed("H100"), typed("None")
    (8192, True, 0.001, 'H100', None)
    """
    if re.fullmatch(r"[+-]?\d[\d_]{0,30}", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d[\d_]*)?\.?\d+([eE][+-]?\d{1,3})?|[+-]?\d+\.", text):
        return float(text)
    words = {"None": None, "null": None, "~": None}
    return {"true": True, "false": False}.get(text.lower(), words.get(text, text))


def _of_toml(text: str, name: str) -> Iterator[Setting]:
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([\w.\"-]+)\s*\]+", line):
            table = header[1].replace('"', "")
        elif key := re.match(r"\s*([\w.\"-]+)\s*=", line):
            inner = key[1].replace('"', "")
            lines.setdefault(f"{table}.{inner}" if table else inner, number)

    def walk(value: Any, prefix: str) -> Iterator[Setting]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(inner, f"{prefix}.{key}" if prefix else key)
        else:
            yield Setting(name=prefix, value=value, place=f"{name}:{lines.get(prefix, 1)}")

    yield from walk(tomllib.loads(text), "")


_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|declare\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_TEST = re.compile(
    r"(?:if|elif)\s+\[\[?\s*\"?([^\s\"]*)\"?\s+(==|=|!=|-eq|-ne|-gt|-ge|-lt|-le)\s+"
    r"\"?([^\s\"]*)\"?\s*\]\]?\s*(?:;\s*then)?\s*"
)
_COMPARED = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
_ARITHMETIC: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}


def read_shell(text: str, name: str, given: Mapping[str, str]) -> Text:
    """Arguments in a shell script: `--name value`, and `name=value` after a command.

    Variables, their defaults (`${N:-8}`) and sums of them are followed, and so are branches on
    them; of other branches all are taken. Commands are not run, so what they would print is
    unknown.
    """
    variables = dict(given)
    words: list[tuple[str, int]] = []
    branches: list[bool | None] = []
    decided: list[bool] = []
    open_array: str = ""
    for number, line in _whole_lines(text):
        stripped = line.strip()
        if re.match(r"(if|elif)\b", stripped):
            matched = _TEST.fullmatch(stripped)
            found: bool | None = None
            if matched:
                left, right = (_expand(side, variables) for side in (matched[1], matched[3]))
                if "$" not in left + right:
                    number_of = [typed(side) for side in (left, right)]
                    try:
                        found = bool(_COMPARED[matched[2]](*number_of))
                    except TypeError:
                        found = None
            if stripped.startswith("elif") and branches:
                found = False if decided[-1] else found
                branches[-1], decided[-1] = found, decided[-1] or bool(found)
            else:
                branches.append(found)
                decided.append(bool(found))
            continue
        if stripped == "else" and branches:
            # Where the test is unknown, both branches are read.
            branches[-1] = False if decided[-1] else (None if branches[-1] is None else True)
            continue
        if re.match(r"fi\b", stripped) and branches:
            branches.pop()
            decided.pop()
            continue
        if False in branches:
            continue
        assigned = _ASSIGNMENT.fullmatch(stripped)
        if open_array:
            closed = stripped.endswith(")") and stripped.count(")") > stripped.count("(")
            inside = stripped[:-1] if closed else stripped
            words += [(word, number) for word in _words(inside, variables)]
            open_array = "" if closed else open_array
        elif assigned and assigned[3].startswith("("):
            inside = assigned[3][1:].rstrip()
            closed = inside.endswith(")") and inside.count(")") > inside.count("(")
            open_array = "" if closed else assigned[1]
            inside = inside[:-1] if closed else inside
            words += [(word, number) for word in _words(inside, variables)]
        elif assigned and " --" not in assigned[3] and "\n" not in assigned[3]:
            value = assigned[3].strip()
            # Of a list of arguments in one text, the arguments are wanted, not the variable.
            unquoted = value[1:-1] if value[:1] in "\"'" and value[-1:] == value[:1] else value
            if unquoted.lstrip().startswith("--"):
                words += [(word, number) for word in _words(unquoted, variables)]
            if assigned[1] not in given:
                variables[assigned[1]] = _expand(unquoted.split(" #")[0].strip(), variables)
        elif assigned:
            # Arguments in one text are read here, and are nothing where they are used.
            unquoted = assigned[3].strip().strip("\"'")
            words += [(word, number) for word in _words(unquoted, variables)]
            variables[assigned[1]] = ""
        else:
            words += [(word, number) for word in _words(stripped, variables)]
    return Text(kind="shell", settings=tuple(_arguments(words, name)))


def read_arguments(arguments: Sequence[str], name: str = "the arguments") -> Text:
    """A list of arguments, as a program gets them."""
    words = [(str(word), 0) for word in arguments]
    return Text(kind="shell", settings=tuple(_arguments(words, name)))


def _whole_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with those that they go on in, with the number of the first; without comments."""
    begun, first, quote = "", 0, ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw if quote else re.sub(r"(^|\s)#.*$", "", raw)
        begun, first = (f"{begun} {line}" if begun else line), first or number
        quotes = len(re.findall(r'(?<!\\)"', begun))
        quote = '"' if quotes % 2 else ""
        if begun.rstrip().endswith("\\"):
            begun = begun.rstrip()[:-1]
            continue
        if quote and len(begun) < 20_000:
            continue
        yield first, begun
        begun, first, quote = "", 0, ""
    if begun:
        yield first, begun


def _words(text: str, variables: dict[str, str]) -> Iterator[str]:
    try:
        pieces = shlex.split(_expand(text, variables), comments=False)
    except ValueError:
        pieces = _expand(text, variables).split()
    for piece in pieces:
        # Quoted together with its value: "--fp8-format hybrid".
        yield from piece.split() if piece.lstrip().startswith("--") else [piece]


def _expand(text: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        if name in variables:
            return variables[name]
        return default.strip("\"'") if default is not None else match[0]

    def computed(match: re.Match[str]) -> str:
        inside = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
        try:
            found = _constant(ast.parse(inside.strip().replace("/", "//"), mode="eval").body, {})
        except SyntaxError:
            return match[0]
        return match[0] if isinstance(found, Unknown) else str(found)

    for _ in range(5):
        expanded = re.sub(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)", value, text)
        expanded = re.sub(r"\$\(\((.+?)\)\)", computed, expanded)
        if expanded == text or len(expanded) > 100_000:
            break
        text = expanded
    return text


def _arguments(words: Iterable[tuple[str, int]], name: str) -> Iterator[Setting]:
    open_name, values, line = "", list[str](), 0

    def done() -> Iterator[Setting]:
        if open_name:
            value: Any = True
            if len(values) == 1:
                value = Unknown(values[0]) if "$" in values[0] else typed(values[0])
            elif values:
                value = [typed(each) for each in values]
            place = f"{name}:{line}" if line else name
            yield Setting(name=open_name, value=value, place=place)

    for word, number in words:
        if number != line and open_name:
            # What follows on another line is another command.
            yield from done()
            open_name = ""
        if re.match(r"--[A-Za-z]", word):
            yield from done()
            flag, equals, value = word[2:].partition("=")
            open_name, values, line = flag, [value] if equals else [], number
        elif pair := re.fullmatch(r"([A-Za-z_][\w.]*)=(.*)", word, re.DOTALL):
            yield from done()
            open_name, values, line = pair[1], [pair[2].strip("'\"")], number
            yield from done()
            open_name = ""
        elif open_name and word not in ("\\", "&&", "|", ";") and not word.endswith(".py"):
            # Arrays named after an argument hold arguments that were read where they were set.
            values += [] if re.match(r"\$\{?\w+\[@\]|\$\{?\w*ARGS", word) else [word]
        else:
            yield from done()
            open_name = ""
    yield from done()


@dataclass(slots=True)
class _Scope:
    """Names and settings of the functions of a Python file, while they are read."""

    name: str
    functions: dict[str, ast.FunctionDef]
    variables: dict[str, ast.expr] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)
    found: list[Setting] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def read_python(text: str, name: str, recipe: str | None = None) -> Text:
    """What a recipe assigns: `cfg.model.tensor_model_parallel_size = 4`, and the arguments of the
    configurations that it makes, `training=TrainingConfig(steps=10)` as `training.steps`.

    A recipe that begins with another function of the file is read after that one. Of two branches,
    both are read.

    Raises:
        InputError: it has several functions and none of that name.
        SyntaxError: it is no Python.
    """
    tree = ast.parse(text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    public = [each for each in functions if not each.startswith("_")]
    body: Sequence[ast.stmt] = tree.body
    title = ""
    if recipe is not None or public:
        if recipe is None and len(public) > 1:
            advice = f"Add --recipe NAME, such as --recipe {public[0]}."
            problems = [f"{each}, line {functions[each].lineno}" for each in public]
            raise InputError(listing(f"{name} has several recipes", problems, advice))
        title = recipe or public[0]
        if title not in functions:
            raise InputError(f"{name} has no function {title!r}: {nearest(title, functions)}")
        body = functions[title].body
    scope = _Scope(name=name, functions=functions)
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            scope.variables[node.targets[0].id] = node.value
    _statements(body, scope, depth=0)
    return Text(
        kind="python", settings=tuple(scope.found), title=title, remarks=tuple(scope.remarks)
    )


def _statements(body: Sequence[ast.stmt], scope: _Scope, depth: int) -> None:
    for node in body:
        # Names that are returned, or whose attributes are set, are configurations.
        for part in ast.walk(node):
            if isinstance(part, ast.Return) and isinstance(part.value, ast.Name):
                scope.filled.add(part.value.id)
            elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                scope.filled.add(_dotted(part).partition(".")[0])
    for node in body:
        if isinstance(node, ast.If | ast.With | ast.For | ast.Try):
            _statements(node.body, scope, depth)
            _statements(getattr(node, "orelse", []), scope, depth)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            _made(node.value, "", scope, depth)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            function = _dotted(call.func)
            given = {_dotted(each).partition(".")[0] for each in call.args}
            if function in scope.functions and depth < 8:
                _statements(scope.functions[function].body, scope, depth + 1)
            elif given & scope.filled:
                scope.remarks.append(
                    f"{ast.unparse(call):.80}: what {function} changes is not read"
                )
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            dotted = _dotted(target)
            if isinstance(target, ast.Name):
                scope.variables[target.id] = node.value
                if isinstance(node.value, ast.Call) and target.id in scope.filled:
                    _made(node.value, "", scope, depth)
            elif dotted:
                inner = dotted.partition(".")[2]
                if isinstance(node.value, ast.Call):
                    _made(node.value, inner, scope, depth)
                else:
                    value = _constant(node.value, scope.variables)
                    place = f"{scope.name}:{node.lineno}"
                    scope.found.append(Setting(name=inner, value=value, place=place))


def _made(call: ast.Call, prefix: str, scope: _Scope, depth: int) -> None:
    """What a call that makes a configuration sets."""
    function = _dotted(call.func)
    place = f"{scope.name}:{call.lineno}"
    if function in scope.functions and depth < 8:
        _statements(scope.functions[function].body, scope, depth + 1)
        return
    if prefix:
        is_class = function.rpartition(".")[2][:1].isupper() or function.endswith(".Config")
        value = function if is_class else Unknown(shortened(ast.unparse(call), 60))
        scope.found.append(Setting(name=prefix, value=value, place=place))
    elif not function.rpartition(".")[2][:1].isupper():
        inner_calls = [each for each in call.args if isinstance(each, ast.Call)]
        for each in inner_calls:
            _made(each, "", scope, depth + 1)
        if inner_calls:
            scope.remarks.append(f"{ast.unparse(call):.80}: what {function} changes is not read")
            return
        # A recipe of another file.
        scope.found.append(Setting(name="recipe", value=function, place=place))
        scope.remarks.append(f"{function} is not in {scope.name}: what it sets is not read")
        return
    for number, argument in enumerate(call.args):
        inner = f"{prefix}.{number}" if prefix else str(number)
        value = _constant(argument, scope.variables)
        scope.found.append(Setting(name=inner, value=value, place=place))
    for keyword in call.keywords:
        if keyword.arg is None:
            continue
        inner = f"{prefix}.{keyword.arg}" if prefix else keyword.arg
        value_node = keyword.value
        if isinstance(value_node, ast.Name):
            value_node = scope.variables.get(value_node.id, value_node)
        if isinstance(value_node, ast.Call):
            _made(value_node, inner, scope, depth)
        else:
            value = _constant(value_node, scope.variables)
            where = f"{scope.name}:{keyword.value.lineno}"
            scope.found.append(Setting(name=inner, value=value, place=where))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def _constant(node: ast.expr, variables: dict[str, ast.expr], depth: int = 0) -> Any:
    """The value of an expression of constants; `Unknown` for all others."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_constant(each, variables, depth) for each in node.elts]
    if isinstance(node, ast.Name) and node.id in variables and depth < 8:
        return _constant(variables[node.id], variables, depth + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _constant(node.operand, variables, depth)
        return -inner if isinstance(inner, int | float) else Unknown(ast.unparse(node))
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        sides = [_constant(side, variables, depth) for side in (node.left, node.right)]
        if all(isinstance(side, int | float) and abs(side) < 1 << 62 for side in sides):
            try:
                return _ARITHMETIC[type(node.op)](*sides)
            except ZeroDivisionError:
                pass
    return Unknown(shortened(ast.unparse(node), 80))
