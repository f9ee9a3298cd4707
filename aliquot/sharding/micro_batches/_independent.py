"""Micro-batches that are steps of their own, as by gradient accumulation.

The step is traced at the size of a micro-batch. Its forward and backward pass run as one whole for
each micro-batch, and what they leave is combined: gradients and metrics are averaged, or summed
where rules show sums over examples; rows of examples follow one another. State that the forward
pass writes, such as running statistics, is handed on from one micro-batch to the next. The update
runs once. The parts of the step are told apart by dataflow alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...core import CaptureError
from ...graph import (
    Call,
    Graph,
    Item,
    Operand,
    Phase,
    Role,
    ValueId,
    any_effects,
    items_of,
)
from ._micro_calls import first_op
from ._own_results import OwnResults
from ._time_specs import EQUAL, MEAN, REDUCTIONS, SUM, TimeKind, TimeSpec, split_at
from ._traces import align, describe, trace_own

_AGAIN = "Use num_micro_batches=1"


class Phased(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A step cut into what runs on each micro-batch and what runs once.

    Attributes:
        body: positions, among the step's items, of those that run on each micro-batch.
        late: of those that run once, after the last micro-batch.
        late_of_part: whether these run with the numbers of the part, because gradients are
            averaged; else with those of the whole batch.
        late_values: what these make.
        crossing: what late items and results need of the micro-batches.
        handed_on: inputs that each micro-batch takes from the one before, with the values that it
            makes for the next.
    """

    body: tuple[int, ...]
    late: tuple[int, ...]
    late_of_part: bool
    late_values: tuple[ValueId, ...]
    crossing: tuple[ValueId, ...]
    handed_on: tuple[tuple[ValueId, ValueId], ...]


class OwnParts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A step beside its trace at the size of a micro-batch: what `plan_micro_batches` needs."""

    part: Graph
    part_eqns: Mapping[Call, Any]
    phased: Phased
    specs: tuple[TimeSpec, ...]


def cut_own(graph: Graph, num_micro_batches: int, *, on_missing_rule: str) -> OwnParts:
    """Cut a step into micro-batches that are steps of their own.

    Raises:
        InputError: the parts do not divide the batch, or there is none.
        CaptureError: shapes or programs do not follow the size of the batch, or a result cannot be
            combined; says which, and why.
    """
    part, eqns = align(graph, trace_own(graph, num_micro_batches), own=True)
    return _Cut(graph, part, eqns, num_micro_batches, on_missing_rule).cut()


class _Cut:
    """The work of `cut_own`."""

    def __init__(
        self,
        graph: Graph,
        part: Graph,
        eqns: Mapping[Call, Any],
        count: int,
        on_missing_rule: str,
    ) -> None:
        self.graph, self.part, self.eqns, self.count = graph, part, eqns, count
        self.items: Sequence[Item] = items_of(graph)
        self.given = {*graph.input_values, *graph.constants}
        self.after_backward = self._after_backward()
        self.handed_on = self._handed_on()
        self.own = self._results(on_missing_rule)

    def _results(self, on_missing_rule: str) -> OwnResults:
        return OwnResults(
            self.graph,
            self.part,
            self.count,
            self.eqns,
            handed_on=[value for value, _ in self.handed_on],
            on_missing_rule=on_missing_rule,
        )

    def cut(self) -> OwnParts:
        self._refuse_lookups()
        self._refuse_fixed_places()
        late, crossing = self._late()
        self._refuse_second_training(late)
        summed = self._are_gradients_sums(crossing)
        specs = self._specs(summed)
        body = self._body({*crossing, *(result for _, result in self.handed_on)})
        return OwnParts(
            part=self.part,
            part_eqns=self.eqns,
            phased=Phased(
                body=body,
                late=late,
                late_values=tuple(itertools.chain(*(self.items[k].outputs for k in late))),
                late_of_part=not summed and self._same_shapes(late),
                crossing=tuple(sorted({*crossing, *(result for _, result in self.handed_on)})),
                handed_on=self.handed_on,
            ),
            specs=specs,
        )

    def _after_backward(self) -> set[ValueId]:
        """Values that depend on the backward pass."""
        after: set[ValueId] = set()
        for item in self.items:
            if item.phase is Phase.BACKWARD or not after.isdisjoint(item.inputs):
                after.update(item.outputs)
        return after

    def _updates(self, item: Item) -> bool:
        """True for items of the update that depend on gradients."""
        return item.phase is Phase.UPDATE and not self.after_backward.isdisjoint(item.inputs)

    def _handed_on(self) -> tuple[tuple[ValueId, ValueId], ...]:
        """State that the forward pass writes: successors that depend on the batch, or that stand in
        the differentiated function, and on no gradient. State that is cut with the batch is not
        handed on.
        """
        successors = {}
        for given in self.graph.inputs:
            made = None if given.output is None else self.graph.outputs[given.output].value
            cut = self.graph.values[given.value].shape != self.part.values[given.value].shape
            if isinstance(made, int) and made not in self.given and not cut:
                successors[given.value] = made
        maker: dict[ValueId, Item] = {}
        for item in self.items:
            maker.update(dict.fromkeys(item.outputs, item))
        varying = self.graph.inputs_of(Role.BATCH)
        handed: dict[ValueId, ValueId] = {}
        while True:
            seen = set(varying)
            for item in self.items:
                if not seen.isdisjoint(item.inputs):
                    seen.update(item.outputs)
            new = {
                value: made
                for value, made in successors.items()
                if value not in handed
                and not self._updates(maker[made])
                and (made in seen or self._is_in_forward(maker[made]))
            }
            if not new:
                break
            handed |= new
            varying |= new.keys()
        self._refuse_sequential(handed)
        return tuple(sorted(handed.items()))

    def _is_in_forward(self, item: Item) -> bool:
        return any(self.graph.ops[k].phase is Phase.FORWARD for k in item.ops)

    def _refuse_sequential(self, handed: Mapping[ValueId, ValueId]) -> None:
        """Refuse steps whose micro-batches would each train on the result of the one before."""
        trains = any(op.phase is Phase.BACKWARD for op in self.graph.ops)
        paths = {i.value: i for i in self.graph.inputs}
        for value, made in handed.items():
            item = paths[value]
            a, b = self.graph.values[value], self.graph.values[made]
            if made in self.after_backward:
                raise self._refusal(
                    f"{item.path} is updated inside of the loop that holds its backward pass, so"
                    " that each micro-batch would train on the result of the one before"
                )
            if not trains:
                raise self._refusal(
                    f"{item.path} changes, but JAX takes no gradient in this step, so that its"
                    " forward pass and its update cannot be told apart"
                )
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                raise self._refusal(
                    f"{item.path} is {a.dtype}{list(a.shape)} before the step and"
                    f" {b.dtype}{list(b.shape)} after it, and cannot be handed on from one"
                    " micro-batch to the next"
                )

    def _refusal(self, reason: str) -> CaptureError:
        return CaptureError(
            f"{self.graph.name} cannot run on independent micro-batches: {reason}. {_AGAIN}."
        )

    def _refuse_lookups(self) -> None:
        if self.own.looked_up:
            op = self.own.looked_up[0]
            raise self._refusal(
                f"{describe(op)} looks up examples by numbers that come with the batch, which may"
                " lie in another micro-batch"
            )

    def _refuse_fixed_places(self) -> None:
        """Refuse rows of state, such as those of a queue of keys, that every micro-batch would
        write to one place, because the number of the place changes once a step.
        """
        handed = {value for value, _ in self.handed_on}
        # What comes of state that changes once a step, with the path of that state.
        once: dict[Operand, str] = {}
        for given in self.graph.inputs:
            if given.output is None or given.value in handed:
                continue
            made = self.graph.outputs[given.output].value
            if made != given.value and made not in self.after_backward:
                once[given.value] = given.path
        for item in self.items:
            for path in [once[v] for v in item.inputs if v in once][:1]:
                once |= dict.fromkeys(item.outputs, path)
            if handed.isdisjoint(item.inputs):
                continue
            handed.update(item.outputs)
            for op in (self.graph.ops[k] for k in item.ops):
                places = {"dynamic_update_slice": op.inputs[2:], "scatter": op.inputs[1:2]}
                moved = [v for v in places.get(op.name, ()) if v in once]
                if op.inputs[0] in handed and moved:
                    raise self._refusal(
                        f"{describe(op)} writes to a place that {once[moved[0]]} gives, which"
                        " changes once a step, so that each micro-batch would overwrite what the"
                        " one before wrote"
                    )

    def _refuse_second_training(self, late: Sequence[int]) -> None:
        """Refuse a second training that takes the updated parameters of the first."""
        for k in late:
            item = self.items[k]
            passes = []
            for n in item.ops:
                if self.graph.ops[n].phase in (Phase.FORWARD, Phase.BACKWARD):
                    passes.append(n)
            if self._updates(item) and passes and any(map(self.own.differs, item.inputs)):
                raise self._refusal(
                    "it trains a second time in the same step, after the first update, at"
                    f" {describe(self.graph.ops[passes[0]])}"
                )

    def _is_again(self, item: Item) -> bool:
        """True for items that all micro-batches, and the whole batch, compute alike."""
        return all(self.own.of(o).kind is TimeKind.EQUAL for o in (*item.outputs, *item.inputs))

    def _late(self) -> tuple[tuple[int, ...], tuple[ValueId, ...]]:
        """Positions of the items that run once, and the values that they and the results need of
        the micro-batches.
        """
        handed = {result for _, result in self.handed_on}
        needed = self.graph.returned - self.given
        crossing: set[ValueId] = set()
        late: list[int] = []
        for k in range(len(self.items) - 1, -1, -1):
            item = self.items[k]
            wanted = needed.intersection(item.outputs)
            effects = any_effects(item.op_or_call, self.graph)
            if not wanted and not effects:
                continue
            self._refuse_repeated_effects(item, effects)
            if wanted.isdisjoint(handed) and (
                self._updates(item)
                or effects
                or self._is_again(item)
                or any(map(self._runs_late, wanted))
            ):
                late.append(k)
                needed.update(set(item.inputs) - self.given)
            else:
                crossing |= wanted
        for v in sorted(crossing - handed):
            self._require_combinable(v)
        return tuple(late[::-1]), tuple(sorted(crossing))

    def _refuse_repeated_effects(self, item: Item, effects: bool) -> None:
        if effects and isinstance(item.op_or_call, Call) and not self._is_again(item):
            op = first_op(item.op_or_call, self.graph)
            raise CaptureError(
                f"{self.graph.name} does not decompose into micro-batches: {describe(op)} stands in"
                " a loop or region with an effect, which would happen for each micro-batch."
                f" {_AGAIN}, or take the effect out."
            )

    def _is_averaged(self, value: ValueId) -> bool:
        return self.graph.values[value].dtype.startswith(("float", "bfloat", "complex"))

    def _runs_late(self, value: ValueId) -> bool:
        """True for whole numbers and truth values that are no sum, maximum or the like, so that
        they can only be computed from what is combined.
        """
        own = self.own.of(value)
        if self._is_averaged(value) or own.rows >= 0 or self.own.differs(value):
            return False
        return own.kind not in REDUCTIONS and own.degree != 1

    def _require_combinable(self, value: ValueId) -> None:
        own = self.own.of(value)
        if not self.own.differs(value) or own.rows >= 0:
            return
        whole, part = self.graph.values[value].shape, self.part.values[value].shape
        paths = [o.path or "the result" for o in self.graph.outputs if o.value == value]
        path = paths[0] if paths else "a value that the update reads"
        raise self._refusal(
            f"{path} is {list(whole)} for the batch and {list(part)} for a micro-batch, and it is"
            " not known to hold one row for each example in their order, so that those of the"
            " micro-batches cannot be put together"
        )

    def _are_gradients_sums(self, crossing: Sequence[ValueId]) -> bool:
        """True if all that crosses from the backward pass is sums over examples. Gradients are
        averaged together or summed together: they must keep their proportions.
        """
        gradients = []
        for v in crossing:
            if v in self.after_backward and self._is_averaged(v) and not self.own.differs(v):
                gradients.append(self.own.of(v))
        counted = [own for own in gradients if not own.zero]
        return bool(counted) and all(own.degree == 1 for own in counted)

    def _specs(self, gradients_are_sums: bool) -> tuple[TimeSpec, ...]:
        return tuple(
            self._spec(ValueId(v), gradients_are_sums) for v in range(len(self.graph.values))
        )

    def _spec(self, value: ValueId, gradients_are_sums: bool) -> TimeSpec:
        own = self.own.known(value)
        if own is None:
            return EQUAL
        dim = self.own.rows_by_shape(value)
        if dim is not None:
            return split_at(dim)
        if not self._is_averaged(value):
            if own.degree == 1:
                return SUM
            return TimeSpec(kind=own.kind) if own.kind in REDUCTIONS else EQUAL
        if own.kind is TimeKind.EQUAL:
            return EQUAL
        if value in self.after_backward:
            return SUM if gradients_are_sums else MEAN
        return SUM if own.degree == 1 else MEAN

    def _body(self, wanted: set[ValueId]) -> tuple[int, ...]:
        needed = set(wanted)
        body = []
        for k in range(len(self.items) - 1, -1, -1):
            item = self.items[k]
            if not needed.isdisjoint(item.outputs):
                body.append(k)
                needed.update(item.inputs)
        return tuple(body[::-1])

    def _same_shapes(self, late: Sequence[int]) -> bool:
        whole, part = self.graph.values, self.part.values
        for item in (self.items[k] for k in late):
            for v in (*item.inputs, *item.outputs):
                if whole[v].shape != part[v].shape:
                    return False
            for n in item.ops:
                if self.graph.ops[n].trips != self.part.ops[n].trips:
                    return False
        return True
