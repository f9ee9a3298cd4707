"""All faults of data from a file against the type that says what it may hold; msgspec alone stops
at the first.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import msgspec

from ._errors import nearest
from ._text import printable, shortened

Hook: TypeAlias = Callable[[type, Any], Any]
"""What reads values of types of our own, as `msgspec.convert` takes it in `dec_hook`."""


def faults_of(data: Any, kind: Any, path: str, hook: Hook | None = None) -> Iterator[str]:
    """Every field that is unknown, missing, of the wrong type or out of bounds.

    Args:
        data: plain values.
        kind: what they may be: a `msgspec.Struct`, or anything that `msgspec.convert` takes.
        path: how messages call the data; empty for a file as a whole.

    >>> class Link(msgspec.Struct, forbid_unknown_fields=True):
    ...     seconds: float
    >>> list(faults_of({"second": 1}, Link, "link"))  # doctest: +NORMALIZE_WHITESPACE
    ["`link.second`: there is no such field: did you mean 'seconds'? Known: seconds.",
     '`link.seconds`: is missing']
    """
    kind = _without_none(kind) if data is not None else kind
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield from _struct_faults(data, kind, path, hook)
        return
    items = typing.get_args(kind)[:1] if typing.get_origin(kind) in (tuple, list) else ()
    if items and isinstance(data, list | tuple) and _is_worth_opening(items[0]):
        for index, item in enumerate(data):
            yield from faults_of(item, items[0], f"{path}[{index}]", hook)
        return
    named = typing.get_args(kind)[1:] if typing.get_origin(kind) is dict else ()
    if named and isinstance(data, dict) and _is_worth_opening(named[0]):
        for name, item in data.items():
            shown = shortened(printable(str(name), keep=""), 60)
            yield from faults_of(item, named[0], f"{path}.{shown}", hook)
        return
    if typing.get_origin(kind) is typing.Literal and isinstance(data, str):
        known = typing.get_args(kind)
        if data not in known:
            shown = shortened(printable(data, keep=""), 60)
            yield f"`{path}`: there is no {shown!r}: {nearest(data, known)}"
        return
    try:
        msgspec.convert(data, kind, dec_hook=hook)
    except msgspec.ValidationError as error:
        reason, _, inner = str(error).rpartition(" - at `$")
        if not reason:
            reason, inner = inner, ""
        if not inner and " got " not in reason and isinstance(data, int | float):
            reason = f"{reason}, got {shortened(repr(data), 30)}"
        yield f"`{path}{inner.rstrip('`')}`: {reason[0].lower()}{reason[1:]}"


def _struct_faults(
    data: Any, kind: type[msgspec.Struct], path: str, hook: Hook | None
) -> Iterator[str]:
    if not isinstance(data, dict):
        where = f"`{path}`" if path else "it"
        yield f"{where}: expected an object, got {shortened(repr(data), 40)}"
        return
    fields = _fields(kind)
    stem = f"{path}." if path else ""
    unknown = data.keys() - fields.keys() if kind.__struct_config__.forbid_unknown_fields else ()
    for name in unknown:
        known = nearest(str(name), fields)
        shown = shortened(printable(str(name), keep=""), 60)
        yield f"`{stem}{shown}`: there is no such field: {known}"
    for name, field in fields.items():
        if name in data:
            yield from faults_of(data[name], field.type, f"{stem}{name}", hook)
        elif field.required:
            yield f"`{stem}{name}`: is missing"


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


def _without_none(kind: Any) -> Any:
    """The struct of a struct that may be None."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    others = [member for member in typing.get_args(kind) if member is not types.NoneType]
    return others[0] if len(others) == 1 else kind


def _is_worth_opening(item: Any) -> bool:
    """True if items of a list or mapping have fields, or are lists: each may have faults of its
    own.
    """
    return (isinstance(item, type) and issubclass(item, msgspec.Struct)) or typing.get_origin(
        item
    ) in (tuple, list)
