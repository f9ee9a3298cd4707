"""One of several processes that train together while strangers come. Run by `test_strangers.py` and
by a benchmark.

Usage: stranger_worker.py PROCESS COUNT PORT FOLDER. It says each port at which it listens, when it
comes and has joined, and each step. It trains until FOLDER has a file `stop`; others than process 0
come once FOLDER has a file `come`. From when FOLDER has a file `wipe`, process 0 deletes all values
in JAX's coordination service.
"""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

if __name__ == "__main__":
    process, count, port = map(int, sys.argv[1:4])
    folder = Path(sys.argv[4])
    faulthandler.dump_traceback_later(400, exit=True)
    # The last one counts.
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from runtime.fault_worker import BATCH, WIDTH, init, step_with

import aliquot
from aliquot.graph import coordination_client
from aliquot.runtime import initialize, shutdown
from aliquot.runtime.transport import _channels, _hosts, _watchdog, exchange


def say(*words):
    """A line, with the time."""
    print(*words, time.time(), flush=True)


def tell_ports():
    """Say each port at which this process listens from now on."""

    def telling(name, make):
        def made(*arguments):
            listener = make(*arguments)
            say("PORT", name, listener.getsockname()[1])
            return listener

        return made

    _watchdog.listen = telling("meeting", _watchdog.listen)
    _channels.listen = telling("arrays", _channels.listen)
    _hosts.reserved_port = telling("service", _hosts.reserved_port)


def wipe():
    """Delete the values in the service, of aliquot and JAX, each 20 ms, from when a file is
    there; in a thread.
    """
    client, *_ = coordination_client()
    while not (folder / "stop").exists():
        time.sleep(0.02)
        if (folder / "wipe").exists():
            for name in ("aliquot", "local_topology", "global_topology"):
                client.key_value_delete(name)


def main():
    """Meet, and train."""
    tell_ports()
    while process and not (folder / "come").exists():
        time.sleep(0.02)
    say("COMES")
    initialize(
        f"127.0.0.1:{port}", count, process, initialization_timeout_s=100, cpu_collectives=None
    )
    say("JOINED")
    if not process:
        threading.Thread(target=wipe, daemon=True).start()
    batch = {name: np.ones((BATCH, WIDTH), np.float32) for name in "xy"}
    train_step = step_with(jax.numpy.tanh)
    method = aliquot.PipeshardParallel(num_stages=count, num_micro_batches=2, schedule="1f1b")
    cluster = aliquot.Cluster.preset(f"{count}xcpu")
    shapes = jax.eval_shape(init, jax.random.key(0))
    plan = aliquot.plan(train_step, shapes, batch, cluster=cluster, method=method)
    step = aliquot.parallelize(train_step, plan)
    state = step.init(init, jax.random.key(0))
    while not any(exchange((folder / "stop").exists(), bool)):
        state, metrics = step(state, batch)
        say("STEP", float(metrics["loss"]))
    shutdown()
    say("DONE")


if __name__ == "__main__":
    main()
