"""Bottlenecks of a Wide-ResNet: what they keep, and what they cost."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo.products import forward_flops

from aliquot.zoo import MODELS, build, configure

TINY = {"num_layers": 14, "num_channels": 4, "image_size": 16, "num_classes": 8}
KEPT = ("block", "none")


@functools.cache
def started():
    workload = build("wide-resnet-250m", 4, overrides=TINY, learning_rate=1e-2)
    return workload, jax.jit(workload.init)(jax.random.key(0)), jax.jit(workload.train_step)


def batch_of(workload, seed=0):
    keys = jax.random.split(jax.random.key(seed))
    images, labels = workload.batch["images"], workload.batch["labels"]
    return {
        "images": 2 + 3 * jax.random.normal(keys[0], images.shape, images.dtype),
        "labels": jax.random.randint(keys[1], labels.shape, 0, 8, labels.dtype),
    }


def test_bottlenecks_of_the_smallest_size():
    blocks = list(MODELS["wide-resnet-250m"].bottlenecks())
    assert len(blocks) == 16
    assert [b.channels_out for b in blocks[::5]] == [640, 1280, 2560, 5120]
    assert [b.size_in for b in blocks[2:5]] == [56, 56, 28]
    assert blocks[-1].size_out == 7
    assert [i for i, b in enumerate(blocks) if b.projects] == [0, 3, 7, 13]
    assert {b.wide_channels // b.channels for b in blocks} == {2}


def test_flops_are_those_of_the_products():
    from aliquot.zoo._image_network import ImageNetwork
    from aliquot.zoo._precision import PRECISIONS

    config = configure("wide-resnet-250m", **(TINY | {"image_size": 34}))
    network = ImageNetwork(config, PRECISIONS["float32"], recompute="none")
    shapes = network.shapes()
    workload = build(config, 4)
    traced = jax.make_jaxpr(network.loss)(shapes["params"], shapes, workload.batch).jaxpr
    first = 2 * 17 * 17 * 49 * 3 * 4
    assert (
        3 * forward_flops(traced) - 4 * first
        == workload.flops_per_step
        == 4 * config.flops_per_image
    )


@pytest.mark.slow
def test_averages_move_a_tenth_of_the_way_to_the_batch():
    workload, state, step = started()
    batch = batch_of(workload)
    new, metrics = step(state, batch)
    assert float(metrics["loss"]) == pytest.approx(math.log(8), rel=0.1)
    kernel = state["params"]["stem"]["conv"]["kernel"]
    out = jax.lax.conv_general_dilated(
        batch["images"],
        kernel,
        (2, 2),
        ((3, 3), (3, 3)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    found = new["batch_stats"]["stem"]["norm"]
    np.testing.assert_allclose(found["mean"], 0.1 * out.mean((0, 1, 2)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["var"], 0.9 + 0.1 * out.var((0, 1, 2)), rtol=1e-4)
    moved = jax.tree.map(
        lambda a, b: bool((a != b).any()), new["batch_stats"], state["batch_stats"]
    )
    assert all(jax.tree.leaves(moved))


def test_state_keeps_its_shape_and_learns():
    workload, state, step = started()
    same = jax.tree.map(
        lambda a, b: a.shape == b.shape and a.dtype == b.dtype, state, workload.state
    )
    assert all(jax.tree.leaves(same))
    losses = []
    for _ in range(6):
        state, metrics = step(state, batch_of(workload))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.5


def parts(workload):
    """The modules of a traced step, forward and then backward."""
    equations = jax.make_jaxpr(workload.train_step)(workload.state, workload.batch).eqns
    return [
        eqn for eqn in equations if eqn.primitive.name == "jit" and eqn.params["name"] == "_apply"
    ]


def test_recomputation_keeps_only_what_enters_a_bottleneck():
    # The first three are the stem and two bottlenecks, with and without a projection.
    block, none = (
        parts(build("wide-resnet-250m", 4, overrides=TINY | {"num_layers": 26}, recompute=r))
        for r in KEPT
    )
    results = [1 + 2 * 4, 1 + 2 * 3]
    assert [len(part.outvars) for part in block[1:3]] == results
    assert all(
        len(part.outvars) > count + 5 for part, count in zip(none[1:3], results, strict=True)
    )


def test_bottlenecks_of_one_shape_share_one_trace():
    traces = [
        part.params["jaxpr"]
        for part in parts(build("wide-resnet-250m", 4, overrides=TINY | {"num_layers": 50}))
    ]
    # Stem, head and 16 bottlenecks of 8 shapes, forward and backward.
    assert len(traces) == 2 * (2 + 16)
    assert len({id(jaxpr) for jaxpr in traces}) == 2 * (2 + 8)


def test_usual_dtype_is_float32_and_others_can_be_asked_for():
    assert build("wide-resnet-250m", 4, overrides=TINY).settings["dtype"] == "float32"
    half = build("wide-resnet-250m", 4, overrides=TINY, dtype="float16")
    assert "loss_scale" in half.state
    assert {leaf.dtype for leaf in jax.tree.leaves(half.state["batch_stats"])} == {
        jnp.dtype("float32")
    }
    new, _ = jax.eval_shape(half.train_step, half.state, half.batch)
    assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(lambda x: x.dtype, half.state)
