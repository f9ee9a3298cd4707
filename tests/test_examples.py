"""The scripts in `examples/` run as they stand, are short, and do what they say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aliquot as aq
from aliquot.verification import CompilerMissingError, require_compiler, resolve_target

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(
    (path.name for path in EXAMPLES.glob("*.py")), key=lambda name: int(name.split("_")[0])
)
PIPELINE = "5_pipeline_with_a_trace.py"
TPU = "6_verify_for_a_tpu.py"
# The quickest of them; what the others show, tests of each of these things do too.
QUICK = ("3_equinox.py",)


def run(name, folder):
    """The finished process of a script that was started in a folder of its own, in a plain
    environment.
    """
    settings = {
        name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))
    }
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=folder,
        env={
            **settings,
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )


def losses(printed):
    # Lines of two processes may run into each other where Python does not buffer what it prints.
    return [float(loss) for loss in re.findall(r"\bstep \d: loss (\d+\.\d{4})", printed)]


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path):
    """Its cells, one after the other, as a notebook runs them."""
    notebook = json.loads((EXAMPLES / "first_plan.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert all(not c.get("outputs") for c in notebook["cells"]), "outputs are not kept in git"
    seen = (
        "assert plan._repr_html_().count('class=\"device\"') == 8\nassert losses[-1] < losses[0]\n"
    )
    script = tmp_path / "first_plan.py"
    script.write_text("\n".join([*cells, seen]))
    finished = run(script, tmp_path)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "Take auto" in finished.stdout and "fsdp: step " in finished.stdout
    assert "equal: all" in finished.stdout


def test_scripts_are_numbered_and_listed():
    assert [int(name.split("_")[0]) for name in SCRIPTS] == list(range(1, len(SCRIPTS) + 1))
    listed = re.findall(r"\(([^()/]+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert listed == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_have_at_most_eighty_lines(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 80


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in SCRIPTS
        if name != TPU
    ],
)
def test_training_examples_train(name, tmp_path):
    finished = run(name, tmp_path)
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = losses(finished.stdout)
    assert len(found) in (5, 10) and found[-1] < found[0]
    if name == PIPELINE:
        predicted, measured = (
            json.loads((tmp_path / f"{kind}.json").read_text())
            for kind in ("predicted", "measured")
        )
        assert predicted["traceEvents"] and measured["traceEvents"]


@pytest.mark.slow
def test_the_tpu_example_verifies_or_says_what_to_install(tmp_path, monkeypatch):
    # What to install is said from the folder that the example runs in.
    monkeypatch.chdir(tmp_path)
    try:
        require_compiler(resolve_target("v5e", aq.Cluster.preset("v5e-16")))
    except CompilerMissingError as error:
        installed, why_not = False, str(error)
    else:
        installed, why_not = True, ""
    finished = run(TPU, tmp_path)
    assert "train_step on v5e-16, by method auto" in finished.stdout
    if installed:
        assert finished.returncode == 0, finished.stderr[-3000:]
        assert "Collectives" in finished.stdout
    else:
        assert finished.returncode == 1
        assert finished.stderr.strip() == f"Not verified. {why_not}"
