"""`aliquot verify` with plans for virtual CPU devices: its answer, and its refusals."""

import json

import pytest
from command_line import refused, run

from aliquot.plans import Plan

SMALL = "num_layers=1 hidden_size=32 num_heads=2 seq_len=16 vocab_size=64".split()


def plan(path, *options):
    """The answer of `plan --json`."""
    sizes = [part for size in SMALL for part in ("--set", size)]
    asked = (
        "gpt-10m --cluster 8xcpu --global-batch 8 --dtype float32 --method zero3 --json --out"
        f" {path}"
    )
    found = run("plan", *asked.split(), *sizes, *options)
    assert found.exit_code == 0, found.stderr
    return json.loads(found.stdout)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    assert plan(path)["compiled"] is None
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_answer(plan_file):
    # From one line: programs carry the places that they come from, and are kept with them.
    found, again = (run("verify", plan_file, *options) for options in (["--json"], []))
    assert found.exit_code == 0, found.stderr
    answer = json.loads(found.stdout)
    assert (answer["target"], answer["fits"], answer["num_devices"]) == ("cpu", True, 8)
    (stage,) = answer["stages"]
    assert set(stage) >= {
        "predicted_bytes",
        "compiled_bytes",
        "parts",
        "collectives",
        "unintended",
        "compile_s",
    }
    parts = stage["parts"]["compiled"]
    assert stage["compiled_bytes"] == parts["peak"]
    assert (
        parts["peak"]
        == parts["arguments"] + parts["outputs"] - parts["aliases"] + parts["temporaries"]
    )
    assert parts["arguments"] == stage["parts"]["predicted"]["arguments"]
    assert {each["kind"] for each in stage["collectives"]} >= {"all-gather", "all-reduce"}
    assert again.exit_code == 0
    assert again.stdout.startswith("Fits: compiled for 8 x cpu")
    assert "kept from an earlier run" in again.stdout and "Memory on each device" in again.stdout


def test_a_plan_is_verified_as_it_is_made(tmp_path):
    answer = plan(tmp_path / "plan.json", "--verify")
    compiled = answer["compiled"]
    assert (compiled["target"], compiled["fits"]) == ("cpu", True)
    assert any("Compiled for cpu" in note for note in answer["notes"])
    assert (
        Plan.load(tmp_path / "plan.json").compiled.peak_memory_bytes
        == compiled["peak_memory_bytes"]
        > 0
    )


def test_a_plan_that_nothing_can_compile_is_refused(tmp_path):
    asked = (
        "plan gpt-10m --cluster 2xL4 --global-batch 8 --method dp --verify --out"
        f" {tmp_path / 'plan.json'}"
    )
    refused(run(*asked.split()), "L4 cannot be compiled for")
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_a_failed_check(plan_file, tmp_path):
    text = json.loads(plan_file.read_text())
    text["prediction"]["memory_limit_bytes"] = 1000.0
    path = tmp_path / "tight.json"
    path.write_text(json.dumps(text))
    found = run("verify", path)
    assert found.exit_code == 1, found.stderr
    assert found.stdout.startswith("Does not fit: compiled for 8 x cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target", "H1000"), "did you mean 'H100'"),
        (("--model", "gpt-11m"), "there is no model 'gpt-11m'"),
        (("--model", "nowhere:factory"), "there is no module 'nowhere'"),
        (("--model", "gpt-125m"), "the plan was made for another step"),
    ],
)
def test_refusals(plan_file, options, message):
    refused(run("verify", plan_file, *options), message)


def test_a_plan_whose_function_no_file_names(plan_file, tmp_path):
    text = json.loads(plan_file.read_text())
    text["model"] = {"kind": "closure", "name": "train_step", "settings": {}}
    path = tmp_path / "closure.json"
    path.write_text(json.dumps(text))
    assert Plan.load(path).model.kind == "closure"
    refused(
        run("verify", path),
        "does not say how to make that again",
        "aliquot.verify(plan, train_step, state, batch)",
    )
    refused(run("verify", path, "--model", "gpt-10m"), "not made for a model of the zoo")
