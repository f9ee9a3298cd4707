"""Training steps of the zoo: what they hold, that they learn, and that their forms agree."""

import dataclasses
import functools
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aliquot.core import InputError, MissingExtraError
from aliquot.zoo import MODELS, build, learning_rate

TINY = {
    "gpt-125m": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "vocab_size": 64,
        "seq_len": 16,
    },
    "llama-70b": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 64,
        "seq_len": 16,
    },
}


@pytest.fixture(
    params=[pytest.param(n, marks=pytest.mark.slow) if n != next(iter(TINY)) else n for n in TINY]
)
def name(request):
    return request.param


def tiny(name, **options):
    return build(name, 4, overrides=TINY[name], **({"dtype": "float32"} | options))


def batch_of(workload, seed=0):
    shape = workload.batch["inputs"].shape
    tokens = jax.random.randint(jax.random.key(seed), shape, 0, workload.config.vocab_size, "int32")
    return {"inputs": tokens, "targets": jnp.roll(tokens, -1, axis=1)}


@pytest.mark.parametrize("dtype", ["float32", "bf16", "bf16-master", "float16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_no_type_is_promoted_silently(name, dtype, optimizer):
    with jax.numpy_dtype_promotion("strict"):
        workload = tiny(name, dtype=dtype, optimizer=optimizer)
        jax.eval_shape(workload.init, jax.random.key(0))
        state, _ = jax.eval_shape(workload.train_step, workload.state, workload.batch)
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, workload.state)


@functools.cache
def first_params(name):
    return jax.jit(tiny(name, optimizer="sgd").init)(jax.random.key(0))["params"]


@functools.cache
def started(name, **options):
    """A tiny workload, its first state, and its compiled step; shared, because compiling is what
    takes the time.
    """
    workload = tiny(name, **options)
    params = first_params(name)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), workload.state)
    if "loss_scale" in state:
        state["loss_scale"]["scale"] = jnp.float32(2.0**15)
    state["params"] = jax.tree.map(
        lambda x, y: x.astype(y.dtype),
        stacked(params) if workload.settings["scan"] else params,
        state["params"],
    )
    return workload, state, jax.jit(workload.train_step)


def run(name, steps=1, state=None, **options):
    workload, start, step = started(name, **options)
    state = start if state is None else state
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch_of(workload))
        losses.append(float(metrics["loss"]))
    return state, losses


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def assert_close(got, want, rtol):
    # Relative to the whole tree: some gradients, as of the key bias of attention, are nothing but
    # rounding.
    atol = rtol * max(float(abs(leaf).max()) for leaf in jax.tree.leaves(want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), got, want)


def stacked(tree):
    """The state of an unrolled model in the scanned form: wherever there are layers, one array of
    all of them.
    """
    if isinstance(tree, dict) and isinstance(tree.get("layers"), list):
        return tree | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *tree["layers"])}
    if isinstance(tree, dict):
        return {key: stacked(part) for key, part in tree.items()}
    if isinstance(tree, tuple):
        parts = [stacked(part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bf16", "bf16-master", "float16"])
def test_abstract_state_is_what_init_and_step_give(name, dtype, scan):
    workload = tiny(name, dtype=dtype, scan=scan)
    made = jax.eval_shape(workload.init, jax.random.key(0))
    assert shapes(made) == shapes(workload.state)
    state, metrics = jax.eval_shape(workload.train_step, workload.state, workload.batch)
    assert shapes(state) == shapes(workload.state)
    assert shapes(metrics) == {"loss": ((), jnp.float32)}


def test_paths_read_as_layers_in_a_list(name):
    workload = tiny(name)
    paths = {
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(workload.state)
    }
    assert "['params']['layers'][1]['attn']['q']['kernel']" in paths
    assert "['opt_state'][0].mu['layers'][1]['attn']['q']['kernel']" in paths


def test_loss_starts_near_a_uniform_guess_and_falls(name):
    state, losses = run(name, steps=8, learning_rate=1e-2)
    assert losses[0] == pytest.approx(math.log(64), rel=0.02)
    assert losses[-1] < losses[0] - 0.5
    assert int(state["step"]) == 8 and int(state["opt_state"][0].count) == 8


def test_scanned_and_unrolled_forms_start_equal(name):
    scanned = jax.jit(tiny(name, scan=True).init)(jax.random.key(0))
    assert_close(stacked(first_params(name)), scanned["params"], 1e-6)
    assert not any(leaf.any() for leaf in jax.tree.leaves((scanned["opt_state"], scanned["step"])))


def test_scanned_and_unrolled_forms_agree(name, x64):
    state, losses = run(name, steps=2, dtype="float64")
    other, other_losses = run(name, steps=2, dtype="float64", scan=True)
    assert losses == pytest.approx(other_losses, rel=1e-12)
    assert_close(stacked(state), other, 1e-10)


@pytest.mark.parametrize("scan", [False, True])
def test_recomputation_changes_no_number(name, scan):
    state, losses = run(name, recompute="none", scan=scan, optimizer="sgd")
    other, other_losses = run(name, recompute="block", scan=scan, optimizer="sgd")
    assert losses == pytest.approx(other_losses, rel=1e-6)
    assert_close(state["params"], other["params"], 1e-6)


def test_recomputation_keeps_only_what_enters_a_block(name):
    def residuals(recompute):
        workload = tiny(name, recompute=recompute)
        equations = jax.make_jaxpr(workload.train_step)(workload.state, workload.batch).eqns
        blocks = [
            eqn
            for eqn in equations
            if eqn.primitive.name == "jit" and "block" in eqn.params["name"]
        ]
        return [len(eqn.outvars) for eqn in blocks[:2]]

    assert residuals("block") == [1, 1]
    assert min(residuals("none")) > 10


def test_layers_share_one_trace(name):
    workload = tiny(name)
    equations = jax.make_jaxpr(workload.train_step)(workload.state, workload.batch).eqns
    blocks = [
        eqn.params["jaxpr"]
        for eqn in equations
        if eqn.primitive.name == "jit" and "block" in eqn.params["name"]
    ]
    assert len(blocks) == 4
    assert len({id(jaxpr) for jaxpr in blocks}) == 2


def test_float16_trains_as_float32_does(name):
    state, losses = run(name, dtype="float16")
    assert losses == pytest.approx(run(name, optimizer="sgd")[1], rel=1e-3)
    assert float(state["loss_scale"]["scale"]) == 2.0**15
    assert int(state["loss_scale"]["good_steps"]) == 1


def test_overflow_in_float16_skips_the_update_and_halves_the_scale(name):
    start = started(name, dtype="float16")[1]
    huge = start | {"loss_scale": {"scale": jnp.float32(2.0**127), "good_steps": jnp.int32(7)}}
    state, _ = run(name, state=huge, dtype="float16")
    assert float(state["loss_scale"]["scale"]) == 2.0**126
    assert int(state["loss_scale"]["good_steps"]) == 0
    assert_close(state["params"], start["params"], 0)
    assert int(state["opt_state"][0].count) == 0 and int(state["step"]) == 1


def test_loss_scaling_is_dynamic_for_float16_alone(name):
    assert "loss_scale" in tiny(name, dtype="float16").state
    assert "loss_scale" in tiny(name, dtype="bf16", loss_scaling="dynamic").state
    assert "loss_scale" not in tiny(name, dtype="float16", loss_scaling="none").state
    assert "loss_scale" not in tiny(name, dtype="bf16").state


def test_largest_model_is_built_without_an_array():
    # Kept alive, as an earlier test's arrays may be collected at any time.
    before = jax.live_arrays()

    def new_arrays():
        return [array for array in jax.live_arrays() if not any(array is other for other in before)]

    workload = build("gpt-175b", 1536)
    assert not new_arrays()
    assert all(
        isinstance(leaf, jax.ShapeDtypeStruct)
        for leaf in jax.tree.leaves((workload.state, workload.batch))
    )
    assert len(workload.state["params"]["layers"]) == 96
    closed = jax.make_jaxpr(workload.train_step)(workload.state, workload.batch)
    assert not closed.consts
    assert not new_arrays()


def test_settings_rebuild_the_workload(name):
    for workload in (
        tiny(name, dtype="bf16", scan=True, optimizer="sgd", learning_rate=0.5),
        tiny(name, learning_rate=learning_rate(0.1, steps=9, decay="linear"), weight_decay=0.0),
        tiny(name, clip_norm=1.0, grad_norm=True, momentum=0.5, optimizer="sgd"),
        build("gpt-125m", 8, overrides={"hidden_size": 384, "num_heads": 6, "ffn_size": 3072}),
        build(dataclasses.replace(MODELS["gpt-10m"], name="mine", num_layers=1), 2),
    ):
        again = build(**json.loads(json.dumps(workload.settings)))
        assert again.config == workload.config
        assert again.settings == workload.settings
        assert shapes(again.state) == shapes(workload.state)


def test_all_bad_options_are_listed():
    with pytest.raises(InputError) as error:
        build(
            "gpt-10m",
            0,
            dtype="int8",
            recompute="all",
            optimizer="adam",
            learning_rate=float("nan"),
            weight_decay=-1,
            momentum=0.9,
            clip_norm=0,
        )
    for part in (
        "no dtype 'int8'",
        "no recompute 'all'",
        "no optimizer 'adam': did you mean 'adamw'",
        "global_batch=0",
        "learning_rate=nan",
        "weight_decay=-1",
        "momentum=0.9 is for sgd: adam has",
        "clip_norm=0",
    ):
        assert part in str(error.value)
    with pytest.raises(InputError, match=r"float64.*JAX_ENABLE_X64"):
        build("gpt-10m", 1, dtype="float64")
    with pytest.raises(InputError, match="overrides"):
        build(MODELS["gpt-10m"], 1, overrides={"num_layers": 1})
    with pytest.raises(
        InputError,
        match="family=None is not one of gpt, bert, llama, mixtral, moe, t5, wide-resnet",
    ):
        build({"name": "x"}, 1)
    with pytest.raises(InputError, match="not those of a ModelConfig"):
        build({"name": "x", "family": "gpt"}, 1)


def test_missing_extra_names_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(MissingExtraError, match=r"flax.*pip install -e '.*\[zoo\]'"):
        build("gpt-10m", 1)


def test_importing_the_zoo_imports_neither_jax_nor_flax():
    code = "import sys, aliquot.zoo; assert not {'jax', 'flax', 'optax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
