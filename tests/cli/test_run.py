"""A plan made, written, read, and trained with on 8 virtual devices, by the command line alone."""

import json

import pytest
from command_line import refused, run

SMALL = "num_layers=1 hidden_size=32 num_heads=2 seq_len=16".split()


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    sizes = [part for size in SMALL for part in ("--set", size)]
    asked = f"gpt-10m --cluster detect --global-batch 8 --dtype float32 --method zero3 --out {path}"
    found = run("plan", *asked.split(), *sizes)
    assert found.exit_code == 0, found.stderr
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 50)
    return path


@pytest.mark.slow
def test_training_as_planned(plan_file, text):
    args = ("--data", text, "--plan", plan_file, "--devices", 8, "--steps", 5)
    found = run("train", "gpt-10m", *args, "--json")
    assert found.exit_code == 0, found.stderr
    losses = json.loads(found.stdout)["losses"]
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_a_plan_for_another_model_names_the_first_path_that_differs(plan_file, text):
    args = ("--data", text, "--plan", plan_file, "--devices", 8, "--steps", 1)
    refused(
        run("train", "gpt-125m", *args),
        "not for gpt-125m",
        "input `state.opt_state[0].mu.embed.embedding`",
    )


def test_explain_prices_alternatives(plan_file):
    found = run("explain", plan_file, "--json")
    assert found.exit_code == 0, found.stderr
    data = json.loads(found.stdout)
    assert data["alternatives"]
    assert "not priced" not in found.stderr


@pytest.mark.slow
def test_the_demo(tmp_path):
    found = run("demo", "--steps", 4, "--out", tmp_path / "plan.json", "--json")
    assert found.exit_code == 0, found.stderr
    answer = json.loads(found.stdout)
    assert answer["max_relative_difference"] <= 1e-4
    state = answer["predicted_and_compiled"]["memory"][0]
    assert state["predicted_bytes"] == state["compiled_bytes"]
