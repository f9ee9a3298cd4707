"""Aceso's configurations of T5s as plans, and the reverse."""

import json

import pytest
from command_line import refused, run
from interop.test_aceso_plans import (
    attention_finer,
    check_equal,
    configuration,
    degrees,
    first_layers_again,
)

from aliquot import Plan
from aliquot.interop.aceso import built_in_chains, make_chain

SHAPE = [
    "hidden_size=32",
    "num_heads=4",
    "head_size=8",
    "ffn_size=64",
    "vocab_size=64",
    "num_layers=2",
]
SHAPE += ["seq_len=16", "target_len=8"]
TINY = [
    "t5-770m",
    "--cluster",
    "8xcpu",
    "--dtype",
    "float64",
    *(part for s in SHAPE for part in ("--set", s)),
]
NAMES = {
    n: [o.name for o in make_chain(built_in_chains()["t5"], {"num_layers": n}).operators]
    for n in (1, 2)
}
SIZES = {
    "num_layers": 2,
    "encoder_seq_length": 16,
    "decoder_seq_length": 8,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
}
IMPORTED = {
    "uniform": [(29, 4, degrees(2)), (44, 4, degrees(4))],
    # One layer on each side. The cut is inside that of the decoder, before its second attention.
    "mixed, recomputed": [(24, 4, attention_finer), (15, 4, degrees(2, again=1))],
    "cut in both halves": [(12, 2, degrees(1)), (26, 2, degrees(2)), (35, 4, first_layers_again)],
}
QUICK = {"mixed, recomputed"}


def imported(folder, stages, **changes):
    (num_layers,) = (n for n in NAMES if len(NAMES[n]) == sum(count for count, _, _ in stages))
    sizes = {**SIZES, "num_layers": num_layers}
    config = configuration(
        folder / "config.json",
        stages,
        names=NAMES[num_layers],
        model_name="t5",
        **sizes | changes,
    )
    model = [f"num_layers={num_layers}" if part == "num_layers=2" else part for part in TINY]
    return run("aceso", "import", config, "--model", *model, "--out", folder / "plan.json")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in IMPORTED],
)
def test_configurations_of_t5_come_back(tmp_path, name):
    done = imported(tmp_path, IMPORTED[name])
    assert done.exit_code == 0, done.output
    plan = Plan.load(tmp_path / "plan.json")
    if name == "mixed, recomputed":
        assert plan.stages[1].recompute == "operators"
        assert any(entry.recompute for entry in plan.stages[1].interior)
    done = run("aceso", "export", tmp_path / "plan.json", "--out", tmp_path / "again.json")
    assert done.exit_code == 0, done.output
    before, after = (json.loads((tmp_path / f).read_text()) for f in ("config.json", "again.json"))
    for key in ("model_name", "num_gpus", "num_ops_in_each_stage", "algo_of_each_op", *SIZES):
        assert before[key] == after[key], key
    assert before["model_parallel_size_of_each_op"] == after["model_parallel_size_of_each_op"]


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPORTED)
def test_configurations_of_t5_run_as_the_plain_step(tmp_path, name):
    done = imported(tmp_path, IMPORTED[name])
    assert done.exit_code == 0, done.output
    check_equal(Plan.load(tmp_path / "plan.json"))


def test_sizes_that_differ_are_said_by_their_options(tmp_path):
    done = imported(tmp_path, IMPORTED["uniform"], model_size="S")
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "decoder_seq_length": 4,
        "kv_channels": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(
        run(
            "aceso",
            "import",
            tmp_path / "config.json",
            "--model",
            *TINY,
            "--out",
            tmp_path / "other.json",
        ),
        "decoder_seq_length is 4, and the model's 8: add --set target_len=4",
        "kv_channels is 16, and the model's 8: add --set head_size=16",
    )
