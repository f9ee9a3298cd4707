"""One of several processes that train together; prints its losses. Run by `test_hosts.py`, which
imports the model.
"""

import faulthandler
import json
import os
import sys

if __name__ == "__main__":
    process, count, port, num_micro_batches = map(int, sys.argv[1:5])
    shape = tuple(map(int, sys.argv[5:]))
    faulthandler.dump_traceback_later(150, exit=True)
    # The last one counts.
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={8 // count}"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from aliquot import zoo
from aliquot.graph import capture
from aliquot.planners import ManualParallel, Zero3Parallel
from aliquot.runtime import initialize, shutdown

NUM_STEPS = 3
_SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 32,
    "seq_len": 8,
}


def workload():
    """The model that all train."""
    config = zoo.configure("llama-7b", **_SIZES)
    return zoo.build(config, 16, dtype="float32", recompute="none", scan=True, optimizer="sgd")


def batch_of(work, number):
    """The whole batch of a step, the same in every process."""
    random = np.random.default_rng(number)
    return {name: random.integers(0, 32, x.shape).astype(x.dtype) for name, x in work.batch.items()}


def method(shape):
    """The batch over the first axis, feed-forward layers by columns and rows over the last: every
    process plans.

    Without a shape parameters and gradients are split over all devices: sums are reduce-scattered.
    """
    if not shape:
        return Zero3Parallel()
    data, tensor = ("x", "y") if len(shape) == 2 else (None, "x")
    specs = {
        "batch.*": (data,),
        "state.params.layers*.up.kernel": (None, None, tensor),
        "state.params.layers*.down.kernel": (None, tensor),
        "state.params.embed.embedding": (tensor,),
    }
    return ManualParallel(specs=specs, mesh_shape=shape)


def main():
    """Train, and print what came out."""
    initialize(f"127.0.0.1:{port}", count, process, initialization_timeout_s=60)

    from runtime.planned import build

    work = workload()
    step = build(capture(work.train_step, work.state, work.batch), method(shape), num_micro_batches)
    state = step.init(work.init, jax.random.key(0))
    losses = []
    for number in range(NUM_STEPS):
        state, metrics = step(state, step.local_part(batch_of(work, number)))
        losses.append(float(metrics["loss"]))
    spread = {leaf.sharding.num_devices for leaf in jax.tree.leaves(state)}
    scatters = "reduce-scatter(" in step.as_text()
    print(json.dumps({"losses": losses, "devices": max(spread), "scatters": scatters}), flush=True)
    shutdown()


if __name__ == "__main__":
    main()
