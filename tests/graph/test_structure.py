"""What must survive a replay besides the numbers: barriers, loops, their bodies, and what a hook
gets to see.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from graph.steps import STEPS, shapes

from aliquot.graph import ReplayHook, capture, evaluate


def programs(name):
    """The workload's graph, and the text of the plain and of the replayed step before
    compilation.
    """
    step = STEPS[name]()
    graph = capture(step.fn, *shapes(step.args), **step.kwargs)
    flat = graph.calling.flatten(step.args, step.kwargs)
    plain = jax.jit(step.fn).lower(*step.args, **step.kwargs).as_text()
    replayed = jax.jit(lambda arrays: evaluate(graph, arrays)).lower(list(flat.leaves)).as_text()
    return graph, plain, replayed


@pytest.mark.parametrize("name", [name for name in STEPS if "remat" in name])
def test_as_many_barriers(name):
    _, plain, replayed = programs(name)
    assert plain.count("optimization_barrier") > 0
    assert replayed.count("optimization_barrier") == plain.count("optimization_barrier")


@pytest.mark.parametrize(
    "name", ["scan_layers", "scan_layers_remat", "rnn_over_time", "while_and_cond"]
)
def test_as_many_loops_and_branches(name):
    _, plain, replayed = programs(name)
    for construct in ("stablehlo.while", "stablehlo.case"):
        assert replayed.count(construct) == plain.count(construct)


def test_remat_is_seen_through():
    """Operators in a remat region read the values outside under their own indices, and carry the
    region's number.
    """
    step = STEPS["remat_default"]()
    graph = capture(step.fn, *shapes(step.args))
    outside = {out for op in graph.ops if op.region == 0 for out in op.outputs} | {
        i.value for i in graph.inputs
    }
    inside = [op for op in graph.ops if op.region]
    assert {op.region for op in inside} == {1, 2, 3}
    assert any(i in outside for op in inside for i in op.inputs if isinstance(i, int))
    assert [call.kind for call in graph.body.items if not isinstance(call, int)] == ["remat"] * 3


def test_a_scan_is_one_body_with_a_multiplicity():
    step = STEPS["scan_layers"]()
    graph = capture(step.fn, *shapes(step.args))
    products = [op for op in graph.ops if op.name == "dot_general"]
    assert len(products) == 3 and all(op.trips == 3 for op in products)


def test_a_while_runs_an_unknown_number_of_times():
    graph = capture(
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x), jnp.ones(3)
    )
    assert [op.trips for op in graph.ops if op.name == "mul"] == [1]


class Recorder(ReplayHook):
    """Counts what it sees, and doubles the results of one operator."""

    def __init__(self, doubled=-1):
        self.before, self.after, self.values, self.doubled = [], [], [], doubled

    def operands(self, op, arrays):
        assert len(arrays) == len(op.inputs)
        self.before.append(op.index)
        return arrays

    def results(self, op, arrays):
        assert len(arrays) == len(op.outputs)
        self.after.append(op.index)
        return [2 * a for a in arrays] if op.index == self.doubled else arrays

    def value(self, index, array):
        self.values.append((index, array.shape))
        return array


@pytest.mark.parametrize(
    "name", ["remat_nested", "scan_layers_remat", "while_and_cond", "plain_accumulation"]
)
def test_the_hook_sees_every_operator(name):
    step = STEPS[name]()
    graph = capture(step.fn, *shapes(step.args))
    seen = Recorder()
    flat = graph.calling.flatten(step.args, step.kwargs)
    jax.make_jaxpr(lambda arrays: evaluate(graph, arrays, on_op=seen))(list(flat.leaves))
    assert set(seen.before) == {op.index for op in graph.ops if not op.is_link}
    assert seen.after == seen.before
    for index, shape in seen.values:
        assert graph.values[index].shape == shape


def test_the_hook_sees_carries_and_slices():
    graph = capture(
        lambda x: jax.lax.scan(lambda c, y: (c + y, c), jnp.zeros(2), x), jnp.ones((3, 2))
    )
    seen = Recorder()
    evaluate(graph, [jnp.ones((3, 2))], on_op=seen)
    # What the loop carries and slices, then what it leaves: its last carry and its stacked results.
    assert [shape for _, shape in seen.values] == [(2,), (2,), (2,), (3, 2)]


def test_results_of_replay_hooks_replace_the_values():
    def fn(x):
        return jax.checkpoint(lambda x: jnp.sin(x) + 1)(x)

    graph = capture(fn, jnp.ones(3))
    (sine,) = [op.index for op in graph.ops if op.name == "sin"]
    (out,) = evaluate(graph, [jnp.ones(3)], on_op=Recorder(doubled=sine))
    assert jnp.allclose(out, 2 * jnp.sin(1.0) + 1)


def test_a_shared_constant_is_one_value():
    table = jnp.arange(6.0)
    graph = capture(
        lambda x: jax.jit(lambda x: x + table)(x) * jax.jit(lambda x: x - table)(x), jnp.ones(6)
    )
    assert len(graph.constants) == 1


def test_prints_and_platform_branches_are_replayed(capfd):
    def fn(x):
        jax.debug.print("sum {s}", s=x.sum())
        return jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)

    graph = capture(fn, jnp.ones(3))
    (out,) = jax.jit(lambda x: evaluate(graph, [x]))(jnp.ones(3))
    jax.effects_barrier()
    assert jnp.allclose(out, jnp.sin(1.0)) and "sum 3.0" in capfd.readouterr().out
