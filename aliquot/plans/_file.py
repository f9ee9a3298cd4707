"""Plans on disk: readable, versioned JSON that is written whole or not at all and checked entirely
when it is read.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ..core import (
    HOW_TO_UPDATE,
    InputError,
    PlanFileError,
    faults_of,
    listing,
    printable,
    read_file,
    shortened,
    write_atomic,
)
from ._plan import DEVICE_MEMORY, PLAN_VERSION, SINGLE, Plan
from ._validate import violations


def _name_the_single_schedule(data: dict[str, Any]) -> dict[str, Any]:
    """In version 1, the schedule of one program was called "none"."""
    return {**data, "schedule": SINGLE} if data.get("schedule") == "none" else data


def _say_what_is_recomputed(data: dict[str, Any]) -> dict[str, Any]:
    """In version 2, `recompute` of a stage was a flag: whether it recomputes everything."""
    stages = data.get("stages")
    if not isinstance(stages, list):
        return data
    words = {True: "stage", False: "none"}

    def said(stage: Any) -> Any:
        if not isinstance(stage, dict) or not isinstance(stage.get("recompute"), bool):
            return stage
        return {**stage, "recompute": words[stage["recompute"]]}

    return {**data, "stages": list(map(said, stages))}


_MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
    1: _name_the_single_schedule,
    2: _say_what_is_recomputed,
}
"""Migrations by the version they start from: each converts the data of a file to the next one."""

_OF_HOST_MEMORY = ("host_transfer_s", "host_hidden_s", "host_memory_bytes")
_LINE_LENGTH = 120
# Longer texts in a list are sentences, such as notes, each on a line.
_WORD = 40
_NUMBERED = re.compile(r".*\[[\d:]+\](?=\.)|.*?_\d+(?=\.)")
_MOST_BYTES = 256 * 2**20
_DEEPEST = 32
_LONGEST = 10_000
_LARGEST = 2**63 - 1
_LARGEST_FLOAT = 1e60
_AGAIN = "Make the plan again, for example with `aliquot plan ... --out FILE`."


def to_json(plan: Plan) -> str:
    """The text of a plan file: equal for the same plan, so without the time of its search.

    Raises:
        InputError: A number is infinite or not a number, which JSON cannot hold; the message names
            each.
    """
    data = msgspec.to_builtins(plan)
    # Left out where they say nothing, so that releases that do not know them can read the plan.
    if not plan.idle_hosts:
        del data["idle_hosts"]
    for array in (*data["inputs"], *data["outputs"]):
        if array["memory"] == DEVICE_MEMORY:
            del array["memory"]
    stages = [stage["prediction"] for stage in data["stages"] if stage["prediction"]]
    for predicted in (data["prediction"], *stages):
        for name in _OF_HOST_MEMORY:
            if not predicted.get(name, True):
                del predicted[name]
    # How long the search took decides nothing: the same command writes the same file.
    data["provenance"] |= {"trace_s": 0.0, "search_s": 0.0}
    if data["compiled"]:
        data["compiled"]["compile_s"] = 0.0
    # Infinite numbers in a plan's provenance decide nothing, and are no reason to refuse it.
    data["provenance"] = _without_odd_numbers(data["provenance"])
    odd = [path for path, value in _leaves(data, "plan") if not math.isfinite(value)]
    if odd:
        raise InputError(f"this plan cannot be written: {', '.join(odd)} must be finite numbers.")
    return _laid_out(data, "") + "\n"


def from_json(text: str, *, source: str = "the plan") -> Plan:
    """A plan from the text of a plan file; `source` is what messages call it.

    Raises:
        PlanFileError: The text is truncated or no JSON (with the position), has a version that
            cannot be read, or is no consistent plan; then the message lists everything that is
            wrong.
    """
    try:
        data = msgspec.json.decode(text)
    except RecursionError:
        raise _too_deep(source) from None
    except UnicodeEncodeError:
        raise PlanFileError(
            f"{source} is not text: it holds halves of characters. {_AGAIN}"
        ) from None
    except msgspec.DecodeError as error:
        reason = str(error)
        if not text.strip():
            reason = "it is empty"
        elif "truncated" in reason:
            reason = f"it ends in the middle, at {_place(text, len(text.encode()))}; it was cut off"
        elif "(byte " in reason:
            offset = int(reason.rpartition("(byte ")[2].rstrip(")"))
            reason = (
                f"{reason.rpartition(' (byte ')[0].removeprefix('JSON is malformed: ')} at"
                f" {_place(text, offset)}"
            )
        elif "out of range" in reason:
            reason = "it has a number that is out of range"
        raise PlanFileError(f"{source} is not JSON: {reason}. {_AGAIN}") from None
    if not isinstance(data, dict) or "version" not in data:
        raise PlanFileError(f"{source} is JSON, but no plan: it has no `version`. {_AGAIN}")
    if _is_deeper(data, _DEEPEST):
        raise _too_deep(source)
    if extreme := list(_extremes(data, "plan")):
        raise _invalid(source, extreme)
    # Names that stand more than once in an object, with their counts: readers of JSON disagree
    # about which of them counts.
    counts: Counter[str] = Counter()

    def look(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            counts.update({name: count for name, count in Counter(names).items() if count > 1})

    # msgspec silently takes the last of equal names. Numbers stay text, because only names are
    # checked.
    json.loads(text, object_pairs_hook=look, parse_int=str, parse_float=str)
    repeated = []
    for name, count in counts.items():
        repeated.append(f"`{printable(name, keep='')}` stands {count} times in one object")
    if repeated:
        raise _invalid(source, repeated)
    data = _current(data, source)
    try:
        plan: Plan = msgspec.convert(data, Plan)
    except msgspec.ValidationError as error:
        raise _invalid(source, list(faults_of(data, Plan, "plan")) or [str(error)]) from None
    wrong = violations(plan)
    if wrong:
        raise _invalid(source, wrong)
    return plan


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan file: first under a temporary name, then renamed, so that no reader meets half
    of it.

    Raises:
        InputError: The place cannot be written to, or the plan holds numbers that are not finite.
    """
    write_atomic(path, to_json(plan))


def load(path: str | os.PathLike[str]) -> Plan:
    """Read and check a plan file.

    Raises:
        PlanFileError: The file is missing or unreadable, or see `from_json`.
    """
    source = f"plan file {shortened(os.fspath(path))!r}"
    try:
        text = read_file(path, _MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise PlanFileError(
            f"{source} is not text (byte {error.start} is not UTF-8). {_AGAIN}"
        ) from None
    except InputError as error:
        raise PlanFileError(f"{source} cannot be read: {error}. {_AGAIN}") from None
    return from_json(text, source=source)


def _too_deep(source: str) -> PlanFileError:
    return PlanFileError(
        f"{source} is no plan: it has lists or objects in each other, more than {_DEEPEST} deep."
        f" {_AGAIN}"
    )


def _is_deeper(data: Any, most: int) -> bool:
    """True if lists and objects are nested deeper than `most`."""
    level = [data]
    # Level by level, not by recursion, which deep data would exhaust.
    for _ in range(most):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict | list):
                below += value.values() if isinstance(value, dict) else value
        level = below
        if not level:
            return False
    return True


def _extremes(value: Any, path: str) -> Iterator[str]:
    """Faults of values far beyond what a plan can need: figures computed from them would overflow
    or take forever.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _extremes(item, f"{path}.{key}")
            if len(key) > _LONGEST:
                yield f"`{path}` has a name of {len(key)} characters"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _extremes(item, f"{path}[{index}]")
    elif isinstance(value, str) and len(value) > _LONGEST:
        yield f"`{path}` is a text of {len(value)} characters, and may have {_LONGEST}"
    elif isinstance(value, int | float) and abs(value) > (
        _LARGEST if isinstance(value, int) else _LARGEST_FLOAT
    ):
        yield (
            f"`{path}` is"
            f" {shortened(f'{value:g}' if isinstance(value, float) else str(value), 30)}, out of"
            " range"
        )


def _place(text: str, offset: int) -> str:
    # msgspec counts bytes, editors count characters.
    before = text.encode()[:offset].decode(errors="ignore")
    return f"line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}"


def _current(data: dict[str, Any], source: str) -> dict[str, Any]:
    """The data migrated to the current version."""
    given = data["version"]
    readable = ", ".join(map(str, [*sorted(_MIGRATIONS), PLAN_VERSION]))
    # By exact type: `true` is an `int` to Python.
    if type(given) is not int or given < 1:
        raise PlanFileError(
            f"{source} has version {shortened(repr(given), 40)}, which is no version; this aliquot"
            f" reads {readable}. {_AGAIN}"
        )
    if given > PLAN_VERSION:
        raise PlanFileError(
            f"{source} has version {shortened(str(given), 40)}, and this aliquot reads {readable}. "
            f"{HOW_TO_UPDATE}, or make the plan again."
        )
    for version in range(given, PLAN_VERSION):
        if version not in _MIGRATIONS:
            raise PlanFileError(
                f"{source} has version {given}, and this aliquot reads {readable}. {_AGAIN}"
            )
        data = {**_MIGRATIONS[version](data), "version": version + 1}
    return data


def _invalid(source: str, wrong: list[str]) -> PlanFileError:
    return PlanFileError(listing(f"{source} is not valid", wrong, _AGAIN))


def _laid_out(value: Any, margin: str) -> str:
    """JSON text for people who compare two plans line by line: what fits on a line is on one line,
    and so is each array of numbers or words, each table of numbers, each record of a list, the
    arrays of a layer, and neighbours that are not split.
    """
    line = json.dumps(value, ensure_ascii=False)
    is_list = isinstance(value, list | tuple)
    if not isinstance(value, dict) and not is_list:
        return line
    inside = list(value if is_list else value.values())
    is_array = is_list and _depth(value) == 1 and not any(map(_is_sentence, inside))
    has_numbers_alone = bool(inside) and all(isinstance(item, int | float) for item in inside)
    if is_array or has_numbers_alone or len(margin) + len(line) <= _LINE_LENGTH:
        return line
    inner = margin + "  "
    if is_list:
        names, items = [], []
        for item in value:
            # Arrays of a layer share a line, and neighbouring operators that are not split.
            name = ""
            if isinstance(item, dict):
                name = "" if item.get("splits", True) else "not split"
                name = _layer(str(item["path"])) if "path" in item else name
            names.append(name)
            items.append(
                json.dumps(item, ensure_ascii=False)
                if _depth(item) <= 2
                else _laid_out(item, inner)
            )
    else:
        # Of a table of splits, or of rules for outputs, the names are paths of arrays.
        is_table = len(set(map(type, inside))) == 1 and _depth(value) <= 3
        names = [_layer(key) if is_table else "" for key in value]
        items = []
        for key, v in value.items():
            items.append(f"{json.dumps(key, ensure_ascii=False)}: {_laid_out(v, inner)}")
    layers = [name or str(k) for k, name in enumerate(names)]
    lines = []
    pairs = zip(layers, items, strict=True)
    for _, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        lines.append(inner + ", ".join(item for _, item in group))
    start, end = "[]" if is_list else "{}"
    return f"{start}\n" + ",\n".join(lines) + f"\n{margin}{end}"


def _depth(value: Any) -> int:
    """How deep lists and objects are nested; 0 for a number or a text."""
    if not isinstance(value, dict | list | tuple):
        return 0
    inside = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inside), default=0)


def _is_sentence(value: Any) -> bool:
    return isinstance(value, str) and len(value) > _WORD


def _layer(path: str) -> str:
    """The path of the layer that an array belongs to: up to its last number."""
    match = _NUMBERED.match(path)
    return match[0] if match else "no layer"


def _without_odd_numbers(value: Any) -> Any:
    """The value with None for numbers that are not finite, which JSON cannot hold: candidates that
    did not fit have no finite time.
    """
    if isinstance(value, dict):
        return {key: _without_odd_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_without_odd_numbers, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _leaves(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif isinstance(value, float):
        yield path, value
