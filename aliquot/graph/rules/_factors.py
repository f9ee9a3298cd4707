"""Letters for rules: each call returns the next letter and records its size."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from .._rule import DimRule, Dims, HasShape


class Factors:
    """The factors of one operator while its rule is written down.

    >>> f = Factors()
    >>> f.split(8) + f.whole(3) + f.split(1)
    'aA1'
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._split = _letters("a", str.islower)
        self._whole = _letters("A", str.isupper)

    def split(self, size: int) -> str:
        """A factor that may be split; "1" for a dim of size one, which has none."""
        return self._next(self._split, size)

    def whole(self, size: int) -> str:
        """A factor that must stay whole."""
        return self._next(self._whole, size)

    def splits(self, shape: Sequence[int], whole: Collection[int] = ()) -> Dims:
        """A factor for each dim of a shape: one that may be split, or that must stay whole for the
        dims in `whole`.
        """
        if not whole:
            return tuple(map(self.split, shape))
        dims = []
        for d, size in enumerate(shape):
            dims.append(self.whole(size) if d in whole else self.split(size))
        return tuple(dims)

    def wholes(self, shape: Sequence[int]) -> Dims:
        """A factor that must stay whole for each dim of a shape."""
        return tuple(map(self.whole, shape))

    def all_whole(self, operands: Sequence[HasShape]) -> tuple[Dims, ...]:
        """A factor that must stay whole for each dim of some operands."""
        return tuple([self.wholes(o.shape) for o in operands])

    def pair(self, before: int, after: int, *, same: bool) -> tuple[str, str]:
        """Letters of one dim before and after an operator: one factor that may be split if the dim
        is unchanged, or two that stay whole if it is cut or extended.
        """
        if same and before == after:
            letter = self.split(before)
            return letter, letter
        return self.whole(before), self.whole(after)

    def _next(self, letters: Iterator[str], size: int) -> str:
        if size == 1:
            return "1"
        letter = next(letters)
        self.sizes[letter] = size
        return letter

    def rule(
        self,
        operands: Sequence[Dims],
        results: Sequence[Dims],
        *,
        exchanged: Iterable[Iterable[str]] = (),
        **others: Any,
    ) -> DimRule:
        """The rule, with the sizes of all factors handed out; `others` are fields of `DimRule`."""
        # Dims of size one have no factor.
        exchanges = (frozenset(names) - {"1"} for names in exchanged)
        return DimRule(
            operands=tuple(operands),
            results=tuple(results),
            sizes=self.sizes,
            exchanged=tuple(filter(None, exchanges)),
            **others,
        )


def without(dims: Dims, dropped: Collection[int]) -> Dims:
    """The factors of all dims but some."""
    return tuple([factor for d, factor in enumerate(dims) if d not in dropped])


def merged(*parts: str) -> str:
    """One dim of several factors, major first."""
    return "".join(part for part in parts if part != "1") or "1"


def _letters(first: str, wanted: Callable[[str], bool]) -> Iterator[str]:
    # A barrier or a concatenation may have hundreds of operands: the alphabet does not suffice.
    return filter(wanted, map(chr, range(ord(first), sys.maxunicode)))
