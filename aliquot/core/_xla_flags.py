"""Options of XLA, as far as the installed version has them."""

from __future__ import annotations

import importlib.util
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path


def with_xla_flags(current: str, flags: Mapping[str, str]) -> str:
    """The value of `XLA_FLAGS` with `flags` set, without those of them that the installed XLA does
    not have.

    XLA aborts the process at an option that it does not know, and releases drop options without
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

    They are found by searching XLA's library for their names as C strings, because there is no
    public list of the options, and to ask XLA takes a process of its own: it parses options once
    and aborts at an unknown one.
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
    # This build of jaxlib has XLA in another file, so its options are unknown: keep all.
    return frozenset(flags)
