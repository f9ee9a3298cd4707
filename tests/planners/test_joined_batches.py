"""Plans for steps that join, cut, repeat, roll or regroup their batch replicate little work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from runtime.joined_batches import LOSSES, real_size

import aliquot as aq
from aliquot.cluster import Cluster
from aliquot.core import InputError
from aliquot.cost import make_problem, work_alike
from aliquot.cost._alike import UPDATE
from aliquot.graph import capture


def replicated(name, method, cluster):
    """Share of the computing that every device does alike; the update of whole state apart."""
    problem = make_problem(capture(*real_size(name)), Cluster.preset(cluster))
    (stage,) = method.solve(problem).stages
    work = work_alike(stage.picked)
    return sum(s for why, s in work.alike_s.items() if why != UPDATE) / work.total_s


@pytest.mark.parametrize("name", list(LOSSES))
def test_data_parallelism_replicates_little(name):
    assert replicated(name, aq.DataParallel(), "8xH100") < 0.02


_METHODS = (aq.Zero2Parallel(), aq.Zero3Parallel(), aq.ShardParallel())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"), [(name, _METHODS[k % 3]) for k, name in enumerate(LOSSES)]
)
def test_other_methods_replicate_little(name, method):
    assert replicated(name, method, "8xH100") < 0.02


def regroups(rows, group, width):
    """A step that scores groups of rows by the first `width` numbers of each row."""

    def step(state, batch):
        def loss(w):
            score = batch["x"][:, :width].reshape(-1, group, width)
            gain = (score - score.mean(1, keepdims=True)).reshape(-1, width)
            return (jnp.tanh(batch["x"] @ w) * jnp.tanh(gain).mean(1, keepdims=True)).mean()

        found, slope = jax.value_and_grad(loss)(state)
        return state - slope, found

    return step, jnp.zeros((128, 128)), {"x": jnp.zeros((rows, 128))}


def test_small_arrays_with_fewer_rows_stay_whole_and_are_named():
    plan = aq.plan(*regroups(16, 4, 1), cluster=Cluster.preset("8xH100"), method=aq.DataParallel())
    (note,) = [n for n in plan.notes if "small" in n]
    assert "reshape" in note and "makes 4 rows of the batch" in note


def test_large_arrays_with_fewer_rows_are_the_reason_of_a_refusal():
    with pytest.raises(InputError) as error:
        aq.plan(*regroups(16, 4, 128), cluster=Cluster.preset("8xH100"), method=aq.DataParallel())
    text = str(error.value)
    assert "A batch of 16" in text and "`reshape`" in text and "makes 4 rows" in text
    assert "Use 4 devices" in text and "such as 16" not in text
    four = Cluster.preset("4xH100")
    assert aq.plan(*regroups(16, 4, 128), cluster=four, method=aq.DataParallel())
