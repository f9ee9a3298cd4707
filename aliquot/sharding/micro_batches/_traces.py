"""A step traced on a smaller batch, and laid beside the step on its whole batch."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from ...core import CaptureError, InputError
from ...graph import (
    Call,
    Graph,
    Literal,
    Op,
    Role,
    line_or_nearest,
    source_line,
    split_scans,
    traits_of,
    with_recomputation,
)
from ._cut_state import TRACE_ERRORS, find_cut_state, trace_cut, with_copies
from ._resized import batch_size, calls_of, own_of_one, resized


def trace_part(graph: Graph, num_micro_batches: int, num_groups: int = 1) -> Graph:
    """The step traced on one of `num_micro_batches * num_groups` equal parts of its batch, or
    derived from such traces.

    Raises:
        InputError: the parts do not divide the batch, or there is none.
        CaptureError: the step cannot be traced on so few examples.
    """
    return _traced(graph, num_micro_batches, num_groups, trace_of_size)


def trace_own(graph: Graph, num_micro_batches: int) -> Graph:
    """The step as JAX traces it at the size of a micro-batch, with the numbers that its Python code
    writes down at that size. Raises as `trace_part` does.
    """
    return _traced(graph, num_micro_batches, 1, _own_of_size)


def _traced(
    graph: Graph, num_micro_batches: int, num_groups: int, trace: Callable[[Graph, int], Graph]
) -> Graph:
    parts = num_micro_batches * num_groups
    batch = [item for item in graph.inputs if item.role is Role.BATCH]
    if not batch:
        raise InputError(
            f"{graph.name} has no batch that could be cut into {num_micro_batches} micro-batches:"
            " none of its arguments is an array that each step gets anew. Use num_micro_batches=1."
        )
    groups = f" on {num_groups} data-parallel groups" if num_groups > 1 else ""
    wrong = []
    for item in batch:
        if graph.values[item.value].shape[0] % parts:
            wrong.append(f"{item.path} holds {graph.values[item.value].shape[0]}")
    if num_micro_batches < 1 or wrong:
        raise InputError(
            f"num_micro_batches={num_micro_batches}{groups} needs a batch that is a multiple of"
            f" {parts} examples, but {'; '.join(wrong) or 'there must be at least one'}. Choose"
            " another number of micro-batches, or another batch."
        )
    (size,) = {graph.values[item.value].shape[0] // parts for item in batch}
    try:
        return trace(graph, size)
    except TRACE_ERRORS as error:
        reason = str(error).rstrip(".")
        raise CaptureError(
            f"{graph.name} cannot be traced on a micro-batch, {parts} times smaller than its batch:"
            f" {reason}. Take sizes from the arrays (x.shape[0]) instead of writing them down, or"
            " use fewer micro-batches."
        ) from error


def trace_of_size(graph: Graph, size: int) -> Graph:
    """The step on `size` examples, with its scans cut as those of the graph are.

    A step is traced on two sizes at most if others can be derived from these, and on a third if JAX
    writes another program for the second.
    """
    if graph.split is not None:
        return split_scans(trace_of_size(graph.split.original, size), graph.split.bounds).graph
    known: dict[int, Graph] = graph.calling.traces
    whole = batch_size(graph)
    if size == whole:
        return graph
    if size not in known and not known:
        # JAX may write another program for a single example.
        other = size if size > 1 else 2 if whole > 2 else 4
        traced = _trace(graph, other)
        if not _same_operators(graph, traced):
            # So may it where a single group of examples is left: try a larger size.
            larger = 2 * other if 2 * other != whole else 3 * other
            with contextlib.suppress(CaptureError, *TRACE_ERRORS):
                retraced = _trace(graph, larger)
                if _same_operators(graph, retraced):
                    other, traced = larger, retraced
        known[other] = traced
    if size not in known:
        # Deriving another size takes a moment; tracing it takes as long as tracing the step did.
        with contextlib.suppress(CaptureError):
            derived = resized(next(iter(known.values())), graph, size)
            known[size] = with_copies(derived, graph, size, graph.calling.cut_state or {})
    if size not in known:
        known[size] = _trace(graph, size)
    return known[size]


def _own_of_size(graph: Graph, size: int) -> Graph:
    if graph.split is not None:
        return split_scans(_own_of_size(graph.split.original, size), graph.split.bounds).graph
    known: dict[int, Graph] = graph.calling.own_traces
    if size not in known:
        traced = _trace(graph, size, own=True)
        if size == 1 and not _same_operators(graph, traced):
            traced = _own_of_one(graph, traced)
        known[size] = traced
    return known[size]


def _own_of_one(graph: Graph, traced: Graph) -> Graph:
    """The step on one example with the operators that JAX writes for several, as far as `traced`
    differs only in how elements are placed: JAX squeezes dims of size one. `traced` itself where
    that cannot be had.
    """
    if _arithmetic(graph) != _arithmetic(traced):
        return traced
    # Numbers that the user's code writes down are derived from two sizes, and compared with a
    # third.
    whole = batch_size(graph)
    try:
        small, large = _own_of_size(graph, 2), _own_of_size(graph, 3)
        third = graph if whole > 3 else _own_of_size(graph, 4)
        derived = own_of_one(small, large, third)
    except (CaptureError, *TRACE_ERRORS):
        return traced
    return with_copies(derived, graph, 1, graph.calling.cut_state or {})


# Beside operators that move elements: what JAX writes in another way where a dim has size one.
_PLACES = frozenset(
    {
        *("gather", "scatter", "scatter-add", "dynamic_update_slice"),
        *("concatenate", "pad", "iota", "reduce_sum"),
    }
)


_FLOATS = ("float", "bfloat", "complex")


def _arithmetic(graph: Graph) -> list[str]:
    """The operators that compute with floats, in program order."""
    found = []
    for op in graph.ops:
        if (
            op.name not in _PLACES
            and traits_of(op.name).moves is None
            and not op.is_link
            and any(graph.values[o].dtype.startswith(_FLOATS) for o in op.outputs if o >= 0)
        ):
            found.append(op.name)
    return found


def _trace(graph: Graph, size: int, *, own: bool = False) -> Graph:
    """The step traced on so many examples.

    Args:
        own: a step whose layers recompute has the numbers that its Python code writes down at that
            size; otherwise perhaps those of another.
    """
    as_written: Graph | None = graph.calling.as_written
    if as_written is not None:
        part = (_own_of_size if own else trace_of_size)(as_written, size)
        graph.calling.cut_state = as_written.calling.cut_state
        return with_recomputation(part, graph.calling.recompute.name, like=graph)
    if graph.calling.cut_state is None:
        graph.calling.cut_state, traced = find_cut_state(graph, size)
        return traced
    return trace_cut(graph, size, graph.calling.cut_state)


def align(whole: Graph, part: Graph, *, own: bool = False) -> tuple[Graph, dict[Call, Any]]:
    """The part's operators and values, with JAX's equations of its structured operators. Raises
    `CaptureError` if the programs differ.

    Args:
        own: keep the part's own literals, and let its loops turn less often; otherwise the part
            gets the literals of the whole.
    """
    for a, b in zip(whole.ops, part.ops):
        if (
            # The results' numbers are compared too, so that a number stands for the same value in
            # both traces.
            a.name != b.name
            or (a.trips != b.trips and not own)
            or a.outputs != b.outputs
            or not (
                len(a.inputs) == len(b.inputs)
                and all(
                    x == y if isinstance(x, int) else isinstance(y, Literal)
                    for x, y in zip(a.inputs, b.inputs)
                )
            )
        ):
            raise _different(whole, a, b)
        if not own and (change := _other_parameter(a, b)):
            raise _different(whole, a, b, change)
    if len(whole.ops) != len(part.ops) or len(whole.values) != len(part.values):
        raise _different(whole, whole.ops[-1], part.ops[-1])
    for a, b in zip(whole.ops, part.ops):
        for out in a.outputs:
            if out >= 0 and len(whole.values[out].shape) != len(part.values[out].shape):
                shapes = f"{whole.values[out].shape} becomes {part.values[out].shape}"
                raise _different(whole, a, b, f"the result of {describe(a)} of shape {shapes}")
    others = calls_of(part.body)
    eqns = {call: next(others).eqn for call in calls_of(whole.body)}
    if own:
        return part, eqns
    # Most operators read no literals, and are the part's own.
    ops = tuple(
        [
            (
                b
                if a.inputs == b.inputs and a.phase is b.phase
                # The whole's literals are kept: the divisor of a mean is that of the whole batch,
                # so that summands add up to its result.
                else structs.replace(a, eqn=b.eqn, params=b.params)
            )
            for a, b in zip(whole.ops, part.ops)
        ]
    )
    return replace(part, ops=ops), eqns


def _same_operators(whole: Graph, part: Graph) -> bool:
    return [op.name for op in whole.ops] == [op.name for op in part.ops]


# Parameters that follow from the shapes of operands and results, as a convolution's groups follow
# from the features of its operands, and those with an entry for each dim that do so where the dim
# has another size.
_OF_SHAPES = frozenset({"shape", "new_sizes", "sizes", "feature_group_count", "batch_group_count"})
_OF_DIMS = frozenset({"slice_sizes", "start_indices", "limit_indices", "padding_config", "reps"})


def _other_parameter(a: Op, b: Op) -> str:
    """A parameter that differs although no shape makes it differ, in words; "" if there is none.

    Functions and traced programs are not compared.
    """
    if a.params is b.params or a.eqn is None or b.eqn is None:
        return ""
    for key, x in a.params.items():
        y = b.params.get(key)
        # NaN equals itself here.
        is_equal = bool(x == y) or (x != x and y != y)
        if key in _OF_SHAPES or not (_is_plain(x) and _is_plain(y)) or is_equal:
            continue
        if key in _OF_DIMS and x is not None and y is not None and len(x) == len(y):
            pairs = [(a.eqn.invars[0].aval.shape, b.eqn.invars[0].aval.shape)]
            pairs.append((a.eqn.outvars[0].aval.shape, b.eqn.outvars[0].aval.shape))
            cut = set()
            for m, n in pairs:
                for d, (i, j) in enumerate(zip(m, n, strict=False)):
                    if i != j:
                        cut.add(d)
            if all(d in cut or x[d] == y[d] for d in range(len(x))):
                continue
        return (
            f"{describe(a)} has {key}={_written(x)} on the whole batch and {key}={_written(y)} on a"
            " micro-batch"
        )
    return ""


def _is_plain(value: Any) -> bool:
    """True for numbers, texts and sequences of these."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | np.number | enum.Enum)


def _written(value: Any) -> str:
    """A plain value as a user would write it."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_written, value))})"
    return str(value)


def _different(graph: Graph, a: Op, b: Op, change: str = "") -> CaptureError:
    change = change or f"{describe(a)} becomes {describe(b)}"
    if a.trips != b.trips and a.name == b.name:
        change = f"the loop with {describe(a)} runs {b.trips} instead of {a.trips} times"
    return CaptureError(
        f"{graph.name} is another program on a micro-batch than on the whole batch of"
        f" {batch_size(graph)}: {change}. Its Python code looks at the size of the batch, or it"
        " loops over the batch. Use num_micro_batches=1."
    )


def where(op: Op) -> str:
    """The user's line that an operator comes from, or its scope where JAX knows no line."""
    return source_line(op, short=False) or op.scope or "an unknown line"


def describe(op: Op, graph: Graph | None = None) -> str:
    """An operator as a reader finds it again: its name and the user's line or, if its graph is
    given, the nearest line that JAX knows: of what `jnp.cumsum` and others call it knows none.
    """
    near = "" if graph is None or source_line(op) else line_or_nearest(graph, op.index)
    return f"`{op.name}` {near or f'at {where(op)}'}"
