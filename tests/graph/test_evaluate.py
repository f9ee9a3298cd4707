"""A replayed graph computes what the step computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph.steps import STEPS, shapes

from aliquot.graph import ReplayHook, capture, evaluate


def leaves(tree):
    """Numbers of a result, random keys as their bits."""
    numbers = (bool, int, float)
    arrays = [
        jnp.asarray(x) if isinstance(x, numbers) else x
        for x in jax.tree.leaves(tree)
        if hasattr(x, "dtype") or isinstance(x, numbers)
    ]
    return [
        np.asarray(
            jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )
        for x in arrays
    ]


def assert_same(got, want):
    for a, b in zip(leaves(got), leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


# With a hook that changes nothing and, where they are structured, without one. The others are slow:
# the runtime's tests replay them all, with a hook that splits arrays.
_BARE = ("nnx_in_place", "scan_layers_remat", "rnn_over_time", "while_and_cond")
_QUICK = (
    *_BARE,
    "switch_of_three",
    "loop_of_no_turns",
    "scan_reversed_unrolled",
    "plain_nested_jit",
    "functions_with_rules_of_their_own",
    "remat_save_names",
    "plain_dropout_typed_key",
    "plain_keywords",
    "placed_by_hand",
)
CASES = [
    pytest.param(
        name,
        ReplayHook(),
        id=f"{name}-hooked",
        marks=() if name in _QUICK else pytest.mark.slow,
    )
    for name in STEPS
]
CASES += [pytest.param(name, None, id=f"{name}-bare") for name in _BARE]


@pytest.mark.parametrize(("name", "hook"), CASES)
def test_same_numbers(name, hook):
    step = STEPS[name]()
    graph = capture(step.fn, *shapes(step.args), **shapes(step.kwargs))
    replayed = STEPS[name]()
    flat = graph.calling.flatten(replayed.args, replayed.kwargs)
    outputs = jax.jit(lambda arrays: evaluate(graph, arrays, on_op=hook))(list(flat.leaves))
    got = graph.calling.finish(outputs, replayed.args, replayed.kwargs)
    want = step.fn(*step.args, **step.kwargs)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert_same(got, want)
    # What a step changes in place has changed alike; arguments that it gives away are gone.
    if graph.calling.modules:
        assert_same(replayed.args, step.args)
