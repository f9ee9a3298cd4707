"""Contents of structured operators, and the operators by which messages name them; lookups by
position in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...graph import Call, Graph, Moves, Op, Phase, ops_inside, traits_of
from ._time_specs import TimeKind, TimeSpec

EFFECT = "it has an effect, which would happen for each micro-batch"
"""Why an operator that a loop runs for each part is refused."""

NOT_LINEAR = "it is not linear in a sum over the batch, and the examples need it"
"""Why an operator before the update cannot wait for the last part."""


def first_op(call: Call, graph: Graph) -> Op:
    """The operator that stands for a call in messages; one of its links where the body is empty."""
    for op in ops_inside(call):
        return graph.ops[op]
    results = set(call.outputs)
    return next(op for op in graph.ops if results & set(op.outputs))


def phase_of(call: Call, graph: Graph) -> Phase:
    """The phase of a structured operator; that of the update where its body is empty."""
    return next((graph.ops[op].phase for op in ops_inside(call)), Phase.UPDATE)


def indexed_dims(op: Op) -> tuple[int, ...]:
    """The dims of the array that the components of a lookup's indices stand for."""
    # JAX's names differ, but both say which dims of the array the index components count in.
    numbers = op.params["dimension_numbers"]
    dims: tuple[int, ...] = (
        numbers.start_index_map if op.name == "gather" else numbers.scatter_dims_to_operand_dims
    )
    return tuple(dims)


def indexes_own_examples(
    op: Op, specs: Sequence[TimeSpec], positions: Mapping[int, Sequence[bool]]
) -> bool:
    """True if an indexed array is split along a dim in which each index names its own example.

    Args:
        specs: of the operands.
        positions: of arrays of indices, for each column whether row k holds the number k.
    """
    if op.name != "gather" and not op.name.startswith("scatter"):
        return False
    index = op.inputs[1]
    if (
        specs[0].kind is not TimeKind.CONCATENATE
        or specs[1].kind is not TimeKind.CONCATENATE
        or not isinstance(index, int)
    ):
        return False
    indexed = indexed_dims(op)
    if specs[0].dim not in indexed or index not in positions:
        return False
    flags = positions[index]
    # One flag stands for all components where the index array was not put together from several.
    return flags[indexed.index(specs[0].dim)] if len(flags) > 1 else flags[0]


def keeps_positions(op: Op) -> bool:
    """True if the elements of its result along the batch are those of its operand: rearranged, cast
    or repeated.
    """
    moves = traits_of(op.name).moves
    return moves is not None and (moves.keeps_all or moves is Moves.REPEAT)


def numbers_examples(constant: Any, dim: int) -> bool:
    """True if an array of integers holds, along that dim, 0, 1, 2 and so on."""
    array = np.asarray(constant)
    if array.dtype.kind not in "iu":
        return False
    line = np.arange(array.shape[dim]).reshape([-1 if d == dim else 1 for d in range(array.ndim)])
    return bool((array == line).all())
