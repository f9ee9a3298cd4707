"""ATen operators of networks: products, norms, convolutions, pools, attention and losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..zoo._attention import attention
from ._operators import operator, table, wide

table(
    {
        "mm.default bmm.default matmul.default dot.default mv.default": jnp.matmul,
        "einsum.default": lambda equation, operands, **_: jnp.einsum(equation, *operands),
        "gelu.default": lambda x, approximate="none": jax.nn.gelu(
            x, approximate=approximate == "tanh"
        ),
        "silu.default": jax.nn.silu,
        "mish.default": jax.nn.mish,
        "hardswish.default": jax.nn.hard_swish,
        "hardsigmoid.default": jax.nn.hard_sigmoid,
        "hardtanh.default": lambda x, low=-1, high=1: jnp.clip(x, low, high),
        "leaky_relu.default": lambda x, slope=0.01: jax.nn.leaky_relu(x, slope),
        "softmax.int _softmax.default": lambda x, dim, *_, **__: jax.nn.softmax(wide(x), dim),
        "log_softmax.int _log_softmax.default": lambda x, dim, *_, **__: jax.nn.log_softmax(
            wide(x), dim
        ),
    }
)


@operator("addmm.default", "baddbmm.default", "addmv.default")
def _addmm(bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = jnp.matmul(x, y)
    product = product if alpha == 1 else alpha * product
    return product + (bias if beta == 1 else beta * bias)


@operator("linear.default")
def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    product = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return product if bias is None else product + bias


@operator("embedding.default")
def _embedding(weight: Any, indices: Any, padding: int = -1, *_: Any) -> Any:
    rows = jnp.take(weight, indices, axis=0)
    if padding < 0:
        return rows
    # The row for padding is not trained.
    return jnp.where((indices == padding)[..., None], jax.lax.stop_gradient(rows), rows)


@operator("elu.default")
def _elu(x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    safe = jnp.where(x > 0, 0, x) * input_scale
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(safe))


@operator("softplus.default")
def _softplus(x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    return jnp.where(x * beta > threshold, x, jax.nn.softplus(x * beta) / beta)


# Norms.


def _normalized(x: Any, dims: tuple[int, ...], eps: Any) -> tuple[Any, Any, Any]:
    mean = jnp.mean(x, dims, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(x - mean), dims, keepdims=True) + eps)
    return (x - mean) * rstd, mean, rstd


def _affine(x: Any, weight: Any, bias: Any, shape: Sequence[int] | None = None) -> Any:
    if weight is not None:
        x = x * (weight if shape is None else weight.reshape(shape))
    return x if bias is None else x + (bias if shape is None else bias.reshape(shape))


def _layer_norm(
    x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: Any = 1e-5, *_: Any
) -> Any:
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    normalized, mean, rstd = _normalized(wide(x), dims, eps)
    return _affine(normalized, weight, bias).astype(x.dtype), mean, rstd


table(
    {
        "native_layer_norm.default": _layer_norm,
        "layer_norm.default": lambda *given, **named: _layer_norm(*given, **named)[0],
    }
)


@operator("rms_norm.default")
def _rms_norm(x: Any, shape: Sequence[int], weight: Any = None, eps: Any = None) -> Any:
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    if eps is None:
        eps = jnp.finfo(x.dtype).eps  # type: ignore[no-untyped-call]
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide(x)), dims, keepdims=True) + eps)
    return _affine(wide(x) * rstd, weight, None)


@operator("group_norm.default")
def _group_norm(
    x: Any, groups: int, weight: Any = None, bias: Any = None, eps: Any = 1e-5, *_: Any
) -> Any:
    grouped = wide(x).reshape(x.shape[0], groups, -1)
    normalized, _, _ = _normalized(grouped, (2,), eps)
    channels = (1, x.shape[1], *(1 for _ in x.shape[2:]))
    return _affine(normalized.reshape(x.shape), weight, bias, channels)


def _batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: Any,
    eps: Any,
) -> Any:
    """Results, mean and 1 / deviation of the batch, and new running figures."""
    dims = (0, *range(2, x.ndim))
    channels = (1, x.shape[1], *(1 for _ in x.shape[2:]))
    if not training:
        rstd = jax.lax.rsqrt(running_var + eps)
        normalized = (x - running_mean.reshape(channels)) * rstd.reshape(channels)
        none = jnp.zeros((0,), x.dtype)
        return _affine(normalized, weight, bias, channels), none, none, running_mean, running_var
    normalized, mean, rstd = _normalized(wide(x), dims, eps)
    count = x.size // x.shape[1]
    mean_c, var_c = mean.reshape(-1), (1 / jnp.square(rstd) - eps).reshape(-1)
    unbiased = var_c * (count / max(count - 1, 1))
    return (
        _affine(normalized, weight, bias, channels).astype(x.dtype),
        mean_c,
        rstd.reshape(-1),
        running_mean + momentum * (jax.lax.stop_gradient(mean_c) - running_mean),
        running_var + momentum * (jax.lax.stop_gradient(unbiased) - running_var),
    )


table(
    {
        "_native_batch_norm_legit_functional.default": _batch_norm,
        "_native_batch_norm_legit_no_training.default": lambda x, w, b, mean, var, momentum, eps: (
            _batch_norm(x, w, b, mean, var, False, momentum, eps)[:3]
        ),
    }
)


# Convolutions and pools, of (batch, channels, ...).


def _as_many(value: Any, count: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


@operator("conv1d.default", "conv2d.default", "conv3d.default", "conv1d.padding", "conv2d.padding")
def _conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    dims = weight.ndim - 2
    pads: Any
    if isinstance(padding, str):
        pads = padding.upper()
    else:
        pads = [(width, width) for width in _as_many(padding, dims)]
    # A single example needs no dim for the batch.
    batch = x if x.ndim == weight.ndim else x[None]
    y = jax.lax.conv_general_dilated(
        batch,
        weight,
        _as_many(stride, dims),
        pads,
        rhs_dilation=_as_many(dilation, dims),
        feature_group_count=groups,
    )
    y = y if bias is None else y + bias.reshape(-1, *(1 for _ in range(dims)))
    return y if x.ndim == weight.ndim else y[0]


@operator("convolution.default")
def _convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    if transposed:
        raise NotImplementedError("a transposed convolution")
    return _conv(x, weight, bias, stride, padding, dilation, groups)


def _windows(
    x: Any, kernel: Any, stride: Any, padding: Any, ceil: bool, dilation: Any = 1
) -> dict[str, Any]:
    """Arguments of `reduce_window` for the last two dims."""
    sizes, skips = _as_many(kernel, 2), _as_many(dilation, 2)
    steps = _as_many(stride or kernel, 2)
    pads = []
    for length, size, step, width, skip in zip(
        x.shape[-2:], sizes, steps, _as_many(padding, 2), skips
    ):
        reach = (size - 1) * skip + 1
        left = length + 2 * width - reach
        count = left // step + 1
        # A last window that does not fit begins inside, or is none.
        if ceil and left % step and count * step < length + width:
            count += 1
        pads.append((width, max(width, (count - 1) * step + reach - length - width)))
    none = [1] * (x.ndim - 2)
    return {
        "window_dimensions": (*none, *sizes),
        "window_strides": (*none, *steps),
        "padding": (*[(0, 0)] * (x.ndim - 2), *pads),
        "window_dilation": (*none, *skips),
    }


@operator("max_pool2d.default")
def _max_pool2d(
    x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
) -> Any:
    windows = _windows(x, kernel, stride, padding, ceil, dilation)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, **windows)


@operator("avg_pool2d.default")
def _avg_pool2d(
    x: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil: bool = False,
    count_padding: bool = True,
    divisor: int | None = None,
) -> Any:
    windows = _windows(x, kernel, stride, padding, ceil)
    total = jax.lax.reduce_window(wide(x), 0.0, jax.lax.add, **windows)
    if divisor:
        return total / divisor
    ones = jnp.ones(x.shape[-2:])
    if count_padding:
        widths = [(w, w) for w in _as_many(padding, 2)]
        ones, windows = jnp.pad(ones, widths, constant_values=1), dict(windows)
        late = [(0, max(0, p[1] - w[1])) for p, w in zip(windows["padding"][-2:], widths)]
        windows["padding"] = (*windows["padding"][:-2], *late)
    for name, none in (("window_dimensions", 1), ("window_strides", 1), ("window_dilation", 1)):
        windows[name] = windows[name][-2:] or (none, none)
    windows["padding"] = windows["padding"][-2:]
    return total / jax.lax.reduce_window(ones, 0.0, jax.lax.add, **windows)


@operator("adaptive_avg_pool2d.default", "_adaptive_avg_pool2d.default")
def _adaptive_avg_pool2d(x: Any, size: Any) -> Any:
    rows, columns = _as_many(size, 2)
    height, width = x.shape[-2:]
    if height % rows or width % columns:
        raise NotImplementedError(
            f"pools of unequal sizes, {height} x {width} to {rows} x {columns}"
        )
    cut = wide(x).reshape(*x.shape[:-2], rows, height // rows, columns, width // columns)
    return jnp.mean(cut, (-3, -1))


# Attention. `kernel` is chosen by the caller.


@operator("scaled_dot_product_attention.default")
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel: str = "plain",
) -> Any:
    """`(..., heads, positions, elements)`, as in PyTorch."""
    if scale is not None and not math.isclose(scale, query.shape[-1] ** -0.5):
        query = query * (scale * query.shape[-1] ** 0.5)
    lead = query.shape[:-3]
    if mask is None and query.ndim >= 4 and query.shape[-2] == key.shape[-2]:
        q, k, v = (jnp.swapaxes(x.reshape(-1, *x.shape[-3:]), 1, 2) for x in (query, key, value))
        out = jnp.swapaxes(attention(q, k, v, is_causal=is_causal, kernel=kernel), 1, 2)
        return out.reshape(*lead, *out.shape[1:])
    groups = query.shape[-3] // key.shape[-3] if query.ndim > 2 else 1
    if groups > 1:
        key, value = jnp.repeat(key, groups, -3), jnp.repeat(value, groups, -3)
    scores = wide(jnp.matmul(query, jnp.swapaxes(key, -1, -2))) * query.shape[-1] ** -0.5
    if is_causal:
        scores = jnp.where(
            jnp.tri(scores.shape[-2], scores.shape[-1], dtype=bool), scores, -jnp.inf
        )
    if mask is not None:
        is_bool = mask.dtype == bool
        scores = jnp.where(mask, scores, -jnp.inf) if is_bool else scores + mask
    return jnp.matmul(jax.nn.softmax(scores, axis=-1).astype(query.dtype), value)


# Losses.


def _reduced(losses: Any, reduction: int) -> Any:
    """PyTorch counts: 0 for none, 1 for the mean, 2 for the sum."""
    return (losses, jnp.mean(losses), jnp.sum(losses))[reduction]


def _weighed(losses: Any, target: Any, weight: Any, reduction: int, ignored: int) -> Any:
    """Losses of classes, of which those of the ignored class do not count."""
    counts = target != ignored
    weights = counts.astype(losses.dtype)
    if weight is not None:
        weights = weights * jnp.take(weight, jnp.where(counts, target, 0))
    losses = losses * weights
    return jnp.sum(losses) / jnp.sum(weights) if reduction == 1 else _reduced(losses, reduction)


@operator("cross_entropy_loss.default")
def _cross_entropy_loss(
    logits: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    classes = 1 if logits.ndim > 1 else 0
    scores = jnp.moveaxis(wide(logits), classes, -1)
    total = jax.nn.logsumexp(scores, axis=-1)
    if jnp.issubdtype(target.dtype, jnp.floating):
        shares = jnp.moveaxis(target, classes, -1)
        shares = shares * (1 - label_smoothing) + label_smoothing / scores.shape[-1]
        shares = shares if weight is None else shares * weight
        losses = jnp.sum(shares * (total[..., None] - scores), axis=-1)
        return _reduced(losses, reduction)
    place = jnp.where(target == ignore_index, 0, target)
    losses = total - jnp.take_along_axis(scores, place[..., None], axis=-1)[..., 0]
    if label_smoothing:
        if weight is not None:
            raise NotImplementedError("smoothed labels with weights of classes")
        smooth = total - jnp.mean(scores, axis=-1)
        losses = (1 - label_smoothing) * losses + label_smoothing * smooth
    return _weighed(losses, target, weight, reduction, ignore_index)


@operator("nll_loss.default", "nll_loss_nd.default", "nll_loss2d.default")
def _nll_loss(
    scores: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100
) -> Any:
    scores = jnp.moveaxis(scores, 1 if scores.ndim > 1 else 0, -1)
    place = jnp.where(target == ignore_index, 0, target)
    losses = -jnp.take_along_axis(scores, place[..., None], axis=-1)[..., 0]
    return _weighed(losses, target, weight, reduction, ignore_index)


@operator("smooth_l1_loss.default")
def _smooth_l1_loss(x: Any, target: Any, reduction: int = 1, beta: Any = 1.0) -> Any:
    apart = jnp.abs(x - target)
    near = jnp.square(apart) / (2 * beta) if beta else apart
    return _reduced(jnp.where(apart < beta, near, apart - beta / 2), reduction)


@operator("binary_cross_entropy_with_logits.default")
def _binary_cross_entropy(
    x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1
) -> Any:
    positive = target if pos_weight is None else target * pos_weight
    losses = -positive * jax.nn.log_sigmoid(x) - (1 - target) * jax.nn.log_sigmoid(-x)
    return _reduced(losses if weight is None else losses * weight, reduction)


table(
    {
        "mse_loss.default": lambda x, target, how=1: _reduced(jnp.square(x - target), how),
        "l1_loss.default": lambda x, target, how=1: _reduced(jnp.abs(x - target), how),
        # With nothing to drop; the caller refuses other shares.
        "dropout.default native_dropout.default": lambda x, share, train=True: x,
    }
)
