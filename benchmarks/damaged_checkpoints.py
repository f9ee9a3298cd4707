"""Is a damaged checkpoint ever restored, does a second run disturb the first, and what do checksums
cost?

Checkpoints are damaged by a seeded generator: bits flipped, pages zeroed, the arrays of another one
put in their place, small files changed. Two runs save into one folder at the same time. Saves are
timed with checksums and without.

    python benchmarks/damaged_checkpoints.py [--quick]
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from _results import Report, options, say, use_eight_devices

use_eight_devices()
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np  # noqa: E402
import orbax.checkpoint  # noqa: E402
from mutated_plans import mutated  # noqa: E402
from orbax.checkpoint import type_handlers as types  # noqa: E402

import aliquot as aq  # noqa: E402
from aliquot.core import AliquotError  # noqa: E402
from aliquot.runtime.checkpoints import _handler, _orbax  # noqa: E402

NUMBERS = (1, 2, 3, 4)
COUNTS = {"flipped bit": 200, "page of zeros": 20, "swapped state": 20, "changed file": 200}
NUM_RUNS, NUM_ROUNDS = 20, 9
PAGE_BYTES = 4096
STATE_BYTES = 2**29
MOST_RATIO = 1.03


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__)
    report = Report(
        name="damaged_checkpoints",
        question="Damaged checkpoints, two runs in one folder, and the price of checksums",
        bar=(
            "no damage is restored as other numbers or ends in a traceback; of two runs in one"
            " folder the first goes on and the second names it; a save takes at most 3 % more CPU"
            " seconds than before there were checksums"
        ),
        method=(
            "Damage: checkpoints of eight float32 arrays of 1.9 MB and a small one, seed 404, on"
            " eight virtual CPU devices; each damaged one is asked for by its number and restored"
            " as NumPy. 'right': the damaged bytes are none that are read. Runs: two processes"
            " save without pause, the second starting up to half a second after the first. Price:"
            f" processor seconds of all threads for a save of {STATE_BYTES // 2**20} MiB of noise,"
            " with checksums; without them; and in format 1, which had none and stored chunks by"
            " zarr 2 in place of zarr 3; in turn. The machine is busy: single ratios vary by 20 %."
        ),
    )
    with tempfile.TemporaryDirectory() as place:
        # They are forked, so JAX must not have begun.
        runs = [_two_runs(Path(place), turn) for turn in range(2 if chosen.quick else NUM_RUNS)]
        said = Path(place) / "stderr"
        with _standard_error(said):
            damage, faults = _damage(Path(place), 10 if chosen.quick else 1)
        noise = said.read_text(errors="replace")
        price = _price(Path(place), 1 if chosen.quick else NUM_ROUNDS)
    ratio, alone = (
        statistics.median(row[f"with / {kind}"] for row in price)
        for kind in ("format 1", "without")
    )
    bad = sum(row["other numbers"] + row["traceback"] for row in damage)
    report.tables = {"Damage": damage, "Faults": faults, "Two runs": runs, "Price": price}
    report.summary = {
        "damaged checkpoints": sum(row["checkpoints"] for row in damage),
        "restored as other numbers": sum(row["other numbers"] for row in damage),
        "tracebacks": sum(row["traceback"] for row in damage) + noise.count("Traceback"),
        "two runs: first went on, second named it": sum(row["as it should be"] for row in runs),
        "CPU s of a save / before there were checksums (median)": round(ratio, 3),
        "CPU s of a save / stored the same way without them (median)": round(alone, 3),
    }
    met = (
        not bad
        and "Traceback" not in noise
        and all(row["as it should be"] for row in runs)
        and ratio <= MOST_RATIO
    )
    return report.finish(chosen, met=met)


def _tree(number: int) -> dict[str, Any]:
    noise = np.random.default_rng(number)
    arrays = [noise.normal(size=(700, 700)).astype(np.float32) for _ in range(8)]
    return {"arrays": arrays, "small": noise.normal(size=5), "number": np.int32(number)}


def _damage(place: Path, share: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """For each kind of damage, how often which outcome was seen; and every fault."""
    good = place / "good"
    with aq.Checkpoints(good) as checkpoints:
        for number in NUMBERS:
            checkpoints.save(None, _tree(number), number, meta={"position": number})
    kinds: dict[str, Callable[[random.Random, Path, int], str]] = {
        "flipped bit": _flip,
        "page of zeros": _zero,
        "swapped state": _swap,
        "changed file": _change,
    }
    draw, rows, faults = random.Random(404), [], []
    for kind, do in kinds.items():
        counts = Counter[str]()
        for turn in range(COUNTS[kind] // share):
            folder = place / "damaged"
            shutil.copytree(good, folder)
            what = do(draw, folder, turn)
            outcome = _outcome(folder)
            shutil.rmtree(folder)
            counts[outcome] += 1
            if outcome not in ("refused", "right"):
                faults.append({"kind": kind, "what": what, "outcome": outcome})
        names = ("refused", "right", "other numbers", "traceback")
        rows.append(
            {"kind": kind, "checkpoints": counts.total(), **{name: counts[name] for name in names}}
        )
        say(str(rows[-1]))
    return rows, faults


def _outcome(folder: Path) -> str:
    """What comes of restoring the newest checkpoint of a folder by its number."""
    newest = NUMBERS[-1]
    try:
        restored = aq.Checkpoints(folder).restore(number=newest)
    except AliquotError:
        return "refused"
    except Exception:
        return "traceback"
    assert restored is not None
    wanted = _tree(newest)
    found = restored.state
    same = (
        restored.meta == {"position": newest}
        and found.keys() == wanted.keys()
        and len(found["arrays"]) == len(wanted["arrays"])
        and all(map(np.array_equal, found["arrays"], wanted["arrays"]))
        and np.array_equal(found["small"], wanted["small"])
        and found["number"] == newest
    )
    return "right" if same else "other numbers"


def _chunks(folder: Path, number: int) -> Path:
    """The file in which the chunks of a checkpoint lie."""
    files = [path for path in (folder / str(number)).rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def _flip(draw: random.Random, folder: Path, turn: int) -> str:
    """One bit in any file that holds arrays, by size."""
    files = sorted((folder / str(NUMBERS[-1])).rglob("d/*"))
    (path,) = draw.choices(files, [file.stat().st_size for file in files])
    data = bytearray(path.read_bytes())
    place = draw.randrange(len(data))
    data[place] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return f"byte {place} of {path.name}"


def _zero(draw: random.Random, folder: Path, turn: int) -> str:
    path = _chunks(folder, NUMBERS[-1])
    data = bytearray(path.read_bytes())
    place = draw.randrange(len(data) // PAGE_BYTES) * PAGE_BYTES
    data[place : place + PAGE_BYTES] = bytes(PAGE_BYTES)
    path.write_bytes(data)
    return f"page at {place}"


def _swap(draw: random.Random, folder: Path, turn: int) -> str:
    """Something of an older checkpoint in the place of the newest one's."""
    older = draw.choice(NUMBERS[:-1])
    mine, theirs = folder / str(NUMBERS[-1]), folder / str(older)
    what = ("whole folder", "state", "link to state", "chunks", "record")[turn % 5]
    if what == "whole folder":
        shutil.rmtree(mine)
        shutil.copytree(theirs, mine)
    elif what == "chunks":
        shutil.copy(_chunks(folder, older), _chunks(folder, NUMBERS[-1]))
    elif what == "record":
        shutil.copy(theirs / "meta" / "metadata", mine / "meta" / "metadata")
    else:
        shutil.rmtree(mine / "state")
        if what == "state":
            shutil.copytree(theirs / "state", mine / "state")
        else:
            (mine / "state").symlink_to(theirs / "state")
    return f"{what} of {older}"


def _change(draw: random.Random, folder: Path, turn: int) -> str:
    """A file beside the chunks: other values in JSON, or bytes changed, cut off or left out."""
    newest = folder / str(NUMBERS[-1])
    chunks = _chunks(folder, NUMBERS[-1])
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path != chunks)
    path = files[turn % len(files)]
    data = path.read_bytes()
    with contextlib.suppress(ValueError):
        if draw.random() < 0.5:
            path.write_text(mutated(data.decode(), draw))
            return f"values of {path.name}"
    place = draw.randrange(len(data))
    before, after = data[:place], data[place + 1 :]
    how = draw.choice(("removed", "cut off", "left out", "changed"))
    if how == "removed":
        path.unlink()
    elif how == "cut off":
        path.write_bytes(before)
    elif how == "left out":
        path.write_bytes(before + after)
    else:
        path.write_bytes(before + bytes([draw.randrange(256)]) + after)
    return f"{path.name} {how} at {place}"


def _two_runs(place: Path, turn: int) -> dict[str, Any]:
    """Two processes that save into one folder: how each ends, and what the second says."""
    folder, stop = place / f"runs-{turn}", place / f"stop-{turn}"
    pause_s = random.Random(turn).uniform(0, 0.5)
    running: dict[int, Path] = {}
    for name in "ab":
        log = place / f"{turn}{name}.log"
        process = os.fork()
        if not process:
            os._exit(_run(folder, stop, log))
        running[process] = log
        time.sleep(pause_s)
    ended, status = os.wait()
    # The other one goes on for a while.
    time.sleep(0.5)
    stop.touch()
    (other,) = running.keys() - {ended}
    _, last = os.waitpid(other, 0)
    saved = json.loads(running[other].read_text().splitlines()[-1])
    with aq.Checkpoints(folder) as checkpoints:
        found = checkpoints.numbers()
    shutil.rmtree(folder)
    message = running[ended].read_text().splitlines()[-1]
    return {
        "turn": turn,
        "pause s": round(pause_s, 2),
        "the one that is refused ends with": os.waitstatus_to_exitcode(status),
        "names the other": f"process {other} on " in message,
        "the other ends with": os.waitstatus_to_exitcode(last),
        "and saved": saved,
        "as it should be": os.waitstatus_to_exitcode(status) == 2
        and os.waitstatus_to_exitcode(last) == 0
        and f"process {other} on " in message
        and found == (saved - 1, saved),
    }


def _run(folder: Path, stop: Path, log: Path) -> int:
    """Save until there is a file `stop`; the number of the last checkpoint goes to `log`."""
    with log.open("w") as stream:
        os.dup2(stream.fileno(), 2)
        number = 0
        try:
            with aq.Checkpoints(folder, keep=2) as checkpoints:
                while number < 3 or not stop.exists():
                    number += 1
                    checkpoints.save(None, {"w": np.full((300, 300), number)}, number)
        except AliquotError as error:
            stream.write(f"{error}\n")
            return 2
        except BaseException as error:
            stream.write(f"{type(error).__name__}: {error}\n")
            return 1
        stream.write(f"{number}\n")
    return 0


def _price(place: Path, num_rounds: int) -> list[dict[str, Any]]:
    """Processor seconds of saves of each kind, in turn."""
    noise = np.random.default_rng(0)
    rows = STATE_BYTES // 16 // 4096 // 4
    tree = [noise.normal(size=(rows, 4096)).astype(np.float32) for _ in range(16)]
    draw, found = random.Random(404), []
    kinds: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
        "with": contextlib.nullcontext,
        "without": _no_checksums,
        "format 1": _format_1,
    }
    for _ in range(num_rounds):
        seconds = {}
        for kind in draw.sample(list(kinds), len(kinds)):
            with kinds[kind]():
                seconds[kind] = _seconds(place, tree)
        ratios = {f"with / {kind}": seconds["with"] / seconds[kind] for kind in list(kinds)[1:]}
        found.append({**{f"{kind}, CPU s": seconds[kind] for kind in kinds}, **ratios})
        say(str(found[-1]))
    return found


def _seconds(place: Path, tree: Any) -> float:
    folder = place / "price"
    with aq.Checkpoints(folder) as checkpoints:
        checkpoints.save(None, tree[:1], 0)
        checkpoints.wait()
        started_s = time.process_time()
        checkpoints.save(None, tree, 1)
        checkpoints.wait()
        seconds = time.process_time() - started_s
    shutil.rmtree(folder)
    return seconds


@contextlib.contextmanager
def _no_checksums() -> Iterator[None]:
    """Within, a checkpoint is stored the same way, but for its checksums."""
    plain = (_handler._CODECS[0], {"name": "zstd", "configuration": {"level": 1}})
    with (
        mock.patch.object(_handler, "_CODECS", plain),
        mock.patch.object(_orbax, "write_checksums", lambda _: None),
    ):
        yield


@contextlib.contextmanager
def _format_1() -> Iterator[None]:
    """Within, arrays are stored as they were before there were checksums: by zarr 2, as Orbax sets
    it up.
    """
    spec_of, handler = types.get_json_tspec_write, orbax.checkpoint.PyTreeCheckpointHandler

    class Settled(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            if key != "codecs":
                super().__setitem__(key, value)

    def settled(*given: Any, **more: Any) -> Any:
        spec = spec_of(*given, **more)
        return spec | {"metadata": Settled(spec["metadata"])}

    def zarr_2(**more: Any) -> Any:
        return handler(**more | {"use_zarr3": False})

    with (
        mock.patch.object(types, "get_json_tspec_write", settled),
        mock.patch.object(orbax.checkpoint, "PyTreeCheckpointHandler", zarr_2),
        mock.patch.object(_orbax, "write_checksums", lambda _: None),
    ):
        yield


@contextlib.contextmanager
def _standard_error(path: Path) -> Iterator[None]:
    """Within, what this process and its libraries write to standard error goes to a file."""
    before = os.dup(2)
    with path.open("w") as stream:
        os.dup2(stream.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)


if __name__ == "__main__":
    sys.exit(main())
