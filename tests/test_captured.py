"""A step that was captured to be planned is not captured again to run under that plan."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot as aq
from aliquot.core import AliquotWarning, PlanMismatchError
from aliquot.graph import _capture

BATCH = np.ones((16, 8), np.float32)


def start():
    return {"w": np.eye(8, dtype=np.float32), "step": 0}


def train_step(state, batch):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * grad, "step": state["step"] + 1}, loss


@pytest.fixture
def plan():
    return aq.plan(
        train_step, start(), BATCH, cluster=aq.Cluster.preset("8xcpu"), method=aq.DataParallel()
    )


@pytest.fixture
def captures(plan, monkeypatch):
    """Grows with each capture after the step was planned."""
    seen = []
    plain = _capture._trace_with_numbers
    monkeypatch.setattr(
        _capture, "_trace_with_numbers", lambda *args: (seen.append(args[1]), plain(*args))[1]
    )
    return seen


def test_a_planned_step_is_not_captured_again(plan, captures):
    parallel = aq.parallelize(train_step, plan)
    state, loss = parallel(start(), BATCH)
    aq.parallelize(train_step, plan).prepare(start(), jax.ShapeDtypeStruct((16, 8), jnp.float32))
    aq.estimate(plan, train_step, start(), BATCH)
    assert captures == []
    plain, plain_loss = train_step(jax.tree.map(jnp.asarray, start()), jnp.asarray(BATCH))
    np.testing.assert_allclose(state["w"], plain["w"], rtol=1e-6)
    assert state["step"] == 1 and float(loss) == pytest.approx(float(plain_loss))


def test_another_call_is_captured(plan, captures):
    with pytest.raises(PlanMismatchError, match=r"float32\[32, 8\]"):
        aq.parallelize(train_step, plan)(start(), np.ones((32, 8), np.float32))
    assert captures
    captures.clear()
    with pytest.raises(PlanMismatchError, match="bfloat16"):
        aq.parallelize(train_step, plan)(start(), jnp.asarray(BATCH, jnp.bfloat16))
    assert captures
    captures.clear()
    with pytest.raises(PlanMismatchError, match="more"):
        aq.parallelize(train_step, plan)({**start(), "more": BATCH}, BATCH)
    assert captures


def test_another_function_or_setting_is_captured(plan, captures):
    aq.parallelize(lambda state, batch: train_step(state, batch), plan)(start(), BATCH)
    assert captures
    captures.clear()
    with jax.default_matmul_precision("highest"), pytest.warns(AliquotWarning):
        aq.parallelize(train_step, plan).prepare(start(), BATCH)
    assert captures


def test_a_plan_keeps_no_arrays():
    state = jax.tree.map(jnp.asarray, start())
    held = weakref.ref(state["w"])
    plan = aq.plan(
        train_step, state, BATCH, cluster=aq.Cluster.preset("8xcpu"), method=aq.DataParallel()
    )
    del state
    gc.collect()
    assert held() is None
    assert aq.parallelize(train_step, plan)(start(), BATCH)
