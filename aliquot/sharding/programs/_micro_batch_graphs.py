"""Three graphs from a `MicroBatchPlan`: the operators that run before the first part, on each part,
and after the last.

Each graph holds only what is needed. Values keep their indices, so that the pins of the whole step
hold in all three. Conversions for a part (a slice, a shift, a sum that counts once) are new
operators, whose indices follow all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from msgspec import structs

from ...graph import (
    Block,
    Call,
    Graph,
    Input,
    Literal,
    Op,
    Operand,
    OpId,
    Output,
    Role,
    Value,
    ValueId,
    equations,
    scan_counts,
    value_ids,
)
from ..micro_batches import Action, Conversion, MicroBatchPlan, TimeKind, TimeSpec, indexed_dims
from ._layout import Layout
from ._needs import Needs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatchGraphs:
    """The three graphs, and what passes between them; all by value index.

    Attributes:
        early: takes the step's inputs, returns `early_values`.
        body: takes the step's inputs with `sliced` values cut, `early_values`, the numbers of the
            group and of the micro-batch; returns `crossing` values.
        late: takes the step's inputs, `early_values` and combined `crossing` values; returns the
            step's outputs.
        early_values: computed once, on the whole batch; `inside` are their names in the body.
        sliced: inputs, constants and early values of which each part gets its slice, with the dim.
        crossing: what the late graph needs of the parts.
        group, micro_batch: the values that hold a part's numbers; `NO_VALUE` if no operator reads
            them.
        handed_on: inputs that each part takes from the part before (the first one from the step's
            inputs), with the crossing values that it makes for the next.
    """

    early: Graph
    body: Graph
    late: Graph
    early_values: tuple[ValueId, ...]
    inside: tuple[ValueId, ...]
    sliced: tuple[tuple[ValueId, int], ...]
    crossing: tuple[ValueId, ...]
    group: ValueId
    micro_batch: ValueId
    handed_on: tuple[tuple[ValueId, ValueId], ...] = ()


def cut_exactly(plan: MicroBatchPlan, layout: Layout) -> MicroBatchGraphs:
    """The three graphs of a plan."""
    whole = plan.whole
    needs = Needs(plan)
    needs.find()
    crossing = tuple(sorted(needs.crossing))
    early_values = tuple(sorted(needs.early))
    rewriter = _Rewriter(plan, layout)
    items = rewriter.items(needs.body_items)
    ops, values = tuple(rewriter.ops), tuple(rewriter.values)
    numbers = [rewriter.group, rewriter.micro_batch]
    inside = [rewriter.early_alias.get(v, v) for v in early_values]
    body_inputs = [*whole.input_values, *whole.constants, *inside, *numbers]
    body = subgraph(replace(plan.part, ops=ops, values=values), body_inputs, items, crossing)
    late_inputs = [*whole.input_values, *early_values, *crossing]
    late = subgraph(whole, late_inputs, needs.late_items, whole.output_values)
    early = subgraph(whole, whole.input_values, needs.early_items, early_values)
    # The values of which each part gets a slice, each with its batch dim.
    batch_dims = {}
    for v in (*whole.input_values, *whole.constants, *early_values):
        if plan.specs[v].kind is TimeKind.CONCATENATE:
            batch_dims[v] = plan.specs[v].dim
    return MicroBatchGraphs(
        early=early,
        # The constants of the step are inputs of the body, so that each part gets its slice of
        # them.
        body=replace(body, constants={}),
        late=late,
        early_values=early_values,
        inside=tuple(inside),
        sliced=tuple(sorted(batch_dims.items())),
        crossing=crossing,
        group=rewriter.group,
        micro_batch=rewriter.micro_batch,
    )


def subgraph(
    base: Graph, inputs: Sequence[ValueId], items: Sequence[OpId | Call], outputs: Sequence[Operand]
) -> Graph:
    """Some items of a graph under the same indices, with inputs and outputs of their own."""
    named = {item.value: item for item in base.inputs}
    return replace(
        base,
        inputs=tuple(
            named.get(v) or Input(path=f"value {v}", value=v, role=Role.OTHER) for v in inputs
        ),
        body=Block(inputs=tuple(inputs), items=tuple(items), outputs=tuple(outputs)),
        outputs=tuple(Output(path="", value=v) for v in outputs),
    )


class _Rewriter:
    """Rewrites blocks for a part: conversions, slices and shifts become operators."""

    def __init__(self, plan: MicroBatchPlan, layout: Layout) -> None:
        self.plan, self.layout = plan, layout
        self.ops: list[Op] = list(plan.part.ops)
        self.values: list[Value] = list(plan.part.values)
        # New indices for arrays of the whole batch whose index stands for the part's array.
        self.early_alias: dict[ValueId, ValueId] = {}
        self.group = self._value((), "int32")
        self.micro_batch = self._value((), "int32")

    def items(self, items: Iterable[OpId | Call]) -> list[OpId | Call]:
        out: list[OpId | Call] = []
        for item in items:
            if isinstance(item, Call):
                if item not in self.plan.early_calls and item not in self.plan.late_calls:
                    out.append(self._call(item, out))
            elif self.plan.actions.get(item) not in (Action.EARLY, Action.LATE):
                self._op(item, out)
        return out

    def _value(self, shape: Sequence[int], dtype: str, itemsize: int = 4) -> ValueId:
        index = ValueId(len(self.values))
        self.values.append(Value(index=index, shape=tuple(shape), dtype=dtype, itemsize=itemsize))
        return index

    def _add(
        self,
        fn: Callable[..., Any],
        inputs: Sequence[Operand],
        output: ValueId,
        like: Op | None,
        out: list[OpId | Call],
    ) -> ValueId:
        """A new operator that calls `fn` on arrays of the inputs' shapes."""
        shapes = [struct_of(i if isinstance(i, Literal) else self.values[i]) for i in inputs]
        # JAX itself writes the equation, so that dtypes and shapes are checked as in the user's own
        # code.
        (eqn,) = equations(jax.jit(fn), shapes)
        # A new operator takes phase and scope from the one that needs it.
        base = like or self.plan.whole.ops[0]
        index = OpId(len(self.ops))
        self.ops.append(
            structs.replace(
                base,
                index=index,
                name="jit",
                inputs=tuple(inputs),
                outputs=(output,),
                params={},
                eqn=eqn,
            )
        )
        out.append(index)
        return output

    def _op(self, index: OpId, out: list[OpId | Call]) -> None:
        """Rewrite an operator for a part: convert its operands, then run, shift or slice it."""
        op, whole = self.ops[index], self.plan.whole.ops[index]
        conversions = {k: self.plan.conversions.get((index, k)) for k in range(len(op.inputs))}
        inputs = tuple(
            i if conversions[k] is None else self._convert(conversions[k], op, k, out)
            for k, i in enumerate(op.inputs)
        )
        action = self.plan.actions.get(index, Action.RUN)
        if action is Action.RUN:
            self.ops[index] = structs.replace(op, inputs=inputs)
            out.append(index)
        elif action is Action.SHIFT:
            (target,) = op.outputs
            plain = self._like(target)
            self.ops[index] = structs.replace(op, inputs=inputs, outputs=(plain,))
            out.append(index)
            self._shift(plain, target, op, out)
        else:
            self._slice(index, whole, inputs, out)

    def _like(self, index: ValueId, shape: Sequence[int] | None = None) -> ValueId:
        value = self.values[index]
        new = ValueId(len(self.values))
        whole = value.shape if shape is None else tuple(shape)
        self.values.append(structs.replace(value, index=new, shape=whole))
        return new

    def _shift(self, plain: ValueId, target: ValueId, op: Op, out: list[OpId | Call]) -> None:
        spec, layout = self.plan.specs[target], self.layout

        def shift(array: Any, group: Any, micro_batch: Any) -> Any:
            offsets = layout.offsets(
                array.shape, spec.dim, group, micro_batch, jnp.int32, spec.blocks
            )
            return array + offsets.astype(array.dtype)

        self._add(shift, [plain, self.group, self.micro_batch], target, op, out)

    def _slice(
        self, index: OpId, whole: Op, inputs: Sequence[Operand], out: list[OpId | Call]
    ) -> None:
        """Run an operator for the whole batch, and keep the part's slice of what depends on the
        batch's size.
        """
        outputs = []
        cuts: list[tuple[ValueId, ValueId]] = []
        for target in whole.outputs:
            if target >= 0 and self.plan.specs[target].kind is TimeKind.CONCATENATE:
                full = self._like(target, self.plan.whole.values[target].shape)
                cuts.append((full, target))
                outputs.append(full)
            else:
                outputs.append(target)
        self.ops[index] = structs.replace(whole, inputs=tuple(inputs), outputs=tuple(outputs))
        out.append(index)
        for full, target in cuts:
            spec, layout = self.plan.specs[target], self.layout

            def take(
                array: Any,
                group: Any,
                micro_batch: Any,
                spec: TimeSpec = spec,
                layout: Layout = layout,
            ) -> Any:
                return layout.take(array, spec.dim, group, micro_batch, spec.blocks)

            self._add(take, [full, self.group, self.micro_batch], target, whole, out)

    def _convert(
        self, how: Conversion | None, op: Op, position: int, out: list[OpId | Call]
    ) -> Operand:
        """An operand after its conversion."""
        operand = op.inputs[position]
        match how:
            case Conversion.ONCE:
                return self._once(operand, op, out)
            case Conversion.LOCAL:
                return self._local(operand, op, out)
            case Conversion.EARLY:
                assert isinstance(operand, int)
                if operand not in self.early_alias:
                    self.early_alias[operand] = self._like(operand)
                return self.early_alias[operand]
        return operand

    def _once(self, operand: Operand, op: Op | None, out: list[OpId | Call]) -> ValueId:
        """An operand that is equal in all parts, as a summand: over all parts it counts once."""

        def once(array: Any, group: Any, micro_batch: Any) -> Any:
            # Added once, and not in equal shares: dividing would round, and integers cannot be
            # divided.
            return jnp.where((group == 0) & (micro_batch == 0), array, jnp.zeros_like(array))

        value = operand if isinstance(operand, Literal) else self.values[operand]
        itemsize = 4 if isinstance(value, Literal) else value.itemsize
        target = self._value(value.shape, value.dtype, itemsize)
        return self._add(once, [operand, self.group, self.micro_batch], target, op, out)

    def _local(self, operand: Operand, op: Op, out: list[OpId | Call]) -> ValueId:
        """Indices by position in the batch, as positions in the part."""
        assert isinstance(operand, int) and isinstance(op.inputs[0], int)
        component = indexed_dims(op).index(self.plan.specs[op.inputs[0]].dim)
        spec, layout = self.plan.specs[operand], self.layout

        def local(array: Any, group: Any, micro_batch: Any) -> Any:
            offsets = layout.offsets(
                array.shape, spec.dim, group, micro_batch, jnp.int32, spec.blocks
            )
            # Only the component that counts examples is shifted; others index other dims.
            chosen = jnp.arange(array.shape[-1]) == component
            return array - jnp.where(chosen, offsets, 0).astype(array.dtype)

        target = self._like(operand)
        return self._add(local, [operand, self.group, self.micro_batch], target, op, out)

    def _call(self, call: Call, out: list[OpId | Call]) -> Call:
        """Rewrite a structured operator and its bodies for a part."""
        inputs = list(call.inputs)
        blocks = list(call.blocks)
        if call.kind == "remat":
            # A region is rebuilt as a region, so that its barrier still keeps the recomputation
            # apart.
            (block,) = blocks
            blocks = [replace(block, items=tuple(self.items(block.items)))]
            return replace(call, eqn=self.plan.part_eqns[call], blocks=tuple(blocks))
        if call.kind == "cond":
            results = [call.outputs] * len(blocks)
            bodies = blocks
        else:
            *conditions, body = blocks
            params = call.eqn.params
            if call.kind == "scan":
                first, count = scan_counts(params)
                before = first
            else:
                first, count = params["body_nconsts"], len(call.outputs)
                before = first + params["cond_nconsts"]
            # A loop carry begins with the time spec with which it ends: a constant to which
            # summands are added, for example, must count once over all parts.
            carried = value_ids(body.inputs[first : first + count])
            for k, inner in enumerate(carried):
                inputs[before + k] = self._match(inputs[before + k], inner, out)
            results = [(*carried, *call.outputs[count:])]
            bodies = [body]
            blocks = [replace(c, items=tuple(self.items(c.items))) for c in conditions]
        rewritten = [self._block(b, wanted) for b, wanted in zip(bodies, results, strict=True)]
        blocks = rewritten if call.kind == "cond" else [*blocks, *rewritten]
        return replace(
            call, eqn=self.plan.part_eqns[call], inputs=tuple(inputs), blocks=tuple(blocks)
        )

    def _block(self, block: Block, wanted: Sequence[ValueId]) -> Block:
        """A body whose results have the specs of the values that they become."""
        items = self.items(block.items)
        outputs = []
        for o, target in zip(block.outputs, wanted, strict=True):
            outputs.append(self._match(o, target, items))
        return replace(block, items=tuple(items), outputs=tuple(outputs))

    def _match(self, operand: Operand, target: ValueId, out: list[OpId | Call]) -> Operand:
        """An operand with the time spec of the value that it becomes."""
        if target < 0:
            return operand
        have = TimeKind.EQUAL if isinstance(operand, Literal) else self.plan.specs[operand].kind
        want = self.plan.specs[target].kind
        if have is TimeKind.EQUAL and want is TimeKind.SUM:
            return self._once(operand, None, out)
        return operand


def struct_of(value: Literal | Value) -> jax.ShapeDtypeStruct:
    """JAX's description of a value."""
    jax_dtype = None if isinstance(value, Literal) else value.jax_dtype
    make: Any = jax.ShapeDtypeStruct
    struct: jax.ShapeDtypeStruct = make(value.shape, jax_dtype or jnp.dtype(value.dtype))
    return struct
