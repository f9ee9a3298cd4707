"""Operators that XLA splits badly in the form JAX gives them: convolutions in groups of devices,
Fourier transforms.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime.planned import parallel

import aliquot as aq

ROWS = 32


def arguments(batch=ROWS):
    random = np.random.default_rng(0)
    sizes = {"first": (2, 2, 3, 4), "second": (3, 3, 4, 8), "deep": (3, 3, 1, 16)}
    params = {name: random.normal(size=size) / 3 for name, size in sizes.items()}
    images = random.normal(size=(batch, 8, 8, 3))
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, images))


def convolve(image, kernel, stride, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        image,
        kernel,
        (stride, stride),
        "VALID",
        dimension_numbers=numbers,
        feature_group_count=groups,
    )


def loss(params, images):
    hidden = convolve(convolve(images, params["first"], 2), params["second"], 1)
    return jnp.mean(
        jnp.tanh(
            convolve(jnp.pad(hidden, ((0, 0), (1, 1), (1, 1), (0, 0))), params["deep"], 1, groups=8)
        )
    )


def of_the_batch(params, images):
    return jax.tree.map(lambda p, g: p - 9.0 * g, params, jax.grad(loss)(params, images))


def clipped_for_each_image(params, images):
    """As training with differential privacy does: the gradient of each image is clipped before they
    are added up.
    """

    def loss(params, images):
        return jnp.mean(
            jnp.tanh(convolve(convolve(images, params["first"], 2), params["second"], 1))
        )

    grads = jax.vmap(lambda image: jax.grad(loss)(params, image[None]))(images)
    norms = jnp.sqrt(sum(jnp.sum(g**2, axis=(1, 2, 3, 4)) for g in jax.tree.leaves(grads)))
    scale = jnp.minimum(1.0, 0.03 / norms)
    return jax.tree.map(lambda p, g: p - jnp.einsum("n,nhwio->hwio", scale, g), params, grads)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
@pytest.mark.parametrize("step", [of_the_batch, clipped_for_each_image])
def test_gradients_of_kernels(step, num_micro_batches):
    """With four micro-batches each of the eight devices has one image at a time."""
    args = arguments()
    planned = parallel(step, *args, method=aq.DataParallel(), num_micro_batches=num_micro_batches)
    check = planned.check(*args)
    assert check.largest < 1e-5, str(check)


@pytest.mark.parametrize("batch", [32, 64])
def test_images_stay_where_they_are(batch):
    args = arguments(batch)
    planned = parallel(of_the_batch, *args, method=aq.DataParallel(), num_micro_batches=4)
    text = planned.lower().compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text


def mixed_by_transforms(params, images):
    """A layer that mixes positions in frequency space, there and back."""

    def loss(params, images):
        waves = jnp.fft.rfft2(images, axes=(1, 2)) * params["first"].sum()
        mixed = jnp.fft.irfft2(waves, s=(8, 8), axes=(1, 2)) + jnp.fft.fft(images, axis=1).real
        return jnp.mean(jnp.tanh(jnp.einsum("nhwi,xyio->nhwo", mixed, params["first"])) ** 2)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, images))


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_each_device_transforms_what_it_has(num_micro_batches):
    args = arguments()
    planned = parallel(
        mixed_by_transforms, *args, method=aq.DataParallel(), num_micro_batches=num_micro_batches
    )
    check = planned.check(*args)
    assert check.largest < 1e-5, str(check)
    text = planned.lower().compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text
