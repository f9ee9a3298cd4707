"""Launches commands, on this machine or on a Ray cluster of two hosts that are raylets of this
machine, and does harm to them meanwhile. Run by tests, since Ray leaves threads and files open.

Usage: launch_worker.py CASES, as JSON: launches, each with its engine, its command, and what
    happens to each attempt. What came of each launch is the last line, as JSON.
"""

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from ray.cluster_utils import Cluster

import aliquot as aq


def launched(cluster: Cluster | None, case: dict) -> dict:
    """One launch: lines of standard output, notes with their times, failures, and its error."""
    started = time.monotonic()
    lines, notes, options = [], [], dict(case.get("options", {}))
    attempts = [threading.Event() for _ in case.get("harms", ())]

    def tell(text):
        notes.append([time.monotonic() - started, text])
        print(f"{notes[-1][0]:6.1f} {text}", file=sys.stderr, flush=True)

    def show(process, is_error, line):
        if is_error:
            return
        lines.append([process, line])
        print(f"{time.monotonic() - started:6.1f} [{process}] {line}", file=sys.stderr, flush=True)
        if line.startswith("begins"):
            # Both processes say so.
            attempts_begun = sum(each.startswith("begins") for k, each in lines if k == 0)
            for event in attempts[:attempts_begun]:
                event.set()

    def harm():
        for event, (what, after_s) in zip(attempts, case["harms"]):
            event.wait()
            time.sleep(after_s)
            do_harm(cluster, what, tell)

    if attempts:
        threading.Thread(target=harm, daemon=True).start()
    if case["engine"] == "ray":
        options["address"] = cluster.address
    found = {"lines": lines, "notes": notes, "failures": [], "num_processes": 0, "error": ""}
    try:
        done = aq.launch(case["command"], case["engine"], note=tell, show=show, **options)
        found["failures"] = [str(failure) for failure in done.failures]
        found["num_processes"] = done.num_processes
    except aq.AliquotError as error:
        found["error"] = f"{type(error).__name__}: {error}"
        tell(found["error"])
    found["seconds"] = time.monotonic() - started
    return found


def do_harm(cluster: Cluster | None, what: str, tell) -> None:
    """Send a signal to one of the processes, or take a host away."""
    if what == "remove":
        parents = {parent for pid in workers() for parent in ancestors(pid)}
        used = [node for node in cluster.worker_nodes if raylet(node) in parents]
        tell(f"HARM: 1 of {len(cluster.worker_nodes) + 1} hosts is removed")
        cluster.remove_node(used[0])
        return
    if what == "head":
        tell("HARM: the head is killed")
        cluster.head_node.kill_gcs_server(check_alive=False)
        return
    pids = workers()
    pid = random.choice(pids)
    tell(f"HARM: {what} to {pid}, one of {len(pids)}")
    os.kill(pid, getattr(signal, what))


def raylet(node) -> int:
    """The process that is this host to Ray."""
    return node.all_processes["raylet"][0].process.pid


def ancestors(pid: int) -> list[int]:
    """The processes that have started a process, the nearest first."""
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def workers() -> list[int]:
    """The processes that this launch has started."""
    return sorted(filter(is_worker, map(int, filter(str.isdigit, os.listdir("/proc")))))


def is_worker(pid: int) -> bool:
    """True for a process whose environment this one has told."""
    try:
        told = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"ALIQUOT_TESTED_BY={os.getpid()}\0".encode() in told and b"ALIQUOT_PROCESS_ID=" in told


if __name__ == "__main__":
    os.environ["ALIQUOT_TESTED_BY"] = str(os.getpid())
    cases, hosts = json.loads(sys.argv[1]), None
    if any(case["engine"] == "ray" for case in cases):
        head = {"num_cpus": 2, "include_dashboard": False}
        hosts = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(max(case.get("hosts", 2) for case in cases) - 1):
            hosts.add_node(num_cpus=2)
    try:
        results = [launched(hosts, case) for case in cases]
    finally:
        if hosts is not None:
            # Refused while the head is lost; its processes end with this one.
            with contextlib.suppress(ValueError):
                hosts.shutdown()
    print(json.dumps(results))
