"""A helper process that takes part in a search: searches are mostly Python, which keeps one core busy at a time.

The two processes share calls of pure functions of this package on values that say all there is to
know, so that answers do not depend on which process gives them. A call that the helper does not
answer, because it could not be started, does not know a class of the caller's, or has died, is made
here: its error, if it is one, comes from here, too.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import IO, Any, Generic, TypeVar

from ..core import collect_seldom

T = TypeVar("T")
# While one call is worked on the next one waits there, not here for its turn on this process's
# interpreter.
_AHEAD = 2
_POLL_S = 0.02
_READY = b"."


class HelperProcess:
    """A process of its own beside this one, to be used with `with`; it starts at once, and is ready a second later.

    It imports this package and neither the user's program nor its modules, touches no accelerator,
    and ends with the block, whatever ends that. Ctrl-C reaches this process alone.

    Args:
        wanted: whether there is enough to do. On a single core it is not started either.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.is_ready = False
        self._shared: SharedQueue[Any] | None = None
        if wanted and sys.executable and _num_cores() > 1:
            path = os.pathsep.join(p or os.getcwd() for p in sys.path)
            with contextlib.suppress(OSError):
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"],
                    env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )

    def __enter__(self) -> HelperProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def share(self, function: Callable[[Any, Any], T]) -> SharedQueue[T]:
        """Calls of a function of a module of this package, with what many calls have in common and what each has of its own.

        Those of the last `SharedQueue` are over then: where their answers were not taken, this ends
        the process.
        """
        if self._shared is not None and not self._shared.is_over:
            self.end()
        shared = SharedQueue(function, self)
        self._shared = shared
        return shared

    def end(self) -> None:
        """End the process; what is open is done without it."""
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        if self._shared is not None:
            self._shared.wait()
        for stream in (process.stdin, process.stdout):
            # What it did not take any more is lost.
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()


class SharedQueue(Generic[T]):
    """Calls that two processes divide between them: the helper takes them from the front, this process from the back."""

    def __init__(self, function: Callable[[Any, Any], T], helper: HelperProcess) -> None:
        self.is_over = False
        self._function, self._helper = function, helper
        self._calls: list[tuple[Any, bytes, Any]] = []
        self._answers: list[T | _Nothing] = []
        self._open: deque[int] = deque()
        self._changed = threading.Condition()
        self._complete = False
        self._feeder: threading.Thread | None = None

    def add(self, context: Any, items: Iterable[Any]) -> None:
        """Calls with one context; they begin as soon as there is a process for them."""
        packed = b""
        if self._helper.process is not None:
            try:
                packed = pickle.dumps(context, pickle.HIGHEST_PROTOCOL)
            except (pickle.PicklingError, AttributeError, TypeError):
                # A planner that a function defines, for one, cannot leave this process.
                self._helper.end()
        process = self._helper.process
        with self._changed:
            for item in items:
                self._open.append(len(self._calls))
                self._calls.append((context, packed, item))
                self._answers.append(_NOTHING)
            self._changed.notify()
        if process is not None and self._feeder is None:
            self._feeder = threading.Thread(target=self._feed, args=(process,), daemon=True)
            self._feeder.start()

    def answers(self, report: Callable[[int, int], None] | None = None) -> list[T]:
        """Of all calls, in the order in which they were added. `report` hears how many of how many have begun."""
        self._close()
        while (number := self._take(last=True)) is not None:
            if report:
                report(len(self._calls) - len(self._open) - 1, len(self._calls))
            self._call(number)
        self.wait()
        left = [number for number, answer in enumerate(self._answers) if isinstance(answer, _Nothing)]
        if left:
            self._helper.end()
        for number in left:
            self._call(number)
        self.is_over = True
        return [answer for answer in self._answers if not isinstance(answer, _Nothing)]

    def wait(self) -> None:
        """Until nothing more comes from the other process."""
        self._close()
        if self._feeder is not None:
            self._feeder.join()

    def _close(self) -> None:
        with self._changed:
            self._complete = True
            self._changed.notify()

    def _call(self, number: int) -> None:
        context, _, item = self._calls[number]
        self._answers[number] = self._function(context, item)

    def _take(self, *, last: bool) -> int | None:
        with self._changed:
            return (self._open.pop() if last else self._open.popleft()) if self._open else None

    def _feed(self, process: subprocess.Popen[bytes]) -> None:
        """Hand over calls and take in answers, until there are no more or the process is gone."""
        assert process.stdin is not None and process.stdout is not None
        under_way: deque[int] = deque()
        sent: bytes | None = None
        # Whatever goes wrong there, it is done here.
        with contextlib.suppress(Exception):
            while not self._helper.is_ready:
                # Calls wait here as long as they would wait there, so that this process can have
                # them.
                if self._complete and not self._open:
                    return
                if select.select([process.stdout], [], [], _POLL_S)[0]:
                    _expect_ready(process.stdout)
                    self._helper.is_ready = True
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._open or under_way or self._complete)
                while len(under_way) < _AHEAD and (number := self._take(last=False)) is not None:
                    _, packed, item = self._calls[number]
                    under_way.append(number)
                    _send(process.stdin, (self._function, None if packed is sent else packed, item))
                    sent = packed
                if not under_way:
                    if self._complete:
                        return
                    continue
                answer = pickle.load(process.stdout)
                self._answers[under_way.popleft()] = answer


def _expect_ready(stream: IO[bytes]) -> None:
    if stream.read(len(_READY)) != _READY:
        raise EOFError


class _Nothing:
    """No answer yet."""


_NOTHING = _Nothing()


def serve() -> None:
    """Run the helper process: answer what comes by standard input, until that ends."""
    collect_seldom()
    # What imports and functions print is no answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answers.write(_READY)
    answers.flush()
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests,), daemon=True).start()
    context = None
    while True:
        function, packed, item = requests.get()
        if packed is not None:
            context = pickle.loads(packed)
        _send(answers, function(context, item))


def _receive(requests: queue.SimpleQueue[Any]) -> None:
    """Take in whatever comes, so that neither process waits for the other to read."""
    try:
        while True:
            requests.put(pickle.load(sys.stdin.buffer))
    except (OSError, EOFError):
        # Nobody waits for what is under way.
        os._exit(0)


def _send(stream: Any, message: Any) -> None:
    pickle.dump(message, stream, pickle.HIGHEST_PROTOCOL)
    stream.flush()


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
