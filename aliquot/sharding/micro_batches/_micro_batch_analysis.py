"""The walk of `_micro_batches` through a step: every operator in order, loop bodies until nothing changes any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...graph import (
    Block,
    Call,
    DimRule,
    Graph,
    Literal,
    Op,
    Operand,
    Phase,
    Role,
    any_effects,
    has_effects,
    is_check,
    scan_counts,
)
from .._dim_rule import dim_rule
from . import _micro_calls as calls
from ._micro_calls import EFFECT, first_op, ops_of, phase_of, standing_for
from ._time_specs import (
    EQUAL,
    LATE,
    MEAN,
    WHOLE,
    Action,
    Conversion,
    Followed,
    Shape,
    TimeKind,
    TimeSpec,
    follow,
    join,
    spec_by_shape,
    split_at,
)

_TOP, _REMAT, _LOOP = 0, 1, 2


@dataclass(slots=True, kw_only=True)
class MicroBatchAnalysis:
    """State of the analysis of a step on micro-batches; see `MicroBatchPlan` for the fields that end up there.

    Attributes:
        own: operators that are applied to each micro-batch separately.
        violations: operators that do not decompose, with the reason.
        conflicts: operators left for after the last part although the backward pass needs them on every part.
        free: for each value, whether it depends on no parameter.
        outside: for each value, whether it stands outside of loops.
        origin: for each late or whole value the operator with which that began.
        positions: for index arrays, whether they hold each example's own position: for each component of the last dim,
            or one answer for all.
        always_false: values that are false everywhere.
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
    _rules: dict[tuple[int, int], DimRule] = field(default_factory=dict)
    _outcomes: dict[tuple[object, ...], Followed | str] = field(default_factory=dict)
    _feeds_backward: bytearray = field(init=False)
    _has_backward: bool = field(init=False)

    def __post_init__(self) -> None:
        size = len(self.whole.values)
        self.specs = [None] * size
        self.free, self.outside = bytearray(size), bytearray(size)
        self._feeds_backward = bytearray(size)
        self._has_backward = any(op.phase is Phase.BACKWARD for op in self.whole.ops)
        for op in reversed(self.whole.ops):
            if op.phase is Phase.BACKWARD or any(self._feeds_backward[o] for o in op.outputs if o >= 0):
                for i in op.inputs:
                    if type(i) is int:
                        self._feeds_backward[i] = 1

    def run(self, *, settle: bool) -> None:
        """Analyse the whole step.

        Args:
            settle: Where operators conflict, apply each to every micro-batch separately and go on; else note all conflicts.
        """
        for item in self.whole.inputs:
            spec = split_at(0) if item.role is Role.BATCH else EQUAL
            self._set(item.value, spec, item.role not in (Role.PARAMETER, Role.OPTIMIZER_STATE), _TOP)
        for index, constant in self.whole.constants.items():
            spec = spec_by_shape(*self._shapes_of(index), self.parts) or WHOLE
            self._set(index, spec, True, _TOP)
            if spec.kind is TimeKind.CONCATENATE and calls.numbers_examples(constant, spec.dim):
                self.positions[index] = (True,)
        if settle:
            self._settle()
        else:
            self._items(self.whole.body.items, _TOP)

    def _settle(self) -> None:
        """MicroBatchAnalysis until a conflict, back to where it began, and on from there; what comes before stays as it is."""
        items = self.whole.body.items
        place = {k: n for n, item in enumerate(items) for k in standing_for(item, self.whole)}
        at = 0
        while at < len(items):
            self._items(items[at : at + 1], _TOP)
            at += 1
            if self.conflicts:
                first = min(place[k] for k in self.conflicts)
                self.own |= self.conflicts.keys()
                self.conflicts.clear()
                for item in items[first:at]:
                    self._undo(item)
                at = first

    def _undo(self, item: int | Call) -> None:
        """Forget what was found out about an operator, which is walked through again."""
        if isinstance(item, Call):
            self.early_calls.discard(item)
            self.late_calls.discard(item)
            self.violations.pop(first_op(item, self.whole).index, None)
            for block in item.blocks:
                for inner in block.items:
                    self._undo(inner)
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

    # ---- small questions ---------------------------------------------------------------------------------------------

    def spec(self, operand: Operand) -> TimeSpec:
        """The spec of an operand."""
        if isinstance(operand, Literal):
            return EQUAL
        known = self.specs[operand]
        assert known is not None, f"value {operand} is read before it is made"
        return known

    def _set(self, index: int, spec: TimeSpec, free: bool, depth: int) -> None:
        self.specs[index] = spec
        self.free[index] = free
        self.outside[index] = depth != _LOOP

    def _shapes_of(self, index: int) -> tuple[Shape, Shape]:
        return self.whole.values[index].shape, self.part.values[index].shape

    def _result_shapes(self, op: Op) -> list[tuple[Shape, Shape]]:
        other = self.part.ops[op.index].eqn.outvars
        return [(tuple(a.aval.shape), tuple(b.aval.shape)) for a, b in zip(op.eqn.outvars, other, strict=True)]

    def _same_results(self, op: Op) -> bool:
        """True if all results are as large on a part as on the whole batch."""
        whole, part = self.whole.values, self.part.values
        return all(out >= 0 and whole[out].shape == part[out].shape for out in op.outputs)

    def _is_free(self, operands: Sequence[Operand]) -> bool:
        return all(isinstance(i, Literal) or self.free[i] == 1 for i in operands)

    def _rule(self, op: Op) -> DimRule:
        key = self._equations(op)
        if key not in self._rules:
            self._rules[key] = dim_rule(op, self.whole, on_missing_rule=self.on_missing_rule)
        return self._rules[key]

    def _equations(self, op: Op) -> tuple[int, int]:
        """The operator's equations, which layers that were traced once have in common; the graphs keep them alive."""
        return (id(op.eqn), id(self.part.ops[op.index].eqn)) if op.eqn is not None else (op.index, -1)

    def _outcome(self, op: Op, specs: Sequence[TimeSpec]) -> Followed | str:
        """`follow`, once for equal operators that read equal specs."""
        positions = calls.indexes_own_examples(op, specs, self.positions)
        key = self._equations(op), tuple(specs), positions
        if key not in self._outcomes:
            shapes = self._result_shapes(op)
            self._outcomes[key] = follow(op, self._rule(op), specs, shapes, self.parts, positions)
        return self._outcomes[key]

    # ---- operators ---------------------------------------------------------------------------------------------------

    def _items(self, items: Iterable[int | Call], depth: int) -> None:
        for item in items:
            if isinstance(item, Call):
                self._call(item, depth)
            else:
                self._op(self.whole.ops[item], depth)

    def _op(self, op: Op, depth: int) -> None:
        specs = [self.spec(i) for i in op.inputs]
        for k in range(len(specs)):
            self.conversions.pop((op.index, k), None)
        if op.index in self.own:
            return self._alone(op, specs, depth)
        if has_effects(op):
            # Once for the whole batch, as in the plain step; in a loop that runs for each part it cannot.
            if depth != _TOP:
                self.violations[op.index] = EFFECT
            return self._late(op, specs)
        kinds = {spec.kind for spec in specs}
        if kinds <= {TimeKind.EQUAL} and self._same_results(op):
            # What every part computes alike needs no rule.
            self.actions.pop(op.index, None)
            free = self._is_free(op.inputs)
            for out in op.outputs:
                self._set(out, EQUAL, free, depth)
            return
        update = op.phase is Phase.UPDATE and self._has_backward
        if TimeKind.LATE in kinds or (update and depth == _TOP and kinds - {TimeKind.EQUAL}):
            return self._late(op, specs)
        reason = "it needs an array of which more than one dim is the batch's"
        if TimeKind.WHOLE not in kinds:
            outcome = self._follow(op, specs, depth)
            if isinstance(outcome, Followed):
                return self._finish(op, outcome, depth)
            reason = outcome
        free = self._is_free(op.inputs)
        if free and depth != _LOOP and all(isinstance(i, Literal) or self.outside[i] for i in op.inputs):
            self._early(op)
        elif depth == _TOP and not self._needs_parts(op, specs):
            self._late(op, specs)
        elif TimeKind.WHOLE in kinds:
            self._blame(op, specs, TimeKind.WHOLE, reason)
            self._alone(op, [EQUAL if s.kind is TimeKind.WHOLE else s for s in specs], depth)
        else:
            self.violations[op.index] = reason
            self._alone(op, specs, depth)

    def _follow(self, op: Op, specs: list[TimeSpec], depth: int) -> Followed | str:
        """`follow`; if that fails, once more with the whole batch's sums where no parameter takes part in them."""
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
            and spec.kind not in (TimeKind.EQUAL, TimeKind.CONCATENATE, TimeKind.MEAN)
        ]
        # All sums known beforehand, or only those that stand where the operator is not linear.
        linear = rule.linear or (0,) * len(specs)
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
                    return Followed(results=again.results, conversions=added + kept, action=again.action)
        return outcome

    def _finish(self, op: Op, outcome: Followed, depth: int) -> None:
        if outcome.action is Action.RUN:
            self.actions.pop(op.index, None)
        else:
            self.actions[op.index] = outcome.action
        for position, how in outcome.conversions:
            self.conversions[op.index, position] = how
        free = self._is_free(op.inputs)
        for out, spec in zip(op.outputs, outcome.results, strict=True):
            if out >= 0:
                self._set(out, spec, free, depth)
        self._note_positions(op, outcome)

    def _early(self, op: Op) -> None:
        self.actions[op.index] = Action.EARLY
        for out in op.outputs:
            if out >= 0:
                self._set(out, spec_by_shape(*self._shapes_of(out), self.parts) or WHOLE, True, _TOP)
                self.origin[out] = op.index

    def _late(self, op: Op, specs: list[TimeSpec]) -> None:
        if self._needs_parts(op, specs):
            self._blame(op, specs, TimeKind.LATE, "it is not linear in a sum over the batch, and the examples need it")
        self.actions[op.index] = Action.LATE
        begun = [self.origin[i] for i in op.inputs if isinstance(i, int) and self.specs[i] == LATE]
        for out in op.outputs:
            if out >= 0:
                self._set(out, LATE, False, _TOP)
                self.origin[out] = min(begun, default=op.index)

    def _needs_parts(self, op: Op, specs: Sequence[TimeSpec]) -> bool:
        """True if an operator works example by example, before the update: too much to leave it for the end."""
        if op.phase is Phase.UPDATE or all(spec.kind is not TimeKind.CONCATENATE for spec in specs):
            return False
        feeds = any(self._feeds_backward[o] for o in op.outputs if o >= 0)
        return feeds or op.phase is Phase.BACKWARD or not self._has_backward or self._rule(op).contracts

    def _call_needs_parts(self, call: Call, specs: Sequence[TimeSpec], phase: Phase) -> bool:
        """The same for a structured operator."""
        if phase is Phase.UPDATE or all(spec.kind is not TimeKind.CONCATENATE for spec in specs):
            return False
        feeds = any(self._feeds_backward[o] for o in call.outputs if o >= 0)
        early = feeds or phase is Phase.BACKWARD or not self._has_backward
        return early or any(self._rule(self.whole.ops[k]).contracts for k in ops_of(call))

    def _blame(self, op: Op, specs: Sequence[TimeSpec], kind: TimeKind, reason: str) -> None:
        for operand, spec in zip(op.inputs, specs, strict=True):
            if spec.kind is kind and isinstance(operand, int):
                self.conflicts.setdefault(self.origin.get(operand, op.index), reason)

    def _alone(self, op: Op, specs: Sequence[TimeSpec], depth: int) -> None:
        """Run on a part as if it were the whole batch."""
        self.actions.pop(op.index, None)
        for k, spec in enumerate(specs):
            if spec.kind is TimeKind.SUM:
                self.conversions[op.index, k] = Conversion.ESTIMATE
        for out in op.outputs:
            if out >= 0:
                seen = spec_by_shape(*self._shapes_of(out), self.parts) or MEAN
                self._set(out, MEAN if seen == EQUAL else seen, False, depth)

    # ---- positions in the batch --------------------------------------------------------------------------------------

    def _note_positions(self, op: Op, outcome: Followed) -> None:
        out = op.outputs[0]
        if out < 0 or outcome.results[0].kind is not TimeKind.CONCATENATE:
            return
        known = [self.positions.get(i) if isinstance(i, int) else None for i in op.inputs]
        if outcome.action is Action.SHIFT:
            self.positions[out] = (True,)
        elif calls.keeps_positions(op) and known[0] == (True,):
            self.positions[out] = (True,)
        elif op.name == "lt" and known[0] == (True,) and isinstance(op.inputs[1], Literal):
            if np.all(np.asarray(op.inputs[1].value) <= 0):
                self.always_false.add(out)
        elif op.name == "select_n" and op.inputs[0] in self.always_false and known[1] is not None:
            self.positions[out] = known[1]
        elif op.name == "concatenate" and op.params["dimension"] == len(self.whole.values[out].shape) - 1:
            flags: list[bool] = []
            for i, flags_of_operand in zip(op.inputs, known, strict=True):
                width = i.shape[-1] if isinstance(i, Literal) else self.whole.values[i].shape[-1]
                flags += [flags_of_operand == (True,)] * width
            if len(flags) > 1:
                self.positions[out] = tuple(flags)

    # ---- structured operators ----------------------------------------------------------------------------------------

    def _call(self, call: Call, depth: int) -> None:
        specs = [self.spec(i) for i in call.inputs]
        kinds = {spec.kind for spec in specs}
        phase = phase_of(call, self.whole)
        update = phase is Phase.UPDATE and self._has_backward
        effects = any_effects(call, self.whole) and self.own.isdisjoint(ops_of(call))
        late = effects or TimeKind.LATE in kinds or (update and kinds - {TimeKind.EQUAL})
        if depth == _TOP and late:
            return self._late_call(call, specs, phase)
        free = self._is_free(call.inputs)
        before, conflicts = dict(self.violations), dict(self.conflicts)
        walk = {"remat": self._remat, "scan": self._scan, "while": self._while, "cond": self._cond}[call.kind]
        if TimeKind.WHOLE not in kinds:
            walk(call, specs, depth)
            refused = len(self.violations) > len(before) or len(self.conflicts) > len(conflicts)
            if refused and not free and depth == _TOP and not self._call_needs_parts(call, specs, phase):
                self.violations, self.conflicts = before, conflicts
                self._forget(call)
                return self._late_call(call, specs, phase)
            if len(self.violations) == len(before) or not free or depth == _LOOP:
                for out in call.outputs:
                    if out >= 0 and not free:
                        self.free[out] = 0
                return
        self.violations = before
        self.early_calls.add(call)
        self._forget(call)
        for out in call.outputs:
            if out >= 0:
                self._set(out, spec_by_shape(*self._shapes_of(out), self.parts) or WHOLE, True, _TOP)
                self.origin[out] = first_op(call, self.whole).index

    def _late_call(self, call: Call, specs: Sequence[TimeSpec], phase: Phase) -> None:
        first = first_op(call, self.whole)
        if phase is not Phase.UPDATE and any(spec.kind is TimeKind.CONCATENATE for spec in specs):
            for operand in call.inputs:
                if isinstance(operand, int) and self.specs[operand] == LATE:
                    reason = "it is not linear in a sum over the batch, and the examples need it"
                    self.conflicts.setdefault(self.origin[operand], reason)
        self.late_calls.add(call)
        for out in call.outputs:
            if out >= 0:
                self._set(out, LATE, False, _TOP)
                self.origin[out] = first.index

    def _forget(self, call: Call) -> None:
        """Undo what the walk through a body decided, as the call now runs as it is."""
        for item in ops_of(call):
            self.actions.pop(item, None)
            for k in range(len(self.whole.ops[item].inputs)):
                self.conversions.pop((item, k), None)

    def _remat(self, call: Call, specs: Sequence[TimeSpec], depth: int) -> None:
        (block,) = call.blocks
        self._items(block.items, max(depth, _REMAT))
        for out, inner in zip(call.outputs, block.outputs, strict=True):
            if out >= 0 and out != inner:
                self._set(out, self.spec(inner), self._is_free((inner,)), depth)

    def _scan(self, call: Call, specs: Sequence[TimeSpec], depth: int) -> None:
        (block,) = call.blocks
        num_consts, num_carry = scan_counts(call.eqn.params)
        split = num_consts + num_carry
        free = self._is_free(call.inputs)
        for outer, inner in zip(specs[split:], block.inputs[split:], strict=True):
            assert isinstance(inner, int)
            spec = split_at(outer.dim - 1) if outer.kind is TimeKind.CONCATENATE else outer
            if outer == split_at(0):
                self._violate(call, "it loops over the examples of a batch")
            self._set(inner, spec, free, _LOOP)
        self._fixpoint(call, block, block.inputs[num_consts:split], specs[num_consts:split], block.outputs[:num_carry])
        for position, (out, inner) in enumerate(zip(call.outputs, block.outputs, strict=True)):
            if position < num_carry:
                carried = block.inputs[num_consts + position]
                self._set(out, self.spec(carried), free, depth)
            else:
                spec = self.spec(inner)
                self._set(out, split_at(spec.dim + 1) if spec.kind is TimeKind.CONCATENATE else spec, free, depth)

    def _while(self, call: Call, specs: Sequence[TimeSpec], depth: int) -> None:
        condition, block = call.blocks
        num_cond, num_body = call.eqn.params["cond_nconsts"], call.eqn.params["body_nconsts"]
        carried = block.inputs[num_body:]
        self._fixpoint(call, block, carried, specs[num_cond + num_body :], block.outputs)
        self._items(condition.items, _LOOP)
        ends = self.spec(condition.outputs[0])
        # Under `vmap` each example has an end of its own, and keeps what it has until the others are done.
        alone = ends.kind is TimeKind.CONCATENATE and all(self.spec(c) == ends for c in carried)
        if ends.kind is not TimeKind.EQUAL and not alone:
            self._violate(call, "it ends when the batch says so")
        free = self._is_free(call.inputs)
        for out, inner in zip(call.outputs, carried, strict=True):
            self._set(out, self.spec(inner), free, depth)

    def _cond(self, call: Call, specs: Sequence[TimeSpec], depth: int) -> None:
        # A check finds what any part finds, so each part may check itself.
        checks = specs[0].kind in (TimeKind.OR, TimeKind.MAX) and is_check(call.eqn)
        if specs[0].kind is not TimeKind.EQUAL and not checks:
            self._violate(call, "it branches on a value of the batch")
        for block in call.blocks:
            self._items(block.items, _LOOP)
        free = self._is_free(call.inputs)
        for position, out in enumerate(call.outputs):
            joined, *others = (self.spec(block.outputs[position]) for block in call.blocks)
            for other in others:
                joined = self._join(call, joined, other)
            self._set(out, joined, free, depth)

    def _fixpoint(
        self, call: Call, block: Block, carried: Sequence[Operand], init: Sequence[TimeSpec], results: Sequence[Operand]
    ) -> None:
        """MicroBatchAnalysis through a body until what enters it is what leaves it."""
        free = self._is_free(call.inputs)
        specs = list(init)
        for _ in range(2 * len(specs) + 2):
            for inner, spec in zip(carried, specs, strict=True):
                assert isinstance(inner, int)
                self._set(inner, spec, free, _LOOP)
            before = dict(self.violations)
            self._items(block.items, _LOOP)
            joined = [self._join(call, spec, self.spec(out)) for spec, out in zip(specs, results, strict=True)]
            if joined == specs:
                return
            specs, self.violations = joined, before

    def _join(self, call: Call, a: TimeSpec, b: TimeSpec) -> TimeSpec:
        joined = join(a, b)
        if joined is None:
            self._violate(call, "it mixes arrays that micro-batches compute in different ways")
        return joined or a

    def _violate(self, call: Call, reason: str) -> None:
        self.violations.setdefault(first_op(call, self.whole).index, reason)
