"""Sixty-one wrong inputs that a newcomer types: each is refused in at most three lines that say
what to type instead.
"""

import pytest
from command_line import refused, run

PLAN = "plan gpt-10m --cluster 8xH100 --global-batch 8"

WRONG = [
    # Models.
    ("plan gpt2 --cluster 8xH100 --global-batch 8", "`aliquot models` lists all"),
    ("plan gpt-1.4b --cluster 8xH100 --global-batch 8", "did you mean 'gpt-1.3b'"),
    ("plan llama3-7b --cluster 8xH100 --global-batch 8", "did you mean 'llama3-70b'"),
    ("plan llama-2 --cluster 8xH100 --global-batch 8", "did you mean 'llama-2-7b'"),
    ("plan gemma-7b --cluster 8xH100 --global-batch 8", "package.module:factory"),
    ("plan gpt-oss-20b --cluster 8xH100 --global-batch 8", "package.module:factory"),
    ("plan deepseek-r1 --cluster 8xH100 --global-batch 8", "package.module:factory"),
    ("plan mistral-7b --cluster 8xH100 --global-batch 8", "Give its config.json"),
    ("plan Qwen2.5-7B --cluster 8xH100 --global-batch 8", "Give its config.json"),
    ("plan --config config.json --cluster 8xH100 --global-batch 8", "cannot be read: No such"),
    ("plan train.py --cluster 8xH100 --global-batch 8", "package.module:function"),
    ("plan nothing:factory --cluster 8xH100", "there is no module 'nothing'"),
    ("plan json:nothing --cluster 8xH100", "json has no 'nothing'"),
    ("plan gpt-10m --cluster 8xH100", "needs --global-batch"),
    ("plan --cluster 8xH100 --global-batch 8", "Missing argument"),
    # Clusters.
    ("plan gpt-10m --global-batch 8", "Missing option '--cluster'"),
    (f"{PLAN[:13]} --cluster v3-256 --global-batch 8", "there is no device"),
    (f"{PLAN[:13]} --cluster 8xH1000 --global-batch 8", "did you mean 'H100'"),
    (f"{PLAN[:13]} --cluster H100x8 --global-batch 8", "such as"),
    (f"{PLAN[:13]} --cluster 8 --global-batch 8", "such as"),
    (f"{PLAN[:13]} --cluster 0xH100 --global-batch 8", "at least 1"),
    (f"{PLAN[:13]} --cluster 8xA100 --global-batch 8", "A100-40GB"),
    (f"{PLAN[:13]} --cluster cluster.toml --global-batch 8", "cluster.toml"),
    ("cluster 8xRTX4090", "there is no device"),
    # Options by the names of other tools.
    (f"{PLAN} --batch-size 8", "Type --global-batch 64"),
    (f"{PLAN} --batch 8", "Type --global-batch 64"),
    (f"{PLAN} -b 8", "Type --global-batch 64"),
    (f"{PLAN} --gpus 8", "Type --cluster 8xH100"),
    (f"{PLAN} --world-size 8", "Type --cluster 8xH100"),
    (f"{PLAN} --fsdp", "Type --method fsdp"),
    (f"{PLAN} -tp 2", "Type --method tp:2"),
    (f"{PLAN} --tensor-parallel-size 2", "Type --method tp:2"),
    (f"{PLAN} --pp 2", "Type --method pipeshard --stages 4"),
    (f"{PLAN} --ddp", "Type --method dp"),
    (f"{PLAN} --zero-stage 3", "Type --method zero2 or zero3"),
    (f"{PLAN} --gradient-accumulation-steps 4", "Type --micro-batches 4"),
    (f"{PLAN} --micro-batch-size 4", "Type --micro-batches 4"),
    (f"{PLAN} --activation-checkpointing", "Type --recompute block"),
    (f"{PLAN} --bf16", "Type --dtype bf16"),
    (f"{PLAN} --sequence-length 4096", "Type --seq-len"),
    (f"{PLAN} -o plan.json", "Type --out FILE"),
    (f"{PLAN} --model gpt-10m", "Type the model itself"),
    # Values.
    (f"{PLAN} --memory-limit 40", "write 40GiB"),
    (f"{PLAN} --memory-limit lots", "--memory-limit"),
    (f"{PLAN} --time-limit 60", "--time-limit"),
    (f"{PLAN} --method zero4", "zero3"),
    (f"{PLAN} --method tensor", "tp:8, megatron"),
    (f"{PLAN} --method tp:3", "3"),
    (f"{PLAN} --method tp=4,pp=2", "did you mean 'megatron:tp4,pp2'?"),
    (f"{PLAN} --mesh 8x", "is no mesh"),
    (f"{PLAN} --micro-batches 3", "do not divide a global batch of 8"),
    (f"{PLAN} --micro-batches some", "neither a number nor auto"),
    ("plan gpt-10m --cluster 8xA100-80GB --global-batch 8 --dtype fp8", "take --dtype bf16"),
    (f"{PLAN} --recompute full", "block"),
    (f"{PLAN} --set layers=4", "num_layers"),
    (f"{PLAN} --set num_layers", "name=value"),
    (f"{PLAN} --seq-len 0", "seq_len=0 must be at least 1"),
    (f"{PLAN} --out no/such/plan.json", "Create it first"),
    ("plan gpt-10m --cluster 8xH100 --global-batch eight", "should be a valid integer"),
    # Other verbs.
    ("explain nothing.json", "nothing.json"),
    ("size gpt-10m --global-batch 8 --device H100 --tokens 2T", "--by 30d"),
]


def test_how_many_there_are():
    assert len(dict(WRONG)) == 61


@pytest.mark.parametrize(("typed", "instead"), WRONG, ids=[typed for typed, _ in WRONG])
def test_a_newcomer_is_told_what_to_type(typed, instead, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run(*typed.split())
    # Errors of options are two lines of usage, a blank one and the answer.
    said = found.stderr.partition("\n\n")[2] if found.stderr.startswith("Usage") else found.stderr
    refused(found, instead)
    assert len(said.splitlines()) <= 3, said
    assert list(tmp_path.iterdir()) == []


def test_yaml_is_told_what_reads_it(tmp_path):
    path = tmp_path / "mega.yaml"
    path.write_text("tensor_model_parallel_size: 8\npipeline_model_parallel_size: 4\n")
    found = run("plan", "--config", path, "--cluster", "8xH100", "--global-batch", 8)
    refused(found, "is not JSON", "--method megatron:tp8,pp4", "--options FILE.toml")
