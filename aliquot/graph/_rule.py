"""Declarations of primitives: one for each, and the table of all.

A rule names the *factors* of an operator: index spaces that its operands and results share. They
alone determine its strategies (which factor an axis may split), how a split propagates, and what
must be communicated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import msgspec

from ._traits import NO_TRAITS, Traits


class HasShape(Protocol):
    """An operand as a rule sees it: shape and dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


Dims: TypeAlias = tuple[str, ...]
"""The factors of each dim of an array, major first: `("a", "bc")` is a dim `a` and a dim merged of
`b` (major) and `c`.
"""


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """The scores that an operator of fused attention computes, and never writes to memory.

    Attributes:
        rows: queries, of all examples and heads; infinite if unknown, but many.
        keys: scores of one query that its mask keeps, on average; infinite if unknown, but many.
        is_backward: whether it computes gradients.
    """

    rows: float = math.inf
    keys: float = math.inf
    is_backward: bool = False


class Ring(msgspec.Struct, frozen=True, kw_only=True):
    """A factor that may be split although each element of it meets all others: devices that share
    it send some operands round, and compute with one piece after the other.

    Attributes:
        factor: the sequence of queries, and of keys and values.
        travels: operands that go round: keys and values.
        returns: results that are sums over all devices, and go round with what they belong to: the
            gradients of keys and values.
        balanced: whether devices exchange halves of their pieces before and after, since a causal
            mask leaves more scores to later ones.
    """

    factor: str
    travels: tuple[int, ...]
    returns: tuple[int, ...] = ()
    balanced: bool = False


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """A factor that is split along with the rows that belong to it, over the same devices: rows
    travel to the device that holds their part of it, and back.

    Attributes:
        factor: the experts that rows have chosen.
        beside: the factor of the dim of rows with which it is split.
        sends: operands whose rows travel, each with the number of times that a row does, on
            average.
        returns: likewise results.
    """

    factor: str
    beside: str
    sends: Mapping[int, float]
    returns: Mapping[int, float]


class Inside(msgspec.Struct, frozen=True, kw_only=True):
    """Arrays that an operator makes and reads itself.

    Attributes:
        num_bytes: their bytes, of the whole operator.
        passes: how often they are read or written.
        divided_by: the factors whose splits divide them.
    """

    num_bytes: float
    passes: float
    divided_by: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DimRule:
    """Relation of the dims of an operator's operands to those of its results.

    Attributes:
        operands, results: for each array the factors of its dims. A lower-case letter may be split.
            An upper-case letter must stay whole: an operand split there is gathered first, and a
            result is never computed split there. "1" is a dim of size one. A lower-case factor of
            an operand that no result has is reduced, and leaves a partial result. One that only
            results have is free (a broadcast).
        sizes: size of each factor.
        linear: for each operand, 0 if the result is not linear in it; else a number shared by those
            operands in which it is *jointly* linear. `add` is (1, 1), `mul` is (1, 2), `div` is (1,
            0), `exp` is ().
        reduce: "sum", or another reduction ("max", "min", "prod", "and", "or"). Only sums may stay
            partial over devices; partial results of the others are combined at once.
        contracts: whether the operator does work over its whole factor space and chooses its own
            split (products, convolutions, gathers, scatters); other operators follow the arrays
            around them.
        flops_per_point: floating-point operations for each point of the factor space.
        accessed_bytes: bytes that the whole operator reads and writes, if these are more than its
            operands and results: a kernel may read the same block many times.
        scores: of fused attention; None for all other operators.
        summed: positions of results that are sums over factors that they lack and other results
            have. They are summed over devices at once.
        partial: positions of results that are sums over factors that they lack and other results
            have. Unlike those of `summed`, they may stay partial.
        ring: the factor, if there is one, that costs a ring to split; see `Ring`.
        exchange: the factor, if there is one, for whose split rows travel; see `Exchange`.
        inside: arrays that it keeps to itself.
        exchanged: sets of factors along which an operator only puts elements elsewhere. A dim of an
            operand and a dim of a result that both hold factors of one set may be split together
            although neither passes on the other's split: devices then exchange what they hold.
        reduced: the factors that the operator sums (or otherwise reduces) away.
        factors: those that may be split, in order of first appearance.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    linear: tuple[int, ...] = ()
    reduce: str = "sum"
    contracts: bool = False
    flops_per_point: float = 0.0
    accessed_bytes: float = 0.0
    scores: Scores | None = None
    summed: frozenset[int] = frozenset()
    partial: frozenset[int] = frozenset()
    ring: Ring | None = None
    exchange: Exchange | None = None
    inside: tuple[Inside, ...] = ()
    exchanged: tuple[frozenset[str], ...] = ()
    reduced: frozenset[str] = field(init=False, repr=False, compare=False)
    factors: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # All letters of all dims, in order.
        read = "".join(itertools.chain(*self.operands))
        made = "".join(itertools.chain(*self.results))
        factors = [c for c in dict.fromkeys(read + made) if c.islower()]
        object.__setattr__(self, "factors", tuple(factors))
        kept = set(made)
        if self.exchange is not None:
            # The results of all parts of it go back to their rows.
            kept.add(self.exchange.factor)
        reduced = frozenset(c for c in read if c.islower() and c not in kept)
        object.__setattr__(self, "reduced", reduced)

    def sums(self, result: int) -> frozenset[str]:
        """The factors over which a result is a sum that may stay partial over devices."""
        if result not in self.partial:
            return self.reduced
        kept = set("".join(self.results[result]))
        if self.exchange is not None and self.exchange.beside in kept:
            kept.add(self.exchange.factor)
        return frozenset(self.factors) - kept

    @property
    def text(self) -> str:
        """Its short form, with "." for each dim that stays whole: `"a.,b->ab"`."""

        def side(arrays: Sequence[Dims]) -> str:
            texts = []
            for dims in arrays:
                text = ""
                for names in dims:
                    shown = names if len(names) == 1 else f"({names})"
                    text += shown if any(map(str.islower, names)) else "."
                texts.append(text)
            return ",".join(texts)

        return f"{side(self.operands)}->{side(self.results)}"

    @property
    def flops(self) -> float:
        """Floating-point operations of the whole operator."""
        # Factors of size 0 are skipped: an operand without elements stands for one not given.
        return self.flops_per_point * math.prod(size for size in self.sizes.values() if size)


def rule(
    text: str,
    operands: Sequence[HasShape],
    results: Sequence[tuple[int, ...]],
    *,
    linear: tuple[int, ...] = (),
    reduce: str = "sum",
    contracts: bool = False,
    flops_per_point: float = 0.0,
    sizes: Mapping[str, int] | None = None,
) -> DimRule:
    """A `DimRule` from letters, as in einsum: `"ab,bc->ac"`. Merged dims are in parentheses:
    `"abc->(ab)c"`.

    Sizes are read from the shapes of operands and results; factors that occur only in merged dims
    need `sizes`.

    >>> from types import SimpleNamespace as A
    >>> rule("ab,bc->ac", [A(shape=(2, 3)), A(shape=(3, 5))], [(2, 5)]).reduced
    frozenset({'b'})
    """
    left, right = text.replace(" ", "").split("->")
    operand_dims = tuple(map(_parse, left.split(","))) if operands else ()
    result_dims = tuple(map(_parse, right.split(",")))
    known = dict(sizes or {})
    shapes = [*(o.shape for o in operands), *results]
    for dims, shape in zip((*operand_dims, *result_dims), shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) == 1 and dim != "1":
                known.setdefault(dim, size)
    known.pop("1", None)
    return DimRule(
        operands=operand_dims,
        results=result_dims,
        sizes=known,
        linear=linear,
        reduce=reduce,
        contracts=contracts,
        flops_per_point=flops_per_point,
    )


def _parse(part: str) -> Dims:
    dims, k = [], 0
    while k < len(part):
        if part[k] == "(":
            end = part.index(")", k)
            dims.append(part[k + 1 : end])
            k = end + 1
        else:
            dims.append(part[k])
            k += 1
    return tuple(dims)


# A rule function gets the operands (shape and dtype), the shapes of the results, and the
# primitive's parameters. It must be pure, look at nothing else, and return the same rule for the
# same arguments.
DimRuleFn: TypeAlias = Callable[
    [Sequence[HasShape], Sequence[tuple[int, ...]], Mapping[str, Any]], DimRule
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Everything that is declared about one primitive.

    Attributes:
        rule: how its operators may be split.
        traits: properties of all of its operators.
        replaceable: whether a later declaration may replace this one.
    """

    rule: DimRuleFn
    traits: Traits
    replaceable: bool


_declarations: dict[str, Declaration] = {}


def register_dim_rule(
    *primitives: Any, traits: Traits = NO_TRAITS, replaceable: bool = False
) -> Callable[[DimRuleFn], DimRuleFn]:
    """Declare how primitives may be split, and their traits. Each is a JAX primitive or its name.

    The function is called as `fn(operands, result_shapes, params)` and returns a `DimRule` (see
    `rule` for the short form).

    Args:
        traits: see `Traits`.
        replaceable: whether a later rule may replace this one, as for kernels of which only the
            author knows more.

    Raises:
        ValueError: a primitive has a rule already.
    """

    def register(fn: DimRuleFn) -> DimRuleFn:
        for primitive in primitives:
            name = primitive if isinstance(primitive, str) else primitive.name
            if name in _declarations and not _declarations[name].replaceable:
                raise ValueError(
                    f"The primitive `{name}` has a dimension rule already; one declaration is"
                    " enough."
                )
            _declarations[name] = Declaration(rule=fn, traits=traits, replaceable=replaceable)
        return fn

    return register


def registered_primitives() -> frozenset[str]:
    """Names of all primitives with a rule."""
    return frozenset(_declarations)


def declared_rule(primitive: str) -> DimRuleFn | None:
    """The rule function of a primitive by its name; None if none is declared."""
    declaration = _declarations.get(primitive)
    return declaration.rule if declaration else None


def traits_of(primitive: str) -> Traits:
    """The traits of a primitive by its name; `NO_TRAITS` if none are declared."""
    declaration = _declarations.get(primitive)
    return declaration.traits if declaration else NO_TRAITS


def whole(operands: Sequence[HasShape], results: Sequence[tuple[int, ...]]) -> DimRule:
    """The rule of an opaque operator: every dim stays whole."""
    letters = iter(_WHOLE)
    sizes: dict[str, int] = {}

    def dims(shape: Sequence[int]) -> Dims:
        out = []
        for size in shape:
            letter = next(letters)
            sizes[letter] = size
            out.append(letter)
        return tuple(out)

    return DimRule(
        operands=tuple(dims(o.shape) for o in operands),
        results=tuple(map(dims, results)),
        sizes=sizes,
    )


# Upper-case characters beyond the alphabet, for opaque operators with many operands.
_WHOLE = (
    list(map(chr, range(ord("A"), ord("Z") + 1)))
    + list(filter(str.isupper, map(chr, range(0x391, 0x3AA))))
    + list(map(chr, range(0x410, 0x430)))
    + list(map(chr, range(0x10400, 0x10428)))
    + list(map(chr, range(0x104B0, 0x104D4)))
    + list(map(chr, range(0x1E900, 0x1E922)))
)
