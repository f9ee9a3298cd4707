"""Pipelines on the command line: options, refusals, the answers of `plan`, `explain`, `diff` and
`train`.
"""

import json

import pytest
from command_line import refused, run
from sample_plans import sample_pipeline, sample_plan

from aliquot.plans import SCHEDULES, Plan

MODEL = """
import jax, jax.numpy as jnp
def factory(width=16, layers=4, rows=16, normalise=0):
    width, layers, rows = int(width), int(layers), int(rows)
    def train_step(state, batch):
        def loss(params):
            x = batch["x"]
            for layer in params["layers"]:
                x = x + jnp.tanh(x @ layer["w"])
                if int(normalise):
                    x = x / jnp.sqrt(1 + jnp.mean(x**2, 0))
            return jnp.mean(x**2)
        value, grads = jax.value_and_grad(loss)(state["params"])
        return {"params": jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], grads)}, {"loss": value}
    w = jax.ShapeDtypeStruct((width, width), jnp.float32)
    batch = {"x": jax.ShapeDtypeStruct((rows, width), jnp.float32)}
    return train_step, {"params": {"layers": [{"w": w} for _ in range(layers)]}}, batch
"""
WORDS = "plan layered_mlp:factory --cluster 8xH100 --method"


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    (tmp_path / "layered_mlp.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)


def plan(options, *more):
    return run(*WORDS.split(), *options.split(), *more)


def test_a_pipeline_is_planned_as_asked(tmp_path):
    path = tmp_path / "plan.json"
    found = plan(
        "pipeshard --stages 4 --schedule gpipe --micro-batches 8 --layers 4 --json", "--out", path
    )
    assert found.exit_code == 0, found.stderr
    answer = json.loads(found.stdout)
    asked = ("num_stages", "schedule", "num_micro_batches", "num_submeshes")
    assert [answer[name] for name in asked] == [4, "gpipe", 8, 4]
    assert sorted(device for stage in answer["stages"] for device in stage["devices"]) == list(
        range(8)
    )
    assert answer["stages"][1]["layers"] and answer["stages"][1]["predicted"]["in_flight"] == 8
    made = Plan.load(path)
    assert (made.layers, made.model.name) == ("4", "layered_mlp:factory")
    parts = sum(answer[name] for name in ("compute_s", "communication_s", "gradient_s", "bubble_s"))
    assert parts - answer["hidden_s"] == pytest.approx(answer["step_time_s"])


def test_stages_are_cut_between_operators(tmp_path):
    path = tmp_path / "plan.json"
    sizes = ("hidden_size=16", "num_heads=1", "ffn_size=32", "seq_len=8", "num_layers=1")
    words = (
        "plan gpt-10m --global-batch 8 --cluster 4xH100 --method bottleneck --layers operators"
        " --stages 4 --micro-batches 2 --json"
    )
    more = [word for size in sizes for word in ("--set", size)]
    found = run(*words.split(), *more, "--out", path)
    assert found.exit_code == 0, found.stderr
    made = Plan.load(path)
    # Stages begin inside of the only block, at products with these parameters.
    assert made.layers.startswith("places:") and len(made.stages) == 4
    begins = [stage.layer_names[0] for stage in made.stages]
    assert any(name.startswith("state.params.layers[0].") for name in begins[1:]), begins
    assert "layers[0].mlp" in run("explain", path).stdout


def test_a_schedule_may_be_registered_by_the_module_of_the_model(tmp_path, monkeypatch):
    kind = "type('Mine', (type(SCHEDULES['1f1b']),), {'name': 'mine', '__slots__': ()})()"
    register = f"from aliquot.plans import SCHEDULES\nSCHEDULES['mine'] = {kind}\n"
    (tmp_path / "with_schedule.py").write_text(register + MODEL)
    words = (
        "plan with_schedule:factory --cluster 8xH100 --method pipeshard --schedule mine --stages 2"
        " --micro-batches 4"
    )
    with monkeypatch.context() as context:
        context.setitem(SCHEDULES, "mine", None)
        found = run(*words.split())
    assert found.exit_code == 0 and "2 stages" in found.stdout and "mine" in found.stdout, (
        found.stderr
    )


def test_pipeline_options_left_out_are_searched():
    found = plan("pipeshard --micro-batches auto")
    assert found.exit_code == 0, found.stderr
    assert found.stdout.startswith("layered_mlp:factory on 8xH100, by method pipeshard")


def test_a_grid(tmp_path):
    answer = json.loads(plan("grid --micro-batches 4 --json").stdout)
    assert (answer["schedule"], answer["num_micro_batches"], answer["lower_bound_s"]) == (
        "1f1b",
        4,
        None,
    )
    assert len({tuple(stage["mesh"]) for stage in answer["stages"]}) == 1


@pytest.mark.parametrize(
    "method,inter", [("pipeshard", "StageDP"), ("bottleneck", "Bottleneck"), ("grid", "Grid")]
)
def test_stages_are_split_by_blocks(method, inter, tmp_path):
    path = tmp_path / "plan.json"
    found = plan(f"{method} --micro-batches 4 --layers 2 --intra blocks", "--out", path)
    assert found.exit_code == 0, found.stderr
    made = Plan.load(path)
    if len(made.stages) > 1:
        assert made.provenance.planner == f"{inter}, each stage by blocks"
    else:
        assert "blocks" in made.provenance.planner


@pytest.mark.parametrize(
    "options",
    [
        "pipeshard --stages 2 --micro-batches 4",
        pytest.param("dp --micro-batches 2", marks=pytest.mark.slow),
    ],
)
def test_independent_semantics_allow_batch_statistics_per_micro_batch(options, tmp_path):
    more = ("--set", "normalise=1", "--out", tmp_path / "plan.json")
    refused(plan(options, *more), "does not decompose", "--micro-batch-semantics independent")
    found = plan(options, *more, "--micro-batch-semantics", "independent", "--json")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["micro_batch_semantics"] == "independent"
    # What makes the step again reads it from the plan.
    assert Plan.load(tmp_path / "plan.json").micro_batch_semantics == "independent"
    found = run("verify", tmp_path / "plan.json", "--trust-plan", "--target", "cpu", "--json")
    assert found.exit_code == 0, found.stderr
    refused(plan(options, *more, "--micro-batch-semantics", "loose"), "'loose' is not known")


def test_nothing_fits():
    found = plan("pipeshard --stages 2 --micro-batches 4 --json", "--set", "width=200000")
    assert found.exit_code == 1
    answer = json.loads(found.stdout)
    assert answer["feasible"] is False and answer["num_micro_batches"] == 4
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "dp --stages 2 --schedule gpipe",
            "--stages, --schedule: only for pipelines, and dp makes none",
        ),
        ("auto --layers 2", "--layers: only for pipelines, and auto may make none"),
        (
            "grid --schedule gpipe --stages 2",
            "--schedule: grid has a schedule of its own, 1f1b",
        ),
        ("pipeshard --mesh 4x2", "have meshes of their own"),
        ("pipeshard --schedule gpip", "did you mean 'gpipe'"),
        ("pipeshard --schedule inference", "there is no schedule 'inference'"),
        ("pipeshard --stages 0", "--stages must be at least 1, got 0"),
        ("pipeshard --micro-batches 0", "--micro-batches must be at least 1, got 0"),
        ("pipeshard --micro-batches many", "neither a number nor auto"),
        ("pipeshard --micro-batches 3", "multiple of 3"),
        ("pipeshard --stages 5 --layers 3", "--stages 5 are more than --layers 3"),
        ("pipeshard --stages 9 --micro-batches 2", "9 stages were asked for"),
        ("bottleneck --stages 9 --micro-batches 2", "9 stages were asked for"),
        ("bottleneck --mesh 4x2", "have meshes of their own"),
        ("pipeshard --layers 40 --micro-batches 2", "layers=40 were asked for"),
        ("pipeshard --layers params.layer[*] --micro-batches 2", "matches no parameter"),
        ("bottleneck --layers operator --micro-batches 2", "did you mean 'operators'"),
        ("grid --layers operators --micro-batches 2", "makes stages of equally many layers"),
        (
            "megatron:dp4,pp2 --layers operators --micro-batches 2",
            "megatron:dp4,pp2 makes stages of equally many layers",
        ),
        ("pipeshard --intra block", "--intra: there is no planner 'block': did you mean 'blocks'"),
        ("dp --intra blocks", "dp says itself how operators are split. --intra goes with shard"),
        ("pipe", "did you mean 'pipeshard'"),
    ],
)
def test_impossible_pipelines_are_refused(options, message):
    found = plan(options)
    refused(found, message)
    assert len(found.stderr.splitlines()) <= 3


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "pipeline.json"
    sample_pipeline(4).save(path)
    return path


def test_explain_writes_the_predicted_schedule(plan_file, tmp_path):
    path = tmp_path / "trace.json"
    found = run("explain", plan_file, "--trace", path)
    assert found.exit_code == 0, found.stderr
    assert "layers[3]" in found.stdout and f"is in {path}" in found.stdout
    assert "Alternatives are not priced" in found.stdout
    data = json.loads(path.read_text())
    assert len([event for event in data["traceEvents"] if event["ph"] == "X"]) == 4 * (2 * 4 + 1)
    answer = json.loads(run("explain", plan_file, "--trace", path, "--json").stdout)
    assert answer["trace_file"] == str(path) and answer["schedule"] == "1f1b"


def test_explain_without_stages_has_no_schedule_to_write(tmp_path):
    sample_plan().save(tmp_path / "plan.json")
    refused(
        run("explain", "plan.json", "--trace", "trace.json"),
        "no schedule to trace",
        "--method pipeshard",
    )
    assert not (tmp_path / "trace.json").exists()


def test_a_trace_that_cannot_be_written(plan_file):
    refused(
        run("explain", plan_file, "--trace", "no/such/trace.json"),
        "--trace 'no/such/trace.json'",
        "no folder",
    )


def test_diff_of_pipelines(plan_file, tmp_path):
    sample_pipeline(2, 8, schedule="gpipe").save(tmp_path / "other.json")
    found = run("diff", plan_file, "other.json", "--all")
    assert found.exit_code == 0, found.stderr
    for part in ("stages ", "gpipe", "micro-batches ", "stages 2-3 mesh", "bubble "):
        assert part in found.stdout


def test_a_broken_pipeline_lists_all_that_is_wrong(plan_file):
    data = json.loads(plan_file.read_text())
    data["stages"][1]["first_device"] = 0
    data["stages"][2]["first_layer"] = 3
    data["schedule"] = "1f2b"
    plan_file.write_text(json.dumps(data))
    refused(
        run("explain", plan_file),
        "no schedule '1f2b'",
        "layer 2 is in no stage",
        "devices 0-1 are in",
        "4 problems",
    )


@pytest.mark.slow
def test_training_a_pipeline(tmp_path):
    """Plans and trains a very small model on the virtual devices of this process."""
    path, text = tmp_path / "plan.json", tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 50)
    sizes = "num_layers=2 hidden_size=16 num_heads=1 ffn_size=32 seq_len=8"
    words = (
        "plan gpt-10m --cluster 8xcpu --global-batch 16 --dtype float32 --method pipeshard --stages"
        " 2 --micro-batches 2"
    )
    changes = [word for pair in sizes.split() for word in ("--set", pair)]
    found = run(*words.split(), *changes, "--out", path)
    assert found.exit_code == 0, found.stderr
    found = run(
        "train", "gpt-10m", "--data", text, "--plan", path, "--devices", 8, "--steps", 3, "--json"
    )
    assert found.exit_code == 0, found.stderr
    answer = json.loads(found.stdout)
    assert answer["steps_done"] == 3 and answer["losses"][-1] < answer["losses"][0]


def test_a_pipeline_for_other_devices_is_not_trained(plan_file, tmp_path):
    found = run(
        "train", "gpt-10m", "--data", "text.txt", "--plan", plan_file, "--steps", 1, "--devices", 4
    )
    refused(found, "it is for 8 devices (8xH100), and there are 4", "--devices 8")
