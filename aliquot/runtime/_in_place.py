"""Recognition of arrays that are as the next call of a step needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref


class InPlace:
    """The arrays that the next call of a step may pass without a look at each, because they have
    the type and sharding that it needs: those that its last call returned, or was given as such and
    did not donate.

    They are held by weak references: a state that its owner drops is freed.

    Args:
        successors: for each input the position of the result that has its type and sharding and
            replaces it in the next call, or -1.
    """

    def __init__(self, successors: Sequence[int]) -> None:
        self._successors = tuple(successors)
        self._known: list[Callable[[], Any]] = [_nothing] * len(successors)

    def unknown(self, leaves: Sequence[Any]) -> list[int]:
        """Positions of the arrays of a call that must be checked and placed."""
        return [
            position
            for position, (known, leaf) in enumerate(zip(self._known, leaves, strict=True))
            if known() is not leaf or leaf.is_deleted()
        ]

    def note(self, results: Sequence[Any], given: Mapping[int, Any]) -> None:
        """Take note of what a call returned, and of the arrays that it was given in place and has
        not donated, by position.
        """
        made: list[Callable[[], Any]] = [*map(ref, results), _nothing]
        self._known = [made[k] for k in self._successors]
        for position, array in given.items():
            self._known[position] = ref(array)


def _nothing() -> object:
    """In place of a reference to an array: it is the array of no call."""
    return _nothing
