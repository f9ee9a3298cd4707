"""One attempt: processes that run until all have ended well or one has failed."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ..core import printable
from ._engine import AbstractProcess, Ending, News

# After a failure the others end by themselves within 6 seconds, and say what they were doing.
_PATIENCE_S = 10
# With this exit code a process ends because another one was lost (see `runtime`).
_ENDED_BY_ANOTHER = 3
# To write a last checkpoint.
_GRACE_S = 60
_LAST_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The process that ended an attempt, of how many, when after the start, and the last lines that
    it printed.
    """

    process: int
    count: int
    place: str
    ending: Ending
    after_s: float
    last_lines: tuple[str, ...]

    def __str__(self) -> str:
        said = "".join(f"\n  | {printable(line)}" for line in self.last_lines)
        return (
            f"process {self.process} of {self.count}, {self.place}, {self.ending.why}"
            f" {self.after_s:.1f} s after its start."
            + (f" Its last lines:{said}" if said else " It had printed nothing.")
        )


def follow(
    processes: Sequence[AbstractProcess],
    show: Callable[[int, bool, str], None],
    logs: Path | None,
    signals: Sequence[int],
    interrupt: int,
) -> Failure | None:
    """Pass on what processes print until all have ended, and say which one failed first; None if
    all ended with exit code 0. Once one has failed, the others have some seconds to end by
    themselves, and are killed then.

    Args:
        show: gets each line: the process, whether it is of standard error, and the text.
        logs: a folder for a file of each process's lines.
        signals: grows while this runs. They are passed on, and the processes then have some time
            to end; a second one ends them at once.
        interrupt: the signal as which Ctrl-C is passed on.
    """
    started, count, passed = time.monotonic(), len(processes), 0
    heard: queue.Queue[tuple[int, News]] = queue.Queue()
    done = threading.Event()

    def read(k: int) -> None:
        news = News()
        while news.ending is None and not done.is_set():
            news = processes[k].news()
            heard.put((k, news))

    for k in range(count):
        threading.Thread(target=read, args=(k,), daemon=True).start()
    files: list[TextIO] = []
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        files = [(logs / f"process-{k}.log").open("w", encoding="utf-8") for k in range(count)]
    last = [deque[str](maxlen=_LAST_LINES) for _ in processes]
    ended: dict[int, Ending] = {}
    failures: list[Failure] = []
    until = float("inf")
    try:
        while len(ended) < count and time.monotonic() < until and len(signals) < 2:
            for number in signals[passed:]:
                for process in processes:
                    process.send(interrupt if number == signal.SIGINT else number)
                passed, until = passed + 1, time.monotonic() + _GRACE_S
            with suppress(queue.Empty):
                k, news = heard.get(timeout=min(1.0, max(0.0, until - time.monotonic())))
                for is_error, line in news.lines:
                    show(k, is_error, line)
                    last[k].append(line)
                    if files:
                        print(line, file=files[k], flush=True)
                if news.ending is not None:
                    ended[k] = news.ending
                if news.ending is not None and news.ending.code != 0:
                    until = min(until, time.monotonic() + _PATIENCE_S)
                    failures.append(
                        Failure(
                            process=k,
                            count=count,
                            place=processes[k].place,
                            ending=news.ending,
                            after_s=time.monotonic() - started,
                            last_lines=tuple(last[k]),
                        )
                    )
    finally:
        done.set()
        for process in processes:
            process.kill()
        for file in files:
            file.close()
    causes = [one for one in failures if one.ending.code != _ENDED_BY_ANOTHER]
    return next(iter(causes or failures), None)
