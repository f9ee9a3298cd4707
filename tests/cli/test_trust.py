"""Data never names code to run: what a plan file may ask for, and what the user has to type."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import refused, run
from sample_plans import sample_plan

from aliquot.plans import ModelReference

SMALL = "num_layers=1 hidden_size=32 num_heads=2 seq_len=16 vocab_size=64".split()
FACTORY = """
from pathlib import Path
import jax, jax.numpy as jnp
Path("called").write_text("")
def factory():
    def train_step(state, batch):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grad}, {"loss": loss}
    array = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    return train_step, {"w": array}, {"x": array}
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A plan file that names a command of the system."""
    monkeypatch.chdir(tmp_path)
    model = ModelReference(kind="factory", name="os:system", settings={"command": "touch called"})
    sample_plan(model=model).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The folder of a factory with a plan for it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_module_of_a_plan.py").write_text(FACTORY)
    before = os.getcwd()
    os.chdir(folder)
    try:
        asked = "plan own_module_of_a_plan:factory --cluster 8xcpu --method dp --out plan.json"
        assert run(*asked.split()).exit_code == 0
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))
    return folder


@pytest.mark.parametrize("verb", ["explain plan.json", "verify plan.json --target cpu"])
@pytest.mark.parametrize("extra", [(), ("--json",)], ids=["text", "json"])
def test_a_plan_file_calls_nothing(hostile, verb, extra):
    found = run(*verb.split(), *extra)
    assert not Path("called").exists()
    if verb.startswith("verify"):
        refused(found, "os:system, and a file does not decide what code runs", "--trust-plan")
    elif not extra:
        assert "Alternatives are not priced: the plan file names the function" in found.stdout


def test_neither_does_training_with_it(hostile):
    found = run(*"train gpt-10m --data plan.json --plan plan.json --steps 1 --devices 8".split())
    refused(found, "which is not of the zoo")
    assert not Path("called").exists()


@pytest.mark.parametrize(
    "options", [("--trust-plan",), ("--model", "own_module_of_a_plan:factory")]
)
def test_a_factory_that_the_user_trusts_or_names(own, monkeypatch, options):
    monkeypatch.chdir(own)
    monkeypatch.delitem(sys.modules, "own_module_of_a_plan", raising=False)
    (own / "called").unlink(missing_ok=True)
    assert json.loads(run("explain", "plan.json", "--json").stdout)["alternatives"] == []
    assert not (own / "called").exists()
    found = run("explain", "plan.json", "--json", *options)
    assert json.loads(found.stdout)["alternatives"], found.stderr
    assert (own / "called").exists()


def test_the_compiler_runs_no_module_of_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    sizes = [part for size in SMALL for part in ("--set", size)]
    asked = (
        "plan gpt-10m --cluster 2xcpu --global-batch 2 --dtype float32 --method dp --out plan.json"
    )
    assert run(*asked.split(), *sizes).exit_code == 0
    (tmp_path / "flatbuffers.py").write_text(
        "from pathlib import Path\nPath('called').write_text('')\n"
    )
    command = (
        "from aliquot.cli import main; import sys; sys.argv = ['aliquot', 'verify', 'plan.json'];"
        " main()"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", command], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "called").exists()
