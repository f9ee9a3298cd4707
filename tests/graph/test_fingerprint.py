"""Fingerprints: equal where the step is equal, in every process, and different where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph.step_base import batch, mlp_params, mse, sgd
from graph.steps import STEPS, shapes
from jax.ad_checkpoint import checkpoint_name

from aliquot.graph import (
    capture,
    equation_line,
    graph_fingerprint,
    interface_fingerprint,
    operator_lines,
    traced_lines,
)

NAMES = ["convolution", "nnx_in_place", "scan_layers_remat", "while_and_cond"]
PROGRAM = """
from graph.steps import STEPS, shapes
from jax.ad_checkpoint import checkpoint_name
from aliquot.graph import capture, graph_fingerprint, interface_fingerprint
for name in {names!r}:
    step = STEPS[name]()
    graph = capture(step.fn, *shapes(step.args), **step.kwargs)
    print(interface_fingerprint(graph), graph_fingerprint(graph))
from graph.test_fingerprint import lines_of_init, of_a_policy_of_names
print(*lines_of_init(), of_a_policy_of_names(), sep="\\n")
"""


def prints(fn, *args):
    graph = capture(fn, *args)
    return interface_fingerprint(graph), graph_fingerprint(graph)


def of_a_policy_of_names():
    """A remat policy holds the names that are saved as a set of strings."""
    names = (f"name {k}" for k in range(8))

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*names))
    def layer(x):
        return jnp.sin(checkpoint_name(jnp.sin(x), "name 0"))

    return graph_fingerprint(capture(jax.grad(lambda x: layer(x).sum()), jnp.ones(4)))


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
    assert there == "".join(here) + "\n".join([*lines_of_init(), of_a_policy_of_names()]) + "\n"


def init(key, scale=0.5, held=1.0):
    """Makes a state by whatever tracing nests: calls, a loop, a branch, random bits."""
    keys = jax.random.split(key, 3)
    stacked = jax.lax.map(lambda k: jax.random.normal(k, (4,)) * scale, keys)
    first = jax.lax.cond(stacked[0, 0] > 0, jnp.sin, jax.nn.relu, stacked[0])
    return {"w": stacked, "b": first + np.full(4, held, np.float32)}


def lines_of_init(**options):
    lines, constants = traced_lines(jax.make_jaxpr(partial(init, **options))(jax.random.key(0)))
    return [line for line, _ in lines] + [str(constant) for constant in constants]


def test_lines_of_a_traced_function_tell_what_differs():
    plain = lines_of_init()
    (line,) = {*lines_of_init(scale=0.25)} - {*plain}
    assert line.startswith("mul ") and "0.25:" in line
    assert [*{*lines_of_init(held=2.0)} - {*plain}] == ["[2. 2. 2. 2.]"]
    lines, _ = traced_lines(jax.make_jaxpr(init)(jax.random.key(0)))
    where = [equation_line(eqn) for line, eqn in lines if line.startswith("mul ")]
    assert any("test_fingerprint.py" in text for text in where) and equation_line(None) == ""


def test_lines_of_operators_tell_what_differs():
    args = mlp_params(), batch()
    here, there = [operator_lines(capture(make(rate), *args)) for rate in (0.1, 0.2)]
    assert len(here) == len(there)
    odd = [(a, b) for a, b in zip(here, there, strict=True) if a != b]
    assert odd and all("0.1:float32" in a and "0.2:float32" in b for a, b in odd)


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
