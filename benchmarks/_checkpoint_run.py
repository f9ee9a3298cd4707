"""A training run that saves after every step and resumes by itself, for `checkpoints.py`, which
kills it.

Usage: _checkpoint_run.py PROCESS COUNT PORT FOLDER CASE, with the case as JSON. Prints one JSON
    object for each thing that happens.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

from _results import use_eight_devices

from aliquot.core import with_xla_flags

if __name__ == "__main__":
    process, count, port = map(int, sys.argv[1:4])
    folder, case = sys.argv[4], json.loads(sys.argv[5])
    faulthandler.dump_traceback_later(400, exit=True)
    use_eight_devices(fast_code=False)
    devices = {"--xla_force_host_platform_device_count": str(8 // count)}
    os.environ["XLA_FLAGS"] = with_xla_flags(os.environ["XLA_FLAGS"], devices)

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
from runtime import pipeline_worker as written
from runtime.pipelines import pipeline
from runtime.planned import build
from runtime.test_pipeline_scan import in_stages

import aliquot as aq
from aliquot.graph import capture
from aliquot.runtime import Step, initialize, shutdown

ROWS, WIDTH, LAYERS = 8, 8, 6


def scanned_init(key: Any) -> Any:
    """A stack of layers, and momentum of it."""
    first, second = jax.random.split(key)
    params = {
        "layers": jax.random.normal(first, (LAYERS, WIDTH, WIDTH)) / 3,
        "head": jax.random.normal(second, (WIDTH, 2)),
    }
    return {"params": params, "speed": jax.tree.map(jnp.zeros_like, params)}


def scanned_step(state: Any, batch: Any) -> Any:
    """A scan over the layers, with momentum."""

    def loss_of(params: Any) -> Any:
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["layers"])[0]
        return jnp.mean((x @ params["head"] - batch[:, :2]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    speed = jax.tree.map(lambda v, g: 0.9 * v + g, state["speed"], gradients)
    params = jax.tree.map(lambda p, v: p - 0.05 * v, state["params"], speed)
    return {"params": params, "speed": speed}, {"loss": loss}


def scanned_batch(number: int) -> Any:
    """Numbers, the same in every process."""
    return np.random.default_rng(number).normal(size=(ROWS, WIDTH))


def model(name: str) -> tuple[Any, Any, Any]:
    """The first state's maker, the step, and the maker of batches."""
    if name == "scanned":
        return scanned_init, scanned_step, scanned_batch
    return written.init, written.train_step, written.batch_of


def step_of(name: str, plan: dict[str, Any]) -> Step:
    """A model's step under a plan."""
    init, train_step, batch_of = model(name)
    arguments = jax.eval_shape(init, jax.random.key(0)), batch_of(0)
    if "method" in plan:
        return build(capture(train_step, *arguments), getattr(aq, plan["method"])())
    if "bounds" in plan:
        return in_stages(train_step, *arguments, **plan)
    return pipeline(train_step, *arguments, layers=4, **plan)


def say(**found: Any) -> None:
    """For the benchmark to read."""
    print(json.dumps(found), flush=True)


def main() -> None:
    """Train until it is killed, or to the last step."""
    jax.config.update("jax_enable_x64", True)
    # Collectives within a process need not go through the network.
    collectives = "gloo" if "method" in case["plan"] else None
    if count > 1:
        initialize(
            f"127.0.0.1:{port}",
            count,
            process,
            initialization_timeout_s=200,
            cpu_collectives=collectives,
        )
    init, _, batch_of = model(case["model"])
    step = step_of(case["model"], case["plan"])
    with aq.Checkpoints(folder, keep=3) as checkpoints:
        restored = checkpoints.restore(step)
        first = restored.number if restored else 0
        state = restored.state if restored else step.init(init, jax.random.key(0))
        say(first=first, skipped=restored.skipped if restored else ())
        for number in range(first, case["stop"]):
            state, metrics = step(state, batch_of(number))
            say(step=number, loss=float(metrics["loss"]))
            checkpoints.save(step, state, number + 1)
    say(ended=True)
    if count > 1:
        shutdown()


if __name__ == "__main__":
    main()
