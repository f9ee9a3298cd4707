"""Trains a small GPT in one or several processes, and goes on from its last file. Run by tests
through the launcher, and by itself in one process.

Usage: train_worker.py FOLDER CASE, with the case as JSON. Process 0 writes the losses of each step
    to FOLDER/losses.jsonl, and the state after each step to FOLDER/state.npz.
"""

import json
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import aliquot as aq
from aliquot import zoo
from aliquot.runtime import gather, initialize, shutdown

SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "seq_len": 16, "vocab_size": 128}
METHODS = {
    "zero3": aq.Zero3Parallel(),
    "pipeline": aq.PipeshardParallel(num_stages=2, num_micro_batches=2, schedule="1f1b"),
}


def on_host(state) -> list:
    """All of the state's arrays in every process."""
    leaves = jax.tree.leaves(state)
    if len({leaf.sharding.mesh for leaf in leaves}) == 1:
        # One program for all instead of one for each.
        whole = [NamedSharding(leaf.sharding.mesh, PartitionSpec()) for leaf in leaves]
        leaves = jax.jit(lambda x: x, out_shardings=whole)(leaves)
    return [gather(leaf) for leaf in leaves]


def train(folder: Path, case: dict) -> None:
    """Train from the last saved step on."""
    work = zoo.build("gpt-10m", 8, overrides=SIZES, dtype="float64", optimizer="adamw")
    cluster = aq.Cluster.preset(f"{jax.device_count()}xcpu")
    method = METHODS[case["method"]]
    plan = aq.plan(work.train_step, work.state, work.batch, cluster=cluster, method=method)
    step = aq.parallelize(work.train_step, plan)
    state, first = step.init(work.init, jax.random.key(0)), 0
    leaves, tree = jax.tree.flatten(state)
    saved = folder / "state.npz"
    if saved.exists():
        with np.load(saved) as file:
            first = int(file["number"])
            state = tree.unflatten([file[f"leaf{k}"] for k in range(len(leaves))])
    print(f"begins at step {first}", flush=True)
    for number in range(first, case["steps"]):
        random = np.random.default_rng(number)
        batch = {k: random.integers(0, 16, x.shape).astype(x.dtype) for k, x in work.batch.items()}
        state, metrics = step(state, batch)
        whole = on_host(state)
        if jax.process_index() == 0:
            with (folder / "losses.jsonl").open("a") as file:
                print(json.dumps([number, float(metrics["loss"])]), file=file)
            arrays = {f"leaf{k}": leaf for k, leaf in enumerate(whole)}
            np.savez(folder / "new.npz", number=number + 1, **arrays)
            os.replace(folder / "new.npz", saved)
        print(f"step {number} done", flush=True)
        time.sleep(case.get("pause_s", 0))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    asked = json.loads(sys.argv[2])
    if "ALIQUOT_NUM_PROCESSES" in os.environ:
        initialize(cpu_collectives=None if asked["method"] == "pipeline" else "gloo")
    train(Path(sys.argv[1]), asked)
    if "ALIQUOT_NUM_PROCESSES" in os.environ:
        shutdown()
