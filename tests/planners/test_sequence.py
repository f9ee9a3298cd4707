"""Sequence parallelism by name: what it splits and communicates, that it computes the plain step,
and what is refused.
"""

import dataclasses
import functools
from collections import Counter

import jax
import numpy as np
import pytest
from planners.small_steps import mlp

import aliquot as aq
from aliquot import zoo
from aliquot.core import InputError
from aliquot.planners import method_by_name, method_names

ROWS, SEQ, LAYERS = 8, 16, 2
SIZES = {
    "num_layers": LAYERS,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_size": 48,
    "vocab_size": 40,
}


@functools.cache
def llama(dtype="bf16", seq_len=SEQ, recompute="none"):
    sizes = {**SIZES, "seq_len": seq_len}
    return zoo.build("llama-7b", ROWS, overrides=sizes, dtype=dtype, scan=True, recompute=recompute)


def planned(name, work, cluster="8xH100", micro_batches=1):
    return aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=aq.Cluster.preset(cluster),
        method=method_by_name(name),
        num_micro_batches=micro_batches,
    )


def over_tensor(plan, least_bytes=0):
    found = Counter()
    for use in plan.prediction.collectives:
        if use.axes == ("tensor",) and use.num_bytes / use.count >= least_bytes:
            found[use.kind] += use.count
    return found


def test_its_name():
    method = method_by_name("megatron:dp2,tp4,pp2,sp,zero1")
    assert method == aq.Megatron(data=2, tensor=4, pipeline=2, sequence=True, zero_stage=1)
    assert method.name == "megatron:dp2,tp4,pp2,sp,zero1"
    assert method_names("auto,megatron:dp2,tp4,sp,fsdp") == ["auto", "megatron:dp2,tp4,sp", "fsdp"]


def test_all_reduces_become_gathers_and_reduce_scatters():
    local = ROWS // 2 * SEQ * SIZES["hidden_size"] * 2
    plain, split = (planned(f"megatron:dp2,tp4{word}", llama()) for word in ("", ",sp"))
    # Forward and backward, a layer has two sums of activations.
    assert over_tensor(plain, local)["all-reduce"] >= 4 * LAYERS
    assert set(over_tensor(plain, local / 4)) == {"all-reduce"}
    found = over_tensor(split, local / 4)
    assert found["reduce-scatter"] >= 4 * LAYERS and found["all-gather"] >= 4 * LAYERS
    # What is left is summed over the vocabulary, or gradients of norms.
    assert over_tensor(split, local)["all-reduce"] <= 1


@pytest.mark.parametrize("word", ["", ",sp"])
def test_gathers_hide_beside_compute_as_sums_do(word):
    cluster = aq.Cluster.preset("8xH100")
    device = dataclasses.replace(
        cluster.device, calibration={"activation_overlap": 0.25, "overlap_fraction": 0.25}
    )
    cluster = dataclasses.replace(cluster, device=device)
    work = zoo.build("llama-7b", 8, overrides={"num_layers": 2}, scan=True)
    method = method_by_name(f"megatron:tp8{word}")
    found = aq.plan(work.train_step, work.state, work.batch, cluster=cluster, method=method)
    can_hide = found.prediction.communication_s + found.prediction.gradient_s
    assert found.prediction.hidden_s == pytest.approx(0.25 * can_hide, rel=0.02)


def test_norms_and_residuals_are_computed_once_and_held_once():
    work = zoo.build(
        "gpt-6.7b", 16, overrides={"num_layers": 2}, dtype="bf16", scan=True, recompute="block"
    )
    plain, split = (planned(f"megatron:tp8{word}", work).prediction for word in ("", ",sp"))
    assert split.compute_s < 0.95 * plain.compute_s
    assert split.step_time_s < plain.step_time_s
    assert split.memory_bytes["activations"] < 0.7 * plain.memory_bytes["activations"]


@pytest.mark.parametrize(
    ("name", "micro_batches"),
    [
        ("megatron:dp2,tp4,sp", 2),
        pytest.param("megatron:dp2,tp2,pp2,sp", 2, marks=pytest.mark.slow),
        pytest.param("megatron:dp2,cp2,tp2,sp", 1, marks=pytest.mark.slow),
    ],
)
def test_it_computes_the_plain_step(name, micro_batches, x64):
    work = llama("float64")
    plan = planned(name, work, "8xcpu", micro_batches)
    run = aq.parallelize(work.train_step, plan, devices=jax.devices()[:8])
    split_up = run.init(work.init, jax.random.key(0))
    state = work.init(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, ROWS, SEQ))
    batch = dict(zip(("inputs", "targets"), tokens.astype(np.int32), strict=True))
    state, wanted = jax.jit(work.train_step)(state, batch)
    split_up, found = run(split_up, batch)
    assert float(found["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-9)
    for a, b in zip(jax.tree.leaves(split_up), jax.tree.leaves(state), strict=True):
        assert np.max(np.abs(np.asarray(a) - b)) <= 1e-9 * max(np.max(np.abs(b)), 1e-30)


@pytest.mark.slow
def test_compiled_programs_gather_and_scatter():
    work = llama()
    for word, kinds in (("", set()), (",sp", {"all-gather", "reduce-scatter"})):
        plan = planned(f"megatron:dp2,tp4{word}", work, "8xcpu")
        run = aq.parallelize(work.train_step, plan, devices=jax.devices()[:8])
        run.prepare(work.state, work.batch)
        program = run.lower().compile().as_text()
        assert {
            kind for kind in ("all-gather", "reduce-scatter") if f" {kind}(" in program
        } == kinds


@pytest.mark.parametrize(
    ("name", "seq_len", "said"),
    [
        ("megatron:dp8,sp", SEQ, r"sequence=True \(sp\) splits .* give tp2 or more"),
        (
            "megatron:dp2,tp4,sp",
            18,
            "a sequence of 18 cannot be split over 4 devices .*\n.* no sp, or sequences of a"
            " multiple of 4",
        ),
    ],
)
def test_what_cannot_be_split(name, seq_len, said):
    with pytest.raises(InputError, match=said):
        planned(name, llama(seq_len=seq_len))


def test_a_step_without_a_sequence():
    step, *shapes = mlp((64, 256, 64), 32)
    with pytest.raises(InputError, match="Sequence parallelism .* has none that could be"):
        aq.plan(
            step,
            *shapes,
            cluster=aq.Cluster.preset("8xH100"),
            method=method_by_name("megatron:tp8,sp"),
        )
