"""Published configurations: the degrees, the batch and the recomputation that they say."""

from pathlib import Path

import pytest

from aliquot.interop.frameworks import read_settings
from aliquot.zoo import configure

PUBLISHED = Path(__file__).parent / "published"

# File, devices, layout, rows of a micro-batch and of a step, recomputation, dtype.
CASES = [
    ("megatron_llama3_8b_fp8.sh", 8, "megatron:dp8,zero1", 1, 128, "fused", "fp8"),
    ("megatron_fsdp_llama3_8b_fp8.sh", 8, "fsdp", 1, 128, "fused", "fp8"),
    ("megatron_fsdp_deepseek_v3.sh", 512, "megatron:dp64,ep8,fsdp", 4, 2048, "minimal", "bf16"),
    ("megatron_mixtral_8x7b.sh", 64, "megatron:dp2,ep8,pp4,zero1", 1, 256, "fused", "bf16"),
    ("megatron_gpt3_175b.sh", 128, "megatron:dp1,tp8,pp16", 1, 1536, "fused", "float16"),
    ("bridge_llama3_8b_bf16.py", 8, "megatron:dp4,cp2,ring,zero1", 1, 128, "fused", "bf16"),
    ("bridge_llama3_8b_fp8.py", 8, "megatron:dp8,zero1", 1, 128, "block:6", "fp8"),
    (
        "bridge_llama3_70b_bf16.py",
        64,
        "megatron:dp2,cp2,tp4,pp4,vpp5,sp,ring,zero1",
        1,
        256,
        "fused",
        "bf16",
    ),
    (
        "bridge_llama3_70b_fp8.py",
        64,
        "megatron:dp2,tp4,pp8,vpp5,layers2x35.3.2x3.1,sp,zero1",
        1,
        256,
        "fused",
        "fp8",
    ),
    (
        "bridge_llama31_405b_bf16.py",
        1024,
        "megatron:dp8,cp2,tp8,pp8,vpp8,sp,ring,zero1",
        1,
        1536,
        "fused",
        "bf16",
    ),
    (
        "bridge_deepseek_v3_bf16.py",
        1024,
        "megatron:dp1,ep64,tp2,pp8,vpp4,sp,zero1",
        1,
        16384,
        "fused",
        "bf16",
    ),
    ("torchtitan_llama3_8b.toml", 64, "fsdp", 1, 64, "minimal", "bf16"),
    ("torchtitan_llama3_70b.toml", 256, "megatron:dp32,tp8,sp,fsdp", 8, 256, "block", "bf16"),
    ("torchtitan_llama3_405b.toml", 128, "megatron:dp16,tp8,sp,fsdp", 2, 32, "block", "fp8"),
    ("torchtitan_deepseek_v3_16b.toml", 64, "megatron:dp8,ep8,fsdp", 4, 256, "minimal", "bf16"),
    ("torchtitan_llama3_70b.py", 256, "megatron:dp32,tp8,sp,fsdp", 8, 256, "block", "bf16"),
    ("torchtitan_llama3_405b.py", 128, "megatron:dp16,tp8,sp,fsdp", 2, 32, "block", "fp8"),
    ("torchtitan_deepseek_v3_671b.py", 256, "megatron:dp128,ep2,fsdp", 4, 1024, "minimal", "bf16"),
    ("maxtext_128b_v5p.sh", 128, "megatron:dp16,tp8,fsdp", 8, 128, "minimal", "bf16"),
    ("maxtext_llama2_70b_v5e.sh", 256, "fsdp", 2, 512, "save_qkv", "bf16"),
    ("maxtext_llama2_7b_a3.sh", 128, "hsdp:8", 12, 1536, "block", "bf16"),
    ("maxtext_mixtral_8x7b.yml", 64, "fsdp", 12, 768, "minimal", "bf16"),
    ("accelerate_fsdp.yaml", 2, "fsdp", None, None, "none", "bf16"),
    ("accelerate_tp_hsdp.yaml", 8, "megatron:dp4,tp2,fsdp", None, None, "none", "bf16"),
    ("accelerate_cp.yaml", 8, "megatron:dp1,cp8,gather,fsdp", None, None, "block", "bf16"),
    ("deepspeed_zero2.json", 8, "zero2", None, None, "none", "float16"),
    ("deepspeed_zero3_offload.json", 8, "fsdp", None, None, "none", "float16"),
]


def _layers(fields):
    if fields.get("num_layers"):
        return fields["num_layers"]
    return configure(fields["like"]).num_layers if fields.get("like") else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_what_a_published_configuration_says(case):
    name, devices, layout, micro_batch, batch, recompute, dtype = case
    found = read_settings([PUBLISHED / name], num_devices=devices, layers_of=_layers)
    settings = found.settings
    assert found.framework == name.partition("_")[0]
    assert settings.name == layout
    assert (settings.micro_batch, settings.global_batch) == (micro_batch, batch)
    assert (settings.recompute, settings.dtype) == (recompute, dtype)
    assert found.unknown == ()


def test_every_file_is_a_case():
    assert sorted(case[0] for case in CASES) == sorted(path.name for path in PUBLISHED.iterdir())


def test_unequal_chunks_of_a_published_layout():
    found = read_settings(
        [PUBLISHED / "bridge_llama3_70b_fp8.py"], num_devices=64, layers_of=_layers
    )
    layers = found.settings.stage_layers
    assert (len(layers), sum(layers), set(layers)) == (40, 80, {1, 2, 3})


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("deepspeed_zero3_offload.json", "optimizer state stays on the devices"),
        ("maxtext_llama2_70b_v5e.sh", "keeps on the host"),
        ("megatron_llama3_8b_fp8.sh", "grad-reduce-in-bf16"),
        ("accelerate_tp_hsdp.yaml", "not in groups of 2"),
        ("megatron_fsdp_deepseek_v3.sh", "mtp-num-layers"),
        ("megatron_gpt3_175b.sh", "the batch grows"),
    ],
)
def test_what_changes_memory_or_time_is_never_silent(name, lost):
    found = read_settings([PUBLISHED / name], num_devices=512, layers_of=_layers)
    assert any(lost in text for text in found.lost)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("megatron_llama3_8b_fp8.sh", "nothing to split along the sequence"),
        ("megatron_gpt3_175b.sh", "every tensor rank repeats the norms"),
        ("megatron_gpt3_175b.sh", "overlap-grad-reduce is off"),
    ],
)
def test_advice_that_needs_no_plan(name, advice):
    found = read_settings([PUBLISHED / name], num_devices=256, layers_of=_layers)
    assert any(advice in text for text in found.advice)
