"""Casts of parameters to a narrower type, made once a step instead of once for each micro-batch.

Compilers make such a cast where it is read, in every turn of a loop over micro-batches and in every
task of a pipeline.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import structs

from ...graph import (
    SHARED,
    Block,
    Call,
    Graph,
    Op,
    Operand,
    OpId,
    Phase,
    Role,
    StageId,
    ValueId,
    value_ids,
)
from ._micro_batch_graphs import MicroBatchGraphs, subgraph

_SCALING = frozenset({"convert_element_type", "mul", "div", "max", "min", "gt", "select_n"})


class ParameterCast(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter in a narrower type, scaled or not.

    Attributes:
        parameter: the parameter.
        reads: it, and the scalars that it is scaled by.
        ops: the operators that make it, the cast last.
        first: the first cast that has the same result.
    """

    parameter: ValueId
    reads: frozenset[ValueId]
    ops: tuple[OpId, ...]
    first: OpId


class _Made(msgspec.Struct, frozen=True, kw_only=True):
    """A value that is made of one parameter and scalars, or of scalars alone; equal ones have the
    same number.
    """

    number: int
    parameter: ValueId | None
    reads: frozenset[ValueId]
    ops: tuple[OpId, ...] = ()


# Cached, because several parts of a problem ask for the casts of one graph.
@functools.lru_cache(maxsize=2)
def parameter_casts(graph: Graph) -> Mapping[OpId, ParameterCast]:
    """The casts of parameters to narrower types, outside of loops and branches: of a region that
    the backward pass repeats, too. Of a cast to 8 bits the parameter may be scaled before, by
    scalars that do not depend on the batch; casts on the way to it that nothing else reads are left
    out.
    """
    numbers: dict[Any, int] = {}

    def number(key: Any) -> int:
        return numbers.setdefault(key, len(numbers))

    known: dict[ValueId, _Made] = {}
    for item in graph.inputs:
        is_scalar = not graph.values[item.value].shape
        if item.role is Role.PARAMETER or (item.role is not Role.BATCH and is_scalar):
            known[item.value] = _Made(
                number=number(item.value),
                parameter=None if is_scalar else item.value,
                reads=frozenset({item.value}),
            )
    casts: dict[OpId, _Made] = {}
    # Literals may not be hashable, and nothing makes them.
    others = graph.returned
    for index in _operators(graph.body.items):
        op = graph.ops[index]
        found = _made_by(op, graph, known, number)
        if found is None:
            others.update(value_ids(op.inputs))
            continue
        known[op.outputs[0]] = found
        if op.name == "convert_element_type" and found.parameter is not None:
            itemsize = graph.values[op.outputs[0]].itemsize
            is_direct = op.inputs[0] == found.parameter
            if itemsize < graph.values[found.parameter].itemsize and (is_direct or itemsize == 1):
                casts[index] = found
    others.update(value_ids(itertools.chain(*map(_taken, graph.body.items))))
    inner = set(itertools.chain(*(cast.ops[:-1] for cast in casts.values())))
    first: dict[int, OpId] = {}
    return {
        index: ParameterCast(
            parameter=cast.parameter,
            reads=cast.reads,
            ops=cast.ops,
            first=first.setdefault(cast.number, index),
        )
        for index, cast in casts.items()
        if cast.parameter is not None
        and (index not in inner or graph.ops[index].outputs[0] in others)
    }


def _made_by(
    op: Op, graph: Graph, known: Mapping[ValueId, _Made], number: Callable[[Any], int]
) -> _Made | None:
    """What an operator makes of one parameter, scaled by scalars; None for any other."""
    if op.name not in _SCALING or op.phase is Phase.UPDATE or min(op.outputs) < 0:
        return None
    read = value_ids(op.inputs)
    if not all(i in known for i in read):
        return None
    of = [known[i] for i in read]
    parameters = [made.parameter for made in of if made.parameter is not None]
    parameter = parameters[0] if parameters else None
    whole = () if parameter is None else graph.values[parameter].shape
    if len(set(parameters)) > 1 or graph.values[op.outputs[0]].shape != whole:
        return None
    operands = []
    for i in op.inputs:
        operands.append(known[i].number if isinstance(i, int) else (str(i.value), i.dtype))
    return _Made(
        number=number((op.name, str(op.params), *operands)),
        parameter=parameter,
        reads=frozenset().union(*(made.reads for made in of)),
        ops=(*sorted(set(itertools.chain(*(made.ops for made in of)))), op.index),
    )


def _taken(item: OpId | Call) -> Iterator[Operand]:
    """What calls other than remat regions read, and what regions return."""
    if isinstance(item, Call):
        if item.kind != "remat":
            yield from item.inputs
        for block in item.blocks:
            yield from block.outputs
            for inner in block.items:
                yield from _taken(inner)


def _operators(items: Iterable[OpId | Call]) -> Iterator[OpId]:
    """Operators at the top of a step and in its remat regions, in program order."""
    for item in items:
        if not isinstance(item, Call):
            yield item
        elif item.kind == "remat":
            yield from _operators(item.blocks[0].items)


def cast_once(
    parts: MicroBatchGraphs,
    stage_of: Mapping[ValueId, StageId] = MappingProxyType({}),
    stages: Container[StageId] = frozenset({SHARED}),
) -> MicroBatchGraphs:
    """The graphs of an exact cut with casts of parameters moved from the body to the early graph.

    Args:
        stage_of: for each value the stage that makes it; `SHARED` for those that every stage makes
            that reads them, and for all others.
        stages: those whose casts are moved; by default, without a pipeline, all.
    """
    graph = parts.body
    settled = {v for v, _ in (*parts.sliced, *parts.handed_on)}
    # Scalars that the early graph makes have its names.
    early = set(parts.early.input_values)
    early |= {v for v, made in zip(parts.inside, parts.early_values, strict=True) if v == made}
    casts = {}
    for cast, found in parameter_casts(graph).items():
        stage = stage_of.get(graph.ops[cast].outputs[0], SHARED)
        if found.reads <= early and settled.isdisjoint(found.reads) and stage in stages:
            casts[cast] = found
    # A cast may have the result of one that stays where it is.
    firsts = {made.first for made in casts.values() if made.first in casts}
    casts = {cast: made for cast, made in casts.items() if made.first in firsts}
    if not casts:
        return parts
    instead = {
        graph.ops[cast].outputs[0]: graph.ops[made.first].outputs[0] for cast, made in casts.items()
    }
    made = sorted(graph.ops[first].outputs[0] for first in firsts)
    ops = []
    for op in graph.ops:
        read = _read(op.inputs, instead)
        ops.append(op if read == op.inputs else structs.replace(op, inputs=read))
    body = subgraph(
        replace(graph, ops=tuple(ops)),
        [*graph.input_values, *made],
        _without(graph.body.items, casts, instead),
        parts.crossing,
    )
    there = {item for item in parts.early.body.items if not isinstance(item, Call)}
    moved = set(itertools.chain(*(casts[first].ops for first in firsts))) - there
    early_graph = subgraph(
        parts.early,
        parts.early.input_values,
        [*parts.early.body.items, *sorted(moved)],
        [*parts.early_values, *made],
    )
    return replace(
        parts,
        early=early_graph,
        body=replace(body, constants=graph.constants),
        early_values=(*parts.early_values, *made),
        inside=(*parts.inside, *made),
    )


def _read(operands: tuple[Operand, ...], instead: Mapping[ValueId, ValueId]) -> tuple[Operand, ...]:
    return tuple(instead.get(i, i) if isinstance(i, int) else i for i in operands)


def _without(
    items: Iterable[OpId | Call], gone: Container[OpId], instead: Mapping[ValueId, ValueId]
) -> list[OpId | Call]:
    """Items without some operators, whose results are read under other names."""
    kept: list[OpId | Call] = []
    for item in items:
        if isinstance(item, Call):
            blocks = tuple(
                Block(
                    inputs=block.inputs,
                    items=tuple(_without(block.items, gone, instead)),
                    outputs=_read(block.outputs, instead),
                )
                for block in item.blocks
            )
            kept.append(replace(item, inputs=_read(item.inputs, instead), blocks=blocks))
        elif item not in gone:
            kept.append(item)
    return kept
