"""The README's snippets and commands, and those of the quickstart, in the order in which they are
printed.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from command_line import run

import aliquot as aq
from aliquot.zoo import MODELS, ModelConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()
CLUSTERS = (ROOT / "docs" / "clusters.md").read_text()
SMALL = {
    "num_layers": 1,
    "hidden_size": 64,
    "ffn_size": 128,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_size": 0,
    "vocab_size": 512,
    "seq_len": 32,
}


def commands(page):
    """The lines of a page that begin with `aliquot`, without their remarks."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    shell = [line for language, block in blocks if not language for line in block.splitlines()]
    lines = [line.partition("#")[0].strip() for line in shell]
    return [line for line in lines if line.startswith("aliquot ")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with what the pages take for granted: some text, and a script and a module of one's
    own.
    """
    (tmp_path / "my-text").mkdir()
    shutil.copy(ROOT / "README.md", tmp_path / "my-text")
    (tmp_path / "my_script.py").write_text("print('ran')\n")
    (tmp_path / "run.sh").write_text(
        "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4"
        " --seq-length 32 --vocab-size 512 --tensor-model-parallel-size 2 --bf16"
        " --global-batch-size 64\n"
    )
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "training.py").write_text(
        "import jax\nimport jax.numpy as jnp\n\n\n"
        "def train_step(w, x):\n"
        "    grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)\n"
        "    return w - 0.1 * grad\n\n\n"
        "def factory():\n"
        "    shape = jax.ShapeDtypeStruct\n"
        "    return train_step, shape((64, 64), 'float32'), shape((64, 64), 'float32')\n"
    )
    (file,) = re.findall(r"```toml\n(\[cluster\].*?)```", CLUSTERS, re.DOTALL)[:1]
    (tmp_path / "cluster.toml").write_text(file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [README, QUICKSTART], ids=["README", "quickstart"])
def test_every_command_runs_in_the_order_in_which_it_is_printed(page, folder, monkeypatch):
    """With small models, and ZeRO-3 in the place of long searches: the real ones take minutes."""

    def quick(self, task):
        try:
            return aq.Zero3Parallel().decide(task)
        except aq.InputError:
            # One text has no rows to split.
            return aq.ShardParallel().decide(task)

    for method in (aq.Auto, aq.PipeshardParallel):
        monkeypatch.setattr(method, "decide", quick)
    for name, config in MODELS.items():
        if type(config) is ModelConfig:
            small = dataclasses.replace(config, **SMALL)
            monkeypatch.setitem(MODELS, name, small)
    lines = commands(page)
    assert len(lines) >= 2
    for line in lines:
        found = run(*shlex.split(line)[1:])
        if line.startswith("aliquot verify") and found.exit_code:
            # It needs a compiler for GPUs, and says how to get it from a checkout.
            assert found.exit_code == 2 and "[verify-gpu]'" in found.stderr
        elif line.startswith("aliquot size"):
            # Whether anything is in time is the answer.
            assert found.exit_code in (0, 1) and "Prices: samples" in found.stdout, found.output
        else:
            assert found.exit_code == 0, f"{line}\n{found.output}"
    written = {path.name for path in folder.iterdir()}
    assert {"plan.json", *(("small.json", "run") if page is README else ())} <= written


def test_the_snippet_of_the_readme_runs_behind_the_step_of_the_quickstart(folder):
    pattern = r"```python\n(.*?)```"
    names: dict[str, object] = {}
    exec(re.findall(pattern, QUICKSTART, re.DOTALL)[0], names)
    import jax

    rows = np.ones((8192, 256), np.float32)
    names |= {"key": jax.random.key(0), "batch": {"x": rows, "y": rows}}
    names["state"] = jax.eval_shape(names["init_state"], names["key"])
    (snippet,) = re.findall(pattern, README, re.DOTALL)
    exec(snippet, names)
    assert jnp.isfinite(names["metrics"]["loss"]) and (folder / "plan.json").exists()
    specs = names["plan"].shardings(names["state"])
    assert jax.tree.structure(specs) == jax.tree.structure(names["state"])
    call = f"jax.jit({re.search(r'`jax.jit[(](.*?)[)]` is the step', README)[1]})"
    state = names["step"].init(names["init_state"], names["key"])
    _, metrics = eval(call, names | {"aq": aq, "jax": jax})(state, names["batch"])
    assert np.allclose(metrics["loss"], names["metrics"]["loss"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("page", [README, QUICKSTART], ids=["README", "quickstart"])
def test_every_command_runs_as_it_is_printed(page, folder):
    for line in commands(page):
        if line.startswith("aliquot verify"):
            continue
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(line)], capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
