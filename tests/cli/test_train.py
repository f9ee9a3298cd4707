"""`aliquot train` and `aliquot demo`: loops, Ctrl-C, what is said at the end. A plain step stands
in for a plan's.
"""

import dataclasses
import functools
import json
import types

import pytest
from command_line import refused, run

import aliquot._api
import aliquot.planners
from aliquot.plans import Plan
from aliquot.zoo import MODELS, build

SMALL = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "num_kv_heads": 2,
    "ffn_size": 64,
    "seq_len": 16,
}


MEMORY = types.SimpleNamespace(
    argument_bytes=900, output_bytes=900, alias_bytes=890, temp_bytes=500
)


@functools.cache
def compiled(settings):
    """The first state of a model and its step, which tests share because compiling takes most of
    their time.
    """
    import jax

    workload = build(**json.loads(settings))
    return jax.jit(workload.init), jax.jit(workload.train_step)


class PlainStep:
    """Stands in for a step that runs a plan: one device, and after `stop_at` steps somebody presses
    Ctrl-C.
    """

    def __init__(self, plan, scale=1.0, stop_at=None):
        self._init, self._step = compiled(json.dumps(plan.model.settings))
        self._scale, self._stop_at, self._done = scale, stop_at, 0

    def init(self, function, *args):
        return self._init(*args)

    def __call__(self, state, batch):
        if self._done == self._stop_at:
            raise KeyboardInterrupt
        self._done += 1
        state, metrics = self._step(state, batch)
        return state, {"loss": metrics["loss"] * self._scale}

    def stats(self):
        return types.SimpleNamespace(memory=MEMORY, collectives=())


@pytest.fixture
def plain(monkeypatch):
    """Make `parallelize` give a `PlainStep` with these settings."""

    def use(**settings):
        monkeypatch.setattr(
            aliquot._api, "parallelize", lambda f, plan: PlainStep(plan, **settings), raising=False
        )
        monkeypatch.setattr(
            aliquot._api, "explain", lambda plan, *args, **kwargs: [], raising=False
        )

    return use


@pytest.fixture(autouse=True, scope="module")
def small_model():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "gpt-10m", dataclasses.replace(MODELS["gpt-10m"], **SMALL))
        yield


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 50)
    return path


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    found = run(
        "plan",
        *"gpt-10m --cluster 8xcpu --global-batch 8 --dtype float32 --method dp --out".split(),
        str(path),
    )
    assert found.exit_code == 0, found.stderr
    return path


def train(plan_file, text, *more):
    return run(
        "train", "gpt-10m", "--data", text, "--plan", plan_file, "--devices", 8, "--steps", 4, *more
    )


def test_training_shows_loss_and_speed(plan_file, text, plain):
    plain()
    found = train(plan_file, text)
    assert found.exit_code == 0, found.stderr
    assert "4 steps: loss" in found.stdout and "tokens/s on 8 devices together" in found.stdout
    assert "without compilation (median of " in found.stdout
    assert "gpt-10m: step 4/4  loss" in found.stderr and "tokens/s" in found.stderr


def test_training_as_json(plan_file, text, plain):
    plain()
    answer = json.loads(train(plan_file, text, "--json").stdout)
    assert answer["steps_done"] == 4 and len(answer["losses"]) == 4
    assert answer["losses"][-1] < answer["losses"][0]


def test_ctrl_c_says_the_last_step(plan_file, text, plain):
    plain(stop_at=2)
    found = train(plan_file, text)
    assert found.exit_code == 130
    assert "interrupted; 2 of 4 steps are done." in found.stderr
    assert "Traceback" not in found.stderr


def test_a_small_vocabulary_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    args = (
        "gpt-10m --cluster 8xcpu --global-batch 8 --dtype float32 --method dp --set vocab_size=64"
        f" --out {path}"
    )
    assert run("plan", *args.split()).exit_code == 0
    refused(train(path, text), "knows 64 tokens", "--set vocab_size=256")


def test_unreadable_data_is_refused(plan_file, tmp_path):
    refused(train(plan_file, tmp_path / "no.txt"), "cannot be read")


def test_an_unknown_model_is_refused(plan_file, text):
    args = ("--data", text, "--plan", plan_file, "--devices", 8, "--steps", 1)
    refused(run("train", "gpt-10mm", *args), "did you mean 'gpt-10m'")


@pytest.fixture
def quick(monkeypatch):
    """Spare the demo its search."""
    monkeypatch.setattr(
        aliquot.planners, "method_by_name", lambda name: aliquot.planners.DataParallel()
    )


def demo(tmp_path, text, *more):
    return run("demo", "--data", text, "--steps", 6, "--out", tmp_path / "demo.json", *more)


def test_the_demo_tells_the_whole_story(tmp_path, text, plain, quick):
    plain()
    found = demo(tmp_path, text)
    assert found.exit_code == 0, found.output
    for part in (
        "gpt-10m on 8xcpu, by method auto",
        "memory of each device at its peak",
        "loss on 8 devices   o loss on 1 device",
        "split over 8 devices, gave the same losses as one device",
        "Type next:",
        f"aliquot explain {tmp_path / 'demo.json'}",
    ):
        assert part in found.stdout, found.stdout
    # The plan is a short one: it ends where the chart begins.
    assert len(found.stdout.partition("┤")[0].splitlines()) <= 22
    assert Plan.load(tmp_path / "demo.json").model.name == "gpt-10m"


@pytest.mark.slow
def test_the_demo_as_json(tmp_path, text, plain, quick):
    plain()
    answer = json.loads(demo(tmp_path, text, "--json").stdout)
    assert answer["agrees"] is True
    assert answer["max_relative_difference"] <= 1e-4


@pytest.mark.slow
def test_the_demo_fails_where_the_runs_differ(tmp_path, text, plain, quick):
    plain(scale=1.001)
    found = demo(tmp_path, text, "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["agrees"] is False
    assert "differ by more than rounding" in found.stderr


def test_the_demo_ends_with_ctrl_c(tmp_path, text, plain, quick):
    plain(stop_at=3)
    found = demo(tmp_path, text)
    assert found.exit_code == 130
    assert "interrupted; 3 of 6 steps are done." in found.stderr


def test_a_plan_rebuilds_its_model(plan_file):
    settings = Plan.load(plan_file).model.settings
    assert build(**settings).num_parameters == build("gpt-10m", 8, dtype="float32").num_parameters
