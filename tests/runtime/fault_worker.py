"""One of several processes that train together until a fault comes. Run by
`test_process_faults.py`.

Usage: fault_worker.py PROCESS COUNT PORT CASE, with the case as JSON: its `kind` of fault, the
    `rank` that has it, its `moment`,
the `runtime`. What is about to happen is said as a line of its own.
"""

import faulthandler
import importlib.metadata
import json
import os
import signal
import sys
import threading
import time

if __name__ == "__main__":
    process, count, port = map(int, sys.argv[1:4])
    case = json.loads(sys.argv[4])
    faulthandler.dump_traceback_later(150, exit=True)
    # The last one counts.
    devices = f"--xla_force_host_platform_device_count={case.get('devices', 1)}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Programs that a shell starts in the background ignore Ctrl-C, and this one may descend from
    # such a one.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import jax.numpy as jnp
import numpy as np

import aliquot
from aliquot.cluster import Cluster
from aliquot.planners import PipeshardParallel, Zero3Parallel
from aliquot.runtime import initialize, shutdown

WIDTH, BATCH, STEP = 16, 16, 3


def init(key):
    """Parameters of four layers."""
    return [jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in jax.random.split(key, 4)]


def step_with(activation):
    """A step of gradient descent."""

    def loss_of(layers, batch):
        x = batch["x"]
        for layer in layers:
            x = x + activation(x @ layer)
        return jnp.mean((x - batch["y"]) ** 2)

    def train_step(layers, batch):
        loss, gradients = jax.value_and_grad(loss_of)(layers, batch)
        return [w - 0.1 * g for w, g in zip(layers, gradients, strict=True)], {"loss": loss}

    return train_step


def fault(kind):
    """Say it, and do it; True if this process is to end its work here."""
    print("FAULT", flush=True)
    match kind:
        case "raise":
            raise ValueError("a fault")
        case "exit":
            sys.exit(7)
        case "leave":
            os._exit(9)
        case "return":
            return True
        case "interrupt":
            signal.raise_signal(signal.SIGINT)
        case "kill" | "stop" | "segv":
            os.kill(
                os.getpid(),
                {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV}[kind],
            )
    return False


def main():
    """Train; at the fault's moment the rank that has it, has it."""
    kind, mine = case["kind"], process in case.get("ranks", [case["rank"]])

    def at(moment):
        return mine and case.get("moment") == moment and fault(kind)

    def differs(what):
        return mine and kind == what

    if differs("version"):
        version = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.0.1" if name == "jax" else version(name)
    if at("begin"):
        return
    if kind in ("version", "number", "count", "absent"):
        print("FAULT", flush=True)
    if differs("absent"):
        time.sleep(100)
    if case.get("moment") == "meeting":
        # The last of the others does not come, so that all still wait.
        if process == max({*range(count)} - {case["rank"]}):
            time.sleep(100)
        if mine:
            threading.Timer(2, fault, [kind]).start()
    number = 1 - process if differs("number") else process
    if count > 1:
        initialize(
            f"127.0.0.1:{port}",
            count + differs("count"),
            number,
            initialization_timeout_s=case.get("timeout_s", 100),
            cpu_collectives="gloo" if case["runtime"] == "program" else None,
            run_id=case.get("run_id", ""),
        )
    if at("joined"):
        return
    batch = {
        name: np.ones((BATCH * (2 if differs("shape") else 1), WIDTH), np.float32) for name in "xy"
    }
    train_step = step_with(jnp.sin if differs("model") else jnp.tanh)
    stages = max(count, 2)
    method = PipeshardParallel(
        num_stages=stages, num_micro_batches=4 if differs("plan") else 2, schedule="1f1b"
    )
    options = {}
    if case["runtime"] == "program":
        method, options = Zero3Parallel(), {"num_micro_batches": 2 if differs("plan") else 1}
    cluster = Cluster.preset(f"{len(jax.devices())}xcpu")
    shapes = jax.eval_shape(init, jax.random.key(0))
    plan = aliquot.plan(train_step, shapes, batch, cluster=cluster, method=method, **options)
    step = aliquot.parallelize(train_step, plan)
    if at("planned"):
        return
    if kind in ("plan", "model", "shape"):
        print("FAULT", flush=True)
    state = step.init(init, jax.random.key(0))
    for number in range(case.get("steps", 10**9)):
        state, metrics = step(state, batch)
        if number == STEP:
            print("TRAINS", flush=True)
            if at("step"):
                return
        if case.get("reads", True):
            float(metrics["loss"])
    if at("end"):
        return
    shutdown()
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
