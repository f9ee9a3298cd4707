"""Recomputed runs of a backward program, tied by optimization barriers to the gradients that they
wait for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import jax
from msgspec import structs

from ...graph import (
    Call,
    Graph,
    Item,
    Literal,
    Op,
    Operand,
    OpId,
    RecomputedRun,
    Value,
    ValueId,
    equations,
    made_by,
    read_by,
)
from ._micro_batch_graphs import struct_of


def tie_runs(
    graph: Graph,
    runs: Sequence[RecomputedRun],
    backward: Sequence[Item],
    untied: Collection[ValueId],
) -> tuple[Graph, list[OpId | Call]]:
    """A graph whose recomputed items read their operands through optimization barriers, and its
    items in the order in which they run.

    A barrier also returns the gradient to its later readers, because compilers drop results that
    nobody reads.

    Args:
        graph: the graph of the items.
        backward: the items that do not recompute, in program order.
        untied: values that runs read directly, such as parameters.
    """
    tied = _Tied(graph, untied)
    waiting = list(runs)
    for k, item in enumerate(backward):
        while waiting and waiting[0].after <= k:
            tied.add_run(waiting.pop(0))
        tied.add(item, tied.handed_on)
    for run in waiting:
        tied.add_run(run)
    return replace(graph, ops=tuple(tied.ops), values=tuple(tied.values)), tied.order


class _Tied:
    """The graph while barriers are inserted. `handed_on`: gradients, and the values that stand
    for them behind a barrier.
    """

    def __init__(self, graph: Graph, untied: Collection[ValueId]) -> None:
        self.ops: list[Op] = list(graph.ops)
        self.values: list[Value] = list(graph.values)
        self.order: list[OpId | Call] = []
        self.handed_on: dict[ValueId, ValueId] = {}
        self._untied = untied

    def add_run(self, run: RecomputedRun) -> None:
        """Append a run, with its barrier."""
        names: dict[ValueId, ValueId] = {}
        if run.gradient is not None:
            recomputed = made_by(run.items)
            taken = [i for i in read_by(run.items) if i not in recomputed and self._may_tie(i)]
            if taken:
                passed = self._barrier([*taken, run.gradient], like=run.items[0])
                names = dict(zip(taken, passed, strict=False))
                self.handed_on[run.gradient] = passed[-1]
        for item in run.items:
            self.add(item, names)

    def add(self, item: Item, names: Mapping[ValueId, ValueId]) -> None:
        """Append an item; `names` are other values for it to read."""
        op_or_call = item.op_or_call
        if isinstance(op_or_call, Call):
            # Other calls read values around them by their own names.
            if op_or_call.kind in ("remat", "scan") and not names.keys().isdisjoint(item.inputs):
                op_or_call = replace(op_or_call, inputs=_renamed(op_or_call.inputs, names))
        elif not names.keys().isdisjoint(item.inputs):
            self.ops[op_or_call] = structs.replace(
                self.ops[op_or_call], inputs=_renamed(self.ops[op_or_call].inputs, names)
            )
        self.order.append(op_or_call)

    def _may_tie(self, value: ValueId) -> bool:
        return value not in self._untied and not self.values[value].dtype.startswith("key<")

    def _barrier(self, taken: Sequence[ValueId], like: Item) -> list[ValueId]:
        """Append an optimization barrier, and return the values that leave it in place of
        `taken`.
        """
        shapes = [struct_of(self.values[v]) for v in taken]
        (eqn,) = equations(lambda *xs: jax.lax.optimization_barrier(xs), shapes)
        passed = []
        for v in taken:
            passed.append(ValueId(len(self.values)))
            self.values.append(structs.replace(self.values[v], index=passed[-1]))
        index = OpId(len(self.ops))
        self.ops.append(
            structs.replace(
                self.ops[like.ops[0]],
                index=index,
                name="optimization_barrier",
                inputs=tuple(taken),
                outputs=tuple(passed),
                params={},
                eqn=eqn,
            )
        )
        self.order.append(index)
        return passed


def _renamed(operands: Sequence[Operand], names: Mapping[ValueId, ValueId]) -> tuple[Operand, ...]:
    return tuple(i if isinstance(i, Literal) else names.get(ValueId(i), i) for i in operands)
