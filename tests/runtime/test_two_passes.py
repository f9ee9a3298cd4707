"""Networks with biases that meet two batches in one step, and sums over examples in the update: the
same numbers as on one device, and no activations travel.
"""

from __future__ import annotations

import jax
import pytest

import aliquot as aq

from .two_passes import LOSSES, two_passes

METHODS = {
    "dp": aq.DataParallel(),
    "zero2": aq.Zero2Parallel(),
    "zero3": aq.Zero3Parallel(),
    "shard": aq.ShardParallel(),
}
QUICK = {
    ("siamese, scanned", "dp"),
    ("gradients of examples", "zero3"),
    ("two lengths, scanned", "dp"),
}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(n, m, marks=() if (n, m) in QUICK else pytest.mark.slow)
        # Of the state's splits one for each network.
        for k, n in enumerate(LOSSES)
        for m in ("dp", ("zero2", "zero3", "shard")[k % 3])
    ],
)
def test_two_passes_compute_the_same_numbers_and_gather_no_activations(name, method, x64):
    step, state, batch = two_passes(name, vectors=True)
    plan = aq.plan(step, state, batch, cluster=aq.Cluster.detect(), method=METHODS[method])
    parallel = aq.parallelize(step, plan)
    check = parallel.check(state, batch)
    off = {leaf.path: leaf.relative for leaf in check.leaves if leaf.relative > 1e-9}
    assert not off, off
    if method == "dp":
        compiled = parallel.prepare(*jax.eval_shape(lambda: (state, batch)))
        assert {use.kind for use in parallel.stats().collectives} == {"all-reduce"}, compiled
