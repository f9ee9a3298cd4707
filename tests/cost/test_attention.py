"""The price of fused attention: a share of the peak of its own, less for few heads, examples or
scores of a query.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import flash_attention, splash_attention

import aliquot as aq
from aliquot.cluster import Attention, Cluster, LogicalMesh, target_for
from aliquot.core import ClusterError
from aliquot.cost import Work, work_seconds
from aliquot.graph import Phase, Scores

WHOLE = np.array([[-1]], np.int64)
FLOPS = 1e12


def seconds(cluster="H100", choice=WHOLE, **scores):
    work = Work(
        phase=Phase.FORWARD,
        split_by=(True,),
        flops=FLOPS,
        dtype="bfloat16",
        scores=Scores(**scores),
    )
    where = Cluster.preset(cluster)
    mesh = LogicalMesh(shape=(where.num_devices,), cluster=where)
    return float(work_seconds(work, (64,), choice, mesh, target_for(where.device))[0])


@pytest.mark.parametrize("name", ["A100-40GB", "A100-80GB", "H100", "H200", "B200", "v5e", "v6e"])
def test_many_scores_reach_the_share_of_the_device(name):
    device = Cluster.preset("v5e-1" if name == "v5e" else f"1x1x{name}").device
    kernel, peak = target_for(device).attention, device.peak("bfloat16")
    where = "v5e-1" if name == "v5e" else f"1x1x{name}"
    assert seconds(where) == pytest.approx(FLOPS / (kernel.share * peak))
    assert seconds(where, is_backward=True) == pytest.approx(seconds(where) / 0.85)


@pytest.mark.parametrize(
    ("device", "most", "at_32", "at_8"), [("A100-80GB", 64, 0.95, 0.66), ("B200", 128, 0.74, 0.32)]
)
def test_few_heads_and_examples_leave_processors_idle(device, most, at_32, at_8):
    """Of the speed with most heads, as measured with 4,096 tokens."""
    fast, some, few = (seconds(f"1x1x{device}", rows=n * 4096.0) for n in (most, 32, 8))
    assert fast / some == pytest.approx(at_32, abs=0.05)
    assert fast / few == pytest.approx(at_8, abs=0.05)


def test_a_split_leaves_fewer_queries_to_a_device():
    whole, split = (
        seconds("8xH100", np.array([[factor]], np.int64), rows=64 * 1024.0) for factor in (-1, 0)
    )
    kernel = target_for(Cluster.preset("8xH100").device).attention
    slower = (1 + 8 * kernel.rows / 65536) / (1 + kernel.rows / 65536)
    assert split == pytest.approx(whole / 8 * slower)


def test_windows_compute_scores_in_vain():
    wide, narrow = (seconds(keys=keys) for keys in (4096.0, 64.0))
    assert narrow / wide == pytest.approx(2 / (1 + 64 / 4096))


def test_where_no_kernel_is_known_it_counts_as_a_product():
    device = Cluster.preset("8xV100-16GB").device
    target = target_for(device)
    assert target.attention is None
    assert seconds("1x1xV100-16GB") == pytest.approx(
        FLOPS / target.product_flops_per_s(device, "bfloat16")
    )


def test_figures_out_of_range_are_refused():
    fields = {"kernel": "a", "title": "a", "dtypes": (), "head_sizes": (8, 8), "source": ""}
    with pytest.raises(ClusterError, match="share must be above 0"):
        Attention(share=0.0, **fields)
    with pytest.raises(ClusterError, match="rows must not be negative"):
        Attention(share=0.5, rows=-1.0, **fields)


T, N, H = 2048, 16, 128


def layer(kind):
    """One layer of attention, its projections, and their gradients; 16 examples."""

    def attend(q, k, v):
        if kind == "cudnn":
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        if kind == "flash":
            return flash_attention.flash_attention(q, k, v, causal=True).transpose(0, 2, 1, 3)
        masks = splash_attention.MultiHeadMask([splash_attention.CausalMask((T, T))] * N)
        kernel = splash_attention.make_splash_mha_single_device(masks)
        return jax.vmap(kernel)(q, k, v).transpose(0, 2, 1, 3)

    def train_step(params, batch):
        def loss(params):
            q, k, v = (jnp.einsum("btd,dnh->btnh", batch, params[name]) for name in "qkv")
            out = jnp.einsum("btnh,nhd->btd", attend(q, k, v), params["o"])
            return jnp.mean(out.astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shape = jax.ShapeDtypeStruct
    params = {name: shape((N * H, N, H), jnp.bfloat16) for name in "qkv"}
    params["o"] = shape((N, H, N * H), jnp.bfloat16)
    return train_step, params, shape((16, T, N * H), jnp.bfloat16)


def test_kernels_of_users_are_split_and_skip_what_is_masked():
    """Splash attention with the mask's tables as constants, and Pallas' flash attention, cost about
    as much as cuDNN's operator; they compute whole blocks at the diagonal, and more products.
    """
    cluster = Cluster.preset("v5e-8")
    found = {
        kind: aq.plan(*layer(kind), cluster=cluster, method=aq.Zero3Parallel()).prediction
        for kind in ("cudnn", "splash", "flash")
    }
    fastest = found["cudnn"]
    for kind in ("splash", "flash"):
        assert fastest.step_time_s < found[kind].step_time_s < 1.4 * fastest.step_time_s
        # Nothing is gathered but parameters.
        assert found[kind].communication_s == pytest.approx(fastest.communication_s)
