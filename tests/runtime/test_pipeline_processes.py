"""Pipelines in two, three and four processes on this machine: the same numbers as on one device,
and no hang when one dies.
"""

import contextlib
import json
import re
import threading
import time
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest
from planners.small_steps import mlp
from runtime import processes
from runtime.pipeline_worker import NUM_STEPS, batch_of, init, train_step

import aliquot as aq

WORKER = Path(__file__).parent / "pipeline_worker.py"
GPT_WORKER = Path(__file__).parent / "gpt_worker.py"
TIMEOUT_S = 240
DEATH_S = 30
DEVICES = {2: 4, 3: 6, 4: 4}


@contextlib.contextmanager
def started(count: int, task: str, *cases: dict, plain: str = ""):
    """Processes of the worker."""
    devices = DEVICES[count] if task != "endless" else sum(cases[0]["sizes"])
    with processes.started(WORKER, count, devices, plain, task, *map(json.dumps, cases)) as found:
        yield found


def found(count: int, *cases: dict, plain: str = "", task: str = "equal") -> list[list[dict]]:
    """What each process found in each case."""
    with started(count, task, *cases, plain=plain) as running:
        return [said["found"] for said in processes.last_lines(running, TIMEOUT_S)]


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
    {"sizes": [1, 2, 1], "parts": True},
]
# Stages of unequal size, one of them on two processes.
THREE = [
    {"sizes": [4, 2], "micro_batches": 2, "parts": True},
    {"sizes": [2, 4], "micro_batches": 2},
]
MISFIT = {"task": "refused", "sizes": [1, 1]}
FOUR = [
    MISFIT,
    {"sizes": [1, 1, 1, 1], "schedule": "zero-bubble"},
    {"sizes": [2, 2], "layers": 2},
    {"sizes": [1, 2, 1]},
]


@pytest.mark.parametrize(
    ("count", "cases"),
    [
        pytest.param(2, TWO, id="two"),
        pytest.param(3, THREE, id="three", marks=pytest.mark.slow),
        pytest.param(4, FOUR, id="four", marks=pytest.mark.slow),
    ],
)
def test_processes_train_as_one_device(count, cases, plain):
    by_process = found(
        count, *({"layers": 4, "micro_batches": 4, **case} for case in cases), plain=plain
    )
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


def test_a_plan_that_leaves_a_host_idle_is_refused_and_one_made_here_uses_all(tmp_path):
    case = {"step": [[1024, 1024, 1024, 1024], 256], "cluster": "2x4xH100"}
    step, one_host = mlp(*case["step"]), aq.Cluster.preset("2xH100")
    found_here = aq.plan(*step, cluster=aq.Cluster.preset(case["cluster"]), num_micro_batches=1)
    assert found_here.idle_hosts == 1
    plan = aq.plan(*step, cluster=one_host, method=aq.ShardParallel())
    msgspec.structs.replace(plan, idle_hosts=1).save(tmp_path / "plan.json")
    case["plan"] = str(tmp_path / "plan.json")
    for (result,) in found(2, case, task="idle"):
        assert result["idle_hosts"] == [0, 1]
        assert "leaves 1 host of 2 idle, and process 1 of 2 would have" in result["refused"]
        assert "Start processes on the first host only" in result["refused"]


@pytest.fixture(scope="module")
def transfers() -> tuple[list, list]:
    """What each of three processes found of transfers while collectives wait, and of many moves."""
    with pytest.MonkeyPatch.context() as patch:
        # As on a machine with two cores: no thread is left where both devices wait.
        patch.setenv("PJRT_NPROC", "2")
        relayed, moved = zip(*found(3, {"task": "relayed"}, {"task": "moved"}), strict=True)
    return list(relayed), list(moved)


def test_waiting_collectives_do_not_block_transfers(transfers):
    assert transfers[0] == [[], [4.0, 4.0], [4.0, 4.0]]


def test_arrays_arrive_as_they_were(transfers):
    """From any devices of some processes to any of others, however split."""
    assert transfers[1] == [{"moves": 40}] * 3


# gpt-10m: stages of real widths, whose arrays cross in many sizes. As JSON for a worker.
GPT = {
    "layers": 2,
    "stages": 2,
    "batch": 8,
    "seq_len": 64,
    "micro_batches": 2,
    "schedule": "1f1b",
    "steps": 8,
}
SHORT = [
    # Casts of the tied embedding are made in both stages, each in a process of its own.
    pytest.param(2, {"devices": 2, "dtype": "bf16"}, marks=pytest.mark.slow),
    pytest.param(2, {"devices": 4, "parts": True}, marks=pytest.mark.slow),
    pytest.param(
        3,
        # Hosts, so that each process has one stage.
        {
            "devices": 6,
            "cluster": "3x2xcpu",
            "stages": 3,
            "layers": 3,
            "batch": 12,
            "parts": True,
        },
        marks=pytest.mark.slow,
    ),
    pytest.param(
        2,
        {"devices": 8, "seq_len": 16, "schedule": "gpipe", "micro_batches": 4, "batch": 16},
        marks=pytest.mark.slow,
    ),
]
# Each number of processes, of devices of each, length and schedule once, for more steps.
LONG = [
    pytest.param(
        count,
        {
            "devices": count * each,
            "layers": count,
            "stages": count,
            "schedule": schedule,
            "seq_len": length,
            "steps": 24,
            "limit_s": 600,
        },
        marks=pytest.mark.slow,
    )
    for count, each, length, schedule in (
        (2, 4, 16, "gpipe"),
        (4, 1, 64, "1f1b"),
        (2, 2, 128, "zero-bubble"),
    )
]


@pytest.mark.parametrize(("count", "case"), [*SHORT, *LONG], ids=str)
def test_a_gpt_trains_as_in_one_process(count, case):
    case = {**GPT, **case}
    timeout_s = case.get("limit_s", TIMEOUT_S)
    with processes.started(GPT_WORKER, 1, json.dumps(case)) as alone:
        (wanted,) = processes.last_lines(alone, timeout_s)
    with processes.started(GPT_WORKER, count, json.dumps(case)) as together:
        for said in processes.last_lines(together, timeout_s):
            assert said["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
    assert len(wanted["losses"]) == case["steps"] and wanted["losses"][0] > wanted["losses"][-1]


def read(stream, lines: list[str]) -> threading.Thread:
    """Gather a process's lines as they come."""
    thread = threading.Thread(target=lambda: lines.extend(iter(stream.readline, "")), daemon=True)
    thread.start()
    return thread


FORWARD = {"forward": True, "schedule": "inference"}


@pytest.mark.parametrize(
    ("count", "killed", "case"),
    [
        # JAX aborts all at once when its coordinator is gone: the watch has its say even if it
        # comes late.
        pytest.param(3, 0, {"late": True}, id="the coordinator dies", marks=pytest.mark.slow),
        pytest.param(
            2,
            0,
            {"late": True, "backwards": True, **FORWARD},
            id="a coordinator that only receives dies",
        ),
        pytest.param(2, 1, FORWARD, id="one that only receives dies"),
        pytest.param(
            3, 1, {"sizes": [4, 2], "micro_batches": 2}, id="one of two that share a stage dies"
        ),
    ],
)
def test_the_others_end_when_one_dies(count, killed, case):
    case = {"sizes": [1] * count, "layers": 4, "micro_batches": 4, **case}
    stages = np.repeat(
        range(len(case["sizes"])), np.array(case["sizes"]) * count // sum(case["sizes"])
    ).tolist()
    stages = stages[:: -1 if case.get("backwards") else 1]
    with started(count, "endless", case) as running:
        out, errors = [[[] for _ in running] for _ in range(2)]
        readers = [read(p.stdout, lines) for p, lines in zip(running, out, strict=True)]
        readers += [read(p.stderr, lines) for p, lines in zip(running, errors, strict=True)]
        deadline = time.monotonic() + TIMEOUT_S
        while not all(any('"step": 2' in line for line in lines) for lines in out):
            said = "".join("".join(lines)[-2000:] for lines in errors)
            assert time.monotonic() < deadline and all(p.poll() is None for p in running), said
            time.sleep(0.1)
        running[killed].kill()
        start = time.monotonic()
        others = [k for k in range(count) if k != killed]
        codes = [running[k].wait(timeout=DEATH_S) for k in others]
        assert time.monotonic() - start < DEATH_S
        for thread in readers:
            thread.join(10)
    for k, code in zip(others, codes, strict=True):
        said = "".join(errors[k])
        assert re.search(rf"process {killed}\b.* has ended", said), said
        issued = (
            rf"Process {k} \(stage {stages[k]}\) had issued instruction \d+ of \d+ \(.*\) of"
            r" step \d+"
        )
        assert re.search(issued, said), said
        exchanged = rf"exchange with process {killed} \(stage {stages[killed]}\) is instruction"
        assert re.search(exchanged, said) or count > 2, said
        assert code == 3, said
