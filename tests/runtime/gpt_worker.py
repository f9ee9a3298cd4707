"""One of several processes that train a small GPT as a pipeline. Run by
`test_pipeline_processes.py` and by a benchmark.

Usage: gpt_worker.py PROCESS COUNT PORT CASE, with the case as JSON. The losses of all steps are the
    last line, as JSON.
"""

import faulthandler
import json
import os
import sys
import time

if __name__ == "__main__":
    process, count, port = map(int, sys.argv[1:4])
    case = json.loads(sys.argv[4])
    faulthandler.dump_traceback_later(case.get("limit_s", 150), exit=True)
    # The last one counts.
    devices = f"--xla_force_host_platform_device_count={case['devices'] // count}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import aliquot
from aliquot import zoo
from aliquot.cluster import Cluster
from aliquot.planners import PipeshardParallel
from aliquot.runtime import initialize, shutdown


def train(case):
    """The losses of every step, and seconds per step after the first."""
    config = zoo.configure("gpt-10m", num_layers=case["layers"], seq_len=case["seq_len"])
    dtype = case.get("dtype", "float32")
    work = zoo.build(config, case["batch"], dtype=dtype, recompute="none", optimizer="adamw")
    method = PipeshardParallel(
        num_stages=case["stages"],
        num_micro_batches=case["micro_batches"],
        schedule=case["schedule"],
    )
    cluster = Cluster.preset(case.get("cluster", f"{case['devices']}xcpu"))
    plan = aliquot.plan(work.train_step, work.state, work.batch, cluster=cluster, method=method)
    step = aliquot.parallelize(work.train_step, plan)
    state = step.init(work.init, jax.random.key(0))
    # Each process passes the rows that its stages read, and knows nothing of the others.
    own = step.prepare(work.state, work.batch).local_rows() if case.get("parts") else None
    losses, started = [], 0.0
    for number in range(case["steps"]):
        random = np.random.default_rng(number)
        # Few words of many, which is learned at once.
        batch = {k: random.integers(0, 16, x.shape).astype(x.dtype) for k, x in work.batch.items()}
        if own is not None:
            for array in batch.values():
                array[: own.start], array[own.stop :] = -1, -1
            batch = step.local_part(batch)
        state, metrics = step(state, batch)
        if case.get("reads", True):
            losses.append(float(metrics["loss"]))
        elif number == 1:
            print("TRAINS", flush=True)
        started = started or time.perf_counter()
    return {"losses": losses, "step_s": (time.perf_counter() - started) / max(case["steps"] - 1, 1)}


def main():
    """Train, and print what came out."""
    if count > 1:
        initialize(
            f"127.0.0.1:{port}", count, process, initialization_timeout_s=100, cpu_collectives=None
        )
    print(json.dumps(train(case)), flush=True)
    shutdown()


if __name__ == "__main__":
    main()
