"""What processes pass to each other goes through their own connections, where no stranger can take
it away or change it; arrays that were altered on their way are refused.
"""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from runtime.stranger_cases import PeersInThreads
from runtime.strangers import new_secret

from aliquot.runtime.transport import _agreement, _service, _watchdog
from aliquot.runtime.transport._agreement import Rendezvous, exchange
from aliquot.runtime.transport._channels import Channels
from aliquot.runtime.transport._exchanges import Exchanges, Passes
from aliquot.runtime.transport._meeting import Hello, gather_in, join
from aliquot.runtime.transport._messages import MessageError
from aliquot.runtime.transport._reception import listen
from aliquot.runtime.transport._watchdog import Peers

COUNT = 3


@pytest.fixture
def run_in_all(monkeypatch):
    """Calls a function in each of three processes, which are threads, and returns what they
    returned or raised; JAX's service is not there.
    """
    here, ended = threading.local(), []
    monkeypatch.setattr(_watchdog, "_delay_aborts", lambda: None)
    monkeypatch.setattr(_watchdog, "end_at_once", ended.append)
    monkeypatch.setattr(_agreement, "watched", lambda: here.peers)
    monkeypatch.setattr(_service, "coordination_client", None)
    listener, secret = listen("127.0.0.1"), new_secret()
    with ThreadPoolExecutor(COUNT) as pool:
        address = listener.getsockname()
        first = pool.submit(gather_in, listener, Hello.own(0, COUNT, ""), secret, 20, 1)
        others = [
            pool.submit(join, *address, Hello.own(k, COUNT, ""), secret, 20)
            for k in range(1, COUNT)
        ]
        peers = [Peers(met.result()) for met in (first, *others)]

        def call(k, function):
            here.peers = peers[k]
            try:
                return function(k)
            except Exception as error:
                return error

        def run(function):
            return [one.result(30) for one in [pool.submit(call, k, function) for k in range(3)]]

        yield run
        assert run(lambda k: here.peers.leave(10)) == [True] * COUNT
        run(lambda k: here.peers.part())
    for each in peers:
        each._met.close()
    assert not ended


def test_values_go_through_the_connections_of_the_run(run_in_all):
    for passed in (lambda k: f"value {k}", lambda k: "x" * 2_000_000 + str(k)):
        assert (
            run_in_all(lambda k, p=passed: exchange(p(k), str))
            == [[passed(j) for j in range(COUNT)]] * COUNT
        )
    # One of these objects in each process, as their numbers count.
    meetings = [Rendezvous("a rendezvous") for _ in range(COUNT)]
    for _ in range(2):
        found = run_in_all(lambda k: meetings[k].exchange(k, int, 20))
        assert found == [[0, 1, 2]] * COUNT


def test_who_passes_nothing_or_something_else_is_named(run_in_all):
    meetings = [Rendezvous("saving") for _ in range(COUNT)]
    absent = run_in_all(lambda k: meetings[k].exchange(k, int, 0.5) if k != 1 else None)
    assert absent[1] is None
    assert "nothing came as saving, 1 from process 1 within 0.5 s" in str(absent[0])
    assert all(isinstance(error, ConnectionError) for error in (absent[0], absent[2]))
    other = run_in_all(lambda k: exchange("x" if k == 2 else 1, int))
    for error in other:
        assert "what process 2 passed as exchange 1 is no such message as" in str(error)
    large = run_in_all(lambda k: exchange("x" * 2**24, str))
    assert all(isinstance(error, MessageError) for error in large)


class Altering:
    """A socket on whose way one bit of what it sends is altered."""

    def __init__(self, connection, position):
        self._connection, self._left = connection, position

    def sendall(self, data):
        data = bytearray(data)
        if 0 <= self._left < len(data):
            data[self._left] ^= 4
        self._left -= len(data)
        self._connection.sendall(data)

    def close(self):
        self._connection.close()


@contextlib.contextmanager
def two_ends():
    """The channels of two processes, which are threads here."""
    key, shared, all_here = new_secret(), {}, threading.Barrier(2)

    def channels_of(k):
        return Channels(
            PeersInThreads(
                process=k,
                count=2,
                key=key,
                shared=shared,
                all_here=all_here,
                found=lambda _: None,
            )
        )

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(channels_of, range(2)))
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def test_closed_channels_leave_no_threads():
    before = {*threading.enumerate()}
    with two_ends() as (sender, receiver):
        sender.send(1, lambda: [np.arange(4)])
        receiver.receive(0, 32)
        begun = {*threading.enumerate()} - before
        assert any(thread.name == "aliquot-channel" for thread in begun)
    for thread in begun:
        thread.join(10)
    assert not [thread for thread in begun if thread.is_alive()]


# In the number, the size and their proof; in the array and its proof.
@pytest.mark.parametrize("position", [3, 7, 8, 12, 15, 16, 47, 48, 2000, 4047, 4048, 4079])
def test_one_altered_bit_of_an_array_is_noticed(position):
    with two_ends() as (sender, receiver):
        array = np.arange(1000, dtype=np.float32)
        for _ in range(2):
            sender.send(1, lambda: [array[:1], array[1:]])
            assert (receiver.receive(0, 4000).view(np.float32) == array).all()
        sender.flush()
        outbox = sender._outboxes[1]
        outbox._socket = Altering(outbox._socket, position)
        sender.send(1, lambda: [array])
        with pytest.raises(ConnectionError, match="from process 0: an array was altered on its"):
            receiver.receive(0, 4000)


def test_nobody_waits_for_values_when_a_process_has_ended():
    exchanges = Exchanges(2)
    for k in range(2):
        exchanges.note(Passes(name="first", process=k, data=b"x"))
    exchanges.note(Passes(name="second", process=0, data=b"x"))
    threading.Timer(0.05, exchanges.lose, [1]).start()
    with pytest.raises(ConnectionError, match="as second from process 1: process 1 has ended"):
        exchanges.take("second", None)
    assert exchanges.take("first", None) == [b"x", b"x"]


def test_machines_are_told_apart_by_their_names(monkeypatch):
    said = {}
    for name in ("one", "other", ""):
        monkeypatch.setattr("platform.node", lambda name=name: name)
        said[name] = Hello.own(0, 1, "").machine
    assert len({*said.values()}) == 3
    assert said["one"].startswith("one") and said[""].startswith("unknown")
