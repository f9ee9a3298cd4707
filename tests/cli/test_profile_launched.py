"""`aliquot profile run --launch` with two processes, of which one is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aliquot.plans import Plan
from aliquot.profiling import ProfileDatabase

RUN = """
    profile run gpt-10m --global-batch 8 --set num_layers=1 --set hidden_size=32 --set num_heads=2
    --set vocab_size=128 --seq-len 16 --dtype float32 --mesh 2x2 --database p.sqlite --repeats 1
    --warm-up 1 --least-s 0 --retries 0 --largest-in-host 16KiB --largest-between-hosts 64KiB
    --launch local:2 --num-devices-per-host 2
""".split()


def known(path):
    with ProfileDatabase(path) as database:
        return len(database)


def children(pid):
    return [int(k) for k in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_lost_process_ends_the_run_and_the_next_goes_on(tmp_path):
    settings = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def started(*more):
        return subprocess.Popen(
            [sys.executable, "-m", "aliquot", *RUN, *more],
            cwd=tmp_path,
            env=settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    path, first = tmp_path / "p.sqlite", started()
    while first.poll() is None and not (path.exists() and known(path) > 3):
        time.sleep(0.1)
    os.kill(children(first.pid)[1], signal.SIGKILL)
    _, errors = first.communicate()
    assert first.returncode == 128 + signal.SIGKILL, errors
    assert "process 1 of 2, on this machine (pid" in errors and "killed by SIGKILL" in errors
    assert "Process 0 was measuring " in errors and "Traceback" not in errors
    assert "To start again from what they have measured: --max-restarts 3." in errors
    before = known(path)
    assert before > 3
    second = started()
    said, errors = second.communicate()
    assert second.returncode == 0, errors
    assert f"{before} known before, 0 missing." in said
    assert "aliquot plan gpt-10m --cluster 2x2xcpu --profiles p.sqlite" in said


@pytest.mark.slow
def test_blocks_are_measured_and_searched_in_two_processes(tmp_path):
    model = """
        gpt-10m --global-batch 8 --set num_layers=1 --set hidden_size=32 --set num_heads=2
        --set vocab_size=64 --seq-len 16 --dtype float32 --recompute none
        --database p.sqlite --launch local:2 --num-devices-per-host 2
    """.split()
    few = "--share 1/20 --repeats 1 --warm-up 1 --least-s 0 --retries 0".split()
    settings = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def answer_of(*words):
        done = subprocess.run(
            [sys.executable, "-m", "aliquot", "blocks", *words, *model, "--json"],
            cwd=tmp_path,
            env=settings,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    measured = answer_of("profile", *few)
    assert measured["measured"] == measured["programs"] == known(tmp_path / "p.sqlite")
    found = answer_of("search", "--run", "1", "--out", "plan.json")
    best = found["found"][0]
    assert best["measured_s"] > 0 and best["measured_share"] > 0
    assert Plan.load(tmp_path / "plan.json").stages[0].mesh_shape == (4,)
