"""Every workload of the table is captured as it is: roles, successors, phases, results."""

from __future__ import annotations

from collections import Counter

import pytest
from graph.steps import STEPS, shapes

from aliquot.graph import Phase, Role, capture

MADE: dict[str, object] = {}


def captured(name):
    """The workload and its graph, each made once."""
    if name not in MADE:
        step = STEPS[name]()
        MADE[name] = step, capture(step.fn, *shapes(step.args), **shapes(step.kwargs))
    return MADE[name]


@pytest.fixture(params=STEPS)
def workload(request):
    return captured(request.param)


def test_roles(workload):
    step, graph = workload
    assert Counter(str(item.role) for item in graph.inputs) == Counter(step.roles)


def test_state_has_successors(workload):
    """All that a step learns or keeps comes back in its shape, each from an output of its own;
    nothing else does.
    """
    step, graph = workload
    without = [
        item.path
        for item in graph.inputs
        if item.output is None and item.role not in (Role.BATCH, Role.OTHER)
    ]
    assert sorted(without) == sorted(step.stateless)
    positions = [item.output for item in graph.inputs if item.output is not None]
    assert len(set(positions)) == len(positions)
    for item in graph.inputs:
        if item.output is not None:
            assert item.role not in (Role.BATCH, Role.OTHER)
            old, new = graph.values[item.value], graph.outputs[item.output].value
            new = graph.values[new] if isinstance(new, int) else new
            assert (old.shape, old.dtype) == (new.shape, new.dtype)


def test_paths_are_unique(workload):
    _, graph = workload
    assert len({i.path for i in graph.inputs}) == len(graph.inputs)


def test_number_of_results(workload):
    step, graph = workload
    assert graph.calling.num_results == step.results
    assert len(graph.outputs) == len(graph.calling.out_paths)


def test_phases(workload):
    step, graph = workload
    phases = {op.phase for op in graph.ops}
    if not step.trains:
        assert phases == {Phase.FORWARD}
        return
    assert {Phase.FORWARD, Phase.BACKWARD} <= phases
    made_by = {out: op for op in graph.ops for out in op.outputs if out >= 0}
    for op in graph.ops:
        for operand in op.inputs:
            source = made_by.get(operand)
            if source is not None and op.phase is Phase.PROLOGUE and not source.is_link:
                assert source.phase is Phase.PROLOGUE


def test_gradients_cross_from_backward_to_update(workload):
    step, graph = workload
    if step.gradients is None:
        pytest.skip("the crossing values are no plain gradients here")
    made_by = {out: op for op in graph.ops for out in op.outputs if out >= 0}
    crossing = {
        i
        for op in graph.ops
        if op.phase is Phase.UPDATE
        for i in op.inputs
        if isinstance(i, int) and i in made_by and made_by[i].phase is Phase.BACKWARD
    }
    assert len(crossing) == step.gradients


def test_blocks_hold_every_operator_once(workload):
    _, graph = workload
    seen = []

    def walk(block):
        for item in block.items:
            if isinstance(item, int):
                seen.append(item)
            else:
                for inner in item.blocks:
                    walk(inner)

    walk(graph.body)
    assert sorted(seen) == [op.index for op in graph.ops if not op.is_link]
