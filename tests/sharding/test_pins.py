"""Where sums land on their way to their users, against what the compiler makes of it; and which
arrays are pinned.
"""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from aliquot import zoo
from aliquot.cluster import TARGETS, Cluster, SumCollective
from aliquot.cost import make_problem
from aliquot.graph import capture
from aliquot.planners import ManualParallel, ShardParallel, Zero2Parallel
from aliquot.runtime import find_collectives
from aliquot.sharding import (
    PARTIAL,
    REPLICATED,
    dims_of,
    make_pins,
    reshard,
    result_fraction,
    without_partial,
)
from aliquot.sharding._pins import _result_constraints
from aliquot.sharding._reshard import spec_after_sums

R, P, Q = REPLICATED, PARTIAL, PARTIAL - 1
AXES, SIZES = ("x", "y"), (4, 2)
# How a weight's gradient is partial: over both axes by the batch dim, or by one dim each.
OPERANDS = {(P, P): (("x", "y"), None), (P, Q): ("x", "y")}


@pytest.mark.parametrize("source", OPERANDS)
@pytest.mark.parametrize("target", [(R, R), (0, 1), (0, 0), (0, R), (R, 1)])
def test_sums_are_finished_by_the_collectives_that_are_priced(source, target, mesh):
    wanted = without_partial(target)
    devices = mesh(*SIZES)

    def sharding(spec):
        return NamedSharding(
            devices, PartitionSpec(*[axes or None for axes in dims_of(spec, AXES, 2)])
        )

    def gradient(x, dy):
        dw = jnp.einsum("bsd,bse->de", x, dy)
        for spec in (spec_after_sums(source, wanted, SumCollective.ALL_REDUCE), wanted):
            dw = jax.lax.with_sharding_constraint(dw, sharding(spec))
        return dw

    batch = NamedSharding(devices, PartitionSpec(*OPERANDS[source]))
    shape = jax.ShapeDtypeStruct((32, 64, 128), jnp.float32)
    step = jax.jit(gradient, in_shardings=(batch, batch), out_shardings=sharding(wanted))
    text = step.lower(shape, shape).compile().as_text()
    found = [
        math.prod(map(int, dims.split(","))) / 128**2
        for dims in re.findall(r"= f32\[([\d,]+)\]\S* all-reduce\(", text)
    ]
    moves = reshard(source, target, SIZES, SumCollective.ALL_REDUCE)
    assert {m.kind for m in moves} == {"all-reduce"}
    assert sorted(found) == sorted(m.fraction for m in moves)


def test_a_reduce_scatter_is_asked_for_the_split_at_once():
    assert spec_after_sums((P, 1), (0, 1), SumCollective.REDUCE_SCATTER) == (0, 1)
    assert spec_after_sums((P, P), (0, 1), SumCollective.ALL_REDUCE) == (R, R)


@pytest.mark.parametrize("target", [(0, 0), (0, R), (0, 1)])
@pytest.mark.parametrize("source", [(P, 0), (P, 1)])
def test_reduce_scatters_subdivide_tiles_of_a_split_dim(source, target, mesh):
    """Asked for the mesh's order at once, XLA gathers the operands of the product instead."""
    devices = mesh(*SIZES)
    chain, minor = _result_constraints([source, target], (64, 128), SIZES, SumCollective.ALL_REDUCE)
    rows, columns = (("y", None) if source[1] == split else (None, None) for split in (0, 1))

    def sharding(*dims):
        return NamedSharding(devices, PartitionSpec(*dims))

    def product(x, w):
        y = x @ w
        for number, spec in enumerate(chain):
            dims = dims_of(spec, AXES, 2, () if number else minor)
            y = jax.lax.with_sharding_constraint(y, sharding(*dims))
        return y

    shardings = sharding(rows[0], "x"), sharding("x", columns[0])
    shapes = (
        jax.ShapeDtypeStruct((64, 256), jnp.float32),
        jax.ShapeDtypeStruct((256, 128), jnp.float32),
    )
    step = jax.jit(
        product, in_shardings=shardings, out_shardings=sharding(*dims_of(target, AXES, 2))
    )
    found = find_collectives(step.lower(*shapes).compile().as_text(), AXES, SIZES)
    moves = reshard(source, target, SIZES, SumCollective.ALL_REDUCE)
    predicted = [(m.kind, round(4 * 64 * 128 * result_fraction(m, SIZES))) for m in moves]
    assert sorted((c.kind, c.num_bytes) for c in found) == sorted(predicted)


def test_sums_are_scattered_along_one_dim_and_then_exchanged():
    """Compilers of GPUs all-reduce the whole array if asked for several dims at once."""
    assert spec_after_sums((P, P), (0, 1), SumCollective.REDUCE_SCATTER) == (0, 0)
    assert spec_after_sums((P, P), (1, 0), SumCollective.REDUCE_SCATTER) == (1, 1)
    assert spec_after_sums((P, P, P), (1, R, 0), SumCollective.REDUCE_SCATTER) == (1, R, 1)
    for target in ((0, 1), (1, 0)):
        moves = reshard((P, P), target, SIZES, SumCollective.REDUCE_SCATTER)
        assert [(m.kind, m.axes) for m in moves] == [
            ("reduce-scatter", (0, 1)),
            ("all-to-all", (1,)),
        ]
        assert [m.fraction for m in moves] == [1.0, 1 / 8]


def test_products_run_on_pieces_where_the_compiler_has_no_reduce_scatter():
    def step(w, moment, batch):
        moment = moment + jax.grad(lambda w: jnp.tanh(batch @ w).sum())(w)
        return w - moment, moment

    weight, batch = (
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
        jax.ShapeDtypeStruct((128, 64), jnp.float32),
    )
    problem = make_problem(capture(step, weight, weight, batch), Cluster.preset("8xcpu"))
    decision = Zero2Parallel().solve(problem)
    choices = decision.picked.choices
    for kind, waiting, expected in (
        ("cpu", (), [True]),
        ("tpu", (), []),
        ("cpu", (0,), []),
    ):
        target = TARGETS[kind]
        pins = make_pins(problem.graph, problem.nodes, choices, (8,), target, data_axes=waiting)
        found = [
            (op.name, pins.of(op))
            for op in problem.graph.ops
            if (pin := pins.of(op)) and pin.on_pieces
        ]
        assert [pin.on_pieces for _, pin in found] == expected
        assert all(name == "dot_general" and max(pin.results[0][0]) >= 0 for name, pin in found)
        assert pins.wide_sums is not target.reduce_scatter


@pytest.mark.parametrize(
    ("split", "expected"), [(("y", None), 2), ((("x", "y"), None), 0), ((None, None), 0)]
)
def test_terms_of_a_sum_run_on_pieces_where_it_is_scattered_in_part(split, expected):
    """A compiler that makes reduce-scatters merges only the all-reduces of several such terms."""

    def step(up, gate, last, batch):
        return 0.9 * last + jnp.tanh(batch @ up + batch @ gate)

    weight, rows = (
        jax.ShapeDtypeStruct((256, 64), jnp.float32),
        jax.ShapeDtypeStruct((128, 256), jnp.float32),
    )
    last = jax.ShapeDtypeStruct((128, 64), jnp.float32)
    problem = make_problem(capture(step, weight, weight, last, rows), Cluster.preset("8xV100-16GB"))
    specs = {
        "up": (("x", "y"), None),
        "gate": (("x", "y"), None),
        "batch": (None, ("x", "y")),
        "last": split,
    }
    decision = ManualParallel(specs=specs, mesh_shape=(4, 2)).solve(problem)
    choices = decision.picked.choices
    pins = make_pins(problem.graph, problem.nodes, choices, (4, 2), TARGETS["tpu"])
    assert sum(pin.on_pieces for op in problem.graph.ops if (pin := pins.of(op))) == expected


def test_an_array_is_pinned_where_a_product_reads_it_split_otherwise():
    def step(w, batch):
        hidden = jnp.tanh(batch) * 2.0
        return (hidden @ w).sum()

    graph = capture(
        step,
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
    )
    problem = make_problem(graph, Cluster.preset("8xcpu"))
    decision = ShardParallel(mesh_shape=(8,)).solve(problem)
    multiply = next(op for op in graph.ops if op.name == "mul")
    product = next(op for op in graph.ops if op.name == "dot_general")
    nodes = {node.label: node.index for node in problem.nodes.nodes}
    choices = list(decision.picked.choices)
    batch_node = problem.nodes.input_ports[1].node
    for batch_factor, pinned in ((0, True), (-1, True)):
        choices[batch_node] = (batch_factor,)
        choices[nodes[f"dot_general:{product.index}"]] = (-1,) if batch_factor == 0 else (0,)
        chain = (
            make_pins(graph, problem.nodes, choices, (8,), TARGETS["tpu"]).of(multiply).results[0]
        )
        assert bool(chain) is pinned
    choices[nodes[f"dot_general:{product.index}"]] = (-1,)
    assert (
        make_pins(graph, problem.nodes, choices, (8,), TARGETS["tpu"]).of(multiply).results[0] == ()
    )


def test_operands_of_remat_regions_are_pinned():
    def step(w, batch):
        hidden = jnp.tanh(batch)
        return jax.grad(lambda w: jax.checkpoint(lambda w, h: jnp.sin(h @ w))(w, hidden).sum())(w)

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    graph = capture(step, shape, shape)
    problem = make_problem(graph, Cluster.preset("8xcpu"))
    decision = ShardParallel(mesh_shape=(8,)).solve(problem)
    choices = decision.picked.choices
    pins = make_pins(graph, problem.nodes, choices, (8,), TARGETS["tpu"])
    (region,) = [item for item in graph.body.items if not isinstance(item, int)]
    taken = {i for i in region.blocks[0].inputs if isinstance(i, int)}
    tanh = next(op for op in graph.ops if op.name == "tanh")
    assert {graph.inputs[0].value, tanh.outputs[0]} <= taken & set(pins.values)


def test_weights_are_pinned_where_a_loop_keeps_them_split_otherwise():
    """What a loop stacks up is pinned, too, and the compiler would have the product's operand
    follow it.
    """
    config = zoo.configure(
        "gpt-125m", num_layers=2, hidden_size=256, num_heads=4, seq_len=32, vocab_size=2048
    )
    work = zoo.build(config, 32, dtype="bf16", scan=True, recompute="none")
    graph = capture(work.train_step, work.state, work.batch)
    problem = make_problem(graph, Cluster.preset("8xH100"))
    decision = Zero2Parallel().solve(problem)
    choices = list(decision.picked.choices)
    stacks = {op.inputs[0]: op.outputs[0] for op in graph.ops if op.name == "scan_stack"}
    casts = [
        op
        for op in graph.ops
        if op.name == "convert_element_type" and op.params["new_dtype"] == jnp.bfloat16
    ]
    kernels = [
        op
        for op in casts
        if op.outputs[0] in stacks and len(graph.values[op.outputs[0]].shape) == 2
    ]
    assert len(kernels) == 6
    for op in kernels:
        port = problem.nodes.loop_ports[stacks[op.outputs[0]]]
        choices[port.node] = (port.projection.index(1),)
    pins = make_pins(graph, problem.nodes, choices, (8,), TARGETS["tpu"])
    for op in kernels:
        assert pins.values[stacks[op.outputs[0]]] == (1,)
        assert pins.of(op).results == (((R,),),)
