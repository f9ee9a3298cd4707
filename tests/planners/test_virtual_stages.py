"""Layouts that give each submesh several chunks of layers: names, shapes, even where layers are too
few, and what is refused.
"""

import functools

import jax
import numpy as np
import pytest
from msgspec.structs import replace

import aliquot as aq
from aliquot import zoo
from aliquot._variants import Variant, plan_variants
from aliquot.core import InputError
from aliquot.cost import estimate
from aliquot.graph import capture
from aliquot.planners import _solve_stages, apply_plan, method_by_name

SIZES = {
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_size": 24,
    "vocab_size": 40,
    "seq_len": 6,
}
ROWS = 16


@functools.cache
def llama(num_layers=5, scan=True, dtype="bf16", clip_norm=None):
    sizes = {**SIZES, "num_layers": num_layers}
    return zoo.build(
        "llama-7b",
        ROWS,
        overrides=sizes,
        dtype=dtype,
        scan=scan,
        recompute="none",
        clip_norm=clip_norm,
    )


def planned(name, work, cluster="8xcpu", micro_batches=4, limit_bytes=None):
    # Layers do as the step does, so that stages choose what they recompute.
    step = Variant(step=work.train_step, args=(work.state, work.batch), layers="none")
    return plan_variants(
        (step,),
        cluster=aq.Cluster.preset(cluster),
        method=method_by_name(name),
        num_micro_batches=micro_batches,
        memory_limit_bytes=limit_bytes,
    )


def assert_plain_numbers(work, plan, num_devices=4):
    """Two steps under a plan are two plain steps."""
    run = aq.parallelize(work.train_step, plan, devices=jax.devices()[:num_devices])
    state, split_up = work.init(jax.random.key(0)), run.init(work.init, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, ROWS, SIZES["seq_len"]))
    batch = dict(zip(("inputs", "targets"), tokens.astype(np.int32), strict=True))
    step = jax.jit(work.train_step)
    for _ in range(2):
        state, wanted = step(state, batch)
        split_up, found = run(split_up, batch)
        assert float(found["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-9)
    for a, b in zip(jax.tree.leaves(split_up), jax.tree.leaves(state), strict=True):
        assert np.max(np.abs(np.asarray(a) - b)) <= 1e-9 * max(np.max(np.abs(b)), 1e-30)


def test_virtual_stages_have_a_name():
    method = method_by_name("megatron:dp2,tp2,pp2,vpp3")
    assert method == aq.Megatron(data=2, tensor=2, pipeline=2, chunks=3)
    assert method.name == "megatron:dp2,tp2,pp2,vpp3"


@pytest.mark.parametrize(
    ("name", "num_submeshes", "chunks"),
    [
        ("megatron:dp2,tp2,pp2,vpp2", 2, [2, 2]),
        # Five layers in six chunks: the last submesh has one less.
        ("megatron:dp2,tp2,pp2,vpp3", 2, [3, 2]),
        ("megatron:tp2,pp4,vpp2", 4, [2, 1, 1, 1]),
    ],
)
def test_chunks_are_dealt_out_in_turn(name, num_submeshes, chunks):
    plan = planned(name, llama())
    assert (plan.schedule, plan.num_submeshes) == ("interleaved-1f1b", num_submeshes)
    assert [len(plan.stages[k::num_submeshes]) for k in range(num_submeshes)] == chunks
    for k, stage in enumerate(plan.stages):
        assert stage.first_device == plan.stages[k % num_submeshes].first_device
    assert aq.Plan.from_json(plan.to_json()) == plan


def test_only_the_chunk_that_runs_stacks_gradients():
    """What all chunks of a submesh hold, all the time, is as much where layers are written out."""
    scanned, written_out = (
        planned("megatron:dp2,pp2,vpp2", llama(4, scan=scan), "4xH100").stages
        for scan in (True, False)
    )
    for a, b in zip(scanned, written_out, strict=True):
        assert a.prediction.memory_bytes["state"] == b.prediction.memory_bytes["state"]


@pytest.mark.slow
def test_chunks_without_a_layer_compute_what_the_plain_step_does(x64):
    work = llama(scan=False, num_layers=3, dtype="float64")
    plan = planned("megatron:tp2,pp4,vpp2", work, micro_batches=8)
    assert len(plan.stages) % plan.num_submeshes
    assert_plain_numbers(work, plan, num_devices=8)


@pytest.mark.parametrize("clip_norm", [None, pytest.param(0.1, marks=pytest.mark.slow)])
def test_chunks_are_updated_early_where_that_takes_less_time(clip_norm, x64):
    work = llama(4, scan=False, dtype="float64", clip_norm=clip_norm)
    plan = planned("megatron:tp2,pp2,vpp2", work, "4xH100")
    # The norm of all gradients is waited for.
    early = clip_norm is None
    assert [stage.updates_early for stage in plan.stages] == [early] * 3 + [False]
    assert aq.Plan.from_json(plan.to_json()) == plan
    assert_plain_numbers(work, plan)
    graph = capture(work.train_step, work.state, work.batch)
    stages = [replace(stage, updates_early=False) for stage in plan.stages]
    seconds = [
        estimate(apply_plan(each, graph)).step_time_s
        for each in (plan, replace(plan, stages=tuple(stages)))
    ]
    assert seconds[0] == plan.prediction.step_time_s
    assert seconds[0] < seconds[1] if early else seconds[0] == seconds[1]


def test_chunks_recompute_where_memory_calls_for_it(x64):
    work, name = llama(4, scan=False, dtype="float64"), "megatron:dp2,pp2,vpp2"
    limit_bytes = int(0.95 * planned(name, work, "4xcpu").prediction.peak_memory_bytes)
    plan = planned(name, work, "4xcpu", limit_bytes=limit_bytes)
    # On both submeshes the first of two chunks, of which the most micro-batches are in flight.
    assert [stage.recompute for stage in plan.stages] == ["stage", "stage", "none", "none"]
    assert plan.prediction.peak_memory_bytes <= limit_bytes
    assert_plain_numbers(work, plan)


@pytest.mark.slow
def test_chunks_are_tried_with_levels_of_recomputation(monkeypatch):
    """Also where few of them have to recompute everything, so that the closed form says more than
    the simulation.
    """
    work = zoo.build("gpt-2.6b", 112, dtype="float16", recompute="none")
    method = aq.PipeshardParallel(num_stages=8, num_micro_batches=16, schedule="interleaved-1f1b")

    def found():
        cluster = aq.Cluster.preset("8xV100-16GB")
        return aq.plan(work.train_step, work.state, work.batch, cluster=cluster, method=method)

    plan = found()
    assert [stage.recompute for stage in plan.stages].count("operators") == 1
    monkeypatch.setattr(
        _solve_stages, "chain_with_levels", lambda costs, levels, chain: (chain, ())
    )
    assert plan.prediction.step_time_s < found().prediction.step_time_s


def test_more_chunks_make_a_smaller_bubble():
    work = zoo.build(
        "gpt-2.6b", 64, overrides={"num_layers": 8}, dtype="bf16", scan=True, recompute="block"
    )
    plans = [
        planned(f"megatron:tp2,pp4{chunks}", work, "8xH100", micro_batches=8)
        for chunks in ("", ",vpp2")
    ]
    bubbles = [plan.prediction.bubble_s for plan in plans]
    assert bubbles[1] < 0.7 * bubbles[0]
    assert plans[1].prediction.step_time_s < plans[0].prediction.step_time_s


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("megatron:dp4,tp2,vpp2", r"chunks=2 \(vpp\) interleaves .* give pp2 or more"),
        ("megatron:dp4,pp2,vpp0", "vpp0: a degree is at least 1"),
        (
            "megatron:dp2,tp2,pp2,vpp4",
            "pp2,vpp4 makes 8 stages, and the step can be cut into 5 at most,"
            r" .* Use vpp3 or fewer",
        ),
    ],
)
def test_chunks_that_cannot_be(name, said):
    with pytest.raises(InputError, match=said):
        planned(name, llama())


def test_chunks_run_one_at_a_time_in_the_memory_of_a_device():
    plan = planned("megatron:dp2,tp2,pp2,vpp2", llama())
    found, working = plan.prediction, "working memory"
    of_submeshes = [[stage.prediction for stage in plan.stages[k::2]] for k in range(2)]
    largest = [max(each.memory_bytes[working] for each in mine) for mine in of_submeshes]
    assert found.memory_bytes[working] in largest
    assert found.peak_memory_bytes == sum(found.memory_bytes.values())
    assert found.peak_memory_bytes < min(
        sum(each.peak_memory_bytes for each in mine) for mine in of_submeshes
    )
