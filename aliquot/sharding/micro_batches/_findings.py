"""Findings about a step on micro-batches: time specs of values, and how operators run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...graph import Call, DimRule, Graph, Literal, Op, Operand, Phase, ops_inside
from .._dim_rule import dim_rule
from . import _micro_calls as calls
from ._blocks import finer_chunks, move_blocks
from ._micro_calls import first_op
from ._time_specs import (
    EQUAL,
    Action,
    Conversion,
    Followed,
    Shape,
    TimeKind,
    TimeSpec,
    follow,
    spec_by_shape,
)

TOP, REMAT, LOOP = 0, 1, 2
"""Depth at which an operator stands: in the step itself, in remat regions, or in a loop."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """Findings about a step on micro-batches, filled while the step is walked through.

    Attributes:
        whole, part, specs, actions, conversions, early_calls, late_calls: see `MicroBatchPlan`.
        parts: number of parts of a batch.
        chunks: see `spec_by_shape`.
        violations: operators that do not decompose, with the reason.
        conflicts: operators that run after the last part although the backward pass of each part
            needs their results, with the reason.
        free: 1 for each value that depends on no parameter.
        outside_loops: 1 for each value outside of loops.
        origin: for each late or whole value, the first operator that had to run late or early.
        positions: index arrays, with a flag for each component of the last dim (or one for all):
            True if it holds each example's own position in the batch.
        always_false: values that are false everywhere.
        finer: for each refused reshape, how many times as many chunks it needs.
        has_backward: True if any operator belongs to a backward pass.
    """

    whole: Graph
    part: Graph
    parts: int
    chunks: int = 1
    on_missing_rule: str
    specs: list[TimeSpec | None] = field(init=False)
    actions: dict[int, Action] = field(default_factory=dict)
    conversions: dict[tuple[int, int], Conversion] = field(default_factory=dict)
    early_calls: set[Call] = field(default_factory=set)
    late_calls: set[Call] = field(default_factory=set)
    violations: dict[int, str] = field(default_factory=dict)
    conflicts: dict[int, str] = field(default_factory=dict)
    free: bytearray = field(init=False)
    outside_loops: bytearray = field(init=False)
    origin: dict[int, int] = field(default_factory=dict)
    positions: dict[int, tuple[bool, ...]] = field(default_factory=dict)
    always_false: set[int] = field(default_factory=set)
    finer: dict[int, int] = field(default_factory=dict)
    has_backward: bool = field(init=False)
    _rules: dict[tuple[int, int], DimRule] = field(default_factory=dict)
    _outcomes: dict[tuple[object, ...], Followed | str] = field(default_factory=dict)
    _feeds_backward: bytearray = field(init=False)

    def __post_init__(self) -> None:
        size = len(self.whole.values)
        self.specs = [None] * size
        self.free, self.outside_loops = bytearray(size), bytearray(size)
        self._feeds_backward = bytearray(size)
        self.has_backward = any(op.phase is Phase.BACKWARD for op in self.whole.ops)
        # In reverse, so that all readers of a value come before it.
        for op in reversed(self.whole.ops):
            if op.phase is Phase.BACKWARD or any(
                self._feeds_backward[o] for o in op.outputs if o >= 0
            ):
                for i in op.inputs:
                    if type(i) is not Literal:
                        self._feeds_backward[i] = 1

    def spec(self, operand: Operand) -> TimeSpec:
        """The spec of an operand."""
        if isinstance(operand, Literal):
            return EQUAL
        known = self.specs[operand]
        assert known is not None, f"value {operand} is read before it is made"
        return known

    def set_spec(self, index: int, spec: TimeSpec, free: bool, depth: int) -> None:
        """Note the time spec of a value, whether it is free of parameters, and whether it lies
        outside loops.
        """
        self.specs[index] = spec
        self.free[index] = free
        self.outside_loops[index] = depth != LOOP

    def shapes_of(self, index: int) -> tuple[Shape, Shape]:
        """Shape of a value on the whole batch and on a part."""
        return self.whole.values[index].shape, self.part.values[index].shape

    def spec_by_shape(self, index: int) -> TimeSpec | None:
        """The spec that a value's shapes allow; see `spec_by_shape`."""
        return spec_by_shape(*self.shapes_of(index), self.parts, self.chunks)

    def _result_shapes(self, op: Op) -> list[tuple[Shape, Shape]]:
        other = self.part.ops[op.index].eqn.outvars
        found = []
        for a, b in zip(op.eqn.outvars, other, strict=True):
            found.append((tuple(a.aval.shape), tuple(b.aval.shape)))
        return found

    def same_results(self, op: Op) -> bool:
        """True if all results are as large on a part as on the whole batch."""
        whole, part = self.whole.values, self.part.values
        return all(out >= 0 and whole[out].shape == part[out].shape for out in op.outputs)

    def is_free(self, operands: Sequence[Operand]) -> bool:
        """True if no operand depends on a parameter."""
        return all(isinstance(i, Literal) or self.free[i] == 1 for i in operands)

    def _rule(self, op: Op) -> DimRule:
        # Equal layers share JAX's equations, so their rule is looked up once.
        key = self._equations(op)
        if key not in self._rules:
            self._rules[key] = dim_rule(op, self.whole, on_missing_rule=self.on_missing_rule)
        return self._rules[key]

    def _equations(self, op: Op) -> tuple[int, int]:
        """Key of the operator's equations, which layers that were traced once share."""
        # The graphs keep the equations alive, so that their ids are not reused.
        return (
            (id(op.eqn), id(self.part.ops[op.index].eqn)) if op.eqn is not None else (op.index, -1)
        )

    def _outcome(self, op: Op, specs: Sequence[TimeSpec]) -> Followed | str:
        """`follow`, memoized by equations and specs."""
        # Positions decide whether a lookup is local, so they are part of the key.
        positions = calls.indexes_own_examples(op, specs, self.positions)
        key = self._equations(op), tuple(specs), positions
        if key not in self._outcomes:
            shapes = self._result_shapes(op)
            # Blocks are moved whatever the rule says, which speaks of one split alone.
            own = self.part.ops[op.index].params
            self._outcomes[key] = move_blocks(op, own, specs, shapes, self.parts) or follow(
                op, self._rule(op), specs, shapes, self.parts, positions, self.chunks
            )
        return self._outcomes[key]

    def follow(self, op: Op, specs: list[TimeSpec], depth: int) -> Followed | str:
        """`follow`; if that fails, again with sums that depend on no parameter computed beforehand,
        on the whole batch.
        """
        outcome = self._outcome(op, specs)
        if isinstance(outcome, Followed):
            return outcome
        rule, shapes = self._rule(op), self._result_shapes(op)
        early = [
            k
            for k, (i, spec) in enumerate(zip(op.inputs, specs, strict=True))
            if isinstance(i, int)
            and self.free[i]
            and self.outside_loops[i]
            # Only sums and the like: values that all parts share, or have slices of, need no whole
            # batch.
            and spec.kind not in (TimeKind.EQUAL, TimeKind.CONCATENATE)
        ]
        linear = rule.linear or (0,) * len(specs)
        # First only those operands in which the operator is not linear: each one costs a
        # computation on the whole batch.
        for places in ({k for k in early if linear[k] != 1}, set(early)):
            if not places:
                continue
            tried = [EQUAL if k in places else spec for k, spec in enumerate(specs)]
            again = follow(op, rule, tried, shapes, self.parts, chunks=self.chunks)
            if isinstance(again, Followed):
                added = tuple((k, Conversion.EARLY) for k in sorted(places))
                kept = tuple((k, how) for k, how in again.conversions if k not in places)
                if len(kept) == len(again.conversions):
                    return Followed(
                        results=again.results, conversions=added + kept, action=again.action
                    )
        return outcome

    def needs_parts(self, op: Op, specs: Sequence[TimeSpec]) -> bool:
        """True if an operator on examples must run on each part: the backward pass needs its
        results, or it is too much work to run on the whole batch after the last part.
        """
        # After the backward pass no part waits for results.
        if op.phase is Phase.UPDATE or all(spec.kind is not TimeKind.CONCATENATE for spec in specs):
            return False
        feeds = any(self._feeds_backward[o] for o in op.outputs if o >= 0)
        return (
            # Products are most of a step's work.
            feeds or op.phase is Phase.BACKWARD or not self.has_backward or self._rule(op).contracts
        )

    def call_needs_parts(self, call: Call, specs: Sequence[TimeSpec], phase: Phase) -> bool:
        """As `needs_parts`, for a structured operator."""
        if phase is Phase.UPDATE or all(spec.kind is not TimeKind.CONCATENATE for spec in specs):
            return False
        feeds = any(self._feeds_backward[o] for o in call.outputs if o >= 0)
        early = feeds or phase is Phase.BACKWARD or not self.has_backward
        return early or any(self._rule(self.whole.ops[k]).contracts for k in ops_inside(call))

    def note_conflict(self, op: Op, specs: Sequence[TimeSpec], kind: TimeKind, reason: str) -> None:
        """Note the operators from which an operator's late (or whole) operands come."""
        for operand, spec in zip(op.inputs, specs, strict=True):
            if spec.kind is kind and isinstance(operand, int):
                self.conflicts.setdefault(self.origin.get(operand, op.index), reason)

    def note_refused(self, op: Op, specs: Sequence[TimeSpec], reason: str) -> None:
        """Note an operator that does not decompose, and what it would need."""
        self.violations[op.index] = reason
        if op.name == "reshape":
            (shapes,) = self._result_shapes(op)
            whole = tuple(op.eqn.invars[0].aval.shape)
            self.finer[op.index] = finer_chunks(specs[0], whole, shapes, self.parts)

    def drop_decisions(self, call: Call) -> None:
        """Drop what was decided for the operators inside a call that runs once, as it is."""
        for item in ops_inside(call):
            self.actions.pop(item, None)
            for k in range(len(self.whole.ops[item].inputs)):
                self.conversions.pop((item, k), None)

    def note_violation(self, call: Call, reason: str) -> None:
        """Note that a call does not decompose."""
        self.violations.setdefault(first_op(call, self.whole).index, reason)
