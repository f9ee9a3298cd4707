"""One of several processes that run pipelines together. Run by `test_pipeline_processes.py`, not by pytest.

Usage: pipeline_worker.py PROCESS COUNT PORT DEVICES TASK [CASE...]; what it finds is its last line, as JSON.
"""

import faulthandler
import json
import os
import sys
import time

process, count, port, num_devices = map(int, sys.argv[1:5])
task, cases = sys.argv[5], [json.loads(text) for text in sys.argv[6:]]
faulthandler.dump_traceback_later(150, exit=True)
# Programs are compiled for one or two steps each.
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count={num_devices // count} --xla_cpu_multi_thread_eigen=false "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from aliquot.core import PlanMismatchError  # noqa: E402
from aliquot.runtime import initialize, shutdown  # noqa: E402

jax.config.update("jax_enable_x64", True)
if count > 1:
    initialize(f"127.0.0.1:{port}", count, process, initialization_timeout_s=100)

from runtime.pipelines import pipeline  # noqa: E402

from aliquot.runtime._check import compare  # noqa: E402
from aliquot.runtime._watchdog import Peers  # noqa: E402

WIDTH, BATCH, WORDS = 8, 8, 12
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3))


def init(key):
    """A tied embedding, four layers, moments, and a random key."""
    keys = jax.random.split(key, 6)
    layers = [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / 3, "b": jnp.zeros(WIDTH)} for k in keys[:4]]
    params = {"embed": jax.random.normal(keys[4], (WORDS, WIDTH)), "layers": layers}
    return {"params": params, "moments": OPTIMIZER.init(params), "key": keys[5]}


def loss_of(params, noise, batch):
    """Cross entropy, with dropped features."""
    x = params["embed"][batch["x"]] * noise
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    scores = jax.nn.log_softmax(x @ params["embed"].T)
    return -jnp.take_along_axis(scores, batch["y"][:, None], 1).mean()


def train_step(state, batch):
    """AdamW on clipped gradients."""
    key, own = jax.random.split(state["key"])
    noise = jax.random.bernoulli(own, 0.9, (batch["x"].size, WIDTH)).astype(float)
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], noise, batch)
    updates, moments = OPTIMIZER.update(gradients, state["moments"], state["params"])
    new = {"params": optax.apply_updates(state["params"], updates), "moments": moments, "key": key}
    return new, {"loss": loss, "norm": optax.global_norm(gradients)}


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


PLAIN_STEP, PLAIN_INIT = jax.jit(train_step), jax.jit(init)


def equal(case):
    """The worst difference to the plain step of any leaf, losses as read here, and what a check says."""
    key, is_checked = jax.random.key(0), case.pop("check", False)
    shapes = jax.eval_shape(init, key)
    step = pipeline(train_step, shapes, batch_of(0), **case)
    state, plain = step.init(init, key), PLAIN_INIT(key)
    leaves = jax.tree.leaves(state["params"])
    whole = sum(leaf.nbytes for leaf in leaves)
    kept = sum(leaf.nbytes for leaf in leaves if leaf.sharding.addressable_devices)
    losses = []
    for number in range(3):
        state, metrics = step(state, batch_of(number))
        plain, wanted = PLAIN_STEP(plain, batch_of(number))
        losses.append([float(metrics["loss"]), float(wanted["loss"])])
    checked = step.check(state, batch_of(3)).largest if is_checked else 0.0
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(plain)[0]]
    state_gap = compare(paths, jax.tree.leaves(state), jax.tree.leaves(plain))
    stages = [stage.stage for stage in step.stats().stages]
    return {
        "losses": losses,
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


def endless(case):
    """Steps without end, for a test that ends one of the processes."""
    if case.pop("late", False):
        speak = Peers._end
        Peers._end = lambda peers, dead: (time.sleep(2), speak(peers, dead))
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


TASKS = {"equal": equal, "refused": refused, "endless": endless}
say(found=[TASKS[case.pop("task", task)](case) for case in cases])
if count > 1:
    shutdown()
