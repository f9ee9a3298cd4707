"""Items of a step that run before, for each, and after all micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...graph import Call, Literal, Operand, OpId, Phase, ValueId, any_effects, traits_of, value_ids
from .._dim_rule import dim_rule
from ..micro_batches import Action, Conversion, MicroBatchPlan, TimeKind, phase_of


@dataclass(slots=True)
class Needs:
    """Items and values of the three graphs, collected in reverse from the step's outputs."""

    plan: MicroBatchPlan
    early: set[ValueId] = field(default_factory=set)
    crossing: set[ValueId] = field(default_factory=set)
    late_items: list[OpId | Call] = field(default_factory=list)
    body_items: list[OpId | Call] = field(default_factory=list)
    early_items: list[OpId | Call] = field(default_factory=list)
    _given: set[ValueId] = field(default_factory=set)
    _again: dict[ValueId, bool] = field(default_factory=dict)

    def find(self) -> None:
        whole = self.plan.whole
        self._given = {*whole.input_values, *whole.constants}
        items = whole.body.items
        self._mark_again(items)
        self._find_late(items)
        self._find_body(items)
        # Values that are computed early are not taken from the parts as well.
        self.crossing -= self.early
        self._find_early()

    def _inputs(self, item: OpId | Call) -> tuple[Operand, ...]:
        return item.inputs if isinstance(item, Call) else self.plan.whole.ops[item].inputs

    def _outputs(self, item: OpId | Call) -> tuple[ValueId, ...]:
        outputs = item.outputs if isinstance(item, Call) else self.plan.whole.ops[item].outputs
        return tuple(value_ids(outputs))

    def _is(self, item: OpId | Call, action: Action) -> bool:
        if isinstance(item, Call):
            calls = self.plan.early_calls if action is Action.EARLY else self.plan.late_calls
            return item in calls
        return self.plan.actions.get(item) is action

    def _mark_again(self, items: Sequence[OpId | Call]) -> None:
        """Mark the values that can be computed again from the step's inputs alone, since they do
        not depend on the batch.
        """
        batch = set()
        for i in self.plan.whole.inputs:
            if self.plan.specs[i.value].kind is TimeKind.CONCATENATE:
                batch.add(i.value)
        # Values of parameters and state alone can be computed again after the last part; none need
        # be kept from each part.
        known = {v: v not in batch for v in self._given}
        for item in items:
            again = not self._is(item, Action.EARLY) and not self._is(item, Action.LATE)
            if again and isinstance(item, Call):
                again = all(isinstance(i, Literal) or known[i] for i in item.inputs)
            elif again and isinstance(item, int):
                again = all(
                    isinstance(i, Literal) or known[i] or self._converted_early(item, k)
                    for k, i in enumerate(self.plan.whole.ops[item].inputs)
                )
            for out in self._outputs(item):
                known[out] = again
        self._again = known

    def _converted_early(self, op: OpId, position: int) -> bool:
        return self.plan.conversions.get((op, position)) is Conversion.EARLY

    def _find_late(self, items: Sequence[OpId | Call]) -> None:
        """Collect the items that run after the last part, and the values that they need from
        before.
        """
        needed = self.plan.whole.returned - self._given
        for item in reversed(items):
            outputs = [v for v in self._outputs(item) if v in needed]
            # An effect, such as a print, is wanted although nobody reads its result.
            if not outputs and not any_effects(item, self.plan.whole):
                continue
            if self._is(item, Action.EARLY):
                self.early.update(outputs)
            elif self._is(item, Action.LATE) or self._again[outputs[0]] or self._updates_once(item):
                self.late_items.append(item)
                for k, operand in enumerate(self._inputs(item)):
                    if isinstance(operand, Literal):
                        continue
                    if isinstance(item, int) and self._converted_early(item, k):
                        self.early.add(operand)
                    elif operand not in self._given:
                        needed.add(operand)
            else:
                self.crossing.update(outputs)
        self.late_items.reverse()
        # Values that exist only for the whole batch cannot come from a part.
        self.early |= {v for v in self.crossing if self.plan.specs[v].kind is TimeKind.WHOLE}
        self.crossing -= self.early

    def _updates_once(self, item: OpId | Call) -> bool:
        """True for items of the update whose operands and results are equal in all parts, or late:
        they run after the last part, as all of the update does.
        """
        phase = (
            phase_of(item, self.plan.whole)
            if isinstance(item, Call)
            else self.plan.whole.ops[item].phase
        )
        kinds = set()
        for v in (*self._inputs(item), *self._outputs(item)):
            if isinstance(v, int):
                kinds.add(self.plan.specs[v].kind)
        return phase is Phase.UPDATE and kinds <= {TimeKind.EQUAL, TimeKind.LATE}

    def _find_body(self, items: Sequence[OpId | Call]) -> None:
        """Collect the items that run on each part, and the early values that they read."""
        needed = set(self.crossing)
        for item in reversed(items):
            outputs = [v for v in self._outputs(item) if v in needed]
            if not outputs:
                continue
            if self._is(item, Action.EARLY) or self._is_worth_once(item, outputs):
                self.early.update(outputs)
                continue
            self.body_items.append(item)
            for k, operand in enumerate(self._inputs(item)):
                if isinstance(operand, Literal) or operand in self._given:
                    continue
                if isinstance(item, int) and self._converted_early(item, k):
                    self.early.add(operand)
                else:
                    needed.add(operand)
            if isinstance(item, Call):
                self._look_inside(item)
        self.body_items.reverse()

    def _look_inside(self, call: Call) -> None:
        """Early values that a body reads."""
        for block in call.blocks:
            for item in block.items:
                if self._is(item, Action.EARLY):
                    self.early.update(self._outputs(item))
                elif isinstance(item, Call):
                    self._look_inside(item)
                else:
                    for k, operand in enumerate(self._inputs(item)):
                        if isinstance(operand, int) and self._converted_early(item, k):
                            self.early.add(operand)

    def _is_worth_once(self, item: OpId | Call, outputs: Sequence[ValueId]) -> bool:
        """True for products and loops that do not depend on the batch: they run once, not for each
        part.
        """
        if not self._again[outputs[0]] or any(
            self.plan.specs[v].kind is not TimeKind.EQUAL for v in outputs
        ):
            return False
        if isinstance(item, Call):
            return True
        # Elementwise operators are cheap enough to run again, and keeping their results would take
        # memory.
        op = self.plan.whole.ops[item]
        return traits_of(op.name).multiplies and dim_rule(op, self.plan.whole).contracts

    def _find_early(self) -> None:
        """Find the operators that run early. Remat regions are looked into, so that only the
        operators that are needed run.
        """
        flat: list[OpId | Call] = []
        # A region's results and the values that they have inside it go by different numbers; both
        # are followed.
        alias: dict[ValueId, ValueId] = {}

        def flatten(items: Iterable[OpId | Call]) -> None:
            for item in items:
                if isinstance(item, Call) and item.kind == "remat":
                    flatten(item.blocks[0].items)
                    for out, inner in zip(item.outputs, item.blocks[0].outputs, strict=True):
                        if out >= 0 and isinstance(inner, int) and out != inner:
                            alias[out] = inner
                else:
                    flat.append(item)

        flatten(self.plan.whole.body.items)
        needed = set(self.early)
        for item in reversed(flat):
            needed |= {alias[v] for v in needed & alias.keys()}
            if any(v in needed for v in self._outputs(item)):
                self.early_items.append(item)
                needed.update(value_ids(self._inputs(item)))
        self.early_items.reverse()
