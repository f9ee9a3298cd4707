"""Two and four processes on this machine train as one device does."""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from runtime.host_worker import NUM_STEPS, batch_of, workload
from runtime.ports import coordinator_port

from aliquot.runtime.transport._hosts import _spare_threads, reserved_port

WORKER = Path(__file__).parent / "host_worker.py"
TIMEOUT_S = 170


def run(count: int, mesh: tuple[int, ...], num_micro_batches: int) -> list[dict]:
    """What each process printed. Hung processes are killed: they do not listen to anything
    gentler.
    """
    tests = WORKER.parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}", "JAX_ENABLE_X64": "0"}
    port = coordinator_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), *map(str, (k, count, port, num_micro_batches, *mesh))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for k in range(count)
    ]
    try:
        printed = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    for process, (_, errors) in zip(processes, printed, strict=True):
        assert process.returncode == 0, errors[-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in printed]


@pytest.mark.parametrize(
    ("count", "mesh", "num_micro_batches"),
    [
        (2, (), 1),
        pytest.param(2, (4, 2), 2, marks=pytest.mark.slow),
        *(pytest.param(4, mesh, 1, marks=pytest.mark.slow) for mesh in ((8,), ())),
    ],
)
def test_several_processes_train_as_one_device(count, mesh, num_micro_batches):
    for found in run(count, mesh, num_micro_batches):
        assert found["devices"] == 8
        assert found["scatters"] is (mesh == ())
        assert found["losses"] == pytest.approx(plain_losses(), rel=1e-5)
    assert plain_losses()[0] != pytest.approx(plain_losses()[1], rel=1e-6)


def test_ports_are_never_those_of_other_processes_or_of_the_system():
    with contextlib.ExitStack() as stack:
        found = [
            stack.enter_context(reserved_port("127.0.0.1", 1, 3)).getsockname()[1]
            for _ in range(20)
        ]
        assert {port % 3 for port in found} == {(16384 + 1) % 3} and len(set(found)) == 20
    # One port in all: whoever holds it, the other would be the system's.
    with reserved_port("127.0.0.1", 7, 16384) as held:
        with pytest.raises(OSError, match="no port from 16384 to 32767 is free at 127.0.0.1"):
            reserved_port("127.0.0.1", 7, 16384)
        # Transfers listen there nevertheless, and connections are theirs alone.
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(held.getsockname())
            listener.listen()
            for _ in range(20):
                with socket.create_connection(held.getsockname()), listener.accept()[0]:
                    pass
            held.close()
            with pytest.raises(OSError, match="no port"):
                reserved_port("127.0.0.1", 7, 16384)


@pytest.mark.parametrize(
    ("flags", "given", "threads"),
    [
        (
            "--xla_force_host_platform_device_count=8 --xla_force_host_platform_device_count=4",
            "3",
            "10",
        ),
        ("", "3", "4"),
        ("--xla_force_host_platform_device_count=4", "64", "64"),
    ],
    ids=["the last flag counts", "one device", "enough already"],
)
def test_cpu_devices_have_threads_to_spare(flags, given, threads, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("PJRT_NPROC", given)
    _spare_threads()
    assert os.environ["PJRT_NPROC"] == threads


@functools.cache
def plain_losses():
    work = workload()
    state, step = jax.jit(work.init)(jax.random.key(0)), jax.jit(work.train_step)
    losses = []
    for number in range(NUM_STEPS):
        state, metrics = step(state, batch_of(work, number))
        losses.append(float(metrics["loss"]))
    return losses
