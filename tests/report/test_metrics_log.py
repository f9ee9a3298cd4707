"""The log of a training run."""

import importlib.util
import json
import math
import sys
import types
from pathlib import Path

import pytest

from aliquot.core import AliquotWarning, InputError
from aliquot.report import MetricsLog, read_metrics


class Late:
    """A number that a device computes; notes when it is read."""

    def __init__(self, value, read):
        self.value, self.read = value, read

    def __float__(self):
        self.read.append(self.value)
        return self.value


def test_the_folder_is_made(tmp_path):
    log = MetricsLog(tmp_path / "runs" / "first", every=1)
    log.add(1, {"loss": 2.0})
    log.close(1)
    assert [row["loss"] for row in read_metrics(tmp_path / "runs" / "first")] == [2.0]
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write into '.*file'"):
        MetricsLog(tmp_path / "file")


def test_numbers_are_read_when_the_next_interval_has_ended(tmp_path):
    read = []
    log = MetricsLog(tmp_path, every=2, tokens_per_step=8)
    for step in range(1, 6):
        log.add(step, {"loss": Late(float(step), read)})
        if step < 4:
            assert read == []
    assert {*read} == {1.0, 2.0} and [row["step"] for row in read_metrics(tmp_path)] == [2]
    log.close(5)
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["loss"], row["mean_loss"]) for row in rows] == [
        (2, 2.0, 1.5),
        (4, 4.0, 3.5),
        (5, 5.0, 5.0),
    ]
    assert log.losses == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert all(row["tokens_per_s"] * row["step_s"] == pytest.approx(8) for row in rows)


def test_what_is_no_step_is_not_counted_as_one(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    log = MetricsLog(every=2)
    with log.timed("compilation"):
        clock[0] += 100
    log.add(1, {"loss": 1.0})
    with log.timed("data"):
        clock[0] += 1
    clock[0] += 3
    log.add(2, {"loss": 1.0})
    for step in (3, 4):
        with log.timed("data"):
            clock[0] += 1
        clock[0] += 3
        log.add(step, {"loss": 1.0})
    with log.timed("checkpoint"):
        clock[0] += 7
    for step in (5, 6):
        clock[0] += 2
        log.add(step, {"loss": 1.0})
    log.close()
    first, second, third = log.rows
    assert (first["step_s"], first["compilation_s"], first["data_share"]) == (4.0, 100.0, 0.25)
    assert (second["step_s"], second["data_s"], second["data_share"]) == (4.0, 2.0, 0.25)
    assert (third["step_s"], third["checkpoint_s"], third["data_s"]) == (2.0, 7.0, 0.0)


def test_steps_that_are_given_to_idle_devices_are_no_measure():
    log = MetricsLog(every=1)
    with log.timed("compilation"):
        pass
    for step in (1, 2, 3, 4, 5):
        log.add(step, {"loss": 1.0})
    log.close()
    assert ["step_s" in row for row in log.rows] == [False, False, False, True, True]


def test_a_run_that_goes_on_writes_its_steps_once(tmp_path):
    log = MetricsLog(tmp_path, every=1, constants={"learning_rate": 0.5})
    for step in (1, 2, 3):
        log.add(step, {"loss": float(step)})
    log.validated(3, 9.0)
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    log = MetricsLog(tmp_path, every=1, done=2)
    log.add(3, {"loss": 30.0})
    log.close()
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]
    assert read_metrics(tmp_path)[0]["learning_rate"] == 0.5


def test_every_line_is_json_also_where_the_loss_is_no_number(tmp_path):
    told = []
    log = MetricsLog(tmp_path, every=1, report=told.append)
    log.add(1, {"loss": math.nan})
    log.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()

    def refuse(text):
        raise AssertionError(text)

    assert json.loads(line, parse_constant=refuse)["loss"] == "nan"
    assert math.isnan(told[0]["loss"])


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboardX")
    log = MetricsLog(tmp_path, every=1)
    log.add(1, {"loss": 1.5})
    log.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"mean_loss" in file.read_bytes()


@pytest.mark.parametrize("every", [1, 2, 4])
def test_steps_of_lines_never_fall(tmp_path, every):
    log = MetricsLog(tmp_path, every=every)
    for step in range(1, 9):
        log.add(step, {"loss": 1.0})
        if step % 3 == 0:
            log.validated(step, 2.0)
    log.close(8)
    steps = [row["step"] for row in read_metrics(tmp_path)]
    assert steps == sorted(steps) and {3, 6, 8} <= set(steps)


def test_a_hook_gets_each_line():
    lines = []
    log = MetricsLog(every=1, hook=lines.append)
    for step in (1, 2):
        log.add(step, {"loss": math.nan})
    log.validated(2, 0.5)
    log.close(2)
    assert [line["step"] for line in lines] == [1, 2, 2]
    assert lines[0]["loss"] == "nan" and lines[2] == {"step": 2, "validation_loss": 0.5}


def test_a_hook_that_raises_is_named_and_the_run_goes_on():
    def broken_hook(row):
        raise ConnectionError("no route to host")

    log = MetricsLog(every=1, hook=broken_hook)
    with pytest.warns(AliquotWarning, match="broken_hook failed at step 1 .*no route to host"):
        log.add(1, {"loss": 1.0})
        log.add(2, {"loss": 1.0})
    log.add(3, {"loss": 1.0})
    log.close(3)
    assert log.losses == (1.0, 1.0, 1.0)


def test_the_hooks_of_the_examples_send_figures_by_step(monkeypatch):
    """Stand-ins for the two libraries, which take what is sent."""
    sent = []
    wandb = types.SimpleNamespace(
        run=None,
        init=lambda: setattr(wandb, "run", 1),
        log=lambda row, step: sent.append((step, row)),
    )
    runs = []
    mlflow = types.SimpleNamespace(
        active_run=lambda: runs or None,
        start_run=lambda: runs.append(1),
        log_metrics=lambda row, step: sent.append((step, row)),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    spec = importlib.util.spec_from_file_location(
        "trackers", Path(__file__).parents[2] / "examples" / "tracking" / "trackers.py"
    )
    trackers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trackers)
    for hook in (trackers.to_wandb, trackers.to_mlflow):
        log = MetricsLog(every=1, hook=hook)
        log.add(1, {"loss": 2.0})
        log.close(1)
    assert [step for step, _ in sent] == [1, 1]
    assert all(row["loss"] == 2.0 and "step" not in row for _, row in sent)
    assert wandb.run and runs


def test_an_interval_has_steps():
    with pytest.raises(InputError, match="every to be at least 1, got 0"):
        MetricsLog(every=0)
