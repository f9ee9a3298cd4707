"""Pipelines take the next call while this one is under way."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from runtime.pipelines import pipeline

ROWS, SIZE, TURNS = 64, 600, 360
WEIGHTS = [
    np.random.default_rng(k).normal(size=(SIZE, SIZE)).astype(np.float32) / SIZE**0.5
    for k in range(2)
]


def forward(params, cache, batch):
    """Two layers, of which the second takes long; both keep what they were given."""
    first = jnp.tanh(batch @ params[0])
    sums, total = [cache["sums"][0] + first], first.sum()
    turn = lambda _, x: jnp.tanh(x @ params[1])  # noqa: E731
    last = jax.lax.fori_loop(0, TURNS, turn, first)
    return {"sums": [*sums, cache["sums"][1] + last]}, total, last.sum()


def test_the_first_stage_takes_a_call_before_the_last_has_ended_the_one_before():
    """Each call has a cache of its own."""
    batches = [np.full((ROWS, SIZE), k + 1, np.float32) for k in range(2)]
    caches = [{"sums": [np.full((ROWS, SIZE), k, np.float32)] * 2} for k in range(2)]
    want = [jax.jit(forward)(WEIGHTS, *each) for each in zip(caches, batches, strict=True)]
    step = pipeline(forward, WEIGHTS, caches[0], batches[0], micro_batches=1, anywhere=True)
    step.dry_run(WEIGHTS, caches[0], batches[0])
    params, *_ = step.place(WEIGHTS, caches[0], batches[0])
    placed = [step.place(params, *each)[1:] for each in zip(caches, batches, strict=True)]
    jax.block_until_ready((params, placed))
    # Compiled and placed, calls return before anything is computed.
    results = [step(params, *each) for each in placed]
    firsts, lasts = ([result[k] for result in results] for k in (1, 2))
    while not firsts[1].is_ready():
        time.sleep(1e-4)
    # Of the first call all but the second stage's work is done, and that of the second has begun.
    assert not lasts[0].is_ready()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-4),
        results,
        want,
    )
