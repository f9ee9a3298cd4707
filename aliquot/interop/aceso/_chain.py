"""Chains of operators: their order, the layouts of their arrays, and the activations that they
keep.
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from ...core import InputError

Layout: TypeAlias = tuple[str, ...]
"""Number of replicas, then the number of parts of each dim: each "1", "tp" or "dp"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of a chain.

    Attributes:
        name: its name in the database.
        starts_layer: whether a run of recomputed operators ends before it.
        kept_share: share of its measured activations that is kept; counts buffers shared with a
            neighbour once.
        layouts: for each algorithm, the layouts of its input and its output.
        chooses_algorithm: whether a search chooses among its algorithms; otherwise it has the
            first.
    """

    name: str
    starts_layer: bool
    kept_share: float
    layouts: tuple[tuple[Layout, Layout], ...]
    chooses_algorithm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorChain:
    """A model as a chain of operators.

    Attributes:
        operators: the operators in order.
        resharding: whether changing layouts between operators costs time.
        copies_of_weights: bytes of parameters, gradients and optimizer state, in units of the
            parameters' own.
    """

    operators: tuple[Operator, ...]
    resharding: bool
    copies_of_weights: float


def built_in_chains() -> Mapping[str, Any]:
    """The descriptions of Aceso's own models, by family."""
    return tomllib.loads(resources.files(__package__).joinpath("chains.toml").read_text())


def read_chain(path: Path) -> Mapping[str, Any]:
    """A user's description of a chain, in TOML. Raises `InputError`."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(f"The chain {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"The chain {path} is no TOML: {error}.") from None


def make_chain(description: Mapping[str, Any], sizes: Mapping[str, Any]) -> OperatorChain:
    """A chain from its description.

    Args:
        description: in the format that `chains.toml` explains.
        sizes: numbers by the names that groups give as their `repeat`.

    Raises:
        InputError: the description is incomplete, or names a size that is not given.
    """
    names: list[str] = []
    groups = description.get("groups")
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and g.get("operators") for g in groups
    ):
        raise InputError(
            'A chain needs [[groups]], each with operators = ["...", ...] and perhaps repeat = 24.'
        )
    for group in groups:
        names += _expanded(group, sizes)
    usual = tuple(description.get("layout", ("tp", "dp", "1", "1")))
    layouts = description.get("layouts", {})

    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    operators = []
    for name in names:
        own = layouts.get(name, [[usual, usual]])
        operators.append(
            Operator(
                name=name,
                starts_layer=matches(name, description.get("layer_starts", ())),
                kept_share=float(first_match(name, description.get("kept_share", {}), 1.0)),
                layouts=tuple((tuple(a), tuple(b)) for a, b in own),
                chooses_algorithm=len(own) > 1
                or matches(name, description.get("chooses_algorithm", ())),
            )
        )
    return OperatorChain(
        operators=tuple(operators),
        resharding=bool(description.get("resharding", True)),
        copies_of_weights=float(description.get("copies_of_weights", 8.0)),
    )


def measured_size(description: Mapping[str, Any], size: str) -> str:
    """The size whose measurements hold for a size of this family: its own, if nothing else is
    said.
    """
    return str(description.get("sizes", {}).get(size, {}).get("measured_as", size))


def first_match(name: str, by_pattern: Mapping[str, Any], default: Any) -> Any:
    """The value of the first pattern that a name fits."""
    for pattern, value in by_pattern.items():
        if fnmatch.fnmatchcase(name, pattern):
            return value
    return default


def _expanded(group: Mapping[str, Any], sizes: Mapping[str, Any]) -> list[str]:
    repeat = group.get("repeat", 1)
    if isinstance(repeat, str):
        if repeat not in sizes:
            raise InputError(
                f"The chain repeats a group as often as {repeat!r} says, which is not given."
            )
        repeat = sizes[repeat]
    sections = repeat if isinstance(repeat, list) else [repeat]
    if not all(isinstance(n, int) and n >= 0 for n in sections):
        raise InputError(
            f"A group of a chain is repeated {repeat!r} times; that must be a number, or a list of"
            " numbers."
        )
    found: list[str] = []
    for section, count in enumerate(sections):
        for index in range(count):
            found += [name.format(section=section, index=index) for name in group["operators"]]
    return found
