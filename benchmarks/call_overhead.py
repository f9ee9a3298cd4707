"""What a call of a step takes beside the same step by hand, as `jax.jit` with shardings.

python benchmarks/call_overhead.py [--quick]
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import _results

_results.use_eight_devices()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import aliquot as aq  # noqa: E402

BAR = 1.5
COUNTS = (50, 500)


def train_step(
    params: dict[str, jax.Array], batch: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Hardly any arithmetic, so that issuing it is what takes time."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(batch) * sum(jnp.sum(w) for w in params.values())

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def measure(count: int, pairs: int) -> dict[str, Any]:
    """CPU seconds of the calling thread: of our step and of that by hand, in turn.

    Args:
        count: the number of arrays that a call passes.
        pairs: how often each is called.
    """
    params = {f"w{k}": np.ones((8, 8), np.float32) for k in range(count - 1)}
    batch = np.ones((16, 8), np.float32)
    plan = aq.plan(
        train_step, params, batch, cluster=aq.Cluster.preset("8xcpu"), method=aq.DataParallel()
    )
    step = aq.parallelize(train_step, plan)
    ours, placed = step.place(params, batch)
    theirs, _ = step.place(params, batch)
    shardings = jax.tree.map(lambda x: x.sharding, (ours, placed))
    replicated = jax.sharding.NamedSharding(step.mesh, jax.sharding.PartitionSpec())
    by_hand = jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=shardings,
        out_shardings=(shardings[0], replicated),
    )

    spent: list[tuple[float, float]] = []
    for _ in range(pairs):
        start = time.thread_time()
        ours, _ = step(ours, placed)
        mine = time.thread_time() - start
        jax.block_until_ready(ours)
        start = time.thread_time()
        theirs, _ = by_hand(theirs, placed)
        spent.append((mine, time.thread_time() - start))
        jax.block_until_ready(theirs)
    mine_s, hand_s = map(min, zip(*spent[5:], strict=True))
    return {
        "arrays": count,
        "step us": mine_s * 1e6,
        "by hand us": hand_s * 1e6,
        "ratio": mine_s / hand_s,
        "median ratio of pairs": statistics.median(mine / hand for mine, hand in spent[5:]),
    }


def main() -> int:
    """Measure and report."""
    chosen = _results.options(__doc__)
    rows = [measure(count, 20 if chosen.quick else 200) for count in COUNTS]
    report = _results.Report(
        name="call_overhead",
        question="What does a call of a step take of its thread, beside `jax.jit` by hand?",
        bar=f"at most {BAR} times the CPU time of the thread, for {COUNTS} arrays",
        method=(
            "Data parallelism on eight virtual devices; 200 calls of each in turn, each waited"
            " for, the first five left out. The time is that of the thread for one line of"
            " a training loop, `state, loss = step(state, batch)`: the least, which other programs"
            " on the machine disturb least."
        ),
        summary={"largest ratio": max(row["ratio"] for row in rows)},
        tables={"calls": rows},
    )
    met = report.summary["largest ratio"] <= BAR
    return report.finish(chosen, met=None if chosen.quick else met)


if __name__ == "__main__":
    sys.exit(main())
