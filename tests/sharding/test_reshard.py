"""The collectives of a change of split: their algebra, and that XLA emits the same."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from aliquot.cluster import SumCollective
from aliquot.sharding import PARTIAL, REPLICATED, dims_of, num_shards, reshard, result_fraction
from aliquot.sharding._reshard import _reshard, intermediate_specs

MESHES = [(2,), (8,), (2, 4), (4, 2), (2, 2, 2), (6,), (2, 3), (3, 2, 4), (64, 8)]


@st.composite
def conversions(draw):
    sizes = draw(st.sampled_from(MESHES))
    placements = st.integers(REPLICATED, 2)
    source = draw(st.tuples(*[st.integers(PARTIAL - 1, 2)] * len(sizes)))
    target = draw(st.tuples(*[placements] * len(sizes)))
    return source, target, sizes, draw(st.sampled_from(SumCollective))


@given(conversions())
@settings(max_examples=400, deadline=None)
def test_moves_lead_from_source_to_target(case):
    """What enters each collective is what left the one before, or a slice of it; the last leaves
    the target's shard.
    """
    source, target, sizes, sums = case
    local = 1 / num_shards(source, sizes)
    for move in reshard(source, target, sizes, sums):
        assert move.fraction <= local * (1 + 1e-12)
        assert round(local / move.fraction, 9) == round(local / move.fraction)
        local = result_fraction(move, sizes)
    assert local >= 1 / num_shards(target, sizes) * (1 - 1e-12)


@given(conversions())
@settings(max_examples=400, deadline=None)
def test_every_sum_is_finished_once(case):
    source, target, sizes, sums = case
    moves = reshard(source, target, sizes, sums)
    summed = [a for m in moves if m.kind in ("all-reduce", "reduce-scatter") for a in m.axes]
    assert sorted(summed) == [a for a, p in enumerate(source) if p <= PARTIAL]
    if sums is SumCollective.ALL_REDUCE:
        assert all(m.kind != "reduce-scatter" for m in moves)


@pytest.mark.parametrize("sizes", MESHES)
def test_equal_splits_need_nothing_and_slices_are_free(sizes):
    for spec in itertools.product(range(-1, 2), repeat=len(sizes)):
        assert reshard(spec, spec, sizes, SumCollective.REDUCE_SCATTER) == ()
        assert reshard((REPLICATED,) * len(sizes), spec, sizes, SumCollective.REDUCE_SCATTER) == ()


@given(conversions())
@settings(max_examples=400, deadline=None)
def test_only_the_order_of_dims_matters(case):
    """Prices are shared by changes that differ in the numbers of their dims."""
    source, target, sizes, sums = case
    apart = [tuple(3 * p + 1 if p >= 0 else p for p in spec) for spec in (source, target)]
    raw = _reshard(*apart, sizes, sums) if source != target else ()
    assert reshard(source, target, sizes, sums) == raw


def test_nothing_becomes_a_partial_sum():
    assert reshard((REPLICATED, 0), (PARTIAL, 0), (2, 4), SumCollective.REDUCE_SCATTER) is None
    assert reshard((0,), (PARTIAL,), (8,), SumCollective.ALL_REDUCE) is None
    assert (
        reshard((PARTIAL, 0), (PARTIAL, REPLICATED), (2, 4), SumCollective.REDUCE_SCATTER)
        is not None
    )


@pytest.mark.parametrize("size", [2, 3, 4, 8, 12])
def test_one_axis(size):
    """The four elementary changes, with what they move."""
    kinds = {
        ((0,), (REPLICATED,)): ("all-gather", 1 / size, 1.0),
        ((0,), (1,)): ("all-to-all", 1 / size, 1 / size),
        ((PARTIAL,), (REPLICATED,)): ("all-reduce", 1.0, 1.0),
        ((PARTIAL,), (0,)): ("reduce-scatter", 1.0, 1 / size),
    }
    for (source, target), (kind, entering, leaving) in kinds.items():
        (move,) = reshard(source, target, (size,), SumCollective.REDUCE_SCATTER)
        assert (move.kind, move.axes, move.group) == (kind, (0,), size)
        assert move.fraction == pytest.approx(entering) and result_fraction(
            move, (size,)
        ) == pytest.approx(leaving)


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        # The minor axis leaves a dim freely; behind a major one the tiles are out of order.
        ((0, 0), (0, 2), ["all-to-all"]),
        ((0, 0), (2, 0), ["all-to-all", "collective-permute"]),
        ((0, 0), (0, -1), ["all-gather"]),
        ((0, 0), (-1, 0), ["collective-permute", "all-gather"]),
        # What is repeated is sliced before anything is sent.
        ((-1, 0), (1, 1), ["all-to-all"]),
        # Two axes on one dim move together.
        ((0, 0), (1, 1), ["all-to-all"]),
        # One dim to two others: everything is gathered.
        ((0, 0), (1, 2), ["all-to-all", "all-to-all"]),
    ],
)
def test_two_axes(source, target, kinds):
    assert [m.kind for m in reshard(source, target, (2, 4), SumCollective.REDUCE_SCATTER)] == kinds


SHAPE = (16, 32, 64)
PAIRS = [
    p
    for p in itertools.product(itertools.product(range(-1, 3), repeat=2), repeat=2)
    if p[0] != p[1]
]
# XLA exchanges before it slices here, because the tiled dims happen to be the last ones of the
# array.
EXCHANGED_FIRST = {((-1, 1), (2, 0)), ((-1, 2), (2, 1)), ((1, -1), (0, 2))}


def _compiled(mesh, source, target):
    """Kinds of the collectives in a compiled conversion, with the bytes that each leaves on a
    device.
    """
    shardings = [
        NamedSharding(
            mesh,
            PartitionSpec(*[axes or None for axes in dims_of(spec, mesh.axis_names, len(SHAPE))]),
        )
        for spec in (source, *intermediate_specs(source, target, tuple(mesh.shape.values())))
    ]

    def ask(x):
        for sharding in shardings[1:]:
            x = jax.lax.with_sharding_constraint(x, sharding)
        return x

    convert = jax.jit(ask, in_shardings=shardings[0], out_shardings=shardings[-1])
    text = convert.lower(jax.ShapeDtypeStruct(SHAPE, jnp.float32)).compile().as_text()
    found = []
    pattern = (
        r"= \(?(.*?)"
        r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    )
    for result, kind in re.findall(pattern, text):
        shapes = re.findall(r"f32\[([\d,]*)\]", result)
        found.append(
            (kind, sum(4 * math.prod(int(n) for n in shape.split(",") if n) for shape in shapes))
        )
    return found


def _check_against_xla(mesh, pairs):
    whole = 4 * math.prod(SHAPE)
    wrong = {}
    for source, target in pairs:
        moves = reshard(source, target, (2, 4), SumCollective.ALL_REDUCE)
        predicted = [(m.kind, round(result_fraction(m, (2, 4)) * whole)) for m in moves]
        compiled = _compiled(mesh, source, target)
        if predicted != compiled:
            wrong[source, target] = predicted, compiled
    assert {pair: what for pair, what in wrong.items() if pair not in EXCHANGED_FIRST} == {}


def test_xla_emits_the_same(mesh):
    sample = np.random.default_rng(0).permutation(len(PAIRS))[:96]
    _check_against_xla(mesh(2, 4), [PAIRS[k] for k in sample])


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (2, 2, 2)])
def test_axes_that_may_stay_are_not_gathered(sizes):
    """No collective leaves more on a device than it holds before, or behind."""
    for source, target in itertools.product(
        itertools.product(range(-1, 3), repeat=len(sizes)), repeat=2
    ):
        assert intermediate_specs(source, target, sizes)[-1] == target
        kept = max(1 / num_shards(source, sizes), 1 / num_shards(target, sizes))
        moves = reshard(source, target, sizes, SumCollective.REDUCE_SCATTER)
        assert all(result_fraction(m, sizes) <= kept * (1 + 1e-12) for m in moves)


@pytest.mark.slow
def test_xla_emits_the_same_for_all_pairs(mesh):
    _check_against_xla(mesh(2, 4), PAIRS)
