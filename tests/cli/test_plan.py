"""`aliquot plan` with real searches of small models: its answer, its refusals, and how Ctrl-C ends
it.
"""

import json

import pytest
from command_line import TINY, refused, run

from aliquot.plans import Plan

KEYS = {
    "method",
    "feasible",
    "mesh",
    "step_time_s",
    "peak_memory_bytes",
    "lower_bound_s",
    "gap",
    "search_s",
    "trace_s",
    "plan_s",
    "num_stages",
    "num_micro_batches",
    "schedule",
    "stages",
}


@pytest.fixture
def factory(tmp_path, monkeypatch, request):
    """A module of the user's own with the given source; returns its name."""

    def write(source):
        name = f"own_{abs(hash((request.node.name, source))) % 10**8}"
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.chdir(tmp_path)
        return f"{name}:factory"

    return write


def test_json_is_the_only_output():
    found = run("plan", *TINY, "--method", "dp", "--json")
    assert found.exit_code == 0, found.stderr
    answer = json.loads(found.stdout)
    assert set(answer) >= KEYS
    assert answer["plan_s"] >= answer["trace_s"] + answer["search_s"]
    assert (answer["feasible"], answer["method"], answer["mesh"], answer["num_stages"]) == (
        True,
        "dp",
        [8],
        1,
    )


def test_the_file_is_the_plan(tmp_path):
    path = tmp_path / "plan.json"
    found = run("plan", *TINY, "--method", "zero3", "--out", path)
    assert found.exit_code == 0, found.stderr
    plan = Plan.load(path)
    assert plan.method == "zero3"
    assert plan.model.settings["overrides"]["num_layers"] == 2
    assert plan.model.settings["dtype"] == "bf16"
    # The file does not say how long the search took.
    lines = found.stdout.splitlines()
    assert [line for line in lines if "planned in" not in line][:-2] == str(plan).splitlines()
    assert str(path) in found.stdout and "state.params.layers" not in found.stdout


def test_a_mesh_of_ones_own():
    answer = json.loads(run("plan", *TINY, "--method", "shard", "--mesh", "4x2", "--json").stdout)
    assert answer["mesh"] == [4, 2]
    assert answer["lower_bound_s"] <= answer["step_time_s"]


def test_float16_where_it_is_faster(tmp_path):
    path = tmp_path / "plan.json"
    args = [arg.replace("8xH100", "8xV100-32GB") for arg in TINY]
    assert run("plan", *args, "--method", "dp", "--out", path).exit_code == 0
    settings = Plan.load(path).model.settings
    assert (settings["dtype"], settings["loss_scaling"]) == ("float16", "dynamic")


def test_no_feasible_plan_is_an_answer(tmp_path):
    path = tmp_path / "plan.json"
    args = (
        "plan",
        "gpt-175b",
        "--cluster",
        "2xL4",
        "--global-batch",
        2,
        "--scan",
        "--method",
        "dp",
        "--out",
        path,
    )
    found = run(*args, "--json")
    assert found.exit_code == 1
    answer = json.loads(found.stdout)
    assert set(answer) >= KEYS
    assert answer["feasible"] is False
    assert answer["peak_memory_bytes"] > answer["memory_limit_bytes"]
    assert "smallest found" in found.stderr
    assert not path.exists()


@pytest.mark.parametrize("batch", [3, 12])
def test_a_batch_that_the_devices_do_not_divide(batch):
    args = [str(batch) if arg == "8" else arg for arg in TINY]
    refused(run("plan", *args, "--method", "dp"), str(batch))


GOOD = """
import jax, jax.numpy as jnp
def factory(width=16):
    def train_step(state, batch):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grad}, {"loss": loss}
    state = {"w": jax.ShapeDtypeStruct((width, width), jnp.float32)}
    return train_step, state, {"x": jax.ShapeDtypeStruct((8, width), jnp.float32)}
"""


def test_the_largest_batch_of_a_factory(factory):
    asked = ("--cluster", "4xH100", "--method", "dp", "--max-batch", "--memory-limit", "20KiB")
    refused(run("plan", factory(GOOD), *asked), "decides its batch", "argument global_batch")
    taking = GOOD.replace("(width=16)", "(global_batch, width=16)").replace(
        "(8, w", "(global_batch, w"
    )
    found = run("plan", factory(taking), *asked, "--json")
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    assert answer["multiple_of"] == 4 and answer["largest_batch"] > 4


def test_a_factory(factory, tmp_path):
    name = factory(GOOD.replace("state = ", "print('hello from the factory'); state = "))
    args = (
        "plan",
        name,
        "--cluster",
        "8xH100",
        "--method",
        "dp",
        "--out",
        tmp_path / "plan.json",
        "--set",
        "width=32",
    )
    found = run(*args, "--json")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["model"] == name
    assert "hello from the factory" in found.stderr
    model = Plan.load(tmp_path / "plan.json").model
    assert (model.kind, model.name, model.settings) == ("factory", name, {"width": 32})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def factory(:", "cannot be imported: SyntaxError"),
        ("import not_installed_anywhere", "cannot be imported: ModuleNotFoundError"),
        ("def factory():\n    return 1 / 0", "fails: ZeroDivisionError: division by zero"),
        ("def factory():\n    return 1, 2, 3", "must return (train_step, state, batch)"),
        ("def factory():\n    return 5", "got int 5"),
        ("factory = 7", "is int 7, not a function"),
        (GOOD.replace('batch["x"] @ w', 'batch["y"] @ w'), "KeyError: 'y'"),
        (GOOD.replace("jnp.mean(", "float("), "fails while it is traced: "),
        (GOOD.replace('{"loss": loss}', '{"loss": "low"}'), "[1].loss is a str"),
        (GOOD.replace("(8, width)", "(6, width)"), "6"),
    ],
)
def test_errors_of_the_users_own(factory, source, message):
    found = run("plan", factory(source), "--cluster", "8xH100", "--method", "dp")
    refused(found, message)
    assert len(found.stderr.splitlines()) <= 6, found.stderr


def test_another_batch_than_the_factorys(factory):
    refused(
        run("plan", factory(GOOD), "--cluster", "8xH100", "--global-batch", 16),
        "made a batch of 8",
        "says 16",
    )


TOLD = (
    GOOD.replace("width=16", "global_batch, width: int = 16, rate=0.1, name='', **others")
    .replace("(8, width)", "(global_batch, width)")
    .replace(
        "return train_step", "print([global_batch, width, rate, name, others]); return train_step"
    )
)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--global-batch", 16), "[16, 16, 0.1, '', {}]"),
        (("--set", "global_batch=24"), "[24, 16, 0.1, '', {}]"),
        (
            ("--global-batch", 16, "--set", "width=32", "--set", "rate=1e-2"),
            "[16, 32, 0.01, '', {}]",
        ),
        (
            ("--global-batch", 16, "--set", "name=7", "--set", "deep=True", "--set", "kind=a"),
            "[16, 16, 0.1, '7', {'deep': True, 'kind': 'a'}]",
        ),
    ],
)
def test_a_factory_is_told_the_batch_and_numbers(factory, tmp_path, options, told):
    name, out = factory(TOLD), tmp_path / "plan.json"
    args = ("--cluster", "8xH100", "--method", "dp", "--out", out)
    found = run("plan", name, *args, *options)
    assert found.exit_code == 0, found.stderr
    assert told in found.stderr + found.stdout
    # What the plan file keeps makes the same step again.
    again = run("explain", out, "--model", name)
    assert again.exit_code == 0 and told in again.stderr + again.stdout, again.stderr


def test_what_an_argument_of_a_factory_does_not_take(factory):
    name = factory(TOLD.replace(", **others", ""))
    args = ("plan", name, "--cluster", "8xH100", "--method", "dp")
    found = run(*args, "--set", "width=wide", "--set", "rate=fast", "--set", "widht=2")
    refused(found, "width='wide' is not a whole number", "rate='fast' is not a number", "add --set")
    assert "'widht'" in found.stderr and "name;" in found.stderr
    both = run(*args, "--global-batch", 8, "--set", "global_batch=8")
    refused(both, "--global-batch and --set global_batch=... say the same thing")


def test_tokens_that_a_batch_hides_are_said(factory, tmp_path):
    name, out = factory(GOOD), tmp_path / "plan.json"
    args = ("--cluster", "8xH100", "--method", "dp", "--tokens-per-step", "4096")
    found = json.loads(run("plan", name, *args, "--out", out, "--json").stdout)
    assert found["tokens_per_s"] == pytest.approx(4096 / found["step_time_s"])
    assert "tokens/s" in run("explain", out, "--no-alternatives").stdout
    compared = run("compare", name, *args[:2], *args[4:], "--methods", "dp")
    assert compared.exit_code == 0 and "tokens/s" in compared.stdout
    refused(run("plan", *TINY, *args[2:]), "--tokens-per-step is for factories")
    refused(run("plan", name, *args[:5], "0"), "--tokens-per-step")


def test_options_that_only_the_zoo_has(factory):
    refused(
        run("plan", factory(GOOD), "--cluster", "8xH100", "--dtype", "bf16", "--scan"),
        "--dtype, --scan",
    )


@pytest.mark.parametrize("complete", [True, False])
def test_ctrl_c_keeps_the_best_so_far(complete, tmp_path, monkeypatch):
    import aliquot._variants
    from aliquot.planners import Interrupted

    path = tmp_path / "plan.json"
    whole = aliquot._variants.plan_graph

    def stop(*args, **kwargs):
        error = Interrupted(None)
        error.plan = whole(*args, **kwargs) if complete else None
        raise error

    monkeypatch.setattr(aliquot._variants, "plan_graph", stop)
    found = run("plan", *TINY, "--method", "dp", "--out", path)
    assert found.exit_code == 130
    assert "interrupted" in found.stderr
    assert path.exists() == complete
    assert ("best plan so far" in found.stderr) == complete


@pytest.mark.parametrize(
    ("limit", "fault"),
    [("0s", "must be positive"), ("soon", "is not a time"), ("-1s", "--time-limit")],
)
def test_a_time_limit_that_cannot_be_kept_is_refused(limit, fault):
    found = run("plan", *TINY, f"--time-limit={limit}")
    assert found.exit_code == 2 and fault in found.stderr


def test_a_time_limit_that_ends_before_any_plan_says_so():
    found = run("plan", *TINY, "--time-limit", "1us", "--json")
    assert found.exit_code == 1 and "whether one fits is not known" in found.stderr
    assert "error: gpt-125m: No plan was complete" in found.stderr


SMALL = """
import jax, jax.numpy as jnp

def factory():
    shape = jax.ShapeDtypeStruct
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)
    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), value
    return step, [shape((1024, 1024), jnp.float32)] * 3, shape((256, 1024), jnp.float32)
"""


def test_plans_say_which_hosts_are_idle(factory, tmp_path):
    name, path = factory(SMALL), tmp_path / "plan.json"
    made = run("plan", name, "--cluster", "2x4xH100", "--out", path, "--json")
    assert made.exit_code == 0, made.stderr
    plan = Plan.load(path)
    assert json.loads(made.stdout)["idle_hosts"] == plan.idle_hosts == 1
    shown, explained = (
        run("explain", path, "--no-alternatives", *more).stdout for more in ((), ("--json",))
    )
    assert json.loads(explained)["idle_hosts"] == 1
    for text in (str(plan), shown):
        assert "1 host, 4 devices, is idle: the step is faster on 1 host" in " ".join(text.split())


@pytest.mark.parametrize("name", ["gemma-7b", "deepseek-r1", "gpt-oss-20b"])
def test_models_that_no_family_can_express_are_refused_with_the_reason(name):
    found = run("plan", name, "--cluster", "8xH100", "--global-batch", "8")
    refused(found, f"there is no model {name!r}: ", "Plan your own code of it, as package.module")
    assert "did you mean" not in found.stderr


def test_a_model_may_be_a_config_of_hugging_face(tmp_path):
    path, out = tmp_path / "config.json", tmp_path / "plan.json"
    path.write_text(
        '{"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512,'
        ' "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 99999}'
    )
    small = ("--cluster", "8xH100", "--global-batch", "8", "--method", "dp", "--recompute", "none")
    found = run("plan", f"--config={path}", *small, "--seq-len", "128", "--out", out)
    assert found.exit_code == 0
    assert f", from {path}: sequences of 128 tokens; --seq-len changes that." in found.stderr
    settings = json.loads(out.read_text())["model"]["settings"]
    assert (settings["model"]["qkv_bias"], settings["model"]["seq_len"]) == (True, 128)
    explained = run("explain", out, "--no-alternatives")
    assert explained.exit_code == 0
    again = run("plan", "--config", path, *small, "--set", "num_layers=0")
    refused(again, "num_layers=0 must be at least 1")
    refused(run("plan", "Qwen2.5-7B", *small), "Give its config.json of Hugging Face in place of")
    path.write_text('{"model_type": "mamba"}')
    refused(run("compare", "--config", path, *small[:4]), "model_type='mamba' is not one of gpt2")
