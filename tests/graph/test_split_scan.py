"""A step whose layers are a scan, cut into ranges of layers, computes what it computed, on
pieces.
"""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from graph.layer_scans import (
    LAYERS,
    ROWS,
    SCANS,
    WIDTH,
    batch,
    block,
    params,
    plain,
    training,
)

from aliquot.core import InputError, known_xla_flags
from aliquot.graph import (
    Call,
    Literal,
    Phase,
    capture,
    cut_layers,
    evaluate,
    fold,
    range_layers,
    scans_over_layers,
    split_rows,
    split_scans,
)
from aliquot.zoo import build

BOUNDS = (0, 2, LAYERS)

# How often pieces are put together, and how often a whole is cut, in `SCANS`. Keys are drawn for
# all layers at once.
JOINTS = {"more_than_parameters": (0, 1), "layers_mixed": (1, 1), "searched": (2, 0)}
# Sums over all layers become sums of sums: the last bits may differ where such a sum is used.
ROUNDED = {"summed_auxiliary"}


def small(graph):
    """Random arrays for a graph's inputs, without running anything."""
    numbers = np.random.default_rng(0)
    leaves = graph.calling.call.leaves
    drawn = [
        numbers.integers(0, 16, x.shape) if x.dtype == "int32" else numbers.random(x.shape)
        for x in leaves
    ]
    return [a.astype(x.dtype) for a, x in zip(drawn, leaves, strict=True)]


def run(graph, arrays, emitters=False):
    """Outputs of a graph, compiled quickly rather than well."""
    lowered = jax.jit(lambda flat: evaluate(graph, flat)).lower(arrays)
    options = (
        {"xla_cpu_use_fusion_emitters": emitters}
        if known_xla_flags(["--xla_cpu_use_fusion_emitters"])
        else {}
    )
    return lowered.compile(compiler_options=options)(arrays)


def assert_splits(graph, bounds, arrays, rounded=False, emitters=False):
    """With the emitters of fusions, which compile slowly, more steps have the same last bits in
    pieces as in whole.
    """
    split = split_scans(graph, bounds)
    check_consistent(split.graph)
    got, want = (
        split.join(run(split.graph, split.cut(arrays), emitters)),
        run(graph, arrays, emitters),
    )
    for output, a, b in zip(graph.outputs, got, want, strict=True):
        assert a.dtype == b.dtype
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if rounded:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=output.path)
        else:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=output.path)
    return split


def check_consistent(graph):
    """Both views of a graph tell the same, and every value has one origin and the shape that its
    equation says.
    """
    assert [op.index for op in graph.ops] == list(range(len(graph.ops)))
    assert [v.index for v in graph.values] == list(range(len(graph.values)))
    known = {item.value for item in graph.inputs} | set(graph.constants)
    for op in graph.ops:
        assert all(i in known for i in op.inputs if isinstance(i, int)), (
            "an operator comes before what it reads"
        )
        for out in op.outputs:
            assert out < 0 or out not in known, "a value has two origins"
            known.add(out)
        if op.is_link:
            continue
        for operand, var in zip(op.inputs, op.eqn.invars, strict=True):
            shape = operand.shape if isinstance(operand, Literal) else graph.values[operand].shape
            assert shape == var.aval.shape or op.name == "add" and shape == ()
        for out, var in zip(op.outputs, op.eqn.outvars, strict=True):
            assert out < 0 or graph.values[out].shape == var.aval.shape
    assert known - {-1} == set(range(len(graph.values)))
    listed = list(items_of(graph.body))
    assert listed == [op.index for op in graph.ops if not op.is_link]
    assert [item.value for item in graph.inputs] == list(graph.body.inputs)
    assert [output.value for output in graph.outputs] == list(graph.body.outputs)


def items_of(body):
    """Positions of the operators in a nested view."""
    for item in body.items:
        if not isinstance(item, Call):
            yield item
            continue
        for inner in item.blocks:
            yield from items_of(inner)


@pytest.mark.parametrize("name", SCANS)
def test_same_numbers(name):
    step, state = SCANS[name]()
    graph = capture(step, state, batch())
    arrays = list(graph.calling.flatten((state, batch()), {}).leaves)
    split = assert_splits(graph, BOUNDS, arrays, rounded=name in ROUNDED)
    assert (len(split.joined), len(split.recut)) == JOINTS.get(name, (0, 0))
    assert (joints(split.graph) > joints(graph)) == bool(split.joined)


def test_passes_side_by_side():
    """A range of layers runs for both passes before the next begins; a pass that begins where
    another ends is refused.
    """
    step, state = SCANS["side_by_side"]()
    layers = range_layers(split_scans(capture(step, state, batch()), BOUNDS).graph)
    assert layers.names == ("layers[0..1]", "layers[2..4]")
    # What crosses are the rows of both batches.
    assert layers.boundary_bytes == (2 * ROWS * WIDTH * 4, 0)
    forward = [layers.items[k].op_or_call for k in layers.forward]
    scans = [k for k, op_or_call in enumerate(forward) if isinstance(op_or_call, Call)]
    assert [forward[k].eqn.params["length"] for k in scans] == [2, 2, 3, 3]
    assert layers.starts == (0, scans[2])
    step, state = SCANS["twice"]()
    with pytest.raises(InputError, match="of which one reads what another has made"):
        range_layers(split_scans(capture(step, state, batch()), BOUNDS).graph)


def joints(graph):
    """How often rows are put together."""
    return sum(op.name == "concatenate" and op.params["dimension"] == 0 for op in graph.ops)


def zoo(model, dtype="float32", recompute="none", layers=3, global_batch=4, **settings):
    sizes = {
        "num_layers": layers,
        "hidden_size": 8,
        "num_heads": 2,
        "ffn_size": 16,
        "seq_len": 4,
        "vocab_size": 16,
    }
    work = build(
        model,
        global_batch,
        overrides=sizes,
        dtype=dtype,
        recompute=recompute,
        scan=True,
        optimizer="adamw",
        **settings,
    )
    return capture(work.train_step, work.state, work.batch)


@pytest.fixture
def clipped(monkeypatch):
    """AdamW under a clipped global norm in place of AdamW."""
    from aliquot.zoo import _update

    chain = optax.chain(optax.clip_by_global_norm(1e6), optax.adamw(1e-3))
    monkeypatch.setitem(_update.OPTIMIZERS, "adamw", lambda *_: chain)


@pytest.mark.parametrize(
    ("model", "dtype", "recompute"),
    [
        ("gpt-125m", "float32", "block"),
        pytest.param("llama-7b", "bf16", "none", marks=pytest.mark.slow),
    ],
)
def test_zoo_same_numbers(clipped, model, dtype, recompute):
    graph = zoo(model, dtype, recompute)
    assert_splits(graph, (0, 1, 3), small(graph), emitters=True)


@pytest.mark.parametrize("model", ["gpt-125m", "llama-7b"])
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_zoo_needs_no_joints(clipped, model, dtype, recompute):
    graph = zoo(model, dtype, recompute, layers=8)
    split = split_scans(graph, (0, 3, 8))
    check_consistent(split.graph)
    assert split.joined == split.recut == ()
    names = Counter(op.name for op in split.graph.ops if op.trips == 1)
    assert names["concatenate"] == names["slice"] == names["dynamic_slice"] == 0
    # Two scans forward and two backward, all else only where arrays are stacked.
    assert [op.trips for op in split.graph.ops if op.name == "scan_slice"][0] == 3
    assert {op.trips for op in split.graph.ops} == {1, 3, 5}
    layers = [item for item in graph.inputs if ".layers." in item.path]
    assert len(split.graph.inputs) == len(graph.inputs) + len(layers)


class _Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)


def test_state_of_layers_in_place():
    """Running statistics and keys of each layer, changed in place, are cut with its parameters."""
    layers = nnx.vmap(_Layer)(nnx.Rngs(0).split(LAYERS))
    optimizer = nnx.Optimizer(layers, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def apply(layer, x):
        return x + layer.dropout(layer.norm(layer.linear(x)))

    def train_step(layers, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda layers: jnp.mean(apply(layers, x) ** 2))(layers)
        optimizer.update(layers, grads)
        return loss

    x = batch()["x"]
    graph = capture(train_step, layers, optimizer, x)
    arrays = list(graph.calling.flatten((layers, optimizer, x), {}).leaves)
    split = assert_splits(graph, BOUNDS, arrays, emitters=True)
    assert split.joined == split.recut == ()
    paths = [item.path for item in split.graph.inputs]
    assert {"layers.norm.mean[2:5]", "layers.dropout.rngs.key[0:2]"} <= set(paths)


def test_pieces_are_named_and_linked():
    graph = zoo("gpt-125m", layers=3)
    split = split_scans(graph, (0, 2, 3))
    paths = [item.path for item in split.graph.inputs]
    assert (
        "state.params.layers.attn.q.kernel[0:2]" in paths
        and "state.params.layers.attn.q.kernel[2:3]" in paths
    )
    for old, pieces in zip(graph.inputs, split.split.inputs, strict=True):
        for piece in pieces:
            item = split.graph.inputs[piece.position]
            assert item.role == old.role and item.path.startswith(old.path)
            rows = split.graph.values[item.value].shape[:1]
            assert piece.stop is None or rows == (piece.stop - piece.start,)
            if old.output is not None:
                assert split.graph.outputs[item.output].path.endswith(item.path[len(old.path) :])
    assert [piece.position for pieces in split.split.outputs for piece in pieces] == list(
        range(len(split.graph.outputs))
    )


def test_phases_are_kept():
    graph = zoo("gpt-125m", layers=4)
    split = split_scans(graph, (0, 2, 4))
    before = Counter((op.name, op.phase) for op in graph.ops if op.trips > 1)
    after = Counter((op.name, op.phase) for op in split.graph.ops if op.trips > 1)
    assert after == Counter({key: 2 * count for key, count in before.items()})
    assert {op.phase for op in split.graph.ops if op.name == "sqrt"} <= {Phase.UPDATE}


@pytest.mark.parametrize("model", ["gpt-125m", "llama-7b"])
def test_layers_begin_between_pieces(model):
    """Every range can be a layer of its own, named by its rows."""
    bounds = (0, 3, 4, 6, 8)
    layers = cut_layers(split_scans(zoo(model, layers=8), bounds).graph)
    names = [f"state.params.layers[{a}:{b}]" for a, b in zip(bounds, bounds[1:])]
    assert list(layers.names[:4]) == names
    assert len(set(layers.boundary_bytes[:3])) == 1


def test_equal_pieces_fold():
    """Cutting eight layers into four ranges leaves hardly more classes than two ranges have."""
    graph = zoo("gpt-125m", layers=8)
    classes = {
        n: len(fold(split_scans(graph, range(0, 9, 8 // n)).graph).members) for n in (1, 2, 4)
    }
    assert classes[4] < 1.1 * classes[2] < 1.3 * classes[1]


@pytest.mark.parametrize("name", SCANS)
def test_batch_size_changes_nothing(name):
    """Another batch splits operator by operator alike, even one of as many examples as there are
    layers.
    """
    step, state = SCANS[name]()
    whole, part = (
        split_scans(capture(step, state, batch(rows)), BOUNDS).graph
        for rows in (2 * LAYERS, LAYERS)
    )
    assert len(whole.values) == len(part.values)
    for a, b in zip(whole.ops, part.ops, strict=True):
        assert (a.name, a.trips, a.outputs, a.phase) == (b.name, b.trips, b.outputs, b.phase)
        assert [i for i in a.inputs if isinstance(i, int)] == [
            i for i in b.inputs if isinstance(i, int)
        ]


def test_one_range_changes_only_names():
    step, state = SCANS["plain"]()
    graph = capture(step, state, batch())
    split = split_scans(graph, (0, LAYERS))
    assert [op.name for op in split.graph.ops] == [op.name for op in graph.ops]
    assert [op.phase for op in split.graph.ops] == [op.phase for op in graph.ops]


def accumulating(state, data):
    """The user's own micro-batches."""

    def one(total, part):
        grads = jax.grad(plain)(state["params"], part)
        return jax.tree.map(jnp.add, total, grads), None

    halves = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), data)
    total, _ = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, state["params"]), halves)
    return {"params": jax.tree.map(lambda a, g: a - 0.1 * g, state["params"], total)}


def encoder_decoder():
    step, state = training(
        lambda p, data: two_scans(p, data), lambda p, g: jax.tree.map(lambda a, b: a - b, p, g)
    )
    state["params"]["encoder"] = params()["w"][:2]
    return capture(step, state, batch())


def two_scans(p, data):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), data["x"], p["encoder"])
    return plain(p, {**data, "x": x})


def test_scans_over_layers():
    graph = encoder_decoder()
    found = scans_over_layers(graph)
    assert [scan.length for scan in found] == [2, LAYERS]
    for scan in found:
        inside = graph.ops[scan.start : scan.stop]
        assert {op.trips for op in inside} == {1, scan.length} and "dot_general" in [
            op.name for op in inside
        ]
        assert all(op.phase is not Phase.BACKWARD for op in inside)
        assert graph.ops[scan.start].name == "tie" and graph.ops[scan.stop - 1].name in (
            "tie",
            "scan_stack",
        )
    assert found[0].stop <= found[1].start


def test_other_lengths_stay():
    graph = encoder_decoder()
    split = split_scans(graph, BOUNDS)
    check_consistent(split.graph)
    assert {op.trips for op in split.graph.ops} == {1, 2, 3}
    assert "state.params.encoder" in [item.path for item in split.graph.inputs]
    # Both lengths, one after the other: what is left of the first cut is no scan over as many
    # layers.
    assert [scan.length for scan in scans_over_layers(split.graph)] == [2, 2, 3]


def by_vmap(key):
    """Parameters of all layers at once, their moments, and one more array."""
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.arange(LAYERS))
    w = jax.vmap(lambda k: nnx.initializers.truncated_normal()(k, (3, 2)))(keys)
    return w, jnp.zeros_like(w), jax.random.normal(key, (3,)), np.arange(float(LAYERS))


def by_map(key):
    w = jax.lax.map(lambda k: jax.random.normal(k, (3, 2)), jax.random.split(key, LAYERS))
    return w, w.astype(jnp.bfloat16), jax.random.normal(key, (3,)), jnp.ones((LAYERS, 2))


@pytest.mark.parametrize("fn", [by_vmap, by_map])
def test_rows_of_any_function(fn):
    """A function that makes stacked parameters makes each range by itself, without a step around
    it.
    """
    graph = capture(fn, jax.random.key(0))
    split = split_rows(graph, BOUNDS, [0, 1, 3])
    check_consistent(split.graph)
    assert [len(pieces) for pieces in split.split.outputs] == [2, 2, 1, 2]
    for a, b in zip(
        split.join(run(split.graph, [jax.random.key(0)])),
        run(graph, [jax.random.key(0)]),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    # Only keys, their numbers and constants are ever there for all layers.
    whole = [v for v in split.graph.values if v.shape[:1] == (LAYERS,)]
    assert all(v.dtype.startswith("key") or len(v.shape) == 1 for v in whole)


def no_scan(p, data):
    for k in range(LAYERS):
        data = {**data, "x": block(data["x"], {"w": p["w"][k], "b": p["b"][k]})[0]}
    return jnp.mean(data["x"])


@pytest.mark.parametrize(
    ("make", "bounds", "message"),
    [
        (
            SCANS["plain"],
            (0, 3),
            (
                r"Ranges of 3 layers were asked for, but train_step scans over 5 .* Let bounds end"
                r" at 5"
            ),
        ),
        (SCANS["plain"], (1, 5), r"bounds=\(1, 5\) are no ranges .* increase from 0"),
        (SCANS["plain"], (0, 3, 3, 5), "must increase"),
        (SCANS["plain"], (0, 2.5, 5), "must increase"),
        (SCANS["plain"], (5,), "must increase"),
        (lambda: training(no_scan), (0, 2, 5), "has no scan over layers.* jax.lax.scan"),
        (
            lambda: (accumulating, {"params": params()}),
            (0, 2, 5),
            "inside another loop.* num_micro_batches",
        ),
    ],
)
def test_refusals(make, bounds, message):
    step, state = make()
    with pytest.raises(InputError, match=message):
        split_scans(capture(step, state, batch()), bounds)
