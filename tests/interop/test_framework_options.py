"""The tables of settings beside what the frameworks take: their options, read in their sources or
asked of their own parsers, and the parsers themselves where they are installed.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from aliquot.interop.frameworks import Settings, tables, write_settings

OPTIONS = Path(__file__).parent / "options"
# Of the launcher.
LAUNCHER = {"world-size", "nproc_per_node", "nproc-per-node", "nnodes"}
FSDP = Settings(
    data=8,
    zero_stage=3,
    micro_batch=1,
    global_batch=16,
    num_micro_batches=2,
    recompute="block",
    dtype="bf16",
    seq_len=2048,
)


def _options(table):
    return OPTIONS / f"{table.framework}-{table.version.replace(' ', '-')}.txt"


@pytest.mark.parametrize(
    "table", [t for t in tables() if _options(t).exists()], ids=lambda table: table.title
)
def test_every_setting_of_a_table_is_an_option_of_that_version(table):
    known = set(_options(table).read_text().split())
    named = {*table.layout, *table.model, *table.changes} - {"title", "recipe"}
    assert sorted(named - known - LAUNCHER) == []


def test_options_of_all_frameworks_but_bridge_are_here():
    missing = [t.title for t in tables() if not _options(t).exists()]
    assert missing == ["bridge 0.6"]


def test_accelerate_takes_what_is_written(tmp_path):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    for settings in (FSDP, Settings(data=4, tensor=2, zero_stage=3, shard_within=2)):
        path = tmp_path / "plan.yaml"
        path.write_text(write_settings("accelerate", settings, {}).text)
        config_args.load_config_from_file(str(path))


def test_deepspeed_takes_what_is_written():
    config = pytest.importorskip("deepspeed.runtime.config")
    # It asks for the number of processes, which is 1 here.
    alone = replace(FSDP, data=1, global_batch=2)
    made = config.DeepSpeedConfig(json.loads(write_settings("deepspeed", alone, {}).text))
    assert made.zero_optimization_stage == 3


def test_megatron_takes_what_is_written(tmp_path):
    arguments = pytest.importorskip("megatron.training.arguments")
    import argparse

    written = write_settings("megatron", FSDP, {"num_layers": 24})
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    words = written.text.partition("(")[2].rpartition(")")[0].split()
    taken = parser.parse_args([word.strip('"') for word in words])
    assert (taken.use_megatron_fsdp, taken.global_batch_size) == (True, 16)


@pytest.mark.parametrize("name", ["torchtitan", "torchtitan-0.3", "torchtitan-0.2"])
def test_torchtitan_takes_what_is_written(name):
    if name == "torchtitan-0.2":
        configs = pytest.importorskip("torchtitan.config.job_config")
        fields = {"parallelism": configs.Parallelism, "training": configs.Training}
    else:
        configs = pytest.importorskip("torchtitan.config.configs")
        fields = {"parallelism": configs.ParallelismConfig, "training": configs.TrainingConfig}
        in_tokens = hasattr(configs.TrainingConfig(), "max_context_length")
        if in_tokens != (name == "torchtitan"):
            pytest.skip(f"the torchtitan that is installed is not that of {name}")
    for group, kind in fields.items():
        pairs = dict(write_settings(name, FSDP, {"num_layers": 24}).pairs)
        inside = {k.partition(".")[2]: v for k, v in pairs.items() if k.startswith(f"{group}.")}
        made = kind(**inside)
        assert {key: getattr(made, key) for key in inside} == inside
