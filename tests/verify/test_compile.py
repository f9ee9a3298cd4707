"""A program on its way to another process and back: the same figures as in this one, and every way
to fail.
"""

import os
import stat
from importlib.metadata import PackageNotFoundError

import jax
import jax.numpy as jnp
import pytest

import aliquot as aq
from aliquot.cluster import Cluster
from aliquot.core import InputError
from aliquot.runtime import CompiledCollective
from aliquot.verification import (
    CompileError,
    CompilerMissingError,
    default_cache,
    require_compiler,
    resolve_target,
)
from aliquot.verification import _compile as compiling
from aliquot.verification import _verify as verifying
from aliquot.verification import _wheels as wheels
from aliquot.verification import _worker as working


@jax.checkpoint
def _block(x, w):
    return jax.nn.gelu(x @ w) @ w.T


def train_step(params, batch):
    """Rematerialised blocks, a random key, and parameters that are replaced."""

    def loss(params):
        x = batch["x"] + 0.01 * jax.random.normal(batch["key"], batch["x"].shape)
        for w in params["blocks"]:
            x = x + _block(x, w)
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments():
    shape = jax.ShapeDtypeStruct
    params = {"blocks": [shape((64, 128), jnp.float32)] * 2}
    batch = {
        "x": shape((16, 64), jnp.float32),
        "y": shape((16, 64), jnp.float32),
        "key": jax.random.key(0),
    }
    return params, batch


@pytest.fixture(scope="module")
def plan():
    return aq.plan(
        train_step, *arguments(), cluster=Cluster.preset("8xcpu"), method=aq.Zero3Parallel()
    )


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("method", "micro_batches"), [(aq.Zero3Parallel(), 1), (aq.DataParallel(), 2)]
)
def test_the_other_process_compiles_what_the_runtime_would(method, micro_batches, cache):
    params, batch = arguments()
    step = train_step
    if micro_batches > 1:
        batch = {**batch, "key": jax.random.key(0)}
    cluster = Cluster.preset("8xcpu")
    plan = aq.plan(
        step, params, batch, cluster=cluster, method=method, num_micro_batches=micro_batches
    )
    found = aq.verify(plan, step, params, batch, cache=cache).stages[0].compiled
    here = aq.parallelize(step, plan).prepare(params, batch).stats()
    memory = here.memory
    assert (found.argument_bytes, found.output_bytes, found.temp_bytes, found.alias_bytes) == (
        memory.argument_bytes,
        memory.output_bytes,
        memory.temp_bytes,
        memory.alias_bytes,
    )
    assert memory.alias_bytes > 0
    assert _totals(found.collectives) == _totals(here.collectives)


def _totals(collectives: tuple[CompiledCollective, ...]):
    totals = {}
    for each in collectives:
        key = each.kind, each.axes
        count, num_bytes = totals.get(key, (0, 0))
        totals[key] = count + each.count, num_bytes + each.num_bytes
    return totals


def test_the_second_time_is_free(plan, cache, monkeypatch):
    found = []
    for _ in range(2):
        # From one line: programs carry the places that they come from.
        found.append(aq.verify(plan, train_step, *arguments(), cache=cache))
        monkeypatch.setattr(compiling.CompilerProcess, "compile", None)
    first, again = found
    assert not first.stages[0].compiled.cached and again.stages[0].compiled.cached
    assert first.stages[0].compiled_bytes == again.stages[0].compiled_bytes > 0
    assert first.fits and "fits 8 x cpu" in str(first)


def test_the_compiler_starts_while_the_program_is_written_down(plan, cache, monkeypatch):
    order, write = [], verifying.portable_program
    start = compiling.CompilerProcess.start
    monkeypatch.setattr(
        compiling.CompilerProcess, "start", lambda process: order.append("start") or start(process)
    )
    monkeypatch.setattr(
        verifying, "portable_program", lambda *args: order.append("write") or write(*args)
    )
    aq.verify(plan, train_step, *arguments(), cache=cache)
    assert order == ["start", "write"]


def test_no_room_for_the_cache_is_a_remark(plan, tmp_path):
    (tmp_path / "file").write_text("")
    found = aq.verify(plan, train_step, *arguments(), cache=tmp_path / "file" / "cache")
    assert found.stages[0].compiled_bytes > 0
    assert any("not kept" in remark for remark in found.remarks)


def test_no_room_for_the_program(plan, cache, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "missing-folder")
    with pytest.raises(InputError, match="cannot be written to 'missing-folder'.*TMPDIR"):
        aq.verify(plan, train_step, *arguments(), cache=cache)


@pytest.mark.parametrize(
    ("script", "error", "messages"),
    [
        (
            "kill -9 $$",
            CompileError,
            ("was stopped when it had taken", "most likely because there was no more"),
        ),
        ("echo terminate: std::bad_alloc >&2; exit 1", CompileError, ("was stopped", "program of")),
        (
            "echo strange words >&2; exit 3",
            CompileError,
            ("code 3", "strange words", "All that it said is in"),
        ),
        (
            (
                'echo \'{"error": "JaxRuntimeError", "message": "UNIMPLEMENTED: no'
                " such\\\\nmore\"}' > $folder/result.json"
            ),
            CompileError,
            ("does not compile for cpu", "UNIMPLEMENTED: no such", "All that it said is in"),
        ),
    ],
)
def test_compilers_that_fail(plan, cache, tmp_path, monkeypatch, script, error, messages):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\nread folder\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr("sys.executable", str(path))
    with pytest.raises(error) as refusal:
        aq.verify(plan, train_step, *arguments(), cache=cache)
    text = str(refusal.value)
    assert all(message in text for message in messages), text
    assert text.count("\n") <= 1
    if "All that it said" in text:
        assert list(cache.glob("*.txt"))


@pytest.mark.parametrize(
    "words",
    [
        "Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm.",
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries (20.50G)"
            " exceeds available HBM (15.75G)."
        ),
    ],
)
def test_a_program_that_does_not_fit_is_an_answer(words, plan, cache, tmp_path, monkeypatch):
    path = tmp_path / "python"
    words = f"RESOURCE_EXHAUSTED: {words}"
    path.write_text(
        f'#!/bin/sh\nread folder\necho \'{{"error": "E", "message": "{words}"}}\' >'
        " $folder/result.json\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr("sys.executable", str(path))
    found = aq.verify(plan, train_step, *arguments(), cache=cache)
    assert not found.fits
    assert found.stages[0].compiled_bytes == 20.5 * 2**30
    assert any("Ran out of memory" in remark for remark in found.remarks)


@pytest.mark.parametrize(
    ("target", "versions", "messages"),
    [
        (
            "H100",
            {},
            (
                (
                    "not installed (missing: jax-cuda12-plugin, jax-cuda12-pjrt,"
                    " nvidia-cuda-nvcc-cu12)"
                ),
                "[verify-gpu]'",
            ),
        ),
        (
            "H100",
            {
                "jax-cuda12-plugin": "0.4.1",
                "jax-cuda12-pjrt": "0.4.1",
                "nvidia-cuda-nvcc-cu12": "12.9",
            },
            (
                "jax-cuda12-plugin 0.4.1",
                f"JAX is {jax.__version__}",
                f"pip install --no-deps jax-cuda12-plugin=={jax.__version__}",
            ),
        ),
        ("v5e", {}, ("not installed (missing: libtpu)", "[verify-tpu]'")),
    ],
)
def test_compilers_that_are_not_installed(target, versions, messages, monkeypatch):
    def version(package):
        if package != "jax" and package not in versions:
            raise PackageNotFoundError(package)
        return versions.get(package, jax.__version__)

    monkeypatch.setattr(wheels, "version", version)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CompilerMissingError) as refusal:
        require_compiler(resolve_target(target, Cluster.preset("8xH100")))
    assert all(message in str(refusal.value) for message in messages), str(refusal.value)


def test_tpu_memory_is_taken_from_the_compilers_report(tmp_path):
    """Main memory alone, whatever the temporaries were said to be; without a report they stay."""
    memory = {
        "argument_bytes": 1000,
        "output_bytes": 900,
        "alias_bytes": 800,
        "temp_bytes": 7000,
        "live_bytes": 5,
    }
    working._correct_temporaries(memory, tmp_path / "reports")
    assert memory["temp_bytes"] == 7000
    (tmp_path / "reports").mkdir()
    report = (
        tmp_path
        / "reports"
        / "module_0000.jit_call.cl_1.after_optimizations-memory-usage-report.txt"
    )
    report.write_text(
        "Memory Space: default (color=0)\nTotal bytes: 6100 (6.0KiB)\n\nMemory Space: vmem"
        " (color=1)\nTotal bytes: 9"
    )
    working._correct_temporaries(memory, tmp_path / "reports")
    assert memory["temp_bytes"] == 5000 and memory["live_bytes"] == 5
    assert not (tmp_path / "reports").exists()


def test_cache_folder_of_answers(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "aliquot" / "verify"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache().is_relative_to(os.path.expanduser("~"))
