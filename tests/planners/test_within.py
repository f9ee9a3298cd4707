"""Restrictions of a search for pipelines: what is found keeps to them, and is never better than
what a free search finds.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from planners.test_pipeshard import BATCH, STATE, WIDE, train_step

import aliquot as aq
from aliquot.core import InfeasibleError, InputError
from aliquot.planners import method_by_name


@functools.cache
def found(within=None, cluster="8xV100-16GB", state="wide"):
    return aq.plan(
        train_step,
        {"wide": WIDE, "small": STATE}[state],
        BATCH,
        cluster=aq.Cluster.preset(cluster),
        method=aq.PipeshardParallel(within=within),
    )


def submeshes(plan):
    hosts = {}
    for stage in plan.stages:
        devices = int(np.prod(stage.mesh_shape))
        hosts.setdefault(devices, None)
    return [*hosts]


@pytest.mark.parametrize(
    "within",
    [
        aq.Within(submeshes=((1, 2),)),
        aq.Within(submeshes=((1, 4),), meshes="data"),
        pytest.param(aq.Within(without=("all-to-all",)), marks=pytest.mark.slow),
        aq.Within(without=("all-to-all", "all-gather")),
        aq.Within(replicated_parameters=False, batch_on_first_axis=True),
    ],
    ids=str,
)
def test_what_is_found_keeps_to_the_restriction_and_is_no_better_than_the_best(within):
    free, plan = found(), found(within)
    assert plan.prediction.step_time_s >= free.prediction.step_time_s * (1 - 1e-9)
    assert plan.prediction.step_time_s >= free.provenance.lower_bound_s
    assert str(within) in plan.provenance.bound_holds_for
    if not isinstance(within.submeshes, str):
        assert submeshes(plan) == [within.submeshes[0][1]]
    kinds = {collective.kind for collective in plan.prediction.collectives}
    assert not kinds & {*within.without}
    if not within.replicated_parameters:
        for stage in plan.stages:
            for path, dims in stage.shardings.items():
                if path.startswith("state.params") and np.prod(stage.mesh_shape) > 1:
                    assert any(dims), path


@pytest.mark.parametrize(
    "within", [aq.Within(submeshes="powers-of-two"), aq.Within(imbalance=0.1)], ids=str
)
def test_one_program_is_a_stage_of_all_devices(within):
    assert not found().is_pipeline
    assert found(within).prediction.step_time_s == found().prediction.step_time_s
    assert not found(within).is_pipeline


@pytest.mark.parametrize(
    "within",
    [
        pytest.param(aq.Within(replicated_parameters=False), marks=pytest.mark.slow),
        aq.Within(imbalance=0.2),
    ],
    ids=str,
)
def test_a_free_search_tries_one_micro_batch_where_a_restricted_one_does(within, monkeypatch):
    """Also for steps that are not small, whose program takes less than twice its compute."""
    monkeypatch.setattr("aliquot.planners._pipelines._SMALL", 0)
    free = found.__wrapped__(None, "4xV100-16GB", "small")
    plan = found.__wrapped__(within, "4xV100-16GB", "small")
    assert plan.num_micro_batches == 1 and len(plan.stages) > 1
    assert free.prediction.step_time_s <= plan.prediction.step_time_s * (1 + 1e-9)


def test_forbidden_collectives_are_taken_without_the_restriction():
    kinds = {collective.kind for collective in found().prediction.collectives}
    assert "all-to-all" in kinds or "all-gather" in kinds


@pytest.mark.parametrize("imbalance", [0.2, pytest.param(0.5, marks=pytest.mark.slow)])
def test_stages_are_as_balanced_as_is_asked_for(imbalance):
    within = aq.Within(submeshes=((1, 1), (1, 2)), imbalance=imbalance)
    plan = found(within, "4xV100-16GB", "small")
    assert len(plan.stages) > 1
    whole = sum(_compute(stage) for stage in plan.stages)
    for stage in plan.stages:
        share = _compute(stage) / whole
        fair = np.prod(stage.mesh_shape) / 4
        # Layers as wholes take a little more or less than their operators alone.
        assert 0.9 * fair / (1 + imbalance) <= share <= 1.1 * fair * (1 + imbalance)
    with pytest.raises(InputError, match=r"imbalance=0.5: Bottleneck does not search among"):
        aq.PipeshardParallel(inter=aq.Bottleneck(), within=aq.Within(imbalance=0.5))


def _compute(stage):
    """Seconds of a stage times its devices: its share of the compute."""
    return (stage.prediction.forward_s + stage.prediction.backward_s) * float(
        np.prod(stage.mesh_shape)
    )


def test_meshes_and_submeshes_that_are_allowed():
    few = aq.Within(submeshes="small-powers-of-two")
    assert few.allows((4, 8), (8, 4)) and not few.allows((8, 8), (8, 8))
    assert not few.allows((1, 6), (6, 1)) and not few.allows((3, 8), (24, 1))
    assert aq.Within(submeshes="powers-of-two").allows((8, 8), (8, 8))
    assert aq.Within(meshes="data").allows((1, 4), (4, 1))
    assert not aq.Within(meshes="data").allows((1, 4), (2, 2))
    assert aq.Within(meshes="same").allows((2, 8), (2, 8))
    assert not aq.Within(meshes=((2, 2),)).allows((1, 4), (4, 1))
    assert aq.Within().allows((3, 5), (15, 1)) and not aq.Within().parts


def test_a_restriction_that_leaves_nothing_is_named():
    within = aq.Within(submeshes=((2, 8),), without=("all-gather",))
    with pytest.raises(InfeasibleError) as refused:
        found(within)
    assert "No pipeline is left within submeshes of 2x8, without all-gather." in str(refused.value)
    assert "Without `submeshes of 2x8` there is one." in str(refused.value)
    assert "`without all-gather`" not in str(refused.value)


def test_restrictions_are_read_as_they_are_typed():
    typed = (
        "submeshes=1x4,1x8 meshes=data imbalance=0.5 without=all-to-all,all-gather"
        " no-replicated-parameters batch-on-first-axis"
    )
    assert aq.Within.read(typed.split()) == aq.Within(
        submeshes=((1, 4), (1, 8)),
        meshes="data",
        imbalance=0.5,
        without=("all-to-all", "all-gather"),
        replicated_parameters=False,
        batch_on_first_axis=True,
    )
    with pytest.raises(InputError, match=r"--within imbalance=x, no-all-to-all: restrictions are"):
        aq.Within.read(["imbalance=x", "no-all-to-all", "meshes=2x4"])
    with pytest.raises(InputError) as refused:
        aq.Within(submeshes="powers", meshes=((0, 1),), imbalance=-1, without=("gather",))
    for part in ("powers-of-two", "meshes=((0, 1),)", "imbalance=-1", "'gather'"):
        assert part in str(refused.value)


def test_only_pipelines_can_be_restricted():
    from aliquot.planners import PipelineOptions

    options = PipelineOptions(within=aq.Within(meshes="data"))
    assert method_by_name("pipeshard", None, options).within == aq.Within(meshes="data")
    with pytest.raises(InputError, match=r"--within: only for pipelines, and zero3 makes none"):
        method_by_name("zero3", None, options)
