"""Operators of a split step: local ones once for each range, all others once, on whole arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._split_emission import Emission, Place, define, define_all, read, write
from ._split_equations import joint
from ._split_rows import Local, local_rule
from ._split_values import index_of
from ._types import NO_VALUE, Literal, Op, ValueId, value_ids


def write_operator(emission: Emission, op: Op, place: Place) -> None:
    """Write an operator of the old graph."""
    arrays = emission.arrays
    rule = None
    if not place.in_loop and not arrays.stacked.isdisjoint(value_ids((*op.inputs, *op.outputs))):
        rule = local_rule(op, emission.graph.values, arrays.rows)
    if rule is not None:
        operands = zip(op.inputs, rule.operands, strict=True)
        for v, has_rows in (*operands, *zip(op.outputs, rule.results, strict=True)):
            if isinstance(v, int) and has_rows and v in arrays.stacked:
                _write_local(emission, op, rule, place)
                return
    inputs = []
    for i, var in zip(op.inputs, op.eqn.invars, strict=True):
        inputs.append(read(emission, i, place, op, op.eqn, var.aval))
    outputs = [arrays.new(o) if o >= 0 else NO_VALUE for o in op.outputs]
    write(emission, op, place, op.eqn, inputs, outputs)
    define_all(emission, op.outputs, outputs, place, op, op.eqn)


def _write_local(emission: Emission, op: Op, rule: Local, place: Place) -> None:
    """Write an operator once for each range."""
    arrays = emission.arrays
    shared = []
    for i, has_rows, v in zip(op.inputs, rule.operands, op.eqn.invars, strict=True):
        shared.append(None if has_rows else read(emission, i, place, op, op.eqn, v.aval))
    if not rule.join:
        for old in op.outputs:
            if old >= 0:
                arrays.declare(old)
    partial = []
    for k, (start, stop) in enumerate(arrays.ranges):
        inputs = []
        for i, i_shared in zip(op.inputs, shared):
            inputs.append(arrays.parts(i)[k] if i_shared is None else i_shared)
        if not rule.join:
            outputs = [index_of(arrays.parts(o)[k]) if o >= 0 else NO_VALUE for o in op.outputs]
        else:
            partial.append(arrays.new(op.outputs[0]))
            outputs = partial[-1:]
        eqn = emission.equations.on_rows(op.eqn, rule, stop - start)
        # The operator numbers the rows of every range from 0.
        if rule.counts_rows and start:
            _count_from(emission, start, op, eqn, outputs[0], place)
        else:
            write(emission, op, place, eqn, inputs, outputs)
    if rule.join:
        # Combine the results of the ranges by a binary primitive.
        aval = op.eqn.outvars[0].aval
        total = partial[0]
        for other in partial[1:]:
            result = emission.arrays.new(op.outputs[0])
            joint_eqn = joint(op.eqn, rule.join, [aval, aval], aval, {})
            write(emission, op, place, joint_eqn, (total, other), (result,))
            total = result
        define(emission, op.outputs[0], total, place, op, op.eqn, aval)


def _count_from(
    emission: Emission, start: int, op: Op, eqn: Any, output: ValueId, place: Place
) -> None:
    """Write row numbers of a range that does not begin at zero."""
    arrays = emission.arrays
    local = arrays.new(op.outputs[0], arrays.values[output].shape[0])
    aval = eqn.outvars[0].aval
    dtype = np.dtype(aval.dtype)
    first = Literal(value=np.asarray(start, dtype)[()], shape=(), dtype=str(dtype))
    write(emission, op, place, eqn, (), (local,))
    add_eqn = joint(eqn, "add", [aval, aval.update(shape=())], aval, {})
    write(emission, op, place, add_eqn, (local, first), (output,))
