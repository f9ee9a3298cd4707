"""Options of a verb in a TOML file that a team keeps beside its code: `--options` reads it,
`--save-options` writes it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import typer

from ..core import InputError, listing, nearest, read_file, shortened, write_atomic
from ._groups import option

_MOST_BYTES = 2**20
# They are about this file itself, or about how the answer is printed.
_NOT_SAVED = ("options", "save-options", "json", "help")
_GIVEN = ("COMMANDLINE", "DEFAULT_MAP")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """The options of verbs whose options may stand in a file."""

    title: ClassVar[str] = "Options in a file"

    options: Path | None = option(
        "Read options from this file, such as global-batch = 64; what is typed counts more.",
        metavar="TOML",
    )
    save_options: Path | None = option(
        "Write all options that were given to this file.", metavar="TOML"
    )


def read_options(
    ctx: typer.Context, args: Sequence[str], instead: Callable[[str], str] = lambda key: ""
) -> None:
    """Make the options in the file after `--options` the defaults of a verb. If they cannot be
    read, the process ends with everything that is wrong with them.

    Args:
        instead: what to write in place of an option of another tool or verb.
    """
    given = [b for a, b in zip(args, args[1:], strict=False) if a == "--options"]
    given += [arg.partition("=")[2] for arg in args if arg.startswith("--options=")]
    if not given:
        return
    named = f"--options {shortened(given[-1], 60)!r}"
    try:
        text = read_file(Path(given[-1]), _MOST_BYTES).decode()
        data = tomllib.loads(text)
    except (InputError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        ctx.fail(f"{named} cannot be read as TOML: {error}.")
    known = {_key(parameter): parameter for parameter in ctx.command.params}
    known = {key: parameter for key, parameter in known.items() if key not in _NOT_SAVED}
    faults, values = list[str](), dict[str, Any]()
    for key, value in data.items():
        parameter = known.get(key.replace("_", "-"))
        if parameter is None:
            wrong = f"{key!r} is no option of this command"
            other = instead(key)
            wrong += f". Write {other}." if other else f": {nearest(key, known)}"
        else:
            wrong, values[str(parameter.name)] = _checked(parameter, value)
        if wrong:
            pattern = re.compile(rf"\s*\[?\s*[\"']?{re.escape(key)}[\"']?\s*(=|\.|\])")
            lines = enumerate(text.splitlines(), 1)
            number = next((number for number, line in lines if pattern.match(line)), 1)
            faults.append(f"line {number}: {wrong}")
    if faults:
        ctx.fail(listing(f"{named} is not usable", faults))
    ctx.default_map = values


def save_options(ctx: typer.Context) -> None:
    """Write the options that were typed, or read from a file, to the file after
    `--save-options`.
    """
    path = ctx.params.get("save_options")
    if path is None:
        return
    lines = [f"# aliquot {ctx.info_name} --options {path.name}"]
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(str(parameter.name))
        if source and source.name in _GIVEN and _key(parameter) not in _NOT_SAVED:
            lines.append(f"{_key(parameter)} = {_written(ctx.params[str(parameter.name)])}")
    try:
        write_atomic(path, "\n".join(lines) + "\n")
    except InputError as error:
        ctx.fail(f"--save-options: {error}")


def _key(parameter: Any) -> str:
    """What an option or argument is called in a file."""
    long = [name for name in parameter.opts if name.startswith("--")]
    return str(long[0].removeprefix("--") if long else parameter.name)


def _checked(parameter: Any, value: Any) -> tuple[str, Any]:
    """What is wrong with a value, and the value as text, which is read as if it were typed."""
    shown = f"{_key(parameter)} = {shortened(repr(value), 40)}"
    if isinstance(value, dict) and parameter.multiple:
        value = [f"{name}={_typed(item)}" for name, item in value.items()]
    is_flag = bool(getattr(parameter, "is_flag", False))
    if is_flag != isinstance(value, bool):
        return f"{shown}: {'write true or false' if is_flag else 'it takes a value'}", None
    if getattr(parameter, "multiple", False):
        return "", [_typed(item) for item in (value if isinstance(value, list) else [value])]
    if isinstance(value, list | dict):
        return f"{shown}: it takes one value", None
    return "", value if is_flag else _typed(value)


def _typed(value: Any) -> str:
    """A value as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _written(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)
