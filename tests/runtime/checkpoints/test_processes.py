"""Checkpoints that two processes write and read together, and killing one that writes."""

import json
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from runtime import processes
from runtime.pipeline_worker import batch_of, init, train_step
from runtime.pipelines import pipeline

import aliquot as aq

WORKER = Path(__file__).parent / "worker.py"
TIMEOUT_S = 240


def found(folder, task, count=2):
    with processes.started(WORKER, count, folder, task) as running:
        return processes.last_lines(running, TIMEOUT_S)


def test_two_processes_save_one_checkpoint_that_any_number_of_them_restores(tmp_path, x64):
    folder = tmp_path / "saved"
    wanted = found(folder, "save")
    table = np.arange(24.0).reshape(8, 3)
    for k, said in enumerate(wanted):
        np.testing.assert_array_equal(np.concatenate(said["rows"]), table[4 * k : 4 * k + 4])
        np.testing.assert_array_equal(said["host"], table)
    # Both wrote, in few files.
    assert sum(path.is_file() for path in (folder / "2").rglob("*")) <= 2 * 2 + 10
    shapes = jax.eval_shape(init, jax.random.key(0))
    step = pipeline(train_step, shapes, batch_of(0), sizes=(1, 1, 1), layers=4)
    checkpoints = aq.Checkpoints(folder)
    restored = checkpoints.restore(step)
    assert checkpoints.record(2).writers == (0, 1)
    assert restored.number == 2 and restored.meta == {"seen": 2}
    target = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes | {"key": np.zeros(2, "I")})
    stock = ocp.CheckpointManager(folder, item_names=("state",))
    plain = stock.restore(2, args=ocp.args.Composite(state=ocp.args.StandardRestore(target))).state
    stock.close()
    mine, theirs = ({**state, "key": 0} for state in (restored.state, plain))
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    losses, state = [], restored.state
    for number in (2, 3):
        state, metrics = step(state, batch_of(number))
        losses.append(float(metrics["loss"]))
    assert losses == pytest.approx(wanted[0]["losses"], rel=1e-12)
    for said in wanted:
        assert said["again"] == pytest.approx(losses, rel=1e-12)
        # Besides the words of the key.
        assert 0 < said["read"] <= said["owned"] + 8
        assert said["owned"] < sum(x.nbytes for x in jax.tree.leaves(plain)) / 1.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "writers"),
    # The last stage keeps nothing: its product is with the embedding, which the first one has.
    [("zero3", (0, 1)), ("stages", (0, 1, 2))],
)
def test_orbax_alone_reads_what_processes_wrote(tmp_path, x64, task, writers):
    said = found(tmp_path, task, {"zero3": 2, "stages": 4}[task])
    state, step = init(jax.random.key(0)), jax.jit(train_step)
    for number in range(2):
        state, _ = step(state, batch_of(number))
    target = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype), state | {"key": jax.random.key_data(state["key"])}
    )
    with ocp.CheckpointManager(tmp_path, item_names=("state",)) as stock:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        plain = stock.restore(2, args=args).state
    checkpoints = aq.Checkpoints(tmp_path)
    assert checkpoints.record(2).writers == writers
    mine = checkpoints.restore(jax.eval_shape(init, jax.random.key(0))).state
    jax.tree.map(np.testing.assert_array_equal, plain, mine)
    key = jax.random.wrap_key_data(plain["key"])
    assert (jax.random.key_data(state["key"]) == plain["key"]).all()
    for found_array, wanted in zip(
        jax.tree.leaves(plain | {"key": 0}), jax.tree.leaves(state | {"key": 0}), strict=True
    ):
        np.testing.assert_allclose(found_array, wanted, rtol=1e-9, atol=1e-12)
    state, losses = plain | {"key": key}, []
    for number in (2, 3):
        state, metrics = step(state, batch_of(number))
        losses.append(float(metrics["loss"]))
    for each in said:
        assert each["losses"] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("late_s", [0.0, 0.03])
def test_a_run_that_is_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path, late_s):
    with processes.started(WORKER, 1, tmp_path, "endless") as (running,):
        saving = 0
        while saving < 2:
            saving = json.loads(running.stdout.readline())["saving"]
        time.sleep(late_s)
        running.kill()
    checkpoints = aq.Checkpoints(tmp_path, keep=2)
    restored = checkpoints.restore()
    assert restored.number >= saving - 1
    assert all((array == restored.number).all() for array in restored.state.values())
    # The next run removes what was left.
    checkpoints.save(None, restored.state, 10**6)
    checkpoints.close()
    assert checkpoints.unfinished() == () and checkpoints.numbers()[-1] == 10**6


def test_what_fails_in_one_process_is_said_in_all_and_the_run_goes_on(tmp_path):
    table = np.arange(24.0).reshape(8, 3)
    for k, said in enumerate(found(tmp_path / "failed", "fail")):
        assert said["numbers"] == [1, 3]
        (text,) = said["said"]
        assert "cannot save checkpoint 2" in text and "process 1: No space left on device" in text
        # What one process cannot read, none restores.
        for (number, skipped, rows), why in zip(
            said["restored"], ("cannot be read: ", "3/state/ocdbt.process_1/d/"), strict=True
        ):
            assert number == 1 and "checkpoint 3 in" in skipped and why in skipped
            np.testing.assert_array_equal(np.concatenate(rows), table[4 * k : 4 * k + 4])
