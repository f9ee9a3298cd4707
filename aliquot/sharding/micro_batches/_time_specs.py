"""Time specs: how the values of an array on micro-batches make up the array, and how an operator
passes that on from its operands to its results.

A micro-batch split is a split over time, so the same declarations that say how an array may be
split over devices decide here. `follow` is the whole algebra for one operator; `_micro_batches`
walks a step with it.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from ...graph import DimRule, Moves, Op, raises, traits_of
from .._spec import differing_dims


class TimeKind(enum.StrEnum):
    """How the values that the parts of a batch compute for an array make up the array.

    `EQUAL`: each part computes the array itself. `CONCATENATE`: each computes its own slice. `SUM`
    and the other reductions: the array is the sum (...) over the parts. `MEAN`: their mean (only
    under independent semantics). `LATE`: computed
    once, from combined arrays, after the last part. `WHOLE`: exists only for the whole batch,
    computed before the first part.
    """

    EQUAL = "equal"
    CONCATENATE = "concatenate"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    PROD = "prod"
    AND = "and"
    OR = "or"
    MEAN = "mean"
    LATE = "late"
    WHOLE = "whole"


REDUCTIONS = frozenset({TimeKind.MAX, TimeKind.MIN, TimeKind.PROD, TimeKind.AND, TimeKind.OR})


class TimeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A kind and, for `CONCATENATE`, the dim (-1 for all others) and its blocks.

    A dim may hold several blocks of examples one after another, each as long as the others, of
    which each part has an equal share: two batches that were joined are two blocks. With `ANY`, the
    array is the same all along the dim, so that it may be read as any number of blocks.
    """

    kind: TimeKind
    dim: int = -1
    blocks: int = 1

    def at(self, dim: int) -> TimeSpec:
        """The same spec where the dim lies elsewhere."""
        return TimeSpec(kind=self.kind, dim=dim, blocks=self.blocks)


ANY = 0
"""Any number of blocks."""

EQUAL = TimeSpec(kind=TimeKind.EQUAL)
SUM = TimeSpec(kind=TimeKind.SUM)
MEAN = TimeSpec(kind=TimeKind.MEAN)
LATE = TimeSpec(kind=TimeKind.LATE)
WHOLE = TimeSpec(kind=TimeKind.WHOLE)


def split_at(dim: int, blocks: int = 1) -> TimeSpec:
    """The spec of an array of which each part has a slice of each block of `dim`."""
    return TimeSpec(kind=TimeKind.CONCATENATE, dim=dim, blocks=blocks)


class Conversion(enum.StrEnum):
    """Conversion of an operand on its way into an operator.

    `ONCE`: the first part keeps it and the others take zeros, so that it counts once in a sum.
    `EARLY`: the whole batch's value, computed before the first part. `LOCAL`: positions in the
    batch become positions in the part.
    """

    ONCE = "once"
    EARLY = "early"
    LOCAL = "local"


class Action(enum.StrEnum):
    """Way in which an operator runs.

    `RUN`: on each part. `SLICE`: on the whole batch, and its results are sliced (they depend on the
    position, as random bits do). `SHIFT`: on each part, and its result is shifted by the part's
    position (an iota). `EARLY`, `LATE`: once, before or after all parts.
    """

    RUN = "run"
    SLICE = "slice"
    SHIFT = "shift"
    EARLY = "early"
    LATE = "late"


Shape: TypeAlias = tuple[int, ...]


class Followed(msgspec.Struct, frozen=True, kw_only=True):
    """How an operator runs on a part: specs of its results, conversions by operand position, and
    its action.
    """

    results: tuple[TimeSpec, ...]
    conversions: tuple[tuple[int, Conversion], ...] = ()
    action: Action = Action.RUN


def spec_by_shape(whole: Shape, part: Shape, parts: int, chunks: int = 1) -> TimeSpec | None:
    """`EQUAL` for equal shapes, `CONCATENATE` where one dim is `parts` times as long; None
    otherwise.

    Args:
        chunks: of the batch, of which each part has a share. Dims before the one that is cut count
            them, too, so that the rest of them are its blocks.
    """
    differing = differing_dims(whole, part)
    if not differing:
        return EQUAL
    (dim, *others) = differing
    if others or whole[dim] != parts * part[dim]:
        return None
    blocks, rest = divmod(chunks, math.prod(whole[:dim]) or 1)
    return split_at(dim, blocks if blocks and not rest and part[dim] % blocks == 0 else 1)


def join(a: TimeSpec, b: TimeSpec) -> TimeSpec | None:
    """The spec of an array that has either of two specs; None if they are incompatible."""
    kinds = {a.kind, b.kind}
    if a == b:
        return a
    # A total that starts as a constant and grows by summands is a sum.
    if kinds == {TimeKind.EQUAL, TimeKind.SUM}:
        return SUM
    if kinds == {TimeKind.CONCATENATE} and a.dim == b.dim and ANY in (a.blocks, b.blocks):
        return split_at(a.dim, a.blocks or b.blocks)
    return None


def follow(
    op: Op,
    rule: DimRule,
    specs: Sequence[TimeSpec],
    shapes: Sequence[tuple[Shape, Shape]],
    parts: int,
    positions: bool = False,
    chunks: int = 1,
) -> Followed | str:
    """Results of an operator that runs on each part, or why it cannot.

    Args:
        op: the operator; only its name, its parameters and the number of its operands matter.
        rule: its rule at the whole batch's shapes.
        specs: specs of its operands; none of them `LATE` or `WHOLE`.
        shapes: of each result, with the whole batch and with a part.
        parts: number of parts.
        positions: whether the indices of a lookup along the batch are each row's own position.
        chunks: see `spec_by_shape`.
    """
    kinds = {spec.kind for spec in specs}
    if shapes and all(0 in whole for whole, _ in shapes):
        # Arrays without elements have whatever spec their shapes allow.
        seen = [spec_by_shape(whole, part, parts) for whole, part in shapes]
        if all(seen):
            return Followed(results=tuple(spec for spec in seen if spec))
    # Operators on several arrays, each with a spec of its own.
    if op.name in ("optimization_barrier", "device_put"):
        return _checked(Followed(results=tuple(specs)), shapes, parts)
    if kinds & REDUCTIONS:
        through = through_reduction(op, specs)
        if through is None:
            return (
                "it uses a reduction over the batch, which is known only after the last micro-batch"
            )
        return _checked(Followed(results=(TimeSpec(kind=through),) * len(shapes)), shapes, parts)
    if TimeKind.SUM in kinds:
        outcome = _of_sums(rule, specs, len(shapes))
    elif TimeKind.CONCATENATE in kinds:
        outcome = _of_slices(op, rule, specs, positions)
    else:
        # Equal operands give equal results, unless the size of the batch stands in the operator
        # itself.
        made = []
        for whole, part in shapes:
            found = spec_by_shape(whole, part, parts, chunks)
            if found is None:
                return "it makes an array of which more than one dim is the batch's"
            made.append(found)
        # Their elements are equal along the batch, or not written yet, so that a part may make them
        # at its own size.
        if all(spec.kind is not TimeKind.CONCATENATE for spec in made):
            return Followed(results=tuple(made))
        counts = op.name == "iota" and op.params["dimension"] == made[0].dim
        if op.name in ("broadcast_in_dim", "empty", "empty2", "iota") and not counts:
            return Followed(results=(split_at(made[0].dim, ANY),))
        if counts:
            return Followed(results=tuple(made), action=Action.SHIFT)
        # Random bits depend on the position in the batch: made for the whole and sliced, they are
        # the plain step's own numbers.
        return Followed(results=tuple(made), action=Action.SLICE)
    return outcome if isinstance(outcome, str) else _checked(outcome, shapes, parts)


def through_reduction(op: Op, specs: Sequence[TimeSpec]) -> TimeKind | None:
    """How an operator's results make up its result for the whole batch, if its operands are each
    part's maximum, or another reduction over the part.

    None if they do not, as for an operator that is not monotonic in a maximum.
    """
    reduced = [spec.kind for spec in specs if spec.kind is not TimeKind.EQUAL]
    kind, *others = set(reduced)
    if others or kind not in REDUCTIONS:
        return None
    truth = kind in (TimeKind.OR, TimeKind.AND)
    if op.eqn is not None and raises(op.eqn):
        # A check raises whichever part fails; parts decide only which of several messages is shown.
        return TimeKind.EQUAL
    if op.name == "convert_element_type":
        if not truth:
            return kind if str(op.params["new_dtype"]) != "bool" else None
        as_number = TimeKind.MAX if kind is TimeKind.OR else TimeKind.MIN
        return kind if str(op.params["new_dtype"]) == "bool" else as_number
    if op.name == "not" and truth:
        return TimeKind.AND if kind is TimeKind.OR else TimeKind.OR
    moves = traits_of(op.name).moves
    # A maximum of elements in another order, or repeated, is the same maximum.
    if moves is not None and (moves.permutes or moves is Moves.REPEAT):
        return kind
    if op.name in (kind.value, f"reduce_{kind.value}"):
        return kind
    mixed = ("or", "and") if truth else ("max", "min")
    # The other operand is equal in all parts, so that taking the larger of both parts' and its
    # value is the same in either order. A product would take it once for each part.
    return kind if op.name in mixed and len(reduced) == 1 and kind is not TimeKind.PROD else None


def _checked(
    outcome: Followed, shapes: Sequence[tuple[Shape, Shape]], parts: int
) -> Followed | str:
    """Check what the rule says of the results against their shapes in the two traces."""
    for spec, (whole, part) in zip(outcome.results, shapes, strict=True):
        seen = spec_by_shape(whole, part, parts)
        cut = spec.kind is TimeKind.CONCATENATE
        if seen != (split_at(spec.dim) if cut else EQUAL) or (
            cut and part[spec.dim] % (spec.blocks or 1)
        ):
            return (
                f"its rule does not explain why its result is {whole} for the batch and {part} for"
                " a micro-batch"
            )
    return outcome


def _of_sums(rule: DimRule, specs: Sequence[TimeSpec], num_results: int) -> Followed | str:
    """Linear operators turn summands into summands. Other operands must count once where they are
    added, and enter every part where they are factors.
    """
    reason = "it is not linear in a sum over the batch"
    if not rule.linear:
        return reason
    # Sums in two groups are factors of one product, which would need all pairs of parts.
    groups = {rule.linear[k] for k, spec in enumerate(specs) if spec.kind is TimeKind.SUM}
    if len(groups) != 1 or 0 in groups:
        return reason
    (group,) = groups
    once = []
    for k, spec in enumerate(specs):
        # Multiplying a sum by an own value of each part is fine; adding one is not.
        if spec.kind is TimeKind.CONCATENATE:
            return "it joins a sum over the batch with parts of the batch"
        if spec.kind is TimeKind.EQUAL and rule.linear[k] == group:
            once.append((k, Conversion.ONCE))
    return Followed(results=(SUM,) * num_results, conversions=tuple(once))


def _of_slices(op: Op, rule: DimRule, specs: Sequence[TimeSpec], positions: bool) -> Followed | str:
    """One factor runs through all slices; results that carry it are slices, and those that reduce
    it are summands of a sum (or parts of another reduction).
    """
    letters = {}
    for k, spec in enumerate(specs):
        if spec.kind is TimeKind.CONCATENATE:
            letters[k] = rule.operands[k][spec.dim][0]
    known = {specs[k].blocks for k in letters} - {ANY}
    if len(known) > 1:
        return "it meets examples of joined batches, or of chunks of a batch, in another order"
    blocks = next(iter(known), ANY)
    dims_of_rule = itertools.chain(*rule.operands, *rule.results)
    if blocks != 1 and any(
        len(names) > 1 and names[0] in letters.values() for names in dims_of_rule
    ):
        # A dim of several factors is read in the order of its elements.
        if blocks != ANY or op.name == "reshape":
            return "it needs the examples of joined batches, or of chunks of a batch, in order"
        blocks = 1
    if positions:
        return _of_own_rows(op, rule, specs, letters, blocks)
    # Operands that are cut along different dims meet every example of one with every example of the
    # other.
    if len(set(letters.values())) > 1:
        return "it sets examples against one another"
    (letter,) = set(letters.values())
    # An upper-case factor must stay whole.
    if not letter.islower() or (rule.ring is not None and letter == rule.ring.factor):
        return "it needs a dim of the batch as a whole"
    if _looks_up(op, rule, specs, letter):
        return "it looks up examples by their position in the batch"
    if op.name == "ragged_dot_general":
        (ragged,) = op.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
        if letter in rule.operands[0][ragged]:
            return "its groups are sizes of the batch as a whole"
    results = []
    for position, dims in enumerate(rule.results):
        dim = next((d for d, names in enumerate(dims) if names[0] == letter), -1)
        if dim >= 0:
            results.append(split_at(dim, blocks))
        elif position in rule.summed or position in rule.partial:
            results.append(SUM)
        elif letter in rule.reduced and (rule.reduce == "sum" or op.name.startswith("reduce_")):
            results.append(TimeSpec(kind=TimeKind(rule.reduce)))
        else:
            return "it combines the examples of a batch in a way that parts of the batch cannot"
    once: list[tuple[int, Conversion]] = []
    if SUM in results and rule.linear:
        summed = {rule.linear[k] for k in letters} - {0}
        for k in range(len(specs)):
            # A scatter adds to an array that all parts have: it must count once.
            if k not in letters and rule.linear[k] in summed:
                once.append((k, Conversion.ONCE))
    return Followed(results=tuple(results), conversions=tuple(once))


def _looks_up(op: Op, rule: DimRule, specs: Sequence[TimeSpec], letter: str) -> bool:
    """True if the array that a lookup or an update indexes is split along an indexed dim."""
    if op.name != "gather" and not op.name.startswith("scatter"):
        return False
    if specs[0].kind is not TimeKind.CONCATENATE:
        return False
    others = rule.results[0] if op.name == "gather" else rule.operands[2]
    return not any(letter in names for names in others)


def _of_own_rows(
    op: Op, rule: DimRule, specs: Sequence[TimeSpec], letters: dict[int, str], blocks: int
) -> Followed | str:
    """A lookup in which each index stands for its own example: local, once the positions are those
    in the part.
    """
    row = letters[1]
    others = {k: letter for k, letter in letters.items() if k not in (0, 1)}
    if (
        not row.islower()
        and op.name == "gather"
        or any(letter != row for letter in others.values())
    ):
        return "it looks up examples by their position in the batch"
    if op.name == "gather":
        dim = next((d for d, names in enumerate(rule.results[0]) if names[0] == row), -1)
        return Followed(results=(split_at(dim, blocks),), conversions=((1, Conversion.LOCAL),))
    results = (split_at(specs[0].dim, blocks),)
    return Followed(results=results, conversions=((1, Conversion.LOCAL),))
