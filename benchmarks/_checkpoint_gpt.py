"""GPT-10M saved or restored by one or more processes, for `checkpoints.py`.

Usage: _checkpoint_gpt.py PROCESS COUNT PORT FOLDER CASE, with the case as JSON. The last line says
    what came out, as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from typing import Any

from _results import use_eight_devices

from aliquot.core import with_xla_flags

if __name__ == "__main__":
    process, count, port = map(int, sys.argv[1:4])
    folder, case = sys.argv[4], json.loads(sys.argv[5])
    faulthandler.dump_traceback_later(500, exit=True)
    use_eight_devices(fast_code=False)
    devices = {"--xla_force_host_platform_device_count": str(8 // count)}
    os.environ["XLA_FLAGS"] = with_xla_flags(os.environ["XLA_FLAGS"], devices)

import jax

import aliquot as aq
from aliquot import zoo
from aliquot.runtime import initialize, shutdown


def main() -> None:
    """Make or restore the state under a plan, and save it so many times as asked."""
    if count > 1:
        initialize(f"127.0.0.1:{port}", count, process, initialization_timeout_s=200)
    config = zoo.configure("gpt-10m")
    work = zoo.build(config, 8, dtype="float32", recompute="none", optimizer="adamw")
    method = getattr(aq, case["method"])(**case.get("options", {}))
    cluster = aq.Cluster.preset("8xcpu")
    plan = aq.plan(work.train_step, work.state, work.batch, cluster=cluster, method=method)
    step = aq.parallelize(work.train_step, plan).prepare(work.state, work.batch)
    found: dict[str, Any] = {}
    with aq.Checkpoints(folder, keep=2) as checkpoints:
        restored = checkpoints.restore(step)
        if restored is None:
            state = jax.block_until_ready(step.init(work.init, jax.random.key(0)))
        else:
            state = restored.state
            found["read"] = restored.read_bytes
        found["owned"] = owned_bytes(state)
        found["saves"] = [timed_save(checkpoints, step, state, k) for k in range(case["saves"])]
    print(json.dumps(found), flush=True)
    if count > 1:
        shutdown()


def owned_bytes(state: Any) -> int:
    """Bytes of the blocks that this process's devices hold, each counted once."""
    total = 0
    for leaf in jax.tree.leaves(state):
        for piece in getattr(leaf, "pieces", (leaf,)):
            blocks = {str(shard.index): shard.data.nbytes for shard in piece.addressable_shards}
            total += sum(blocks.values())
    return total


def timed_save(checkpoints: Any, step: Any, state: Any, number: int) -> dict[str, float]:
    """What a save takes from the thread that trains, and the whole of it from the processor."""
    checkpoints.wait()
    wall, own, every = time.perf_counter(), time.thread_time(), time.process_time()
    checkpoints.save(step, state, number)
    found = {
        "blocking s": time.perf_counter() - wall,
        "blocking thread CPU s": time.thread_time() - own,
        "blocking process CPU s": time.process_time() - every,
    }
    checkpoints.wait()
    return found | {"all CPU s": time.process_time() - every}


if __name__ == "__main__":
    main()
