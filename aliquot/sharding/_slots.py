"""Dims that must be split together: union-find over the dims of arrays, through every operator that
passes splits on.

A *slot* is an array as one group of operators sees it. Most arrays have one slot. An array gets
another where its split may change: behind a product, where a parameter meets activations, and where
gradients end.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from ..core import DisjointSets
from ._ids import SlotId


@dataclass(slots=True)
class Slots:
    """Slots, the classes of their dims, and the groups they form.

    Attributes:
        ranks: number of dims of each slot.
        base: for each slot the number of its first dim; the dims of all slots are numbered in a row
            and called elements.
        by_key: slots by what they were made for.
        blocked: classes of dims that are never split.
        sizes: size of each element.
    """

    ranks: list[int] = field(default_factory=list)
    base: list[int] = field(default_factory=list)
    by_key: dict[Hashable, SlotId] = field(default_factory=dict)
    _element_parent: list[int] = field(default_factory=list)
    _slots_of: list[set[SlotId]] = field(default_factory=list)
    _groups: DisjointSets[int] = field(default_factory=DisjointSets)
    blocked: set[int] = field(default_factory=set)
    sizes: list[int] = field(default_factory=list)

    def get(self, key: Hashable, shape: tuple[int, ...]) -> SlotId:
        """The slot of a key, made if it is new."""
        slot = self.by_key.get(key)
        if slot is None:
            slot = self.by_key[key] = SlotId(len(self.ranks))
            self.ranks.append(len(shape))
            self.base.append(len(self._element_parent))
            for size in shape:
                self._element_parent.append(len(self._element_parent))
                self._slots_of.append({slot})
                self.sizes.append(size)
        return slot

    def element(self, slot: SlotId, dim: int) -> int:
        """The number of a dim of a slot."""
        return self.base[slot] + dim

    def dim_class(self, element: int) -> int:
        """The class of a dim: a representative element."""
        parent = self._element_parent
        root = element
        while parent[root] != root:
            root = parent[root]
        while parent[element] != root:
            parent[element], element = root, parent[element]
        return root

    def unite(self, a: int, b: int) -> bool:
        """Tie two dims, which are then split together. False, and nothing is done, if an array
        would then have two dims of the same class.
        """
        a, b = self.dim_class(a), self.dim_class(b)
        if a == b:
            return True
        # The smaller class joins the larger, so that few sets are copied; equal ones by number, so
        # that results do not depend on the order of sets.
        small, large = sorted((a, b), key=lambda r: (len(self._slots_of[r]), -r))
        # Two dims of one array cannot be split by one axis, so their classes must stay apart.
        if self._slots_of[small] & self._slots_of[large]:
            return False
        self._element_parent[small] = large
        self._slots_of[large] |= self._slots_of[small]
        self._slots_of[small] = set()
        if small in self.blocked:
            self.blocked.add(large)
        return True

    def block(self, element: int) -> None:
        """Never split the class of this dim."""
        self.blocked.add(self.dim_class(element))

    def group(self, slot: SlotId) -> SlotId:
        """The group of a slot: its lowest slot, so that groups are numbered in program order."""
        return SlotId(self._groups.root(slot))

    def join(self, slots: Iterable[SlotId]) -> None:
        """Put slots into one group, which one decision splits."""
        self._groups.join_all(itertools.pairwise(slots))
