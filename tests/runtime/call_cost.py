"""What it costs to compare a call with those of other processes."""

import socket
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aliquot.graph import capture
from aliquot.runtime import _same_calls
from aliquot.runtime.transport._messages import encode


class _Sender:
    """Sends reports to a reader that ignores them."""

    def __init__(self):
        self._reader, self._writer = socket.socketpair()
        self.longest = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        while self._reader.recv(65536):
            pass
        self._reader.close()

    def report(self, call):
        data = encode(call)
        self.longest = max(self.longest, len(data))
        self._writer.sendall(data)

    def close(self):
        self._writer.close()


def call_cost(count):
    """Processor seconds and seconds of one call: with 16 x 512 tokens and their targets, beside a
    state of 100 arrays on a device. Reports go over a connection.
    """

    def train_step(state, batch):
        return [w + batch["x"].sum() for w in state], batch["y"].sum()

    home = NamedSharding(Mesh(np.array(jax.devices()[:1]), "d"), PartitionSpec())
    state = [jax.device_put(jnp.ones((8, 8)), home) for _ in range(100)]
    batch = {name: np.ones((16, 512), np.int32) for name in "xy"}
    graph = capture(train_step, state, batch)
    same, sender = _same_calls.SameCalls(graph, [(home,)] * len(graph.inputs)), _Sender()
    leaves = [*state, batch["x"], batch["y"]]
    # The first call reads the state, and is compared otherwise.
    plain = _same_calls.watched, _same_calls.agree_on_arrays
    _same_calls.watched, _same_calls.agree_on_arrays = lambda: sender, lambda given: None
    try:
        for _ in range(10):
            same.compare(leaves)
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            same.compare(leaves)
        cost = (time.process_time() - cpu) / count, (time.perf_counter() - begin) / count
    finally:
        _same_calls.watched, _same_calls.agree_on_arrays = plain
        sender.close()
    assert 0 < sender.longest < 400
    return cost
