"""Meetings and channels of two and four processes, in threads of this one, while strangers come."""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from runtime.strangers import KINDS, Target, new_secret, strangers

from aliquot.runtime.transport._channels import Channels, Sender
from aliquot.runtime.transport._meeting import Hello, Met, gather_in, join
from aliquot.runtime.transport._reception import LOGGER, listen

PORTS, MOMENTS, COUNTS = ("meeting", "arrays"), ("before", "during", "after"), (2, 4)
CASES = [
    (kind, port, moment, count)
    for kind in KINDS
    for port in PORTS
    for moment in MOMENTS
    for count in COUNTS
]
#: How long a run may be held up.
BAR_S = 1
_HOST = "127.0.0.1"
_PATIENCE_S = 20
# Strangers have had their say by then.
_SAID_S = 0.1


def run_case(kind: str, port: str, moment: str, count: int, marker: Path) -> dict[str, Any]:
    """The longest that anything took while the strangers were there, what failed, and how many of
    them were dropped by then.
    """
    counted = _Counter()
    LOGGER.addFilter(counted)
    try:
        runs = {"meeting": _meet, "arrays": _send}
        seconds, failed = runs[port](kind, moment, count, marker)
    finally:
        LOGGER.removeFilter(counted)
    return {
        "seconds": seconds,
        "failed": failed,
        "dropped": counted.dropped,
        "code ran": marker.exists(),
    }


def wrong(found: dict[str, Any]) -> str:
    """What is wrong with how a case went, or nothing."""
    if found["code ran"]:
        return "code of a stranger ran"
    if found["failed"]:
        return str(found["failed"])
    return f"held up for {found['seconds']:.1f} s" if found["seconds"] > BAR_S else ""


class _Counter:
    """Counts messages about strangers, and keeps them off the screen."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    def filter(self, record: Any) -> bool:
        self.dropped.append(record.getMessage())
        return False


def _meet(kind: str, moment: str, count: int, marker: Path) -> tuple[float, str]:
    secret, listener = new_secret(), listen(_HOST)
    target = Target(
        address=listener.getsockname(),
        purpose="meeting",
        hello=Hello.own(1, count, ""),
        key=secret,
        marker=marker,
        stop=threading.Event(),
    )
    port = target.address[1]

    def join_as(k: int) -> Met:
        return join(_HOST, port, Hello.own(k, count, ""), secret, _PATIENCE_S)

    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(count + 1))
        began = time.monotonic()
        # Nobody listens to them yet, or all but one process have come.
        if moment == "before":
            stack.enter_context(strangers([kind], target))
            time.sleep(_SAID_S)
            began = time.monotonic()
        first = pool.submit(gather_in, listener, Hello.own(0, count, ""), secret, _PATIENCE_S, 1)
        others = [pool.submit(join_as, k) for k in range(2, count)]
        if moment == "during":
            time.sleep(_SAID_S)
            stack.enter_context(strangers([kind], target))
            time.sleep(_SAID_S)
            began = time.monotonic()
        others.append(pool.submit(join_as, 1))
        try:
            mets = [met.result(_PATIENCE_S + 5) for met in (first, *others)]
            for met in mets:
                stack.callback(met.close)
            seconds = time.monotonic() - began
            if moment == "after":
                stack.enter_context(strangers([kind], target))
                time.sleep(_SAID_S)
                began = time.monotonic()
            # They all are of one run, still hear each other, and who is late is turned away.
            assert len({met.key for met in mets}) == 1
            for k, line in mets[0].lines.items():
                line.send(mets[0].hellos[k])
            for met in mets[1:]:
                assert met.lines[0].receive(Hello, _PATIENCE_S).process == met.process
            late = pool.submit(join_as, 1)
            assert late.exception(_PATIENCE_S).code == 3
        except (Exception, SystemExit) as error:
            return time.monotonic() - began, f"{type(error).__name__}: {error}"
        return max(seconds, time.monotonic() - began) if moment == "after" else seconds, ""


@dataclass(kw_only=True)
class PeersInThreads:
    """As much of `Peers` as channels need; processes are threads."""

    process: int
    count: int
    key: bytes
    shared: dict[int, Any]
    all_here: threading.Barrier
    found: Callable[[Any], None]
    address: str = _HOST
    places: list[Any] = field(default_factory=list)

    def exchange(self, place: Any, _: type[Any]) -> list[Any]:
        self.shared[self.process] = place
        self.all_here.wait(_PATIENCE_S)
        if self.process == 0:
            self.found(place)
        self.all_here.wait(_PATIENCE_S)
        return [self.shared[k] for k in range(self.count)]


def _send(kind: str, moment: str, count: int, marker: Path) -> tuple[float, str]:
    key, shared = new_secret(), {}
    all_here = threading.Barrier(count)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(count))
        made: list[Channels] = []

        def come(place: Any) -> None:
            target = Target(
                address=(place.host, place.port),
                purpose="arrays",
                hello=Sender(process=1, to=0, count=count),
                key=key,
                marker=marker,
                stop=threading.Event(),
            )
            stack.enter_context(strangers([kind], target))
            time.sleep(_SAID_S)

        def channels_of(k: int) -> Channels:
            peers = PeersInThreads(
                process=k,
                count=count,
                key=key,
                shared=shared,
                all_here=all_here,
                found=come if moment == "before" else lambda _: None,
            )
            channels = Channels(peers)
            made.append(channels)
            return channels

        def pass_on(channels: Channels, k: int, value: int) -> float:
            # To all, from all: each array arrives as it was.
            began = time.monotonic()
            others = [j for j in range(count) if j != k]
            for j in others:
                channels.send(j, lambda j=j: [np.full(1000, value + 10 * k + j, np.int32)])
            for j in others:
                got = channels.receive(j, 4000).view(np.int32)
                assert (got == value + 10 * j + k).all(), got
            return time.monotonic() - began

        def all_pass_on(all_channels: list[Channels], value: int) -> float:
            passed = [
                pool.submit(pass_on, channels, k, value) for k, channels in enumerate(all_channels)
            ]
            return max(one.result(_PATIENCE_S) for one in passed)

        began = time.monotonic()
        try:
            futures = [pool.submit(channels_of, k) for k in range(count)]
            every = [one.result(_PATIENCE_S) for one in futures]
            if moment == "during":
                # As processes connect, the strangers do too.
                threading.Timer(0, come, [shared[0]]).start()
            seconds = all_pass_on(every, 100)
            if moment == "after":
                come(shared[0])
            seconds = max(seconds, *(all_pass_on(every, 100 * n) for n in (2, 3)))
            if moment == "during":
                time.sleep(2 * _SAID_S)
                seconds = max(seconds, all_pass_on(every, 500))
        except Exception as error:
            return time.monotonic() - began, f"{type(error).__name__}: {error}"
        finally:
            for channels in made:
                channels.close()
        return seconds, ""
