"""The table that every rule must stand in: small calls that produce each primitive.

Dims that may be split have at least 8 elements where it matters, so that they divide on the 4x2
mesh of the tests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox.internal
import jax
import jax.experimental
import jax.export
import jax.extend.core.primitives
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax import linalg as _linalg
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas
from jax.experimental.custom_partitioning import custom_partitioning


@dataclass(frozen=True, kw_only=True)
class Case:
    """`fn(*args)` produces the primitive.

    `runs` is false where it cannot be run here or has nothing to split. `unplanned` is a
    collective, beside the all-reduce of reduced factors, that the compiler emits all the same, and
    `why`.
    """

    primitive: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    runs: bool = True
    unplanned: str = ""
    why: str = ""
    label: str = ""
    tolerance: float = 1e-5

    def __post_init__(self) -> None:
        assert bool(self.unplanned) == bool(self.why)

    def __str__(self) -> str:
        return f"{self.primitive}-{self.label}" if self.label else self.primitive


def floats(*shape, low=0.1, high=0.9):
    return (
        np.random.default_rng(sum(shape) + len(shape)).uniform(low, high, shape).astype(np.float32)
    )


def ints(*shape, low=0, high=8):
    return np.random.default_rng(sum(shape) + 1).integers(low, high, shape).astype(np.int32)


def bools(*shape):
    return ints(*shape, high=2).astype(bool)


def words(*shape):
    return np.random.default_rng(3).integers(0, 2**32, (*shape, 2), dtype=np.uint32)


def keys(raw):
    return jax.random.wrap_key_data(raw)


X, Y, N, M, B, C = floats(8), floats(16)[8:], ints(8), ints(16)[8:], bools(8), bools(16)[8:]

ELEMENTWISE = {
    name: (getattr(lax, name), (X,))
    for name in (
        "abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf"
        " erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p logistic neg round rsqrt"
        " sign sin sinh sqrt square tan tanh"
    ).split()
} | {
    name: (getattr(lax, name), (X, Y))
    for name in (
        "add atan2 complex div eq ge gt le lt max min mul ne nextafter pow rem sub"
    ).split()
}
for name in ("igamma", "igamma_grad_a", "igammac"):
    ELEMENTWISE[name] = (getattr(lax, name), (X[:4], Y[:4]))
ELEMENTWISE |= {
    "acosh": (lambda x: lax.acosh(x + 1.0), (X,)),
    "add_any": (jax.grad(lambda x: jnp.sum(jnp.sin(x) * jnp.cos(x))), (X,)),
    "and": (lax.bitwise_and, (B, C)),
    "clamp": (lambda x, lo, hi: lax.clamp(lo, x, hi), (X, X - 0.1, X + 0.1)),
    "clz": (lax.clz, (N,)),
    "conj": (lambda x, y: lax.conj(lax.complex(x, y)), (X, Y)),
    "convert_element_type": (lambda x: x.astype(jnp.bfloat16), (X,)),
    "copy": (jnp.copy, (X,)),
    "imag": (lambda x, y: lax.imag(lax.complex(x, y)), (X, Y)),
    "integer_pow": (lambda x: lax.integer_pow(x, 3), (X,)),
    "name": (lambda x: checkpoint_name(x, "kept"), (X,)),
    "not": (lax.bitwise_not, (B,)),
    "or": (lax.bitwise_or, (B, C)),
    "polygamma": (lambda x, y: lax.polygamma(jnp.round(x) + 1, y), (X, Y)),
    "population_count": (lax.population_count, (N,)),
    "real": (lambda x, y: lax.real(lax.complex(x, y)), (X, Y)),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 7), (X,)),
    "regularized_incomplete_beta": (
        lambda a, b, x: lax.betainc(a, b, x),
        (X[:4], Y[:4], floats(4, low=0.3)),
    ),
    "select_n": (lax.select_n, (B, X, Y)),
    "shift_left": (lax.shift_left, (N, M)),
    "shift_right_arithmetic": (lax.shift_right_arithmetic, (N, M)),
    "shift_right_logical": (lax.shift_right_logical, (N, M)),
    "stop_gradient": (lax.stop_gradient, (X,)),
    "xor": (lax.bitwise_xor, (B, C)),
    "zeta": (lambda x, y: lax.zeta(x + 1.5, y), (X, Y)),
}
# Primitives of releases after the oldest supported one.
RECENT = {
    "log2": (lambda x: lax.log2(x), (X,)),
    "one_minus_square": (lambda x: lax.one_minus_square(x), (X,)),
    "polynomial": (lambda x, y: lax.polynomial(x, [y, x, y]), (X, Y)),
}
ABSENT = {name for name in RECENT if not hasattr(jax.extend.core.primitives, f"{name}_p")}
ELEMENTWISE |= {name: case for name, case in RECENT.items() if name not in ABSENT}
for name in ("eq_to", "le_to", "lt_to"):
    ELEMENTWISE[name] = (getattr(jax.extend.core.primitives, f"{name}_p").bind, (X, Y))

STOPS_TOGETHER = (
    "a loop runs until all elements have converged, and so agrees on one truth value per round"
)
LOOPS = dict.fromkeys(
    ("igamma", "igamma_grad_a", "igammac", "regularized_incomplete_beta"), STOPS_TOGETHER
)

RULE_CASES: list[Case] = [
    Case(
        primitive=n,
        fn=fn,
        args=args,
        unplanned="all-reduce" if n in LOOPS else "",
        why=LOOPS.get(n, ""),
    )
    for n, (fn, args) in ELEMENTWISE.items()
]


def case(primitive, label, fn, *args, **options):
    """Adds a line to the table."""
    RULE_CASES.append(Case(primitive=primitive, label=label, fn=fn, args=args, **options))


# ---- elementwise operators of more dims, with broadcasting ---------------------------------------

case("sin", "matrix", lax.sin, floats(8, 4))
case("add", "matrix", lax.add, floats(8, 4), floats(8, 4))
case("clamp", "matrix", lambda x: lax.clamp(x - 0.1, x, x + 0.1), floats(8, 4))
case("mul", "row", lax.mul, floats(8, 4), floats(1, 4))
case("mul", "column", lax.mul, floats(8, 1, 4), floats(8, 4, 4))
case("mul", "both", lambda x, y: x * y, floats(8, 1), floats(1, 8))
case("mul", "scalar", lambda x: x * 2.0, X)
case("clamp", "scalars", lambda x: lax.clamp(0.2, x, 0.7), X)
case("select_n", "scalar", lax.select_n, np.array(True), floats(8, 4), floats(8, 4))
case("select_n", "three", lax.select_n, ints(8, high=3), X, Y, X)
case("convert_element_type", "cut", lambda x: (9 * x).astype(jnp.int32), X)

# ---- products ------------------------------------------------------------------------------------

case("dot_general", "matrix", lax.dot, floats(8, 16), floats(16, 4))
case("dot_general", "vector", lax.dot, floats(16), floats(16))
case("dot_general", "batch", partial(jnp.einsum, "bij,bjk->bik"), floats(4, 8, 8), floats(4, 8, 4))
case(
    "dot_general",
    "two batch",
    partial(jnp.einsum, "bhqd,bhkd->bhqk"),
    floats(4, 8, 4, 4),
    floats(4, 8, 4, 4),
)
case(
    "dot_general",
    "two contracting",
    partial(jnp.einsum, "bhd,hdm->bm"),
    floats(8, 4, 4),
    floats(4, 4, 8),
)
case(
    "dot_general",
    "many free",
    partial(jnp.einsum, "abi,icd->abcd"),
    floats(4, 2, 8),
    floats(8, 4, 2),
)
case("dot_general", "outer", partial(jnp.einsum, "i,j->ij"), floats(8), floats(8))
case(
    "dot_general",
    "transposed",
    partial(lax.dot_general, dimension_numbers=(((0,), (1,)), ((), ()))),
    floats(16, 8),
    floats(4, 16),
)
case("dot_general", "integers", lax.dot, ints(8, 16), ints(16, 4))

# ---- reductions ----------------------------------------------------------------------------------

case("reduce_sum", "row", lambda x: jnp.sum(x, 1), floats(8, 8))
case("reduce_sum", "all", jnp.sum, floats(8, 4))
case("reduce_sum", "middle", lambda x: jnp.sum(x, (0, 2)), floats(4, 8, 4))
case("reduce_max", "row", lambda x: jnp.max(x, 1), floats(8, 8))
case("reduce_max", "all", jnp.max, N)
case("reduce_min", "column", lambda x: jnp.min(x, 0), floats(8, 8))
case("reduce_prod", "row", lambda x: jnp.prod(x, 1), floats(8, 8))
case("reduce_and", "row", lambda x: jnp.all(x, 1), bools(8, 8))
case("reduce_or", "all", jnp.any, bools(8, 4))
case("reduce_xor", "row", lambda x: lax.reduce_xor(x, (1,)), ints(8, 4))
case("argmax", "row", lambda x: jnp.argmax(x, 1), floats(8, 8))
case("argmin", "column", lambda x: jnp.argmin(x, 0), floats(8, 8))
case(
    "reduce",
    "two arrays",
    lambda x, y: lax.reduce((x, y), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)),
    floats(8, 4),
    floats(8, 4),
)
for name in ("psum", "pmax", "pmin"):
    over_rows = jax.vmap(
        partial(getattr(lax, name), axis_name="rows"), axis_name="rows", out_axes=None
    )
    case(name, "over vmap", over_rows, floats(8, 8))
case("cumsum", "column", lambda x: jnp.cumsum(x, 0), floats(8, 8))
case("cumsum", "reversed", lambda x: lax.cumsum(x, 1, reverse=True), floats(8, 8))
case("cumprod", "row", lambda x: jnp.cumprod(x, 1), floats(8, 8))
case("cummax", "row", lambda x: lax.cummax(x, 1), floats(8, 8))
case("cummin", "row", lambda x: lax.cummin(x, 0), floats(8, 8))
case("cumlogsumexp", "row", lambda x: lax.cumlogsumexp(x, 1), floats(8, 8))


def pool(x, start, combine, padding="VALID"):
    return lax.reduce_window(x, start, combine, (1, 2, 2, 1), (1, 2, 2, 1), padding)


IMAGE = floats(4, 8, 8, 4)
case("reduce_window_max", "", lambda x: pool(x, -np.inf, lax.max), IMAGE)
case("reduce_window_min", "", lambda x: pool(x, np.inf, lax.min), IMAGE)
case("reduce_window_sum", "", lambda x: pool(x, 0.0, lax.add), IMAGE)
case("reduce_window_sum", "padded", lambda x: pool(x, 0.0, lax.add, "SAME"), floats(4, 7, 7, 4))
case("reduce_window", "", lambda x: pool(x, np.float32(2), lambda a, b: a * b + 1), IMAGE)
case(
    "select_and_scatter_add",
    "",
    jax.grad(lambda x: jnp.sum(pool(x, -jnp.inf, lax.max) ** 2)),
    IMAGE,
)
case(
    "select_and_gather_add",
    "",
    lambda x: jax.jvp(lambda x: pool(x, -jnp.inf, lax.max), (x,), (x,)),
    IMAGE,
)

GROUP_SIZES = np.array([3, 0, 8, 5], np.int32)
ROWS_OF_GROUPS = floats(16, 8)
A_MATRIX_EACH = floats(4, 8, 8)
case(
    "ragged_dot_general",
    "rows",
    lambda x, w: lax.ragged_dot(x, w, GROUP_SIZES),
    ROWS_OF_GROUPS,
    A_MATRIX_EACH,
)
case(
    "ragged_dot_general",
    "matrices",
    jax.grad(lambda w, x: jnp.sum(lax.ragged_dot(x, w, GROUP_SIZES) ** 2)),
    A_MATRIX_EACH,
    ROWS_OF_GROUPS,
    tolerance=1e-4,
    unplanned="all-gather",
    why="each device sums up the sizes of some groups, and needs the sums of all",
)
case(
    "ragged_dot_general",
    "batch",
    jax.vmap(lax.ragged_dot),
    floats(8, 8, 4),
    floats(8, 4, 4, 8),
    np.stack([GROUP_SIZES // 2] * 8),
)

# ---- linear algebra and transforms ---------------------------------------------------------------

MATRICES = floats(8, 4, 4) + 4 * np.eye(4, dtype=np.float32)
SYMMETRIC = MATRICES + np.swapaxes(MATRICES, 1, 2)
case("cholesky", "", lambda s: lax.linalg.cholesky(s, symmetrize_input=False), SYMMETRIC)
case("eig", "", lax.linalg.eig, MATRICES)
case("eigh", "", lambda s: lax.linalg.eigh(s, symmetrize_input=False), SYMMETRIC)
case("hessenberg", "", lax.linalg.hessenberg, MATRICES)
case("cholesky_update", "", lax.linalg.cholesky_update, SYMMETRIC[0], floats(4))
case("geqrf", "", _linalg.geqrf, MATRICES)
case("geqp3", "", lambda a: _linalg.geqp3(a, np.zeros((8, 4), np.int32), use_magma=False), MATRICES)
case("ormqr", "", lax.linalg.ormqr, MATRICES, floats(8, 4), floats(8, 4, 2))
case("householder_product", "", lax.linalg.householder_product, MATRICES, floats(8, 4))
case("lu", "", lax.linalg.lu, MATRICES)
case(
    "lu_pivots_to_permutation",
    "",
    lambda p: lax.linalg.lu_pivots_to_permutation(p, 6),
    ints(8, 4, high=4),
)
case("qr", "", lambda a: lax.linalg.qr(a, full_matrices=False), MATRICES)
case("schur", "", lax.linalg.schur, MATRICES)
case("svd", "", lambda a: lax.linalg.svd(a, full_matrices=False), MATRICES)
case(
    "symmetric_product",
    "",
    lambda a, c: lax.linalg.symmetric_product(a, c, symmetrize_output=False),
    MATRICES,
    SYMMETRIC,
)
case("tridiagonal", "", lax.linalg.tridiagonal, SYMMETRIC)
case(
    "tridiagonal_solve",
    "",
    lambda d, b: lax.linalg.tridiagonal_solve(d, d + 4, d, b),
    floats(8, 4),
    floats(8, 4, 2),
)
NOT_SPLIT = {
    "unplanned": "all-gather",
    "why": "the partitioner does not split it; the runtime runs it on pieces",
}
SOLVE, SIDES = partial(lax.linalg.triangular_solve, left_side=True), floats(4, 8)
case("triangular_solve", "", SOLVE, MATRICES, floats(8, 4, 2), **NOT_SPLIT)
case("triangular_solve", "sides", SOLVE, MATRICES[0], SIDES, **NOT_SPLIT)
case(
    "triangular_solve",
    "from the right",
    lax.linalg.triangular_solve,
    MATRICES[0],
    SIDES.T,
    **NOT_SPLIT,
)
case("fft", "", jnp.fft.fft, floats(8, 4), **NOT_SPLIT)
case("fft", "two real dims", jnp.fft.rfft2, floats(8, 2, 4, 6), **NOT_SPLIT)
case("fft", "inverse", lambda x: jnp.fft.irfft(x, axis=1), floats(8, 5), **NOT_SPLIT)


def in_blocks(x, w):
    """A product in blocks of rows and columns."""

    def kernel(x, w, out):
        out[...] = jnp.dot(x[...], w[...])

    return pallas.pallas_call(
        kernel,
        grid=(8, 4),
        in_specs=[
            pallas.BlockSpec((2, 4), lambda i, j: (i, 0)),
            pallas.BlockSpec((4, 3), lambda i, j: (0, j)),
        ],
        out_specs=pallas.BlockSpec((2, 3), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((16, 12), np.float32),
        interpret=True,
    )(x, w)


case("pallas_call", "in blocks", in_blocks, floats(16, 4), floats(4, 12), **NOT_SPLIT)
case(
    "pallas_call",
    "over vmap",
    jax.vmap(in_blocks, (0, None)),
    floats(8, 16, 4),
    floats(4, 12),
    **NOT_SPLIT,
)


HEADS = jax.ShapeDtypeStruct((8, 128, 4, 64), jnp.bfloat16)


def attend(x, **settings):
    return jax.nn.dot_product_attention(x, x, x, implementation="cudnn", **settings)


case("dot_product_attention_fwd_wrapper", "", partial(attend, is_causal=True), HEADS, runs=False)
case(
    "dot_product_attention_bwd_wrapper",
    "",
    jax.grad(lambda x: jnp.sum(attend(x) ** 2)),
    HEADS,
    runs=False,
)

# ---- shapes --------------------------------------------------------------------------------------


def reshaped(before, after, label):
    case("reshape", label, lambda x: lax.reshape(x, after), floats(*before))


reshaped((4, 32), (4, 8, 4), "split heads")
reshaped((4, 8, 4), (4, 32), "merge heads")
reshaped((8, 8, 4), (64, 4), "merge batch")
reshaped((64, 4), (8, 8, 4), "split batch")
reshaped((24,), (8, 3), "split odd")
reshaped((12, 4), (8, 6), "gcd")
reshaped((6, 4), (4, 6), "gcd of two")
reshaped((8, 3, 8), (8, 8, 3), "kept major")
reshaped((8, 1, 4), (1, 8, 4, 1), "ones")
reshaped((8, 4), (32,), "flat")
case("reshape", "another order", lambda x: lax.reshape(x, (8, 32), (1, 0, 2)), floats(4, 8, 8))
reshaped((4, 8, 8), (4, 4, 2, 8), "split inside")
reshaped((4, 2, 8), (8, 8), "merge two")
reshaped((1,), (), "scalar")
reshaped((8, 0, 3), (8, 0), "empty")
reshaped((3, 5), (5, 3), "nothing shared")
case("broadcast_in_dim", "scalar", lambda x: jnp.broadcast_to(x, (8, 4)), np.float32(2))
case("broadcast_in_dim", "new dims", lambda x: lax.broadcast_in_dim(x, (4, 8, 8), (1,)), floats(8))
case(
    "broadcast_in_dim", "from one", lambda x: lax.broadcast_in_dim(x, (8, 8), (0, 1)), floats(8, 1)
)
case("broadcast_in_dim", "to ones", lambda x: lax.broadcast_in_dim(x, (1, 8, 1), (1,)), floats(8))
case("squeeze", "", lambda x: lax.squeeze(x, (1,)), floats(8, 1, 4))
case("transpose", "", lambda x: lax.transpose(x, (2, 0, 1)), floats(4, 8, 8))
case("transpose", "rows stay first", lambda x: lax.transpose(x, (0, 2, 1)), floats(8, 4, 8))
case("rev", "", lambda x: lax.rev(x, (1,)), floats(8, 8))
case("slice", "first", lambda x: lax.slice(x, (0, 0), (8, 4)), floats(8, 8))
case("slice", "strided", lambda x: lax.slice(x, (0, 0), (8, 8), (1, 2)), floats(8, 8))
case("pad", "", lambda x: lax.pad(x, 0.5, ((0, 0, 0), (1, 3, 0))), floats(8, 4))
case("pad", "shifted", lambda x: lax.pad(x, 0.5, ((0, 0, 0), (1, -1, 0))), floats(8, 8))
case("pad", "inside", lambda x: lax.pad(x, 0.5, ((0, 1, 1), (0, 0, 0))), floats(4, 8))
case("concatenate", "columns", lambda x, y: lax.concatenate((x, y), 1), floats(8, 4), floats(8, 8))
case("concatenate", "many", lambda x: lax.concatenate([x] * 30, 0), floats(4, 8))
case("split", "", lambda x: lax.split(x, (4, 4, 8), 1), floats(8, 16))
case("stack", "", lambda x, y: jnp.stack([x, y], 1), floats(8, 4), floats(8, 4))
case("unstack", "", lambda x: jnp.unstack(x, axis=1), floats(8, 2, 4))
case("tile", "", lambda x: lax.tile(x, (1, 2, 8)), floats(8, 4, 1))
case(
    "dynamic_slice",
    "",
    lambda x, i: lax.dynamic_slice(x, (i, 0), (4, 8)),
    floats(8, 8),
    np.int32(3),
)
case(
    "dynamic_slice",
    "all dims",
    lambda x, i: lax.dynamic_slice(x, (0, i, i), (8, 1, 2)),
    floats(8, 4, 8),
    np.int32(2),
)
case(
    "dynamic_update_slice",
    "",
    lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i)),
    floats(8, 8),
    floats(8, 4),
    np.int32(3),
)
case("iota", "", lambda: lax.broadcasted_iota(jnp.int32, (8, 8), 1))
case("empty", "", lambda: lax.empty((8, 4), jnp.float32), runs=False)
case(
    "empty2",
    "",
    lambda: jax.extend.core.primitives.empty2_p.bind(
        dtype=np.dtype("float32"), memory_space=jax.memory.Space.Device
    ),
    runs=False,
)
case("bitcast_convert_type", "same width", lambda x: lax.bitcast_convert_type(x, jnp.int32), X)
case("bitcast_convert_type", "narrower", lambda x: lax.bitcast_convert_type(x, jnp.uint8), X)
case(
    "bitcast_convert_type",
    "wider",
    lambda x: lax.bitcast_convert_type(x, jnp.float32),
    ints(8, 4, 2).astype(np.int16),
)
case("sort", "one", lambda x: lax.sort(x, dimension=1), floats(8, 8))
case("sort", "with index", lambda x, i: lax.sort((x, i), dimension=0), floats(8, 8), ints(8, 8))
case(
    "top_k",
    "",
    lambda x: lax.top_k(x, 2),
    floats(8, 4, 8),
    unplanned="all-gather",
    why="the compiler takes its own top-k kernel for indivisible, though every row is on its own",
)
case("approx_top_k", "", lambda x: lax.approx_max_k(x, 2), floats(8, 16), runs=False)

# ---- gathers and scatters ------------------------------------------------------------------------

case("gather", "embedding", lambda t, i: t[i], floats(8, 8), ints(8))
case(
    "gather",
    "embedding of sequences",
    lambda t, i: t.at[i].get(mode="promise_in_bounds"),
    floats(16, 8),
    ints(4, 8),
)
case("gather", "clipped", lambda t, i: t.at[i].get(mode="clip"), floats(8, 8), ints(8, high=12))
case(
    "gather",
    "filled",
    lambda t, i: t.at[i].get(mode="fill", fill_value=3.0),
    floats(8, 8),
    ints(8, high=12),
)
case("gather", "last dim", lambda t, i: t[:, i], floats(8, 8), ints(8))
case("gather", "along axis", lambda t, i: jnp.take_along_axis(t, i, 1), floats(8, 8), ints(8, 4))
case(
    "gather",
    "labels",
    lambda t, i: jnp.take_along_axis(t, i[..., None], -1),
    floats(4, 8, 8),
    ints(4, 8),
)
case("gather", "two indices", lambda t, i, j: t[i, j], floats(8, 8, 8), ints(8), ints(8))
case(
    "gather",
    "window",
    lambda t, i: jax.vmap(lambda i: lax.dynamic_slice(t, (i, 0), (4, 8)))(i),
    floats(8, 8),
    ints(8),
)
case(
    "gather",
    "windows of each",
    jax.vmap(lambda t, i: lax.dynamic_slice(t, (i, 0), (4, 8))),
    floats(8, 8, 8),
    ints(8),
)
case("gather", "integers", lambda t, i: t[i], ints(8, 8), ints(8))

UPDATES = {
    "add": "scatter-add",
    "subtract": "scatter-sub",
    "multiply": "scatter-mul",
    "min": "scatter-min",
    "max": "scatter-max",
    "set": "scatter",
}
for method, primitive in UPDATES.items():

    def update(t, i, u, method=method):
        return getattr(t.at[i], method)(u)

    case(primitive, "rows", update, floats(8, 8), ints(8, low=0, high=8), floats(8, 8))
    case(primitive, "elements", update, floats(16), ints(8), floats(8))
case(
    "scatter-add",
    "gradient of embedding",
    jax.grad(lambda t, i: jnp.sum(t[i] ** 2)),
    floats(16, 8),
    ints(4, 8),
)
case(
    "scatter-add",
    "gradient along axis",
    jax.grad(lambda t, i: jnp.sum(jnp.take_along_axis(t, i, 1) ** 2)),
    floats(8, 8),
    ints(8, 4),
)
case(
    "scatter-add",
    "two indices",
    lambda t, i, j, u: t.at[i, j].add(u),
    floats(8, 8),
    ints(8),
    ints(16)[8:],
    floats(8),
)
case(
    "scatter-add", "columns", lambda t, i, u: t.at[:, i].add(u), floats(8, 8), ints(4), floats(8, 4)
)
case(
    "scatter",
    "cache",
    jax.vmap(lambda c, new, at: lax.dynamic_update_slice_in_dim(c, new, at, 0)),
    floats(8, 8, 4),
    floats(8, 1, 4),
    ints(8),
)
case("scatter", "column", lambda t, u: t.at[:, 3].set(u), floats(8, 8), floats(8))

# ---- convolutions --------------------------------------------------------------------------------


GROUPS = (
    "the compiler for CPUs turns groups of several channels into a form that it does not partition"
)


def conv(image, kernel, label, unplanned="", why="", **options):
    options.setdefault("padding", "SAME")
    options.setdefault("window_strides", (1,) * (len(image) - 2))
    case(
        "conv_general_dilated",
        label,
        lambda x, k: lax.conv_general_dilated(x, k, **options),
        floats(*image),
        floats(*kernel),
        tolerance=1e-4,
        unplanned=unplanned,
        why=why,
    )


NHWC = ("NHWC", "HWIO", "NHWC")
conv((8, 8, 6, 6), (4, 8, 3, 3), "plain")
conv((8, 6, 6, 8), (3, 3, 8, 4), "channels last", dimension_numbers=NHWC)
conv((4, 8, 8), (4, 8, 1), "pointwise")
conv((4, 8, 8, 8), (8, 8, 2, 2), "strided", window_strides=(2, 2), padding="VALID")
conv((4, 8, 6), (8, 8, 3), "one dim")
conv((4, 8, 4, 4), (8, 8, 3, 3), "dilated image", lhs_dilation=(2, 2), padding=((2, 1), (2, 1)))
conv((4, 8, 6, 6), (8, 8, 3, 3), "dilated kernel", rhs_dilation=(2, 2))
conv(
    (4, 16, 6, 6), (8, 2, 3, 3), "groups", feature_group_count=8, unplanned="all-gather", why=GROUPS
)
conv((4, 8, 6, 6), (16, 1, 3, 3), "by channel", feature_group_count=8)
conv((16, 4, 6, 6), (8, 4, 3, 3), "groups of batch", batch_group_count=8)


def convolved(x, k):
    return jnp.sum(lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=NHWC) ** 2)


for argnum, what in enumerate(("image", "kernel")):
    case(
        "conv_general_dilated",
        f"gradient of {what}",
        jax.grad(convolved, argnums=argnum),
        floats(4, 8, 8, 8),
        floats(3, 3, 8, 8),
        tolerance=1e-4,
    )

# ---- random numbers ------------------------------------------------------------------------------

case("random_bits", "one key", lambda raw: jax.random.bits(keys(raw), (8, 4)), words())
case("random_bits", "a key each", jax.vmap(lambda raw: jax.random.bits(keys(raw), (8,))), words(8))
case("random_split", "", lambda raw: jax.random.split(keys(raw), 8), words())
case("random_wrap", "", keys, words(8))
case("random_unwrap", "", lambda raw: jax.random.key_data(keys(raw)), words(8))
case("random_seed", "", jax.vmap(jax.random.key), ints(8))
case("random_clone", "", lambda raw: jax.random.clone(keys(raw)), words(8))
case(
    "random_fold_in",
    "",
    jax.vmap(lambda raw, i: jax.random.fold_in(keys(raw), i)),
    words(8),
    ints(8),
)
case(
    "random_fold_in",
    "one key",
    lambda raw, i: jax.random.fold_in(keys(raw), i),
    words(),
    np.int32(2),
)
case("threefry2x32", "", lambda raw: jax.extend.random.threefry_2x32(raw, raw), words(4)[0])
case("random_gamma", "", lambda raw: jax.random.gamma(keys(raw), 2.0, (4,)), words(), runs=False)
case(
    "rng_bit_generator",
    "",
    lambda raw: lax.rng_bit_generator(raw, (4,)),
    np.zeros(4, np.uint32),
    runs=False,
)
case("rng_uniform", "", lambda: lax.rng_uniform(0.0, 1.0, (4,)), runs=False)

# ---- passed through, or whole --------------------------------------------------------------------

case(
    "optimization_barrier",
    "",
    lambda x, y: lax.optimization_barrier((x, y)),
    floats(8, 4),
    floats(16),
)
case("device_put", "", jax.device_put, floats(8, 4))


@custom_partitioning
def partitioned(x):
    return x + 1


partitioned.def_partition(
    infer_sharding_from_operands=lambda mesh, operands, result: operands[0].sharding,
    partition=lambda mesh, operands, result: (
        mesh,
        lambda x: x + 1,
        result.sharding,
        (operands[0].sharding,),
    ),
    sharding_rule="i j -> i j",
)


def kernel(x_ref, y_ref):
    y_ref[...] = 2 * x_ref[...]


def opaque(primitive, fn, *args):
    case(primitive, "", fn, *args, runs=False)


DEVICES = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
S = np.eye(4, dtype=np.float32)
opaque("after_all", lambda x: (lax.after_all(lax.create_token()), x)[1], X)
opaque("create_token", lambda x: (lax.create_token(), x)[1], X)
opaque("custom_partitioning", partitioned, floats(8, 4))
opaque("debug_callback", lambda x: jax.debug.callback(lambda x: None, x), X)
opaque("debug_print", lambda x: jax.debug.print("{}", x), X)
opaque("ffi_call", jax.ffi.ffi_call("no_such_kernel", jax.ShapeDtypeStruct((8,), np.float32)), X)
opaque(
    "io_callback",
    lambda x: jax.experimental.io_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    X,
)
opaque(
    "pallas_call",
    pallas.pallas_call(kernel, jax.ShapeDtypeStruct((8,), np.float32), interpret=True),
    X,
)
opaque("noinline", equinox.internal.noinline(jnp.sin), X)
opaque("call_exported", jax.export.export(jax.jit(jnp.sin))(X).call, X)
opaque("platform_index", lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), X)
opaque(
    "pure_callback",
    lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    X,
)
opaque(
    "shard_map", jax.shard_map(jnp.sin, mesh=DEVICES, in_specs=jax.P("x"), out_specs=jax.P("x")), X
)
