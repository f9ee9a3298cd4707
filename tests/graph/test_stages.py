"""Stages of everything in a step, from those of its forward pass."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from graph.layered import layered
from graph.steps import STEPS

from aliquot.graph import (
    SHARED,
    Phase,
    Role,
    StageExtracts,
    capture,
    cut_layers,
    items_of,
    stage_layers,
)


def staged(**settings):
    graph = layered(4, **settings)
    return graph, stage_layers(graph, cut_layers(graph, layers="layers[*]"), [0, 2, 3, 4])


@pytest.fixture(scope="module")
def made():
    return staged()


@pytest.fixture(scope="module")
def skipping():
    return staged(skip=True)


def stages_of(staging, phase):
    return {
        o: s
        for i, s in zip(staging.items, staging.stage)
        if i.phase is phase and s != SHARED
        for o in i.outputs
    }


@pytest.mark.parametrize("which", ["made", "skipping"])
def test_the_forward_pass_goes_up_and_the_backward_pass_down(which, request):
    graph, staging = request.getfixturevalue(which)
    forward, backward = stages_of(staging, Phase.FORWARD), stages_of(staging, Phase.BACKWARD)
    for item, stage in zip(staging.items, staging.stage):
        if stage != SHARED and item.phase is Phase.FORWARD:
            assert all(forward.get(i, 0) <= stage for i in item.inputs)
        if stage != SHARED and item.phase is Phase.BACKWARD:
            assert all(backward.get(i, 3) >= stage for i in item.inputs)


@pytest.mark.parametrize("which", ["made", "skipping"])
def test_products_of_the_backward_pass_are_with_their_parameters(which, request):
    graph, staging = request.getfixturevalue(which)
    for phase, each in ((Phase.FORWARD, [2, 2, 2, 3]), (Phase.BACKWARD, [4, 4, 4, 6])):
        found = [0] * 4
        for item, stage in zip(staging.items, staging.stage):
            if item.phase is phase and graph.ops[item.op_or_call].name == "dot_general":
                found[stage] += 1
        assert found == each


def test_one_cotangent_crosses_each_cut_and_that_of_a_skip_connection(made, skipping):
    def crossing(staging):
        stages = stages_of(staging, Phase.BACKWARD)
        reads = {
            (i, stages[i], s)
            for item, s in zip(staging.items, staging.stage)
            if item.phase is Phase.BACKWARD and s != SHARED
            for i in item.inputs
            if stages.get(i, s) != s
        }
        return sorted((a, b) for _, a, b in reads)

    # The embedding's two gradients meet where it lies.
    assert crossing(made[1]) == [(1, 0), (2, 1), (3, 0), (3, 2)]
    assert len(crossing(skipping[1])) == 5 and set(crossing(made[1])) <= set(crossing(skipping[1]))


def test_state_lies_with_its_parameter(made):
    graph, staging = made
    inputs = {i.path: i for i in graph.inputs}
    for path, item in inputs.items():
        if item.role in (Role.PARAMETER, Role.OPTIMIZER_STATE) and graph.values[item.value].shape:
            number = int(path.split("layers[")[1][0]) if "layers[" in path else 0
            assert staging.home[item.value] == number, path
    # The result of each update is made where the input lies.
    stages = stages_of(staging, Phase.UPDATE)
    for item in graph.inputs:
        if item.role is Role.PARAMETER:
            assert stages[graph.outputs[item.output].value] == staging.home[item.value]
    assert staging.users[inputs["state.params.embed"].value] == {0, 3}
    assert staging.users[inputs["state.params.layers[1].up"].value] == {1}


def test_operators_between_scalars_are_shared_by_all_stages(made):
    graph, staging = made
    step = next(i for i in graph.inputs if i.path == "state.step")
    assert step.value not in staging.home
    (where,) = [
        s
        for item, s in zip(staging.items, staging.stage)
        if graph.outputs[step.output].value in item.outputs
    ]
    assert where == SHARED
    norms = [
        s
        for i, s in zip(staging.items, staging.stage)
        if graph.ops[i.op_or_call].name == "sqrt" and not i.outputs[1:]
    ]
    assert SHARED in norms


def test_each_stage_makes_the_constants_of_its_update_for_itself():
    def step(params, x):
        def loss(params):
            return functools.reduce(lambda x, w: jnp.tanh(x @ w), params, x).sum()

        grads = jax.grad(loss)(params)
        # An array that needs nothing, and that the update of every parameter reads.
        limit = jnp.full((8, 8), 0.5)
        return [w - jnp.minimum(g, limit) for w, g in zip(params, grads, strict=True)]

    graph = capture(step, [jnp.ones((8, 8))] * 4, jnp.ones((4, 8)))
    parts = StageExtracts(graph, stage_layers(graph, cut_layers(graph, layers=2), [0, 1]), {})
    shapes = [[part.graph.values[i.value].shape for i in part.graph.inputs] for part in parts]
    # Each parameter is read by one stage, with the update of its own, and nothing of their shape
    # comes from the other.
    assert sum(each.count((8, 8)) for each in shapes) == 4 and all((8, 8) in s for s in shapes)


def test_stages_are_extracted_when_they_are_asked_for():
    def step(params, x):
        return functools.reduce(lambda x, w: jnp.tanh(x @ w), params, x).sum()

    graph = capture(step, [jnp.ones((8, 8))] * 4, jnp.ones((4, 8)))
    layers = cut_layers(graph, layers=4)
    parts = StageExtracts(graph, stage_layers(graph, layers, range(4)), {})
    assert len(parts) == 4 and not parts._made
    assert parts[2] is parts[2] and list(parts._made) == [2]
    with pytest.raises(IndexError, match="stage 4 of 4"):
        parts[4]
    ops = [op for part in parts for op in part.ops]
    assert sorted(ops) == list(range(len(graph.ops)))
    assert parts[1:3] == (parts[1], parts[2])


@pytest.mark.parametrize("name", ["plain_gan", "plain_accumulation"])
def test_no_phase_reads_what_a_later_one_makes(name):
    made = STEPS[name]()
    graph = capture(made.fn, *made.args, **made.kwargs)
    seen = {}
    for item in items_of(graph):
        assert all(seen.get(i, Phase.FORWARD) <= item.phase for i in item.inputs)
        phase = Phase.FORWARD if item.phase is Phase.PROLOGUE else item.phase
        seen |= dict.fromkeys(item.outputs, phase)
