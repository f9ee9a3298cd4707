"""Casts of parameters to a narrower type, made once a step instead of once for each micro-batch.

Compilers make such a cast where it is read, in every turn of a loop over micro-batches and in every
task of a pipeline.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from ...graph import SHARED, Block, Call, Graph, Op, Operand, OpId, Phase, Role, StageId, ValueId
from ._micro_batch_graphs import MicroBatchGraphs, subgraph


def parameter_casts(graph: Graph) -> Mapping[OpId, OpId]:
    """The casts of parameters to narrower types, outside of loops and branches, each with the first
    one that has the same result: a region that the backward pass repeats has casts of its own.
    """
    parameters = {i.value for i in graph.inputs if i.role is Role.PARAMETER}
    first: dict[tuple[ValueId, str], OpId] = {}
    casts: dict[OpId, OpId] = {}
    for index in _operators(graph.body.items):
        op = graph.ops[index]
        if op.name != "convert_element_type" or op.phase is Phase.UPDATE or op.outputs[0] < 0:
            continue
        (read,), result = op.inputs, graph.values[op.outputs[0]]
        if read in parameters and isinstance(read, int):
            if result.itemsize < graph.values[read].itemsize:
                casts[index] = first.setdefault((read, result.dtype), index)
    return casts


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
    casts = {
        cast: first
        for cast, first in parameter_casts(graph).items()
        if graph.ops[cast].inputs[0] not in settled
        and stage_of.get(graph.ops[cast].outputs[0], SHARED) in stages
    }
    # A cast may have the result of one that stays where it is.
    firsts = {first for first in casts.values() if first in casts}
    casts = {cast: first for cast, first in casts.items() if first in firsts}
    if not casts:
        return parts
    instead = {
        graph.ops[cast].outputs[0]: graph.ops[first].outputs[0] for cast, first in casts.items()
    }
    made = sorted(graph.ops[first].outputs[0] for first in firsts)
    inputs = [i.value for i in graph.inputs]
    body = subgraph(
        replace(graph, ops=tuple(_reading(op, instead) for op in graph.ops)),
        [*inputs, *made],
        _without(graph.body.items, casts, instead),
        parts.crossing,
    )
    early = subgraph(
        parts.early,
        [i.value for i in parts.early.inputs],
        [*parts.early.body.items, *sorted(firsts)],
        [*parts.early_values, *made],
    )
    return replace(
        parts,
        early=early,
        body=replace(body, constants=graph.constants),
        early_values=(*parts.early_values, *made),
        inside=(*parts.inside, *made),
    )


def _reading(op: Op, instead: Mapping[ValueId, ValueId]) -> Op:
    inputs = _read(op.inputs, instead)
    return op if inputs == op.inputs else replace(op, inputs=inputs)


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
