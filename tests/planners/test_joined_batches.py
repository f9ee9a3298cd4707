"""Plans for steps that join, cut, repeat, roll or regroup their batch replicate little work."""

from __future__ import annotations

import functools

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
from aliquot.planners import Task

_LARGEST = 0.02
REPORT = {
    "name": "joined_batches",
    "question": "Work that is replicated where a step joins or regroups its batch",
    "bar": f"at most {_LARGEST:.0%} of the predicted computing in every plan; no refusal",
    "method": (
        "Plans from shapes alone, one micro-batch; on 64 devices the batch is eight times as large."
        " Replicated is computing that no axis of the mesh divides, by predicted seconds; the"
        " update of state that a method keeps whole is left out. Deterministic: one run each."
    ),
    "largest": ["replicated"],
}
_METHODS = {
    "dp": aq.DataParallel(),
    "zero2": aq.Zero2Parallel(),
    "zero3": aq.Zero3Parallel(),
    "shard": aq.ShardParallel(),
    "pipeline": aq.PipeshardParallel(num_stages=2),
}
_CLUSTERS = {"8xH100": 1, "8x8xH100": 8}


def decided(name, method, cluster):
    """How one step is run."""
    graph, devices = captured(name, _CLUSTERS[cluster]), Cluster.preset(cluster)
    if method == "pipeline":
        task = Task(graph=graph, cluster=devices, num_micro_batches=1)
        return _METHODS[method].decide(task)
    return _METHODS[method].solve(make_problem(graph, devices))


@functools.lru_cache(maxsize=2)
def captured(name, times):
    """The graph of a step at real size, with so many times the rows."""
    return capture(*real_size(name, times=times))


def replicated(decision):
    """Share of the computing that every device does alike; the update of whole state apart."""
    works = [work_alike(stage.picked) for stage in decision.stages]
    alike = sum(s for work in works for why, s in work.alike_s.items() if why != UPDATE)
    return alike / sum(work.total_s for work in works)


@pytest.mark.parametrize("name", list(LOSSES))
def test_data_parallelism_replicates_little(name):
    assert replicated(decided(name, "dp", "8xH100")) < _LARGEST


# As many groups as tokens in a sequence, and a stage with more devices than a host.
@pytest.mark.parametrize("case", [("token_groups", "dp"), ("views", "pipeline")], ids=" ".join)
def test_little_is_replicated_across_hosts(case):
    assert replicated(decided(*case, "8x8xH100")) < _LARGEST


@pytest.mark.slow
@pytest.mark.parametrize("cluster", _CLUSTERS)
@pytest.mark.parametrize("method", _METHODS)
@pytest.mark.parametrize("name", LOSSES)
def test_all_methods_replicate_little(name, method, cluster, row):
    case = {"step": name, "method": method, "cluster": cluster}
    try:
        decision = decided(name, method, cluster)
    except aq.AliquotError as error:
        row("Plans", **case, refused=str(error).split("\n")[0])
        raise
    share, step_ms = replicated(decision), 1e3 * decision.step_time_s
    row("Plans", **case, replicated=round(share, 4), step_ms=round(step_ms, 2), refused="")
    assert share < _LARGEST


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
