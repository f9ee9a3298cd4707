"""Disjoint sets of ordered members: union-find."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

# Members are ordered: a node, or a node with one of its factors.
T = TypeVar("T", int, tuple[int, int])


class DisjointSets(Generic[T]):
    """Disjoint sets, each known by its least member."""

    def __init__(self) -> None:
        self._parent: dict[T, T] = {}

    def root(self, member: T) -> T:
        """The least member of a member's set, by which the set is known."""
        while (parent := self._parent.get(member, member)) != member:
            # Halves the way for whoever comes next.
            self._parent[member] = self._parent.get(parent, parent)
            member = parent
        return member

    def join(self, one: T, other: T) -> None:
        """Merge the sets of two members."""
        low, high = sorted((self.root(one), self.root(other)))
        self._parent[high] = low

    def join_all(self, pairs: Iterable[tuple[T, T]]) -> None:
        """Merge the sets of the members of each pair."""
        for one, other in pairs:
            self.join(one, other)
