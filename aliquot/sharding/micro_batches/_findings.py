"""Findings about a step on micro-batches: the time specs of its values, and what its operators are
to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...graph import Call, DimRule, Graph, Literal, Op, Operand, OpId, Phase
from .._dim_rule import dim_rule
from . import _micro_calls as calls
from ._micro_calls import first_op, ops_of
from ._time_specs import EQUAL, Action, Conversion, Followed, Shape, TimeKind, TimeSpec, follow

TOP, REMAT, LOOP = 0, 1, 2
"""Depth at which an operator stands: in the step itself, in remat regions, or in a loop."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """Findings about a step on micro-batches while it is walked through; see `MicroBatchPlan` for
    the fields that end up there.

    Attributes:
        own: operators that are applied to each micro-batch separately.
        violations: operators that do not decompose, with the reason.
        conflicts: operators left for after the last part although the backward pass needs them on
            every part.
        free: for each value, whether it depends on no parameter.
        outside: for each value, whether it stands outside of loops.
        origin: for each late or whole value the operator with which that began.
        positions: for index arrays, whether they hold each example's own position: for each
            component of the last dim, or one answer for all.
        always_false: values that are false everywhere.
        has_backward: whether any operator belongs to a backward pass.
    """

    whole: Graph
    part: Graph
    parts: int
    on_missing_rule: str
    own: set[int] = field(default_factory=set)
    specs: list[TimeSpec | None] = field(init=False)
    actions: dict[int, Action] = field(default_factory=dict)
    conversions: dict[tuple[int, int], Conversion] = field(default_factory=dict)
    early_calls: set[Call] = field(default_factory=set)
    late_calls: set[Call] = field(default_factory=set)
    violations: dict[int, str] = field(default_factory=dict)
    conflicts: dict[int, str] = field(default_factory=dict)
    free: bytearray = field(init=False)
    outside: bytearray = field(init=False)
    origin: dict[int, int] = field(default_factory=dict)
    positions: dict[int, tuple[bool, ...]] = field(default_factory=dict)
    always_false: set[int] = field(default_factory=set)
    has_backward: bool = field(init=False)
    _rules: dict[tuple[int, int], DimRule] = field(default_factory=dict)
    _outcomes: dict[tuple[object, ...], Followed | str] = field(default_factory=dict)
    _feeds_backward: bytearray = field(init=False)

    def __post_init__(self) -> None:
        size = len(self.whole.values)
        self.specs = [None] * size
        self.free, self.outside = bytearray(size), bytearray(size)
        self._feeds_backward = bytearray(size)
        self.has_backward = any(op.phase is Phase.BACKWARD for op in self.whole.ops)
        # From the last operator to the first, so that whatever the backward pass reads in the end
        # is known.
        for op in reversed(self.whole.ops):
            if op.phase is Phase.BACKWARD or any(
                self._feeds_backward[o] for o in op.outputs if o >= 0
            ):
                for i in op.inputs:
                    if type(i) is not Literal:
                        self._feeds_backward[i] = 1

    def undo(self, item: OpId | Call) -> None:
        """Forget what was found out about an operator, which is walked through again."""
        if isinstance(item, Call):
            self.early_calls.discard(item)
            self.late_calls.discard(item)
            self.violations.pop(first_op(item, self.whole).index, None)
            for block in item.blocks:
                for inner in block.items:
                    self.undo(inner)
            results = item.outputs
        else:
            self.actions.pop(item, None)
            self.violations.pop(item, None)
            results = self.whole.ops[item].outputs
        for out in results:
            if out >= 0:
                self.specs[out] = None
                self.origin.pop(out, None)
                self.positions.pop(out, None)
                self.always_false.discard(out)

    def spec(self, operand: Operand) -> TimeSpec:
        """The spec of an operand."""
        if isinstance(operand, Literal):
            return EQUAL
        known = self.specs[operand]
        assert known is not None, f"value {operand} is read before it is made"
        return known

    def set_spec(self, index: int, spec: TimeSpec, free: bool, depth: int) -> None:
        self.specs[index] = spec
        self.free[index] = free
        self.outside[index] = depth != LOOP

    def shapes_of(self, index: int) -> tuple[Shape, Shape]:
        return self.whole.values[index].shape, self.part.values[index].shape

    def _result_shapes(self, op: Op) -> list[tuple[Shape, Shape]]:
        other = self.part.ops[op.index].eqn.outvars
        return [
            (tuple(a.aval.shape), tuple(b.aval.shape))
            for a, b in zip(op.eqn.outvars, other, strict=True)
        ]

    def same_results(self, op: Op) -> bool:
        """True if all results are as large on a part as on the whole batch."""
        whole, part = self.whole.values, self.part.values
        return all(out >= 0 and whole[out].shape == part[out].shape for out in op.outputs)

    def is_free(self, operands: Sequence[Operand]) -> bool:
        return all(isinstance(i, Literal) or self.free[i] == 1 for i in operands)

    def _rule(self, op: Op) -> DimRule:
        # Equal layers share JAX's equations, so their rule is looked up once.
        key = self._equations(op)
        if key not in self._rules:
            self._rules[key] = dim_rule(op, self.whole, on_missing_rule=self.on_missing_rule)
        return self._rules[key]

    def _equations(self, op: Op) -> tuple[int, int]:
        """The operator's equations, which layers that were traced once have in common; the graphs
        keep them alive.
        """
        return (
            (id(op.eqn), id(self.part.ops[op.index].eqn)) if op.eqn is not None else (op.index, -1)
        )

    def _outcome(self, op: Op, specs: Sequence[TimeSpec]) -> Followed | str:
        """`follow`, once for equal operators that read equal specs."""
        # Positions decide whether a lookup is local, so they are part of the key.
        positions = calls.indexes_own_examples(op, specs, self.positions)
        key = self._equations(op), tuple(specs), positions
        if key not in self._outcomes:
            shapes = self._result_shapes(op)
            self._outcomes[key] = follow(op, self._rule(op), specs, shapes, self.parts, positions)
        return self._outcomes[key]

    def follow(self, op: Op, specs: list[TimeSpec], depth: int) -> Followed | str:
        """`follow`; if that fails, once more with the whole batch's sums where no parameter takes
        part in them.
        """
        outcome = self._outcome(op, specs)
        if isinstance(outcome, Followed):
            return outcome
        rule, shapes = self._rule(op), self._result_shapes(op)
        early = [
            (k, i)
            for k, (i, spec) in enumerate(zip(op.inputs, specs, strict=True))
            if isinstance(i, int)
            and self.free[i]
            and self.outside[i]
            # What each part computes alike or has a slice of is no sum that could be known
            # beforehand.
            and spec.kind not in (TimeKind.EQUAL, TimeKind.CONCATENATE, TimeKind.MEAN)
        ]
        # All sums known beforehand, or only those that stand where the operator is not linear.
        linear = rule.linear or (0,) * len(specs)
        # The fewest first: each sum known beforehand must be computed on the whole batch.
        for chosen in ([(k, i) for k, i in early if linear[k] != 1], early):
            if not chosen:
                continue
            places = {k for k, _ in chosen}
            tried = [EQUAL if k in places else spec for k, spec in enumerate(specs)]
            again = follow(op, rule, tried, shapes, self.parts)
            if isinstance(again, Followed):
                added = tuple((k, Conversion.EARLY) for k in sorted(places))
                kept = tuple((k, how) for k, how in again.conversions if k not in places)
                if len(kept) == len(again.conversions):
                    return Followed(
                        results=again.results, conversions=added + kept, action=again.action
                    )
        return outcome

    def needs_parts(self, op: Op, specs: Sequence[TimeSpec]) -> bool:
        """True if an operator works example by example, before the update: too much to leave it for
        the end.
        """
        # After the backward pass no example is needed, so that waiting for the last part costs
        # nothing.
        if op.phase is Phase.UPDATE or all(spec.kind is not TimeKind.CONCATENATE for spec in specs):
            return False
        feeds = any(self._feeds_backward[o] for o in op.outputs if o >= 0)
        return (
            # Products are most of a step's work, and would run on the whole batch at once after the
            # last part.
            feeds or op.phase is Phase.BACKWARD or not self.has_backward or self._rule(op).contracts
        )

    def call_needs_parts(self, call: Call, specs: Sequence[TimeSpec], phase: Phase) -> bool:
        """The same for a structured operator."""
        if phase is Phase.UPDATE or all(spec.kind is not TimeKind.CONCATENATE for spec in specs):
            return False
        feeds = any(self._feeds_backward[o] for o in call.outputs if o >= 0)
        early = feeds or phase is Phase.BACKWARD or not self.has_backward
        return early or any(self._rule(self.whole.ops[k]).contracts for k in ops_of(call))

    def blame(self, op: Op, specs: Sequence[TimeSpec], kind: TimeKind, reason: str) -> None:
        for operand, spec in zip(op.inputs, specs, strict=True):
            if spec.kind is kind and isinstance(operand, int):
                self.conflicts.setdefault(self.origin.get(operand, op.index), reason)

    def forget(self, call: Call) -> None:
        """Undo what the walk through a body decided, as the call now runs as it is."""
        for item in ops_of(call):
            self.actions.pop(item, None)
            for k in range(len(self.whole.ops[item].inputs)):
                self.conversions.pop((item, k), None)

    def violate(self, call: Call, reason: str) -> None:
        self.violations.setdefault(first_op(call, self.whole).index, reason)
