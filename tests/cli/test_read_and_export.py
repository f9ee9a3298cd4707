"""`aliquot read` and `aliquot export`."""

import json
import re

import pytest
from command_line import TINY, refused, run

TITAN = """
[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = 8
global_batch_size = 64
seq_len = 256
[parallelism]
tensor_parallel_degree = 8
made_up = 1
[activation_checkpoint]
mode = "full"
"""
MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


@pytest.fixture
def titan(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(TITAN)
    return path


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    made = run("plan", *TINY, "--method", "megatron:dp4,tp2,sp,zero1", "--out", path)
    assert made.exit_code == 0, made.output
    return path


PIPELINE = [
    *("--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--global-batch-size", "16", "--micro-batch-size", "1", "--bf16"),
    *("--pipeline-model-parallel-size", "4", "--padded-vocab-size", "4096"),
]


def test_unequal_stages_are_judged_as_they_are(tmp_path):
    """The figures are of the layers that were given, and the layout can be typed."""
    args = tmp_path / "run.sh"
    by_layout = {}
    for layout in ("Ett|tt|tt|ttL", "Et|ttt|ttt|tL", "Et|t|t|t|tt|t|t|L"):
        words = [*PIPELINE, "--pipeline-model-parallel-layout", f'"{layout}"']
        args.write_text(f"torchrun pretrain_gpt.py {' '.join(words)}")
        found = run("read", args, "--world", 8, "--device", "H100", "--json")
        assert found.exit_code == 0, found.output
        by_layout[layout] = json.loads(found.stdout)
    even, uneven, empty = by_layout.values()
    assert even["layout"] == "megatron:dp2,pp4"
    assert uneven["layout"] == uneven["prediction"]["method"] == "megatron:dp2,pp4,layers1.3x2.1"
    assert not any("stage" in text for text in uneven["lost"])
    now, then = (each["prediction"]["memory_bytes_by_stage"] for each in (uneven, even))
    # The ends have the embedding and the head, but fewer layers.
    assert now[0] < then[0] and now[1] > then[1] and now[3] < then[3]
    # This package cuts no stage without a layer.
    assert any("without a layer" in text for text in empty["lost"])


def test_read_prints_what_was_found_and_what_it_costs(titan):
    found = run("read", titan, "--world", 8, "--device", "H100")
    assert found.exit_code == 0, found.output
    for text in (
        "torchtitan 0.2 on 8xH100",
        "megatron:dp1,tp8,sp",
        "8 micro-batches of 8 on each data rank",
        "block: keeps only what enters a block",
        "step time",
        "expected error",
        "on the fullest device",
        "parallelism.made_up (run.toml:11)",
    ):
        assert text in found.stdout, found.stdout


def test_read_with_better_says_what_to_change_in_the_words_of_the_file(titan):
    found = run("read", titan, "--world", 8, "--device", "H100", "--better", "--json")
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    changes = {each["name"]: (each["now"], each["then"]) for each in answer["changes"]}
    assert changes["parallelism.tensor_parallel_degree"] == (8, 1)
    assert changes["activation_checkpoint.mode"] == ("full", "none")
    now, then = answer["prediction"], answer["better"]
    assert then["step_time_s"] < now["step_time_s"] / 2
    assert max(then["memory_bytes_by_stage"]) < then["memory_limit_bytes"]
    # All of it can be written: nothing is advised that the framework does not have.
    assert answer["better_settings"]["zero_stage"] != 1


def test_read_takes_the_model_from_a_config_and_settings_from_arguments(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL))
    arguments = "--tensor-model-parallel-size 8 --bf16 --global-batch-size 6 --micro-batch-size 3"
    found = run("read", config, "--world", 8, "--device", "H100", "--", *arguments.split())
    assert found.exit_code == 0, found.output
    assert "tensor-model-parallel-size 8 over 2 heads of keys and values" in found.stdout
    assert "judged as 8 heads, of which each rank has one" in found.stdout
    kernels = "none: megatron's kernels keep the inputs and results of products (fused)"
    assert kernels in " ".join(found.stdout.split())
    assert (
        "tensor-model-parallel-size (the arguments) = 8 without sequence-parallel" in found.stdout
    )


def test_read_takes_the_devices_from_the_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "a.yaml").write_text("distributed_type: FSDP\nnum_machines: 2\nnum_processes: 8\n")
    found = run("read", tmp_path / "a.yaml", tmp_path / "config.json", "--device", "H100", "--json")
    assert json.loads(found.stdout)["cluster"] == "2x4xH100"


def test_a_batch_that_does_not_divide_is_no_plan_but_an_answer(titan):
    found = run("read", titan, "--cluster", "8xH100", "--global-batch", 60)
    assert found.exit_code == 1
    assert "a batch of 60 is not a multiple of micro-batch 8 x 1 data ranks" in found.stdout


def test_degrees_that_do_not_divide_are_told_without_a_batch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "a.yaml").write_text(
        "distributed_type: FSDP\nparallelism_config:\n  parallelism_config_tp_size: 4\n"
        "  parallelism_config_dp_shard_size: 2\n"
    )
    found = run("read", tmp_path / "a.yaml", tmp_path / "config.json", "--cluster", "16xtrn1")
    assert found.exit_code == 1
    assert "= 8; 16 need dp4" in found.stdout
    assert "None" not in found.stdout


def test_settings_that_need_far_more_memory_do_not_fit(titan):
    found = run("read", titan, "--cluster", "8xH100", "--memory-limit", "10MiB", "--json")
    assert (found.exit_code, json.loads(found.stdout)["fits"]) == (1, "no")
    found = run("read", titan, "--cluster", "8xH100", "--memory-limit", "20MiB", "--json")
    assert (found.exit_code, json.loads(found.stdout)["fits"]) == (0, "perhaps")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--world 64 --device H100"),
        (["--device", "H100"], "add --world 64, or"),
        (["--world", "12", "--device", "H100"], "--devices-per-host"),
        (["--cluster", "8xH100", "--world", "8"], "leave out --world"),
        (["--cluster", "8xH100", "--framework", "torchtita"], "did you mean 'torchtitan'"),
        (["--cluster", "8xH100", "--model", "llama-9"], "There is no model 'llama-9'"),
    ],
)
def test_read_refuses(titan, arguments, message):
    refused(run("read", titan, *arguments), message)


def test_export_writes_arguments(plan, tmp_path):
    out = tmp_path / "args.sh"
    found = run("export", plan, "--to", "megatron", "--out", out)
    assert found.exit_code == 0, found.output
    text = out.read_text()
    assert "--tensor-model-parallel-size 2" in text
    assert "--sequence-parallel" in text
    assert "--use-distributed-optimizer" in text
    asked = f"aliquot read {out} --model gpt-125m --cluster 8xH100 predicts them."
    assert ("all of which these settings say." in found.stderr) != (asked in found.stderr)
    assert " a step and " in found.stderr


def test_export_says_how_to_read_what_the_file_leaves_to_the_script(plan, tmp_path):
    out = tmp_path / "plan.yaml"
    found = run("export", plan, "--to", "accelerate", "--out", out, "--allow-loss")
    assert found.exit_code == 0, found.output
    asked = re.search(r"aliquot (read .*) predicts them", found.stderr)[1].split()
    assert asked[-6::2] == ["--global-batch", "--micro-batch", "--seq-len"]
    read = run(*asked, "--json")
    assert read.exit_code == 0, read.output


def test_export_refuses_to_lose_anything_unless_it_may(plan):
    found = run("export", plan, "--to", "deepspeed")
    refused(found, "sp: DeepSpeed has no sequence parallelism", "--allow-loss", code=4)
    assert "of this plan of gpt-125m" in found.stderr
    found = run("export", plan, "--to", "deepspeed", "--allow-loss", "--json")
    answer = json.loads(found.stdout)
    assert "Without what is lost both may differ: aliquot read FILE" in found.stderr
    assert json.loads(answer["text"])["zero_optimization"] == {"stage": 1}
    assert any("sequence parallelism" in text for text in answer["lost"])


def test_export_to_a_framework_that_is_not_there(plan):
    refused(run("export", plan, "--to", "megatrom"), "did you mean 'megatron'")


def test_rules_for_flax_have_a_spec_for_each_array(plan):
    found = run("export", plan, "--to", "flax")
    assert found.exit_code == 0, found.output
    scope = {}
    exec(found.stdout, scope)
    assert scope["AXIS_NAMES"] == ("data", "tensor")
    assert dict(scope["LOGICAL_AXIS_RULES"])["mlp"] == "tensor"
    from aliquot.plans import Plan, partition_specs

    specs = partition_specs(Plan.load(plan))
    assert set(scope["PARTITION_SPECS"]) == set(specs)
    for path, spec in specs.items():
        written = scope["PARTITION_SPECS"][path]
        assert tuple(written) == tuple(spec)[: len(written)]
        assert all(part is None for part in tuple(spec)[len(written) :])


def test_fsdp_for_maxtext_loses_nothing(tmp_path):
    import yaml

    path = tmp_path / "fsdp.json"
    made = run("plan", *TINY, "--method", "fsdp", "--recompute", "block", "--out", path)
    assert made.exit_code == 0, made.output
    found = run("export", path, "--to", "maxtext")
    assert found.exit_code == 0, found.output
    assert "are predicted for the plan, all of which these settings say." in found.stderr
    settings = yaml.safe_load(found.stdout)
    assert (settings["ici_fsdp_parallelism"], settings["remat_policy"]) == (8, "full")
    assert dict(settings["logical_axis_rules"])["embed"] == ["fsdp"]


def test_rules_for_maxtext_hold_the_splits_of_a_searched_plan(tmp_path):
    import yaml

    path = tmp_path / "shard.json"
    made = run("plan", *TINY, "--method", "shard", "--mesh", "4x2", "--out", path)
    assert made.exit_code == 0, made.output
    found = run("export", path, "--to", "maxtext", "--allow-loss")
    settings = yaml.safe_load(found.stdout)
    sizes = [value for name, value in settings.items() if name.startswith("ici_")]
    product = 1
    for size in sizes:
        product *= size
    assert product == 8
    assert {name for name, _ in settings["logical_axis_rules"]} >= {"embed", "mlp", "norm", "vocab"}


def test_a_model_that_is_named_is_not_changed_by_defaults_of_the_framework(tmp_path):
    path = tmp_path / "run.yml"
    path.write_text("per_device_batch_size: 1\nmax_target_length: 64\nici_fsdp_parallelism: 8\n")
    found = run("read", path, "--cluster", "8xH100", "--model", "gpt-10m", "--json")
    answer = json.loads(found.stdout)
    assert (answer["model"]["hidden_size"], answer["model"]["seq_len"]) == (384, 64)
