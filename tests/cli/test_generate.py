"""`aliquot generate`: texts under plans are those of one device; what it refuses."""

import functools
import json
import math
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from command_line import refused, run

import aliquot as aq
from aliquot._generation import Generator, Sampling, _choosing
from aliquot.cli._generate import _as_meta
from aliquot.zoo import build_inference

SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "vocab_size": 260, "seq_len": 80}
PROMPTS = ("Long ago", "one")


def model(name="gpt-125m", scan=False):
    return build_inference(name, 2, overrides=SIZES, dtype="float32", scan=scan)


@functools.cache
def weights(name, scan):
    """Weights under which the most likely token is not near another, and seldom the last again:
    what each token adds to its own logit is small beside what layers and positions add.
    """
    rng = np.random.default_rng(7)

    def draw(path, x):
        where = jax.tree_util.keystr(path)
        if "scale" in where:
            return np.ones(x.shape, x.dtype)
        small = "embed" in where or "bias" in where
        scale = 0.2 if small else 3.0 if "position" in where else 0.7
        return (scale * rng.normal(size=x.shape)).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(draw, model(name, scan).params)


@functools.cache
def text_of_one_device(name, scan, count=64):
    """The most likely tokens by the forward pass of the whole sequence."""
    forward = jax.jit(model(name, scan).forward)
    prompts = [list(text.encode()) for text in PROMPTS]
    rows = np.zeros((2, SIZES["seq_len"]), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    for step in range(count):
        logits = forward(weights(name, scan), {"inputs": rows})
        for k, prompt in enumerate(prompts):
            at = len(prompt) + step
            rows[k, at] = np.argmax(logits[k, at - 1, :256])
    return [row[len(p) : len(p) + count].tolist() for row, p in zip(rows, prompts, strict=True)]


@pytest.fixture
def trained(tmp_path):
    """Saves the weights of a model as a run does; returns the run's folder."""

    def save(name="gpt-125m", scan=False, tokenizer="bytes"):
        held = weights(name if name != "bert-base" else "gpt-125m", scan)
        settings = {"model": name, "overrides": SIZES, "dtype": "float32", "scan": scan}
        meta = {"settings": settings, "data": {"tokenizer": tokenizer}}
        with aq.Checkpoints(tmp_path / "run") as checkpoints:
            checkpoints.save(None, {"params": held}, 5, meta=meta)
        return tmp_path / "run"

    return save


SLOW = pytest.mark.slow


def generate(folder, *options, model="gpt-125m"):
    return "generate", model, "--checkpoint", folder, *options


@pytest.mark.parametrize(
    ("name", "scan", "options"),
    [
        ("gpt-125m", False, "--method megatron:dp2,tp4 --max-tokens 20"),
        pytest.param("gpt-125m", False, "--method megatron:dp2,tp4", marks=SLOW),
        pytest.param("gpt-125m", False, "--method megatron:dp2,tp2,pp2", marks=SLOW),
        pytest.param("gpt-125m", True, "--method megatron:tp4,pp2 --micro-batches 2", marks=SLOW),
        pytest.param("llama-7b", False, "--method megatron:dp2,tp2,pp2", marks=SLOW),
        pytest.param("llama-7b", True, "--method auto", marks=SLOW),
        pytest.param(
            "gpt-125m",
            False,
            "--method megatron:dp2,tp2,pp2 --launch local:2 --num-devices-per-host 4",
            marks=SLOW,
        ),
        pytest.param(
            "gpt-125m",
            False,
            "--method megatron:dp2,tp4 --launch local:2 --num-devices-per-host 4",
            marks=SLOW,
        ),
    ],
)
def test_text_is_that_of_one_device(name, scan, options, trained):
    prompts = [word for text in PROMPTS for word in ("--prompt", text)]
    command = generate(trained(name, scan), *prompts, *options.split(), "--json", model=name)
    if "--launch" in options:
        said = subprocess.run(
            [sys.executable, "-m", "aliquot", *map(str, command)],
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "XLA_FLAGS": ""},
        )
        assert said.returncode == 0, said.stderr
    else:
        said = run(*command)
        assert said.exit_code == 0, said.stderr
    answer = json.loads(said.stdout)
    assert min(len(set(each)) for each in answer["tokens"]) > 9
    count = 20 if "--max-tokens" in options else 64
    assert answer["tokens"] == [each[:count] for each in text_of_one_device(name, scan)]
    assert answer["texts"][0] == bytes(answer["tokens"][0]).decode("utf-8", "replace")


def drawn_text(count, seed=3, scan=False, micro_batches=1, **method):
    """Tokens that are drawn under a layout, or on one device if it is none."""
    devices = jax.devices()[: math.prod(method.values())]
    generator = Generator(
        model(scan=scan),
        sampling=Sampling(temperature=1.5, top_k=20, seed=seed),
        cluster=aq.Cluster.detect(devices),
        method=aq.Megatron(**method),
        num_micro_batches=micro_batches,
        devices=devices,
    )
    generator.init(jax.random.key(0))
    prompts = [list(text.encode()) for text in PROMPTS]
    rows = generator.tokens(weights("gpt-125m", scan), prompts)
    return np.array([next(rows) for _ in range(count)])


def test_drawn_text_is_that_of_one_device():
    wanted = drawn_text(12)
    np.testing.assert_array_equal(drawn_text(12, data=2, tensor=4), wanted)
    assert (wanted[:, 0] != wanted[:, 1]).any()


@pytest.mark.slow
def test_drawn_text_depends_on_its_seed_and_on_no_plan():
    wanted = drawn_text(64, scan=True)
    cut = drawn_text(64, scan=True, micro_batches=2, tensor=2, pipeline=2)
    np.testing.assert_array_equal(cut, wanted)
    np.testing.assert_array_equal(drawn_text(64, data=2, tensor=2, pipeline=2), drawn_text(64))
    assert (drawn_text(64, seed=4) != wanted).any()


def test_tokens_are_drawn_as_often_as_they_are_likely():
    count, logits = 5000, np.array([0.0, 1.0, 2.0, 0.5, 9.0], np.float32)
    rows = np.broadcast_to(logits, (count, 5))

    def frequencies(temperature, top_k):
        sampling = Sampling(temperature=temperature, top_k=top_k)
        # The last token only rounds the vocabulary up.
        choose = jax.jit(_choosing(lambda params, cache, batch: (cache, rows), 4, sampling))
        _, chosen = choose(None, None, sampling.draw(np.arange(count)))
        return np.bincount(chosen, minlength=5) / count

    for temperature, top_k, likely in (
        (1.0, None, [0, 1, 2, 3]),
        (0.5, 2, [1, 2]),
        (2.0, 9, [0, 1, 2, 3]),
    ):
        weight = np.zeros(5)
        weight[likely] = np.exp(logits[likely] / temperature)
        np.testing.assert_allclose(
            frequencies(temperature, top_k), weight / weight.sum(), atol=0.03
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prompt", "x" * 81), "the prompt has 81 tokens, and the cache place for 80"),
        (("--prompt", "long", "--cache", "3"), "place for 3 (--cache 3)"),
        (("--prompt", ""), "--prompt is empty"),
        (("--tokens", "1,x"), "'x' is none"),
        (("--tokens", "300"), "token 300, and gpt-125m knows 260: 0 to 259"),
        ((), "--prompt TEXT or --tokens"),
        (("--prompt", "a", "--max-tokens", "0"), "--max-tokens must be at least 1"),
        (("--prompt", "a", "--top-k", "3"), "--top-k is for tokens that are drawn"),
        (("--prompt", "a", "--temperature", "0", "--seed", "3"), "add --temperature 1"),
        (("--prompt", "a", "--temperature", "inf"), "temperature=inf must be above 0 and finite"),
    ],
)
def test_prompts_that_cannot_be(options, said, trained):
    refused(run(*generate(trained(), *options)), said)


def test_models_and_runs_that_cannot_be(trained, tmp_path):
    refused(run(*generate(tmp_path, "--prompt", "a")), "--checkpoint", "there is no checkpoint")
    folder = trained(tokenizer="0" * 64)
    refused(run(*generate(folder, "--prompt", "a")), "trained on a tokenizer with a file")
    other = generate(folder, "--tokens", "1", model="gpt-350m")
    refused(run(*other), "the checkpoint is of gpt-125m, not of gpt-350m")


def test_a_model_without_decode(trained):
    refused(run(*generate(trained("bert-base"), "--tokens", "1", model="bert-base")), "no decode")


@pytest.mark.slow
def test_a_text_grows_on_the_screen_under_a_plan_that_is_used_again(trained, tmp_path):
    folder, plan = trained(), tmp_path / "plan.json"
    options = ("--prompt", PROMPTS[0], "--max-tokens", "20")
    first = run(*generate(folder, *options, "--method", "megatron:tp4,pp2", "--save-plan", plan))
    again = run(*generate(folder, "--prompt", "Long", "--max-tokens", "4", "--plan", plan))
    assert first.exit_code == again.exit_code == 0, first.stderr + again.stderr
    text = bytes(text_of_one_device("gpt-125m", False)[0][:20]).decode("utf-8", "replace")
    shown = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
    assert first.stdout == f"{shown}\n"


def test_a_model_without_a_tokenizer_reads_bytes():
    meta = _as_meta("gpt-10m", (None, None, None))
    assert meta["data"] == {"tokenizer": "bytes"}
    assert meta["settings"]["model"]["num_layers"] == aq.zoo.MODELS["gpt-10m"].num_layers
