"""Rules of products, reductions, scans and convolutions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from sharding.rule_case import Case, N, adder, bools, floats, ints

CASES: list[Case] = []
case = adder(CASES)


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
