"""A helper process that takes part in a search: searches are mostly Python, which keeps one core
busy.

The two processes share calls of pure functions of this package whose arguments hold everything that
the functions need, so that answers do not depend on which process gives them. A call that the
helper does not answer, because it could not be started, does not know a class of the caller's, or
has died, is made in this process, where its errors are then raised.
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
from typing import Any, Generic, TypeVar

from ..core import collect_seldom, num_cores

T = TypeVar("T")
# Calls sent ahead: while the helper works on one call, the next already waits there, because
# sending it needs this process's interpreter lock, which a search keeps busy.
_AHEAD = 2
_POLL_S = 0.02
_READY = b"."


class HelperProcess:
    """A second process, used with `with`; it starts at once and is ready a second later.

    It imports this package and neither the user's program nor its modules, touches no accelerator,
    and ends with the block, whatever ends that. Ctrl-C reaches only the calling process.

    Args:
        wanted: whether there is enough work for it. On a single core it is never started.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.is_ready = False
        self._shared: SharedQueue[Any] | None = None
        if wanted and sys.executable and num_cores() > 1:
            # The helper must find this package where this process found it, also from a relative
            # path.
            path = os.pathsep.join(p or os.getcwd() for p in sys.path)
            with contextlib.suppress(OSError):
                # Without a helper, this process does everything and takes longer.
                self.process = subprocess.Popen(
                    # `-P`: the working directory is not put in front, where a file of the user's
                    # could hide a module.
                    [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"],
                    # The helper must not take an accelerator from this process.
                    env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    # The terminal sends Ctrl-C to the calling process alone, since the helper is in
                    # a session of its own.
                    start_new_session=True,
                )

    def __enter__(self) -> HelperProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def share(self, function: Callable[[Any, Any], T]) -> SharedQueue[T]:
        """A queue of calls `function(context, item)`; the function must belong to a module of this
        package.

        A new queue ends the last one; if that one's answers were not all read, the process ends as
        well.
        """
        if self._shared is not None and not self._shared.is_over:
            self.end()
        shared = SharedQueue(function, self)
        self._shared = shared
        return shared

    def end(self) -> None:
        """End the process; calls that it has not answered are made in this one."""
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        if self._shared is not None:
            self._shared.wait()
        for stream in (process.stdin, process.stdout):
            # Calls that it has not read yet cannot be delivered any more.
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()


class SharedQueue(Generic[T]):
    """Calls that two processes divide between them: the helper takes them from the front, this
    process from the back.
    """

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
        """Add calls that share a context; the helper begins as soon as it is ready."""
        packed = b""
        if self._helper.process is not None:
            try:
                packed = pickle.dumps(context, pickle.HIGHEST_PROTOCOL)
            except (pickle.PicklingError, AttributeError, TypeError):
                # Some contexts cannot be sent, such as a planner whose class is defined in a
                # function.
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
        """Answers of all calls, in the order in which they were added; calls `report(begun,
        of)`.
        """
        self._close()
        # From the back, so that the processes meet in the middle and neither waits long for the
        # other.
        while (number := self._take(last=True)) is not None:
            if report:
                report(len(self._calls) - len(self._open) - 1, len(self._calls))
            self._call(number)
        self.wait()
        unanswered = [
            number for number, answer in enumerate(self._answers) if isinstance(answer, _Nothing)
        ]
        if unanswered:
            self._helper.end()
        for number in unanswered:
            self._call(number)
        self.is_over = True
        return [answer for answer in self._answers if not isinstance(answer, _Nothing)]

    def wait(self) -> None:
        """Wait until nothing more comes from the other process."""
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
        """Send calls and receive answers, until there are no more or the process is gone."""
        assert process.stdin is not None and process.stdout is not None
        under_way: deque[int] = deque()
        sent: bytes | None = None
        # Calls that fail in the helper are made in this process.
        with contextlib.suppress(Exception):
            while not self._helper.is_ready:
                # Until the helper is ready, calls stay in the queue, where this process can take
                # them.
                if self._complete and not self._open:
                    return
                if select.select([process.stdout], [], [], _POLL_S)[0]:
                    if process.stdout.read(len(_READY)) != _READY:
                        raise EOFError
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


class _Nothing:
    """No answer yet."""


_NOTHING = _Nothing()


def serve() -> None:
    """Run the helper process: answer calls from standard input, until that ends."""
    collect_seldom()
    # Standard output carries answers only; whatever imports and functions print goes elsewhere.
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
    """Read calls as they arrive, so that neither process blocks until the other reads."""
    try:
        while True:
            requests.put(pickle.load(sys.stdin.buffer))
    except (OSError, EOFError):
        # The caller is gone, and nobody waits for the answer.
        os._exit(0)


def _send(stream: Any, message: Any) -> None:
    pickle.dump(message, stream, pickle.HIGHEST_PROTOCOL)
    stream.flush()
