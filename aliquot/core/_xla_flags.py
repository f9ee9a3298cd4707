"""Options of XLA that the installed version has."""

from __future__ import annotations

import importlib.util
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path


def with_xla_flags(current: str, flags: Mapping[str, str]) -> str:
    """The value of `XLA_FLAGS` with some options set, leaving out those that the installed XLA does
    not have.

    XLA ends the process at an option that it does not know, and releases drop options without
    notice.

    Args:
        current: the variable's present value; options of the same name are replaced.
        flags: name with leading dashes -> value.
    """
    known = known_xla_flags(flags)
    kept = [flag for flag in current.split() if flag.split("=")[0] not in flags]
    return " ".join([*kept, *(f"{name}={value}" for name, value in flags.items() if name in known)])


def known_xla_flags(flags: Iterable[str]) -> frozenset[str]:
    """The options among those given, with leading dashes, that the installed XLA has.

    Their names stand in its library as C strings. Nothing public lists the options, and asking XLA
    takes a process: it parses them once and aborts at an unknown one.
    """
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    libraries = Path(spec.submodule_search_locations[0]).glob("libjax_common*")
    for path in libraries:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return frozenset(
                name for name in flags if text.find(b"\0" + name.lstrip("-").encode() + b"\0") >= 0
            )
    # A build of jaxlib that keeps XLA in another file: its options are unknown.
    return frozenset(flags)
