"""Steps as people write them, unmodified, on 8 devices: the same numbers as on one."""

from __future__ import annotations

import pytest
from graph.steps import STEPS

import aliquot as aq


@pytest.mark.parametrize("name", list(STEPS))
def test_every_step_runs_unmodified_on_eight_devices(name):
    step = STEPS[name]()
    plan = aq.plan(
        step.fn, *step.args, cluster=aq.Cluster.detect(), method=aq.ShardParallel(), **step.kwargs
    )
    check = aq.parallelize(step.fn, plan).check(*step.args, **step.kwargs)
    off = {leaf.path: leaf.relative for leaf in check.leaves if leaf.relative > 5e-5}
    assert not off, off
