"""What a backward program reads of its forward program is the cheapest set that suffices: against
all sets there are.
"""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.graph import Item, Phase, Value, values_to_keep

# Handing over an array costs something whatever its size, so that of equal sets the smaller one is
# taken.
_PER_ARRAY = 4097


def item(number, inputs, output):
    return Item(
        op_or_call=number,
        inputs=tuple(inputs),
        outputs=(output,),
        ops=(number,),
        phase=Phase.FORWARD,
        shared=False,
    )


@st.composite
def programs(draw):
    """Two values from elsewhere, one that is free, and up to six that the program makes of earlier
    ones.
    """
    count = draw(st.integers(1, 6))
    makers = []
    for k in range(count):
        inputs = draw(st.lists(st.integers(0, k + 2), min_size=1, max_size=3, unique=True))
        makers.append(item(k, inputs, k + 3))
    names = draw(
        st.lists(st.sampled_from(["add", "tanh", "dot_general"]), min_size=count, max_size=count)
    )
    sizes = draw(st.lists(st.integers(1, 9), min_size=count + 3, max_size=count + 3))
    wanted = draw(st.lists(st.integers(3, count + 2), min_size=1, max_size=4, unique=True))
    read_anyway = draw(st.sampled_from([(), (0,), (0, 1)]))
    values = [
        Value(index=k, shape=(1000 * n,), dtype="float32", itemsize=4) for k, n in enumerate(sizes)
    ]
    return makers, names, values, wanted, read_anyway


def suffices(kept, makers, names, wanted):
    known = {2, *kept}
    for made, name in zip(makers, names):
        if name != "dot_general" and known.issuperset(made.inputs):
            known.update(made.outputs)
    return known.issuperset(wanted)


@settings(max_examples=150, deadline=None)
@given(programs())
def test_kept_values_suffice_to_recompute_and_are_the_cheapest_such_set(program):
    makers, names, values, wanted, read_anyway = program

    def cost(kept):
        return sum(values[v].num_bytes + _PER_ARRAY for v in kept if v not in read_anyway)

    kept = values_to_keep(makers, names, wanted, values, free={2}, read_anyway=read_anyway)
    assert suffices(kept, makers, names, wanted)
    others = [v for v in range(len(values)) if v != 2]
    every = itertools.chain.from_iterable(
        itertools.combinations(others, n) for n in range(len(others) + 1)
    )
    assert cost(kept) == min(
        cost(chosen) for chosen in every if suffices(chosen, makers, names, wanted)
    )


def test_cheap_results_are_recomputed_from_one_product():
    """Of a product, a bias, an activation and its square only the product is kept."""
    makers = [item(0, [0, 1], 3), item(1, [3, 2], 4), item(2, [4], 5), item(3, [5, 5], 6)]
    values = [Value(index=k, shape=(100,), dtype="float32", itemsize=4) for k in range(7)]
    kept = values_to_keep(
        makers,
        ["dot_general", "add", "tanh", "mul"],
        [4, 5, 6],
        values,
        free={1, 2},
        read_anyway=(0,),
    )
    assert kept == {3} or kept == {4} or kept == {5}
    assert (
        values_to_keep(
            makers, ["dot_general", "add", "tanh", "mul"], [], values, free=(), read_anyway=()
        )
        == set()
    )


def test_sizes_above_32_bits_are_scaled():
    makers = [item(0, [0], 3), item(1, [3], 4), item(2, [4], 5)]
    values = [
        Value(index=k, shape=(n,), dtype="float32", itemsize=4)
        for k, n in enumerate([1, 1, 1, 2**34, 2**33, 9])
    ]
    kept = values_to_keep(
        makers, ["dot_general", "tanh", "dot_general"], [3, 4, 5], values, free=(), read_anyway=()
    )
    assert kept == {3, 5}
