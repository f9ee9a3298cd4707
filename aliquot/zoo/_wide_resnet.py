"""Wide-ResNet: bottlenecks of convolutions with BatchNorm, the 3 x 3 ones widened; images have
their channels last.

BatchNorm normalises by the mean and variance of the whole batch, and keeps running averages of them
for later use.

Reference: Zagoruyko and Komodakis, "Wide Residual Networks", 2016; He et al., "Deep Residual
Learning for Image Recognition", 2016, table 1; the sizes and the place of the stride are those of
the benchmark suite of Alpa (Zheng et al., OSDI 2022).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ._image_config import BottleneckConfig, WideResNetConfig
from ._precision import Precision


class Stem(nnx.Module):
    """Layers before the bottlenecks: a 7 x 7 convolution and a 3 x 3 maximum, each halving the
    image.
    """

    def __init__(self, config: WideResNetConfig, precision: Precision, *, rngs: nnx.Rngs) -> None:
        self.compute = precision.compute
        self.conv = _conv(3, config.num_channels, 7, precision, rngs, stride=2)
        self.norm = _norm(config.num_channels, precision, rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.norm(self.conv(images.astype(self.compute))))
        pooled: jax.Array = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")  # type: ignore[no-untyped-call]
        return pooled


class Bottleneck(nnx.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions whose result is added to the input, which is projected if
    the shape changes.
    """

    def __init__(self, config: BottleneckConfig, precision: Precision, *, rngs: nnx.Rngs) -> None:
        self.projects, stride = config.projects, config.stride
        self.conv1 = _conv(config.channels_in, config.channels, 1, precision, rngs)
        self.norm1 = _norm(config.channels, precision, rngs)
        self.conv2 = _conv(config.channels, config.wide_channels, 3, precision, rngs, stride=stride)
        self.norm2 = _norm(config.wide_channels, precision, rngs)
        self.conv3 = _conv(config.wide_channels, config.channels_out, 1, precision, rngs)
        # With a scale of zero a bottleneck starts as the identity, which helps deep models to start
        # training.
        self.norm3 = _norm(
            config.channels_out, precision, rngs, scale=nnx.initializers.zeros_init()
        )
        if self.projects:
            self.shortcut_conv = _conv(
                config.channels_in, config.channels_out, 1, precision, rngs, stride=stride
            )
            self.shortcut_norm = _norm(config.channels_out, precision, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(self.norm1(self.conv1(x)))
        y = jax.nn.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return jax.nn.relu(y + (self.shortcut_norm(self.shortcut_conv(x)) if self.projects else x))


class Head(nnx.Module):
    """Layers after the bottlenecks: the mean over all points, and a projection to the classes."""

    def __init__(
        self, channels: int, config: WideResNetConfig, precision: Precision, *, rngs: nnx.Rngs
    ) -> None:
        self.out = nnx.Linear(
            channels,
            config.num_classes,
            dtype=precision.compute,
            param_dtype=precision.params,
            kernel_init=nnx.initializers.normal(0.01),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(jnp.mean(x, axis=(1, 2)))


def _conv(
    channels_in: int,
    channels_out: int,
    window: int,
    precision: Precision,
    rngs: nnx.Rngs,
    *,
    stride: int = 1,
) -> nnx.Conv:
    return nnx.Conv(
        channels_in,
        channels_out,
        kernel_size=(window, window),
        strides=stride,
        padding="SAME" if window != 7 else ((3, 3), (3, 3)),
        use_bias=False,
        dtype=precision.compute,
        param_dtype=precision.params,
        kernel_init=nnx.initializers.he_normal(),
        rngs=rngs,
    )


def _norm(
    channels: int, precision: Precision, rngs: nnx.Rngs, *, scale: nnx.Initializer | None = None
) -> nnx.BatchNorm:
    norm = nnx.BatchNorm(
        channels,
        use_running_average=False,
        momentum=0.9,
        epsilon=1e-5,
        dtype=precision.compute,
        param_dtype=precision.params,
        scale_init=scale or nnx.initializers.ones_init(),
        rngs=rngs,
    )
    # Flax keeps averages in float32, whatever the dtype of parameters.
    norm.mean = nnx.BatchStat(jnp.zeros(channels, precision.params))
    norm.var = nnx.BatchStat(jnp.ones(channels, precision.params))
    return norm
