"""Replay of a graph, operator by operator, as a program. Tests also use it to show that capture
loses nothing.

Structured operators are rebuilt around their replayed bodies. A hook sees every array, so that a
runtime can constrain it; without a hook, the replay computes what the step computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from ..core import InputError
from . import _jax_compat as compat
from ._checks import any_row, is_check, raises
from ._types import Block, Call, Graph, Literal, Op, Operand, OpId, ValueId


class ReplayHook:
    """Hooks that a replay calls. The default methods change nothing."""

    def operands(self, op: Op, arrays: list[Any]) -> Sequence[Any]:
        """The operands that `op` gets, one for each of `op.inputs`."""
        return arrays

    def run(
        self, op: Op, arrays: Sequence[Any], bind: Callable[[Any, Sequence[Any]], Sequence[Any]]
    ) -> Sequence[Any]:
        """Results of `op`; `bind` runs an equation on operands, under the names of `op`."""
        return bind(op.eqn, arrays)

    def results(self, op: Op, arrays: list[Any]) -> Sequence[Any]:
        """The results that later operators see, one for each of `op.outputs`."""
        return arrays

    def value(self, index: ValueId, array: Any) -> Any:
        """The array for a value that no operator makes: a carry or result of a loop, an input of a
        scan or remat region.
        """
        return array

    def body(self) -> AbstractContextManager[None]:
        """A context for the replay of a structured operator's body: arrays made inside it must not
        be used outside.
        """
        return nullcontext()

    def row(self, index: ValueId, array: Any) -> Any:
        """The row that one turn of a scan contributes to the stacked result with that value
        index.
        """
        return array


def evaluate(graph: Graph, inputs: Sequence[Any], *, on_op: ReplayHook | None = None) -> list[Any]:
    """Run the graph on other arrays, concrete or traced.

    Remat regions keep their policy and their optimization barriers, scans their length and
    direction. Link operators compute nothing and are skipped.

    Args:
        graph: a captured step.
        inputs: one array for each of `graph.inputs`, in order.
        on_op: sees and may replace arrays before and after each operator.

    Returns:
        One array for each of `graph.outputs`, in order.

    Raises:
        InputError: another number of arrays is passed.
    """
    if len(inputs) != len(graph.inputs):
        raise InputError(
            f"{graph.name} takes {len(graph.inputs)} arrays and is given {len(inputs)}. Pass one"
            " for each of graph.inputs, in order; graph.calling.flatten(args, kwargs) gives them."
        )
    replay = _Replay(graph, on_op)
    for item, array in zip(graph.inputs, inputs, strict=True):
        replay.env[item.value] = array
    replay.run(graph.body.items, nested=False)
    return replay.outputs(graph.body)


class _Replay:
    """Arrays by value index. Indices are unique over all bodies, so one table serves every
    depth.
    """

    def __init__(self, graph: Graph, hook: ReplayHook | None) -> None:
        self.env: list[Any] = [None] * len(graph.values)
        for index, constant in graph.constants.items():
            self.env[index] = constant
        self._ops = graph.ops
        self._hook = hook
        self._names = compat.NameStacks()

    def run(self, items: Sequence[OpId | Call], nested: bool = True) -> None:
        with self._hook.body() if nested and self._hook is not None else nullcontext():
            self._run(items, nested)

    def _run(self, items: Sequence[OpId | Call], nested: bool) -> None:
        env, ops, hook, names = self.env, self._ops, self._hook, self._names
        for item in items:
            if type(item) is Call:
                self._call(item)
                continue
            op = ops[item]
            arrays: Sequence[Any] = [
                env[i] if type(i) is not Literal else i.value for i in op.inputs
            ]
            if op.name == "pure_callback" and raises(op.eqn):
                # A check's callback takes one message, but under vmap there is one for each
                # example.
                arrays = list(map(any_row, arrays))
            # Inside a body, JAX itself prefixes the names of the structured operator.
            name_stack = None if nested else names.get(op.scope)
            if hook is None:
                results: Sequence[Any] = compat.bind(op.eqn, arrays, name_stack)
            else:
                bind = functools.partial(compat.bind, name_stack=name_stack)
                results = hook.results(
                    op, list(hook.run(op, hook.operands(op, list(arrays)), bind))
                )
            for index, array in zip(op.outputs, results, strict=True):
                if index >= 0:
                    env[index] = array

    def outputs(self, block: Block) -> list[Any]:
        return list(map(self._read, block.outputs))

    def _read(self, operand: Operand) -> Any:
        if not isinstance(operand, Literal):
            return self.env[operand]
        # As an array, because a plain Python number would take its dtype from other operands.
        value = operand.value
        return value if hasattr(value, "dtype") else np.asarray(value, np.dtype(operand.dtype))

    def _enter(self, indices: Sequence[Operand], arrays: Sequence[Any]) -> None:
        for index, array in zip(indices, arrays, strict=True):
            assert isinstance(index, int)
            self.env[index] = array if self._hook is None else self._hook.value(index, array)

    def _call(self, call: Call) -> None:
        arrays = list(map(self._read, call.inputs))
        rebuild = {
            "remat": self._remat,
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
        }[call.kind]
        with compat.named_as(call.eqn):
            results = rebuild(call, arrays)
        for index, array in zip(call.outputs, results, strict=True):
            if index >= 0:
                self.env[index] = array if self._hook is None else self._hook.value(index, array)

    def _remat(self, call: Call, arrays: list[Any]) -> Sequence[Any]:
        (block,) = call.blocks

        def body(*inner: Any) -> list[Any]:
            # A remat body shares the indices of the values around it, so their arrays are restored
            # after the body.
            outer = [(i, self.env[i]) for i in block.inputs if isinstance(i, int)]
            for index, array in zip(block.inputs, inner, strict=True):
                if isinstance(index, int):
                    self.env[index] = (
                        array if self._hook is None else self._hook.value(index, array)
                    )
            self.run(block.items)
            results = self.outputs(block)
            for index, array in outer:
                self.env[index] = array
            return results

        return compat.bind_remat(call.eqn, body, arrays)

    def _scan(self, call: Call, arrays: list[Any]) -> Sequence[Any]:
        (block,) = call.blocks
        params = call.eqn.params
        num_consts, num_carry = compat.scan_counts(params)
        split = num_consts + num_carry

        def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            self._enter(block.inputs[num_consts:], [*carry, *slices])
            self.run(block.items)
            results = self.outputs(block)
            return results[:num_carry], self._rows(call.outputs[num_carry:], results[num_carry:])

        carry, stacked = jax.lax.scan(
            body,
            arrays[num_consts:split],
            arrays[split:],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacked]

    def _rows(self, indices: Sequence[ValueId], arrays: list[Any]) -> list[Any]:
        if self._hook is None:
            return arrays
        return [a if i < 0 else self._hook.row(i, a) for i, a in zip(indices, arrays, strict=True)]

    def _while(self, call: Call, arrays: list[Any]) -> Sequence[Any]:
        condition, block = call.blocks
        num_cond, num_body = call.eqn.params["cond_nconsts"], call.eqn.params["body_nconsts"]

        def holds(carry: Sequence[Any]) -> Any:
            self._enter(condition.inputs[num_cond:], carry)
            self.run(condition.items)
            return self.outputs(condition)[0]

        def body(carry: Sequence[Any]) -> Sequence[Any]:
            self._enter(block.inputs[num_body:], carry)
            self.run(block.items)
            return self.outputs(block)

        def any_holds(carry: Sequence[Any]) -> Any:
            # The loop runs until the condition is false for every row.
            return holds(carry).any()

        def masked_body(carry: Sequence[Any]) -> Sequence[Any]:
            # Under vmap, each row has its own condition; rows that are done keep their values.
            mask = holds(carry)
            axes = tuple(range(mask.ndim))
            kept = []
            for new, old in zip(body(carry), carry, strict=True):
                rows = jax.lax.broadcast_in_dim(mask, new.shape, axes)
                kept.append(jax.lax.select(rows, new, old))
            return kept

        init = arrays[num_cond + num_body :]
        (holding,) = call.eqn.params["cond_jaxpr"].out_avals
        if holding.shape:
            return jax.lax.while_loop(any_holds, masked_body, init)
        return jax.lax.while_loop(holds, body, init)

    def _cond(self, call: Call, arrays: list[Any]) -> Sequence[Any]:
        if call.eqn.params.get("branches_platforms") is not None:
            # Only the branch of the compiler's platform is lowered; the others might fail to lower.
            return compat.bind(call.eqn, arrays)

        def branch(block: Block) -> Any:
            def run() -> list[Any]:
                self.run(block.items)
                return self.outputs(block)

            return run

        index = any_row(arrays[0]) if is_check(call.eqn) else arrays[0]
        results: Sequence[Any] = jax.lax.switch(index, list(map(branch, call.blocks)))
        return results
