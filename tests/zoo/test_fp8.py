"""Linear layers in 8-bit floats: near the wide ones, exact under every plan, refused where devices
have no units for them, and faster where they have.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot as aq
from aliquot.cluster import DEVICES
from aliquot.core import InputError
from aliquot.zoo import build, build_inference
from aliquot.zoo._fp8 import dynamic_product, joined, magnitude, scaled_product, split, unscaled
from aliquot.zoo._precision import PRECISIONS, Precision

SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_size": 24,
    "vocab_size": 40,
    "seq_len": 6,
}


def draw(seed, *shape, scale=1.0):
    return scale * jax.random.normal(jax.random.key(seed), shape)


def test_products_and_gradients_are_near_the_wide_ones():
    x, kernel, dy = draw(0, 8, 64), draw(1, 64, 32, scale=0.02), draw(2, 8, 32, scale=1e-6)
    of = (magnitude(x), magnitude(kernel), magnitude(dy))
    y, back = jax.vjp(lambda x, kernel, *amax: scaled_product(x, kernel, *amax), x, kernel, *of)
    dx, dkernel, *seen = back(dy)
    layer = {"kernel": dkernel}
    own = dict(zip(("amax_inputs", "amax_kernel", "amax_gradients"), of, strict=True))
    dkernel = unscaled(layer, own)["kernel"]
    for found, wanted, near in (
        (y, x @ kernel, 0.1),
        (dx, dy @ kernel.T, 0.2),
        (dkernel, x.T @ dy, 0.2),
    ):
        assert 1e-4 < jnp.max(jnp.abs(found - wanted)) / jnp.max(jnp.abs(wanted)) < near
    assert [float(each) for each in seen] == [float(of[0]), 0.0, float(of[2])]


@pytest.mark.parametrize("by_rows", [False, True])
def test_dynamic_products_and_gradients_are_near_the_wide_ones(by_rows):
    # Some rows are far smaller than others.
    size = 10.0 ** -jnp.arange(8.0)[:, None]
    x, kernel, dy = draw(0, 8, 64) * size, draw(1, 64, 32, scale=0.02), draw(2, 8, 32, scale=1e-6)
    y, back = jax.vjp(lambda x, kernel: dynamic_product(x, kernel, by_rows), x, kernel)
    dx, dkernel = back(dy)
    for found, wanted in ((y, x @ kernel), (dx, dy @ kernel.T), (dkernel, x.T @ dy)):
        assert 1e-4 < jnp.max(jnp.abs(found - wanted)) / jnp.max(jnp.abs(wanted)) < 0.1
    smallest = jnp.max(jnp.abs(y - x @ kernel)[-1]) / jnp.max(jnp.abs(x @ kernel)[-1])
    assert smallest < 0.1 if by_rows else smallest > 0.5


@pytest.mark.parametrize("dtype", ["fp8-tensor", "fp8-rows"])
def test_steps_with_dynamic_scales_run_and_keep_no_magnitudes(dtype):
    work = build("llama-7b", 8, overrides=SIZES, dtype=dtype, scan=True)
    assert "amax" not in work.state
    plan = aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=aq.Cluster.preset("8xcpu"),
        method=aq.Zero3Parallel(),
    )
    run = aq.parallelize(work.train_step, plan, devices=jax.devices()[:8])
    plain, split_up = work.init(jax.random.key(0)), run.init(work.init, jax.random.key(0))
    _, wanted = jax.jit(work.train_step)(plain, text(8))
    _, found = run(split_up, text(8))
    assert float(found["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-3)


def test_dynamic_scales_are_not_for_experts():
    with pytest.raises(InputError, match="experts have the scales of the last step: take fp8"):
        build("mixtral-8x7b", 4, dtype="fp8-rows")


def test_dynamic_scales_take_longer():
    """An array is read for its maxima, too."""
    seconds = {}
    for dtype in ("fp8", "fp8-tensor", "bf16"):
        sizes = {"num_layers": 4}
        work = build(
            "gpt-2.6b", 32, overrides=sizes, dtype=dtype, device=DEVICES["H100"], recompute="none"
        )
        seconds[dtype] = aq.plan(
            work.train_step,
            work.state,
            work.batch,
            cluster=aq.Cluster.preset("8xH100"),
            method=aq.Zero3Parallel(),
        ).prediction.step_time_s
    assert seconds["fp8"] < seconds["fp8-tensor"] < seconds["bf16"]


def test_what_is_larger_than_in_the_last_step_is_clipped():
    x, one = jnp.full((1, 1), 10.0), jnp.ones(())
    assert scaled_product(x, jnp.ones((1, 1)), one, one, one).item() == 1.0


def test_magnitudes_are_kept_apart_from_parameters():
    tree = {
        "layers": [{"q": {"kernel": 1, "amax_inputs": 2, "amax_gradients": 3}}, {"norm": {"x": 4}}],
        "embed": 5,
    }
    params, amax = split(tree)
    assert params == {"layers": [{"q": {"kernel": 1}}, {"norm": {"x": 4}}], "embed": 5}
    assert joined(params, amax) == tree
    assert split(params) == (params, None)


def text(rows):
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, rows, SIZES["seq_len"]))
    return dict(zip(("inputs", "targets"), tokens.astype(np.int32), strict=True))


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_step_scales_by_what_the_step_before_saw(scan):
    work = build("llama-7b", 4, overrides=SIZES, dtype="fp8", scan=scan, learning_rate=1e-2)
    state = work.init(jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), work.state
    )
    wide = build("llama-7b", 4, overrides=SIZES, dtype="bf16", scan=scan)
    assert work.num_parameters == wide.num_parameters
    assert jax.tree.structure(work.state["params"]) == jax.tree.structure(wide.state["params"])
    step, losses = jax.jit(work.train_step), []
    for _ in range(8):
        state, metrics = step(state, text(4))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.5
    layers = state["amax"]["layers"]
    up, kernel = (
        tree["mlp"]["up"] if scan else tree[0]["mlp"]["up"]
        for tree in (layers, state["params"]["layers"])
    )
    kernel = kernel["kernel"]
    assert np.array_equal(up["amax_kernel"], magnitude(kernel, (1, 2) if scan else None))
    assert (up["amax_inputs"] > 0.5).all() and (up["amax_gradients"] > 0).all()
    assert work.evaluate(state, text(4))["loss"] < losses[0]


EXPERTS = {"num_experts": 4, "num_kv_heads": 2, "shared_ffn_size": 16}
WITH_PLACES = {**EXPERTS, "routing": "capacity"}


@pytest.mark.parametrize(
    ("method", "micro_batches", "scan", "experts"),
    [
        (aq.Zero3Parallel(), 2, True, {}),
        pytest.param(aq.Megatron(data=2, tensor=4), 2, False, {}, marks=pytest.mark.slow),
        pytest.param(
            aq.Megatron(data=2, tensor=2, pipeline=2), 4, False, {}, marks=pytest.mark.slow
        ),
        pytest.param(aq.Zero3Parallel(), 2, False, WITH_PLACES, marks=pytest.mark.slow),
        (aq.Megatron(data=2, expert=2, tensor=2), 2, True, EXPERTS),
        (aq.Megatron(data=8, zero_stage=1), 2, False, {}),
        pytest.param(
            aq.Megatron(data=4, pipeline=2, zero_stage=1), 4, False, {}, marks=pytest.mark.slow
        ),
        pytest.param(
            aq.Megatron(data=2, expert=2, pipeline=2), 4, False, EXPERTS, marks=pytest.mark.slow
        ),
        pytest.param(
            aq.Megatron(data=2, expert=2, pipeline=2),
            4,
            False,
            WITH_PLACES,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_parallel_steps_equal_plain_ones(method, micro_batches, scan, experts, monkeypatch, x64):
    # In float64 rounding hides nothing; products still are of 8-bit floats.
    wide = Precision(compute="float64", params="float64", is_fp8=True)
    monkeypatch.setitem(PRECISIONS, "fp8", wide)
    rows = 16
    model = "mixtral-8x7b" if experts else "llama-7b"
    work = build(model, rows, overrides=SIZES | experts, dtype="fp8", scan=scan)
    plan = aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=aq.Cluster.preset("8xcpu"),
        method=method,
        num_micro_batches=micro_batches,
    )
    run = aq.parallelize(work.train_step, plan, devices=jax.devices()[:8])
    plain, split_up = work.init(jax.random.key(0)), run.init(work.init, jax.random.key(0))
    step = jax.jit(work.train_step)
    for _ in range(2):
        plain, wanted = step(plain, text(rows))
        split_up, found = run(split_up, text(rows))
        assert float(found["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-9)
    for name in ("params", "amax"):
        for a, b in zip(jax.tree.leaves(split_up[name]), jax.tree.leaves(plain[name]), strict=True):
            wanted = np.asarray(b)
            assert np.max(np.abs(np.asarray(a) - wanted)) <= 1e-7 * np.max(np.abs(wanted)) + 1e-30


@pytest.mark.parametrize("device", ["A100-80GB", "V100-16GB", "v5e", "MI300X"])
def test_devices_without_8_bit_floats_are_refused(device):
    with pytest.raises(InputError, match=rf"for which {device} has no units \(H100.* --dtype bf16"):
        build("gpt-125m", 8, dtype="float8", device=DEVICES[device])


def test_convolutions_have_no_8_bit_form():
    with pytest.raises(InputError, match="for linear layers, and wide-resnet has convolutions"):
        build("wide-resnet-250m", 32, dtype="fp8")


def test_inference_takes_the_parameters_in_bf16():
    work = build("gpt-125m", 2, overrides=SIZES, dtype="fp8")
    inference = build_inference("gpt-125m", 2, overrides=SIZES, dtype="fp8")
    assert jax.tree.structure(inference.params) == jax.tree.structure(work.state["params"])


def test_magnitudes_of_experts_are_those_of_the_last_step():
    work = build("mixtral-8x7b", 4, overrides=SIZES | EXPERTS, dtype="fp8", learning_rate=1e-2)
    wide = build("mixtral-8x7b", 4, overrides=SIZES | EXPERTS, dtype="bf16")
    assert jax.tree.structure(work.state["params"]) == jax.tree.structure(wide.state["params"])
    state, losses = work.init(jax.random.key(0)), []
    for _ in range(8):
        state, metrics = jax.jit(work.train_step)(state, text(4))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.5
    own, params = state["amax"]["layers"][0]["moe"], state["params"]["layers"][0]["moe"]
    for name in ("gate", "up", "down"):
        assert own[f"amax_kernel_{name}"] == magnitude(params[name])
        assert own[f"amax_inputs_{name}"] > 0 and own[f"amax_gradients_{name}"] > 0
    assert own["amax_inputs_gate"] == own["amax_inputs_up"] != own["amax_inputs_down"]


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("gpt-2.6b", {}),
        ("mixtral-8x7b", {"seq_len": 1024}),
        pytest.param(
            "mixtral-8x7b", {"seq_len": 1024, "routing": "capacity"}, marks=pytest.mark.slow
        ),
    ],
)
def test_eight_bits_are_predicted_faster(model, changes):
    seconds = {}
    for dtype in ("bf16", "fp8"):
        work = build(
            model,
            32,
            dtype=dtype,
            device=DEVICES["H100"],
            scan=True,
            overrides={"num_layers": 2, **changes},
        )
        plan = aq.plan(
            work.train_step,
            work.state,
            work.batch,
            cluster=aq.Cluster.preset("8xH100"),
            method=aq.Zero2Parallel(),
        )
        seconds[dtype] = plan.prediction.compute_s
    assert seconds["fp8"] < 0.85 * seconds["bf16"]
