"""Steps on a number of devices that does not divide the widths give the numbers of the plain step,
in float64.
"""

import jax
import numpy as np
import pytest
from runtime.equality import largest

import aliquot as aq
from aliquot import zoo

SIX = jax.devices()[:6]
SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "ffn_size": 32,
    "vocab_size": 40,
    "seq_len": 6,
}


@pytest.fixture(scope="module")
def llama():
    """A small Llama with its state after two plain steps."""
    with jax.enable_x64():
        work = zoo.build(
            zoo.configure("llama-7b", **SIZES), 12, dtype="float64", learning_rate=1e-3
        )
        tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 12, 6), np.int32)
        batch = {"inputs": tokens[0], "targets": tokens[1]}
        start = wanted = jax.device_get(jax.jit(work.init)(jax.random.key(0)))
        for _ in range(2):
            wanted, _ = jax.jit(work.train_step)(wanted, batch)
        return work, batch, start, jax.device_get(wanted)


@pytest.mark.parametrize(
    "method, count",
    [(aq.Zero3Parallel(), 1), (aq.Zero2Parallel(), 2), (aq.Megatron(data=6, zero_stage=3), 1)],
    ids=["zero3", "zero2 with micro-batches", "megatron"],
)
def test_six_devices_share_a_state_whose_dims_they_do_not_divide(llama, method, count):
    work, batch, start, wanted = llama
    with jax.enable_x64():
        plan = aq.plan(
            work.train_step,
            work.state,
            work.batch,
            cluster=aq.Cluster.detect(SIX),
            method=method,
            num_micro_batches=count,
        )
        assert plan.stages[0].mesh_shape == (3, 2)
        step, state = aq.parallelize(work.train_step, plan, devices=SIX), start
        for _ in range(2):
            state, _ = step(state, batch)
        for leaf in jax.tree.leaves(state["opt_state"][0].mu):
            assert 2 * leaf.addressable_shards[0].data.size == leaf.size
        difference, path = largest("float64", start, jax.device_get(state), wanted)
    assert difference < 1e-9, path
