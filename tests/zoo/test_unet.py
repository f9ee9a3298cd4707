"""U-Nets: their layers, what they cost, and that they learn. `test_families.py` compares their
plans with the plain step.
"""

import jax
import numpy as np
import pytest
from zoo.products import forward_flops

from aliquot.core import InputError
from aliquot.zoo import MODELS, build, configure

TINY = {"num_layers": 9, "num_channels": 32, "image_size": 8, "num_heads": 2, "context_len": 3}


def batch_of(workload):
    random = np.random.default_rng(0)
    return {
        name: random.integers(0, 1000, leaf.shape).astype(leaf.dtype)
        if name == "times"
        else random.standard_normal(leaf.shape).astype(leaf.dtype)
        for name, leaf in workload.batch.items()
    }


def test_layers_go_down_across_and_up_again():
    layers = list(MODELS["unet-470m"].layers())
    assert [layer.size for layer in layers] == [32, 16, 8, 4, 4, 4, 4, 8, 16, 32, 32]
    assert [layer.channels_out // 320 for layer in layers] == [1, 2, 4, 4, 4, 4, 4, 4, 2, 1, 1]
    # What is joined on the way up is what the first convolution and the way down kept, last first.
    kept = [320, *(layer.channels_out for layer in layers if layer.is_kept)]
    assert [layer.channels_skip for layer in layers if layer.channels_skip] == kept[::-1]
    assert [layer.attends for layer in layers] == [True] * 3 + [False, True, False] + [True] * 3 + [
        False
    ] * 2


def test_flops_are_those_of_the_products():
    from aliquot.zoo._precision import PRECISIONS
    from aliquot.zoo._unet_network import UNetNetwork

    config = configure("unet-470m", **TINY, norm_groups=8)
    network = UNetNetwork(config, PRECISIONS["float32"], recompute="none")
    shapes = network.shapes()
    workload = build(config, 4)
    traced = jax.make_jaxpr(network.loss)(shapes["params"], shapes, workload.batch).jaxpr
    first = 2 * 8 * 8 * 9 * 3 * 32
    assert 3 * forward_flops(traced) - 4 * first == workload.flops_per_step


def test_time_and_context_are_used_and_the_step_learns():
    workload = build("unet-470m", 4, overrides=TINY, learning_rate=3e-3)
    state, batch = jax.jit(workload.init)(jax.random.key(0)), batch_of(workload)
    loss = jax.jit(lambda batch: workload.evaluate(state, batch)["loss"])
    for changed in ({"times": batch["times"] + 1}, {"context": -batch["context"]}):
        assert float(loss(batch | changed)) != float(loss(batch))
    step = jax.jit(workload.train_step)
    losses = []
    for _ in range(5):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]


def test_sizes_that_cannot_be_are_all_listed():
    with pytest.raises(InputError) as refused:
        configure("unet-470m", num_channels=40, image_size=12, norm_groups=3)
    for fault in (
        "image_size=12 cannot be halved 3 times",
        "num_channels=40 is not a multiple of norm_groups, 3",
        "num_channels=40 is not a multiple of the groups before attention, 32",
    ):
        assert fault in str(refused.value)
    with pytest.raises(InputError, match="num_layers=8 is not one of 9, 11, 13, 15, 17"):
        configure("unet-470m", num_layers=8)
    assert configure("unet-470m", num_channels=64).context_size == 256
    with pytest.raises(InputError, match="fp8 is for linear layers, and unet has convolutions"):
        build("unet-470m", 4, overrides=TINY, dtype="fp8")
