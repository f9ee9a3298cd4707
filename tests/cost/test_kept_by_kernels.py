"""What Megatron's kernels keep: memory of `recompute="fused"` beside measured memory.

Reference: MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.md: Megatron-LM on 8 B200, 12
layers of Llama-3-70B, four micro-batches of one sequence, ZeRO-1, nothing recomputed; the largest
allocation of all ranks.
"""

import pytest

import aliquot as aq
from aliquot.zoo import build

LLAMA_70B = {
    "name": "llama3-70b-12layers",
    "family": "llama",
    "num_layers": 12,
    "hidden_size": 8192,
    "num_heads": 64,
    "num_kv_heads": 8,
    "ffn_size": 28672,
    "vocab_size": 128256,
    "tied_embedding": False,
}
MEASURED = [
    ({"tensor": 2}, 4096, 60.68),
    pytest.param({"tensor": 4}, 4096, 39.07, marks=pytest.mark.slow),
    ({"tensor": 8}, 4096, 28.29),
    ({"context": 8}, 131072, 147.99),
]


@pytest.mark.parametrize(("degrees", "seq_len", "gib"), MEASURED, ids=str)
def test_memory_is_that_of_megatron(degrees, seq_len, gib):
    cluster = aq.Cluster.preset("8xB200")
    data = 8 // (degrees.get("tensor", 1) * degrees.get("context", 1))
    work = build(
        LLAMA_70B | {"seq_len": seq_len},
        4 * data,
        dtype="bf16",
        recompute="none",
        device=cluster.device,
    )
    method = aq.Megatron(data=data, zero_stage=1, sequence="tensor" in degrees, **degrees)
    found, whole = (
        aq.plan(
            work.train_step,
            work.state,
            work.batch,
            cluster=cluster,
            method=method,
            num_micro_batches=4,
            recompute=recompute,
        ).prediction
        for recompute in ("fused", "none")
    )
    assert found.peak_memory_bytes / 2**30 == pytest.approx(gib, rel=0.035)
    assert found.peak_memory_bytes < whole.peak_memory_bytes
    # Norms and activation functions are computed again, and no product.
    assert whole.compute_s < found.compute_s < 1.05 * whole.compute_s
