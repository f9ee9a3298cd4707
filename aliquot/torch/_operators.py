"""ATen operators in JAX: one table, by the names that `torch.export` gives them without `aten.`.

Each function takes what the operator's schema in PyTorch says, with arrays of JAX in place of
tensors. The caller casts results to the dtypes that PyTorch found, so rules of promotion are not
repeated here. Where PyTorch computes in a wider dtype inside, so do these. Operators of networks
are in `_network_operators.py`.

Reference: `native_functions.yaml` of PyTorch 2.13. The names are also those of torchax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


def wide(x: jax.Array) -> jax.Array:
    """In float32 at least, as PyTorch computes sums of 16-bit numbers."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# Of one array, element by element.
_UNARY: dict[str, Operator] = {
    "abs": jnp.abs,
    "acos": jnp.arccos,
    "asin": jnp.arcsin,
    "atan": jnp.arctan,
    "bitwise_not": jnp.bitwise_not,
    "ceil": jnp.ceil,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "erf": jax.lax.erf,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "floor": jnp.floor,
    "isfinite": jnp.isfinite,
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "log_sigmoid": jax.nn.log_sigmoid,
    "logical_not": jnp.logical_not,
    "neg": jnp.negative,
    "reciprocal": jnp.reciprocal,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "round": jnp.round,
    "rsqrt": jax.lax.rsqrt,
    "sgn": jnp.sign,
    "sigmoid": jax.nn.sigmoid,
    "sign": jnp.sign,
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "sqrt": jnp.sqrt,
    "square": jnp.square,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "trunc": jnp.trunc,
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
for _name, _function in _UNARY.items():
    operator(f"{_name}.default")(_function)
for _name, _function in _BINARY.items():
    operator(f"{_name}.Tensor", f"{_name}.Scalar")(_function)
for _name, _function in {
    "atan2": jnp.arctan2,
    "floor_divide": jnp.floor_divide,
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
}.items():
    operator(f"{_name}.default")(_function)


@operator("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def _pow(x: Any, exponent: Any) -> Any:
    # Powers of whole numbers are products, whose derivatives keep no logarithm.
    is_whole = isinstance(exponent, int | float) and float(exponent).is_integer()
    return jax.lax.integer_pow(x, int(exponent)) if is_whole else jnp.power(x, exponent)


@operator("add.Tensor", "add.Scalar")
def _add(x: Any, y: Any, alpha: Any = 1) -> Any:
    return x + (y if alpha == 1 else alpha * y)


@operator("sub.Tensor", "sub.Scalar")
def _sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return x - (y if alpha == 1 else alpha * y)


@operator("rsub.Scalar", "rsub.Tensor")
def _rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return y - (x if alpha == 1 else alpha * x)


@operator("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode")
def _div(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    return jnp.trunc(x / y) if rounding_mode == "trunc" else x / y


@operator("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(condition: Any, x: Any, y: Any) -> Any:
    return jnp.where(condition, x, y)


@operator("clamp.default", "clamp.Tensor")
def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else jnp.maximum(x, low)
    return x if high is None else jnp.minimum(x, high)


@operator("clamp_min.default")
def _clamp_min(x: Any, low: Any) -> Any:
    return jnp.maximum(x, low)


@operator("clamp_max.default")
def _clamp_max(x: Any, high: Any) -> Any:
    return jnp.minimum(x, high)


@operator("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


@operator("addcmul.default")
def _addcmul(x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    return x + value * y * z


@operator("addcdiv.default")
def _addcdiv(x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    return x + value * y / z


@operator("lerp.Scalar", "lerp.Tensor")
def _lerp(x: Any, end: Any, weight: Any) -> Any:
    return x + weight * (end - x)


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


operator("sum.default", "sum.dim_IntList")(_reduction(jnp.sum))
operator("mean.default", "mean.dim")(_reduction(jnp.mean))
operator("prod.default", "prod.dim_int")(_reduction(jnp.prod))
operator("amax.default")(_reduction(jnp.max))
operator("amin.default")(_reduction(jnp.min))
operator("any.default", "any.dim", "any.dims")(_reduction(jnp.any))
operator("all.default", "all.dim", "all.dims")(_reduction(jnp.all))
operator("logsumexp.default")(_reduction(jax.nn.logsumexp))


@operator("max.default")
def _max(x: Any) -> Any:
    return jnp.max(x)


@operator("min.default")
def _min(x: Any) -> Any:
    return jnp.min(x)


@operator("max.dim")
def _max_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return jnp.max(x, dim, keepdims=keepdim), jnp.argmax(x, dim, keepdims=keepdim)


@operator("min.dim")
def _min_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return jnp.min(x, dim, keepdims=keepdim), jnp.argmin(x, dim, keepdims=keepdim)


@operator("argmax.default")
def _argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmax(x, dim, keepdims=keepdim)


@operator("argmin.default")
def _argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmin(x, dim, keepdims=keepdim)


@operator("var.correction", "var.dim")
def _var(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    return jnp.var(wide(x), axis=_dims(dim), ddof=int(correction), keepdims=keepdim)


@operator("std.correction", "std.dim")
def _std(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    return jnp.sqrt(_var(x, dim, correction, keepdim))


@operator("var_mean.correction")
def _var_mean(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    mean = jnp.mean(wide(x), axis=_dims(dim), keepdims=keepdim)
    return _var(x, dim, correction, keepdim), mean


@operator("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.Scalar")
def _norm(x: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    return jnp.linalg.norm(
        wide(x) if dim is not None else wide(x).ravel(), order, _dims(dim), keepdim
    )


@operator("cumsum.default")
def _cumsum(x: Any, dim: int, dtype: Any = None) -> Any:
    return jnp.cumsum(x, dim, dtype=dtype)


@operator("cumprod.default")
def _cumprod(x: Any, dim: int, dtype: Any = None) -> Any:
    return jnp.cumprod(x, dim, dtype=dtype)


@operator("diff.default")
def _diff(x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    return jnp.diff(x, n, dim, prepend, append)


@operator("topk.default")
def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> Any:
    moved = jnp.moveaxis(x, dim, -1)
    values, places = jax.lax.top_k(moved if largest else -moved, k)
    values = values if largest else -values
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(places, -1, dim)


@operator("sort.default")
def _sort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    places = jnp.argsort(x, dim, descending=descending)
    return jnp.take_along_axis(x, places, dim), places


@operator("argsort.default")
def _argsort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    return jnp.argsort(x, dim, descending=descending)


# Shapes.


@operator("view.default", "reshape.default", "_unsafe_view.default")
def _view(x: Any, shape: Sequence[int]) -> Any:
    return x.reshape(tuple(shape))


@operator("flatten.using_ints")
def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    first, last = start_dim % max(x.ndim, 1), end_dim % max(x.ndim, 1)
    return x.reshape(*x.shape[:first], -1, *x.shape[last + 1 :])


@operator("permute.default")
def _permute(x: Any, dims: Sequence[int]) -> Any:
    return jnp.transpose(x, dims)


@operator("transpose.int")
def _transpose(x: Any, first: int, second: int) -> Any:
    return jnp.swapaxes(x, first, second)


@operator("t.default")
def _t(x: Any) -> Any:
    return x.T


@operator("unsqueeze.default")
def _unsqueeze(x: Any, dim: int) -> Any:
    return jnp.expand_dims(x, dim)


@operator("squeeze.default", "squeeze.dim", "squeeze.dims")
def _squeeze(x: Any, dim: Any = None) -> Any:
    if dim is None:
        return jnp.squeeze(x)
    dims = [dim] if isinstance(dim, int) else list(dim)
    return jnp.squeeze(x, tuple(d for d in dims if x.shape[d] == 1))


@operator("expand.default")
def _expand(x: Any, size: Sequence[int], implicit: bool = False) -> Any:
    missing = len(size) - x.ndim
    shape = [x.shape[k - missing] if length == -1 else length for k, length in enumerate(size)]
    return jnp.broadcast_to(x, shape)


@operator("repeat.default")
def _repeat(x: Any, repeats: Sequence[int]) -> Any:
    return jnp.tile(x, tuple(repeats))


@operator("repeat_interleave.self_int")
def _repeat_interleave(x: Any, repeats: int, dim: int | None = None, **_: Any) -> Any:
    return jnp.repeat(x, repeats, dim)


@operator("cat.default")
def _cat(arrays: Sequence[Any], dim: int = 0) -> Any:
    # An empty list of numbers may be joined with anything.
    return jnp.concatenate([x for x in arrays if x.shape != (0,)], dim)


@operator("stack.default")
def _stack(arrays: Sequence[Any], dim: int = 0) -> Any:
    return jnp.stack(arrays, dim)


@operator("split.Tensor")
def _split(x: Any, size: int, dim: int = 0) -> Any:
    return tuple(jnp.split(x, list(range(size, x.shape[dim], size)), dim))


@operator("split_with_sizes.default", "split.sizes")
def _split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    return tuple(jnp.split(x, np.cumsum(sizes)[:-1].tolist(), dim))


@operator("chunk.default")
def _chunk(x: Any, chunks: int, dim: int = 0) -> Any:
    return _split(x, math.ceil(x.shape[dim] / chunks), dim)


@operator("unbind.int")
def _unbind(x: Any, dim: int = 0) -> Any:
    return tuple(jnp.take(x, k, dim) for k in range(x.shape[dim]))


@operator("slice.Tensor")
def _slice(
    x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    first, last, _ = slice(start, end).indices(x.shape[dim])
    return jax.lax.slice_in_dim(x, first, max(first, last), step, dim % x.ndim)


@operator("select.int")
def _select(x: Any, dim: int, index: int) -> Any:
    return jax.lax.index_in_dim(x, index, dim % x.ndim, keepdims=False)


@operator("roll.default")
def _roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@operator("flip.default")
def _flip(x: Any, dims: Sequence[int]) -> Any:
    return jnp.flip(x, tuple(dims))


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


@operator("index_select.default")
def _index_select(x: Any, dim: int, index: Any) -> Any:
    return jnp.take(x, index, dim)


@operator("gather.default")
def _gather(x: Any, dim: int, index: Any, **_: Any) -> Any:
    dim %= x.ndim
    # The index may be shorter than the array in the other dims.
    if any(k != dim and size != index.shape[k] for k, size in enumerate(x.shape)):
        ends = [size if k == dim else index.shape[k] for k, size in enumerate(x.shape)]
        x = jax.lax.slice(x, [0] * x.ndim, ends)
    return jnp.take_along_axis(x, index, dim)


@operator("scatter_add.default")
def _scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    places = list(jnp.indices(index.shape, sparse=True))
    places[dim] = index
    return x.at[tuple(places)].add(source[tuple(map(slice, index.shape))])


@operator("scatter.src", "scatter.value")
def _scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    places = list(jnp.indices(index.shape, sparse=True))
    places[dim] = index
    value = source if np.ndim(source) == 0 else source[tuple(map(slice, index.shape))]
    return x.at[tuple(places)].set(value)


@operator("tril.default")
def _tril(x: Any, diagonal: int = 0) -> Any:
    return jnp.tril(x, diagonal)


@operator("triu.default")
def _triu(x: Any, diagonal: int = 0) -> Any:
    return jnp.triu(x, diagonal)


@operator(
    "alias.default",
    "clone.default",
    "contiguous.default",
    "detach_.default",
    "lift_fresh_copy.default",
    "_to_copy.default",
    "to.dtype",
    "to.dtype_layout",
    "type_as.default",
)
def _same(x: Any, *_: Any, **__: Any) -> Any:
    """The caller casts to the dtype that is asked for."""
    return x


@operator("detach.default")
def _detach(x: Any) -> Any:
    return jax.lax.stop_gradient(x)


# Arrays of numbers that are given. Their dtype is what the caller casts to.


@operator("arange.default", "arange.start", "arange.start_step")
def _arange(*numbers: Any, **_: Any) -> Any:
    first, last, step = (0, *numbers, 1)[:3] if len(numbers) == 1 else (*numbers, 1)[:3]
    count = max(0, math.ceil((last - first) / step))
    is_whole = all(isinstance(number, int) for number in (first, last, step))
    # An iota, not a table, which would be an array more to place and to move.
    numbers_of = jax.lax.iota(jnp.int32 if is_whole else jnp.float32, count)
    return numbers_of if (first, step) == (0, 1) else first + numbers_of * step


@operator("full.default")
def _full(size: Sequence[int], value: Any, **_: Any) -> Any:
    return jnp.full(tuple(size), value)


@operator("zeros.default")
def _zeros(size: Sequence[int], **_: Any) -> Any:
    return jnp.zeros(tuple(size))


@operator("ones.default")
def _ones(size: Sequence[int], **_: Any) -> Any:
    return jnp.ones(tuple(size))


@operator("full_like.default")
def _full_like(x: Any, value: Any, **_: Any) -> Any:
    return jnp.full(x.shape, value)


@operator("zeros_like.default", "empty_like.default")
def _zeros_like(x: Any, **_: Any) -> Any:
    return jnp.zeros_like(x)


@operator("ones_like.default")
def _ones_like(x: Any, **_: Any) -> Any:
    return jnp.ones_like(x)


@operator("new_zeros.default")
def _new_zeros(x: Any, size: Sequence[int], **_: Any) -> Any:
    return jnp.zeros(tuple(size), x.dtype)


@operator("new_ones.default")
def _new_ones(x: Any, size: Sequence[int], **_: Any) -> Any:
    return jnp.ones(tuple(size), x.dtype)


@operator("new_full.default")
def _new_full(x: Any, size: Sequence[int], value: Any, **_: Any) -> Any:
    return jnp.full(tuple(size), value, x.dtype)


@operator("scalar_tensor.default")
def _scalar_tensor(value: Any, **_: Any) -> Any:
    return jnp.asarray(value)
