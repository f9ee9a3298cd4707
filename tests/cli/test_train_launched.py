"""`aliquot train --launch`: its options, and a run of two processes that loses one and goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import refused, run

TRAIN = ("train", "gpt-10m", "--data", "text.txt", "--steps", 12)
TINY = """
    --global-batch 8 --set num_layers=2 --set hidden_size=32 --set num_heads=2 --set seq_len=16
    --set vocab_size=256 --dtype float64 --method zero3 --save-every 3 --log-every 1
""".split()


TWO = ("--launch", "local:2", "--num-devices-per-host", 2)


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (("--num-hosts", 2), ["--num-hosts: say what starts the processes, with --launch local:2"]),
        (("--launch", "external", "--max-restarts", 1), ["--max-restarts: say what starts"]),
        (("--launch", "loal:2"), ["did you mean 'local:2'?"]),
        (
            ("--launch", "ray", "--min-hosts", 1, "--devices", 8, "--plan", "plan.json"),
            ["--devices 8 is for one process", "--num-devices-per-host 8", "leave --plan out"],
        ),
        (("--launch", "local:2", "--save-every", 0), ["--save-every must be at least 1, got 0"]),
    ],
)
def test_bad_options_are_refused_before_anything_starts(options, messages):
    refused(run(*TRAIN, *options), *messages)


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


def children(pid):
    return [int(k) for k in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def started(folder, *more):
    """`aliquot train` of a tiny model on a text, in a folder."""
    (folder / "text.txt").write_text("\n".join(map(str, range(20000))))
    return subprocess.Popen(
        [sys.executable, "-m", "aliquot", *map(str, TRAIN), *TINY, *map(str, more)],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_run_of_two_processes_goes_on_after_one_is_killed(tmp_path):
    plain = started(tmp_path, "--devices", 4, "--cluster", "4xcpu", "--out", "plain")
    assert plain.communicate()[1] is not None and plain.returncode == 0
    launcher = started(tmp_path, *TWO, "--out", "run")
    saved = tmp_path / "run" / "checkpoints" / "3"
    while not saved.exists() and launcher.poll() is None:
        time.sleep(0.02)
    os.kill(children(launcher.pid)[1], signal.SIGKILL)
    said, errors = launcher.communicate()
    assert launcher.returncode == 0, errors
    assert "process 1 of 2, on this machine (pid" in errors and "was killed by SIGKILL" in errors
    assert "(attempt 2 of 4)" in errors and "resuming after step" in errors
    assert "written to run" in said
    expected, found = losses(tmp_path / "plain"), losses(tmp_path / "run")
    assert list(found) == list(expected) == list(range(1, 13))
    assert found == pytest.approx(expected, rel=1e-12)
    logs = sorted(path.name for path in (tmp_path / "run" / "logs" / "attempt-2").iterdir())
    assert logs == ["process-0.log", "process-1.log"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGTERM, 143, "asked to end (SIGTERM)"), (signal.SIGINT, 130, "interrupted")],
)
def test_two_processes_that_are_asked_to_end_stop_at_one_step_behind_a_checkpoint(
    tmp_path, number, code, message
):
    launcher = started(tmp_path, *TWO, "--out", "run", "--steps", 5000)
    checkpoints = tmp_path / "run" / "checkpoints"
    while not (checkpoints / "3").exists() and launcher.poll() is None:
        time.sleep(0.02)
    launcher.send_signal(number)
    said, errors = launcher.communicate()
    assert launcher.returncode == code, errors
    assert f"error: {message}; all processes have ended." in errors and "Traceback" not in errors
    done = int(re.search(r"^interrupted; (\d+) of 5000 steps are done", errors, re.MULTILINE)[1])
    assert f"{done} steps: loss" in said and list(losses(tmp_path / "run")) == [*range(1, done + 1)]
    assert max(int(path.name) for path in checkpoints.iterdir()) == done
    one = started(
        tmp_path, "--devices", 4, "--cluster", "4xcpu", "--out", "run", "--steps", done + 1
    )
    _, errors = one.communicate()
    assert one.returncode == 0 and f"resuming after step {done}" in errors, errors
    assert list(losses(tmp_path / "run")) == [*range(1, done + 2)]
