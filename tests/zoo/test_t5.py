"""T5: targets are predicted from the whole input and the targets before them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aliquot.core import InputError
from aliquot.zoo import build, configure
from aliquot.zoo._precision import PRECISIONS
from aliquot.zoo._t5 import DecoderBlock, EncoderBlock, Ends

TINY = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "head_size": 8,
    "vocab_size": 64,
    "seq_len": 16,
}
TARGET_LEN = 4


def tiny(**options):
    return build("t5-770m", 4, overrides=TINY, **({"dtype": "float32"} | options))


def batch_of(seed=0):
    random = np.random.default_rng(seed)
    return {
        "inputs": random.integers(0, 64, (4, 16), np.int32),
        "targets": random.integers(0, 64, (4, TARGET_LEN), np.int32),
    }


def stacked(layers):
    sides = {"encoder": layers[:2], "decoder": layers[2:]}
    return {
        side: jax.tree.map(lambda *leaves: jnp.stack(leaves), *some) for side, some in sides.items()
    }


def test_the_encoder_sees_both_sides_and_the_decoder_earlier_tokens_and_the_encoder():
    config = configure("t5-770m", **TINY)
    run = jax.jit(lambda module, *inputs: module(*inputs))
    key, other = jax.random.split(jax.random.key(1))
    x, encoded = jax.random.normal(key, (1, TARGET_LEN, 32)), jax.random.normal(other, (1, 16, 32))

    def moved(module, at, *inputs):
        """Positions of the result that a change of an input at its third position moves."""
        changed = [
            value.at[:, 2, 0].add(1.0) if i == at else value for i, value in enumerate(inputs)
        ]
        return (np.abs(run(module, *changed) - run(module, *inputs)).max(axis=-1) > 1e-7)[
            0
        ].tolist()

    encoder = EncoderBlock(config, PRECISIONS["float32"], rngs=nnx.Rngs(params=0))
    assert moved(encoder, 0, encoded) == [True] * 16
    decoder = DecoderBlock(config, PRECISIONS["float32"], rngs=nnx.Rngs(params=0))
    assert moved(decoder, 0, x, encoded) == [False, False, True, True]
    assert moved(decoder, 1, x, encoded) == [True] * 4


def test_the_decoder_reads_the_target_before():
    ends = Ends(configure("t5-770m", **TINY), PRECISIONS["float32"], rngs=nnx.Rngs(params=0))
    targets = batch_of()["targets"]
    before = np.hstack([np.zeros((4, 1), np.int32), targets[:, :-1]])
    want = ends.embed.embedding[...][before] + ends.target_position[...]
    np.testing.assert_allclose(ends.embed_targets(targets), want, rtol=1e-6)


def test_loss_starts_near_a_uniform_guess_and_falls():
    workload = tiny(learning_rate=1e-2, scan=True)
    state, step = jax.jit(workload.init)(jax.random.key(0)), jax.jit(workload.train_step)
    losses = []
    for _ in range(8):
        state, metrics = step(state, batch_of())
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(math.log(64), rel=0.02)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_scanned_and_unrolled_forms_agree(recompute, x64):
    def work(**form):
        return tiny(dtype="float64", optimizer="sgd", recompute=recompute, **form)

    start = jax.jit(work().init)(jax.random.key(0))
    loop = start | {"params": start["params"] | {"layers": stacked(start["params"]["layers"])}}
    scanned = jax.jit(work(scan=True).init)(jax.random.key(0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), loop, scanned)
    state, metrics = jax.jit(work().train_step)(start, batch_of())
    other, other_metrics = jax.jit(work(scan=True).train_step)(loop, batch_of())
    assert float(metrics["loss"]) == pytest.approx(float(other_metrics["loss"]), rel=1e-12)
    one = state["params"] | {"layers": stacked(state["params"]["layers"])}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), one, other["params"]
    )


def test_layers_share_one_trace():
    workload = tiny()
    equations = jax.make_jaxpr(workload.train_step)(workload.state, workload.batch).eqns
    blocks = [
        eqn.params["jaxpr"]
        for eqn in equations
        if eqn.primitive.name == "jit" and "block" in eqn.params["name"]
    ]
    assert len(blocks) == 8
    assert len({id(jaxpr) for jaxpr in blocks}) == 4


@pytest.mark.parametrize("name", ["t5-770m", "t5-11b", "t5-22b"])
def test_flops_are_six_per_weight_and_token_that_it_sees(name):
    workload = build(name, 4)
    config = workload.config
    params = workload.state["params"]

    def count(tree):
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))

    encoder, decoder = params["layers"][: config.num_layers], params["layers"][config.num_layers :]
    from_encoder = sum(count((layer["cross"]["k"], layer["cross"]["v"])) for layer in decoder)
    on_source = count(encoder) + from_encoder
    on_target = count(decoder) - from_encoder + count(params["embed"])
    pairs = 2048 * 2048 + 512 * 512 + 512 * 2048
    attention = 12 * config.num_layers * config.num_heads * config.head_dim * pairs
    assert config.flops_per_example - attention == pytest.approx(
        6 * (2048 * on_source + 512 * on_target), rel=0.005
    )
    assert workload.flops_per_step == 4 * config.flops_per_example
    assert config.flops_per_token == config.flops_per_example // 2560


def test_sizes_that_follow_and_are_refused():
    assert configure("t5-770m", seq_len=512).target_len == 128
    assert configure("t5-770m", hidden_size="64", num_heads=4, head_size=0).ffn_size == 256
    assert configure("t5-11b").head_dim == 128 and configure("t5-770m", head_size=0).head_dim == 64
    with pytest.raises(InputError) as error:
        configure("t5-770m", num_layers=0, target_len=0, norm_epsilon=0)
    for part in (
        "num_layers=0 must be",
        "target_len=0 must be at least 1",
        "norm_epsilon=0.0 must be positive",
    ):
        assert part in str(error.value)
    with pytest.raises(InputError, match="hidden_size=100 is not a multiple of num_heads=16"):
        configure("t5-770m", hidden_size=100, head_size=0)
