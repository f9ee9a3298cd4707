"""Steps with primitives that have no rule are planned, split as was inferred, and compute the plain
step's numbers.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime.planned import parallel
from unknown_primitives import train_step

import aliquot as aq
from aliquot.report import as_text, explained, explanation


def arguments():
    random = np.random.default_rng(0)
    sizes = {"up": (8, 64), "scale": (64,), "down": (64, 8)}
    params = {
        name: jnp.asarray(random.normal(size=size) / 4, jnp.float32) for name, size in sizes.items()
    }
    return params, {name: jnp.asarray(random.normal(size=(64, 8)), jnp.float32) for name in "xy"}


WARNING = "`row_norm_test` a.,.->a., `soft_cap_test` ab->ab, `soft_cap_gradient_test` ab,ab->ab"


def planned(method, num_micro_batches=1):
    """A plan for eight CPU devices, which comes with a warning."""
    cluster = aq.Cluster.preset("8xcpu")
    with pytest.warns(UserWarning, match=re.escape(WARNING)) as warned:
        plan = aq.plan(
            train_step,
            *arguments(),
            cluster=cluster,
            method=method,
            num_micro_batches=num_micro_batches,
        )
    assert len(warned) == 1
    return plan


METHODS = {
    "dp": aq.DataParallel(),
    "zero3": aq.Zero3Parallel(),
    "shard": aq.ShardParallel(),
    "auto": aq.Auto(),
    "columns": aq.ManualParallel(specs={"*up": (None, "x"), "*down": ("x", None)}, mesh_shape=(8,)),
}


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_with_unknown_primitives(method, num_micro_batches):
    plan = planned(METHODS[method], num_micro_batches)
    step = aq.parallelize(train_step, plan)
    got, want = step(*arguments()), jax.jit(train_step)(*arguments())
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


def test_a_pipeline_with_unknown_primitives():
    plan = planned(aq.PipeshardParallel(num_stages=2, num_micro_batches=2, layers=2))
    assert len(plan.stages) == 2
    got, want = aq.parallelize(train_step, plan)(*arguments()), jax.jit(train_step)(*arguments())
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


def test_each_device_runs_its_piece():
    step = parallel(train_step, *arguments(), method=aq.DataParallel())
    text = step.lower().compile().as_text()
    assert "all-reduce" in text and "all-gather" not in text


def test_plans_and_explanations_name_inferred_rules():
    plan = planned(aq.DataParallel())
    assert aq.Plan.from_json(plan.to_json()) == plan
    rules = {rule["primitive"]: rule["rule"] for rule in explained(plan)["inferred_rules"]}
    assert rules["row_norm_test"] == "a.,.->a." and rules["soft_cap_test"] == "ab->ab"
    text = as_text(explanation(plan))
    assert re.search(r"soft_cap_test +1 +ab->ab +dims 0, 1 of its result", text)
    assert "row_norm_test" not in str(
        aq.plan(lambda x: 2 * x, np.ones(8), cluster=aq.Cluster.preset("8xcpu"))
    )
