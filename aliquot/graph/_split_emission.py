"""Emission of a split step's graph: the operators written so far, and the new values that stand for
those of the old graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ._split_equations import Equations, joint, with_rows
from ._split_values import Pieces, index_of
from ._types import Call, Graph, Op, Operand, OpId, ValueId

Items: TypeAlias = list["OpId | Call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Body into which operators are written.

    Attributes:
        items: the list to which they are added.
        trips, of: the loops around them now have `trips` turns in all, where they had `of`.
        region: remat region.
        in_loop: whether this is a loop's body, which sees stacked arrays as a whole.
    """

    items: Items
    trips: int = 1
    of: int = 1
    region: int = 0
    in_loop: bool = False

    def body(self, region: int) -> Place:
        """A body that runs as often as this place."""
        return replace(self, items=[], region=region)

    def loop(self, trips: int, of: int) -> Place:
        """A loop's body."""
        return replace(self, items=[], trips=self.trips * trips, of=self.of * of, in_loop=True)


@dataclass(slots=True, kw_only=True)
class Emission:
    """The new graph, as far as it is written.

    Attributes:
        arrays: its values.
        ops: its operators so far.
        joined: operators of the old graph for which pieces are concatenated.
        recut: operators of the old graph whose results are made whole and then cut.
        joints: new values that are concatenated pieces.
        equations: equations for fewer rows, each made once.
        num_regions: number of remat regions so far.
    """

    arrays: Pieces
    ops: list[Op] = field(default_factory=list)
    joined: set[OpId] = field(default_factory=set)
    recut: set[OpId] = field(default_factory=set)
    joints: set[ValueId] = field(default_factory=set)
    equations: Equations = field(default_factory=Equations)
    num_regions: int = 0

    @property
    def graph(self) -> Graph:
        """The original graph."""
        return self.arrays.graph


def write(
    emission: Emission,
    like: Op,
    place: Place,
    eqn: Any,
    inputs: Sequence[Operand],
    outputs: Sequence[ValueId],
    name: str = "",
) -> None:
    """Write an operator that runs `eqn`, or a link; all else is as in `like`."""
    # Links run nothing: they are in the list of operators, but in no body.
    if eqn is not None:
        place.items.append(OpId(len(emission.ops)))
    emission.ops.append(
        Op(
            index=OpId(len(emission.ops)),
            name=name or eqn.primitive.name,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            params=eqn.params if eqn is not None else {},
            phase=like.phase,
            scope=like.scope,
            # A loop over a range of rows has fewer turns than the whole loop.
            trips=like.trips * place.trips // place.of,
            eqn=eqn,
            region=place.region,
        )
    )


def write_link(
    emission: Emission, old: ValueId, place: Place, inputs: Sequence[Operand], output: ValueId
) -> None:
    """Write the link that makes `old`, on other operands."""
    like = emission.graph.links[old]
    write(emission, like, place, None, inputs, (output,), like.name)


def parts_at(emission: Emission, operand: Operand, place: Place) -> tuple[Operand, ...]:
    """An operand as a body sees it: in pieces, or as a whole in loops."""
    arrays = emission.arrays
    return (arrays.known(operand),) if place.in_loop else arrays.parts(operand)


def read(
    emission: Emission, operand: Operand, place: Place, like: Op, eqn: Any, aval: Any
) -> Operand:
    """An operand as a whole; concatenated first if it exists only in pieces."""
    arrays = emission.arrays
    if arrays.needs_join(operand):
        old = index_of(operand)
        whole = arrays.new(old)
        avals = [with_rows(aval, stop - start) for start, stop in arrays.ranges]
        joined_eqn = joint(eqn, "concatenate", avals, aval, {"dimension": 0})
        write(emission, like, place, joined_eqn, arrays.parts(old), (whole,))
        arrays.whole_here[old] = whole
        emission.joints.add(whole)
    known = arrays.known(operand)
    if isinstance(known, int) and known in emission.joints:
        emission.joined.add(like.index)
    return known


def define(
    emission: Emission, old: ValueId, whole: ValueId, place: Place, like: Op, eqn: Any, aval: Any
) -> None:
    """Record `whole` as the new value for `old`, and cut it if it must come in pieces."""
    arrays = emission.arrays
    if old not in arrays.stacked:
        arrays.whole[old] = whole
        return
    arrays.whole_here[old] = whole
    # The operator mixes rows, but the readers of its result work range by range.
    emission.recut.add(like.index)
    rank = len(aval.shape)
    for piece, (start, stop) in zip(arrays.declare(old), arrays.ranges, strict=True):
        starts, limits = (start, *(0,) * (rank - 1)), (stop, *aval.shape[1:])
        params = {"start_indices": starts, "limit_indices": limits, "strides": None}
        slice_eqn = joint(eqn, "slice", [aval], with_rows(aval, stop - start), params)
        write(emission, like, place, slice_eqn, (whole,), (piece,))


def define_all(
    emission: Emission,
    old: Sequence[ValueId],
    new: Sequence[ValueId],
    place: Place,
    like: Op,
    eqn: Any,
) -> None:
    """`define` for all results of an operator or loop."""
    for before, after, var in zip(old, new, eqn.outvars, strict=True):
        if before >= 0:
            define(emission, before, after, place, like, eqn, var.aval)
