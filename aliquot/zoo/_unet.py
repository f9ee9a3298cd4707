"""U-Net: residual blocks of convolutions on smaller and smaller images and back again, with
attention to the image and to a context; images have their channels last.

Reference: Ronneberger et al., "U-Net", 2015; Ho et al., "Denoising Diffusion Probabilistic Models",
2020, appendix B; Rombach et al., "High-Resolution Image Synthesis with Latent Diffusion Models",
2022, for the context. The sizes, one residual block at each level, and what is joined on the way up
are those of the benchmark suite of Alpa (Zheng et al., OSDI 2022).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from ._attention import attention, merge_heads, split_heads
from ._precision import Precision
from ._unet_config import ATTENTION_GROUPS, UNetConfig, UNetLayerConfig

_LONGEST_PERIOD = 10_000


class Stem(nnx.Module):
    """The first convolution, and the vector of how noisy each image is."""

    def __init__(self, config: UNetConfig, precision: Precision, *, rngs: nnx.Rngs) -> None:
        self.compute, self.num_channels = precision.compute, config.num_channels
        dense = functools.partial(_dense, precision=precision, rngs=rngs)
        self.conv = _conv(config.channels_in, config.num_channels, 3, precision, rngs)
        self.time1 = dense(config.num_channels, config.time_size)
        self.time2 = dense(config.time_size, config.time_size)

    def __call__(self, images: jax.Array, times: jax.Array) -> tuple[jax.Array, jax.Array]:
        half = self.num_channels // 2
        rates = jnp.exp(-math.log(_LONGEST_PERIOD) / half * jnp.arange(half, dtype=jnp.float32))
        angles = times.astype(jnp.float32)[:, None] * rates
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
        time = self.time2(jax.nn.silu(self.time1(waves.astype(self.compute))))
        return self.conv(images.astype(self.compute)), time


class Layer(nnx.Module):
    """A residual block, attention if the layer has it, and a change of size if it has one."""

    def __init__(
        self, layer: UNetLayerConfig, config: UNetConfig, precision: Precision, *, rngs: nnx.Rngs
    ) -> None:
        entered, width = layer.channels_in + layer.channels_skip, layer.channels_out
        self.layer = layer
        self.norm1 = _group_norm(entered, config.norm_groups, precision, rngs)
        self.conv1 = _conv(entered, width, 3, precision, rngs)
        self.time = _dense(config.time_size, width, precision, rngs)
        self.norm2 = _group_norm(width, config.norm_groups, precision, rngs)
        self.conv2 = _conv(width, width, 3, precision, rngs)
        if entered != width:
            self.shortcut = _conv(entered, width, 1, precision, rngs)
        if layer.attends:
            self.attention = Transformer(width, config, precision, rngs=rngs)
        if layer.resample:
            stride = 2 if layer.resample == "down" else 1
            self.resample = _conv(width, width, 3, precision, rngs, stride=stride)

    def __call__(
        self, x: jax.Array, time: jax.Array, context: jax.Array, *skip: jax.Array
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """The layer's result, and what is kept for the way up, if it keeps something."""
        if skip:
            x = jnp.concatenate([x, *skip], axis=-1)
        y = self.conv1(jax.nn.silu(self.norm1(x)))
        y = y + self.time(jax.nn.silu(time))[:, None, None, :]
        y = self.conv2(jax.nn.silu(self.norm2(y)))
        x = y + (self.shortcut(x) if x.shape[-1] != y.shape[-1] else x)
        if self.layer.attends:
            x = self.attention(x, context)
        kept = x
        if self.layer.resample == "up":
            # Each point four times: `(B, H, W, C) -> (B, 2 H, 2 W, C)`.
            batch, height, width, channels = x.shape
            wide = jnp.broadcast_to(x[:, :, None, :, None], (batch, height, 2, width, 2, channels))
            x = wide.reshape(batch, 2 * height, 2 * width, channels)
        if self.layer.resample:
            x = self.resample(x)
        return (x, kept) if self.layer.is_kept else x


class Transformer(nnx.Module):
    """Attention of the points of an image to each other and to a context, and a gated network."""

    def __init__(
        self, width: int, config: UNetConfig, precision: Precision, *, rngs: nnx.Rngs
    ) -> None:
        dense = functools.partial(_dense, precision=precision, rngs=rngs)
        norm = functools.partial(_layer_norm, width, precision, rngs)
        self.norm = _group_norm(width, ATTENTION_GROUPS, precision, rngs)
        self.enter, self.leave = dense(width, width), dense(width, width)
        self.norm1, self.norm2, self.norm3 = norm(), norm(), norm()
        self.to_points = Attention(width, width, config.num_heads, precision, rngs=rngs)
        self.to_context = Attention(
            width, config.context_size, config.num_heads, precision, rngs=rngs
        )
        self.up, self.gate = dense(width, 4 * width), dense(width, 4 * width)
        self.down = dense(4 * width, width)

    def __call__(self, x: jax.Array, context: jax.Array) -> jax.Array:
        y = self.enter(self.norm(x))
        y = y.reshape(y.shape[0], y.shape[1] * y.shape[2], y.shape[3])
        near = self.norm1(y)
        y = y + self.to_points(near, near)
        y = y + self.to_context(self.norm2(y), context.astype(y.dtype))
        near = self.norm3(y)
        y = y + self.down(self.up(near) * jax.nn.gelu(self.gate(near)))
        return x + self.leave(y.reshape(x.shape))


class Attention(nnx.Module):
    """Attention of points to the vectors that keys and values are made of."""

    def __init__(
        self, width: int, attended: int, num_heads: int, precision: Precision, *, rngs: nnx.Rngs
    ) -> None:
        dense = functools.partial(_dense, precision=precision, rngs=rngs)
        self.num_heads = num_heads
        self.q = dense(width, width, has_bias=False)
        self.k = dense(attended, width, has_bias=False)
        self.v = dense(attended, width, has_bias=False)
        self.out = dense(width, width)

    def __call__(self, points: jax.Array, attended: jax.Array) -> jax.Array:
        q = split_heads(self.q(points), self.num_heads)
        k, v = (split_heads(part(attended), self.num_heads) for part in (self.k, self.v))
        return self.out(merge_heads(attention(q, k, v, is_causal=False)))


class Head(nnx.Module):
    """The last convolution: what is predicted for each point."""

    def __init__(self, config: UNetConfig, precision: Precision, *, rngs: nnx.Rngs) -> None:
        self.norm = _group_norm(config.num_channels, config.norm_groups, precision, rngs)
        self.conv = _conv(config.num_channels, config.channels_out, 3, precision, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(jax.nn.silu(self.norm(x)))


def _conv(
    channels_in: int,
    channels_out: int,
    window: int,
    precision: Precision,
    rngs: nnx.Rngs,
    *,
    stride: int = 1,
) -> nnx.Conv:
    edge = (window - 1) // 2
    return nnx.Conv(
        channels_in,
        channels_out,
        kernel_size=(window, window),
        strides=stride,
        padding=((edge, edge), (edge, edge)),
        dtype=precision.compute,
        param_dtype=precision.params,
        rngs=rngs,
    )


def _dense(
    size_in: int, size_out: int, precision: Precision, rngs: nnx.Rngs, *, has_bias: bool = True
) -> nnx.Linear:
    return nnx.Linear(
        size_in,
        size_out,
        use_bias=has_bias,
        dtype=precision.compute,
        param_dtype=precision.params,
        rngs=rngs,
    )


def _group_norm(channels: int, groups: int, precision: Precision, rngs: nnx.Rngs) -> nnx.GroupNorm:
    return nnx.GroupNorm(
        channels,
        num_groups=groups,
        epsilon=1e-5,
        dtype=precision.compute,
        param_dtype=precision.params,
        rngs=rngs,
    )


def _layer_norm(width: int, precision: Precision, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        width, epsilon=1e-5, dtype=precision.compute, param_dtype=precision.params, rngs=rngs
    )
