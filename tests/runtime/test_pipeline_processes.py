"""Pipelines in two, three and four processes on this machine: the same numbers as on one device, and no hang when one dies."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from runtime.pipeline_worker import NUM_STEPS, batch_of, init, train_step
from runtime.ports import coordinator_port

WORKER = Path(__file__).parent / "pipeline_worker.py"
TIMEOUT_S = 240
DEATH_S = 30
DEVICES = {2: 4, 3: 6, 4: 4}


@contextlib.contextmanager
def started(count: int, task: str, *cases: dict, plain: str = ""):
    """Processes of the worker. Whoever still runs at the end is killed: hung processes listen to nothing gentler."""
    tests = WORKER.parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}"}
    port = coordinator_port()
    devices = DEVICES[count] if task != "endless" else sum(cases[0]["sizes"])
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), *map(str, (k, count, port, devices, plain, task)), *map(json.dumps, cases)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for k in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            process.stderr.close()


def found(count: int, *cases: dict, plain: str) -> list[list[dict]]:
    """What each process found in each case."""
    with started(count, "equal", *cases, plain=plain) as processes:
        printed = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    errors = "".join(said[-2000:] for _, said in printed)
    assert [process.returncode for process in processes] == [0] * count, errors
    return [json.loads(out.splitlines()[-1])["found"] for out, _ in printed]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> str:
    """A file with the losses of plain steps, and the leaves of the state behind them."""
    with jax.enable_x64(True):
        state, step, losses = jax.jit(init)(jax.random.key(0)), jax.jit(train_step), []
        for number in range(NUM_STEPS):
            state, metrics = step(state, batch_of(number))
            losses.append(float(metrics["loss"]))
        leaves = jax.tree.leaves({**state, "key": jax.random.key_data(state["key"])})
    path = tmp_path_factory.mktemp("plain") / "steps.npz"
    np.savez(path, losses, *leaves)
    return str(path)


TWO = [
    {"sizes": [1, 1, 2], "schedule": "gpipe", "micro_batches": 2},
    {"sizes": [2, 2], "chunks": 2, "schedule": "interleaved-1f1b", "check": True},
    # The stage in the middle has a device of either process.
    {"sizes": [1, 2, 1], "cut": True},
]
# Stages of unequal size, one of them on two processes: two pieces of an array for each device of the smaller one.
THREE = [{"sizes": [4, 2], "cut": True, "micro_batches": 2}, {"sizes": [2, 4], "micro_batches": 2}]
MISFIT = {"task": "refused", "sizes": [1, 1]}
FOUR = [
    MISFIT,
    {"sizes": [1, 1, 1, 1], "schedule": "zero-bubble"},
    {"sizes": [2, 2], "layers": 2},
    {"sizes": [1, 2, 1]},
]


@pytest.mark.parametrize(("count", "cases"), [(2, TWO), (3, THREE), (4, FOUR)], ids=["two", "three", "four"])
def test_processes_train_as_one_device(count, cases, plain):
    by_process = found(count, *({"layers": 4, "micro_batches": 4, **case} for case in cases), plain=plain)
    for process, results in enumerate(by_process):
        for case, result in zip(cases, results, strict=True):
            if case is MISFIT:
                assert "processes 2, 3 have no device" in result["refused"], process
                continue
            for mine, wanted in result["losses"]:
                assert mine == pytest.approx(wanted, rel=1e-9), (process, case)
            assert result["state"] < 1e-9, (process, case)
            assert result["check"] < 1e-9, (process, case)
            assert result["stages"] == list(range(len(case["sizes"]) * case.get("chunks", 1)))
            # The last process has the last stages' parameters only.
            assert by_process[-1][cases.index(case)]["kept"] < result["all"], case


def test_what_waits_for_others_does_not_stop_what_they_wait_for(monkeypatch):
    # As on a machine with two cores: no thread is left where both devices wait.
    monkeypatch.setenv("PJRT_NPROC", "2")
    with started(3, "relayed", {}) as processes:
        printed = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], "".join(said[-2000:] for _, said in printed)
    assert [json.loads(out.splitlines()[-1])["found"] for out, _ in printed] == [[[]], [[4.0, 4.0]], [[4.0, 4.0]]]


def read(stream, lines: list[str]) -> threading.Thread:
    """Gather a process's lines as they come."""
    thread = threading.Thread(target=lambda: lines.extend(iter(stream.readline, "")), daemon=True)
    thread.start()
    return thread


FORWARD = {"forward": True, "schedule": "inference"}


@pytest.mark.parametrize(
    ("count", "killed", "case"),
    [
        # JAX aborts all at once when its coordinator is gone: the watch has its say even if it comes late.
        pytest.param(3, 0, {"late": True}, id="the coordinator dies"),
        pytest.param(2, 0, {"late": True, "backwards": True, **FORWARD}, id="a coordinator that only receives dies"),
        pytest.param(2, 1, FORWARD, id="one that only receives dies"),
        pytest.param(3, 1, {"sizes": [4, 2], "micro_batches": 2}, id="one of two that share a stage dies"),
    ],
)
def test_the_others_end_when_one_dies(count, killed, case):
    case = {"sizes": [1] * count, "layers": 4, "micro_batches": 4, **case}
    stages = np.repeat(range(len(case["sizes"])), np.array(case["sizes"]) * count // sum(case["sizes"])).tolist()
    stages = stages[:: -1 if case.get("backwards") else 1]
    with started(count, "endless", case) as processes:
        out, errors = [[[] for _ in processes] for _ in range(2)]
        readers = [read(p.stdout, lines) for p, lines in zip(processes, out, strict=True)]
        readers += [read(p.stderr, lines) for p, lines in zip(processes, errors, strict=True)]
        deadline = time.monotonic() + TIMEOUT_S
        while not all(any('"step": 2' in line for line in lines) for lines in out):
            said = "".join("".join(lines)[-2000:] for lines in errors)
            assert time.monotonic() < deadline and all(p.poll() is None for p in processes), said
            time.sleep(0.1)
        processes[killed].kill()
        start = time.monotonic()
        others = [k for k in range(count) if k != killed]
        codes = [processes[k].wait(timeout=DEATH_S) for k in others]
        assert time.monotonic() - start < DEATH_S
        for thread in readers:
            thread.join(10)
    for k, code in zip(others, codes, strict=True):
        said = "".join(errors[k])
        assert re.search(rf"process {killed}\b.* has ended", said), said
        issued = rf"Process {k} \(stage {stages[k]}\) had issued instruction \d+ of \d+ \(.*\) of step \d+"
        assert re.search(issued, said), said
        exchanged = rf"exchange with process {killed} \(stage {stages[killed]}\) is instruction"
        assert re.search(exchanged, said) or count > 2, said
        assert code == 3, said
