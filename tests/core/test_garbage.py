"""Python looks for garbage seldom while a plan is made, and as before afterwards."""

import gc

import pytest

from aliquot.core import collecting_seldom


@pytest.fixture(autouse=True)
def _as_before():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_seldom_inside_and_as_before_outside():
    gc.set_threshold(700, 10, 10)
    with pytest.raises(KeyError), collecting_seldom():
        assert gc.get_threshold()[0] >= 100_000
        raise KeyError
    assert gc.get_threshold() == (700, 10, 10)


def test_what_a_user_has_stopped_stays_stopped():
    gc.set_threshold(0, 10, 10)
    with collecting_seldom():
        assert gc.get_threshold()[0] == 0


def test_planning_looks_seldom():
    import jax
    import jax.numpy as jnp

    import aliquot as aq

    gc.set_threshold(700, 10, 10)
    during = []

    def train_step(w, x):
        during.append(gc.get_threshold()[0])
        return w - jnp.mean(x) * w

    shapes = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((16, 8), "float32")
    aq.plan(train_step, *shapes, cluster=aq.Cluster.preset("8xH100"), method=aq.DataParallel())
    assert during and min(during) > 700
    assert gc.get_threshold() == (700, 10, 10)
