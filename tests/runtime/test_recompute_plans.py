"""Plans whose layers recompute, run: the numbers of the plain step, whatever the method."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph.random_layers import random_layers

import aliquot as aq

METHODS = {
    "dp": aq.DataParallel(),
    "zero3": aq.Zero3Parallel(),
    "shard": aq.ShardParallel(mesh_shape=(4, 2)),
    "pipeline": aq.PipeshardParallel(num_stages=2),
}
CASES = [
    (0, "shard", "block", 1),
    (2, "pipeline", "minimal", 4),
    (3, "zero3", "save_attention", 1),
    (6, "pipeline", "block", 2),
    (12, "dp", "narrow", 1),
    (13, "shard", "minimal", 4),
]
SLOW = []
for seed in range(14, 26):
    method, how = list(METHODS)[seed % 4], ("minimal", "narrow", "block")[seed % 3]
    # Eight rows are one for each device: other methods split only these.
    count = (1, 2, 4)[seed % 3] if method in ("shard", "pipeline") else 1
    SLOW.append((seed, method, how, count))


@pytest.mark.parametrize(
    ("seed", "method", "recompute", "count"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_plans_that_recompute_compute_the_same(seed, method, recompute, count):
    with jax.enable_x64(True):
        text, step, state, batch = random_layers(seed)
        # Effects run as often as in the step, and one stack of layers alone can be cut into stages.
        if "called_back" in text or ("scanned" in text and "twice" in text):
            method, count = "shard", 1
        state, batch = jax.tree.map(jnp.asarray, (state, batch))
        try:
            plan = aq.plan(
                step,
                state,
                batch,
                cluster=aq.Cluster.detect(),
                method=METHODS[method],
                num_micro_batches=count,
                recompute=recompute,
            )
        except (aq.InputError, aq.CaptureError, aq.InfeasibleError) as error:
            pytest.fail(f"{type(error).__name__}: {error}")
        assert plan.recompute == recompute
        again = aq.Plan.from_json(plan.to_json())
        assert again == plan
        want = jax.jit(step)(state, batch)
        got = aq.parallelize(step, again)(state, batch)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * np.max(np.abs(b)) + 1e-15)
