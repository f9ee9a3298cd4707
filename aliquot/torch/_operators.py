"""ATen operators in JAX: one table, by the names that `torch.export` gives them without `aten.`.

Each function takes what the operator's schema in PyTorch says, with arrays of JAX in place of
tensors. The caller casts results to the dtypes that PyTorch found, so rules of promotion are not
repeated here. Where PyTorch computes in a wider dtype inside, so do these. Operators of networks
are in `_network_operators.py`.

Reference: `native_functions.yaml` of PyTorch 2.13. The names are also those of torchax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Operator = Callable[..., Any]

OPERATORS: dict[str, Operator] = {}
"""Functions by name, such as `add.Tensor`."""


def operator(*names: str) -> Callable[[Operator], Operator]:
    """Register the function of these operators. Raises `ValueError` for a name twice."""

    def register(function: Operator) -> Operator:
        for name in names:
            if name in OPERATORS:
                raise ValueError(f"the operator {name} is registered twice")
            OPERATORS[name] = function
        return function

    return register


def table(rows: Mapping[str, Operator]) -> None:
    """Register functions by the names of their operators, of which a row may have several."""
    for names, function in rows.items():
        operator(*names.split())(function)


def wide(x: jax.Array) -> jax.Array:
    """In float32 at least, as PyTorch computes sums of 16-bit numbers."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# Of one array, element by element.
_UNARY: dict[str, Operator] = {
    **{
        name: getattr(jnp, name)
        for name in (
            "abs ceil cos cosh exp exp2 expm1 floor isfinite isinf isnan log log10 log1p log2"
            " bitwise_not logical_not reciprocal round sign sin sinh sqrt square tan tanh trunc"
        ).split()
    },
    "acos": jnp.arccos,
    "asin": jnp.arcsin,
    "atan": jnp.arctan,
    "erf": jax.lax.erf,
    "log_sigmoid": jax.nn.log_sigmoid,
    "neg": jnp.negative,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "rsqrt": jax.lax.rsqrt,
    "sgn": jnp.sign,
    "sigmoid": jax.nn.sigmoid,
}
# Of two arrays, or of an array and a number.
_BINARY: dict[str, Operator] = {
    "__and__": jnp.bitwise_and,
    "__or__": jnp.bitwise_or,
    "__xor__": jnp.bitwise_xor,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "eq": jnp.equal,
    "fmod": jnp.fmod,
    "ge": jnp.greater_equal,
    "gt": jnp.greater,
    "le": jnp.less_equal,
    "lt": jnp.less,
    "mul": jnp.multiply,
    "ne": jnp.not_equal,
    "remainder": jnp.remainder,
}
table({f"{name}.default": function for name, function in _UNARY.items()})
table({f"{name}.Tensor {name}.Scalar": function for name, function in _BINARY.items()})
table(
    {
        f"{name}.default": getattr(jnp, name)
        for name in "floor_divide logical_and logical_or logical_xor maximum minimum".split()
    }
)


def _scaled(y: Any, alpha: Any) -> Any:
    return y if alpha == 1 else alpha * y


table(
    {
        "add.Tensor add.Scalar": lambda x, y, alpha=1: x + _scaled(y, alpha),
        "sub.Tensor sub.Scalar": lambda x, y, alpha=1: x - _scaled(y, alpha),
        "rsub.Tensor rsub.Scalar": lambda x, y, alpha=1: y - _scaled(x, alpha),
        "atan2.default": jnp.arctan2,
        "where.self where.ScalarOther where.ScalarSelf where.Scalar": jnp.where,
        "clamp_min.default": jnp.maximum,
        "clamp_max.default": jnp.minimum,
        "masked_fill.Scalar masked_fill.Tensor": lambda x, mask, value: jnp.where(
            mask, jnp.asarray(value, x.dtype), x
        ),
        "addcmul.default": lambda x, y, z, value=1: x + value * y * z,
        "addcdiv.default": lambda x, y, z, value=1: x + value * y / z,
        "lerp.Scalar lerp.Tensor": lambda x, end, weight: x + weight * (end - x),
    }
)


@operator("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def _pow(x: Any, exponent: Any) -> Any:
    # Powers of whole numbers are products, whose derivatives keep no logarithm.
    is_whole = isinstance(exponent, int | float) and float(exponent).is_integer()
    return jax.lax.integer_pow(x, int(exponent)) if is_whole else jnp.power(x, exponent)


@operator("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode")
def _div(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    return jnp.trunc(x / y) if rounding_mode == "trunc" else x / y


@operator("clamp.default", "clamp.Tensor")
def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else jnp.maximum(x, low)
    return x if high is None else jnp.minimum(x, high)


# Reductions.


def _dims(dim: Any) -> Any:
    """Dims as NumPy takes them; an empty list stands for all."""
    return tuple(dim) if isinstance(dim, Sequence) and dim else None if dim == [] else dim


def _reduction(reduce: Operator) -> Operator:
    def run(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        x = x if dtype is None else x.astype(dtype)
        x = wide(x) if jnp.issubdtype(x.dtype, jnp.floating) else x
        return reduce(x, axis=_dims(dim), keepdims=keepdim)

    return run


def _var(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    return jnp.var(wide(x), axis=_dims(dim), ddof=int(correction), keepdims=keepdim)


@operator("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.Scalar")
def _norm(x: Any, order: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
    x = wide(x) if dim is not None else wide(x).ravel()
    return jnp.linalg.norm(x, order, _dims(dim), keepdim)


def _with_places(values: Operator, places: Operator) -> Operator:
    """The largest or smallest values of a dim, and where they are."""

    def run(x: Any, dim: int, keepdim: bool = False) -> Any:
        return values(x, dim, keepdims=keepdim), places(x, dim, keepdims=keepdim)

    return run


table(
    {
        "sum.default sum.dim_IntList": _reduction(jnp.sum),
        "mean.default mean.dim": _reduction(jnp.mean),
        "prod.default prod.dim_int": _reduction(jnp.prod),
        "amax.default max.default": _reduction(jnp.max),
        "amin.default min.default": _reduction(jnp.min),
        "any.default any.dim any.dims": _reduction(jnp.any),
        "all.default all.dim all.dims": _reduction(jnp.all),
        "logsumexp.default": _reduction(jax.nn.logsumexp),
        "max.dim": _with_places(jnp.max, jnp.argmax),
        "min.dim": _with_places(jnp.min, jnp.argmin),
        "argmax.default": lambda x, dim=None, keepdim=False: jnp.argmax(x, dim, keepdims=keepdim),
        "argmin.default": lambda x, dim=None, keepdim=False: jnp.argmin(x, dim, keepdims=keepdim),
        "var.correction var.dim": _var,
        "std.correction std.dim": lambda *args, **kwargs: jnp.sqrt(_var(*args, **kwargs)),
        "var_mean.correction": lambda x, dim=None, correction=1, keepdim=False: (
            _var(x, dim, correction, keepdim),
            jnp.mean(wide(x), axis=_dims(dim), keepdims=keepdim),
        ),
        "cumsum.default": lambda x, dim, dtype=None: jnp.cumsum(x, dim, dtype=dtype),
        "cumprod.default": lambda x, dim, dtype=None: jnp.cumprod(x, dim, dtype=dtype),
        "diff.default": lambda x, n=1, dim=-1, *ends: jnp.diff(x, n, dim, *ends),
        "argsort.default": lambda x, dim=-1, down=False: jnp.argsort(x, dim, descending=down),
    }
)


@operator("topk.default")
def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> Any:
    moved = jnp.moveaxis(x, dim, -1)
    values, places = jax.lax.top_k(moved if largest else -moved, k)
    return jnp.moveaxis(values if largest else -values, -1, dim), jnp.moveaxis(places, -1, dim)


@operator("sort.default")
def _sort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    places = jnp.argsort(x, dim, descending=descending)
    return jnp.take_along_axis(x, places, dim), places


# Shapes.


@operator("squeeze.default", "squeeze.dim", "squeeze.dims")
def _squeeze(x: Any, dim: Any = None) -> Any:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return jnp.squeeze(x, tuple(d for d in dims if x.shape[d] == 1))


def _split(x: Any, size: int, dim: int = 0) -> Any:
    return tuple(jnp.split(x, list(range(size, x.shape[dim], size)), dim))


def _same(x: Any, *_: Any, **__: Any) -> Any:
    """The caller casts to the dtype that is asked for."""
    return x


table(
    {
        "view.default reshape.default _unsafe_view.default": lambda x, shape: x.reshape(shape),
        "permute.default": jnp.transpose,
        "transpose.int": jnp.swapaxes,
        "t.default": lambda x: x.T,
        "unsqueeze.default": jnp.expand_dims,
        "repeat.default": lambda x, repeats: jnp.tile(x, tuple(repeats)),
        "repeat_interleave.self_int": lambda x, repeats, dim=None, **_: jnp.repeat(x, repeats, dim),
        # An empty list of numbers may be joined with anything.
        "cat.default": lambda arrays, dim=0: jnp.concatenate(
            [x for x in arrays if x.shape != (0,)], dim
        ),
        "stack.default": lambda arrays, dim=0: jnp.stack(arrays, dim),
        "split.Tensor": _split,
        "split_with_sizes.default split.sizes": lambda x, sizes, dim=0: tuple(
            jnp.split(x, np.cumsum(sizes)[:-1].tolist(), dim)
        ),
        "chunk.default": lambda x, chunks, dim=0: _split(x, math.ceil(x.shape[dim] / chunks), dim),
        "unbind.int": lambda x, dim=0: tuple(jnp.take(x, k, dim) for k in range(x.shape[dim])),
        "select.int": lambda x, dim, index: jax.lax.index_in_dim(x, index, dim % x.ndim, False),
        "roll.default": lambda x, shifts, dims=(): (
            jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])
        ),
        "flip.default": lambda x, dims: jnp.flip(x, tuple(dims)),
        "index_select.default": lambda x, dim, index: jnp.take(x, index, dim),
        "tril.default": jnp.tril,
        "triu.default": jnp.triu,
        "alias.default clone.default contiguous.default lift_fresh_copy.default": _same,
        "_to_copy.default to.dtype to.dtype_layout type_as.default": _same,
        "detach.default detach_.default": jax.lax.stop_gradient,
    }
)


@operator("flatten.using_ints")
def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    first, last = start_dim % max(x.ndim, 1), end_dim % max(x.ndim, 1)
    return x.reshape(*x.shape[:first], -1, *x.shape[last + 1 :])


@operator("expand.default")
def _expand(x: Any, size: Sequence[int], implicit: bool = False) -> Any:
    missing = len(size) - x.ndim
    shape = [x.shape[k - missing] if length == -1 else length for k, length in enumerate(size)]
    return jnp.broadcast_to(x, shape)


@operator("slice.Tensor")
def _slice(
    x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    first, last, _ = slice(start, end).indices(x.shape[dim])
    return jax.lax.slice_in_dim(x, first, max(first, last), step, dim % x.ndim)


@operator("pad.default", "constant_pad_nd.default")
def _pad(x: Any, pad: Sequence[int], mode: Any = "constant", value: Any = None) -> Any:
    # `constant_pad_nd` has the value in third place.
    value, mode = (value, mode) if isinstance(mode, str) else (mode, "constant")
    pairs = [tuple(pad[k : k + 2]) for k in range(0, len(pad), 2)]
    widths = [*[(0, 0)] * (x.ndim - len(pairs)), *pairs[::-1]]
    if mode != "constant":
        kinds = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
        return jnp.pad(x, widths, mode=kinds[mode])
    zero = jnp.asarray(value or 0, x.dtype)
    return jax.lax.pad(x, zero, [(before, after, 0) for before, after in widths])


@operator("index.Tensor")
def _index(x: Any, indices: Sequence[Any]) -> Any:
    return x[tuple(slice(None) if k is None else k for k in indices)]


@operator("gather.default")
def _gather(x: Any, dim: int, index: Any, **_: Any) -> Any:
    dim %= x.ndim
    # The index may be shorter than the array in the other dims.
    ends = [*index.shape[:dim], x.shape[dim], *index.shape[dim + 1 :]]
    if ends != [*x.shape]:
        x = jax.lax.slice(x, [0] * x.ndim, ends)
    return jnp.take_along_axis(x, index, dim)


def _places(dim: int, index: Any) -> tuple[Any, ...]:
    """Where the elements of an index along one dim are in all."""
    places = list(jnp.indices(index.shape, sparse=True))
    places[dim] = index
    return tuple(places)


@operator("scatter_add.default")
def _scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    return x.at[_places(dim, index)].add(source[tuple(map(slice, index.shape))])


@operator("scatter.src", "scatter.value")
def _scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    value = source if np.ndim(source) == 0 else source[tuple(map(slice, index.shape))]
    return x.at[_places(dim, index)].set(value)


# Arrays of numbers that are given. Their dtype is what the caller casts to.


@operator("arange.default", "arange.start", "arange.start_step")
def _arange(*numbers: Any, **_: Any) -> Any:
    first, last, step = (0, *numbers, 1)[:3] if len(numbers) == 1 else (*numbers, 1)[:3]
    count = max(0, math.ceil((last - first) / step))
    is_whole = all(isinstance(number, int) for number in (first, last, step))
    # An iota, not a table, which would be an array more to place and to move.
    numbers_of = jax.lax.iota(jnp.int32 if is_whole else jnp.float32, count)
    return numbers_of if (first, step) == (0, 1) else first + numbers_of * step


table(
    {
        "full.default": lambda size, value, **_: jnp.full(tuple(size), value),
        "zeros.default": lambda size, **_: jnp.zeros(tuple(size)),
        "ones.default": lambda size, **_: jnp.ones(tuple(size)),
        "full_like.default": lambda x, value, **_: jnp.full(x.shape, value),
        "zeros_like.default empty_like.default": lambda x, **_: jnp.zeros_like(x),
        "ones_like.default": lambda x, **_: jnp.ones_like(x),
        "new_zeros.default": lambda x, size, **_: jnp.zeros(tuple(size), x.dtype),
        "new_ones.default": lambda x, size, **_: jnp.ones(tuple(size), x.dtype),
        "new_full.default": lambda x, size, value, **_: jnp.full(tuple(size), value, x.dtype),
        "scalar_tensor.default": lambda value, **_: jnp.asarray(value),
    }
)
