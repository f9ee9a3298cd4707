"""How much arithmetic a Pallas kernel is counted with: work that its runs skip is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jax.experimental.pallas.ops.tpu import flash_attention, splash_attention

from aliquot.graph import KERNEL, capture, kernel_of
from aliquot.sharding import dim_rule

PRODUCT = 2 * 8**3
BLOCKS = 4


def squares(when, *, tables=(), **settings):
    """Squares of 4 x 4 blocks of 8 x 8, each computed if `when(i, j, *tables)` says so."""

    def kernel(*refs):
        *known, x, out = refs

        @pl.when(when(pl.program_id(0), pl.program_id(1), *known))
        def _run():
            out[...] = jnp.dot(x[...], x[...])

    def run(x):
        block = pl.BlockSpec((8, 8), lambda i, j, *_: (i, j))
        return pl.pallas_call(
            kernel,
            grid_spec=tpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(tables),
                grid=(BLOCKS, BLOCKS),
                in_specs=[block],
                out_specs=block,
            ),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            interpret=True,
            **settings,
        )(*tables, x)

    return run


def flops(fn, shape=(8 * BLOCKS, 8 * BLOCKS)):
    graph = capture(fn, jax.ShapeDtypeStruct(shape, jnp.float32))
    (op,) = [op for op in graph.ops if op.name == KERNEL]
    return dim_rule(op, graph).flops


@pytest.mark.parametrize(
    ("when", "runs"),
    [
        (lambda i, j: i >= 0, 16),
        (lambda i, j: i >= j, 10),
        (lambda i, j: (i // 2 == j) | (j == 3), 4 + 4),
        (lambda i, j: jnp.where(i % 2 == 0, j < 1, j - 3 == 0), 2 + 2),
        (lambda i, j: (i + 1) * 8 - 1 < j * 8, 6),
        (lambda i, j: i == pl.num_programs(0) - 1, 4),
    ],
)
def test_branches_by_the_place_in_the_grid(when, runs):
    assert flops(squares(when)) == runs * PRODUCT


def test_branches_by_a_table_of_constants():
    kept = np.tril(np.ones((BLOCKS, BLOCKS), np.int32))
    table = jnp.asarray(kept)
    fn = squares(lambda i, j, table: table[i, j] > 0, tables=(table,))
    assert flops(fn) == 10 * PRODUCT
    # A `vmap` adds a dim to the grid, not to the table.
    shape = (3, 8 * BLOCKS, 8 * BLOCKS)
    assert flops(jax.vmap(fn), shape) == 3 * 10 * PRODUCT


def test_what_is_unknown_counts_as_run():
    def fn(x):
        table = (x[:BLOCKS, :BLOCKS] > 0).astype(jnp.int32)
        return squares(lambda i, j, table: table[i, j] > 0, tables=(table,))(x)

    assert flops(fn) == 16 * PRODUCT


def test_estimates_of_authors_do_not_know_what_runs_skip():
    estimate = pl.CostEstimate(flops=16 * PRODUCT, transcendentals=0, bytes_accessed=64)
    skips, all_run = (
        flops(squares(when, cost_estimate=estimate))
        for when in (lambda i, j: i >= j, lambda i, j: i >= 0)
    )
    assert skips == 10 * PRODUCT and all_run == 16 * PRODUCT


T, H = 1024, 64


def kernels(attend, heads=2):
    """The kernels of attention and its gradients."""
    x = jax.ShapeDtypeStruct((3, heads, T, H), jnp.bfloat16)
    graph = capture(
        jax.grad(lambda *qkv: jnp.sum(attend(*qkv).astype(jnp.float32) ** 2), (0, 1, 2)), x, x, x
    )
    return [dim_rule(op, graph) for op in graph.ops if op.name == KERNEL]


def splash(q, k, v):
    mask = splash_attention.MultiHeadMask([splash_attention.CausalMask((T, T))] * q.shape[1])
    return jax.vmap(splash_attention.make_splash_mha_single_device(mask))(q, k, v)


def flash(q, k, v):
    return flash_attention.flash_attention(q, k, v, causal=True)


@pytest.mark.parametrize(("attend", "block"), [(splash, 128), (flash, 128)])
def test_causal_attention(attend, block):
    """Two products forward, and three and four backward, of the blocks that are not masked away;
    whole examples are split.
    """
    count = T // block
    product = 2 * 3 * 2 * block**2 * H * count * (count + 1) / 2
    found = kernels(attend)
    wanted = {2: False, 3: True, 4: True}
    assert sorted(round(rule.flops / product - 0.3) for rule in found) == sorted(wanted)
    for rule in found:
        assert rule.scores.is_backward == wanted[round(rule.flops / product - 0.3)]
        assert "a" in rule.factors and rule.sizes["a"] == 3
        assert all(dims[0] == "a" for dims in rule.results)


def test_other_kernels_have_no_scores():
    graph = capture(squares(lambda i, j: i >= 0), jax.ShapeDtypeStruct((32, 32), jnp.float32))
    (op,) = [op for op in graph.ops if op.name == KERNEL]
    assert kernel_of(op.params).scores is None and dim_rule(op, graph).scores is None
