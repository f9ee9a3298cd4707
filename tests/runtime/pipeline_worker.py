"""One of several processes that run pipelines together. Run by `test_pipeline_processes.py`, which
imports the model.

Usage: pipeline_worker.py PROCESS COUNT PORT DEVICES PLAIN TASK [CASE...]; PLAIN is a file with the
    plain step's losses and
last state, where a task wants it. What a process finds is its last line, as JSON.
"""

import faulthandler
import json
import os
import sys
import time

if __name__ == "__main__":
    process, count, port, num_devices = map(int, sys.argv[1:5])
    truth, task, cases = sys.argv[5], sys.argv[6], [json.loads(text) for text in sys.argv[7:]]
    faulthandler.dump_traceback_later(150, exit=True)
    # The last one counts.
    devices = f"--xla_force_host_platform_device_count={num_devices // count}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from planners.small_steps import mlp
from runtime.pipelines import pipeline

import aliquot as aq
from aliquot.core import PlanMismatchError
from aliquot.plans import Plan
from aliquot.runtime import initialize, shutdown
from aliquot.runtime._check import compare
from aliquot.runtime.transport._transfer import plan_move
from aliquot.runtime.transport._watchdog import Peers

NUM_STEPS = 3
WIDTH, BATCH, WORDS = 8, 8, 12
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3))


def init(key):
    """A tied embedding, four layers, moments, and a random key."""
    keys = jax.random.split(key, 6)
    layers = [
        {"w": jax.random.normal(k, (WIDTH, WIDTH)) / 3, "b": jnp.zeros(WIDTH)} for k in keys[:4]
    ]
    params = {"embed": jax.random.normal(keys[4], (WORDS, WIDTH)), "layers": layers}
    return {"params": params, "moments": OPTIMIZER.init(params), "key": keys[5]}


def loss_of(params, noise, batch, key=None):
    """Cross entropy, with dropped features: at the beginning, and with a key by one number at the
    end.
    """
    x = params["embed"][batch["x"]] * noise
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    if key is not None:
        x = x * jax.random.bernoulli(jax.random.fold_in(key, 1), 0.9, (WIDTH,))
    scores = jax.nn.log_softmax(x @ params["embed"].T)
    return -jnp.take_along_axis(scores, batch["y"][:, None], 1).mean()


def train_step(state, batch):
    """AdamW on clipped gradients."""
    key, own = jax.random.split(state["key"])
    noise = jax.random.bernoulli(own, 0.9, (batch["x"].size, WIDTH)).astype(float)
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], noise, batch, own)
    updates, moments = OPTIMIZER.update(gradients, state["moments"], state["params"])
    new = {"params": optax.apply_updates(state["params"], updates), "moments": moments, "key": key}
    return new, {
        "loss": loss,
        "norm": jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients))),
    }


def evaluate(params, batch):
    """Only forward: the first stage does nothing but send."""
    return {"loss": loss_of(params, jnp.ones(WIDTH), batch)}


def batch_of(number):
    """Token ids, the same in every process."""
    random = np.random.default_rng(number)
    return {name: random.integers(0, WORDS, BATCH) for name in "xy"}


def say(**found):
    """For the test to read."""
    print(json.dumps(found), flush=True)


def equal(case):
    """The worst difference to the plain step of any leaf, losses as read here, and what a check
    says.
    """
    key, is_checked = jax.random.key(0), case.pop("check", False)
    gives_parts = case.pop("parts", False)
    shapes = jax.eval_shape(init, key)
    step = pipeline(train_step, shapes, batch_of(0), **case)
    state = step.init(init, key)
    leaves = jax.tree.leaves(state["params"])
    whole = sum(leaf.nbytes for leaf in leaves)
    kept = sum(leaf.nbytes for leaf in leaves if leaf.sharding.addressable_devices)
    losses = []
    for number in range(NUM_STEPS):
        batch = batch_of(number)
        state, metrics = step(state, step.local_part(batch) if gives_parts else batch)
        losses.append(float(metrics["loss"]))
    checked = step.check(state, batch_of(NUM_STEPS)).largest if is_checked else 0.0
    wanted_losses, *wanted = np.load(truth).values()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    state_gap = compare(paths, jax.tree.leaves(state), wanted)
    stages = [stage.stage for stage in step.stats().stages]
    return {
        "losses": list(zip(losses, wanted_losses.tolist(), strict=True)),
        "check": checked,
        "state": state_gap.largest,
        "stages": stages,
        "kept": kept,
        "all": whole,
    }


def refused(case):
    """What the plan's mismatch with these processes is called."""
    step = pipeline(train_step, jax.eval_shape(init, jax.random.key(0)), batch_of(0), **case)
    try:
        step(init(jax.random.key(0)), batch_of(0))
    except PlanMismatchError as error:
        return {"refused": str(error)}
    return {"refused": ""}


def idle(case):
    """Idle hosts of a plan that is made here, and the refusal of one that leaves a host idle."""
    step = mlp(*case["step"])
    made = aq.plan(*step, cluster=aq.Cluster.preset(case["cluster"]), num_micro_batches=1)
    plans = made, Plan.load(case["plan"])
    try:
        aq.parallelize(step[0], plans[1]).init(lambda: jax.tree.map(jnp.zeros_like, step[1]))
    except PlanMismatchError as error:
        return {"idle_hosts": [plan.idle_hosts for plan in plans], "refused": str(error)}
    return {"refused": ""}


def relayed(case):
    """What two processes add up when a part of it comes to one from the other through a third,
    which is late.

    The other has begun to add and waits, and must send nevertheless.
    """
    of = [[device for device in jax.devices() if device.process_index == k] for k in range(3)]
    own = jax.process_index()
    ends = [NamedSharding(Mesh(np.array(devices[:1]), ("one",)), PartitionSpec()) for devices in of]
    look = jax.ShapeDtypeStruct((1,), np.float32)
    rows = NamedSharding(Mesh(np.array(of[1] + of[2]), ("device",)), PartitionSpec("device"))
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(rows.mesh, PartitionSpec()))
    held = [jax.device_put(np.ones(1, np.float32), device) for device in of[own]]

    def moved(array, source, target):
        move = plan_move([look.update(sharding=ends[source])], [ends[target]])
        held = [jax.device_put(array, ends[source])] if own == source else []
        return [*(move(*held) if move else ()), None][0]

    found = []
    for _ in range(2):
        time.sleep(1 if own == 0 else 0)
        there = moved(held[0], 1, 0)
        back = moved(there, 0, 2)
        if own == 2:
            held = [back.addressable_data(0), *held[1:]]
        if own:
            found.append(total(jax.make_array_from_single_device_arrays((4,), rows, held)))
    return [float(array.addressable_data(0)) for array in found]


def moved(case):
    """How many arrays of many shapes, splits and types came from some devices to others as they
    were.
    """
    devices, random, count = jax.devices(), np.random.default_rng(0), 0
    looks = [
        ((12, 8), "float32"),
        ((8, 12), "bfloat16"),
        ((300, 400), "float64"),
        ((), "bool"),
        ((0, 4), "int8"),
    ]
    hosts = [random.integers(0, 2, shape).astype(jnp.dtype(dtype)) for shape, dtype in looks]
    ends = [
        (devices[:2], devices[2:4]),
        (devices[:4], devices[4:]),
        (devices[:1], devices[2:]),
        (devices[2:], devices[:1]),
        (devices[:3], devices[1:5]),
        (devices[1:5], devices[4:]),
        (devices[::-1], devices[1:2]),
        (devices[2:4], devices[3::-1]),
    ]
    for own, other in ends:
        sides = [Mesh(np.array(side), ("x",)) for side in (own, other)]
        sources, targets, arrays = [], [], []
        for host in hosts:
            specs = [_split(host.shape, len(side), k) for k, side in enumerate((own, other))]
            sharding, target = (NamedSharding(*pair) for pair in zip(sides, specs, strict=True))
            sources.append(jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=sharding))
            targets.append(target)
            if sharding.addressable_devices:
                arrays.append(
                    jax.make_array_from_callback(
                        host.shape, sharding, lambda index, host=host: host[index]
                    )
                )
        move = plan_move(sources, targets)
        for host, array in zip(hosts, move(*arrays) if move else (), strict=False):
            assert array.dtype == host.dtype
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), host[shard.index])
        count += len(hosts)
    return {"moves": count}


def _split(shape, parts, dim):
    """Along a dim, or the other one; whole where neither divides."""
    for d in sorted(range(len(shape)), key=lambda d: d != dim):
        if shape[d] and shape[d] % parts == 0:
            return PartitionSpec(*[None] * d, "x")
    return PartitionSpec()


def endless(case):
    """Steps without end, for a test that ends one of the processes."""
    if case.pop("late", False):
        speak = Peers._end
        Peers._end = lambda peers, *of: (time.sleep(2), speak(peers, *of))
    if case.pop("forward", False):
        params = init(jax.random.key(0))["params"]
        last = 0 if case.get("backwards") else count - 1
        step = pipeline(evaluate, params, batch_of(0), **case)
        for number in range(10**9):
            metrics = step(params, batch_of(number))
            if process == last:
                metrics["loss"].block_until_ready()
            say(step=number)
    step = pipeline(train_step, jax.eval_shape(init, jax.random.key(0)), batch_of(0), **case)
    state = step.init(init, jax.random.key(0))
    for number in range(10**9):
        state, metrics = step(state, batch_of(number))
        say(step=number, loss=float(metrics["loss"]))


def main():
    """All cases, one after the other."""
    jax.config.update("jax_enable_x64", True)
    initialize(f"127.0.0.1:{port}", count, process, initialization_timeout_s=100)
    tasks = {
        "equal": equal,
        "refused": refused,
        "idle": idle,
        "relayed": relayed,
        "moved": moved,
        "endless": endless,
    }
    say(found=[tasks[case.pop("task", task)](case) for case in cases])
    shutdown()


if __name__ == "__main__":
    main()
