"""The values of a split graph, and which of them stand for each value of the original graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from ._types import Graph, Literal, Operand, Value, ValueId


@dataclass(slots=True, kw_only=True)
class Pieces:
    """New values for the values of the original graph: one for each or, for a stacked value, one
    for each range of rows.

    Attributes:
        graph: the original graph.
        stacked: its values that are cut into pieces.
        ranges: the rows of each piece.
        values: the new values.
        constants: arrays that the step's closure holds, by new value.
        whole: the new value for each old one that is not cut.
        whole_here: the new value for each stacked one that also exists as a whole, in the body
            that is being written.
    """

    graph: Graph
    stacked: frozenset[ValueId]
    ranges: tuple[tuple[int, int], ...]
    values: list[Value] = field(default_factory=list)
    constants: dict[ValueId, Any] = field(default_factory=dict)
    whole: dict[ValueId, ValueId] = field(default_factory=dict)
    whole_here: dict[ValueId, ValueId] = field(default_factory=dict)
    _pieces: dict[ValueId, tuple[ValueId, ...]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of all pieces together."""
        return self.ranges[-1][1]

    def new(self, old: ValueId, rows: int | None = None) -> ValueId:
        """A new value like an old one, with another number of rows if `rows` is given."""
        like = self.graph.values[old]
        shape = like.shape if rows is None else (rows, *like.shape[1:])
        index = ValueId(len(self.values))
        self.values.append(structs.replace(like, index=index, shape=shape))
        return index

    def declare(self, old: ValueId) -> tuple[ValueId, ...]:
        """New values for an old one."""
        if old in self.stacked:
            self._pieces[old] = tuple([self.new(old, stop - start) for start, stop in self.ranges])
            return self._pieces[old]
        self.whole[old] = self.new(old)
        return (self.whole[old],)

    def declare_whole(self, formal: Sequence[Operand]) -> list[ValueId]:
        """New values for the inputs of a loop's body, which it gets anew in each turn."""
        for old in formal:
            self.whole[index_of(old)] = self.new(index_of(old))
        return [self.whole[index_of(old)] for old in formal]

    def parts(self, operand: Operand) -> tuple[Operand, ...]:
        """The pieces of a stacked operand, or the new value of any other; outside of loops."""
        if isinstance(operand, Literal) or operand not in self.stacked:
            return (self.known(operand),)
        if operand not in self._pieces:
            constant = self.graph.constants[operand]
            for index, (start, stop) in zip(self.declare(operand), self.ranges, strict=True):
                self.constants[index] = constant[start:stop]
        return self._pieces[operand]

    def known(self, operand: Operand) -> Operand:
        """The new value of an operand that is not stacked, or that also exists as a whole."""
        if isinstance(operand, Literal):
            return operand
        if operand in self.whole_here:
            return self.whole_here[operand]
        if operand not in self.whole:
            # Constants have no operator that makes them; each is declared where it is first read.
            self.whole[operand] = self.new(operand)
            self.constants[self.whole[operand]] = self.graph.constants[operand]
        return self.whole[operand]

    def needs_join(self, operand: Operand) -> bool:
        """True if an operand exists only in pieces."""
        if isinstance(operand, Literal) or operand in self.graph.constants:
            return False
        return operand in self.stacked and operand not in self.whole_here


def index_of(operand: Operand) -> ValueId:
    """An operand that is known to be a value."""
    assert isinstance(operand, int)
    return operand
