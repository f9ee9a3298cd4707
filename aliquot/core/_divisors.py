"""Divisors of numbers of rows, devices and hosts."""

from __future__ import annotations


def divisors(number: int, *, most: int | None = None) -> list[int]:
    """The numbers from 1 on that divide a positive number, in rising order, up to `most`.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    >>> divisors(96, most=8)
    [1, 2, 3, 4, 6, 8]
    """
    last = number if most is None else min(number, most)
    return [n for n in range(1, last + 1) if number % n == 0]
