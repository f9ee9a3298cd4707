"""One of several processes that save and restore together. Run by `test_processes.py`.

Usage: worker.py PROCESS COUNT PORT FOLDER TASK. What a process finds is its last line, as JSON.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    process, count, port = map(int, sys.argv[1:4])
    folder, task = sys.argv[4:6]
    faulthandler.dump_traceback_later(150, exit=True)
    devices = f"--xla_force_host_platform_device_count={4 // count}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from runtime.pipeline_worker import batch_of, init, train_step
from runtime.pipelines import pipeline

import aliquot as aq
from aliquot.runtime import Checkpoints, initialize, shutdown


def trained(step, state, first, stop):
    """The state after some steps, and their losses."""
    losses = []
    for number in range(first, stop):
        state, metrics = step(state, batch_of(number))
        losses.append(float(metrics["loss"]))
    return state, losses


def step_of(**kind):
    """The pipeline that a task runs."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    return pipeline(train_step, shapes, batch_of(0), layers=4, micro_batches=2, **kind)


def save():
    """Two stages, one in each process, and an array over both: what is restored of the array, the
    losses of two more steps, and those with each stage on the other process; the bytes that this
    process read for these and owns.
    """
    step = step_of(sizes=(2, 2))
    state, _ = trained(step, step.init(init, jax.random.key(0)), 0, 2)
    rows = spread("x")
    with Checkpoints(folder, keep=2) as checkpoints:
        for number in (1, 2):
            checkpoints.save(step, state, number, meta={"seen": number})
    with Checkpoints(f"{folder}-spread") as checkpoints:
        checkpoints.save(None, {"rows": rows, "host": table()}, 0)
        restored = checkpoints.restore({"rows": rows, "host": jax.ShapeDtypeStruct((8, 3), float)})
    mine = shard_of(restored.state["rows"])
    host = restored.state["host"].tolist()
    _, losses = trained(step, state, 2, 4)
    other = step_of(sizes=(2, 2), backwards=True)
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(other)
    owned = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(restored.state)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    )
    _, again = trained(other, restored.state, 2, 4)
    found = {"losses": losses, "rows": mine, "host": host, "again": again}
    return found | {"read": restored.read_bytes, "owned": owned}


def zero3():
    """ZeRO-3 on four devices: a checkpoint of the state after two steps, and two losses more."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    cluster, method = aq.Cluster.preset("4xcpu"), aq.Zero3Parallel()
    plan = aq.plan(train_step, shapes, batch_of(0), cluster=cluster, method=method)
    return kept(aq.parallelize(train_step, plan).prepare(shapes, batch_of(0)))


def stages():
    """The same of four stages, one in each process."""
    return kept(step_of(sizes=(1, 1, 1, 1)))


def kept(step):
    """A checkpoint after two steps in the folder, and the losses of two more."""
    state, _ = trained(step, step.init(init, jax.random.key(0)), 0, 2)
    step.save(state, folder, number=2)
    return {"losses": trained(step, state, 2, 4)[1]}


def fail():
    """The disk of process 1 is full while it writes; process 0 finds nothing wrong itself. Then
    process 1 cannot read, and at last a file of its own is damaged.
    """
    from aliquot.runtime.checkpoints import _handler

    tree, said = {"rows": spread("x"), "whole": spread(None)}, []
    written = _handler._write_one

    async def breaks(*_):
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(folder, on_error=said.append)
    for number in (1, 2, 3):
        if process == 1:
            _handler._write_one = breaks if number == 2 else written
        checkpoints.save(None, tree, number)
        checkpoints.wait()
    checkpoints.close()
    with Checkpoints(folder) as checkpoints:
        restored = [_without_process_1(checkpoints.restore, tree)]
        if process == 0:
            (data,) = Path(folder, "3", "state", "ocdbt.process_1", "d").iterdir()
            data.write_bytes(data.read_bytes()[:-1])
        restored.append(checkpoints.restore(tree))
    again = [[r.number, *r.skipped, shard_of(r.state["rows"])] for r in restored]
    return {"said": said, "numbers": checkpoints.numbers(), "restored": again}


def _without_process_1(restore, tree):
    """What is restored while process 1 fails to read the first array."""
    from aliquot.runtime.checkpoints import _handler

    take = _handler.LeafHandler._take

    async def breaks(*_):
        _handler.LeafHandler._take = take
        raise ValueError("broken")

    if process == 1:
        _handler.LeafHandler._take = breaks
    return restore(tree)


def shard_of(array):
    """The rows of this process."""
    return [np.asarray(s.data).tolist() for s in array.addressable_shards]


def endless():
    """Saves without end, of arrays of 2 MB that all hold the checkpoint's number."""
    arrays = {name: np.zeros((500, 1000), np.float32) for name in "abcd"}
    with Checkpoints(folder, keep=2) as checkpoints:
        for number in range(10**6):
            filled = {name: array + number for name, array in arrays.items()}
            checkpoints.save(None, filled, number)
            print(json.dumps({"saving": number}), flush=True)


def spread(axis):
    """The table over the devices of both processes."""
    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec(axis))
    return jax.make_array_from_callback((8, 3), rows, lambda index: table()[index])


def table():
    """Numbers, the same in every process."""
    return np.arange(24.0).reshape(8, 3)


def main():
    """Join, do the task, and print what came out."""
    jax.config.update("jax_enable_x64", True)
    initialize(
        f"127.0.0.1:{port}",
        count,
        process,
        initialization_timeout_s=100,
        cpu_collectives="gloo" if task == "zero3" else None,
    )
    tasks = {"save": save, "zero3": zero3, "stages": stages, "fail": fail, "endless": endless}
    print(json.dumps(tasks[task]()), flush=True)
    shutdown()


if __name__ == "__main__":
    main()
