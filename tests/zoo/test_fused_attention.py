"""Fused attention in models of the zoo: which devices and models have it, that it is recorded, and
that it computes what plain attention does.
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention

import aliquot as aq
from aliquot.cluster import DEVICES
from aliquot.core import InputError
from aliquot.graph import ATTENTION, KERNEL, capture
from aliquot.zoo import _attention, build

SIZES = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 64, "seq_len": 128}
MODELS = {
    "gpt-125m": SIZES,
    "bert-base": SIZES,
    "llama-70b": {**SIZES, "num_kv_heads": 2},
    "moe-380m": {**SIZES, "num_experts": 4, "group_size": 128},
    "t5-770m": {**SIZES, "head_size": 16, "target_len": 256},
}


def made(model="gpt-125m", device=None, overrides=None, **options):
    sizes = MODELS[model] | (overrides or {})
    place = None if device is None else DEVICES[device]
    return build(model, 8, overrides=sizes, device=place, **options)


@pytest.mark.parametrize(
    ("device", "dtype", "kernel"),
    [
        ("H100", None, "cudnn"),
        ("A100-40GB", "float16", "cudnn"),
        ("L4", None, "cudnn"),
        ("v5e", None, "splash"),
        ("V100-16GB", "float16", "plain"),
        ("cpu", None, "plain"),
        (None, None, "plain"),
        ("H100", "float32", "plain"),
        ("v5e", "float16", "plain"),
    ],
)
def test_auto_takes_the_kernel_of_the_device(device, dtype, kernel):
    workload = made(device=device, dtype=dtype)
    assert workload.settings["attention"] == kernel and workload.attention.startswith(kernel)
    again = build(**json.loads(json.dumps(workload.settings)))
    assert again.settings == workload.settings


@pytest.mark.parametrize(
    ("device", "head_size", "kernel"),
    [("A100-80GB", 160, "plain"), ("H100", 160, "cudnn"), ("H100", 264, "plain"),
     ("H100", 20, "plain")],
)  # fmt: skip
def test_heads_that_a_kernel_takes(device, head_size, kernel):
    found = made(device=device, overrides={"head_size": head_size})
    assert found.settings["attention"] == kernel


def test_sequences_that_splash_takes():
    assert made(device="v5e", overrides={"seq_len": 192}).settings["attention"] == "plain"
    assert made(device="v5e", overrides={"seq_len": 384}).settings["attention"] == "splash"


@pytest.mark.parametrize(
    ("attention", "device", "overrides", "dtype", "said"),
    [
        ("fused", None, {}, None, "none was named"),
        ("fused", "V100-16GB", {}, None, "V100-16GB has none"),
        ("fused", "H100", {}, "float32", "bfloat16 or float16, and the model in float32"),
        ("fused", "H100", {"head_size": 20}, None, "those of the model have 20"),
        ("fused", "v5e", {"seq_len": 192}, None, "those of the model have 192"),
        ("splash", "H100", {}, None, "H100 has fused attention of cuDNN"),
        ("cudnn", None, {}, "float64", "and the model in float64"),
        ("flash", None, {}, None, "did you mean 'splash'"),
    ],
)
def test_what_is_impossible_is_refused(attention, device, overrides, dtype, said):
    with pytest.raises(InputError) as refusal:
        made(device=device, overrides=overrides, dtype=dtype, attention=attention)
    assert said in str(refusal.value)


def test_all_that_is_missing_is_said_at_once():
    with pytest.raises(InputError) as refusal:
        made(device="H100", overrides={"head_size": 20}, dtype="float32", attention="fused")
    assert "float32" in str(refusal.value) and "20" in str(refusal.value)


def test_models_of_images_have_no_attention():
    sizes = {"num_layers": 14, "num_channels": 8, "image_size": 16, "num_classes": 16}
    found = build("wide-resnet-250m", 8, overrides=sizes, device=DEVICES["H100"])
    assert (found.settings["attention"], found.attention) == ("plain", "")
    with pytest.raises(InputError, match="wide-resnet has no attention"):
        build("wide-resnet-250m", 8, overrides=sizes, device=DEVICES["H100"], attention="fused")


@pytest.mark.parametrize(
    ("model", "device", "scan"),
    [
        pytest.param(
            model, device, scan, marks=() if scan == (device == "v5e") else pytest.mark.slow
        )
        for model in MODELS
        for device in ("H100", "v5e")
        for scan in (False, True)
    ],
)
def test_no_scores_in_the_step(model, device, scan):
    workload = made(model, device, scan=scan)
    graph = capture(workload.train_step, workload.state, workload.batch)
    kernels = [op for op in graph.ops if op.name in (*ATTENTION, KERNEL)]
    assert kernels
    lengths = {128, workload.config.batch(8, "float32")["targets"][0][1]}
    scores = [v for v in graph.values if len(v.shape) > 3 and set(v.shape[-2:]) <= lengths]
    # The kernel's own columns have 128 elements, too.
    assert device == "v5e" or not scores


def attend(kernel, q, k, v, is_causal):
    def loss(q, k, v):
        out = _attention.attention(q, k, v, is_causal=is_causal, kernel=kernel)
        return jnp.sum(jnp.sin(out)), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return out, *grads


@pytest.fixture
def interpreted(monkeypatch):
    """The splash kernel as CPUs run it."""
    monkeypatch.setattr(
        splash_attention,
        "make_splash_mqa_single_device",
        partial(splash_attention.make_splash_mqa_single_device, interpret=True),
    )
    _attention._splash_kernel.cache_clear()
    yield
    _attention._splash_kernel.cache_clear()


@pytest.mark.parametrize(("num_kv_heads", "is_causal", "keys"), [(1, True, 128), (2, False, 256)])
def test_splash_computes_what_plain_attention_does(interpreted, num_kv_heads, is_causal, keys):
    random = np.random.default_rng(0)
    shapes = [(2, 128, 2, 16), (2, keys, num_kv_heads, 16), (2, keys, num_kv_heads, 16)]
    arrays = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]
    found, wanted = (attend(kernel, *arrays, is_causal) for kernel in ("splash", "plain"))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_splash_is_split_over_examples_and_key_heads():
    workload = made("llama-70b", "v5e", scan=True)
    for method, split in ((aq.DataParallel(), 8), (aq.Megatron(tensor=2), 2)):
        plan = aq.plan(
            workload.train_step,
            workload.state,
            workload.batch,
            cluster=aq.Cluster.preset(f"v5e-{split}"),
            method=method,
        )
        kernels = [each for each in plan.stages[0].interior if each.node.startswith(KERNEL)]
        assert kernels and all(each.splits for each in kernels)


@pytest.mark.parametrize("device", ["8xH100", "v5e-8"])
def test_fused_plans_are_smaller_and_faster_where_sequences_are_long(device):
    cluster = aq.Cluster.preset(device)
    sizes = {**SIZES, "seq_len": 4096, "hidden_size": 512}

    def prediction(attention):
        work = build(
            "gpt-125m", 8, overrides=sizes, scan=True, attention=attention, device=cluster.device
        )
        step = (work.train_step, work.state, work.batch)
        return aq.plan(*step, cluster=cluster, method=aq.DataParallel()).prediction

    fused, plain = prediction("fused"), prediction("plain")
    assert fused.peak_memory_bytes < plain.peak_memory_bytes / 1.5
    assert fused.step_time_s < plain.step_time_s
