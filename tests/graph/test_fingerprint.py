"""Fingerprints: equal where the step is equal, in every process, and different where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from graph.step_base import batch, mlp_params, mse, sgd
from graph.steps import STEPS, shapes

from aliquot.graph import capture, graph_fingerprint, interface_fingerprint

NAMES = ["convolution", "nnx_in_place", "scan_layers_remat", "while_and_cond"]
PROGRAM = """
from graph.steps import STEPS, shapes
from aliquot.graph import capture, graph_fingerprint, interface_fingerprint
for name in {names!r}:
    step = STEPS[name]()
    graph = capture(step.fn, *shapes(step.args), **step.kwargs)
    print(interface_fingerprint(graph), graph_fingerprint(graph))
"""


def prints(fn, *args):
    graph = capture(fn, *args)
    return interface_fingerprint(graph), graph_fingerprint(graph)


def test_equal_in_every_process():
    tests = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
    # This process hashes strings by a seed of its own.
    there = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(names=NAMES)],
        env=environment | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = []
    for name in NAMES:
        step = STEPS[name]()
        here.append(" ".join(prints(step.fn, *shapes(step.args))) + "\n")
    assert there == "".join(here)


def make(rate=0.1, loss=mse, jitted=False, extra=False):
    def train_step(params, batch):
        params = sgd(params, jax.grad(loss)(params, batch), rate)
        return (params, rate * batch["x"].sum()) if extra else params

    return jax.jit(train_step) if jitted else train_step


def test_the_same_step_again():
    assert prints(make(), mlp_params(), batch()) == prints(make(), mlp_params(), batch())


def test_a_jit_around_the_step_does_not_matter():
    assert prints(make(jitted=True), mlp_params(), batch()) == prints(make(), mlp_params(), batch())


@pytest.mark.parametrize(
    "changed",
    [make(rate=0.2), make(loss=lambda p, b: mse(p, b) + 1.0), make(loss=jax.checkpoint(mse))],
    ids=["literal", "operator", "remat"],
)
def test_another_interior(changed):
    old, new = prints(make(), mlp_params(), batch()), prints(changed, mlp_params(), batch())
    assert old[0] == new[0] and old[1] != new[1]


@pytest.mark.parametrize("field", ["length", "reverse"])
def test_loop_settings_count(field):
    def run(**settings):
        return prints(
            lambda x: jax.lax.scan(lambda c, _: (c + 1, c), x, None, **settings), jnp.ones(3)
        )[1]

    base = {"length": 4, "reverse": False}
    assert run(**base) == run(**base) != run(**base | {field: 5 if field == "length" else True})


def test_another_interface():
    data = batch()
    plain = prints(make(), mlp_params(), data)
    half = {**data, "x": data["x"].astype(jnp.bfloat16)}
    assert prints(make(), mlp_params(), half)[0] != plain[0]
    assert prints(make(extra=True), mlp_params(), data)[0] != plain[0]
    longer = jax.tree.map(lambda x: jnp.concatenate([x, x]), data)
    assert prints(make(), mlp_params(), longer)[0] != plain[0]
