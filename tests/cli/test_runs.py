"""`aliquot train` from planning to the end of a run: logs, checkpoints, going on."""

import dataclasses
import fcntl
import json
import math
import os
import shutil
import signal

import jax
import numpy as np
import pytest
from command_line import refused, run

from aliquot.data import Windows
from aliquot.plans import Plan
from aliquot.report import read_metrics
from aliquot.runtime import Checkpoints
from aliquot.zoo import MODELS, build

SMALL = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "ffn_size": 32,
    "vocab_size": 256,
    "seq_len": 8,
}
STEP = (
    "--global-batch 8 --dtype float64 --lr 1e-2 --warmup-steps 2 --decay cosine --min-lr 1e-3"
    " --clip-grad 1".split()
)


@pytest.fixture(autouse=True, scope="module")
def small_model():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "gpt-10m", dataclasses.replace(MODELS["gpt-10m"], **SMALL))
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 50)
    return path


def train(text, *more, steps=6):
    arguments = ("--data", text, "--devices", 8, "--steps", steps, "--log-every", 1)
    return run("train", "gpt-10m", *arguments, *more)


def losses(folder):
    return {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    options = ("--save-every", 4, "--keep", 9, "--eval-every", 3, "--eval-steps", 2)
    done = train(text, *STEP, "--method", "zero3", "--out", folder, *options)
    assert done.exit_code == 0, done.output
    return folder, done


def test_a_run_plans_trains_and_keeps_all_of_it(whole):
    folder, done = whole
    assert "no --plan: planning gpt-10m for 8xcpu first." in done.stderr
    for part in ("6 steps: loss", "waiting for data", "validation loss:", "⠒ loss"):
        assert part in done.stdout
    assert {path.name for path in folder.iterdir()} >= {"plan.json", "metrics.jsonl", "checkpoints"}
    assert Plan.load(folder / "plan.json").model.settings["learning_rate"]["steps"] == 6
    rows = read_metrics(folder)
    trained = [row for row in rows if "loss" in row]
    assert [row["step"] for row in trained] == [1, 2, 3, 4, 5, 6]
    assert trained[-1]["loss"] < trained[0]["loss"]
    rates = [row["learning_rate"] for row in trained]
    falling = [1e-3 + 9e-3 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]
    assert rates == pytest.approx([0, 5e-3, *falling])
    assert {"grad_norm", "tokens_per_s", "mfu", "predicted_step_s", "data_share"} <= {*trained[-1]}
    assert "compilation_s" in trained[0] and "step_s" not in trained[0]
    assert [row["step"] for row in rows if "validation_loss" in row] == [3, 6]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("--method dp", id="data parallel"),
        pytest.param(
            "--method pipeshard --stages 2 --micro-batches 2 --schedule 1f1b",
            id="pipeline",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_goes_on_under_another_plan_with_equal_losses(whole, text, tmp_path, method):
    folder, _ = whole
    shutil.copytree(folder / "checkpoints" / "4", tmp_path / "checkpoints" / "4")
    options = ("--eval-every", 3, "--eval-steps", 2, "--out", tmp_path)
    done = train(text, *STEP, *method.split(), *options)
    assert done.exit_code == 0, done.output
    assert f"resuming after step 4, from {tmp_path}" in done.stderr
    assert "changes here" not in done.stderr
    found, expected = losses(tmp_path), losses(folder)
    assert [*found] == [5, 6]
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step], rel=1e-12)
    here, there = (
        [row["validation_loss"] for row in read_metrics(f) if "validation_loss" in row][-1]
        for f in (tmp_path, folder)
    )
    assert here == pytest.approx(there, rel=1e-12)


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_and_alone(whole, text, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    (data,) = (checkpoints / "6" / "state" / "ocdbt.process_0" / "d").iterdir()
    data.write_bytes(data.read_bytes()[:-1])
    command = (*STEP, "--method", "zero3", "--out", tmp_path / "run")
    holder = os.open(checkpoints / ".writer", os.O_CREAT | os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    who = {"process_id": os.getppid(), "host": "elsewhere", "since": "today", "token": ""}
    os.write(holder, json.dumps(who).encode())
    refused(train(text, *command), "another run writes checkpoints", f"{os.getppid()} on elsewhere")
    os.close(holder)
    done = train(text, *command)
    assert done.exit_code == 0, done.output
    assert "checkpoint 6" in done.stderr and "damaged: 6/state/ocdbt.process_0/d/" in done.stderr
    assert "It is skipped." in done.stderr and "resuming after step 4" in done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(whole[0]), rel=1e-12)
    assert "holds all 6 steps" in train(text, *command).stderr


def test_sigterm_ends_a_run_between_steps_and_the_same_command_goes_on(
    whole, text, tmp_path, monkeypatch
):
    batch_at = Windows.batch_at

    def terminated(self, step, rows=None):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch_at(self, step, rows)

    command = (*STEP, "--method", "zero3", "--out", tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Windows, "batch_at", terminated)
        ended = train(text, *command)
    assert ended.exit_code == 143, ended.output
    assert "interrupted; 3 of 6 steps are done. Go on with the same command" in ended.stderr
    done = train(text, *command)
    assert "under the plan of" in done.stderr and "resuming after step 3" in done.stderr
    assert done.exit_code == 0, done.output
    expected = losses(whole[0])
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-12)
    again = train(text, *command)
    assert again.exit_code == 0 and "holds all 6 steps" in again.stderr
    back = train(text, *command, "--resume", 3)
    assert back.exit_code == 0, back.output
    assert "resuming after step 3" in back.stderr and "3 steps: loss" in back.stdout
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-12)


def test_resuming_where_there_is_nothing_to_resume_from(whole, text, tmp_path):
    folder, _ = whole
    command = (*STEP, "--method", "zero3", "--out", folder)
    refused(train(text, *command, "--resume", 3), "no checkpoint 3", "4, 6")
    refused(train(text, *command, "--resume", "no"), "up to step 6", "Name another folder")
    elsewhere = (*STEP, "--method", "zero3", "--out", tmp_path / "new")
    refused(train(text, *elsewhere, "--resume", tmp_path), f"--resume {tmp_path}", "no checkpoint")
    refused(
        train(text, *elsewhere, "--init-from", folder, "--resume", "3"), "leave one of them out"
    )
    refused(train(text, *STEP, "--resume", "no"), "add --out RUN")
    other = (*STEP, "--method", "dp", "--set", "hidden_size=32")
    found = train(text, *other, "--out", folder)
    refused(found, "is of another state", "[256, 16]", "[256, 32]", code=2)


def test_weights_of_another_run_begin_a_new_one(whole, text, tmp_path):
    folder, _ = whole
    begin = ("--global-batch", 8, "--dtype", "float64", "--method", "zero3", "--init-from", folder)
    done = train(text, *begin, "--json", steps=1)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["losses"][0] < losses(folder)[3]
    assert answer["measured_step_time_s"] is None and answer["measured_tokens_per_s"] is None
    refused(
        train(text, *begin, "--set", "hidden_size=32", steps=1),
        "are not those of gpt-10m",
        "is float64[256, 16] in the checkpoint and float64[256, 32] here",
    )


def test_a_copy_in_32_bits_begins_with_all_bits_of_the_weights(whole, text, tmp_path):
    begin = ("--global-batch", 8, "--method", "megatron:zero1", "--init-from", whole[0])
    # Nothing is learned: 1 + 1e-30 is 1.
    still = ("--dtype", "bf16-master", "--optimizer", "sgd", "--lr", 1e-30)
    done = train(text, *begin, *still, "--out", tmp_path, "--save-every", 1, steps=1)
    assert done.exit_code == 0, done.output
    assert done.stderr.count("beginning with the weights in") == 1
    with jax.enable_x64(True):
        made = build("gpt-10m", 8, dtype="float64")
        weights = restored(whole[0], {"params": made.init(jax.random.key(0))["params"]})["params"]
    made = build("gpt-10m", 8, dtype="bf16-master", optimizer="sgd")
    state = restored(tmp_path, made.init(jax.random.key(0)))
    for leaf, copy, rounded in zip(
        *map(jax.tree.leaves, (weights, state["opt_state"]["master"], state["params"])), strict=True
    ):
        np.testing.assert_array_equal(copy, np.asarray(leaf, "float32"))
        np.testing.assert_array_equal(rounded, np.asarray(copy).astype(rounded.dtype))
    # A run in float32 begins with the copy, not with the parameters that were rounded.
    wide = ("--global-batch", 8, "--method", "dp", "--optimizer", "sgd", "--lr", 1e-30)
    more = ("--dtype", "float32", "--save-every", 1, "--init-from", tmp_path)
    done = train(text, *wide, *more, "--out", tmp_path / "wide", steps=1)
    assert done.exit_code == 0, done.output
    made = build("gpt-10m", 8, dtype="float32", optimizer="sgd")
    wide_params = restored(tmp_path / "wide", made.init(jax.random.key(0)))["params"]
    jax.tree.map(np.testing.assert_array_equal, wide_params, state["opt_state"]["master"])


def restored(folder, like):
    return Checkpoints(folder / "checkpoints").restore(like, partly=True).state


@pytest.mark.slow
def test_weights_of_a_model_with_other_layers_begin_a_new_one_as_far_as_they_go(
    whole, text, tmp_path
):
    begin = ("--global-batch", 8, "--dtype", "float64", "--method", "dp", "--optimizer", "sgd")
    two = ("--set", "num_layers=2", "--out", tmp_path, "--save-every", 1)
    done = train(text, *begin, "--init-from", whole[0], *two, steps=1)
    assert done.exit_code == 0, done.output
    assert "begin as new: params.layers[1]" in done.stderr
    done = train(text, *begin, "--init-from", tmp_path, steps=1)
    assert done.exit_code == 0, done.output
    assert "of it left out, as gpt-10m has none such: params.layers[1]" in done.stderr


def test_text_and_split_that_do_not_fit(text, tmp_path):
    options = ("--global-batch", 8, "--method", "dp")
    refused(
        train(text, *options, "--split", "1", "--eval-every", 2),
        "for validation (--split 1 of 2100 tokens) has 0 tokens",
        "needs at least 9",
    )
    refused(train(text, *options, "--split", "1;2"), "--split '1;2' is no split")
    tokens = tmp_path / "tokens.bin"
    assert run("data", text, "--out", tokens).exit_code == 0
    tokens.write_bytes(tokens.read_bytes()[:-100])
    refused(train(tokens, *options), "cut short", "aliquot data TEXT...")
    refused(
        train(tokens, *options, "--data", text), "is a file of tokens. Make tokens of the texts"
    )


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("--method dp", id="program"),
        pytest.param(
            "--method pipeshard --stages 2 --micro-batches 2", id="pipeline", marks=pytest.mark.slow
        ),
    ],
)
def test_a_plan_takes_every_learning_rate(whole, text, tmp_path, method):
    path = tmp_path / "plan.json"
    options = "--cluster 8xcpu --global-batch 8 --dtype float64 --clip-grad 1 --out".split()
    assert run("plan", "gpt-10m", *options, path, *method.split()).exit_code == 0
    assert Plan.load(path).model.settings["learning_rate"] == 3e-4
    scheduled = [part for part in STEP if part not in ("--global-batch", 8, "8")]
    done = train(text, "--plan", path, *scheduled, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert "operators" not in done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(whole[0]), rel=1e-12)
    # The plan of a run with a schedule serves one without, and another schedule.
    path = tmp_path / "run" / "plan.json"
    done = train(text, "--plan", path, "--lr", 1e-3, "--out", tmp_path / "constant", steps=2)
    assert done.exit_code == 0, done.output
    assert Plan.load(tmp_path / "constant" / "plan.json").model.settings["learning_rate"] == 1e-3
    assert {row.get("learning_rate") for row in read_metrics(tmp_path / "constant")} <= {1e-3}
    other = "--lr 1e-3 --warmup-steps 1 --decay linear --json".split()
    done = train(text, "--plan", path, *other, "--out", tmp_path / "other", steps=2)
    assert done.exit_code == 0, done.output
    assert read_metrics(tmp_path / "other")[-1]["learning_rate"] == pytest.approx(1e-3)


def test_a_run_of_more_steps_or_another_rate_goes_on_under_its_plan(whole, text, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    other = (*STEP, "--lr", 5e-3, "--method", "dp", "--out", tmp_path / "run")
    done = train(text, *other, steps=7)
    assert done.exit_code == 0, done.output
    assert "under the plan of" in done.stderr and "resuming after step 6" in done.stderr
    assert "note: the step changes here: learning_rate was" in done.stderr
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert plan.method == Plan.load(whole[0] / "plan.json").method
    assert plan.model.settings["learning_rate"]["steps"] == 7


def test_a_plan_takes_no_other_operators(text, tmp_path):
    path = tmp_path / "plan.json"
    options = "--cluster 8xcpu --global-batch 8 --dtype float32 --method dp --out".split()
    assert run("plan", "gpt-10m", *options, path).exit_code == 0
    found = train(text, "--plan", path, "--clip-grad", 1, "--optimizer", "sgd", "--lr", 1)
    assert "learning_rate" not in found.stderr
    refused(
        found,
        "with another update",
        "optimizer is sgd, in the plan adamw",
        "clip_norm is 1.0, in the plan none",
        "leave --plan out",
    )
    refused(
        train(text, "--plan", path, "--global-batch", 16, "--seq-len", 4, "--method", "dp"),
        "--global-batch says 16, the plan 8",
        "seq_len=4 is asked for",
        "--method says how to plan",
    )


def test_impossible_options_are_listed(text):
    refused(
        train(text, "--save-every", 0, "--keep", 0, "--log-every", 0),
        "--save-every must be at least 1, got 0; --keep must be",
    )
    options = ("--global-batch", 8, "--method", "dp")
    refused(train(text, *options, "--min-lr", 1e-5), "add --decay cosine")
    refused(train(text, *options, "--warmup-steps", "1.5"), "neither a number of steps nor a share")
    refused(train(text, *options, "--warmup-steps", 9, "--decay", "linear"), "leaves nothing")
    refused(train(text, "--cluster", "8xH100", *options, "--devices", 4), "add --devices 8")
    wrong = ("--min-lr", 1e-5, "--decay-steps", 0)
    refused(train(text, *options, *wrong), "--min-lr 1e-05 is where", "must be at least 1, got 0")
    typed = "--lr 1e-3 --decay=cosine --min-lr 1e-4 --warmup_steps 2 --decay-steps 9 --steps 9"
    for verb in (("plan", "gpt-10m", "--cluster", "8xcpu"), ("aceso", "import", "c.json")):
        refused(
            run(*verb, *typed.split()),
            "no option --lr or --decay or --min-lr or --warmup_steps or --decay-steps or --steps.",
            "a plan serves every learning rate and schedule; aliquot train takes them",
        )
