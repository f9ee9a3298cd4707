"""Python looks for garbage seldom while a plan is made, and as before afterwards."""

import gc

import pytest

from aliquot.core import collecting_seldom


@pytest.fixture(autouse=True)
def _as_before():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_thresholds_are_raised_inside_a_block_and_restored_behind_it():
    gc.set_threshold(700, 10, 10)
    with pytest.raises(KeyError), collecting_seldom():
        assert gc.get_threshold()[0] >= 100_000
        raise KeyError
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (5_000_000, 10, 10)])
def test_settings_that_collect_less_often_stay(own):
    gc.set_threshold(*own)
    with collecting_seldom():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_overlapping_blocks_restore_the_first_settings():
    gc.set_threshold(700, 10, 10)
    first, second = collecting_seldom(), collecting_seldom()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


def test_planning_collects_garbage_less_often():
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
