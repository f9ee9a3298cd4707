"""Where a batch stays a batch although an operator puts its rows elsewhere: joins of two batches
and cuts into them, batches that are repeated, rolled, or regrouped.

A rule says along which dims an operator exchanges elements (`DimRule.exchanged`). Here the batch is
followed from the step's inputs through all operators, and where it meets such an operator one dim
of each array is chosen that holds the batch: all are split together, and devices exchange rows.
Without that, one axis could split the batch only before or only behind the operator, and every
device would compute the other side whole.

Arrays that hold fewer rows than the batch, such as the rewards of groups, cannot be split as far.
Where they are small they stay whole, and the batch is followed through them to where it is a batch
again. Large ones limit how far the batch may be split.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from ..core import DisjointSets
from ..graph import Phase, Role

if TYPE_CHECKING:
    from ._cuts import Cuts

# Arrays that hold less than this share of the bytes that a step makes may stay whole on every
# device. Measured work that is replicated so stays below 2%.
_SMALL = 0.01
# Loops run over one dim of these, and take or write a part of it at a time.
_SEQUENTIAL = ("scan_slice", "scan_stack", "dynamic_slice", "dynamic_update_slice")
# Of an operator that cuts a batch, a part with fewer rows than this share of it is no batch: it
# would keep the batch from being split further.
_LEAST_PART = 0.25
# Of two dims that could hold the batch, one without an exchange is preferred if it has at least
# so many rows; with fewer, rows count more, since they limit how many devices may split the batch.
_MANY_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Place:
    """A dim of an operand (or of a result) of an operator class, by its position."""

    op_class: int
    is_result: bool
    position: int
    dim: int


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """Dims of one operator that are split together by exchanging rows.

    Attributes:
        places: one dim of each array that takes part; the others stay whole.
        untied: factors of the rule that tie no dims here, as the batch is in other dims.
        rolls: whether an uneven array takes part; see `Exchanges`.
    """

    places: tuple[Place, ...] = ()
    untied: frozenset[str] = frozenset()
    rolls: bool = False

    def at(self, is_result: bool, position: int) -> int:
        """The dim of an operand or result that takes part; -1 if none does."""
        if not self.places:
            return -1
        return next(
            (p.dim for p in self.places if (p.is_result, p.position) == (is_result, position)), -1
        )


_NONE = Exchange()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """All exchanges of a step.

    Attributes:
        by_class: by operator class.
        across: pairs of dims that hold the batch on both sides of arrays that are computed whole.
        uneven: value classes that lie between a cut and a join, as those of `jnp.roll` do. Their
            rows are split like the batch although devices need not divide them: only the compiler
            sees them.
        small: operator classes that regroup the batch into fewer rows, in small arrays, which are
            computed whole; with the number of rows.
    """

    by_class: dict[int, Exchange] = field(default_factory=dict)
    across: tuple[tuple[Place, Place], ...] = ()
    uneven: frozenset[int] = frozenset()
    small: dict[int, int] = field(default_factory=dict)

    def of(self, op_class: int) -> Exchange:
        """The exchange of an operator class; one without places if there is none."""
        return self.by_class.get(op_class, _NONE)


class _Reached(msgspec.Struct, kw_only=True):
    """How the batch reaches a class of dims.

    Attributes:
        rows: of the batch, or of the part of it that these dims hold.
        origin: if dims of this class stay whole, a dim before them that does not.
    """

    rows: int
    origin: Place | None = None


class _Link(msgspec.Struct, frozen=True, kw_only=True):
    """An operator class and one of its sets of exchanged factors, with the dims of each array that
    hold one of them.
    """

    op_class: int
    names: frozenset[str]
    arrays: tuple[tuple[Place, ...], ...]


def find_exchanges(cuts: Cuts, order: Sequence[int]) -> Exchanges:
    """The exchanges of a step; `order` lists its operator classes in program order."""
    links = list(_links(cuts, order))
    starts = [i.value for i in cuts.graph.inputs if i.role is Role.BATCH]
    if not links or not starts:
        return Exchanges()
    return _Search(cuts=cuts, order=order, links=links).run(
        [int(cuts.folding.value_class[v]) for v in starts]
    )


def _links(cuts: Cuts, order: Sequence[int]) -> Iterator[_Link]:
    for op_class in order:
        rule, op = cuts.rules[op_class], cuts.first[op_class]
        if op.phase is Phase.UPDATE or cuts.made_of_constants(op_class):
            continue
        sides = [(False, k, dims) for k, dims in enumerate(rule.operands)]
        sides += [(True, k, dims) for k, dims in enumerate(rule.results)]
        for names in rule.exchanged:
            holding: set[int] = set()
            for _, _, dims in sides:
                holding |= {d for d, letters in enumerate(dims) if not names.isdisjoint(letters)}
            arrays = []
            for is_result, position, dims in sides:
                places = []
                for d, letters in enumerate(dims):
                    # All but reshapes keep the order of dims, also of those that are cut to one
                    # row, which have no factor.
                    if not names.isdisjoint(letters) or (op.name != "reshape" and d in holding):
                        places.append(
                            Place(op_class=op_class, is_result=is_result, position=position, dim=d)
                        )
                if places:
                    arrays.append(tuple(places))
            yield _Link(op_class=op_class, names=names, arrays=tuple(arrays))


@dataclass(slots=True, kw_only=True)
class _Search:
    """The batch followed through a step, from class of dims to class of dims."""

    cuts: Cuts
    order: Sequence[int]
    links: list[_Link]
    base: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    sets: DisjointSets[int] = field(default_factory=DisjointSets)
    sequential: set[int] = field(default_factory=set)
    reached: dict[int, _Reached] = field(default_factory=dict)
    pending: deque[int] = field(default_factory=deque)
    class_bytes: dict[int, float] = field(default_factory=dict)
    total_bytes: float = 0.0
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    across: list[tuple[Place, Place]] = field(default_factory=list)
    small: dict[int, int] = field(default_factory=dict)
    cuts_off: list[tuple[Place, Place]] = field(default_factory=list)
    joined: dict[int, Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cuts = self.cuts
        for value_class in range(len(cuts.producer)):
            self.base.append(len(self.sizes))
            self.sizes.extend(cuts.shape(value_class))
        # Links decide themselves which of their dims belong together.
        linked = set()
        for link in self.links:
            for name in link.names:
                linked.add((link.op_class, name))
        by_letter: dict[tuple[int, str], int] = {}
        in_order: list[int] = []
        for op_class in self.order:
            is_sequential = cuts.first[op_class].name in _SEQUENTIAL
            for place, letters in self._places(op_class):
                key = op_class, letters[0]
                if letters[0].islower() and key not in linked:
                    for element in self._elements(place):
                        self.sets.join(element, by_letter.setdefault(key, element))
                elif is_sequential and letters[0].isupper():
                    in_order += self._elements(place)
        self.sequential = set(map(self.sets.root, in_order))
        for value_class, members in enumerate(cuts.folding.value_members):
            num_bytes = float(cuts.graph.values[members[0]].num_bytes * len(members))
            self.total_bytes += num_bytes
            for dim in range(len(cuts.shape(value_class))):
                root = self.sets.root(self.base[value_class] + dim)
                self.class_bytes[root] = self.class_bytes.get(root, 0.0) + num_bytes

    def run(self, batch: Sequence[int]) -> Exchanges:
        """The exchanges, starting from the value classes of the inputs that belong to the batch."""
        for value_class in batch:
            shape = self.cuts.shape(value_class)
            # As for `NodeGraph.batch_factors`.
            looped = self.cuts.folding.value_members[value_class][0] in self.cuts.graph.looped
            for dim in range(min(2, len(shape)) if shape and (shape[0] > 1 or looped) else 0):
                root = self.sets.root(self.base[value_class] + dim)
                if root not in self.sequential:
                    self._reach(root, _Reached(rows=shape[dim]))
                    break
        links_of: dict[int, list[_Link]] = defaultdict(list)
        for link in self.links:
            for place in itertools.chain(*link.arrays):
                for element in self._elements(place):
                    links_of[self.sets.root(element)].append(link)
        resolved: set[tuple[int, frozenset[str]]] = set()
        while self.pending:
            root = self.pending.popleft()
            for link in links_of.get(root, ()):
                if (link.op_class, link.names) not in resolved:
                    resolved.add((link.op_class, link.names))
                    self._resolve(link, self.reached[root])
        uneven = self._follow_uneven()
        return Exchanges(
            by_class=self.exchanges,
            across=tuple(self.across),
            uneven=frozenset(uneven),
            small=self.small,
        )

    def _follow_uneven(self) -> Iterator[int]:
        """Value classes between a cut and a join, each of which then takes part in both."""
        readers: dict[int, set[int]] = defaultdict(set)
        for op_class, sources in enumerate(self.cuts.sources):
            for counter in sources:
                for value_class in counter:
                    readers[value_class].add(op_class)
        returned = set()
        for o in self.cuts.graph.outputs:
            if isinstance(o.value, int):
                returned.add(int(self.cuts.folding.value_class[o.value]))
        for place, part in self.cuts_off:
            out = self.cuts.first[part.op_class].outputs[part.position]
            value_class = int(self.cuts.folding.value_class[out])
            joins = readers[value_class]
            if value_class in returned or not joins or not joins <= self.joined.keys():
                continue
            yield value_class
            self._exchange(part.op_class, (place, part), rolls=True)
            for op_class in joins:
                positions = []
                for k, s in enumerate(self.cuts.sources[op_class]):
                    if value_class in s:
                        positions.append(k)
                result = self.joined[op_class]
                into = []
                for k in positions:
                    into.append(Place(op_class=op_class, is_result=False, position=k, dim=part.dim))
                self._exchange(op_class, (*into, result), rolls=True)

    def _reach(self, root: int, how: _Reached) -> None:
        known = self.reached.get(root)
        if known is None or (known.origin is not None and how.origin is None):
            self.reached[root] = how
            self.pending.append(root)

    def _resolve(self, link: _Link, source: _Reached) -> None:
        """Choose the dim of each array of a link that holds the batch, and reach it."""
        rows = source.rows
        kept: dict[Place, int] = {}
        left_out: list[Place] = []
        leading = set()
        for place in itertools.chain(*link.arrays):
            if self._holds_batch(place):
                leading.add(self._letters(place)[0])
        for array in link.arrays:
            chosen = max(array, key=lambda place: self._preference(place, rows, leading))
            if not self._elements(chosen):
                continue
            size = self._rows_of(link, chosen, rows)
            if size:
                kept[chosen] = size
            else:
                left_out.append(chosen)
        letters = {self._letters(place)[0] for place in kept}
        passes = len(kept) == len(link.arrays) and len(letters) == 1 and min(letters).islower()
        if not passes:
            self._exchange(link.op_class, tuple(kept) if len(kept) > 1 else ())
        first = min(kept, default=source.origin)
        if source.origin is not None and kept:
            self.across.append((source.origin, min(kept)))
        for place, size in kept.items():
            for element in self._elements(place):
                self._reach(self.sets.root(element), _Reached(rows=size))
        for place in left_out:
            for element in self._elements(place):
                self._reach(self.sets.root(element), _Reached(rows=rows, origin=first))
        # What is cut off a batch, and what is joined to one.
        name = self.cuts.first[link.op_class].name
        if name == "reshape" and kept and source.origin is None:
            self.small.update(
                (link.op_class, self.sizes[self._elements(place)[0]]) for place in left_out
            )
        results = [place for place in kept if place.is_result]
        if name in ("slice", "split") and kept:
            self.cuts_off += [(min(kept), place) for place in left_out if place.is_result]
        if name in ("concatenate", "pad") and results:
            self.joined[link.op_class] = results[0]

    def _exchange(self, op_class: int, places: tuple[Place, ...], *, rolls: bool = False) -> None:
        """Let dims of an operator take part in an exchange, beside those that do."""
        known = self.exchanges.get(op_class, _NONE)
        names = frozenset().union(*self.cuts.rules[op_class].exchanged)
        self.exchanges[op_class] = Exchange(
            places=tuple(dict.fromkeys((*known.places, *places))),
            untied=frozenset(name for name in names if name.islower()),
            rolls=known.rolls or rolls,
        )

    def _holds_batch(self, place: Place) -> bool:
        """True if it is known that a dim holds rows of the batch."""
        elements = self._elements(place)
        known = self.reached.get(self.sets.root(elements[0])) if elements else None
        return known is not None and known.origin is None

    def _preference(
        self, place: Place, rows: int, leading: Set[str]
    ) -> tuple[bool, bool, bool, int, bool, int]:
        """Order of the dims of an array as holders of the batch: of equal ones, the first.

        A dim of rows alone is preferred to one that they share with others, although it may have
        fewer of them, as groups of several sequences have beside the tokens of each; of two with
        many rows, that which needs no exchange.

        Args:
            leading: major factors of the dims that hold the batch.
        """
        elements = self._elements(place)
        if not elements:
            return False, False, False, 0, False, 0
        root, size = self.sets.root(elements[0]), self.sizes[elements[0]]
        part = math.gcd(size, rows)
        return (
            self._holds_batch(place),
            root not in self.sequential,
            part == size and part >= _LEAST_PART * rows,
            min(part, _MANY_ROWS),
            self._letters(place)[0] in leading,
            part,
        )

    def _rows_of(self, link: _Link, place: Place, rows: int) -> int:
        """Rows of the batch that a dim holds; 0 if it stays whole."""
        element = self._elements(place)[0]
        size, root = self.sizes[element], self.sets.root(element)
        known = self.reached.get(root)
        if known is not None:
            return known.rows if known.origin is None else 0
        if size % rows == 0:
            return rows
        part = math.gcd(size, rows)
        regroups = self.cuts.first[link.op_class].name == "reshape"
        is_part = regroups or (part == size and size >= _LEAST_PART * rows)
        is_large = self.class_bytes[root] > _SMALL * self.total_bytes
        return part if part > 1 and is_part and is_large else 0

    def _places(self, op_class: int) -> Iterator[tuple[Place, str]]:
        """The dims of an operator's arrays, with their factors."""
        rule, op = self.cuts.rules[op_class], self.cuts.first[op_class]
        if op.phase is Phase.UPDATE:
            return
        for is_result, side in ((False, rule.operands), (True, rule.results)):
            for position, dims in enumerate(side):
                for dim, letters in enumerate(dims):
                    place = Place(
                        op_class=op_class, is_result=is_result, position=position, dim=dim
                    )
                    yield place, letters

    def _letters(self, place: Place) -> str:
        rule = self.cuts.rules[place.op_class]
        return (rule.results if place.is_result else rule.operands)[place.position][place.dim]

    def _elements(self, place: Place) -> list[int]:
        """The dim in the value classes that stand at a place; none for literals and for arrays
        made of constants or of parameters alone.
        """
        cuts = self.cuts
        if place.is_result:
            out = cuts.first[place.op_class].outputs[place.position]
            classes = [int(cuts.folding.value_class[out])] if out >= 0 else []
        else:
            classes = list(cuts.sources[place.op_class][place.position])
        found = []
        for v in classes:
            if not cuts.const_only[v] and not cuts.param_only[v]:
                found.append(self.base[v] + place.dim)
        return found
