"""A measured step of a pipeline has the form of a planned one: every program and transfer, one
after the other.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime.pipelines import pipeline

import aliquot as aq
from aliquot.plans import chrome_trace, make_schedule

WIDTH = 4


def step(state, batch):
    def loss(params):
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    return {"params": [w - 0.1 * g for w, g in zip(state["params"], gradients)]}, {"loss": value}


def arguments():
    random = np.random.default_rng(0)
    state = {"params": [jnp.asarray(random.normal(size=(WIDTH, WIDTH))) for _ in range(4)]}
    return state, {"x": jnp.asarray(random.normal(size=(8, WIDTH)))}


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("zero-bubble", 1), ("interleaved-1f1b", 2)]
)
def test_a_measured_trace(schedule, chunks):
    state, batch = arguments()
    made = pipeline(
        step, state, batch, sizes=(1, 2), micro_batches=4, schedule=schedule, chunks=chunks
    )
    trace = made.trace(state, batch)
    lists = make_schedule(schedule, 2 * chunks, 4, 2).lists
    tasks = {
        (submesh, t.stage, t.micro_batch, str(t.kind))
        for submesh, tasks in enumerate(lists)
        for t in tasks
    }
    done = [
        (e.submesh, e.stage, e.micro_batch, e.kind) for e in trace.events if e.lane == "compute"
    ]
    # The first stage's gradient of its inputs is of no use to anybody, so there is no program for
    # it.
    missing = tasks - set(done)
    assert {(stage, kind) for _, stage, _, kind in missing} <= {(0, "backward-input")}
    assert len(set(done)) == len(done)
    assert {(stage, kind) for _, stage, _, kind in set(done) - tasks} >= {
        (k, "update") for k in range(2 * chunks)
    }
    sends = [e for e in trace.events if e.lane != "compute"]
    assert {(e.stage, e.micro_batch) for e in sends if e.kind == "forward"} == {
        (stage, m) for stage in range(1, 2 * chunks) for m in range(4)
    }
    ordered = sorted(trace.events, key=lambda e: e.start_s)
    assert all(a.end_s <= b.start_s for a, b in zip(ordered, ordered[1:]))
    assert ordered[0].start_s == 0.0 and trace.source == "measured"
    assert trace.submeshes[1].endswith("on devices 1-2")
    assert len([e for e in chrome_trace(trace)["traceEvents"] if e["ph"] == "X"]) == len(
        trace.events
    )


def test_the_step_goes_on_as_before():
    state, batch = arguments()
    made = pipeline(step, state, batch, micro_batches=2)
    made.trace(state, batch)
    assert not any(w.is_deleted() for w in state["params"])
    new, metrics = made(state, batch)
    want, wanted = jax.jit(step)(arguments()[0], batch)
    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-6)
    np.testing.assert_allclose(new["params"][0], want["params"][0], rtol=1e-6)


def test_a_step_of_one_program_is_one_event():
    state, batch = arguments()
    trace = aq.parallelize(step, method=aq.DataParallel()).trace(state, batch)
    (event,) = trace.events
    assert event.kind == "step" and trace.step_time_s == event.end_s > 0
    assert len([e for e in chrome_trace(trace)["traceEvents"] if e["ph"] == "X"]) == 1
    assert not any(w.is_deleted() for w in state["params"])
