"""Rules of linear algebra, transforms, kernels and attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax import linalg as _linalg
from jax.experimental import pallas
from sharding.rule_case import Case, adder, floats, ints

import aliquot

CASES: list[Case] = []
case = adder(CASES)


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


def through_experts(tokens, chosen, weights, into, out):
    return aliquot.experts(tokens, chosen, weights, [into, into], out, activation=jnp.multiply)


THROUGH = (floats(8, 4), ints(8, 2, high=4), floats(8, 2), floats(4, 4, 8), floats(4, 8, 4))
# On several devices in tests/runtime/test_experts.py.
case("experts", "", through_experts, *THROUGH, runs=False)
case(
    "experts_gradients",
    "",
    jax.grad(lambda *arrays: jnp.sum(through_experts(*arrays) ** 2), argnums=(0, 3)),
    *THROUGH,
    runs=False,
)
