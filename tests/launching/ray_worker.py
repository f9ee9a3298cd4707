"""Launches a command on a Ray cluster of two hosts on this machine, each a raylet of its own. Run
by `test_ray.py`, since Ray leaves threads and files open.

Usage: ray_worker.py CASE, with the case as JSON: launches, each with what happens meanwhile. What
    came of each is the last line, as JSON.
"""

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


def launched(cluster: Cluster, case: dict) -> dict:
    """One launch: lines of standard output, notes with their times, failures, and its error."""
    started = time.monotonic()
    lines, notes = [], []

    def show(process, is_error, line):
        if not is_error:
            lines.append([process, line])
        if any(sign in line for sign in case.get("signs", ())):
            print(f"{time.monotonic() - started:6.1f} [{process}] {line}", file=sys.stderr)

    def note(text):
        notes.append([time.monotonic() - started, text])
        print(f"{time.monotonic() - started:6.1f} {text}", file=sys.stderr)

    disturbance = case.get("disturbance")
    if disturbance:
        wait_s = disturbance["after_s"]
        threading.Thread(
            target=disturb, args=(cluster, disturbance, wait_s, note, lines), daemon=True
        ).start()
    found = {"lines": lines, "notes": notes, "failures": [], "num_processes": 0, "error": ""}
    try:
        done = aq.launch(
            case["command"],
            "ray",
            address=cluster.address,
            note=note,
            show=show,
            **case.get("options", {}),
        )
        found["failures"] = [str(failure) for failure in done.failures]
        found["num_processes"] = done.num_processes
    except aq.AliquotError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["seconds"] = time.monotonic() - started
    return found


def disturb(cluster, disturbance, wait_s, note, lines):
    """Wait until a process has printed a line with a text, and a time; then do harm."""
    while not any(disturbance.get("sign", "") in line for _, line in lines):
        time.sleep(0.05)
    time.sleep(wait_s)
    what = disturbance["what"]
    if what == "remove":
        note("HARM: a node is removed")
        cluster.add_node(num_cpus=2)
        cluster.remove_node(sorted(cluster.worker_nodes, key=lambda node: node.node_id)[0])
        return
    pids = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_worker(pid)]
    pid = random.choice(sorted(pids))
    note(f"HARM: {what} to {pid} of {len(pids)}")
    os.kill(pid, getattr(signal, what))


def is_worker(pid: int) -> bool:
    """True for a process that this launch has started."""
    try:
        told = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"LAUNCHED_BY={os.getpid()}\0".encode() in told and b"ALIQUOT_PROCESS_ID=" in told


if __name__ == "__main__":
    os.environ["LAUNCHED_BY"] = str(os.getpid())
    hosts = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    hosts.add_node(num_cpus=2)
    try:
        results = [launched(hosts, case) for case in json.loads(sys.argv[1])]
    finally:
        hosts.shutdown()
    print(json.dumps(results))
