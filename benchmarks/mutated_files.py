"""Does any file, whatever is in it, crash a command or reach a price?

Profile databases, cluster files, compilers' cached answers and plans are changed by a seeded
generator: bytes flipped, cut off or left out, rows and fields of other types, signs and sizes. Each
is read as planning reads it. The test `tests/test_mutated_files.py` reads some of the same files.

    python benchmarks/mutated_files.py [--quick]
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from _results import Report, options, use_eight_devices

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

NUM_EACH = 250
KINDS = ("database", "cluster", "answer", "plan")


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__)
    use_eight_devices()
    from file_mutations import make_database, outcome

    report = Report(
        name="mutated_files",
        question="Profile databases, clusters, compilers' answers and plans with mistakes in them",
        bar="no file ends in a traceback, and what is used of each is within the bounds declared",
        method=(
            f"{NUM_EACH} files of each kind, seeds 0 to {NUM_EACH - 1}. A file is used, used"
            " without the rows that cannot be right, refused with a message, or (a cached answer)"
            " asked for again. Bounds are compared after reading; seconds are processor time."
        ),
    )
    originals = [path.read_text() for path in sorted((TESTS / "plans").glob("golden*.json"))]
    rows: list[dict[str, Any]] = []
    faults: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_database(folder / "original.sqlite")
        for kind in KINDS:
            counts, longest_s = Counter[str](), 0.0
            for seed in range(20 if chosen.quick else NUM_EACH):
                started_s = time.process_time()
                try:
                    counts[outcome(kind, seed, folder, originals)] += 1
                except Exception as error:
                    counts["fault"] += 1
                    last = traceback.extract_tb(error.__traceback__)[-1]
                    faults.append(
                        {
                            "kind": kind,
                            "seed": seed,
                            "error": f"{type(error).__name__}: {error}"[:200],
                            "at": f"{Path(last.filename).name}:{last.lineno}",
                        }
                    )
                longest_s = max(longest_s, time.process_time() - started_s)
            names = ("used", "used in part", "asked for again", "refused", "fault")
            found = {name: counts[name] for name in names}
            rows.append({"kind": kind, **found, "longest s": round(longest_s, 2)})
    report.tables = {"Files": rows, "Faults": faults}
    report.summary = {
        "files": sum(sum(row[name] for name in names) for row in rows),
        "tracebacks or values out of bounds": len(faults),
    }
    return report.finish(chosen, met=not faults)


if __name__ == "__main__":
    sys.exit(main())
