"""Ports for processes that tests start."""

import os

from aliquot.runtime.transport._hosts import reserved_port


def coordinator_port() -> int:
    """One that no test in another worker of pytest takes before process 0 does, seconds later."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    with reserved_port(
        "127.0.0.1", int(worker), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ) as found:
        return found.getsockname()[1]
