"""Traits of primitives: the part of a declaration beside the rule, which holds for operators of all
shapes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

Rewrite: TypeAlias = Callable[[Mapping[str, Any], int], dict[str, Any]]
"""(parameters of an operator, number of rows) -> parameters of the same operator on that number of
rows.
"""


class Moves(enum.Enum):
    """Ways in which an operator that only moves elements makes its result from those of its first
    operand.
    """

    COPY = "each element in its place"
    CAST = "each element in its place, in another dtype"
    NEGATE = "each element in its place, with the other sign"
    TRANSPOSE = "each element once, dims in another order"
    RESHAPE = "each element once, in the same order, under another shape"
    REPEAT = "elements any number of times, as in a broadcast"
    SELECT = "some of the elements, as in a slice"

    @property
    def permutes(self) -> bool:
        """True if the result holds each element of the operand once, unchanged."""
        return self in (Moves.COPY, Moves.TRANSPOSE, Moves.RESHAPE)

    @property
    def keeps_all(self) -> bool:
        """True if the result holds each element of the operand once, perhaps in another dtype."""
        return self.permutes or self is Moves.CAST


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a primitive beside its rule.

    Each trait permits something. A trait that is missing costs time or memory; one that is wrong
    makes results wrong.

    Attributes:
        adds: the result is the sum of the operands. By it, sums of gradients are recognised and
            partial sums merged.
        multiplies: a product with a contraction, which matrix units run. It is never repeated to
            save memory.
        moves: how it rearranges elements, if it does nothing else.
        costly: it takes much longer than reading its operands and writing its results, so results
            that a backward pass reads are kept instead of recomputed.
        runs_on_pieces: each device runs it on its own pieces, because the compiler would gather the
            operands first.
        join: the binary primitive that combines the results for two ranges of the reduced dims.
        on_rows: makes the parameters for fewer rows (elements of the leading dim), if the operator
            can run on ranges of rows; `same_parameters` if they do not mention sizes. The rule says
            which operands are cut.
        changes_memory: its result lies in another memory than its operand, to which a copy engine
            brings it beside compute.
        numbers_rows: its result holds positions along `params["dimension"]`, so that for a range of
            rows its begin must be added.
    """

    adds: bool = False
    multiplies: bool = False
    moves: Moves | None = None
    costly: bool = False
    runs_on_pieces: bool = False
    join: str = ""
    on_rows: Rewrite | None = None
    changes_memory: bool = False
    numbers_rows: bool = False


NO_TRAITS = Traits()


def same_parameters(params: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The parameters on fewer rows of an operator whose parameters do not mention sizes."""
    return dict(params)


def leading_size(key: str) -> Rewrite:
    """The parameters on fewer rows of an operator that states the shape of its result under
    `key`.
    """
    return lambda params, rows: {**params, key: (rows, *params[key][1:])}
