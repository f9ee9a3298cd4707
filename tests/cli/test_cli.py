"""Verbs, options, exit codes and streams; nothing here searches for long."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import typer
from command_line import TINY, refused, run
from sample_plans import sample_plan

from aliquot.cli._app import app
from aliquot.cli._session import session
from aliquot.core import AliquotWarning


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.json"
    sample_plan().save(path)
    return path


def test_the_page_of_the_command_line_names_every_verb():
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    for name, verb in typer.main.get_command(app).commands.items():
        row = next(line for line in page.splitlines() if f"`aliquot {name}" in line)
        for inner in getattr(verb, "commands", {}):
            assert re.search(rf"`(aliquot {name} )?{inner}`", row), (name, inner)


def test_the_page_of_all_options_is_complete():
    """`make all-options` writes it."""
    page = (Path(__file__).parents[2] / "docs" / "all-options.md").read_text()
    said = {}
    for section in page.split("\n## ")[1:]:
        for part in section.split("\n### "):
            said[part.split("`")[1]] = " ".join(part.split())
    verbs = {}
    for name, verb in typer.main.get_command(app).commands.items():
        verbs[f"aliquot {name}"] = verb
        verbs |= {f"aliquot {name} {k}": v for k, v in getattr(verb, "commands", {}).items()}
    assert said.keys() == verbs.keys()
    for name, verb in verbs.items():
        options = [param for param in verb.params if param.param_type_name == "option"]
        for option in options:
            assert f"`{option.opts[0]}" in said[name] or option.hidden, (name, option.opts)
            help_text = " ".join((option.help or "").split())
            assert help_text in said[name] or option.hidden, (name, option.opts)
        assert said[name].count("* `--") >= sum(not option.hidden for option in options)


@pytest.mark.parametrize(
    "group", [[], ["aceso"], ["blocks"], ["profile"], ["checkpoint"], ["bench"]]
)
def test_lists_of_verbs_cut_no_sentence(group):
    found = run(*group, "--help")
    assert found.exit_code == 0 and "..." not in found.stdout.split("Commands:")[1]


def test_starting_imports_nothing_heavy():
    code = (
        "import sys, aliquot.cli._app; "
        "print({'jax', 'jaxlib', 'flax', 'optax', 'numpy', 'highspy'} & set(sys.modules) or 'none')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "none", done.stdout + done.stderr


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "aliquot", "--version"], capture_output=True, text=True
    )
    assert done.stdout.startswith("aliquot 0."), done.stderr


def test_version():
    assert run("--version").stdout.startswith("aliquot 0.")


def test_without_a_verb_it_says_what_to_type():
    found = run()
    assert found.exit_code == 0
    assert "aliquot demo" in found.stdout and "Type next:" in found.stdout
    assert len(found.stdout.splitlines()) <= 12


def test_completion_is_offered():
    assert "--install-completion" in run("--help").stdout


def test_cluster():
    assert "32 x A100-80GB" in run("cluster", "4x8xA100-80GB").stdout
    data = json.loads(run("cluster", "8xH100", "--json").stdout)
    assert data["num_devices"] == 8
    assert data["mesh_shapes"] == ["8", "4x2", "2x4"]
    assert data["memory_limit_bytes"] < data["device"]["memory_bytes"]


def test_a_cluster_says_how_far_predictions_are_off_in_few_lines():
    short, every = (run("cluster", "8xH100", *more).stdout for more in ((), ("--all",)))
    data = json.loads(run("cluster", "8xH100", "--json").stdout)
    assert every.count("expected error") == len(data["reported_steps"]) > 4
    ours = [steps for steps in data["reported_steps"] if not steps["reason"]]
    assert short.count("expected error") == len(ours)
    assert "expected error    data parallelism, FSDP: 1 step of MaxText on H100 was off by" in short
    assert short.count("other frameworks") == 1
    others = [e for steps in data["reported_steps"] if steps["reason"] for e in steps["errors"]]
    low, high = (1 / (1 + error) for error in (max(others), min(others)))
    assert f"{len(others)} steps of" in short and f"took {low:.2f} to {high:.2f} times" in short
    assert "90% of its memory; the rest is left to its runtime" in short


def _verbs(group, path=()):
    for name, verb in getattr(group, "commands", {}).items():
        yield (*path, name), verb
        yield from _verbs(verb, (*path, name))


def test_a_network_goes_with_every_option_that_names_a_cluster():
    options = {
        verb: {option for parameter in command.params for option in parameter.opts}
        for verb, command in _verbs(typer.main.get_command(app))
    }
    named = {verb for verb, known in options.items() if known & {"--cluster", "--clusters"}}
    assert {("plan",), ("compare",), ("profile", "fit"), ("blocks", "analyze")} < named
    assert named == {verb for verb, known in options.items() if "--network-gbps" in known} - {
        ("cluster",)
    }


def test_a_network_of_ones_own():
    data = json.loads(run("cluster", "4x8xA100-80GB", "--network-gbps", "1600", "--json").stdout)
    assert data["inter"]["bandwidth_bytes_per_s"] == 200e9
    steps = {}
    for gbps in (25, 1600):
        # One sequence a device: a sum of gradients that compute cannot hide.
        args = [*TINY, "--method", "dp", "--network-gbps", gbps, "--json"]
        args[args.index("8xH100")] = "2x4xH100"
        found = run("plan", *args)
        assert found.exit_code == 0, found.stderr
        steps[gbps] = json.loads(found.stdout)["step_time_s"]
    assert steps[1600] < steps[25]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("cluster 4x8xA100-80GB --network-gbps fast", "'fast' is no number: write what a host"),
        ("compare gpt-10m --cluster 2x8xH100 --network-gbps 0", "Gbit/s, not 0.0"),
        ("plan gpt-10m --cluster 2x8xH100 --network-gbps=-3", "Gbit/s, not -3.0"),
        ("cluster v5e-16 --network-gbps 1600", "(ICI)"),
        ("profile show none.sqlite --network-gbps 1600", "add --cluster"),
    ],
)
def test_networks_that_cannot_be_read(args, message):
    refused(run(*args.split()), message)


def test_cluster_from_a_file(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(
        '[cluster]\nname = "lab"\ndevice = "A100-80GB"\nhosts = 2\ndevices_per_host = 4\n'
    )
    assert json.loads(run("cluster", path, "--json").stdout)["num_devices"] == 8


def test_explain_without_alternatives(plan_file):
    found = run("explain", plan_file, "--no-alternatives")
    assert found.exit_code == 0
    assert "state.params.layers[*].w" in found.stdout
    data = json.loads(run("explain", plan_file, "--no-alternatives", "--json").stdout)
    assert data["predicted"]["step_time_s"] == 0.011


def test_explain_of_a_closure_says_what_to_do(tmp_path):
    path = tmp_path / "plan.json"
    plan = sample_plan()
    sample_plan(model=type(plan.model)(kind="closure", name="train_step")).save(path)
    found = run("explain", path)
    assert found.exit_code == 0
    assert "aliquot.explain(plan, step, ...) where" in found.stdout


def test_diff(plan_file, tmp_path):
    other = tmp_path / "other.json"
    sample_plan(method="dp").save(other)
    assert "decide and predict the same" in run("diff", plan_file, plan_file).stdout
    shown = run("diff", plan_file, other).stdout
    assert shown.startswith("As fast within 0.5%") and "2.9 KiB, as the other" in shown
    assert re.search("method +shard", shown) and "--all lists every term" in shown
    assert "method   shard" in run("diff", plan_file, other, "--all").stdout
    data = json.loads(run("diff", plan_file, other, "--json").stdout)
    assert data["changes"] == [
        {"section": "decision", "subject": "method", "before": "shard", "after": "dp"}
    ]


WRONG_TOML = """
[cluster]
name = "lab"
device = "A1000"
hosts = 0
devices_per_host = 8
[inter]
latency = "10us"
bandwidth = -5
"""


def test_a_wrong_cluster_file_lists_all_that_is_wrong(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(WRONG_TOML)
    refused(run("cluster", path), "A1000", "hosts", "bandwidth")
    refused(
        run("plan", "gpt-125m", "--cluster", path, "--global-batch", 8),
        "A1000",
        "hosts",
        "bandwidth",
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("plan gpt-1.4b --cluster 8xH100 --global-batch 8", "did you mean 'gpt-1.3b'"),
        ("plan gpt-125m --cluster 8xH10 --global-batch 8", "did you mean 'H100'"),
        (
            "plan gpt-125m --cluster 8xH100 --global-batch 8 --method zero",
            "did you mean 'zero2' or 'zero3'",
        ),
        ("plan gpt-125m --cluster missing.toml --global-batch 8", "cannot be read"),
        ("plan gpt-125m --cluster 8xH100", "needs --global-batch"),
        ("plan gpt-125m --cluster 8xH100 --global-batch 0", "--global-batch must be at least 1"),
        (
            "plan gpt-125m --cluster 8xH100 --global-batch 8 --micro-batches 3",
            "3 micro-batches do not divide a global batch of 8. Try --micro-batches 2 or 4, or"
            " --global-batch 24.",
        ),
        (
            "plan gpt-125m --cluster 8xH100 --global-batch 8 --micro-batches 0",
            "--micro-batches must be at least 1",
        ),
        ("plan gpt-125m --cluster 8xH100 --global-batch 8 --mesh 4y2", "--mesh '4y2' is no mesh"),
        (
            "plan gpt-125m --cluster 8xH100 --global-batch 8 --set layers",
            "'layers' is not of the form name=value",
        ),
        (
            "plan gpt-125m --cluster 8xH100 --global-batch 8 --set num_layer=2",
            "did you mean 'num_layers'",
        ),
        (
            "plan gpt-125m --cluster 8xH100 --global-batch 8 --dtype int8",
            "there is no dtype 'int8'",
        ),
        (
            "plan gpt-125m --cluster 8xH100 --global-batch 8 --recompute all",
            "there is no recompute 'all'",
        ),
        (
            "plan gpt-125m --cluster 8xH100 --global-batch 8 --recompute full",
            "write 'block', which keeps only what enters a block",
        ),
        (
            "plan gpt-125m --cluster 8xH100 --global-batch 8 --out no/such/plan.json",
            "there is no folder",
        ),
        ("plan nowhere:factory --cluster 8xH100", "there is no module 'nowhere'"),
        ("plan ./steps/mine.py:factory --cluster 8xH100", "Write steps.mine:factory, and start"),
        (f"plan {__file__} --cluster 8xH100", "or a factory as package.module:function."),
        ("plan json:factory --cluster 8xH100", "json has no 'factory'"),
        ("plan json:dumps --cluster 8xH100", "cannot be called"),
        ("plan json:decoder --cluster 8xH100", "not a function"),
        ("explain missing.json", "plan file 'missing.json' cannot be read: No such file"),
        ("diff missing.json missing.json", "cannot be read"),
        ("train gpt-10m --data x --plan missing.json --steps 1", "cannot be read"),
        ("train gpt-10m --data x --plan missing.json --steps 0", "--steps must be at least 1"),
        ("demo --steps 1", "--steps must be at least 2"),
        ("demo --data missing.txt", "missing.txt cannot be read"),
        ("plan", "Missing argument"),
        ("plans", "No such command"),
    ],
)
@pytest.mark.parametrize("extra", [(), ("--json",)], ids=["text", "json"])
def test_bad_input_is_refused_in_a_few_lines(args, message, extra, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run(*args.split(), *extra)
    refused(found, message)
    assert len(found.stderr.splitlines()) <= 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", '{"version": 9}', "[]", '{"version": 1, "method": 3}'])
@pytest.mark.parametrize(
    "verb", ["explain {}", "diff {} {}", "train gpt-10m --data {} --plan {} --steps 1"]
)
def test_a_broken_plan_is_refused(verb, text, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    refused(run(*verb.replace("{}", str(path)).split()), "plan file")


def test_empty_data_is_refused(tmp_path):
    path = tmp_path / "empty.txt"
    path.write_text("")
    refused(run("demo", "--data", path, "--out", tmp_path / "plan.json"), "is empty")


def test_another_device_count_is_refused(plan_file):
    found = run(
        "train", "gpt-10m", "--data", plan_file, "--plan", plan_file, "--steps", 1, "--devices", 4
    )
    refused(found, "it is for 8 devices (8xH100), and there are 4", "--devices 8")


def test_warnings_of_this_package_are_remarks_without_a_place_in_its_source(capsys):
    with warnings.catch_warnings(), session():
        warnings.simplefilter("always")
        warnings.warn("two rows are left out.", AliquotWarning, stacklevel=1)
    assert capsys.readouterr().err == "note: two rows are left out.\n"


def test_a_plan_that_was_made_for_other_operators_is_said_in_one_line(tmp_path):
    path = tmp_path / "plan.json"
    made = run("plan", *TINY, "--method", "dp", "--out", path)
    assert made.exit_code == 0, made.output
    text = path.read_text()
    (other,) = set(re.findall(r'"graph_fingerprint": *"(\w+)"', text))
    path.write_text(text.replace(other, other[::-1]))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        said = run("explain", path).stderr
    (line,) = [line for line in said.splitlines() if "other operators" in line]
    assert line.startswith("note: train_step is traced into other operators than")
    assert ".py:" not in said and "warnings.warn" not in said


def test_a_plan_for_something_else_than_the_zoo_is_not_trained(tmp_path):
    path = tmp_path / "plan.json"
    plan = sample_plan()
    sample_plan(model=type(plan.model)(kind="closure", name="train_step")).save(path)
    refused(
        run("train", "gpt-10m", "--data", path, "--plan", path, "--steps", 1, "--devices", 8),
        "not of the zoo",
    )
