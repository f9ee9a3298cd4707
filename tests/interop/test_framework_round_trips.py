"""Settings written for each framework and read again: they differ only where that is declared."""

import re
from dataclasses import replace

import pytest

from aliquot.interop.frameworks import FRAMEWORKS, Settings, read_settings, write_settings

LAYERS = 24
COMMON = {"micro_batch": 1, "global_batch": 64, "dtype": "bf16", "seq_len": 2048}


def _settings(**changes):
    made = Settings(**{**COMMON, **changes})
    schedule = "1f1b" if made.chunks == 1 else "interleaved-1f1b"
    return replace(made, schedule=schedule if made.pipeline > 1 else "").on(16)


LAYOUTS = {
    "dp": _settings(),
    "zero1": _settings(zero_stage=1),
    "zero2": _settings(zero_stage=2, recompute="block"),
    "fsdp": _settings(zero_stage=3, micro_batch=2),
    "hsdp": _settings(zero_stage=3, shard_within=8),
    "zero2 in groups": _settings(zero_stage=2, shard_within=8),
    "tp": _settings(tensor=4),
    "tp with sp and fsdp": _settings(tensor=4, sequence=True, zero_stage=3, recompute="block"),
    "tp with sp and zero1": _settings(tensor=2, sequence=True, zero_stage=1),
    "pp": _settings(pipeline=4, zero_stage=1),
    "pp in chunks": _settings(pipeline=2, chunks=2),
    "pp of unequal stages": _settings(pipeline=4, stage_layers=(5, 7, 7, 5), zero_stage=1),
    "cp as a ring": _settings(context=4, attention="ring", zero_stage=3),
    "cp as ulysses": _settings(context=2, attention="ulysses", zero_stage=3),
    "experts": _settings(expert=4, zero_stage=1),
    "all degrees": _settings(tensor=2, sequence=True, pipeline=2, context=2, attention="gather"),
    "minimal": _settings(zero_stage=3, recompute="minimal"),
    "what kernels keep": _settings(zero_stage=3, recompute="fused"),
    "every second layer, in 8 bits": _settings(zero_stage=3, recompute="block:2", dtype="fp8"),
}
# Kernels of these keep the inputs and results of products where nothing is recomputed.
FUSE = ("megatron", "bridge", "torchtitan", "torchtitan-0.3", "torchtitan-0.2")
READ_AGAIN = [name for name in FRAMEWORKS if name != "flax"]
# For each value that may differ, the words with which that is declared.
DECLARED = {
    "data": r"pp\d|stages|ep\d",
    "zero_stage": r"zero[12]|whole state",
    "shard_within": "groups|zero2",
    "sequence": r"\bsp\b|sequence parallelism",
    "recompute": "recompute",
    "expert": "ep",
    "pipeline": "pp",
    "chunks": "pp|chunks|stages",
    "stage_layers": "unequal|pp",
    "schedule": "schedule|pp",
    "attention": "context parallelism",
    "micro_batch": "batch",
    "global_batch": "batch",
    "num_micro_batches": "batch|pp",
    "seq_len": "sequences of",
    "dtype": "dtype",
    "tensor": "tp beside cp",
    "context": "tp beside cp",
}


@pytest.mark.parametrize("to", READ_AGAIN)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_declared_values_differ(layout, to, tmp_path):
    before = LAYOUTS[layout]
    written = write_settings(to, before, {"num_layers": LAYERS})
    path = tmp_path / written.file_name
    path.write_text(written.text)
    # DeepSpeed refuses tensor parallelism beside Ulysses: what is written is to be edited.
    if any("refuses" in text for text in written.lost):
        return
    lost = " ".join(written.lost)
    devices = before.data * before.model_ranks
    found = read_settings([path], num_devices=devices, layers_of=lambda model: LAYERS)
    after = found.settings
    if not list(after.faults(devices)):
        after = after.on(devices)
    assert found.unknown == ()
    if before.recompute == "none" and to in FUSE:
        before = replace(before, recompute="fused")
    for name, want in DECLARED.items():
        now, then = getattr(before, name), getattr(after, name)
        if now != then:
            assert re.search(want, lost), f"{name}: {now} became {then}; lost: {written.lost}"


@pytest.mark.parametrize("to", ["megatron", "bridge"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_says_every_layout(layout, to, tmp_path):
    before = LAYOUTS[layout]
    written = write_settings(to, before, {"num_layers": LAYERS})
    path = tmp_path / written.file_name
    path.write_text(written.text)
    devices = before.data * before.model_ranks
    after = read_settings([path], num_devices=devices, layers_of=lambda model: LAYERS).settings
    assert after.on(devices).name == before.name
    assert after.stage_layers == before.stage_layers
    assert all("recompute" in text for text in written.lost)


@pytest.mark.parametrize("to", READ_AGAIN)
@pytest.mark.parametrize("recompute", ["none", "fused"])
def test_nothing_recomputed_is_what_the_frameworks_kernels_keep(recompute, to, tmp_path):
    settings = _settings(zero_stage=3, recompute=recompute)
    written = write_settings(to, settings, {"num_layers": LAYERS})
    told = [text for text in written.lost if "recompute" in text]
    kept = "fused" if to in FUSE else "none"
    assert bool(told) == (recompute == "fused" != kept), told
    path = tmp_path / written.file_name
    path.write_text(written.text)
    found = read_settings([path], num_devices=16, layers_of=lambda model: LAYERS)
    assert found.settings.recompute == found.nothing_recomputed == kept
    if to.startswith("torchtitan"):
        # Where torchtitan does not compile, operators keep what they read.
        path.write_text(re.sub(r"(enable = )[tT]rue", r"\1False", written.text))
        if to == "torchtitan-0.2":
            path.write_text(path.read_text().replace("False", "false"))
        again = read_settings([path], num_devices=16, layers_of=lambda model: LAYERS)
        assert again.settings.recompute == again.nothing_recomputed == "none"
