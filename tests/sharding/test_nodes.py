"""What a step leaves to decide: groups that can be split on every dim, and nothing tied or blocked
without a reason.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph.steps import STEPS, shapes
from planners.small_steps import array, momentum_step

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster, LogicalMesh, target_for
from aliquot.cost import Picked, evaluate, make_problem, price
from aliquot.graph import Phase, Role, cut_layers
from aliquot.graph._dataflow import rough_costs
from aliquot.sharding import build_nodes, index_nodes

CPU = target_for(Cluster.preset("8xcpu").device)

CLUSTER = Cluster.preset("8xcpu")
ROWS, SEQ, WIDTH, HEADS, VOCAB = 8, 32, 64, 4, 128


def nodes_of(family="gpt-125m", num_layers=3, **options):
    config = zoo.configure(
        family,
        num_layers=num_layers,
        hidden_size=WIDTH,
        num_heads=HEADS,
        seq_len=SEQ,
        vocab_size=VOCAB,
    )
    workload = zoo.build(config, ROWS, optimizer="sgd", **options)
    graph = aq.capture(workload.train_step, workload.state, workload.batch)
    return graph, build_nodes(index_nodes(graph), CPU)


@pytest.mark.parametrize("family", ["gpt-125m", "llama-7b"])
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("scan", [False, True])
def test_the_residual_stream_can_be_split_on_every_dim(family, recompute, scan):
    """One node holds it for all layers; norms read it with dims of size one, which must not get in
    the way.
    """
    graph, nodes = nodes_of(family, recompute=recompute, scan=scan, dtype="float32")
    readers = {}
    for edge in nodes.edges:
        if edge.kind == "operand" and edge.num_bytes == 4 * ROWS * SEQ * WIDTH and edge.rank == 3:
            readers[edge.source] = readers.get(edge.source, 0) + 1
    stream = nodes.nodes[max(readers, key=lambda n: (nodes.nodes[n].kind == "group", readers[n]))]
    assert sorted(f.size for f in stream.factors) == [ROWS, SEQ, WIDTH]
    # Statistics of norms are sums over the hidden dim; nothing is gathered.
    assert {c.kind for c in stream.collectives} == {"all-reduce"}
    hidden = next(k for k, f in enumerate(stream.factors) if f.size == WIDTH)
    assert any(c.factors == (hidden,) for c in stream.collectives)


@pytest.mark.parametrize("family", ["gpt-125m", "llama-7b"])
def test_heads_can_be_split_through_attention(family):
    """Queries, keys, values, scores and what comes out of them: each can be split by head and by
    row.
    """
    _, nodes = nodes_of(family, recompute="none", dtype="float32")
    scores = [
        n
        for n in nodes.nodes
        if n.kind == "group" and sorted(f.size for f in n.factors) == [HEADS, ROWS, SEQ, SEQ]
    ]
    assert scores
    for node in nodes.nodes:
        sizes = [f.size for f in node.factors]
        if node.kind == "group" and HEADS in sizes and ROWS in sizes:
            heads = sizes.index(HEADS)
            assert not any(c.kind == "all-gather" and heads in c.factors for c in node.collectives)


def test_no_factor_is_of_size_one_and_labels_name_one():
    for scan in (False, True):
        _, nodes = nodes_of(recompute="none", scan=scan)
        for node in nodes.nodes:
            assert all(f.size > 1 for f in node.factors)
            labels = [f.label for f in node.factors]
            assert len(set(labels)) == len(labels)


def test_parts_of_one_operator_have_labels_of_their_own():
    """A plan names a split by its label; the parts of a cut array come from one operator and are
    split apart.
    """

    def step(params, batch):
        small, large = jnp.split(batch["x"] * params["scale"], [8], axis=-1)
        return small.sum(axis=0), large.sum(axis=0)

    nodes = build_nodes(
        index_nodes(aq.capture(step, {"scale": array(24)}, {"x": array(16, 24)})), CPU
    )
    for node in nodes.nodes:
        labels = [f.label for f in node.factors]
        assert len(set(labels)) == len(labels)


def test_a_size_one_dim_neither_ties_nor_blocks():
    def step(params, batch):
        x = batch["x"]
        centred = (x - x.mean(axis=-1, keepdims=True)) * params["scale"]
        return centred * batch["mask"][:, None, None]

    batch = {"x": array(8, 16, 32), "mask": array(8)}
    nodes = build_nodes(index_nodes(aq.capture(step, {"scale": array(32)}, batch)), CPU)
    group = max((n for n in nodes.nodes if n.kind == "group"), key=lambda n: len(n.factors))
    assert sorted(f.size for f in group.factors) == [8, 16, 32]


def test_the_layers_of_a_scan_are_not_split():
    """Cutting the dim that a loop runs over would gather the whole stack."""
    graph, nodes = nodes_of(recompute="block", scan=True)
    stacked = [
        (i, p)
        for i, p in zip(graph.inputs, nodes.input_ports)
        if i.role is Role.PARAMETER and ".layers" in i.path
    ]
    assert len(stacked) >= 8
    for item, port in stacked:
        assert graph.values[item.value].shape[0] == 3
        assert 0 not in port.projection and 1 in port.projection


def _attention(split):
    """A step with one fused projection `w`, cut into queries, keys and values by `split`."""

    def loss(params, batch):
        q, k, v = split(batch["x"], params["w"])
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
        return jnp.mean(jnp.einsum("bhqk,bkhd->bqhd", weights, v) ** 2)

    return loss


def _heads_first(x, w):
    fused = jnp.einsum("bsd,dhce->bshce", x, w)
    return fused[:, :, :, 0], fused[:, :, :, 1], fused[:, :, :, 2]


def _one_dim(x, w):
    fused = x @ w
    return [part.reshape(*part.shape[:2], HEADS, -1) for part in jnp.split(fused, 3, axis=-1)]


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_the_work_of_a_scan_grows_with_its_length(recompute):
    """A round writes one row of a stack, not all of it: twice as many layers more are twice as much
    more of everything.
    """

    def work(num_layers):
        graph, nodes = nodes_of(num_layers=num_layers, scan=True, recompute=recompute)
        works = [w for node_work in make_problem(graph, CLUSTER).work for w in node_work]
        moved = sum(num_bytes for w in works for num_bytes, _ in w.arrays)
        converted = sum(e.num_bytes * e.count for e in nodes.edges)
        return np.array(
            [
                moved,
                converted,
                sum(w.kernels for w in works),
                sum(rough_costs(graph, cut_layers(graph).items)),
            ]
        )

    few, more, most = work(4), work(8), work(16)
    np.testing.assert_allclose((most - more) / (more - few), 2.0, rtol=1e-9)


def test_fused_projection_with_heads_in_front_is_free():
    """`(heads, 3, size)`: the heads pass through the cut into three."""
    step = momentum_step(
        _attention(_heads_first),
        {"w": array(WIDTH, HEADS, 3, WIDTH // HEADS)},
        {"x": array(ROWS, SEQ, WIDTH)},
    )
    nodes = build_nodes(index_nodes(aq.capture(*step)), CPU)
    fused = [n for n in nodes.nodes if n.kind == "group" and HEADS in [f.size for f in n.factors]]
    for node in fused:
        heads = [f.size for f in node.factors].index(HEADS)
        assert not any(c.kind == "all-gather" and heads in c.factors for c in node.collectives)


def test_fused_projection_in_one_dim_has_a_price_but_is_not_blocked():
    """`(3 heads size)`: a split of it is gathered at the cut, and everything else stays open."""
    step = momentum_step(
        _attention(_one_dim), {"w": array(WIDTH, 3 * WIDTH)}, {"x": array(ROWS, SEQ, WIDTH)}
    )
    nodes = build_nodes(index_nodes(aq.capture(*step)), CPU)
    gathered = [
        (node, c.factors[0])
        for node in nodes.nodes
        for c in node.collectives
        if c.kind == "all-gather" and node.factors[c.factors[0]].size == 3 * WIDTH
    ]
    assert gathered
    for node, factor in gathered:
        others = [f.size for k, f in enumerate(node.factors) if k != factor]
        assert ROWS in others and SEQ in others
    # Heads stay open behind the cut.
    assert any(n.kind == "group" and HEADS in [f.size for f in n.factors] for n in nodes.nodes)


def test_a_tied_embedding_is_one_parameter_with_two_uses():
    graph, nodes = nodes_of(recompute="none", dtype="float32")
    port = next(
        p for i, p in zip(graph.inputs, nodes.input_ports) if i.path.endswith("embed.embedding")
    )
    assert [f.size for f in nodes.nodes[port.node].factors] == [VOCAB, WIDTH]
    readers = {
        nodes.nodes[e.target].label.split(":")[0]
        for e in nodes.edges
        if e.source == port.node and e.kind == "operand"
    }
    assert {"gather", "dot_general"} <= readers
    # The sum of both gradients comes back to it.
    assert any(e.kind == "alias" and e.target == port.node for e in nodes.edges)


def test_equal_layers_are_one_decision():
    graph, _ = nodes_of(recompute="none")
    problems = [make_problem(graph, CLUSTER, repeats=repeats) for repeats in (True, False)]
    folded, apart = (p.nodes for p in problems)
    assert folded.folded and not apart.folded
    assert len(folded.nodes) < len(apart.nodes)
    assert all(n.copies == 1 for n in apart.nodes)
    for name in ("flops", "kernels"):
        totals = [
            sum(getattr(w, name) for node_work in p.work for w in node_work) for p in problems
        ]
        assert totals[0] == pytest.approx(totals[1])
    resident = [sum(r.num_bytes * len(r.births) for r in p.residents) for p in problems]
    assert resident[0] == pytest.approx(resident[1], rel=0.02)


def test_a_total_over_equal_layers_may_leave_the_step():
    """All layers read one array, as those of a decoder do; the terms of its gradient are one class
    that serves itself.
    """

    def loss(params, batch):
        x = batch["x"]
        for w in params["layers"]:
            x = x + jnp.tanh((x @ w["own"]) * (batch["source"] @ w["cross"]))
        return (x**2).mean()

    def step(params, batch):
        value, (grads, of_batch) = jax.value_and_grad(loss, argnums=(0, 1))(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {
            "loss": value,
            "of_source": of_batch["source"],
        }

    layer = {"own": array(WIDTH, WIDTH), "cross": array(WIDTH, WIDTH)}
    batch = {"x": array(ROWS, WIDTH), "source": array(ROWS, WIDTH)}
    graph = aq.capture(step, {"layers": [layer] * 5}, batch)
    folded, apart = (
        build_nodes(index_nodes(graph), CPU),
        build_nodes(index_nodes(graph, repeats=False), CPU),
    )
    assert folded.folded and len(folded.nodes) < len(apart.nodes)


def test_the_batch_reaches_activations_and_no_parameter():
    graph, nodes = nodes_of(recompute="none")
    for item, port in zip(graph.inputs, nodes.input_ports):
        if item.role is Role.PARAMETER and port.node >= 0:
            assert nodes.batch_factors[port.node] == frozenset()
    with_rows = [n for n in nodes.nodes if ROWS in [f.size for f in n.factors]]
    assert len(with_rows) > 20
    for node in with_rows:
        assert {node.factors[f].size for f in nodes.batch_factors[node.index]} == {ROWS}


LOOPS = [
    "scan_layers",
    "scan_layers_remat",
    "scan_reversed_unrolled",
    "rnn_over_time",
    "while_and_cond",
    "while_under_vmap",
    "switch_of_three",
    "steps_in_a_scan",
    "remat_nested",
]


@pytest.mark.parametrize("name", LOOPS)
def test_steps_with_loops_and_branches(name):
    """They build, all their decisions have a price, and not splitting costs no communication."""
    step = STEPS[name]()
    graph = aq.capture(step.fn, *shapes(step.args), **shapes(step.kwargs))
    cluster = Cluster.preset("2xH100")
    problem = make_problem(graph, cluster)
    nodes, priced = problem.nodes, price(problem, LogicalMesh(shape=(2,), cluster=cluster))
    whole = evaluate(Picked.first(priced))
    assert whole.compute_s > 0 and whole.communication_s == whole.gradient_s == 0
    for node in nodes.nodes:
        labels = [f.label for f in node.factors]
        assert len(set(labels)) == len(labels)


def test_an_update_reads_nothing_that_it_writes():
    """Weights, moments and gradients are read, weights and moments written: five arrays, whatever
    the update computes.
    """

    def train_step(state, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))(state["w"])
        moment = 0.9 * state["m"] + gradient
        return {"w": state["w"] - 0.1 * moment / (1 + jnp.sqrt(jnp.abs(moment))), "m": moment}, loss

    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    graph = aq.capture(
        train_step, {"w": square, "m": square}, jax.ShapeDtypeStruct((8, 64), jnp.float32)
    )
    update = [
        work
        for node_work in make_problem(graph, CLUSTER).work
        for work in node_work
        if work.phase is Phase.UPDATE
    ]
    assert sum(num_bytes for work in update for num_bytes, _ in work.arrays) == 5 * 64 * 64 * 4


@pytest.mark.parametrize("scan", [False, True])
def test_conversions_of_casts_of_parameters_are_named_after_the_parameters(scan):
    """So that a reader sees which weights are gathered, and in node_work layer the same line."""

    def step(layers, x):
        def loss(layers):
            def layer(x, w):
                return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

            if scan:
                return jnp.sum(jax.lax.scan(layer, x, layers["w"])[0])
            y = x
            for w in layers["w"]:
                y, _ = layer(y, w)
            return jnp.sum(y)

        return jax.tree.map(lambda w, g: w - g, layers, jax.grad(loss)(layers))

    weight = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    stacked = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32)
    layers = {"w": stacked if scan else [weight] * 3}
    nodes = build_nodes(
        index_nodes(aq.capture(step, layers, jax.ShapeDtypeStruct((32, 64), jnp.bfloat16))), CPU
    )
    labels = {edge.label for edge in nodes.edges if edge.num_bytes == 2 * 64 * 64}
    named = {label for label in labels if label.startswith("layers.w")}
    assert named == ({"layers.w"} if scan else {"layers.w[*]"}), labels
