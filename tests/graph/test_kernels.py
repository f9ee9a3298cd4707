"""What the grid and the blocks of a Pallas kernel say about cutting it, and what they do not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from aliquot.graph import capture, kernel_of, kernel_on_pieces

X = jax.ShapeDtypeStruct((16, 8), jnp.float32)
ROWS = pl.BlockSpec((4, 8), lambda i: (i, 0))


def double(x, out):
    out[...] = 2 * x[...]


def call(kernel=double, *, grid=(4,), given=ROWS, made=ROWS, shape=X, **settings):
    return lambda x: pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[given],
        out_specs=made,
        out_shape=shape,
        interpret=True,
        **settings,
    )(x)


def equation(fn, *args):
    (op,) = [op for op in capture(fn, *(args or (X,))).ops if op.name == "pallas_call"]
    return op.eqn


def cuts(fn, *args):
    """For each array the dims of the grid that its dims are cut by."""
    kernel = kernel_of(equation(fn, *args).params)
    return [[walk.grid_dim for walk in walks] for walks in (*kernel.operands, *kernel.results)]


def test_blocks_of_rows():
    assert cuts(call()) == [[0, -1], [0, -1]]


def test_a_vmap_adds_a_dim():
    assert cuts(jax.vmap(call()), jax.ShapeDtypeStruct((3, 16, 8), jnp.float32)) == [
        [0, 1, -1],
        [0, 1, -1],
    ]


def counted(x, out):
    out[...] = x[...] + pl.program_id(0)


def test_a_kernel_that_asks_where_it_is():
    assert cuts(call(counted)) == [[-1, -1], [-1, -1]]
    # A kernel counts without the dims of a vmap, which stay free.
    assert (
        cuts(jax.vmap(call(counted)), jax.ShapeDtypeStruct((3, 16, 8), jnp.float32))
        == [[0, -1, -1]] * 2
    )


@pytest.mark.parametrize(
    "fn",
    [
        call(given=pl.BlockSpec((4, 8), lambda i: (3 - i, 0))),
        call(
            made=pl.BlockSpec((4, 8), lambda i: (0, 0)),
            shape=jax.ShapeDtypeStruct((4, 8), jnp.float32),
        ),
        call(given=pl.BlockSpec((16, 8), lambda i: (0, 0)), kernel=lambda x, out: None),
        call(
            grid=(3,),
            given=pl.BlockSpec((6, 8), lambda i: (i, 0)),
            made=pl.BlockSpec((6, 8), lambda i: (i, 0)),
        ),
        call(grid=(), given=pl.BlockSpec(), made=pl.BlockSpec()),
    ],
    ids=["backwards", "one result block", "nothing taken in blocks", "does not divide", "no grid"],
)
def test_kernels_whose_blocks_tell_nothing_are_not_split(fn):
    assert all(dim < 0 for dims in cuts(fn) for dim in dims)


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [(0, [[0, -1], [0, -1]]), (1, [[-1, -1], [-1, -1]])],
    ids=["outside", "inside"],
)
def test_kernels_that_keep_state_between_blocks_are_not_split(rows, wanted):
    """Sums along the rows, in memory of the kernel's own that it clears at the first columns.

    With the columns outside, it is cleared for all rows before any has come to its second columns,
    and rows run into one another.
    """

    def running_sum(x, out, kept):
        @pl.when(pl.program_id(1 - rows) == 0)
        def _start():
            kept[...] = jnp.zeros_like(kept)

        kept[...] += x[...]
        out[...] = kept[...]

    block = pl.BlockSpec((4, 4), lambda *place: (place[rows], place[1 - rows]))
    memory = [tpu.VMEM((4, 4), jnp.float32)]
    grid = (2, 4) if rows else (4, 2)
    assert (
        cuts(call(running_sum, grid=grid, given=block, made=block, scratch_shapes=memory)) == wanted
    )


def test_a_kernel_on_pieces():
    x = np.arange(128, dtype=np.float32).reshape(16, 8)
    piece = kernel_on_pieces(equation(call()), [(8, 8)])
    (made,) = piece.primitive.bind(x[:8], **piece.params)
    np.testing.assert_array_equal(made, 2 * x[:8])
    assert kernel_on_pieces(equation(call()), [(16, 4)]) is None
    assert kernel_on_pieces(equation(call()), [(2, 8)]) is None


def test_prices():
    """The author's estimate, in proportion on pieces; without one the kernel's operators, as often
    as it runs.
    """
    estimate = pl.CostEstimate(flops=1000, transcendentals=24, bytes_accessed=4096)
    eqn = equation(call(cost_estimate=estimate))
    assert (kernel_of(eqn.params).flops, kernel_of(eqn.params).accessed_bytes) == (1024.0, 4096.0)
    half = kernel_of(kernel_on_pieces(eqn, [(8, 8)]).params)
    assert (half.flops, half.accessed_bytes) == (512.0, 2048.0)
    assert kernel_of(equation(call()).params).flops == 16 * 8

    def product(x, out):
        out[...] = jnp.dot(x[...], x[...].T)

    square = pl.BlockSpec((4, 4), lambda i: (i, 0))
    fn = call(product, made=square, shape=jax.ShapeDtypeStruct((16, 4), jnp.float32))
    assert kernel_of(equation(fn).params).flops == 4 * 2 * 4 * 8 * 4
