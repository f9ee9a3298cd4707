"""How the results of micro-batches that are steps of their own make up a result of the step.

Each value of the step is compared with the same value of a micro-batch, through all operators from
the inputs on: which of its dims has one row for each example, and how it grows with the number of
examples. A sum over examples grows with their number (degree 1); a mean does not (degree 0), as the
literal that it is divided by grows as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...graph import Call, DimRule, Graph, Literal, Op, Operand, OpId, Role, scan_counts, traits_of
from .._dim_rule import dim_rule
from .._spec import differing_dims
from ._micro_calls import indexed_dims
from ._time_specs import REDUCTIONS, TimeKind, TimeSpec, through_reduction

_RUNNING = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})
# Deeper nests of loops than people write.
_MOST_TURNS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A value of a micro-batch, beside that of the whole batch.

    Attributes:
        kind: `EQUAL` if it is the same; a reduction over examples, such as `OR`; else `MEAN`: the
            micro-batch's own.
        rows: the dim with a row for each example, in the order of the examples; -1 if there is
            none, or the order is not known.
        degree: the power of the number of examples with which it grows; None if unknown.
        zero: True for zero, which has every degree.
        positions: True for whole numbers of the batch that may say where in it an example is.
    """

    kind: TimeKind = TimeKind.MEAN
    rows: int = -1
    degree: int | None = 0
    zero: bool = False
    positions: bool = False


SAME = Own(kind=TimeKind.EQUAL)


class OwnResults:
    """The `Own` of each value, filled by `walk`.

    Attributes:
        looked_up: operators that look up examples by numbers that the batch holds.
    """

    def __init__(
        self,
        whole: Graph,
        part: Graph,
        parts: int,
        part_eqns: Mapping[Call, Any],
        *,
        handed_on: Iterable[int] = (),
        on_missing_rule: str = "infer",
    ) -> None:
        self._whole, self._part, self._parts = whole, part, parts
        self._part_eqns = part_eqns
        self._on_missing_rule = on_missing_rule
        self._own: list[Own | None] = [None] * len(whole.values)
        self._rules: dict[int, DimRule] = {}
        self.looked_up: list[Op] = []
        carried = set(handed_on)
        for item in whole.inputs:
            value = whole.values[item.value]
            numbers = bool(value.shape) and value.dtype.startswith(("int", "uint"))
            rows = self.rows_by_shape(item.value)
            if item.role is Role.BATCH:
                self._own[item.value] = Own(rows=0, positions=numbers)
            elif rows is not None:
                # State that is cut with the batch.
                self._own[item.value] = Own(rows=rows)
            elif item.value in carried:
                self._own[item.value] = Own()
            else:
                # Such as the edges of graphs, which may be more than there are nodes.
                self._own[item.value] = replace(SAME, positions=numbers and item.role is Role.OTHER)
        for index, constant in whole.constants.items():
            rows = self.rows_by_shape(index)
            self._own[index] = (
                Own(rows=rows)
                if rows is not None
                else self._scaled(constant, part.constants[index])
            )
        self.walk(whole.body.items)

    def of(self, operand: Operand) -> Own:
        """What is known of an operand; literals are compared by `_literal`."""
        known = SAME if isinstance(operand, Literal) else self._own[operand]
        assert known is not None
        return known

    def known(self, value: int) -> Own | None:
        """What is known of a value; None where nothing is."""
        return self._own[value]

    def differs(self, value: int) -> bool:
        """True if a value has another shape on a micro-batch."""
        return self._whole.values[value].shape != self._part.values[value].shape

    def rows_by_shape(self, value: int) -> int | None:
        """The only dim that is as many times as long for the whole batch as there are parts."""
        return _rows(self._whole.values[value].shape, self._part.values[value].shape, self._parts)

    def walk(self, items: Iterable[OpId | Call]) -> None:
        for item in items:
            if isinstance(item, Call):
                self._call(item)
            else:
                self._op(self._whole.ops[item])

    def _operands(self, op: Op) -> list[Own]:
        small = self._part.ops[op.index]
        found = []
        for i, j in zip(op.inputs, small.inputs, strict=True):
            found.append(
                self._scaled(i.value, j.value)
                if isinstance(i, Literal) and isinstance(j, Literal)
                else self.of(i)
            )
        return found

    def _scaled(self, whole: Any, part: Any) -> Own:
        """What a literal or constant tells by its values for the whole batch and for a part."""
        if whole is part or (np.ndim(whole) == np.ndim(part) == 0 and whole == part):
            return replace(SAME, zero=bool(np.ndim(whole) == 0 and whole == 0))
        whole, part = np.asarray(whole), np.asarray(part)
        with np.errstate(all="ignore"):
            if whole.shape == part.shape and whole.tobytes() == part.tobytes():
                return replace(SAME, zero=whole.dtype.kind in "iufc" and not whole.any())
            if whole.shape == part.shape and whole.dtype.kind in "iufc":
                for power in (1, -1, 2, -2):
                    if np.allclose(whole, part * float(self._parts) ** power, rtol=1e-6, atol=0):
                        return Own(degree=power)
        return Own(degree=None)

    def _op(self, op: Op) -> None:
        small = self._part.ops[op.index]
        given = self._operands(op)
        shapes = []
        for a, b in zip(op.eqn.outvars, small.eqn.outvars, strict=True):
            shapes.append((tuple(a.aval.shape), tuple(b.aval.shape)))
        alike = all(a == b for a, b in shapes)
        if alike and all(own.kind is TimeKind.EQUAL for own in given):
            moved = given[0] if given and traits_of(op.name).moves is not None else SAME
            made = [replace(moved, rows=-1)] * len(shapes)
        else:
            rule = self._rule(op)
            self._note_lookup(op, given)
            made = [self._result(op, rule, given, k, *both) for k, both in enumerate(shapes)]
        for out, own in zip(op.outputs, made, strict=True):
            if out >= 0:
                self._own[out] = own

    def _rule(self, op: Op) -> DimRule:
        # Equal layers share JAX's equations, which the graph keeps alive.
        known = self._rules.get(id(op.eqn))
        if known is None:
            known = dim_rule(op, self._whole, on_missing_rule=self._on_missing_rule)
            self._rules[id(op.eqn)] = known
        return known

    def _note_lookup(self, op: Op, given: Sequence[Own]) -> None:
        """Note a lookup of rows of the batch by numbers that come with the batch."""
        if op.name != "gather" and not op.name.startswith("scatter"):
            return
        if given[1].positions and any(d in self._differing(op.inputs[0]) for d in indexed_dims(op)):
            self.looked_up.append(op)

    def _differing(self, operand: Operand) -> list[int]:
        if isinstance(operand, Literal):
            return []
        whole, part = self._whole.values[operand].shape, self._part.values[operand].shape
        return differing_dims(whole, part)

    def _result(
        self,
        op: Op,
        rule: DimRule,
        given: Sequence[Own],
        position: int,
        whole: tuple[int, ...],
        part: tuple[int, ...],
    ) -> Own:
        dtype = str(op.eqn.outvars[position].aval.dtype)
        rows = _rows(whole, part, self._parts)
        zero = self._is_zero(op, rule, given)
        if op.name in ("optimization_barrier", "device_put"):
            return given[position]
        return Own(
            kind=self._kind(op, rule, given),
            rows=-1 if rows is None else self._ordered(op, rule, given, position, rows),
            # Truth values do not grow, whatever they are made of.
            degree=0 if dtype == "bool" else self._degree(op, rule, given, position, rows),
            zero=zero,
            positions=dtype.startswith(("int", "uint"))
            and op.name != "argsort"
            and (
                given[position].positions if op.name == "sort" else any(g.positions for g in given)
            ),
        )

    def _ordered(
        self, op: Op, rule: DimRule, given: Sequence[Own], position: int, rows: int
    ) -> int:
        """The dim of a result that is longer for the whole batch, if it has the examples' order."""
        letter = rule.results[position][rows][:1]
        if op.name in _RUNNING:
            return rows if given[0].rows == rows else -1
        if not letter.islower():
            # Made anew, at the size of the part.
            return rows if not any(map(self._differing, op.inputs)) else -1
        for k, own in enumerate(given):
            for d in self._differing(op.inputs[k]):
                if letter in rule.operands[k][d] and (
                    d != own.rows or rule.operands[k][d][0] != letter
                ):
                    return -1
        return rows

    def _kind(self, op: Op, rule: DimRule, given: Sequence[Own]) -> TimeKind:
        specs = [TimeSpec(kind=own.kind) for own in given]
        kinds = {own.kind for own in given}
        if kinds & REDUCTIONS:
            through = None if TimeKind.MEAN in kinds else through_reduction(op, specs)
            return through or TimeKind.MEAN
        if op.name.startswith("reduce_") and rule.reduce != "sum":
            dims = self._differing(op.inputs[0])
            if any(rule.operands[0][d][0] in rule.reduced for d in dims):
                return TimeKind(rule.reduce)
        return TimeKind.MEAN

    def _is_zero(self, op: Op, rule: DimRule, given: Sequence[Own]) -> bool:
        if not rule.linear:
            return False
        groups = _groups(rule.linear)
        for places in groups:
            if all(given[k].zero for k in places):
                return True
        return False

    def _degree(
        self, op: Op, rule: DimRule, given: Sequence[Own], position: int, rows: int | None
    ) -> int | None:
        """The degree of a result: sums add one, factors add up, terms must agree."""
        degrees = [own.degree for own in given]
        if op.name == "div":
            a, b = degrees
            return None if a is None or b is None else a - b
        if op.name in ("integer_pow", "square"):
            power = 2 if op.name == "square" else op.params["y"]
            return None if degrees[0] is None else degrees[0] * int(power)
        if op.name == "pad" and not self._differing(op.inputs[0]) and rows is not None:
            # Few rows among as many as there are examples.
            return None
        if traits_of(op.name).moves is not None or op.name in ("sort", "rev", "concatenate"):
            return _agreed(given)
        total = 0
        for k, own in enumerate(given):
            if rule.linear and rule.linear[k] != 0:
                continue
            # Numbers of rows have no degree.
            lookup = k > 0 and op.name.startswith(("gather", "scatter", "dynamic"))
            if own.degree != 0 and not own.zero and not lookup:
                return None
        for places in _groups(rule.linear):
            agreed = _agreed([given[k] for k in places])
            if agreed is None:
                return None
            total += agreed
        return self._with_sums(op, rule, position, total)

    def _with_sums(self, op: Op, rule: DimRule, position: int, degree: int) -> int | None:
        """The degree after dims of examples are summed away; None unless each example adds a term
        of its own.
        """
        if op.name in _RUNNING and op.params["axis"] in self._differing(op.inputs[0]):
            return None
        differing = list(map(self._differing, op.inputs))
        if op.name.startswith(("scatter", "dynamic_update")):
            # Updates for each example, or of some rows alone.
            updates = differing[2 if op.name.startswith("scatter") else 1]
            if differing[0]:
                return degree if updates else None
        if op.name in ("gather", "dynamic_slice"):
            return degree
        kept = set[str]()
        for dim in rule.results[position]:
            kept.update(dim)
        counted: set[str] = set()
        for k, dims in enumerate(differing):
            for d in dims:
                letter = rule.operands[k][d][0]
                if rule.ring is not None and letter == rule.ring.factor:
                    return None
                if letter in kept or letter in counted:
                    continue
                sums = letter in rule.sums(position) or position in rule.summed
                # Of all pairs of examples perhaps only some count, such as each with itself.
                if not letter.islower() or not sums or len(dims) > 1 or not self._scales(op, k):
                    return None
                counted.add(letter)
                degree += rule.reduce == "sum"
        return degree

    def _scales(self, op: Op, position: int) -> bool:
        """True if an operand is as many times as long for the whole batch as there are parts."""
        operand = op.inputs[position]
        return not isinstance(operand, Literal) and self.rows_by_shape(operand) is not None

    def _call(self, call: Call) -> None:
        given = list(map(self.of, call.inputs))
        match call.kind:
            case "remat":
                (block,) = call.blocks
                self.walk(block.items)
                made = list(map(self.of, block.outputs))
            case "scan":
                made = self._scan(call, given)
            case "while":
                made = self._while(call, given)
            case _:
                made = self._cond(call, given)
        for out, own in zip(call.outputs, made, strict=True):
            if out >= 0:
                self._own[out] = own

    def _scan(self, call: Call, given: list[Own]) -> list[Own]:
        (block,) = call.blocks
        consts, count = scan_counts(call.eqn.params)
        split = consts + count
        # A loop over examples, or over pieces of the batch, runs more often for the whole batch.
        rows_of_loop = [own for own in given[split:] if own.rows == 0]
        turns = self._turns(call)
        for own, inner in zip(given[split:], block.inputs[split:], strict=True):
            assert isinstance(inner, int)
            self._own[inner] = replace(own, rows=own.rows - 1 if own.rows > 0 else -1)
        carried = self._settled(block, block.inputs[consts:split], given[consts:split], count)
        if turns != 1:
            carried = [
                self._accumulated(block, k, own, turns, consts) for k, own in enumerate(carried)
            ]
        stacked = []
        for out in block.outputs[count:]:
            own = self.of(out)
            rows = own.rows + 1 if own.rows >= 0 else 0 if rows_of_loop and turns != 1 else -1
            stacked.append(replace(own, rows=rows, kind=own.kind if turns == 1 else TimeKind.MEAN))
        return [*carried, *stacked]

    def _turns(self, call: Call) -> float:
        """How many times as often a loop turns for the whole batch."""
        length, small = call.eqn.params["length"], self._part_eqns[call].params["length"]
        return 1 if small == length else length / max(small, 1)

    def _accumulated(self, block: Any, position: int, own: Own, turns: float, consts: int) -> Own:
        """A carry of a loop that turns more often for the whole batch."""
        before, after = block.inputs[consts + position], block.outputs[position]
        if before == after:
            return own
        casts, adds = {before}, False
        for op in (self._whole.ops[k] for k in block.items if not isinstance(k, Call)):
            if op.name == "convert_element_type" and op.inputs[0] in casts:
                casts.add(op.outputs[0])
            adds |= (
                after in op.outputs
                and traits_of(op.name).adds
                and any(i in casts for i in op.inputs if not isinstance(i, Literal))
            )
        grows = adds and turns == self._parts and own.degree is not None
        return Own(degree=own.degree + 1 if grows and own.degree is not None else None)

    def _while(self, call: Call, given: list[Own]) -> list[Own]:
        condition, block = call.blocks
        first = call.eqn.params["cond_nconsts"]
        second = call.eqn.params["body_nconsts"]
        carried = self._settled(
            block, block.inputs[second:], given[first + second :], len(block.outputs)
        )
        self.walk(condition.items)
        own = self.of(condition.outputs[0])
        if own.kind is TimeKind.EQUAL:
            return carried
        return [replace(c, kind=TimeKind.MEAN) for c in carried]

    def _settled(
        self, block: Any, inputs: Sequence[Operand], given: Sequence[Own], count: int
    ) -> list[Own]:
        """The carries of a loop: what holds before and after each turn."""
        carried = list(given)
        for _ in range(_MOST_TURNS):
            for inner, own in zip(inputs, carried, strict=True):
                assert isinstance(inner, int)
                self._own[inner] = own
            self.walk(block.items)
            after = []
            for a, b in zip(carried, block.outputs[:count], strict=True):
                after.append(_joined(a, self.of(b)))
            if after == carried:
                return carried
            carried = after
        # Nothing is said of carries that go on changing.
        unknown = [Own(degree=None)] * len(carried)
        for inner, own in zip(inputs, unknown, strict=True):
            assert isinstance(inner, int)
            self._own[inner] = own
        self.walk(block.items)
        return unknown

    def _cond(self, call: Call, given: Sequence[Own]) -> list[Own]:
        for block in call.blocks:
            self.walk(block.items)
        made = []
        for position in range(len(call.outputs)):
            first, *others = (self.of(block.outputs[position]) for block in call.blocks)
            for other in others:
                first = _joined(first, other)
            made.append(
                first if given[0].kind is TimeKind.EQUAL else replace(first, kind=TimeKind.MEAN)
            )
        return made


def _rows(whole: Sequence[int], part: Sequence[int], parts: int) -> int | None:
    if len(whole) != len(part):
        return None
    differing = differing_dims(whole, part)
    if len(differing) == 1 and whole[differing[0]] == parts * part[differing[0]]:
        return differing[0]
    return None


def _groups(linear: Sequence[int]) -> list[list[int]]:
    """Positions of the operands of each group in which an operator is linear."""
    found = []
    for group in sorted(set(linear) - {0}):
        found.append([k for k, g in enumerate(linear) if g == group])
    return found


def _agreed(given: Sequence[Own]) -> int | None:
    """The degree of a sum of terms."""
    degrees = {own.degree for own in given if not own.zero}
    if not degrees:
        return 0
    return degrees.pop() if len(degrees) == 1 else None


def _joined(a: Own, b: Own) -> Own:
    return Own(
        kind=a.kind if a.kind is b.kind else TimeKind.MEAN,
        rows=a.rows if a.rows == b.rows else -1,
        degree=_agreed([a, b]),
        zero=a.zero and b.zero,
        positions=a.positions or b.positions,
    )
