"""What the training steps of BERT, MoE, T5, Wide-ResNet and U-Net have in common with the others,
and the plans that are found for them.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot as aq
from aliquot.core import CaptureError, InputError
from aliquot.cost import make_problem
from aliquot.data import byte_tokenizer, write_tokens
from aliquot.graph import capture
from aliquot.planners import Blocks, DataParallel, PipeshardParallel, ShardParallel, Zero3Parallel
from aliquot.profiling import compose, priced_combinations, segment_step
from aliquot.zoo import MODELS, MoEConfig, WideResNetConfig, build, configure, text_for, tokens_of

MOE = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "ffn_size": 24,
    "vocab_size": 40,
    "seq_len": 8,
    "num_experts": 8,
    "group_size": 4,
}
RESNET = {"num_layers": 14, "num_channels": 8, "image_size": 16, "num_classes": 16}
BERT = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 40, "seq_len": 8}
T5 = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "head_size": 4,
    "vocab_size": 40,
    "seq_len": 8,
    "target_len": 4,
}
UNET = {"num_layers": 9, "num_channels": 32, "image_size": 8, "num_heads": 2, "context_len": 3}
# Groups of two sequences choose experts together.
TINY = {
    "moe-380m": MOE,
    "moe-690m": MOE | {"group_size": 16},
    "wide-resnet-250m": RESNET,
    "bert-base": BERT,
    "t5-770m": T5,
    "unet-470m": UNET,
}
ROWS = 16


def tiny(name, rows=ROWS, **options):
    return build(
        name, rows, overrides=TINY[name], **({"dtype": "float32", "optimizer": "sgd"} | options)
    )


def batch_of(workload, seed=0):
    random = np.random.default_rng(seed)
    batch = {
        key: (
            random.integers(0, 16, leaf.shape, np.int32)
            if leaf.dtype == np.int32
            else random.standard_normal(leaf.shape).astype(leaf.dtype)
        )
        for key, leaf in workload.batch.items()
    }
    if workload.config.family == "bert":
        # Unequally many in each sequence.
        batch["targets"] = np.where(
            random.random(batch["targets"].shape) < 0.3, batch["targets"], np.int32(-1)
        )
    return batch


def start_of(workload):
    """A state of random numbers, which is quicker to have than an initial one."""
    random = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: (
            (0.2 * random.standard_normal(x.shape)).astype(x.dtype)
            if x.shape
            else np.zeros((), x.dtype)
        ),
        workload.state,
    )


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def stacked(layers):
    """The layers of an unrolled MoE as those of a scanned one."""
    kinds = {"experts": layers[::2], "dense": layers[1::2]}
    return {
        name: jax.tree.map(lambda *leaves: jnp.stack(leaves), *some) for name, some in kinds.items()
    }


@pytest.mark.parametrize(
    ("name", "scan", "dtype"),
    [
        pytest.param(name, scan, dtype, marks=() if dtype == quick else pytest.mark.slow)
        for name, scan, quick in (
            ("moe-380m", False, "bf16"),
            ("moe-380m", True, "float16"),
            ("wide-resnet-250m", False, "float16"),
            ("bert-base", False, "float16"),
            ("bert-base", True, "bf16"),
            ("t5-770m", False, "float32"),
            ("t5-770m", True, "bf16"),
            ("unet-470m", False, "float16"),
        )
        for dtype in ("float32", "bf16", "float16")
    ],
)
def test_abstract_state_is_what_init_and_step_give(name, scan, dtype):
    """Also where JAX refuses to promote one type to another by itself."""
    workload = tiny(name, dtype=dtype, scan=scan, optimizer="adamw")
    with jax.numpy_dtype_promotion("strict"):
        assert shapes(jax.eval_shape(workload.init, jax.random.key(0))) == shapes(workload.state)
        state, metrics = jax.eval_shape(workload.train_step, workload.state, workload.batch)
    assert shapes(state) == shapes(workload.state)
    figures = {"loss", "balance_loss"} if name.startswith("moe") else {"loss"}
    assert shapes(metrics) == dict.fromkeys(figures, ((), jnp.float32))


def test_settings_rebuild_the_workload():
    own = MoEConfig(**{"name": "mine", **MOE})
    for workload in (
        tiny("moe-380m", scan=True),
        tiny("wide-resnet-250m"),
        tiny("bert-base"),
        tiny("t5-770m", scan=True),
        tiny("unet-470m"),
        build(own, 4),
        build("moe-70b", 8),
    ):
        again = build(**json.loads(json.dumps(workload.settings)))
        assert again.config == workload.config
        assert again.settings == workload.settings
        assert shapes(again.state) == shapes(workload.state)


def test_experts_and_dense_layers_take_turns_in_both_forms():
    layers = tiny("moe-380m").state["params"]["layers"]
    assert ["moe" in layer for layer in layers] == [True, False]
    assert layers[0]["moe"]["up"].shape == (8, 16, 24)
    four = {"num_layers": 4}
    scanned = build("moe-380m", 2, overrides=MOE | four, scan=True).state["params"]["layers"]
    assert scanned["experts"]["moe"]["up"].shape == (2, 8, 16, 24)
    assert scanned["dense"]["mlp"]["up"]["kernel"].shape == (2, 16, 24)


def four_layers(**options):
    return build("moe-380m", 4, overrides=MOE | {"num_layers": 4}, **options)


@pytest.mark.slow
def test_scanned_and_unrolled_experts_start_equal():
    def gates(scan):
        layers = jax.jit(lambda key: four_layers(scan=scan).init(key)["params"]["layers"])(
            jax.random.key(0)
        )
        return (layers if scan else stacked(layers))["experts"]["moe"]["gate"]

    np.testing.assert_allclose(gates(scan=True), gates(scan=False), rtol=1e-6)


def test_scanned_and_unrolled_experts_agree(x64):
    work, loop = (
        four_layers(dtype="float64", optimizer="sgd", scan=scan) for scan in (False, True)
    )
    state, batch = start_of(work), batch_of(work)
    same = state | {"params": state["params"] | {"layers": stacked(state["params"]["layers"])}}
    figures, others = (
        jax.jit(lambda state, batch, form=form: form.train_step(state, batch)[1])(start, batch)
        for form, start in ((work, state), (loop, same))
    )
    assert {k: float(v) for k, v in figures.items()} == pytest.approx(
        {k: float(v) for k, v in others.items()}, rel=1e-9
    )


def test_no_scan_where_layers_differ():
    with pytest.raises(InputError, match="no scan for wide-resnet: its layers differ in shape"):
        tiny("wide-resnet-250m", scan=True)


def test_bad_sizes_are_all_listed():
    with pytest.raises(InputError) as error:
        configure(
            "moe-380m", num_layers=3, num_experts=1, seq_len=100, group_size=64, capacity_factor=0
        )
    for part in (
        "num_layers=3 must be even",
        "num_experts=1 must be",
        "seq_len=100 is not a multiple of group_size=64, nor the other way round",
    ):
        assert part in str(error.value)
    assert "capacity_factor=0.0 must be positive" in str(error.value)
    with pytest.raises(
        InputError,
        match=r"num_layers=7 is not one of 14, 26, 50.*width_factor=0 must be at least 1",
    ):
        configure("wide-resnet-1b", num_layers=7, width_factor=0)
    with pytest.raises(InputError, match="family='gpt' is not wide-resnet"):
        WideResNetConfig(name="x", family="gpt", num_layers=50, num_channels=8, width_factor=1)


def test_sizes_that_follow():
    assert configure("moe-380m", hidden_size=64, num_heads=4).ffn_size == 512
    assert configure("moe-380m", seq_len="256").group_size == 256
    assert configure("moe-27b").capacity == 42
    assert configure("moe-380m", seq_len=512, group_size=2048).batch_multiple == 4
    assert configure("moe-380m", group_size=512).batch_multiple == 1


def test_a_batch_holds_whole_groups_of_tokens():
    assert build("moe-7.1b", 32, overrides={"group_size": 2048}).config.batch_multiple == 2
    with pytest.raises(
        InputError,
        match=r"global_batch=3 is not a multiple of 2, the sequences whose tokens choose",
    ):
        build("moe-7.1b", 3, overrides={"group_size": 2048})


TEXT = np.arange(5000, dtype=np.uint8)


def test_tokens_of_another_vocabulary_are_refused(tmp_path):
    def tokens(vocabulary, mask=None):
        made = dataclasses.replace(byte_tokenizer(), vocabulary=vocabulary, mask=mask)
        return write_tokens(tmp_path / "tokens.bin", [bytes(9999)], made)

    with pytest.raises(
        InputError, match=r"knows 40 tokens, and .*tokens.bin by tokenizer bytes has 300.*another"
    ):
        text_for(tiny("moe-380m"), tokens(300))
    bert = tiny("bert-base")
    with pytest.raises(InputError, match=r"with a mask has 41\..*--set vocab_size=41"):
        text_for(bert, tokens(40))
    assert text_for(bert, tokens(40, mask=7)).mask == 7
    assert tokens_of([tmp_path / "tokens.bin"]).vocabulary == 40
    with pytest.raises(InputError, match=r"takes files of tokens or texts.*aliquot data TEXT"):
        tokens_of([tmp_path / "tokens.bin", tmp_path])


def test_text_is_not_given_to_models_of_images():
    with pytest.raises(
        InputError, match=r"wide-resnet-250m reads images.*\(images, labels\).*aliquot\.parallelize"
    ):
        text_for(tiny("wide-resnet-250m"), TEXT)
    with pytest.raises(InputError, match=r"latents.* text\. Train it .*\(images, times, con"):
        text_for(tiny("unet-470m"), TEXT)
    with pytest.raises(InputError, match=r"knows 40 tokens.*--set vocab_size=256"):
        text_for(tiny("moe-380m"), TEXT)
    text = text_for(build("moe-380m", 4, overrides=MOE | {"vocab_size": 256}), TEXT, seed=3)
    assert (text.seq_len, text.batch, text.seed, text.masked_share) == (8, 4, 3, 0)
    with pytest.raises(
        InputError, match=r"text as bytes with a mask has 257.*--set vocab_size=257"
    ):
        text_for(tiny("bert-base"), TEXT)
    assert text_for(build("bert-base", 4, overrides={"num_layers": 1}), TEXT).masked_share == 0.15
    assert text_for(build("t5-770m", 4, overrides={"num_layers": 1}), TEXT).target_len == 512


@functools.cache
def started(name):
    """A workload with a first state and a batch. Called in double precision."""
    # An encoder and a decoder of a layer each have all of T5's operators, and a stage each.
    overrides = TINY[name] | ({"num_layers": 1} if name == "t5-770m" else {})
    work = build(
        name, ROWS, overrides=overrides, dtype="float64", optimizer="sgd", learning_rate=1.0
    )
    return work, start_of(work), batch_of(work)


@functools.cache
def plain(name):
    """What the plain step makes of that."""
    work, state, batch = started(name)
    return jax.device_get(jax.jit(work.train_step)(state, batch))


def planned(work, method, num_devices=8, **options):
    cluster = aq.Cluster.preset(f"{num_devices}xcpu")
    return aq.plan(
        work.train_step, work.state, work.batch, cluster=cluster, method=method, **options
    )


def assert_same(got, want, start):
    """Every leaf, relative to the largest change of the whole tree."""
    changes = jax.tree.map(
        lambda a, b: np.abs(np.asarray(a, float) - np.asarray(b, float)).max(), want, start
    )
    scale = max(jax.tree.leaves(changes))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * scale)


METHODS = {
    "dp": (DataParallel(), 8),
    "dp 1": (DataParallel(), 1),
    "pipeline": (PipeshardParallel(num_stages=2, schedule="1f1b"), 2),
    "zero3": (Zero3Parallel(), 8),
    # Few choices: found in a tenth of the time that the next one takes, and it splits channels.
    "shard 2": (ShardParallel(mesh_shape=(2,)), 2),
    "shard 4x2": (ShardParallel(mesh_shape=(4, 2)), 8),
}


@pytest.mark.parametrize(
    ("name", "method", "micro_batches"),
    [
        pytest.param("moe-380m", "dp", 1, marks=pytest.mark.slow),
        ("moe-380m", "zero3", 2),
        pytest.param("moe-380m", "shard 4x2", 4, marks=pytest.mark.slow),
        pytest.param("wide-resnet-250m", "zero3", 1, marks=pytest.mark.slow),
        pytest.param("moe-690m", "zero3", 1, marks=pytest.mark.slow),
        # One group in each micro-batch: JAX writes another program for it.
        pytest.param("moe-690m", "dp 1", 8, marks=pytest.mark.slow),
        pytest.param("moe-690m", "shard 4x2", 4, marks=pytest.mark.slow),
        pytest.param("bert-base", "zero3", 2, marks=pytest.mark.slow),
        pytest.param("moe-690m", "pipeline", 4, marks=pytest.mark.slow),
        pytest.param("bert-base", "dp", 1, marks=pytest.mark.slow),
        ("bert-base", "pipeline", 4),
        pytest.param("bert-base", "shard 4x2", 2, marks=pytest.mark.slow),
        pytest.param("t5-770m", "zero3", 2, marks=pytest.mark.slow),
        pytest.param("t5-770m", "pipeline", 4, marks=pytest.mark.slow),
        pytest.param("t5-770m", "dp", 1, marks=pytest.mark.slow),
        pytest.param("t5-770m", "shard 4x2", 2, marks=pytest.mark.slow),
        pytest.param("wide-resnet-250m", "shard 2", 1, marks=pytest.mark.slow),
        pytest.param("wide-resnet-250m", "shard 4x2", 1, marks=pytest.mark.slow),
        pytest.param("unet-470m", "zero3", 2, marks=pytest.mark.slow),
        ("unet-470m", "shard 2", 1),
        pytest.param("unet-470m", "pipeline", 4, marks=pytest.mark.slow),
    ],
)
def test_a_plan_computes_the_numbers_of_the_plain_step(name, method, micro_batches, x64):
    work, start, batch = started(name)
    wanted, metrics = plain(name)
    chosen, num_devices = METHODS[method]
    plan = planned(work, chosen, num_devices, num_micro_batches=micro_batches)
    state, found = aq.parallelize(work.train_step, plan)(start, batch)
    assert {k: float(v) for k, v in found.items()} == pytest.approx(
        {k: float(v) for k, v in metrics.items()}, rel=1e-9
    )
    assert_same(jax.device_get(state), wanted, start)


@pytest.mark.slow
def test_a_scanned_encoder_and_decoder_composed_of_segments_run_as_the_plain_step(x64, monkeypatch):
    monkeypatch.setattr("aliquot.profiling._segments._MOST", 6)
    work = tiny("t5-770m", dtype="float64", learning_rate=1.0, scan=True)
    start, batch = start_of(work), batch_of(work)
    cluster = aq.Cluster.preset("2xcpu")
    step = segment_step(
        make_problem(capture(work.train_step, work.state, work.batch), cluster), (2,)
    )
    assert [len(kind.blocks) for kind in step.kinds] == [0, 4, 7, 1]
    (best,) = compose(step, priced_combinations(step), most=1)
    option = {
        b: o
        for k, chosen in enumerate(best.options)
        for b, o in zip(step.blocks_of(k), chosen, strict=True)
    }
    intra = Blocks(factors="cfp", only=tuple(option[b] for b in range(len(step.blocks))))
    plan = planned(work, ShardParallel(intra=intra, mesh_shape=(2,)), 2)
    assert plan.prediction.step_time_s == pytest.approx(
        step.whole(best.options).step_time_s, rel=1e-3
    )
    wanted, metrics = jax.device_get(jax.jit(work.train_step)(start, batch))
    state, found = aq.parallelize(work.train_step, plan)(start, batch)
    assert {k: float(v) for k, v in found.items()} == pytest.approx(
        {k: float(v) for k, v in metrics.items()}, rel=1e-9
    )
    assert_same(jax.device_get(state), wanted, start)


def test_statistics_of_a_batch_do_not_decompose_unless_that_is_asked_for(x64):
    work, start, batch = started("wide-resnet-250m")
    with pytest.raises(CaptureError, match='micro_batch_semantics="independent"'):
        planned(work, DataParallel(), num_micro_batches=2)
    method, num_devices = METHODS["shard 2"]
    plan = planned(
        work, method, num_devices, num_micro_batches=2, micro_batch_semantics="independent"
    )
    assert plan.micro_batch_semantics == "independent"
    _, metrics = aq.parallelize(work.train_step, plan)(start, batch)
    loss = jax.jit(lambda state, batch: work.train_step(state, batch)[1]["loss"])
    halves = [
        loss(start, {key: leaf[rows] for key, leaf in batch.items()})
        for rows in (slice(0, 8), slice(8, 16))
    ]
    assert float(metrics["loss"]) == pytest.approx(float(sum(halves)) / 2, rel=1e-9)


@pytest.mark.parametrize("name", ["moe-70b", "wide-resnet-13b"])
def test_flops_are_six_per_weight_used(name):
    workload = build(name, 4)
    config = MODELS[name]
    assert workload.flops_per_step == 4 * config.flops_per_example
    if name.startswith("moe"):
        unused = 16 * (config.num_experts - 2) * 2 * config.hidden_size * config.ffn_size
        attention = 12 * config.num_layers * config.seq_len * config.hidden_size
        assert config.flops_per_token - attention == pytest.approx(
            6 * (workload.num_parameters - unused), rel=0.01
        )
