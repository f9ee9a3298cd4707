"""ParallelBlocks compiled by themselves: a split passes through them without communication."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable

import jax
import numpy as np
import pytest

from aliquot import zoo
from aliquot.cluster import Cluster, LogicalMesh, target_for
from aliquot.cost import make_problem, price
from aliquot.graph import Graph, Item, Phase, capture, extract_items, items_of
from aliquot.planners import ILP, Space
from aliquot.profiling import compile_part
from aliquot.runtime import compiled_stats
from aliquot.sharding import NodeGraph, ParallelBlock, build_nodes, find_blocks, index_nodes

CPU = target_for(Cluster.preset("8xcpu").device)

SMALL = {"num_layers": 1, "hidden_size": 64, "num_heads": 4, "seq_len": 32, "vocab_size": 64}
MODELS = {
    "bert-base": SMALL,
    "gpt-10m": SMALL,
    "llama-7b": SMALL,
    "llama-70b": {**SMALL, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 128},
    "moe-380m": {**SMALL, "num_layers": 2, "num_experts": 8},
    "t5-770m": {**SMALL, "target_len": 16, "ffn_size": 128, "head_size": 16},
    "wide-resnet-250m": {},
}
QUICK = {"gpt-10m", "bert-base"}
NUM_DEVICES = 4
# A product that sums over a split dim ends in an all-reduce, or in a reduce-scatter where its
# result leaves the block and may be split anew. Behind the entry the gradient of the result is then
# gathered.
OF_A_SUM = {"all-reduce", "reduce-scatter"}
OF_A_SUM_IN_THE_ENTRY = {"all-reduce", "reduce-scatter", "all-gather"}


class Step:
    """A step's products and what lies between them."""

    def __init__(self, model: str, overrides: dict[str, int]) -> None:
        workload = zoo.build(model, 16, overrides=overrides, dtype="float32", recompute="none")
        self.graph = capture(workload.train_step, workload.state, workload.batch)
        self.nodes = build_nodes(index_nodes(self.graph), CPU)
        self.items = items_of(self.graph)
        self.maker = {o: k for k, item in enumerate(self.items) for o in item.outputs}
        self.readers: dict[int, list[int]] = defaultdict(list)
        for k, item in enumerate(self.items):
            for i in item.inputs:
                self.readers[i].append(k)
        made_by = maker_of_class(self.nodes)
        self.nodes_of_item = [
            {made_by.get(self.nodes.op_class[o], -1) for o in item.ops} for item in self.items
        ]

    def lone(self, block: ParallelBlock, phase: Phase) -> list[Item]:
        """The first copy of a block's products in a phase, and everything between them."""
        products = [
            k
            for k, item in enumerate(self.items)
            if item.phase is phase and self.nodes_of_item[k] & set(block.products)
        ]
        copies = sum(
            item.phase is Phase.FORWARD and block.entry in of
            for item, of in zip(self.items, self.nodes_of_item, strict=True)
        )
        of_one = len(products) // copies
        # The first layer comes last in the backward pass.
        products = (
            products[:of_one] if phase is Phase.FORWARD else products[len(products) - of_one :]
        )

        def within(some: Iterable[int]) -> list[int]:
            return [k for k in some if self.items[k].phase is phase]

        behind = reached(
            products, lambda k: within(r for o in self.items[k].outputs for r in self.readers[o])
        )
        before = reached(
            products,
            lambda k: within(self.maker[i] for i in self.items[k].inputs if i in self.maker),
        )
        return [self.items[k] for k in sorted(behind & before)]


def maker_of_class(nodes: NodeGraph) -> dict[int, int]:
    return {
        site.op_class: site.results[0][0].node
        for site in nodes.sites
        if site.results and site.results[0]
    }


def reached(start: Iterable[int], onward: Callable[[int], Iterable[int]]) -> set[int]:
    found, waiting = set(start), list(start)
    while waiting:
        fresh = set(onward(waiting.pop())) - found
        found |= fresh
        waiting += fresh
    return found


def compiled_collectives(
    step: Step, block: ParallelBlock, items: list[Item], option: tuple[int, ...]
) -> set[str]:
    """What the compiler puts between a block's products if its entry is split by an option and all
    else as is best.
    """
    part = extract_items(step.graph, items)
    problem = make_problem(part.graph, Cluster.detect(jax.devices()[:NUM_DEVICES]))
    priced = price(
        problem, LogicalMesh(shape=(NUM_DEVICES,), axis_names=("x",), cluster=problem.cluster)
    )
    allowed = [np.ones(len(node.choices), bool) for node in priced.nodes]
    whole, here = maker_of_class(step.nodes), maker_of_class(problem.nodes)
    for number, op in enumerate(part.ops):
        product = whole.get(step.nodes.op_class[op])
        if product in block.products:
            node = here[problem.nodes.op_class[number]]
            allowed[node] &= block.allows(product, priced.nodes[node].choices, option)
    space = Space(name="lone block", priced=priced, allowed=allowed)
    solution = ILP().solve(problem, space, memory_limit_bytes=math.inf)
    assert solution is not None
    compiled = compile_part(problem, solution.picked.choices, (NUM_DEVICES,), ("x",)).compiled
    return {c.kind for c in compiled_stats(compiled, ("x",), (NUM_DEVICES,)).collectives}


def expected(
    step: Step, block: ParallelBlock, items: list[Item], option: tuple[int, ...]
) -> set[str]:
    """Collectives that a split calls for: those of products that sum over a dim that it splits."""
    made_by = maker_of_class(step.nodes)
    products = {made_by.get(step.nodes.op_class[o], -1) for item in items for o in item.ops} & set(
        block.products
    )

    def sums(product: int) -> bool:
        kept = {
            f
            for e in step.nodes.edges
            if e.source == product
            for f, d in enumerate(e.source_projection)
            if d >= 0
        }
        return any(block.linked[product][f] not in kept for f in option)

    if sums(block.entry):
        return OF_A_SUM_IN_THE_ENTRY
    return OF_A_SUM if any(sums(product) for product in products) else set()


@pytest.mark.parametrize(
    "model",
    [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in MODELS],
)
def test_a_split_passes_through_a_lone_block(model):
    step = Step(model, MODELS[model])
    blocks, rng, seen = find_blocks(step.graph, step.nodes), random.Random(0), 0
    for block in blocks if len(blocks) < 12 else rng.sample(blocks, 4):
        if block.handed_over:
            continue  # Dispatch and combine move tokens to experts and back.
        sizes = [factor.size for factor in step.nodes.nodes[block.entry].factors]
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            items = step.lone(block, phase)
            for option in block.options((NUM_DEVICES,), sizes):
                found = compiled_collectives(step, block, items, option)
                assert found <= expected(step, block, items, option), (block.entry, phase, option)
                seen += 1
    assert seen >= 20


def test_what_items_read_and_others_read_crosses():
    graph: Graph = Step("gpt-10m", SMALL).graph
    items = items_of(graph)
    part = extract_items(graph, items[3:9]).graph
    assert len(part.ops) == sum(len(item.ops) for item in items[3:9])
    assert {i.value for i in part.inputs} | set(part.constants) | {
        o for op in part.ops for o in op.outputs
    } >= {i for op in part.ops for i in op.inputs if isinstance(i, int)}
