"""Whole runs of processes that train while strangers are at all their ports."""

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from runtime.processes import started
from runtime.strangers import KINDS, Target, new_secret, strangers

from aliquot.runtime.transport._channels import Sender
from aliquot.runtime.transport._meeting import Hello

WORKER = Path(__file__).parent / "stranger_worker.py"
_LIMIT_S = 240
#: Each kind of stranger is at each port for so long while the processes train.
_EACH_S = 0.5


class _Said:
    """Lines of processes: (process, words, time)."""

    def __init__(self, processes: Any) -> None:
        self.lines: list[tuple[int, list[str], float]] = []
        self.errors = [""] * len(processes)
        for k, process in enumerate(processes):
            threading.Thread(target=self._read, args=(k, process), daemon=True).start()
            threading.Thread(target=self._read_errors, args=(k, process), daemon=True).start()

    def _read(self, k: int, process: Any) -> None:
        with contextlib.suppress(ValueError):
            for line in iter(process.stdout.readline, ""):
                *words, at = line.split()
                self.lines.append((k, words, float(at)))

    def _read_errors(self, k: int, process: Any) -> None:
        with contextlib.suppress(ValueError):
            for line in iter(process.stderr.readline, ""):
                self.errors[k] += line

    def times(self, word: str) -> list[float]:
        return [at for _, words, at in self.lines if words[0] == word]

    def losses(self, process: int) -> list[str]:
        return [w[1] for k, w, _ in self.lines if (k, w[0]) == (process, "STEP")]

    def ports(self, name: str) -> dict[int, int]:
        return {k: int(w[2]) for k, w, _ in self.lines if w[:2] == ["PORT", name]}

    def wait(self, processes: Any, is_there: Any) -> None:
        """Until something was said; raises if it is not in time, or all have ended."""
        limit = time.time() + _LIMIT_S
        while not is_there():
            if time.time() > limit or all(p.poll() is not None for p in processes):
                raise TimeoutError("\n".join(self.errors)[-3000:])
            time.sleep(0.02)

    def longest_step_s(self, start: float, stop: float) -> float:
        """The longest time without a step of process 0 that began in a stretch of time."""
        steps = [at for k, words, at in self.lines if k == 0 and words[0] == "STEP"]
        return max(
            (b - a for a, b in zip(steps, steps[1:], strict=False) if b > start and a < stop),
            default=stop - start,
        )


def train_among(
    kinds: list[str], count: int, folder: Path, *, wiped: bool = False
) -> dict[str, Any]:
    """Exit codes; seconds to join; the longest step, alone and by kind and port of strangers; the
    losses of each process.

    Strangers of all kinds come to each port as soon as somebody listens there, and stay until all
    have joined or train. Then each kind comes alone.

    Args:
        wiped: whether all values in JAX's coordination service are deleted again and again while
            the processes train, as one could who speaks to it.
    """
    secret = new_secret().hex()
    marker = folder / "marker"
    previous = os.environ.get("ALIQUOT_SECRET")
    os.environ["ALIQUOT_SECRET"] = secret
    try:
        starting = started(WORKER, count, folder)
        with contextlib.ExitStack() as stack:
            processes = stack.enter_context(starting)
            said = _Said(processes)

            def target(port: str, process: int = 0) -> Target:
                other = (process + 1) % count
                hello = (
                    Sender(process=other, to=process, count=count)
                    if port == "arrays"
                    else Hello.own(1, count, "")
                )
                return Target(
                    address=("127.0.0.1", said.ports(port)[process]),
                    purpose=port,
                    hello=hello,
                    key=secret.encode(),
                    marker=marker,
                    stop=threading.Event(),
                )

            said.wait(processes, lambda: said.ports("meeting"))
            with contextlib.ExitStack() as there:
                there.enter_context(strangers(kinds, target("meeting")))
                (folder / "come").touch()
                said.wait(processes, lambda: said.ports("service"))
                there.enter_context(strangers(kinds, target("service")))
                said.wait(processes, lambda: len(said.times("JOINED")) == count)
            with contextlib.ExitStack() as there:
                said.wait(processes, lambda: len(said.ports("arrays")) == count)
                for k in range(count):
                    there.enter_context(strangers(kinds, target("arrays", k)))
                said.wait(processes, lambda: len(said.times("STEP")) > 10 * count)
            alone_s = time.time()
            time.sleep(3)
            steps = {"alone": said.longest_step_s(alone_s, time.time())}
            if wiped:
                (folder / "wipe").touch()
                begin = time.time()
                time.sleep(3)
                steps["wiped, service"] = said.longest_step_s(begin, time.time())
            for kind in kinds:
                for port in ("meeting", "arrays", "service"):
                    begin = time.time()
                    with strangers([kind], target(port)):
                        time.sleep(_EACH_S)
                    end = time.time()
                    said.wait(processes, lambda end=end: said.times("STEP")[-1] > end)
                    steps[f"{kind}, {port}"] = said.longest_step_s(begin, end)
            (folder / "stop").touch()
            for process in processes:
                process.wait(60)
            codes = [process.poll() for process in processes]
    finally:
        os.environ.pop("ALIQUOT_SECRET")
        if previous is not None:
            os.environ["ALIQUOT_SECRET"] = previous
    return {
        "codes": codes,
        "join_s": max(said.times("JOINED")) - max(said.times("COMES")),
        "steps_s": steps,
        "dropped": sum(errors.count("dropped stranger") for errors in said.errors),
        "code ran": marker.exists(),
        "losses": [said.losses(k) for k in range(count)],
        "errors": said.errors,
    }


ALL = list(KINDS)
