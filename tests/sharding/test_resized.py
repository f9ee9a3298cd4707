"""A step worked out for another size of its batch against the trace on that size."""

import jax
import jax.numpy as jnp
import pytest

from aliquot.core import CaptureError
from aliquot.graph import capture, split_scans
from aliquot.sharding import layer_step, trace_part, traces_in_groups
from aliquot.sharding.micro_batches import _cut_state, _micro_batches, _traces
from aliquot.sharding.micro_batches._resized import resized
from aliquot.sharding.micro_batches._traces import _trace, align
from aliquot.zoo import build

SMALL = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "seq_len": 16, "vocab_size": 64}


@pytest.fixture(scope="module")
def step():
    workload = build("gpt-125m", 32, overrides=SMALL)
    return capture(workload.train_step, workload.state, workload.batch)


def operands(op):
    return [i if isinstance(i, int) else None for i in op.inputs]


def shapes_of(op):
    return [getattr(v.aval, "shape", None) for v in (*op.eqn.invars, *op.eqn.outvars)]


@pytest.mark.parametrize("parts", [2, 4, 16])
def test_operators_are_those_of_a_trace(step, parts):
    found, traced = resized(trace_part(step, 8), step, 32 // parts), _trace(step, 32 // parts)
    assert [v.shape for v in found.values] == [v.shape for v in traced.values]
    for a, b in zip(found.ops, traced.ops, strict=True):
        assert (a.name, operands(a), a.outputs, a.phase) == (
            b.name,
            operands(b),
            b.outputs,
            b.phase,
        )
        assert a.params.keys() == b.params.keys()
        assert all(str(a.params[k]) == str(b.params[k]) for k in a.params if "jaxpr" not in k)
        assert shapes_of(a) == shapes_of(b)


def test_layers_at_another_size_need_no_trace(step, monkeypatch):
    known = trace_part(step, 8)
    monkeypatch.setattr(_cut_state, "build_graph", lambda *args: pytest.fail("traced again"))
    assert layer_step(step, 8).part.values == known.values
    assert layer_step(step, 16).micro_batch_size == 2
    assert trace_part(step, 1) is step


@pytest.mark.parametrize("parts", [2, 4, 16, 32])
def test_whether_a_step_runs_in_groups_is_known_without_its_program(step, parts, monkeypatch):
    assert align(step, resized(trace_part(step, 8), step, 32 // parts))
    monkeypatch.setattr(_micro_batches, "align", lambda *args: pytest.fail("compared again"))
    monkeypatch.setattr(_traces, "trace_of_size", lambda *args: pytest.fail("worked out"))
    monkeypatch.setattr(_micro_batches, "_is_same_program", lambda *args: True)
    assert traces_in_groups(step, parts, 1)


def looks_at_its_size(w, x):
    def loss(w):
        return ((x @ w if x.shape[0] > 8 else jnp.tanh(x @ w)) ** 2).sum()

    return w - 0.1 * jax.grad(loss)(w)


@pytest.mark.parametrize("fn", [looks_at_its_size, lambda w, x: sizes_written_down(w, x)])
@pytest.mark.parametrize("first", [4, 16])
def test_groups_are_ruled_out_as_by_their_program(fn, first, monkeypatch):
    def answers():
        graph = capture(fn, jnp.ones((8, 8)), jax.ShapeDtypeStruct((64, 8), jnp.float32))
        return [traces_in_groups(graph, parts, 1) for parts in (first, 2, 4, 8, 16, 32, 64)]

    known = answers()
    monkeypatch.setattr(_micro_batches, "_resizes", lambda *args: False)
    assert known == answers()


def looks_at_its_size_in_layers(w, x):
    def loss(w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

    grads = jax.grad(loss)(w)
    return w - 0.1 * (jnp.sign(grads) if x.shape[0] > 8 else grads)


def in_layers(w, x):
    return w - 0.1 * jax.grad(lambda w: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0].sum())(w)


@pytest.mark.parametrize(
    ("fn", "first", "is_ruled_out"),
    [(in_layers, 4, False), (looks_at_its_size_in_layers, 16, True)],
)
def test_groups_are_ruled_out_for_ranges_of_layers_as_by_their_program(
    fn, first, is_ruled_out, monkeypatch
):
    numbers = (first, 2, 4, 8, 16, 32, 64)

    def ranges():
        batch = jax.ShapeDtypeStruct((64, 8), jnp.float32)
        graph = split_scans(capture(fn, jnp.ones((4, 8, 8)), batch), (0, 1, 4)).graph
        assert graph.split is not None
        return graph

    def is_same_program(graph, parts):
        try:
            align(graph, trace_part(graph, parts))
        except CaptureError:
            return False
        return True

    compared = ranges()
    wanted = [is_same_program(compared, parts) for parts in numbers]
    assert (False in wanted) == is_ruled_out
    known = ranges()
    monkeypatch.setattr(_traces, "split_scans", lambda *args: pytest.fail("cut again"))
    assert [traces_in_groups(known, parts, 1) for parts in numbers] == wanted


def sizes_written_down(w, x):
    return w - 0.1 * jax.grad(lambda w: (jnp.tanh(x @ w)[: x.shape[0] // 4] ** 2).sum())(w)


def test_steps_that_do_not_follow_the_batch_size_are_traced_again():
    graph = capture(
        sizes_written_down, jnp.ones((8, 8)), jax.ShapeDtypeStruct((64, 8), jnp.float32)
    )
    known = trace_part(graph, 4)
    with pytest.raises(CaptureError, match="size of the batch"):
        resized(known, graph, 6)
    assert trace_part(graph, 8).values == _trace(graph, 8).values
