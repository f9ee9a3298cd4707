"""A step has the same methods whatever its plan: one program, or a pipeline of written-out or
scanned layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot as aq
from aliquot.core import InputError

LAYERS, WIDTH, ROWS = 4, 16, 8
METHODS = {
    "one program": aq.Zero2Parallel(),
    "pipeline": aq.PipeshardParallel(num_stages=2, num_micro_batches=2, schedule="1f1b"),
    "zero-bubble": aq.PipeshardParallel(num_stages=2, num_micro_batches=2, schedule="zero-bubble"),
}


def init(key):
    return {"layers": 0.1 * jax.random.normal(key, (LAYERS, WIDTH, WIDTH)), "count": jnp.int32(0)}


def train_step(state, batch):
    def loss(layers):
        y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) + x, None), batch, layers)
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(state["layers"])
    return {"layers": state["layers"] - 0.1 * grads, "count": state["count"] + 1}, value


@pytest.fixture(scope="module", params=METHODS)
def step(request):
    return aq.parallelize(
        train_step, method=METHODS[request.param], cluster=aq.Cluster.preset("4xcpu")
    )


@pytest.fixture(scope="module")
def arguments():
    return init(jax.random.key(0)), np.ones((ROWS, WIDTH), np.float32)


def test_all_methods(step, arguments):
    assert step.check(*arguments).largest < 1e-5
    placed = step.place(*arguments)
    again, loss = step(*placed)
    expected, wanted = train_step(*arguments)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    np.testing.assert_allclose(
        np.asarray(again["layers"]), expected["layers"], rtol=1e-4, atol=1e-6
    )
    assert int(again["count"]) == 1

    state = step.init(init, jax.random.key(0))
    np.testing.assert_allclose(np.asarray(state["layers"]), arguments[0]["layers"], rtol=1e-6)
    stats, trace = step.stats(), step.trace(*arguments)
    assert len(stats.stages) == len(step.meshes) == len(step.plan.stages)
    assert stats.peak_bytes > 0 and stats.compile_s > 0 and "compiled in" in str(stats)
    assert trace.step_time_s > 0 and trace.source == "measured"
    assert "HloModule" in step.as_text() and step.lower()
    assert set(step.shardings)


def test_compiled_figures_need_a_traced_step(arguments):
    fresh = aq.parallelize(train_step, method=aq.DataParallel(), cluster=aq.Cluster.preset("4xcpu"))
    for method in (fresh.stats, fresh.as_text, fresh.lower):
        with pytest.raises(InputError, match="needs the traced step"):
            method()
    assert fresh.prepare(*arguments).stats().memory.peak_bytes > 0


def test_placed_batches_are_not_moved_again(step, arguments):
    state, batch = step.place(*arguments)
    _, again = step.place(state, batch)
    assert again is batch or again.sharding == batch.sharding
