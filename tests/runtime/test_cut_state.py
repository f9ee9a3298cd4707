"""Steps whose state holds rows of examples run in micro-batches and give one device's results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharding.test_cut_state import decode, decode_in_a_loop, recurrent

import aliquot as aq

BATCH = {"x": (32, 8), "position": (32,)}
CACHE = (32, 4, 8)
STEPS = {
    "layers": (decode, [(8, 8)] * 2, [CACHE] * 2),
    "loop": (decode_in_a_loop, (2, 8, 8), {"rows": (2, *CACHE)}),
    "recurrent": (recurrent, {"w": (8, 8), "carry": (32, 8)}),
}
CASES = [
    pytest.param("layers", aq.DataParallel(), 2, marks=pytest.mark.slow),
    ("layers", aq.Megatron(data=4, tensor=1, pipeline=2), 1),
    pytest.param("layers", aq.Megatron(data=4, tensor=1, pipeline=2), 2, marks=pytest.mark.slow),
    ("loop", aq.Megatron(data=2, tensor=2, pipeline=2), 4),
    ("recurrent", aq.DataParallel(), 2),
]


def _arrays(shapes, seed):
    """Values of those shapes; whole numbers where there is one for each example."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: rng.integers(0, 4, s) if len(s) == 1 else 0.3 * rng.normal(size=s),
        shapes,
        is_leaf=lambda s: isinstance(s, tuple),
    )


@pytest.mark.parametrize(("name", "method", "count"), CASES)
def test_results_are_those_of_one_device(name, method, count):
    fn, *shapes = STEPS[name]
    with jax.enable_x64(True):
        args = jax.tree.map(jnp.asarray, _arrays([*shapes, BATCH], seed=0))
        plan = aq.plan(
            fn, *args, cluster=aq.Cluster.preset("8xcpu"), method=method, num_micro_batches=count
        )
        step = aq.parallelize(fn, plan)
        mine, theirs = list(args), jax.tree.map(jnp.copy, args)
        for _ in range(2):
            # A second step takes the state of the first, where that lies.
            want, got = fn(*mine), step(*theirs)
            mine[len(args) - 2], theirs[len(args) - 2] = want[0], got[0]
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-9, atol=1e-12),
            got,
            want,
        )


def test_a_stage_writes_its_cache_where_it_lies():
    """The forward program of a stage takes over the buffer, and no copy is made on the way out."""
    rows, length, size = 8, 512, 32
    args = [
        [np.eye(size, dtype=np.float32)] * 2,
        [np.zeros((rows, length, size), np.float32) for _ in range(2)],
        {"x": np.ones((rows, size), np.float32), "position": np.arange(rows, dtype=np.int32)},
    ]
    plan = aq.plan(
        decode,
        *args,
        cluster=aq.Cluster.preset("2xcpu"),
        method=aq.Megatron(data=1, tensor=1, pipeline=2),
        num_micro_batches=1,
    )
    step = aq.parallelize(decode, plan)
    params, cache, batch = step.prepare(*args).place(*args)
    step(params, cache, batch)
    assert all(rows.is_deleted() for rows in cache)
    of_a_stage = rows * length * size * 4
    assert step.stats().peak_bytes < 1.2 * of_a_stage
    assert plan.prediction.peak_memory_bytes < 1.2 * of_a_stage
    # A call that donates nothing leaves it as it was.
    cache = step.dry_run(params, args[1], batch)[0]
    again = step.dry_run(params, cache, batch)[0]
    assert not any(rows.is_deleted() for rows in (*cache, *again))
