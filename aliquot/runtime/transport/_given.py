"""Comparison of the arrays that processes pass in a call.

A process describes its arrays by digests, which are small enough to be compared in every call.
Where processes pass their own rows alone, only what several of them hold is compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import msgspec


class Given(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What one process passes for one array.

    Attributes:
        kind: dtype and shape, such as `float32[16, 8]`.
        rows: "all" or "own", if that makes a difference in this process; empty if its own part is
            all of the array, or if the array lies on devices already.
        digests: of what it holds, by the place in the whole array, such as `0:8,0:16`.
        begins: its first elements, for messages.
        is_restored: it belongs to the state, and is no array that a call left on the devices.
    """

    kind: str
    rows: str = ""
    digests: dict[str, str] = {}
    begins: str = ""
    is_restored: bool = False

    def __str__(self) -> str:
        rows = {"all": ", all of it", "own": ", as its own part", "": ""}[self.rows]
        return f"{self.kind}{rows}{f' beginning {self.begins}' if self.begins else ''}"


def differences(given: Mapping[int, Mapping[str, Given]]) -> list[str]:
    """One sentence for each array that processes do not pass alike.

    Args:
        given: for some or all processes what each passes, by path. What a process does not describe
            is not compared.
    """
    lines = []
    for path in dict.fromkeys(itertools.chain(*given.values())):
        passed = {k: of[path] for k, of in given.items() if path in of}
        than = dict(_different(passed))
        if not than:
            continue
        reference = min(than.values())
        odd = [k for k, first in than.items() if first == reference]
        mine, theirs = passed[reference], passed[odd[0]]
        # Arrays may differ after equal beginnings.
        later = " (and differs later)" if str(mine) == str(theirs) else ""
        lines.append(
            f"{path} of {_processes(odd)} is not that of process {reference}: process"
            f" {reference}: {mine}; process {odd[0]}: {theirs}{later}"
        )
    restored: dict[int, str] = {}
    for k, of in given.items():
        for path in of:
            if of[path].is_restored:
                restored.setdefault(k, path)
    others = [k for k in given if k not in restored]
    if restored and others:
        k = min(restored)
        path = restored[k]
        lines.append(
            f"{_processes([*restored])} pass{'es' * (len(restored) == 1)} a state from the host,"
            f" such as {path} = {given[k][path]}, and {_processes(others)} what the last call or"
            " step.init returned"
        )
    return lines


def _processes(numbers: list[int]) -> str:
    return f"process{'es' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _different(passed: Mapping[int, Given]) -> Iterator[tuple[int, int]]:
    """Processes that pass something else, each with the first process that it differs from."""
    first: dict[str, tuple[str, int]] = {}
    for k, given in passed.items():
        facts = {f"numbers {place}": text for place, text in given.digests.items()}
        if given.rows:
            facts["rows"] = given.rows
        if given.rows != "own":
            facts["shape"] = given.kind[given.kind.index("[") :]
        than = [first.setdefault(name, (text, k)) for name, text in facts.items()]
        odd = [j for (text, j), mine in zip(than, facts.values(), strict=True) if text != mine]
        if odd:
            yield k, min(odd)
