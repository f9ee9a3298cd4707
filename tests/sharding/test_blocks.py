"""ParallelBlocks of the zoo's models and of small steps of one's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ordinary_steps import step_of
from sharding import cross_attention

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster, target_for
from aliquot.core import InputError
from aliquot.graph import Phase, capture
from aliquot.sharding import (
    blocks_of_operators,
    build_nodes,
    find_blocks,
    find_segments,
    index_nodes,
    outside_blocks,
)

CPU = target_for(Cluster.preset("8xcpu").device)

ATTENTION = ["k q v", "out"]
LAYERS = {
    "bert-base": [ATTENTION + ["up", "down"]],
    "gpt-10m": [ATTENTION + ["up", "down"]],
    "llama-7b": [ATTENTION + ["gate up", "down"]],
    "moe-380m": [ATTENTION + ["gate", "down up"], ATTENTION + ["up", "down"]],
}


def nodes_of(model: str, num_layers: int, **options: object):
    workload = zoo.build(model, 16, overrides={"num_layers": num_layers}, **options)
    graph = capture(workload.train_step, workload.state, workload.batch)
    return graph, build_nodes(index_nodes(graph), CPU)


def name(path: str) -> str:
    """The last part of a parameter's path that says which it is."""
    return path.removesuffix(".kernel").rpartition(".")[2]


def blocks_by_name(graph, nodes, **options):
    return [
        (" ".join(sorted(name(nodes.nodes[p].label) for p in b.parameters)), b)
        for b in find_blocks(graph, nodes, **options)
    ]


@pytest.mark.parametrize(
    ("model", "recompute", "scan"),
    [
        pytest.param(
            model,
            recompute,
            scan,
            marks=() if scan == (recompute == "block") else pytest.mark.slow,
        )
        for model in LAYERS
        for recompute in ("none", "block")
        for scan in (False, True)
    ],
)
def test_a_layer_has_four_blocks_of_three_or_four_options(model, recompute, scan):
    graph, nodes = nodes_of(model, 4, recompute=recompute, scan=scan)
    blocks = blocks_by_name(graph, nodes)
    names = [n for n, _ in blocks]
    of_layers = [n for layer in LAYERS[model] for n in layer]
    # The head follows, and before BERT's a product that prepares it.
    assert names[: len(of_layers)] == of_layers and len(names) - len(of_layers) <= 2
    for n, block in blocks:
        sizes = [f.size for f in nodes.nodes[block.entry].factors]
        assert len(block.options((4,), sizes)) == (4 if n == "down up" else 3)


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("model", LAYERS)
def test_every_product_of_forward_and_backward_pass_is_in_one_block(model, recompute):
    graph, nodes = nodes_of(model, 4, recompute=recompute)
    products = [p for block in find_blocks(graph, nodes) for p in block.products]
    with_flops = [n.index for n in nodes.nodes if n.kind == "product" and n.multiplies]
    assert sorted(products) == with_flops


def test_the_number_of_blocks_does_not_depend_on_depth():
    counts = {len(find_blocks(*nodes_of("moe-380m", depth))) for depth in (4, 8)}
    assert counts == {9}


def test_gradients_are_split_as_the_paper_lists_them():
    """Options rows, columns and contraction of y = x w: of dw contraction, columns, rows; of dx
    rows, contraction, columns.
    """

    def step(state, batch):
        def loss(w):
            return (((batch @ w["one"]) @ w["two"]) ** 2).sum()

        grads = jax.grad(loss)(state)
        return jax.tree.map(lambda p, g: p - g, state, grads)

    shape = jax.ShapeDtypeStruct
    graph = capture(
        step,
        {"one": shape((16, 32), jnp.float32), "two": shape((32, 64), jnp.float32)},
        shape((8, 16), jnp.float32),
    )
    nodes = build_nodes(index_nodes(graph), CPU)
    first, second = find_blocks(graph, nodes, factors="all")
    assert [len(first.products), len(second.products)] == [2, 3]  # the batch needs no gradient
    sizes = {p: [f.size for f in nodes.nodes[p].factors] for p in second.products}
    rows, columns, contraction = 8, 64, 32
    for product in second.products:
        assert [sizes[product][k] for k in second.linked[product]] == sizes[second.entry]
        assert sorted(sizes[product]) == sorted([rows, columns, contraction])


def test_a_contraction_that_is_summed_up_leaves_attention_free():
    graph, nodes = nodes_of("gpt-10m", 2)
    block = find_blocks(graph, nodes)[0]
    batch, contracted, columns = block.factors
    scores = [p for p in block.products if len(nodes.nodes[p].factors) == 5]
    assert len(scores) == 8
    for product in scores:
        assert block.linked[product][contracted] == -1
        labels = [f.size for f in nodes.nodes[product].factors]
        assert labels[block.linked[product][columns]] == 8  # heads
        assert labels[block.linked[product][batch]] == 16


def test_masks_leave_the_entry_exactly_the_option():
    graph, nodes = nodes_of("gpt-10m", 2)
    block = find_blocks(graph, nodes)[0]
    choices = np.array([[-1, -1], [0, 0], [0, 3], [3, 0], [1, 2]])
    assert block.allows(block.entry, choices, (0, 3)).tolist() == [False, False, True, False, False]


def test_options_split_what_divides():
    graph, nodes = nodes_of("gpt-10m", 2)
    block = find_blocks(graph, nodes, factors="cfp")[0]
    sizes = [f.size for f in nodes.nodes[block.entry].factors]
    assert len(block.options((4, 2), sizes)) == 9
    assert block.options((7,), sizes) == [(-1,)]
    assert len(block.options((8, 8), sizes)) == 8  # a batch of 16 cannot be split in 64


def test_products_of_the_backward_pass_may_exchange_axes_of_equal_size():
    graph, nodes = nodes_of("gpt-10m", 2, recompute="block")
    for block in find_blocks(graph, nodes, factors="all"):
        for product in block.products:
            ways = block.followed_by(product, (0, 2, -1), (4, 2, 4))
            if nodes.nodes[product].phase is Phase.FORWARD:
                assert ways == ((0, 2, -1),)
            else:
                assert ways == ((0, 2, -1), (-1, 2, 0))
    # The paper's options are one split for all products.
    of_paper = find_blocks(graph, nodes, factors="cfp")
    assert not any(block.exchanging or block.gradients for block in of_paper)


def test_products_of_the_backward_pass_may_leave_an_axis_unused():
    """And gradients of parameters be split in any way: what is then moved costs less where a step
    waits for its collectives more than it computes.
    """
    graph, nodes = nodes_of("gpt-10m", 2)
    for block in find_blocks(graph, nodes, factors="all"):
        for product in block.exchanging - set(block.handed_over):
            first, second, *_ = (f if f >= 0 else 0 for f in block.linked[product])
            rows = np.array([[first, second], [first, -1], [-1, second], [second, first]])
            follows = block.allows(product, rows, (0, 1)).tolist()
            is_bound = product not in block.gradients and min(block.linked[product][:2]) >= 0
            assert follows == [True, True, True, not is_bound]
            # An axis that the option leaves unused may split anything.
            assert block.allows(product, rows, (-1, -1)).all()
        assert not block.allows(block.entry, np.array([[0, -1]]), (0, 1)).any()


def test_dispatch_and_combine_may_also_be_split_over_experts():
    """Tokens change devices before the product or behind it: a choice inside the block of the
    gate.
    """
    graph, nodes = nodes_of("moe-380m", 2)
    experts = 8
    handed = {
        name: block.handed_over for name, block in blocks_by_name(graph, nodes) if block.handed_over
    }
    assert list(handed) == ["gate"]
    # Dispatch, recomputed, and combine; the gradients of the tokens, of what is dispatched, and of
    # both masks.
    assert len(handed["gate"]) == 6
    for product, factors in handed["gate"].items():
        assert [nodes.nodes[product].factors[f].size for f in factors] == [experts]
    (gate,) = [b for b in find_blocks(graph, nodes) if b.handed_over]
    for product, factors in gate.handed_over.items():
        (factor,), linked = factors, gate.linked[product][0]
        rows = np.asarray([[linked], [factor], [-1]])
        assert list(gate.allows(product, rows, (0,))) == [True, True, False]


def test_every_block_begins_in_the_forward_pass():
    graph, nodes = nodes_of("moe-380m", 2, recompute="block")
    for block in find_blocks(graph, nodes):
        assert nodes.nodes[block.entry].phase is Phase.FORWARD and block.entry == min(
            block.products
        )


@pytest.mark.parametrize(
    ("step", "count"),
    [("perceptron", 3), ("perceptron, norm and bias", 3), ("attention", 5), ("experts", 3)],
)
def test_the_first_layer_belongs_to_the_blocks_of_the_others(step, count):
    """A batch of numbers needs no gradient: the first layer's backward pass is another one."""
    graph = capture(*step_of(step))
    nodes = build_nodes(index_nodes(graph), CPU)
    blocks = find_blocks(graph, nodes)
    assert len(blocks) == count and outside_blocks(nodes, blocks) == []
    # Each weight is followed in every layer, wherever its products are separate nodes.
    for block in blocks[:-1]:
        assert len({nodes.nodes[p].label for p in block.products}) >= 4
        entries = [nodes.nodes[p] for p in block.entries]
        assert sum(node.copies for node in entries) == (6 if step == "perceptron" else 4)


def test_products_in_no_block_are_listed_by_their_operators():
    graph = capture(*step_of("adapters"))
    nodes = build_nodes(index_nodes(graph), CPU)
    blocks = find_blocks(graph, nodes)
    outside = outside_blocks(nodes, blocks)
    inside = blocks_of_operators(nodes, blocks)
    assert outside and not set(outside) & set(inside)
    # The product of the two small weights, and that with their sum, have no one parameter.
    assert {graph.ops[op].name for op in outside} == {"dot_general"}


def test_other_factors_are_refused():
    graph, nodes = nodes_of("gpt-10m", 2)
    with pytest.raises(InputError, match="factors='dense'.*cfp, all"):
        find_blocks(graph, nodes, factors="dense")
    with pytest.raises(InputError, match="factors='dense'"):
        aq.Blocks(factors="dense")


def test_segments_keep_step_with_layers_of_many_blocks():
    step, state, batch = cross_attention.make()
    graph = capture(step, state, batch)
    nodes = build_nodes(index_nodes(graph), CPU)
    blocks = find_blocks(graph, nodes)
    found = find_segments(graph, nodes, blocks, [3] * len(blocks))
    assert len(blocks) == 7
    assert found.sequence == (0, 1, 2) * cross_attention.LAYERS
