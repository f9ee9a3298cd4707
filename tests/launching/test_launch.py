"""The launcher with processes of this machine: what they are told, what is passed on, and what
happens when one fails.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import refused, run

import aliquot as aq
from aliquot.core import LaunchedProcess
from aliquot.launching import Launched, _attempt
from aliquot.launching._local import LocalEngine

WORKER = str(Path(__file__).with_name("plain_worker.py"))


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Failed runs start again without a pause."""
    monkeypatch.setattr("aliquot.launching._launch._PAUSE_S", 0)
    monkeypatch.delenv("ALIQUOT_SECRET", raising=False)


def launched(*command, engine="local:2", **options):
    """The result of a launch, all lines that were shown, and all notes."""
    lines, notes = [], []
    options = {"note": notes.append, "show": lambda *line: lines.append(line), **options}
    return aq.launch([WORKER, *command], engine, **options), lines, notes


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def end_soon(pids):
    """Whether these processes, which have been killed, are gone once the system gets to it."""
    until = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return bool(pids) and not any(map(is_alive, pids))


def test_processes_are_told_their_places_and_share_a_secret():
    done, lines, notes = launched("tell", num_devices_per_host=3)
    told = sorted(line.split() for _, is_error, line in lines if not is_error)
    assert done == Launched(num_processes=2, failures=()) and notes == []
    assert [words[:2] for words in told] == [["0", "1"], ["1", "1"]]
    assert told[0][2:] == told[1][2:]
    address, count, name, secret = told[0][2:]
    assert address.startswith("127.0.0.1:") and count == "2"
    assert name.endswith("attempt-1") and len(secret) == 43
    flags = [line for _, is_error, line in lines if is_error]
    assert all(
        line.endswith("device_count=3") and line.count("device_count") == 1 for line in flags
    )


def test_each_run_has_a_secret_of_its_own_unless_the_user_has_one(monkeypatch):
    def secret():
        lines = launched("tell", engine="local:1")[1]
        return next(line for _, is_error, line in lines if not is_error).split()[-1]

    assert secret() != secret()
    monkeypatch.setenv("ALIQUOT_SECRET", "one-that-the-user-has-made")
    assert secret() == "one-that-the-user-has-made"


@pytest.mark.parametrize(
    ("how", "why", "code"),
    [("SIGKILL", "was killed by SIGKILL", 137), ("5", "ended with exit code 5", 5)],
)
def test_the_process_that_failed_first_is_named_with_its_last_lines(how, why, code):
    with pytest.raises(aq.LaunchError) as caught:
        launched("fail", how)
    said = str(caught.value)
    assert "process 1 of 2, on this machine (pid" in said and why in said
    assert "  | about to fail" in said and "--max-restarts 3" in said
    assert caught.value.exit_code == code


def test_all_are_started_again_and_the_failure_is_told(tmp_path):
    done, _, notes = launched("fail", "SIGKILL", max_restarts=2, logs=tmp_path / "logs")
    (failure,) = done.failures
    assert failure.process == 1 and failure.ending.code == -signal.SIGKILL
    (note,) = notes
    assert "was killed by SIGKILL" in note and "(attempt 2 of 3)" in note
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.log"))
    assert files == [f"logs/attempt-{n}/process-{k}.log" for n in (1, 2) for k in (0, 1)]
    assert (tmp_path / "logs/attempt-1/process-1.log").read_text() == "about to fail\n"


def test_restarts_are_counted():
    # It fails in the first attempt alone, so the third command never runs.
    with pytest.raises(aq.LaunchError, match=r"started 2 times \(--max-restarts 1\)"):
        aq.launch(["python", "-c", "raise SystemExit(9)"], "local:1", max_restarts=1)


def test_bad_input_is_not_tried_again():
    with pytest.raises(aq.LaunchError, match="Exit code 2 says") as caught:
        launched("fail", "2", max_restarts=5)
    assert caught.value.exit_code == 2


def test_an_unknown_command_is_not_tried_again():
    with pytest.raises(aq.LaunchError, match="'no-such-command' cannot be started: No such file"):
        aq.launch(["no-such-command"], "local:1", max_restarts=5)


def test_processes_that_would_stay_are_killed_with_all_that_they_started(monkeypatch):
    monkeypatch.setattr(_attempt, "_PATIENCE_S", 1.5)
    lines = []
    with pytest.raises(aq.LaunchError, match="ended with exit code 7"):
        launched("hang", show=lambda *line: lines.append(line))
    assert end_soon([int(line.split()[1]) for _, _, line in lines if line.startswith("child")])


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system tells no states")
def test_a_stopped_process_is_seen_and_all_start_again(monkeypatch):
    monkeypatch.setattr("aliquot.launching._child._STOPPED_S", 0.2)
    done, _, (note,) = launched("fail", "SIGSTOP", max_restarts=1)
    assert "process 1 of 2" in note and "is stopped (by SIGSTOP" in note
    assert done.failures[0].ending.exit_code == 1


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system to bind lives together")
def test_processes_end_with_a_launcher_that_is_killed(tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()
    code = (
        f"import os, time; open('{pids}/' + str(os.getpid()), 'w'); print('up', flush=True);"
        " time.sleep(600)"
    )
    command = [sys.executable, "-m", "aliquot", "launch", "local:2", "--", "python", "-c", code]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert [launcher.stdout.readline(), launcher.stdout.readline()]
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    started = [int(path.name) for path in pids.iterdir()]
    assert len(started) == 2 and end_soon(started)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_request_to_end_is_passed_on_and_waited_for(number, code):
    how = "obey" if number == signal.SIGTERM else "hang"
    command = [sys.executable, "-m", "aliquot", "launch", "local:1", "--", WORKER, how]
    launcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    first = launcher.stdout.readline()
    assert first.startswith("[0] ")
    os.kill(launcher.pid, number)
    said, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == code
    if number == signal.SIGTERM:
        assert said == "[0] process 0 saves and ends\n"
        assert errors == "error: asked to end (SIGTERM); all processes have ended.\n"


def test_the_command_line_shows_lines_with_their_process():
    found = run("launch", "local:1", "--", "python", "-c", "print('à la fin')")
    assert (found.exit_code, found.stdout, found.stderr) == (0, "[0] à la fin\n", "")
    refused(run("launch", "local:1", "--", "python", "-c", "exit(4)"), "exit code 4", code=4)


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (("loal:2",), ["'loal:2' is no engine: did you mean 'local:2'?"]),
        (("local:0",), ["1 to 1024 can be"]),
        (("local",), ["did you mean 'local:2'?"]),
        (
            ("local:2", "--num-hosts", 2, "--min-hosts", 3, "--address", "x:1"),
            ["--num-hosts is for Ray", "--address is for Ray", "--min-hosts 3 is more than"],
        ),
        (("local:2", "--num-devices-per-host", 0), ["--num-devices-per-host must be at least 1"]),
        (("local:2", "--max-restarts", -1), ["--max-restarts must not be negative, got -1"]),
        (("local:2", "--logs", "/dev/null/logs"), ["logs cannot be written to '/dev/null/logs'"]),
    ],
)
def test_bad_options_are_refused(options, messages):
    refused(run("launch", *options, "--", "true"), *messages)


def test_options_of_a_command_need_dashes_before_it():
    found = run("launch", "--max-restarts", 2, "local:2", "python", "my script.py", "--steps=3")
    refused(found, "--max-restarts 2 local:2 -- python 'my script.py' --steps=3")
    # A word of the command that is an option of nobody, and the verb's own help.
    refused(run("launch", "local:1", "python", "-c", "print(1)"), "-- python -c 'print(1)'")
    assert run("launch", "local:1", "--help").exit_code == 0


def test_a_command_is_a_list_of_words():
    for command in ("python x.py", []):
        with pytest.raises(aq.InputError, match="must be a list of words"):
            aq.launch(command, "local:1")


def test_gpus_are_shared_out(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    lines = []
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    aq.launch(["python", "-c", code], "local:2", show=lambda *line: lines.append(line[::2]))
    assert sorted(lines) == [(0, "4,5"), (1, "6,7")]
    with pytest.raises(aq.InputError, match="4 GPUs, which 3 processes cannot share equally"):
        LocalEngine(3)
    with pytest.raises(aq.InputError, match="2 processes with 3 devices each need 6 GPUs"):
        LocalEngine(2, 3)


def test_a_broken_place_is_refused():
    place = LaunchedProcess(
        address="127.0.0.1:1", num_processes=2, process_id=1, run_id="night", attempt=3
    )
    told = place.environment()
    assert LaunchedProcess.of(told) == place
    assert LaunchedProcess.of({}) is None
    with pytest.raises(aq.InputError, match="ALIQUOT_PROCESS_ID"):
        LaunchedProcess.of({**told, "ALIQUOT_PROCESS_ID": "one"})


def test_initialize_needs_no_arguments():
    code = (
        "import jax; from aliquot.runtime import initialize, shutdown; initialize();"
        " print(jax.process_index(), jax.process_count(), jax.device_count()); shutdown()"
    )
    lines = []
    done = aq.launch(
        ["python", "-c", code],
        "local:2",
        num_devices_per_host=2,
        show=lambda *line: lines.append(line),
    )
    assert done.num_processes == 2
    assert sorted(line for _, is_error, line in lines if not is_error) == ["0 2 4", "1 2 4"]


def test_the_launcher_says_nothing_of_its_own_while_processes_run(monkeypatch):
    monkeypatch.setattr("aliquot.cli._voice.FIRST_S", 0.1)
    monkeypatch.setattr("aliquot.cli._voice._TICK_S", 0.05)
    done = run("launch", "local:1", "--", "python", "-c", "import time; time.sleep(1); print('x')")
    assert done.exit_code == 0
    assert "loading libraries" not in done.stderr
