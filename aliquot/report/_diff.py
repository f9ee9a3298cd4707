"""The difference of two plans as tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from ..core import format_bytes, format_bytes_per_s, format_flops_per_s, format_seconds
from ..plans import Change, PlanDiff, endings_of_path, stage_numbers
from ._tables import columns

_INDEX = re.compile(r"(?<=layers\[)\d+(?=\])")
_STAGE = re.compile(r"^stage (\d+) ")
_UNITS = re.compile(r"_(s|bytes|bytes_per_s|flops_per_s)$|_flops_per_s(?=\.)")
_COLLECTIVE = re.compile(r"^(.* over .*) (count|num_bytes|time_s)$")
_MOST_OPERATORS = 12
_NAMES = {
    "num_stages": "stages",
    "num_micro_batches": "micro-batches",
    "num_submeshes": "submeshes",
    "gradient_s": "gradient communication",
    "hidden_s": "communication overlapped with compute",
    "host_transfer_s": "copies to and from host memory",
    "host_hidden_s": "copies to and from host memory beside compute",
}


def difference(changes: PlanDiff, before: str, after: str) -> RenderableType:
    """Tables of the changes from the plan called `before` to the plan called `after`: predicted
    costs, decisions, and splits of arrays and operators.

    Equal changes in several layers or stages share one row. Left out are optimizer state that
    changes like its parameters, outputs that change like inputs, and all but the first operators.
    """
    if changes.identical:
        return Text(f"{before} and {after} decide and predict the same.")
    decided: dict[str, list[Change]] = {}
    for change in changes.decisions:
        kind = change.subject.partition(" ")[0]
        if _STAGE.sub("", change.subject).startswith("operator "):
            kind = "operator"
        elif kind not in ("input", "output"):
            kind = ""
        decided.setdefault(kind, []).append(change)
    arrays = _arrays(decided.get("input", ()), decided.get("output", ()), changes.roles)
    kept = []
    for change in decided.get("operator", ()):
        if change.subject.partition("operator ")[2] not in changes.roles:
            kept.append(change)
    operators = _rows(kept)
    of_operators = "Operators that are split differently: mesh axis and dim of each"
    if len(operators) > _MOST_OPERATORS:
        of_operators += f"; the first {_MOST_OPERATORS} of {len(operators)} kinds, --json lists all"
    collectives: list[Change] = []
    figures: list[Change] = []
    for change in changes.predictions:
        (collectives if _COLLECTIVE.match(change.subject) else figures).append(change)
    heads = ("what", before, after)
    split = "Arrays that are split differently; optimizer state that changes like its parameters is"
    tables = (
        ("Predicted cost on each device", _rows(figures, _words), (3,)),
        ("Predicted communication, as far as it differs", _traffic(collectives), ()),
        ("Decisions", _rows(decided.get("", ()), _words), (3,)),
        (f"{split} left out", [row[:3] for row in _rows(arrays)], ()),
        (of_operators, [row[:3] for row in operators[:_MOST_OPERATORS]], ()),
    )
    shown = []
    for title, rows, right in tables:
        if rows:
            shown.append(columns(title, (*heads, "change")[: len(rows[0])], rows, right=right))
    return Group(*shown)


def _arrays(
    inputs: Sequence[Change], outputs: Sequence[Change], roles: Mapping[str, str]
) -> list[Change]:
    """Changes of arrays, without those that repeat others; see `difference`."""
    inputs = [replace(c, subject=c.subject.removeprefix("input ")) for c in inputs]
    endings = set()
    for change in inputs:
        if roles.get(change.subject) == "parameter":
            for ending in endings_of_path(change.subject):
                endings.add((ending, change.before, change.after))
    names = {ending for ending, _, _ in endings}
    kept = []
    for change in inputs:
        if roles.get(change.subject) == "optimizer_state":
            own = next((e for e in endings_of_path(change.subject) if e in names), "")
            if (own, change.before, change.after) in endings:
                continue
        kept.append(change)
    same = {(_inside(change.subject), change.before, change.after) for change in inputs}
    for change in outputs:
        path = change.subject.removeprefix("output ")
        if (_inside(path), change.before, change.after) not in same:
            kept.append(replace(change, subject=f"output {path}"))
    return kept


def _inside(path: str) -> str:
    """The path of an array without the argument or result that it is part of."""
    return path.partition(".")[2]


def _traffic(changes: Sequence[Change]) -> list[tuple[str, ...]]:
    """A row for each kind of collective: count, bytes and seconds in both plans, as far as they
    differ.
    """
    kinds: dict[str, dict[str, Change]] = {}
    for change in changes:
        match = _COLLECTIVE.match(change.subject)
        assert match is not None
        kinds.setdefault(match[1], {})[match[2]] = change

    def shown(terms: Mapping[str, Change], side: str) -> str:
        values = {name: getattr(change, side) for name, change in terms.items()}
        if set(values.values()) == {None}:
            return "none"
        texts = {name: _shown(terms[name].subject, value) for name, value in values.items()}
        if "count" in texts:
            texts["count"] += " times"
        return ", ".join(texts.values())

    def seconds(terms: Mapping[str, Change]) -> float:
        times = [terms["time_s"].before, terms["time_s"].after] if "time_s" in terms else [0.0]
        return max(float(time or 0.0) for time in times)

    ordered = sorted(kinds.items(), key=lambda item: -seconds(item[1]))
    return [(name, shown(terms, "before"), shown(terms, "after")) for name, terms in ordered]


def _rows(changes: Sequence[Change], name: Callable[[str], str] = str) -> list[tuple[str, ...]]:
    """Rows of a table: equal changes in several layers or stages share one row, and `name` turns
    subjects into text.
    """
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for change in changes:
        before, after, relative = change.before, change.after, ""
        if isinstance(before, int | float) and isinstance(after, int | float) and before:
            relative = f"{after / before - 1:+.1%}"
        key = (
            _STAGE.sub("stage * ", _INDEX.sub("*", change.subject)),
            _shown(change.subject, before),
            _shown(change.subject, after),
            relative,
        )
        merged.setdefault(key, []).append(change.subject)
    rows: list[tuple[str, ...]] = []
    for (what, old, new, relative), subjects in merged.items():
        matches = list(filter(None, map(_STAGE.match, subjects)))
        numbers = sorted({int(match[1]) for match in matches})
        if len(subjects) == 1:
            what = subjects[0]
        elif len(numbers) == len(subjects):
            what = f"stages {stage_numbers(numbers)} {what.removeprefix('stage * ')}"
        else:
            what = f"{what} ({len(subjects)} of them)"
        rows.append((name(what), old, new, relative))
    return rows


def _words(term: str) -> str:
    """A term in words, without its unit.

    >>> _words("step_time_s"), _words("stage 1 data_axes"), _words("num_stages")
    ('step time', 'stage 1 data axes', 'stages')
    """
    if term.startswith(("interface ", "note: ", "combine ")):
        return term
    return _NAMES.get(term) or _UNITS.sub("", term).replace("_", " ")


def _shown(subject: str, value: str | int | float | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if subject.endswith("bytes_per_s"):
            return format_bytes_per_s(value)
        if "flops_per_s" in subject:
            return format_flops_per_s(value)
        if subject.endswith("_s"):
            return format_seconds(value)
        if subject.endswith("_bytes"):
            return format_bytes(value)
        if subject.endswith("bubble"):
            return f"{value:.1%}"
        return f"{value:g}"
    return str(value)
