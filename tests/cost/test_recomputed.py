"""What the backward pass of a stage holds of arrays that it computes again."""

import numpy as np
import pytest

import aliquot as aq
from aliquot.cluster import Cluster, LogicalMesh
from aliquot.cost import Picked, make_problem, price
from aliquot.cost._recomputed import recomputation
from aliquot.graph import Phase, capture
from aliquot.sharding import layer_step, stage_step

SIZES = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": 64, "seq_len": 16}


def test_arrays_computed_again_are_as_small_as_their_nodes_choices_make_them():
    work = aq.zoo.build(aq.zoo.configure("gpt-125m", **SIZES), 16, recompute="none")
    layered = layer_step(capture(work.train_step, work.state, work.batch), 2)
    graph = stage_step(layered, [0, 1, 2]).extracts[1].graph
    cluster = Cluster.preset("2xcpu")
    problem = make_problem(graph, cluster, num_micro_batches=2, of_stage=True)
    priced = price(problem, LogicalMesh(shape=(2,), axis_names=("x",), cluster=cluster), repeats=2)
    products = frozenset(
        n.index for n in priced.graph.nodes if n.kind == "product" and n.phase is Phase.FORWARD
    )

    def peak_bytes(split):
        picks = np.zeros(len(priced.nodes), np.int64)
        for k, (node, factors) in enumerate(zip(priced.nodes, problem.nodes.batch_factors)):
            rows = [set(np.flatnonzero(np.asarray(row) >= 0).tolist()) for row in node.choices]
            wanted = set(factors) if split else set()
            picks[k] = next((n for n, row in enumerate(rows) if row == wanted), 0)
        return recomputation(Picked(priced=priced, picks=picks), graph, products).peak_bytes

    assert peak_bytes(split=False) > 0
    # All have the examples in one of their dims.
    assert peak_bytes(split=True) == pytest.approx(peak_bytes(split=False) / 2)
