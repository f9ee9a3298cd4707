"""Plans as Aceso's configurations."""

from __future__ import annotations

import json

import pytest
from command_line import refused, run
from interop.test_aceso_plans import NAMES, TINY

from aliquot.interop.aceso import read_configuration


def planned(folder, *options, model=TINY):
    path = folder / "plan.json"
    done = run("plan", *model, "--dtype", "float32", "--out", path, *options)
    assert done.exit_code == 0, done.output
    return path


def exported(folder, *options):
    out = folder / "config.json"
    done = run("aceso", "export", planned(folder, *options), "--out", out)
    assert done.exit_code == 0, done.output
    return json.loads(out.read_text())


def test_a_pipeline_of_data_and_tensor_parallelism_is_written(tmp_path):
    config = exported(
        tmp_path, "--method", "megatron:dp2,tp2,pp2", "--micro-batches", 2, "--recompute", "none"
    )
    first, second = config["num_ops_in_each_stage"]
    assert first + second == len(NAMES) and NAMES[first] == "enc-1st-layernorm"
    assert config["num_gpus"] == [4, 4] and config["num_stages"] == 2
    assert (config["global_batch_size"], config["micro_batch_size"]) == (8, 4)
    for key, degree in (
        ("model_parallel_size_of_each_op", 2),
        ("data_parallel_size_of_each_op", 2),
    ):
        assert config[key] == [[degree] * first, [degree] * second]
    assert config["algo_of_each_op"] == config["recompute_ops"] == [[0] * first, [0] * second]
    assert config["checkpoint_activations"] == config["resharding_stages"] == [False, False]
    shape = {
        "num_layers": 4,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "num_attention_heads": 4,
        "hidden_size": 32,
    }
    assert shape.items() <= config.items()
    assert read_configuration(tmp_path / "config.json").num_operators == len(NAMES)


def test_one_program_is_one_stage_and_layers_that_recompute_are_marked(tmp_path):
    config = exported(
        tmp_path, "--method", "megatron:dp4,tp2", "--micro-batches", 2, "--recompute", "block"
    )
    assert config["num_gpus"] == [8] and config["checkpoint_activations"] == [True]
    assert set(config["model_parallel_size_of_each_op"][0]) == {2}
    assert set(config["data_parallel_size_of_each_op"][0]) == {4}
    marked = {name for name, again in zip(NAMES, config["recompute_ops"][0], strict=True) if again}
    assert marked == set(NAMES) - {"encoder-embedding", "final-layernorm", "gpt-post-process"}


def test_everything_that_cannot_be_written_is_said_at_once(tmp_path):
    plan = planned(tmp_path, "--method", "megatron:dp2,tp2,pp2,fsdp", "--micro-batches", 2)
    content = json.loads(plan.read_text())
    content["schedule"] = "gpipe"
    # The first product of the second stage splits positions over the data axis.
    entry = next(e for e in content["stages"][1]["interior"] if e["splits"].get("tensor") == "d")
    entry["splits"]["data"] = "c"
    # And that of the first stage splits nothing over it.
    other = next(e for e in content["stages"][0]["interior"] if e["splits"].get("tensor") == "d")
    del other["splits"]["data"]
    plan.write_text(json.dumps(content))
    refused(
        run("aceso", "export", plan, "--out", tmp_path / "config.json"),
        "its schedule is gpipe, and Aceso runs 1f1b: plan with --schedule 1f1b",
        "stage 0: parameters are split over axis 'data'",
        "stage 1: the state of the optimizer is split over axis 'data'",
        "enc-attention-qkv (operators 28, 41): axis 'data' splits dim c, neither examples nor what"
        " tensor degrees split",
        "enc-attention-qkv (operators 2, 15): all 2 devices along axis 'data' do the same work",
        "--method megatron:dp2,tp2,pp2",
    )
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (TINY, ["--scan", "--method", "dp"], "loops over stacked layers"),
        (["bert-large", *TINY[1:]], ["--method", "dp"], "bert-large is no GPT"),
    ],
)
def test_other_models_are_refused(tmp_path, model, options, message):
    plan = planned(tmp_path, *options, model=model)
    refused(run("aceso", "export", plan, "--out", tmp_path / "config.json"), message)


def test_files_that_are_no_plans(tmp_path):
    odd = tmp_path / "odd.json"
    odd.write_text("{")
    refused(run("aceso", "export", odd, "--out", tmp_path / "config.json"), "is not JSON")
