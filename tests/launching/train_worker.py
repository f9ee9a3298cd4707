"""Trains a small GPT in one or several processes, and goes on from its last checkpoint. Run by
tests through the launcher, and by itself in one process.

Usage: train_worker.py FOLDER CASE, with the case as JSON. Process 0 writes the loss of each step to
    FOLDER/losses.jsonl.
"""

import json
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np

import aliquot as aq
from aliquot import zoo
from aliquot.runtime import initialize, shutdown

SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "seq_len": 16, "vocab_size": 128}
METHODS = {
    "zero3": aq.Zero3Parallel(),
    "pipeline": aq.PipeshardParallel(num_stages=2, num_micro_batches=2, schedule="1f1b"),
}


def train(folder: Path, case: dict) -> None:
    """Train from the last checkpoint on."""
    work = zoo.build("gpt-10m", 8, overrides=SIZES, dtype="float64", optimizer="adamw")
    if "plan" in case:
        plan = aq.Plan.load(case["plan"])
    else:
        cluster = aq.Cluster.preset(f"{jax.device_count()}xcpu")
        method = METHODS[case["method"]]
        plan = aq.plan(work.train_step, work.state, work.batch, cluster=cluster, method=method)
        plan.save(folder / "plan.json")
    step = aq.parallelize(work.train_step, plan)
    step.prepare(work.state, work.batch)
    with aq.Checkpoints(folder / "checkpoints", keep=2) as checkpoints:
        restored = checkpoints.restore(step)
        first = restored.number if restored else 0
        state = restored.state if restored else step.init(work.init, jax.random.key(0))
        print(f"begins at step {first}", flush=True)
        for number in range(first, case["steps"]):
            random = np.random.default_rng(number)
            batch = {
                k: random.integers(0, 16, x.shape).astype(x.dtype) for k, x in work.batch.items()
            }
            state, metrics = step(state, batch)
            loss = float(metrics["loss"])
            if jax.process_index() == 0:
                with (folder / "losses.jsonl").open("a") as file:
                    print(json.dumps([number, loss]), file=file)
            checkpoints.save(step, state, number + 1)
            if number == first:
                print(f"has done step {number} after {time.process_time():.1f} CPU s", flush=True)
            time.sleep(case.get("pause_s", 0))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    asked = json.loads(sys.argv[2])
    if "ALIQUOT_NUM_PROCESSES" in os.environ:
        initialize(cpu_collectives=None if asked["method"] == "pipeline" else "gloo")
    train(Path(sys.argv[1]), asked)
    if "ALIQUOT_NUM_PROCESSES" in os.environ:
        shutdown()
