"""Steps that join, cut, repeat, roll or regroup their batch: the same numbers as on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot as aq
from aliquot.runtime.spmd._local import joined_by_sums

from .joined_batches import LOSSES, joined

METHODS = {
    "dp": aq.DataParallel(),
    "zero2": aq.Zero2Parallel(),
    "zero3": aq.Zero3Parallel(),
    "shard": aq.ShardParallel(),
    "pipe": aq.PipeshardParallel(num_stages=2),
}
# Stages and searched splits with each step; one way to split the state of three in turn.
CASES = [
    (name, method)
    for k, name in enumerate(LOSSES)
    for method in ("shard", "pipe", ("dp", "zero2", "zero3")[k % 3])
]
QUICK = {("preferences", "dp"), ("rolled", "zero3"), ("chunked", "dp"), ("token_groups", "shard")}


@pytest.mark.parametrize(
    ("name", "method"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_joined_batch_computes_the_same_numbers(name, method):
    with jax.enable_x64(True):
        step, state, batch = joined(name)
        plan = aq.plan(
            step,
            state,
            batch,
            cluster=aq.Cluster.detect(),
            method=METHODS[method],
            num_micro_batches=1,
        )
        check = aq.parallelize(step, plan).check(state, batch)
    off = {leaf.path: leaf.relative for leaf in check.leaves if leaf.relative > 1e-9}
    assert not off, off


@pytest.mark.parametrize(
    "parts",
    [
        [np.array([1.5, -0.0, np.inf]), np.array([0.0, np.nan])],
        [np.arange(3, dtype=np.int8) - 2, np.arange(2, dtype=np.int8)],
        [np.array([True, False]), np.array([False, True])],
        [np.ones((2, 3), np.complex64), np.zeros((2, 1), np.complex64)],
    ],
    ids=["float", "int", "bool", "complex"],
)
def test_padded_sums_are_a_join(parts):
    dim = parts[0].ndim - 1
    got = np.asarray(joined_by_sums([jnp.asarray(p) for p in parts], dim))
    want = np.asarray(jnp.concatenate([jnp.asarray(p) for p in parts], dim))
    np.testing.assert_array_equal(got, want)
    if got.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
