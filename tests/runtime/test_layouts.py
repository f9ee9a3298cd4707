"""A step laid out by name is the plain step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from runtime.equality import largest

import aliquot as aq
from aliquot import zoo
from aliquot.planners import method_by_name

ROWS = 16
SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "ffn_size": 32,
    "vocab_size": 40,
    "seq_len": 8,
}
MODELS = {
    "gpt": ("gpt-125m", SIZES),
    "llama": ("llama-7b", SIZES),
    "deep gpt": ("gpt-125m", {**SIZES, "num_layers": 4}),
    "t5": ("t5-770m", {**SIZES, "num_layers": 1, "head_size": 0, "target_len": 4}),
    "deep t5": ("t5-770m", {**SIZES, "num_layers": 6, "head_size": 0, "target_len": 4}),
    "moe": ("moe-380m", {**SIZES, "num_experts": 4, "group_size": 8}),
}


@functools.cache
def workload(model: str, scan: bool) -> Any:
    name, sizes = MODELS[model]
    return zoo.build(
        zoo.configure(name, **sizes), ROWS, dtype="float64", scan=scan, learning_rate=1e-3
    )


@functools.cache
def plain(model: str, scan: bool) -> tuple[Any, Any, Any, float]:
    """A state and a batch, and what the plain step makes of them on one device."""
    work = workload(model, scan)
    # Compiling all of it takes longer than its operators one by one, most of which models share.
    state = jax.device_get(work.init(jax.random.key(0)))
    random = np.random.default_rng(0)
    batch = {
        name: random.integers(0, SIZES["vocab_size"], x.shape, np.int32)
        for name, x in work.batch.items()
    }
    after, metrics = jax.jit(work.train_step)(state, batch)
    return state, batch, jax.device_get(after), float(metrics["loss"])


@functools.cache
def parallel(name: str, model: str, micro_batches: int, scan: bool) -> Any:
    """A step laid out by name, and what its first call makes of the state and the batch."""
    step = aq.parallelize(
        workload(model, scan).train_step,
        cluster=aq.Cluster.preset("8xcpu"),
        method=method_by_name(name),
        num_micro_batches=micro_batches,
    )
    state, batch, _, _ = plain(model, scan)
    after, metrics = step(state, batch)
    return step, jax.device_get(after), float(metrics["loss"])


def test_stages_exchange_the_gradient_of_a_shared_weight_as_it_is_split():
    """Embedding and head of GPT are one weight, used by the first stage and the last."""
    with jax.enable_x64(True):
        step, _, _ = parallel("megatron:dp2,tp2,pp2", "gpt", 4, False)
    assert step.plan.stages[0].shardings["state.params.embed.embedding"] == (("tensor",), ())
    whole = f"f64[{SIZES['vocab_size']},{SIZES['hidden_size']}]"
    gathers = [line for line in step.as_text().splitlines() if " all-gather(" in line]
    assert gathers and not any(whole in line for line in gathers)


@pytest.mark.parametrize(
    ("name", "model", "micro_batches", "scan"),
    [
        pytest.param("tp:4", "gpt", 1, False, marks=pytest.mark.slow),
        ("megatron:dp2,tp4", "llama", 2, True),
        pytest.param("megatron:dp2,tp4,zero1", "gpt", 2, False, marks=pytest.mark.slow),
        pytest.param("megatron:dp4,tp2,fsdp", "llama", 1, False, marks=pytest.mark.slow),
        pytest.param("megatron:dp2,tp4", "moe", 1, False, marks=pytest.mark.slow),
        pytest.param("megatron:ep4,tp2", "moe", 1, False, marks=pytest.mark.slow),
        ("megatron:dp2,ep2,tp2,zero2", "moe", 2, False),
        ("megatron:dp2,tp2,pp2", "gpt", 4, False),
        pytest.param("megatron:tp4,pp2,zero1", "llama", 4, True, marks=pytest.mark.slow),
        pytest.param("megatron:dp2,pp4", "deep gpt", 4, False, marks=pytest.mark.slow),
        ("tp:4", "t5", 1, False),
        pytest.param("megatron:dp2,tp4,zero1", "t5", 2, True, marks=pytest.mark.slow),
        pytest.param("megatron:tp2,pp4", "deep t5", 4, False, marks=pytest.mark.slow),
        pytest.param("megatron:dp2,cp2,tp2,gather", "gpt", 2, False, marks=pytest.mark.slow),
        ("megatron:dp2,cp4,ulysses,zero1", "llama", 1, True),
        pytest.param("megatron:dp4,cp2,fsdp", "t5", 1, False, marks=pytest.mark.slow),
        pytest.param("megatron:dp2,cp2,pp2,zero1", "gpt", 4, False, marks=pytest.mark.slow),
        ("megatron:dp2,cp2,pp2,zero1", "llama", 4, True),
        pytest.param("megatron:cp4,pp2,gather", "llama", 4, True, marks=pytest.mark.slow),
        pytest.param("megatron:dp1,cp8", "gpt", 1, True, marks=pytest.mark.slow),
        pytest.param("megatron:dp2,cp2,tp2,ulysses", "llama", 1, False, marks=pytest.mark.slow),
        pytest.param("megatron:dp2,ep2,cp2", "moe", 1, False, marks=pytest.mark.slow),
    ],
)
def test_a_layout_by_name_is_the_plain_step(name, model, micro_batches, scan):
    with jax.enable_x64(True):
        state, _, wanted, wanted_loss = plain(model, scan)
        _, found, loss = parallel(name, model, micro_batches, scan)
        assert abs(loss - wanted_loss) <= 1e-9 * abs(wanted_loss)
        difference, path = largest("float64", state, found, wanted)
        assert difference <= 1e-9, path
