"""A process that a test launches, without JAX. Usage: plain_worker.py HOW [ARGUMENT]"""

import os
import signal
import socket
import subprocess
import sys
import time

process, attempt = int(os.environ["ALIQUOT_PROCESS_ID"]), int(os.environ["ALIQUOT_ATTEMPT"])


def meet() -> None:
    """Return once both processes are here, so that neither fails before the other is seen."""
    host, port = os.environ["ALIQUOT_COORDINATOR_ADDRESS"].rsplit(":", 1)
    if process == 0:
        with socket.create_server((host, int(port))) as server:
            server.accept()[0].close()
        return
    while True:
        try:
            socket.create_connection((host, int(port))).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.02)


def tell() -> None:
    """Print all that the launcher has told."""
    names = ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "RUN_ID", "SECRET")
    print(process, attempt, *(os.environ[f"ALIQUOT_{name}"].replace(" ", "-") for name in names))
    print(os.environ.get("XLA_FLAGS", ""), file=sys.stderr)


def fail() -> None:
    """Process 1 ends as asked in the first attempt; the other as if it had lost it."""
    how = sys.argv[2]
    if attempt > 1:
        return
    meet()
    if process != 1:
        time.sleep(0.5)
        sys.exit(3)
    print("about to fail")
    if how.isdecimal():
        sys.exit(int(how))
    os.kill(os.getpid(), getattr(signal, how))


def hang() -> None:
    """Process 1 fails; process 0 and what it has started would stay for ever."""
    if process == 1:
        meet()
        sys.exit(7)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("child", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
    if int(os.environ["ALIQUOT_NUM_PROCESSES"]) > 1:
        meet()
    time.sleep(600)


def obey() -> None:
    """Wait for SIGTERM, and say so."""

    def leave(number, frame):
        print(f"process {process} saves and ends")
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
    print("waits")
    time.sleep(600)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
