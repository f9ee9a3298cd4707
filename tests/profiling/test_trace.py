"""Where the seconds of a program on virtual devices go."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from aliquot.profiling import trace_part
from aliquot.profiling._programs import compile_program
from aliquot.runtime import make_mesh


def compiled(spec: PartitionSpec, out: PartitionSpec):
    """A product and a loop of products over four devices."""
    mesh = make_mesh((4,), ("x",), None)

    def product(a):
        loop = jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ (a.T @ x)), a)
        return jax.lax.with_sharding_constraint(loop, NamedSharding(mesh, out))

    shape = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=NamedSharding(mesh, spec))
    return compile_program(jax.jit(product), [shape], (4,), ("x",))


def test_collectives_are_told_from_other_operators():
    """Also inside a loop, whose own event covers those of its operators."""
    split = trace_part(compiled(PartitionSpec("x"), PartitionSpec()), runs=2)
    alone = trace_part(compiled(PartitionSpec(), PartitionSpec()), runs=2)
    assert split.communication_s > 0 and split.compute_s > 0
    assert alone.communication_s == 0 and alone.compute_s > 0


def test_a_program_that_did_not_compile_has_no_trace():
    part = replace(compiled(PartitionSpec(), PartitionSpec()), compiled=None)
    assert trace_part(part) is None


@pytest.mark.parametrize(
    ("intervals", "covered"), [([], 0), ([(0, 2), (1, 3), (5, 6)], 4), ([(0, 9), (2, 3)], 9)]
)
def test_what_intervals_cover_counts_once(intervals, covered):
    from aliquot.profiling._trace import _covered

    assert _covered(intervals) == covered
