"""Reading files of settings: their syntax, what is left open, and what is refused."""

import json

import msgspec
import pytest
from sample_plans import STAGE, sample_plan

from aliquot.core import InputError
from aliquot.interop.frameworks import export_plan, model_named, read_settings, tables
from aliquot.interop.frameworks._megatron import layout_text, parse_layout
from aliquot.interop.frameworks._syntax import Unknown, read_arguments, read_text
from aliquot.plans import AxisUse

SCRIPT = r"""#!/bin/bash
export GPUS=8
NODES=${SLURM_NNODES:-"2"}  # as Slurm says
TP=4
WORLD=$(($GPUS*$NODES))
DTYPE="fp8"
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 1024 --num-attention-heads 16
    # --hidden-size 4096
    --seq-length $((2 * 1024))
)
EXTRA="--swiglu --normalization RMSNorm"
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=("--fp8-format hybrid")
else
    DTYPE_ARGS+=("--fp16")
fi
if [ -n "${WANDB_API_KEY}" ]; then
    MODEL_ARGS+=(--wandb-project x)
fi
torchrun --nproc_per_node $GPUS pretrain_gpt.py \
    ${MODEL_ARGS[@]} ${DTYPE_ARGS[@]} $EXTRA \
    --tensor-model-parallel-size $TP --micro-batch-size 2 \
    --global-batch-size ${GBS:-$((WORLD * 4))} --data-path $DATA
echo "done --pipeline-model-parallel-size is not used"
"""


def _written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def _values(text):
    return {setting.name: setting.value for setting in text.settings}


def test_a_shell_script(tmp_path):
    text = read_text(_written(tmp_path, "run.sh", SCRIPT))
    values = _values(text)
    expected = {
        "num-layers": 24,
        "hidden-size": 1024,
        "seq-length": 2048,
        "swiglu": True,
        "normalization": "RMSNorm",
        "fp8-format": "hybrid",
        "tensor-model-parallel-size": 4,
        "global-batch-size": 64,
        "nproc_per_node": 8,
        "wandb-project": "x",
    }
    assert {name: values.get(name) for name in expected} == expected
    assert "fp16" not in values
    assert values["data-path"] == Unknown("$DATA")
    assert next(s.place for s in text.settings if s.name == "num-layers") == "run.sh:8"


def test_variables_of_a_script_can_be_given(tmp_path):
    path = _written(tmp_path, "run.sh", SCRIPT)
    found = read_settings([path, "TP=2", "GBS=32"], num_devices=16)
    assert (found.settings.tensor, found.settings.global_batch) == (2, 32)


def test_a_degree_that_the_file_leaves_open_is_refused(tmp_path):
    path = _written(tmp_path, "run.sh", "run --num-layers 4 --tensor-model-parallel-size ${TP}\n")
    with pytest.raises(InputError, match=r"tensor-model-parallel-size .run.sh:1. = \$\{TP\}"):
        read_settings([path], num_devices=8)
    assert read_settings([path, "TP=8"], num_devices=8).settings.tensor == 8


def test_a_list_of_arguments():
    arguments = ["--tensor-model-parallel-size=8", "--num_layers", "4", "--bf16"]
    assert _values(read_arguments(arguments))["bf16"] is True
    found = read_settings(arguments, num_devices=64)
    assert (found.framework, found.settings.name) == ("megatron", "megatron:dp8,tp8")
    assert found.model["num_layers"] == 4 if "num_layers" in found.model else True


RECIPE = '''
import os
os.abort()  # Nothing of this may run.
LAYERS = 8

def _base():
    cfg = outside_pretrain_config()
    cfg.model.pipeline_model_parallel_size = 2
    cfg.train.global_batch_size = 64 * 2
    return cfg

def llama3_8b_pretrain_config():
    """A recipe."""
    cfg = _base()
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.num_layers = LAYERS
    cfg.model.unheard_of = 3
    cfg.train.micro_batch_size = int(os.environ["MBS"])
    tune(cfg)
    return cfg
'''


def test_a_recipe_is_read_and_not_run(tmp_path):
    path = _written(tmp_path, "recipe.py", RECIPE.replace('int(os.environ["MBS"])', "2"))
    found = read_settings([path], num_devices=64)
    assert found.settings.name == "megatron:dp8,tp4,pp2,zero1"
    assert (found.settings.micro_batch, found.settings.global_batch) == (2, 128)
    assert found.model == {"like": "llama3-8b", "num_layers": 8}
    assert any("outside_pretrain_config is not in recipe.py" in text for text in found.assumed)
    assert any("tune(cfg): what tune changes is not read" in text for text in found.assumed)
    assert any(text.startswith("model.unheard_of (recipe.py:") for text in found.unknown)
    with pytest.raises(InputError, match="micro_batch_size .* the file does not give its value"):
        read_settings([_written(tmp_path, "open.py", RECIPE)], num_devices=64)


def test_several_recipes_are_listed(tmp_path):
    path = _written(tmp_path, "two.py", RECIPE + "\ndef other():\n    return _base()\n")
    with pytest.raises(InputError, match="llama3_8b_pretrain_config, line(.|\n)*--recipe NAME"):
        read_settings([path], num_devices=64)
    assert read_settings([path], num_devices=64, recipe="other").settings.pipeline == 2
    with pytest.raises(InputError, match="no function 'othr': did you mean 'other'"):
        read_settings([path], recipe="othr")


def test_a_setting_of_another_version_is_named(tmp_path):
    text = (
        "[model]\nname = 'llama3'\nflavor = '8B'\n"
        "[training]\nnum_tokens_per_train_step = 8\nseq_len = 64\n"
    )
    found = read_settings([_written(tmp_path, "a.toml", text)], num_devices=8)
    assert found.unknown == (
        "training.num_tokens_per_train_step (a.toml:5): belongs to torchtitan main"
        " 2026-08; what it does is not priced",
    )


def test_deepspeed_with_a_model_and_overrides(tmp_path):
    settings = {
        "zero_optimization": {"stage": 3, "mics_shard_size": 4},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
    }
    path = _written(tmp_path, "ds.json", json.dumps(settings, indent="\t"))
    model = _written(tmp_path, "config.json", json.dumps({"model_type": "llama"}))
    found = read_settings([path, model], num_devices=16)
    assert found.model == {"config": str(model)}
    assert (found.settings.name, found.settings.global_batch) == ("hsdp:4", 128)


@pytest.mark.parametrize(
    ("name", "text", "devices", "hosts"),
    [
        ("a.sh", "torchrun --nnodes=$N --nproc_per_node $EACH a.py --num-layers 8\n", None, None),
        ("a.sh", "N=4\ntorchrun --nnodes $N --nproc-per-node 8 a.py --num-layers 8\n", 32, 4),
        ("a.sh", "torchrun --nproc_per_node 4 a.py --num-layers 8\n", 4, 1),
        ("a.sh", "torchrun --nproc_per_node gpu a.py --num-layers 8\n", None, None),
        ("a.yaml", "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 16\n", 16, 2),
    ],
)
def test_devices_of_the_run(tmp_path, name, text, devices, hosts):
    path = _written(tmp_path, name, text)
    found = read_settings([path], num_devices=64)
    assert (found.num_devices, found.num_hosts) == (devices, hosts)
    remark = f"the run has 64 devices; the files say {devices}"
    assert (remark in found.assumed) == (devices is not None)


def test_a_slip_of_the_pen_is_told_what_it_may_stand_for(tmp_path):
    settings = {"zero_optimisation": {"stage": 3}, "train_batch_size": 64, "my_own_setting": 1}
    path = _written(tmp_path, "ds.json", json.dumps(settings))
    misspelt, own = read_settings([path], num_devices=8).unknown
    assert misspelt.endswith("is not priced. Did you mean zero_optimization.stage?")
    assert own.endswith("is not priced")
    text = "run --tensor_model_paralel-size 4 --num-layers 8"
    (misspelt,) = read_settings([_written(tmp_path, "a.sh", text)], num_devices=8).unknown
    assert misspelt.endswith("Did you mean tensor-model-parallel-size?")


def test_deepspeed_with_comments(tmp_path):
    """DeepSpeed reads its files as Hjson."""
    text = """{ // ZeRO
        "train_batch_size": 64, /* of all
           ranks */ "steps_per_print": 5,
        "zero_optimization": {
            "stage": 3,  # the whole state
            "offload_param": {"device": "cpu", "nvme_path": "/*not//a comment*/"},
        },
    }"""
    found = read_settings([_written(tmp_path, "ds.json", text)], num_devices=8)
    assert (found.settings.name, found.settings.global_batch) == ("fsdp", 64)
    assert "offload_param.device (ds.json:6) = cpu" in found.lost[0]
    assert not found.unknown


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "a: &a [1]\n" + "b: [" + ",".join(["*a"] * 30000) + "]", "more than"),
        ("a.yaml", "- 1\n- 2\n", "holds no names"),
        ("a.yaml", "a: [1", "is not YAML"),
        ("a.json", "{,", "is not JSON"),
        (
            "a.json",
            '{\n"a": 1,\n"b" 2}',
            "a.json is not JSON: line 3: while parsing a flow mapping",
        ),
        ("a.json", "{" + '"/*' * 100_000, "is not JSON"),
        ("a.toml", "a = ", "is not TOML"),
        ("a.py", "def (", "is not Python"),
        ("a.py", "x = 1\n", "no settings of a known framework"),
        ("a.sh", "ls -l\n", "no settings of a known framework"),
        ("a.sh", "run --tensor-model-parallel-size 0", "write 1 or more"),
        ("a.sh", "run --tensor-model-parallel-size two", "write 1 or more"),
        (
            "a.sh",
            "run --num-layers 8 --hidden-size 8 --pipeline-model-parallel-size 2"
            ' --pipeline-model-parallel-layout "Ett|t|tL"',
            "exclude|write a stage for each",
        ),
        (
            "a.yaml",
            "distributed_type: FSDP\nparallelism_config:\n  parallelism_config_cp_size: 2\n"
            "  parallelism_config_sp_size: 2\n",
            "exclude each other",
        ),
        ("a.yaml", "ici_fsdp_parallelism: -1\nici_tensor_parallelism: -1\n", "only one can be"),
        ("a.yaml", "per_device_batch_size: 0.3\nici_fsdp_parallelism: 8\n", "cannot be split"),
        ("a.json", '{"zero_optimization": {"stage": 7}}', "write 0, 1, 2 or 3"),
        (
            "a.json",
            '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4,'
            ' "gradient_accumulation_steps": 4}',
            "train_batch_size .a.json:1. = 8 is not",
        ),
    ],
)
def test_bad_files_are_refused_in_words(tmp_path, name, text, message):
    with pytest.raises(InputError, match=message):
        read_settings([_written(tmp_path, name, text)], num_devices=8)


def test_all_faults_at_once(tmp_path):
    text = "run --tensor-model-parallel-size 0 --micro-batch-size -1 --recompute-granularity some"
    with pytest.raises(InputError) as refused:
        read_settings([_written(tmp_path, "a.sh", text)], num_devices=8)
    assert "3 problems" in str(refused.value)


def test_a_file_that_is_missing():
    with pytest.raises(InputError, match="nowhere.sh cannot be read"):
        read_settings(["nowhere.sh"])


@pytest.mark.parametrize("layers", [(2, 2, 1), (0, 3, 4), (1, 5)])
def test_layouts_of_pipelines_read_what_they_write(layers):
    assert parse_layout(layout_text(layers)) == layers


@pytest.mark.parametrize("name", ["debugmodel", "", "llama", "llama3_debugmodel_float8"])
def test_models_without_a_name_of_the_zoo(name):
    assert "like" not in model_named(name)


def test_torchtitan_takes_a_layer_from_the_first_and_the_last_stage(tmp_path):
    text = (
        "[model]\nname = 'llama3'\nflavor = '8B'\n[parallelism]\npipeline_parallel_degree = 4\n"
        "pipeline_parallel_schedule = '1F1B'\n"
    )
    path = _written(tmp_path, "a.toml", text)
    found = read_settings([path], num_devices=8, layers_of=lambda model: 30)
    assert found.settings.stage_layers == (7, 8, 8, 7)
    assert any("less_layers = 1, the default" in text for text in found.assumed)


MEGATRON = ["--num-layers", "14", "--hidden-size", "64", "--pipeline-model-parallel-size", "4"]
OF_EMBEDDING = "--account-for-embedding-in-pipeline-split"
OF_LOSS = "--account-for-loss-in-pipeline-split"


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        ([OF_EMBEDDING, OF_LOSS], (3, 4, 4, 3)),
        ([OF_EMBEDDING, "--num-layers", "15"], (3, 4, 4, 4)),
        ([OF_LOSS, "--num-layers", "7", "--num-virtual-stages-per-pipeline-rank", "2"], None),
    ],
)
def test_megatron_counts_embedding_and_loss_as_layers(more, layers):
    found = read_settings([*MEGATRON, *more], num_devices=8)
    assert found.settings.stage_layers == (layers or (1,) * 7 + (0,))
    with pytest.raises(InputError, match="13 layers and 1 for embedding and loss|are no multiple"):
        read_settings([*MEGATRON, *more, "--num-layers", "12"], num_devices=8)


def test_no_setting_is_in_two_lists_of_a_table():
    for table in tables():
        names = [*table.layout, *table.model, *table.changes]
        assert len(names) == len(set(names)), table.title
        # A pattern may cover a group of which some are read.
        assert [name for name in table.changes if name in table.harmless] == []
        assert set(table.defaults) <= {*table.layout, *table.model}


def test_a_searched_plan_says_by_which_degrees_it_is_written_and_what_they_leave_out():
    mixed = AxisUse(reads={"examples": 0.93, "pieces": 0.07}, batch=("examples",))
    parallelism = {"x": mixed, "y": AxisUse(reads={"pieces": 1.0})}
    stage = msgspec.structs.replace(STAGE, parallelism=parallelism)
    splits, axis, *_ = export_plan(sample_plan(stages=(stage,)), "megatron").lost
    assert splits.endswith(
        "are the framework's own of dp4, tp2, cp1, ep1, pp1, vpp1 and ZeRO stage 3"
    )
    assert (
        "data parallelism for 93% of the parameters' bytes, and tensor parallelism for 7%" in axis
    )
