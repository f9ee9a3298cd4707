"""Options in a file: `--options` and `--save-options` of `plan` and `train`."""

import tomllib

import pytest
from command_line import TINY, refused, run

from aliquot.plans import Plan


def written(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


OPTIONS = """
model = "gpt-125m"
cluster = "8xH100"
global-batch = 8
attention = "plain"
method = "zero3"
scan = false

[set]
num_layers = 2
vocab_size = 512
hidden_size = 96
"""


def test_a_file_is_as_good_as_what_is_typed(tmp_path):
    typed, read = tmp_path / "typed.json", tmp_path / "read.json"
    assert run("plan", *TINY, "--method", "zero3", "--out", typed).exit_code == 0
    found = run("plan", "--options", written(tmp_path, OPTIONS), "--out", read)
    assert found.exit_code == 0, found.stderr
    assert read.read_text() == typed.read_text()


def test_what_is_typed_counts_more(tmp_path):
    out = tmp_path / "plan.json"
    path = written(tmp_path, OPTIONS)
    assert run("plan", f"--options={path}", "--method", "dp", "--out", out).exit_code == 0
    assert Plan.load(out).method == "dp"


def test_what_is_saved_is_read_again(tmp_path):
    saved, first, again = (tmp_path / name for name in ("run.toml", "first.json", "again.json"))
    done = run("plan", *TINY, "--method", "zero3", "--save-options", saved, "--out", first)
    assert done.exit_code == 0, done.stderr
    data = tomllib.loads(saved.read_text())
    assert data["global-batch"] == 8 and data["set"][0] == "num_layers=2"
    assert not {"options", "save-options", "json"} & set(data)
    assert run("plan", "--options", saved, "--out", again).exit_code == 0
    assert again.read_text() == first.read_text()


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            "model = 'gpt-10m'\nclustr = '8xH100'\nscan = 'yes'",
            ("line 2: 'clustr' is no option", "did you mean 'cluster'?", "line 3: scan = 'yes'"),
        ),
        ("model = \n", ("cannot be read as TOML", "line 1")),
        (
            "model = 'gpt-10m'\nlr = 0.1\ndecay_steps = 9",
            ("line 2: 'lr' is no option", "line 3: 'decay_steps'", "a plan serves every learning"),
        ),
        ("method = ['dp', 'tp']", ("line 1: method = ['dp', 'tp']: it takes one value",)),
        ("global_batch = true", ("it takes a value",)),
        ("json = true", ("'json' is no option",)),
        (
            "model = 'a'\ncluster = '8xH100'\nglobal-batch = 'many'",
            ("Invalid value for '--global-batch'",),
        ),
    ],
)
def test_a_file_that_is_wrong(tmp_path, text, messages):
    refused(run("plan", "--options", written(tmp_path, text)), *messages)


def test_a_file_that_is_missing(tmp_path):
    refused(run("plan", "--options", tmp_path / "no.toml"), "no.toml", "No such file")


def test_train_reads_its_options(tmp_path):
    path = written(tmp_path, 'model = "gpt-10m"\ndata = ["no.txt"]\nsteps = 0\n')
    refused(run("train", "--options", path), "--steps must be at least 1, got 0")


def test_a_hook_that_is_not_there_is_refused_before_the_search(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be " * 99)
    (tmp_path / "own_hooks.py").write_text("def send(row):\n    pass\n")
    args = ("train", "gpt-10m", "--data", "text.txt", "--steps", 1, "--devices", 8)
    refused(run(*args, "--log-to", "own_hooks:sent"), "did you mean 'send'?")
    refused(run(*args, "--log-to", "no_such_hooks:send"), "there is no module 'no_such_hooks'")
