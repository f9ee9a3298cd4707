"""Stacks of new parameters that are gathered row by row, as for GPUs: the same numbers, and never
two of them at once.
"""

import dataclasses
import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import pytest
from runtime import pipelines
from runtime.equality import LEAF, LOSS, Case, compare

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import target_for
from aliquot.cost import Problem
from aliquot.graph import capture
from aliquot.sharding import _reshard

SIZES = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_heads": 2,
    "ffn_size": 24,
    "vocab_size": 40,
    "seq_len": 6,
}


@pytest.fixture
def by_rows(monkeypatch):
    """CPU devices gather rows, however small they are."""

    def target(problem):
        return dataclasses.replace(target_for(problem.cluster.device), gathers_leading_dim=True)

    monkeypatch.setattr(Problem, "target", property(target))
    monkeypatch.setattr(_reshard, "_LEAST_ROW_BYTES", 1)


@pytest.mark.parametrize(
    ("model", "mesh", "micro_batches"),
    [
        ("gpt", "8", 4),
        ("llama", "4x2", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gpt", "8", 1),
                ("gpt", "4x2", 1),
                ("llama", "8", 1),
                ("llama", "8", 4),
            )
        ),
    ],
)
def test_the_same_numbers(model, mesh, micro_batches, by_rows):
    case = Case(
        method="zero2",
        mesh=mesh,
        model=model,
        form="scan",
        micro_batches=micro_batches,
        dtype="float64",
    )
    found = compare(case)
    assert found.loss <= LOSS["float64"] and found.leaf <= LEAF["float64"], found


def workload(batch=32):
    return zoo.build(zoo.configure("gpt-125m", **SIZES), batch, dtype="float32", scan=True)


def gathered(step, work):
    """Shapes of what gathers leave."""
    text = step.prepare(work.state, work.batch).as_text()
    found = re.findall(r"f32\[([\d,]+)\][^ ]* all-gather\(", text)
    return {tuple(map(int, shape.split(","))) for shape in found}


def test_rows_are_gathered_and_not_the_stack(request):
    work = workload()
    plan = aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=aq.Cluster.preset("8xcpu"),
        method=aq.Zero2Parallel(),
    )
    whole = gathered(aq.parallelize(work.train_step, plan), work)
    request.getfixturevalue("by_rows")
    rows = gathered(aq.parallelize(work.train_step, plan), work)
    assert (4, 16, 24) in whole and (4, 16, 24) not in rows
    assert (16, 24) in rows and (16, 24) not in whole


def test_a_program_for_verification_is_lowered_once(by_rows, monkeypatch, tmp_path):
    """Its constraints of order are calls that promise later releases nothing, known beforehand."""
    work, written = workload(), []
    export = jax.export.export
    monkeypatch.setattr(
        jax.export, "export", lambda *args, **kwargs: written.append(1) or export(*args, **kwargs)
    )
    plan = aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=aq.Cluster.preset("8xcpu"),
        method=aq.Zero2Parallel(),
    )
    assert aq.verify(plan, work.train_step, work.state, work.batch, cache=tmp_path).fits
    assert len(written) == 1


def test_stages_of_a_pipeline(monkeypatch, x64):
    """Each gathers the rows of its own parameters, behind the last micro-batch."""

    def train_step(state, batch):
        def loss(params):
            x = batch["x"]
            for layer in params["layers"]:
                x = x + jnp.tanh(x @ layer["w"][0]) @ layer["w"][1]
            return jnp.mean(x**2)

        value, gradients = jax.value_and_grad(loss)(state["params"])
        return {"params": jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], gradients)}, {
            "loss": value
        }

    keys = jax.random.split(jax.random.key(0), 5)
    state = {"params": {"layers": [{"w": jax.random.normal(k, (2, 4, 4))} for k in keys[:4]]}}
    batch = {"x": jax.random.normal(keys[4], (8, 4))}
    graph = capture(train_step, state, batch)
    rows = {
        graph.outputs[i.output].value: (i.value, (2,), (-1,))
        for i in graph.inputs
        if i.output is not None
    }
    assert len(rows) == 4
    monkeypatch.setattr(pipelines, "Pins", functools.partial(pipelines.Pins, rows=rows))
    step = pipelines.pipeline(train_step, state, batch, sizes=(2, 2))
    assert pipelines.check_steps(train_step, step, state, [batch] * 3).largest < 1e-12
    texts = [
        program.compiled.as_text()
        for program in step.runner.compiled().stages
        if program is not None
    ]
    # Each layer's in the program of its stage.
    found = [re.findall(r"f64\[([\d,]+)\][^ ]* all-gather\(", text) for text in texts]
    assert sum(found, []) == ["4,4"] * 4 and sum(map(bool, found)) == 2
