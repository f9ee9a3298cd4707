"""What processes of other machines say to JAX's service is passed on, and nothing of others."""

import contextlib
import hashlib
import os
import socket
import threading
import time

import pytest
from runtime.strangers import KINDS, Target, strangers

from aliquot.runtime.transport._reception import listen
from aliquot.runtime.transport._relay import Caller, let_through, way_to

KEY = b"key of a run"


@pytest.fixture
def service():
    """One that says the digest of what it has heard; its address, and how many have connected."""
    came = []

    def answer(connection):
        with connection:
            heard = hashlib.sha256()
            while data := connection.recv(1 << 16):
                heard.update(data)
            connection.sendall(heard.digest())

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                came.append(connection)
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with listen("127.0.0.1") as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname(), came
        listener.shutdown(socket.SHUT_RDWR)


def asked(address, data):
    """What the service answers there."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_only_processes_of_the_run_reach_the_service(service, tmp_path):
    address, came = service
    entrance = listen("127.0.0.1")
    port = entrance.getsockname()[1]
    reception = let_through(entrance, KEY, 3, address)
    ways = [way_to("127.0.0.1", port, KEY, k, 3) for k in (1, 2)]
    data = os.urandom(1 << 20)
    stranger = Target(
        address=("127.0.0.1", port),
        purpose="service",
        hello=Caller(process=1, count=3),
        key=KEY,
        marker=tmp_path / "marker",
        stop=threading.Event(),
    )
    with strangers([*KINDS], stranger):
        time.sleep(0.1)
        for way in ways * 2:
            began = time.monotonic()
            assert asked(way, data) == hashlib.sha256(data).digest()
            assert time.monotonic() - began < 1
    # With another key, or another number of processes, nothing comes back.
    assert asked(way_to("127.0.0.1", port, KEY, 1, 4), b"x") == b""
    assert len(came) == 4 and not stranger.marker.exists()
    assert reception.num_dropped >= len(KINDS)
    reception.close()
