"""The parts of a text for training, validation and test."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..core import InputError, shortened

PARTS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Shares of a text, in order: the first tokens are for training, the next for validation, the
    last for test.

    >>> Split.read("949,50,1").bounds(2000, "validation")
    (1898, 1998)

    Args:
        shares: up to three numbers, of which only the ratios count.
    """

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.shares) <= len(PARTS) or min(self.shares) < 0 or not sum(self.shares):
            raise InputError(
                f"A split has one to three shares that are not negative, for {', '.join(PARTS)},"
                f" got {', '.join(f'{share:g}' for share in self.shares) or 'none'}."
            )

    @classmethod
    def read(cls, text: str) -> Split:
        """The split that a text such as `949,50,1` writes.

        Raises:
            InputError: it writes none.
        """
        shares = text.split(",")
        if not all(re.fullmatch(r"\s*[0-9]{1,9}(\.[0-9]{1,9})?\s*", share) for share in shares):
            raise InputError(
                f"--split {shortened(text, 60)!r} is no split: write the shares of"
                f" {', '.join(PARTS)}, such as 949,50,1, or 1 to train on everything."
            )
        return cls(shares=tuple(map(float, shares)))

    def bounds(self, count: int, part: str) -> tuple[int, int]:
        """The first token of a part of `count` tokens, and the first behind it."""
        number = PARTS.index(part)
        total = sum(self.shares)
        first, last = (round(count * sum(self.shares[:k]) / total) for k in (number, number + 1))
        return first, last

    def __str__(self) -> str:
        return ",".join(f"{share:g}" for share in self.shares)
