"""One of two processes that train together; process 1 differs in one thing. Run by
`test_one_differs.py`.

Usage: differ_worker.py PROCESS COUNT PORT RUNTIME KIND, with a kind of `differ_cases` as JSON. Each
step is said as a line, and before process 1 differs, `FAULT`.
"""

import contextlib
import faulthandler
import json
import os
import sys

if __name__ == "__main__":
    process, count, port = map(int, sys.argv[1:4])
    runtime, kind = sys.argv[4], json.loads(sys.argv[5])
    faulthandler.dump_traceback_later(280, exit=True)
    flags = "--xla_force_host_platform_device_count=1"
    if process == 1 and kind == "other options of XLA":
        flags += " --xla_cpu_enable_fast_math=true"
    if process == 1 and kind == "other number of devices asked for":
        flags = "--xla_force_host_platform_device_count=3 " + flags
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from runtime.differ_cases import NUM_STEPS, STEP

import aliquot as aq
from aliquot.core import InputError
from aliquot.runtime import initialize, shutdown

WIDTH, BATCH = 16, 16
TWO_STEPS = ("another step in between", "other order of steps")
SETTINGS = {
    "other generator of random numbers": ("jax_default_prng_impl", "rbg"),
    "other random bits": ("jax_threefry_partitionable", False),
    "64 bits": ("jax_enable_x64", True),
    "other precision of products": ("jax_default_matmul_precision", "bfloat16"),
    "other offset of seeds": ("jax_random_seed_offset", 7),
    "other debugging": ("jax_debug_nans", True),
}


def step_with(activation, rate, decay, mask):
    """A step of gradient descent, and one that returns its loss alone."""

    def loss_of(layers, batch):
        x = batch["x"]
        for layer in layers:
            x = x + activation(x @ layer) * mask
        return jnp.mean((x - batch["y"]) ** 2)

    def train_step(layers, batch, rate_of_step):
        loss, gradients = jax.value_and_grad(loss_of)(layers, batch)
        new = [
            w - rate * rate_of_step * (g + decay * w)
            for w, g in zip(layers, gradients, strict=True)
        ]
        return new, {"loss": loss}

    def eval_step(layers, batch, rate_of_step):
        return layers, {"loss": loss_of(layers, batch) * rate_of_step}

    return train_step, eval_step


def main():
    """Train; process 1 differs."""
    mine = process == 1

    def differs(*kinds):
        if mine and kind in kinds:
            print("FAULT", flush=True)
            return True
        return False

    if mine and kind in SETTINGS:
        jax.config.update(*SETTINGS[kind])
    context = contextlib.nullcontext()
    if differs("other precision in a context"):
        context = jax.default_matmul_precision("bfloat16")
    initialize(
        f"127.0.0.1:{port}",
        count,
        process,
        initialization_timeout_s=200,
        cpu_collectives="gloo" if runtime == "program" else None,
    )

    noise = np.full(WIDTH, 2.0 if differs("other array held by init") else 1.0, np.float32)
    mask = np.full(WIDTH, 2.0 if differs("other array held by the step") else 1.0, np.float32)

    def init(key, scale):
        keys = jax.random.split(key, 4)
        if mine and kind == "other init function":
            return [jax.random.uniform(k, (WIDTH, WIDTH)) * scale * noise for k in keys]
        return [jax.random.normal(k, (WIDTH, WIDTH), np.float32) * scale * noise for k in keys]

    train_step, eval_step = step_with(
        jnp.sin if differs("other model") else jnp.tanh,
        0.2 if differs("other learning rate") else 0.1,
        0.02 if differs("other weight decay") else 0.01,
        mask,
    )
    rows = BATCH * (2 if differs("batches of another shape") else 1)
    other_plan = differs("other plan")
    method = aq.PipeshardParallel(
        num_stages=2, num_micro_batches=4 if other_plan else 2, schedule="1f1b"
    )
    options = {}
    if runtime == "program":
        method, options = aq.DataParallel(), {"num_micro_batches": 2 if other_plan else 1}
    cluster = aq.Cluster.preset("2xcpu")
    make = jax.ShapeDtypeStruct
    state = [make((WIDTH, WIDTH), np.float32)] * 4
    batch = {name: make((rows, WIDTH), np.float32) for name in "xy"}
    rate = make((), np.float32)
    steps = [
        aq.parallelize(f, aq.plan(f, state, batch, rate, cluster=cluster, method=method, **options))
        for f in ([train_step, eval_step] if kind in TWO_STEPS else [train_step])
    ]

    def restored(seed=0):
        random = np.random.default_rng(seed)
        return [random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for _ in range(4)]

    def everywhere(leaf, sharding):
        return jax.make_array_from_callback(leaf.shape, sharding, lambda place: leaf[place])

    with context:
        if kind in SETTINGS or kind in ("other init function", "other options of XLA"):
            print("FAULT", flush=True)
        if kind in ("other restored arrays", "another state on the devices"):
            state = restored(int(differs(kind)))
            if kind == "another state on the devices":
                shardings = steps[0].shardings
                state = [everywhere(x, shardings[f"layers[{k}]"]) for k, x in enumerate(state)]
        elif differs("no init"):
            state = restored()
        else:
            state = steps[0].init(
                init,
                jax.random.key(int(differs("other key"))),
                0.5 if differs("other number for init") else 0.25,
            )
        train(steps, state, rows, differs, restored)
    shutdown()
    print("DONE", flush=True)


def train(steps, state, rows, differs, restored):
    """All steps, with what happens in the middle of them."""
    train_step, *rest = steps
    for number in range(NUM_STEPS + (process == 1 and kind == "one step more")):

        def now(*kinds, number=number):
            return number == STEP and differs(*kinds)

        if number == NUM_STEPS:
            differs("one step more")
        if now("stops early"):
            return
        if now("fails alone"):
            raise InputError("a fault")
        shift = int(
            (number == 0 and differs("other batches"))
            or (process == 1 and kind == "other batches")
            or now("another batch once", "a batch left out")
            or (process == 1 and kind == "a batch left out" and number > STEP)
        )
        random = np.random.default_rng(number + shift)
        batch = {name: random.normal(size=(rows, WIDTH)).astype(np.float32) for name in "xy"}
        if now("half a batch once"):
            batch = {name: x[: rows // 2] for name, x in batch.items()}
        if now("a batch of another dtype once"):
            batch["x"] = batch["x"].astype(np.float16)
        if now("NaN in a batch once"):
            batch["y"][0, 1] = np.nan
        if now("another permutation of rows once"):
            batch = {name: x[::-1] for name, x in batch.items()}
        if process == 1 and kind == "batches in another order of memory":
            batch = {name: np.asfortranarray(x) for name, x in batch.items()}
        if process == 1 and kind == "batches in 64 bits":
            batch = {name: x.astype(np.float64) for name, x in batch.items()}
        if process == 1 and kind == "batches on a device":
            batch = {name: jnp.asarray(x) for name, x in batch.items()}
        if now("restored alone"):
            state = restored(7)
        if now("one array restored alone"):
            state = [state[0], restored(7)[1], *state[2:]]
        rate = np.float32(0.5 if now("another scalar once") else 1.0)
        steps_now = [train_step]
        if kind == "other order of steps" and number == STEP:
            steps_now = [train_step, *rest][:: -1 if differs(kind) else 1]
        if now("another step in between"):
            steps_now = [*rest, train_step]
        for step in steps_now:
            state, metrics = step(state, batch, rate)
        print(f"step {number}: loss {float(metrics['loss']):.9f}", flush=True)


if __name__ == "__main__":
    main()
