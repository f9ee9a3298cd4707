"""Files with mistakes in them besides plans: clusters, profile databases and compilers' answers.
The mistakes are those of an editor, a script, a disk or an attacker.
"""

import json
import math
import random
import shutil
import sqlite3
import warnings
from collections.abc import Sequence
from pathlib import Path

from mutated_plans import mutated

from aliquot.cluster import Cluster
from aliquot.core import AliquotError
from aliquot.plans import Plan, violations
from aliquot.profiling import Measurement, ProfileDatabase, ProgramKey
from aliquot.verification._cache import read_answer

ODD_SECONDS = (-1.0, 0.0, 1e-300, 1e300, math.inf, -math.inf, "fast", b"\xff\xfe", None, 10**18)
ODD_FIGURES = (
    *("0", "-1", "1e-300", "1e300", "nan", "inf", "-inf", "true", '""', '"fast"', "[]", "{}"),
    *(
        '"1GB/s"',
        '"3us"',
        '"7GiB"',
        '"5TFLOP/s"',
        "1",
        "2",
        '"H100"',
        '"1e-300 B/s"',
        '"1e300 s"',
        '"0GB/s"',
        '"-3us"',
        '"10 apples"',
        '"1B"',
        "99999999999999",
    ),
)
CLUSTERS = (
    """[cluster]
device = "A100-80GB"
hosts = 2
devices_per_host = 4
[intra]
latency = "2us"
bandwidth = "300GB/s"
[inter]
latency = "20us"
bandwidth = "100Gbps"
""",
    """[cluster]
name = "box"
devices_per_host = 2
[device]
name = "card"
kind = "gpu"
memory = "48GB"
memory_bandwidth = "864GB/s"
peak = { float32 = "91TFLOP/s", bfloat16 = "181TFLOP/s" }
[intra]
latency = "6us"
bandwidth = "32GB/s"
wires = [[0, "32GB/s"], ["32GB/s", 0]]
[calibration]
matmul_efficiency = 0.7
""",
)
ANSWER = {
    "memory": {
        "argument_bytes": 4096,
        "output_bytes": 1024,
        "temp_bytes": 512,
        "alias_bytes": 1024,
        "live_bytes": 4608,
        "host_bytes": 0,
        "code_bytes": 0,
    },
    "collectives": [
        {
            "kind": "all-reduce",
            "axes": ["x"],
            "count": 1.0,
            "num_bytes": 64.0,
            "dtype": "f32",
            "in_loop": False,
            "label": "",
        }
    ],
    "out_dims": [[["x"], []], None],
    "out_bytes": [64, 4],
    "cycles": 100.0,
    "modelled_compute_s": 0.01,
    "unpriced_calls": 2.0,
    "lower_s": 0.1,
    "compile_s": 0.5,
}


def flipped(data: bytes, random_: random.Random) -> bytes:
    """Bytes with one to four of them changed, cut off, or with a stretch missing."""
    changed = bytearray(data)
    kind = random_.random()
    if kind < 0.15:
        return bytes(changed[: random_.randrange(len(changed))])
    if kind < 0.25:
        start = random_.randrange(len(changed))
        del changed[start : start + random_.randrange(1, 40)]
        return bytes(changed)
    for _ in range(random_.randint(1, 4)):
        changed[random_.randrange(len(changed))] = random_.randrange(256)
    return bytes(changed)


def mutated_cluster(random_: random.Random) -> bytes:
    """The text of a cluster file with a mistake in it."""
    text = random_.choice(CLUSTERS)
    if random_.random() < 0.25:
        return flipped(text.encode(), random_)
    lines = text.splitlines()
    for _ in range(random_.choice((1, 1, 2, 3))):
        number = random_.choice([k for k, line in enumerate(lines) if " = " in line])
        key, equals, _ = lines[number].partition(" = ")
        kind = random_.random()
        if kind < 0.15:
            lines[number] = ""
        elif kind < 0.25:
            lines[number] = f"{key[:-1]}{equals}3"
        elif kind < 0.3:
            lines.insert(number, lines[number])
        else:
            lines[number] = f"{key}{equals}{random_.choice(ODD_FIGURES)}"
    return "\n".join(lines).encode()


def mutated_database(original: Path, path: Path, random_: random.Random) -> None:
    """Write a copy of a profile database with a mistake in it."""
    if random_.random() < 0.4:
        path.write_bytes(flipped(original.read_bytes(), random_))
        return
    shutil.copy(original, path)
    connection = sqlite3.connect(path)
    columns = [row[1] for row in connection.execute("PRAGMA table_info(measurements)")]
    rows = [row[0] for row in connection.execute("SELECT rowid FROM measurements")]
    for _ in range(random_.randint(1, 4)):
        column = random_.choice((*columns, "seconds", "seconds", "seconds"))
        try:
            connection.execute(
                f"UPDATE measurements SET {column} = ? WHERE rowid = ?",
                (random_.choice(ODD_SECONDS), random_.choice(rows)),
            )
        except sqlite3.IntegrityError:
            continue
    connection.commit()
    connection.close()


def mutated_answer(random_: random.Random) -> bytes:
    """A cached answer of a compiler with a mistake in it."""
    text = json.dumps(ANSWER)
    if random_.random() < 0.4:
        return flipped(text.encode(), random_)
    data = json.loads(text)
    place = data
    while True:
        key = random_.choice(list(place) if isinstance(place, dict) else range(len(place)))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or random_.random() < 0.3:
            break
        place = inner
    place[key] = random_.choice((None, -1, 1e300, "x", [], {}, True, 10**400, math.nan))
    return json.dumps(data).encode()


def make_database(path: Path, num_rows: int = 12) -> None:
    """A profile database with measurements of operators, and one of a program that did not fit."""
    with ProfileDatabase(path) as database:
        for number in range(num_rows):
            key = ProgramKey(
                program=f"product bfloat16 1x{64 * (number + 1)}x128x256",
                device="cpu, 2 cores",
                num_devices=8,
                mesh="8",
                jax_version="0.12",
            )
            found = Measurement(seconds=1e-3 * (number + 1), spread=0.01, memory_bytes=4096.0)
            lost = Measurement(seconds=None, repeats=0, outcome="out of memory")
            database.put(key, lost if number == num_rows - 1 else found)
    # All in one file, whose bytes are then changed.
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=DELETE")
    connection.close()


def read_database(path: Path) -> bool:
    """Read a database as planning does. Returns whether all of its rows were used; asserts that
    those that were are within bounds.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with ProfileDatabase(path, must_exist=True) as database:
            rows = list(database.rows())
            for key, measurement in rows:
                # None where the file's index is damaged: then it is measured again.
                assert database.get(key) in (measurement, None)
                assert measurement.seconds is None or 1e-9 <= measurement.seconds <= 1e6
                assert 0 <= measurement.memory_bytes <= 1e18 and 0 <= measurement.spread <= 1e9
                assert 1 <= key.num_devices <= 1_000_000
    for warning in said:
        assert len(str(warning.message)) < 2000
    return not said


def read_cluster(path: Path) -> bool:
    """Read a cluster; asserts that what is used is within bounds."""
    cluster = Cluster.load(path)
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    cluster.describe()
    for link in (cluster.intra, cluster.inter):
        assert 0 <= link.latency_s <= 1e3 and 1 <= link.bandwidth_bytes_per_s <= 1e18
    assert 2**20 <= cluster.device.memory_bytes <= 2**60
    assert all(1e3 <= peak <= 1e24 for peak in cluster.device.peak_flops_per_s.values())
    return True


def read_cached(path: Path) -> bool:
    """Read a cached answer, which is used or asked for again."""
    answer = read_answer(path.parent, path.stem)
    if answer is None:
        return False
    if "refusal" in answer:
        assert 0 <= answer["needed_bytes"] <= 1e18
        return True
    assert all(
        0 <= answer["memory"][name] <= 2**60 for name in ANSWER["memory"] if "code" not in name
    )
    assert all(0 <= size <= 2**60 for size in answer["out_bytes"])
    assert 0 <= answer["cycles"] <= 1e18 and 0 <= answer["compile_s"] <= 1e18
    return True


def outcome(kind: str, seed: int, folder: Path, originals: Sequence[str]) -> str:
    """What becomes of one mutated file: "used", "used in part", "asked for again" or "refused";
    anything else that is raised is a fault.

    Args:
        kind: "database", "cluster", "answer" or "plan".
        originals: texts of valid plans.
    """
    random_ = random.Random(seed)
    path = folder / f"{kind}-{seed}.json"
    try:
        if kind == "database":
            mutated_database(folder / "original.sqlite", path, random_)
            return "used" if read_database(path) else "used in part"
        if kind == "cluster":
            path.write_bytes(mutated_cluster(random_))
            read_cluster(path)
        elif kind == "answer":
            path.write_bytes(mutated_answer(random_))
            return "used" if read_cached(path) else "asked for again"
        else:
            text = mutated(originals[seed % len(originals)], random_)
            path.write_bytes(text.encode(errors="surrogatepass"))
            plan = Plan.load(path)
            assert not violations(plan) and Plan.from_json(plan.to_json()) == plan
        return "used"
    except AliquotError as error:
        said = str(error)
        assert len(said) < 5000 and all(c.isprintable() or c == "\n" for c in said), said
        return "refused"
    finally:
        path.unlink(missing_ok=True)
