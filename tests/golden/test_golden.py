"""Screens of the command line and small plans, compared with files that were recorded.

Each file says in its first line which command it is about, so a new screen, or a new plan, is a new
file with that line alone. After a change that is meant, record all of them anew, and read what
differs in the history:

    pytest tests/golden --record
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import msgspec
import pytest
import typer
from command_line import run, without_waits
from file_mutations import make_database
from interop.aceso_files import write_chain, write_database, write_toy_configuration
from sample_plans import sample_pipeline, sample_plan

from aliquot.cli import _session
from aliquot.cli._app import app
from aliquot.plans import Plan

HERE = Path(__file__).parent
SCREENS = sorted((HERE / "screens").glob("*.txt"))
PLANS = sorted((HERE / "plans").glob("*.json"))
# Of text that is wider, only lines that nothing may break.
WIDTH = "100"
# What differs from run to run, or from machine to machine.
VARYING = (
    (r"[\d.]+ (ns|us|ms|s|min) (of search|of tracing|of it to trace)", r"TIME \2"),
    (r"(Found in|best found after|^search +|, in) [\d.]+ [num]?s\b", r"\1 TIME"),
    (r"(aliquot|JAX) \d+\.\d[\w.]*", r"\1 VERSION"),
    (r"\.py:\d+", ".py:LINE"),
    (r"written on [\d-]+", "written on DATE"),
    (
        r"^(python|system|devices|aliquot|jaxl?i?b?|flax|optax|equinox|numpy|highspy) .*",
        r"\1 VARIES",
    ),
    (r"^(XLA_FLAGS) .*", r"\1 VARIES"),
    (re.escape(str(HERE.parents[1])), "REPOSITORY"),
)
FIGURES = ("step_time_s", "compute_s", "communication_s", "gradient_s", "hidden_s", "bubble_s")
FIGURES += ("peak_memory_bytes", "memory_limit_bytes")
OF_PLAN = ("method", "num_micro_batches", "schedule", "recompute", "idle_hosts")
OF_STAGE = ("mesh_shape", "axis_names", "data_axes", "context_axes", "first_device", "first_layer")
OF_STAGE += ("recompute", "casts_once", "gathers_once", "updates_early")
# Models as small as they can be with all that a method may split.
GPT = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64}
GPT |= {"vocab_size": 256, "activation_function": "gelu_new"}
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}
LLAMA |= {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"max_position_embeddings": 64, "vocab_size": 256, "hidden_act": "silu"}
LLAMA |= {"rope_theta": 1e4, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
STEP = """
import jax, jax.numpy as jnp
def factory():
    def train_step(state, x):
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p[0]) @ p[1]))(state)
        return [p - g for p, g in zip(state, grads)], {}
    w = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    return train_step, [w, w], w
"""
SETTINGS = """
[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = 8
global_batch_size = 64
seq_len = 256
[parallelism]
tensor_parallel_degree = 8
made_up = 1
[activation_checkpoint]
mode = "full"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files that commands name."""
    # A command with --devices would start JAX with fewer than later tests of this process need.
    assert len(jax.devices()) == 8
    folder = tmp_path_factory.mktemp("golden")
    for name, config in (("gpt", GPT), ("llama", LLAMA), ("mixtral", MIXTRAL)):
        (folder / f"{name}.json").write_text(json.dumps(config))
    sample_plan().save(folder / "plan.json")
    sample_pipeline().save(folder / "pipeline.json")
    write_database(folder / "database")
    write_chain(folder / "chain.toml")
    write_toy_configuration(folder / "aceso.json", num_gpus=[2, 1])
    make_database(folder / "profiles.sqlite")
    (folder / "steps.py").write_text(STEP)
    (folder / "run.toml").write_text(SETTINGS)
    (folder / "prices.csv").write_text(
        "device, devices per host, price per hour, source\n"
        "H100, 2, 50, mine\nA100-80GB, 2, 10, mine\n"
    )
    (folder / "wrong.toml").write_text('global-batch = 8\nmehtod = "fsdp"\n')
    (folder / "text.txt").write_text("one two three four five six\n" * 20)
    tiny = "--cluster 8xH100 --global-batch 8 --method megatron:dp4,tp2".split()
    plain = ("--recompute", "none", "--attention", "plain")
    run("plan", folder / "gpt.json", *tiny, *plain, "--out", folder / "tiny.json")
    run("aceso", "export", folder / "tiny.json", "--out", folder / "exported.json")
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    """Commands run in the folder, in a terminal of one width."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("COLUMNS", WIDTH)
    return folder


def verbs_of(command: Any, *words: str) -> Iterator[tuple[str, ...]]:
    """The words of all commands."""
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from verbs_of(inner, *words, name)


VERBS = [" ".join(words) for words in verbs_of(typer.main.get_command(app))]


def compare(path: Path, text: str, request: pytest.FixtureRequest) -> None:
    """Record the text, or fail with what differs."""
    if request.config.getoption("record"):
        path.write_text(text)
    recorded = path.read_text()
    if text != recorded:
        lines = difflib.unified_diff(
            recorded.splitlines(), text.splitlines(), "recorded", "now", lineterm=""
        )
        pytest.fail(
            "\n".join([f"{path.name} differs:", *lines])
            + "\nIf that is meant: pytest tests/golden --record",
            pytrace=False,
        )


def typed(path: Path) -> list[str]:
    """The command in the first line of a file."""
    return shlex.split(path.read_text().splitlines()[0].removeprefix("$ aliquot"))


@pytest.mark.parametrize("path", SCREENS, ids=lambda path: path.stem)
def test_screen(path, here, monkeypatch, request):
    """What a command prints, and the keys of its answer with `--json`."""
    command = typed(path)
    finish, answers = _session.Session.finish, []

    def noted(say, answer):
        answers.append(answer)
        finish(say, answer)

    monkeypatch.setattr(_session.Session, "finish", noted)
    found = run(*command)
    parts = [f"$ aliquot {shlex.join(command)}", f"exit code {found.exit_code}", found.stdout]
    stderr = "\n".join(without_waits(found.stderr))
    parts += [f"--- standard error\n{stderr}\n"] if stderr else []
    for answer in answers[-1:]:
        plain = json.loads(json.dumps(answer, default=_session._plain))
        parts.append("\n".join(["--- with --json", *dict.fromkeys(keys_of(plain))]) + "\n")
    text = "\n".join(parts)
    for pattern, said in (*VARYING, (re.escape(str(here)), "FOLDER")):
        text = re.sub(pattern, said, text, flags=re.MULTILINE)
    text = "\n".join(line.rstrip() for line in text.splitlines())
    compare(path, f"{text}\n", request)


def keys_of(value: Any, at: str = "") -> list[str]:
    """The paths to all values in an answer. A name that is no identifier is an array's, a file's or
    an operator's, and is written as `*`.
    """
    if isinstance(value, dict) and value:
        names = {key: key if key.isidentifier() else "*" for key in value}
        inner = [keys_of(value[key], f"{at}.{name}" if at else name) for key, name in names.items()]
    elif isinstance(value, list) and value and isinstance(value[0], dict | list):
        inner = [keys_of(item, f"{at}[]") for item in value]
    else:
        return [f"{at}[]" if isinstance(value, list) else at]
    return list(itertools.chain.from_iterable(inner))


@pytest.mark.parametrize("words", VERBS)
def test_help(words, here, request):
    """What `--help` of each command prints."""
    found = run(*words.split(), "--help")
    assert found.exit_code == 0
    compare(help_file(words), found.stdout, request)


def test_no_text_is_of_a_command_that_is_gone():
    assert set((HERE / "help").iterdir()) == set(map(help_file, VERBS))


def help_file(words: str) -> Path:
    return HERE / "help" / f"{words.replace(' ', '_') or 'aliquot'}.txt"


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_plan(path, here, request):
    """The figures of a plan, to a billionth, and its decisions."""
    recorded = json.loads(path.read_text())
    found = run(*shlex.split(recorded["command"].removeprefix("aliquot ")), "--out", "found.json")
    assert found.exit_code == 0, found.stderr
    now = {"command": recorded["command"], **row_of(Plan.load("found.json"))}
    figures = recorded.get("figures", {})
    near = {
        name: figures[name]
        for name, value in now["figures"].items()
        if name in figures and math.isclose(value, figures[name], rel_tol=1e-9)
    }
    text = json.dumps(now | {"figures": now["figures"] | near}, indent=1, ensure_ascii=False)
    compare(path, text + "\n", request)


def row_of(plan: Plan) -> dict[str, Any]:
    """What was predicted and what was decided, without times of the search."""
    predicted = plan.prediction
    figures = {name: getattr(predicted, name) for name in FIGURES}
    figures |= {f"bytes of {part}": size for part, size in predicted.memory_bytes.items()}
    stages = []
    for stage in plan.stages:
        # Of layers that are split alike, one line.
        parameters = {
            re.sub(r"\[\d+\]", "[*]", path): " ".join("".join(axes) or "-" for axes in dims)
            for path, dims in stage.shardings.items()
            if path.startswith("state.params")
        }
        decided = msgspec.to_builtins(
            (plan.combine, stage.shardings, stage.outputs, stage.interior)
        )
        everything = hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()
        stages.append(
            {name: str(getattr(stage, name)) for name in OF_STAGE}
            | {"parameters": parameters, "all splits": everything[:16]}
        )
    return {"figures": figures, **{name: getattr(plan, name) for name in OF_PLAN}, "stages": stages}
