"""One of several processes that train together; prints its losses. Run by `test_hosts.py`, not by pytest."""

import faulthandler
import json
import os
import sys

process, count, port, num_micro_batches = map(int, sys.argv[1:5])
shape = tuple(map(int, sys.argv[5:]))
faulthandler.dump_traceback_later(150, exit=True)
# Programs are compiled for three steps each.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={8 // count} --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import numpy as np  # noqa: E402

from aliquot import zoo  # noqa: E402
from aliquot.graph import capture  # noqa: E402
from aliquot.planners import ShardParallel  # noqa: E402
from aliquot.runtime import initialize, shutdown  # noqa: E402

if count > 1:
    initialize(f"127.0.0.1:{port}", count, process, initialization_timeout_s=60)

from runtime.planned import build  # noqa: E402

SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 32, "seq_len": 8}
work = zoo.build(zoo.configure("llama-7b", **SIZES), 16, dtype="float32", recompute="none", scan=True, optimizer="sgd")
step = build(capture(work.train_step, work.state, work.batch), ShardParallel(mesh_shape=shape), num_micro_batches)
state = step.init(work.init, jax.random.key(0))
losses = []
for number in range(3):
    random = np.random.default_rng(number)
    batch = {name: random.integers(0, 32, x.shape).astype(x.dtype) for name, x in work.batch.items()}
    state, metrics = step(state, step.local_part(batch))
    losses.append(float(metrics["loss"]))
spread = jax.tree.leaves(state)[0].sharding.num_devices
print(json.dumps({"losses": losses, "devices": spread}), flush=True)
if count > 1:
    shutdown()
