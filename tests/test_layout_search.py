"""Faster settings that a framework can say: beside every layout of its format, one by one."""

import itertools
from dataclasses import replace

import pytest

import aliquot as aq
from aliquot._layout_search import Judge, _layouts
from aliquot.core import InfeasibleError, InputError

SIZES = {
    "num_layers": 2,
    "hidden_size": 256,
    "ffn_size": 512,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 512,
}
ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_activation_checkpointing: true
parallelism_config:
  parallelism_config_tp_size: 2
"""
BATCH = 4


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    path = tmp_path_factory.mktemp("settings") / "fsdp.yaml"
    path.write_text(ACCELERATE)
    return aq.read(
        path,
        cluster=aq.Cluster.preset("2xH100"),
        model="llama3-8b",
        overrides=SIZES,
        seq_len=128,
        global_batch=BATCH,
        micro_batch=1,
        better=True,
        time_limit_s=600,
    )


def test_no_layout_of_the_format_is_faster(reading):
    """accelerate says FSDP, data, tensor and context parallelism, and recomputes blocks or nothing;
    the batch is the caller's.
    """
    judge = Judge(reading.config, reading.cluster, reading.found.table, None, None)
    times_s = {}
    for (data, tensor, context), sequence, zero, micro, how in itertools.product(
        [(2, 1, 1), (1, 2, 1), (1, 1, 2)], [False, True], [0, 3], [1, 2, 4], ["none", "block"]
    ):
        if (sequence and tensor == 1) or BATCH % (micro * data):
            continue
        layout = replace(
            reading.settings,
            data=data,
            tensor=tensor,
            context=context,
            sequence=sequence,
            attention="ring" if context > 1 else None,
            zero_stage=zero,
            micro_batch=micro,
            num_micro_batches=None,
            recompute=how,
        ).on(2)
        try:
            times_s[layout] = judge.plan(layout).prediction.step_time_s
        except (InfeasibleError, InputError):
            continue
    assert len(times_s) > 20
    assert reading.search.untried == 0
    assert reading.better.prediction.step_time_s <= min(times_s.values()) * (1 + 1e-9)
    assert reading.better.prediction.step_time_s < 0.99 * reading.plan.prediction.step_time_s


def test_what_differs_is_said_in_the_words_of_the_file(reading):
    words = [name for name, _, _ in reading.changes]
    assert "fsdp_config.fsdp_activation_checkpointing" in words
    assert reading.to_dict()["search"]["tried"] == reading.search.tried > 20


def test_micro_batches_between_powers_of_two_are_tried(reading):
    """Of a batch of 24 on two ranks, each may take 1, 2, 3, 4, 6 or 12 rows at once."""
    settings = replace(reading.settings, global_batch=24, micro_batch=1)
    layouts = list(_layouts(settings, reading.cluster, 0, ["none"]))
    of_two = {each.micro_batch for each in layouts if each.data == 2}
    assert {n for n in of_two if 24 % (2 * n) == 0} == {1, 2, 3, 4, 6, 12}


ARGUMENTS = ["--bf16", "--global-batch-size", "2", "--tensor-model-parallel-size", "2"]
SMALL = {"cluster": aq.Cluster.preset("2xH100"), "model": "llama3-8b", "overrides": SIZES}


def test_layouts_whose_state_is_too_large_are_not_planned():
    """Every layout is accounted for, and none is planned."""
    limits = {"memory_limit_bytes": 1e6, "time_limit_s": 600}
    found = aq.read(*ARGUMENTS, **SMALL, seq_len=128, better=True, **limits)
    assert found.fits == "no" and found.better is None
    assert (found.search.tried, found.search.untried) == (0, 0)
    assert found.search.ruled_out > 20


def test_a_search_without_time_says_what_it_did_not_reach():
    found = aq.read(*ARGUMENTS, **SMALL, seq_len=128, better=True, time_limit_s=1e-6)
    assert found.search.tried == 0
    assert found.search.untried > 20


MAXTEXT = ["ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "per_device_batch_size=1"]
ON_FOUR = {**SMALL, "cluster": aq.Cluster.preset("4xH100")}


def test_maxtext_splits_residual_streams_over_tensor_ranks():
    found = aq.read(*MAXTEXT, **ON_FOUR, framework="maxtext", seq_len=128)
    assert found.settings.name == "megatron:dp2,tp2,fsdp"
    assert found.plan.method == "megatron:dp2,tp2,sp,fsdp"
    assert any("residual streams" in text for text in found.found.assumed)


def test_what_the_host_keeps_is_not_called_unfit():
    limit = {"memory_limit_bytes": 1e6, "seq_len": 128}
    found = aq.read(*MAXTEXT, "remat_policy=save_qkv_proj", **ON_FOUR, **limit)
    assert found.fits == "no"
    found = aq.read(*MAXTEXT, "remat_policy=qkv_proj_offloaded", **ON_FOUR, **limit)
    assert found.fits == "perhaps"
    assert "keep a part of this on the host" in found.refusal
