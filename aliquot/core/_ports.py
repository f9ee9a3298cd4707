"""Ports at which processes find each other."""

from __future__ import annotations

import random
import socket


def reserved_port(address: str, process: int, count: int) -> socket.socket:
    """A socket at a port that no other program can take while it is open, except one that asks the
    system to share it, as JAX does.

    Two programs that share a port would get each other's connections. Only ports below 32768 are
    tried, since systems hand out the others by themselves, and each process of a run tries ports of
    its own.
    """
    ports = list(range(16384 + process, 32768, count))
    random.SystemRandom().shuffle(ports)
    for port in ports:
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            listener.bind((address, port))
        except OSError:
            listener.close()
            continue
        # Set only now: with it, `bind` would have succeeded at a port that another program shares.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return listener
    raise OSError(f"no port from 16384 to 32767 is free at {address}")
