"""The memory that arrays lie in, as it is captured: host memory only where a step says so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from offloaded import batch_of, offloaded_step, shapes_of

from aliquot.core import CaptureError
from aliquot.graph import Memory, Role, capture, evaluate, interface_fingerprint

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def copies(graph):
    """The direction of each copy between memories."""
    return [graph.values[op.outputs[0]].memory for op in graph.ops if op.name == "device_put"]


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("policy", ["names", "dots"])
def test_offloaded_activations_lie_in_host_memory(policy, scan):
    step, init = offloaded_step(policy, scan=scan)
    graph = capture(step, init(jax.random.key(0)), batch_of())
    there, back = (copies(graph).count(memory) for memory in (Memory.HOST, Memory.DEVICE))
    assert there == back > 0
    stacks = [op.outputs[0] for op in graph.ops if op.name == "scan_stack"]
    assert scan == any(graph.values[v].memory is Memory.HOST for v in stacks)


def test_a_policy_that_saves_offloads_nothing():
    step, init = offloaded_step("save")
    graph = capture(step, init(jax.random.key(0)), batch_of())
    assert {value.memory for value in graph.values} == {Memory.DEVICE}


def test_state_lies_where_its_arrays_do():
    step, init = offloaded_step("save", moments="host")
    state = init(jax.random.key(0))
    graph = capture(step, shapes_of(state, "host"), batch_of())
    momentum = [i for i in graph.inputs if i.path.startswith("state['momentum']")] or [
        i for i in graph.inputs if "momentum" in i.path
    ]
    assert [graph.values[i.value].memory for i in momentum] == [Memory.HOST] * 2
    assert all(i.role is Role.OPTIMIZER_STATE and i.output is not None for i in momentum)
    assert [graph.values[graph.outputs[i.output].value].memory for i in momentum] == [
        Memory.HOST
    ] * 2
    there, _ = offloaded_step("save")
    assert interface_fingerprint(graph) != interface_fingerprint(capture(there, state, batch_of()))


def test_placements_on_devices_are_left_to_the_plan():
    def step(x):
        return jax.device_put(x, jax.devices()[0]) * 2, jax.device_put(x, jax.devices()[1])

    graph = capture(step, jnp.ones(3))
    assert [op.name for op in graph.ops] == ["mul"]
    assert graph.outputs[1].value == graph.inputs[0].value


def test_several_arrays_are_copied_one_by_one():
    def step(x, y):
        moved = jax.device_put((x, y), HOST)
        return jax.device_put(moved, DEVICE)

    x, y = jnp.arange(3.0), jnp.arange(4.0)
    graph = capture(step, x, y)
    assert copies(graph) == [Memory.HOST] * 2 + [Memory.DEVICE] * 2
    assert all(len(op.inputs) == 1 for op in graph.ops)
    assert [a.tolist() for a in evaluate(graph, [x, y])] == [x.tolist(), y.tolist()]


def test_work_on_arrays_in_host_memory_is_refused():
    def step(x):
        kept = jax.device_put(x, HOST)
        return kept * 2, jnp.sum(kept), kept.reshape(-1), kept[0]

    with pytest.raises(CaptureError, match="computes on arrays in host memory") as refused:
        capture(step, jnp.ones((3, 4)))
    message = str(refused.value)
    assert "2 problems" in message
    assert "`mul` makes float32[3, 4] at test_memory.py" in message
    assert "`reduce_sum` makes float32[]" in message
    assert "jax.device_put(x, jax.memory.Space.Device)" in message
