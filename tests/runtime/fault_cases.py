"""Faults in runs of many processes, how each must end, and how it did."""

import contextlib
import json
import signal
import threading
import time
from pathlib import Path

from runtime.ports import coordinator_port
from runtime.processes import started

WORKER = Path(__file__).parent / "fault_worker.py"
#: Within it all must have ended.
BAR_S = 10
_OWN_CODES = {
    "raise": 1,
    "exit": 7,
    "leave": 9,
    "return": 0,
    "interrupt": 130,
    "kill": -9,
    "segv": -11,
}
# Those who cannot know of it wait so long.
_PATIENCE_S = 5


def _case(count, runtime, kind, moment, rank, **more):
    return {
        "count": count,
        "runtime": runtime,
        "kind": kind,
        "moment": moment,
        "rank": rank,
        **more,
    }


def _all_cases():
    """Kinds of faults, moments, ranks, and both runtimes."""
    found = [
        _case(2, "pipeline", kind, moment, rank)
        for kind, moments in {
            "raise": ("joined", "planned", "step"),
            "exit": ("joined", "step"),
            "return": ("planned", "step"),
            "kill": ("joined", "step"),
            "stop": ("step",),
            "interrupt": ("step",),
            "segv": ("step",),
            "leave": ("step",),
        }.items()
        for moment in moments
        for rank in (0, 1)
    ]
    found += [_case(2, "pipeline", kind, "end", 1, steps=6) for kind in ("raise", "exit", "return")]
    # Programs that run ahead of the one who starts them.
    found += [
        _case(n, "pipeline", "interrupt", "step", 0, devices=4 // n, reads=False) for n in (1, 2)
    ]
    found += [
        _case(3, "pipeline", kind, "step", rank)
        for kind in ("raise", "kill", "stop")
        for rank in (1, 2)
    ]
    found += [
        _case(3, "pipeline", kind, "meeting", rank) for kind in ("kill", "segv") for rank in (0, 1)
    ]
    found += [
        _case(2, "program", kind, "step", rank)
        for kind in ("raise", "exit", "return", "kill", "stop")
        for rank in (0, 1)
    ]
    found += [
        _case(2, runtime, kind, "", rank)
        for runtime in ("pipeline", "program")
        for kind, rank in (("plan", 1), ("model", 0), ("model", 1), ("shape", 1))
    ]
    found += [_case(2, "program", kind, "", 1) for kind in ("version", "count")]
    found += [
        _case(2, "program", kind, "", rank, timeout_s=_PATIENCE_S)
        for kind, rank in (("number", 1), ("absent", 0), ("absent", 1))
    ]
    found += [_case(2, "program", "kill", "begin", rank, timeout_s=_PATIENCE_S) for rank in (0, 1)]
    found += [_case(2, "program", "second run", moment, 0) for moment in ("step", "begin")]
    # Two at once, who both keep their own exit codes.
    return found + [
        _case(3, "pipeline", kind, "joined", 1, ranks=[1, 2]) for kind in ("raise", "exit")
    ]


CASES = _all_cases()


def name_of(case):
    """For tables."""
    moment = f" at {case['moment']}" if case["moment"] else ""
    moment += " that runs ahead" if case.get("reads") is False else ""
    ranks = case.get("ranks", [case["rank"]])
    who = f"rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))} of {case['count']}"
    return f"{case['kind']}{moment}, {who}, {case['runtime']}"


def expected(case):
    """The exit code of each process; None where it does not end by itself."""
    kind, rank, count = case["kind"], case["rank"], case["count"]
    if kind in ("plan", "model", "shape"):
        return [1] * count
    codes = [3] * count
    if kind in ("version", "count", "number"):
        return codes
    if case["moment"] == "end" and kind != "raise":
        codes = [0] * count
    for k in case.get("ranks", [rank]):
        codes[k] = _OWN_CODES.get(kind)
    if case["moment"] == "meeting":
        codes[max({*range(count)} - {rank})] = None
    return codes


def run_case(case, limit_s=90):
    """Exit codes, those expected, seconds from the fault to the last end, and what was said on
    standard error.
    """
    if case["kind"] == "second run":
        return _run_twice(case, limit_s)
    wanted = expected(case)
    with started(WORKER, case["count"], json.dumps(case)) as processes:
        watch = _Watch(processes, limit_s)
        codes = watch.codes([k for k, code in enumerate(wanted) if code is not None])
        # Those that sleep are not yet there when the others end.
        last = max(watch.ended.values(), default=watch.started)
        faults = [at for at in watch.said("FAULT").values() if at <= last]
    patience_s = case.get("timeout_s", 0)
    return {
        "codes": codes,
        "expected": wanted,
        "seconds": last - max(faults, default=watch.started) - patience_s,
        "errors": watch.errors(),
    }


def _run_twice(case, limit_s):
    """Two runs at one address; the second comes later, or at the same time."""
    port = coordinator_port()
    case = {**case, "steps": 10**9}
    with started(WORKER, 2, json.dumps({**case, "run_id": "a"}), port=port) as first:
        ours = _Watch(first, limit_s)
        if case["moment"] == "step":
            while len(ours.said("TRAINS")) < 2 and time.monotonic() < ours.started + limit_s:
                time.sleep(0.1)
        with started(WORKER, 2, json.dumps({**case, "run_id": "b"}), port=port) as second:
            begin, theirs = time.monotonic(), _Watch(second, limit_s)
            # At the same time either may be first at the port.
            while (
                not (loser := [w for w in (ours, theirs) if w.all_ended()])
                and time.monotonic() < begin + limit_s
            ):
                time.sleep(0.1)
            winner = ours if loser == [theirs] else theirs
            while (
                len(winner.said("TRAINS")) < 2
                and time.monotonic() < begin + limit_s
                and not winner.all_ended()
            ):
                time.sleep(0.1)
            trains = [process.poll() for process in winner.processes]
            codes = [process.poll() for process in (loser or [winner])[0].processes]
            last = max((loser or [winner])[0].ended.values(), default=begin + limit_s)
    # Importing JAX is part of the time.
    seconds = last - max(theirs.said("FAULT").values(), default=begin)
    return {
        "codes": codes + trains,
        "expected": [3, 3, None, None],
        "seconds": seconds,
        "errors": theirs.errors(),
    }


class _Watch:
    """When processes say what, and when they end."""

    def __init__(self, processes, limit_s):
        self.processes, self.started, self._limit_s = processes, time.monotonic(), limit_s
        self.ended: dict[int, float] = {}
        self._said = [[] for _ in processes]
        self._errors = [[] for _ in processes]
        for k, process in enumerate(processes):
            for target in (self._read, self._read_errors, self._wait):
                threading.Thread(target=target, args=(k, process), daemon=True).start()

    def codes(self, wanted):
        """The exit codes of all; None for those that have not ended when `wanted` have, or in
        time.
        """
        while (
            not all(k in self.ended for k in wanted)
            and time.monotonic() < self.started + self._limit_s
        ):
            time.sleep(0.05)
        # A Python program ends by SIGINT itself after Ctrl-C, which shells call 130.
        return [
            130 if process.poll() == -signal.SIGINT else process.poll()
            for process in self.processes
        ]

    def all_ended(self):
        return len(self.ended) == len(self.processes)

    def said(self, word):
        """When each process that said a word did."""
        return {k: at for k, lines in enumerate(self._said) for line, at in lines if word in line}

    def errors(self):
        """The last that each process had to say."""
        time.sleep(0.1)
        return ["".join(lines)[-3000:] for lines in self._errors]

    # Streams are closed under the readers of those that are killed at the end.
    def _read(self, k, process):
        with contextlib.suppress(ValueError):
            for line in iter(process.stdout.readline, ""):
                self._said[k].append((line, time.monotonic()))

    def _read_errors(self, k, process):
        with contextlib.suppress(ValueError):
            self._errors[k].extend(iter(process.stderr.readline, ""))

    def _wait(self, k, process):
        while process.poll() is None:
            time.sleep(0.05)
        self.ended[k] = time.monotonic()


def wrong(found):
    """What is wrong with how a case ended, or nothing."""
    if found["codes"] != found["expected"]:
        return f"exit codes {found['codes']}, not {found['expected']}"
    if "Fatal Python error" in "".join(found["errors"]) or "pure virtual" in "".join(
        found["errors"]
    ):
        return "a crash at the end"
    told = [
        k
        for k, code in enumerate(found["expected"])
        if code == 3 and "aliquot: " not in found["errors"][k]
    ]
    return (
        f"no message from {told}" if told and len(found["errors"]) == len(found["expected"]) else ""
    )
