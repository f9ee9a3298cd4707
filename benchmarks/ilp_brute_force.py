"""Is the integer program's plan the best of all combinations of choices?

Plans random small training steps (chains of matrix products, batched products, lookups, reductions,
reshapes and residuals with shared weights; forward alone, SGD, momentum) on random clusters and
meshes of 2, 4 and 2x2 devices, with nothing folded, without a memory limit and with several; and
tries all combinations of all choices for each. Writes the counts and the largest relative
difference of step times into `results/`.

    python benchmarks/ilp_brute_force.py [--problems 240] [--hardware NAME]
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from planners.comparing import Comparison, compare  # noqa: E402

from aliquot.core import version_of  # noqa: E402

_TOLERANCE = 1e-9


def main() -> int:
    """Run, write the result files, and say what they say; 1 if any plan misses the best
    combination.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=240, help="how many problems to compare")
    parser.add_argument(
        "--hardware",
        default=f"cpu-{os.cpu_count()}core",
        help="how the result file names this machine",
    )
    options = parser.parse_args()
    started = time.perf_counter()
    found: list[Comparison] = []
    seed = 0
    while len(found) < options.problems:
        comparison = compare(seed, most=1_000_000)
        if comparison is not None:
            found.append(comparison)
            print(
                f"\r{len(found)} of {options.problems} problems",
                end="",
                file=sys.stderr,
                flush=True,
            )
        seed += 1
    print(file=sys.stderr)
    differences = [d for c in found for d in c.differences]
    result = {
        "question": "is the integer program's plan the best of all combinations of choices?",
        "date": datetime.date.today().isoformat(),
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            **{name: version_of(name) for name in ("aliquot", "jax", "highspy", "numpy")},
        },
        "command": shlex.join(["python", "benchmarks/ilp_brute_force.py", *sys.argv[1:]]),
        "seconds": round(time.perf_counter() - started, 1),
        "problems": len(found),
        "seeds_tried": seed,
        "comparisons": len(differences),
        "infeasible_limits": sum(c.num_infeasible for c in found),
        "infeasible_limits_refused": sum(c.num_refused for c in found),
        "largest_relative_difference": max(differences),
        "unequal": sum(d > _TOLERANCE for d in differences),
        "tolerance": _TOLERANCE,
        "combinations": {
            "least": min(c.num_combinations for c in found),
            "median": sorted(c.num_combinations for c in found)[len(found) // 2],
            "most": max(c.num_combinations for c in found),
            "all": sum(c.num_combinations for c in found),
        },
        "most_nodes": max(c.num_nodes for c in found),
        "by_mesh": Counter("x".join(map(str, c.mesh)) for c in found),
        "by_target": Counter(c.target for c in found),
        "by_step": Counter(c.text.split(":")[0] for c in found),
    }
    _write(result, options.hardware)
    return int(
        result["unequal"] > 0 or result["infeasible_limits"] != result["infeasible_limits_refused"]
    )


def _write(result: dict, hardware: str) -> None:
    path = ROOT / "benchmarks" / "results" / f"ilp_brute_force_{hardware}_{result['date'][:7]}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    tried = result["combinations"]
    text = f"""# Integer program against all combinations

{result["problems"]} random small training steps, nothing folded, each without a memory limit and with up to four
({result["comparisons"]} comparisons). Relative difference of the planned step time to the least of all combinations:
**at most {result["largest_relative_difference"]:.1e}**; {result["unequal"]} beyond {result["tolerance"]:g}. Of
{result["infeasible_limits"]} limits below the smallest peak {result["infeasible_limits_refused"]} were refused as
infeasible.

| | |
|---|---|
| combinations tried for one problem | {tried["least"]} to {tried["most"]}, median {tried["median"]} |
| decisions in one problem | up to {result["most_nodes"]} |
| meshes | {_listed(result["by_mesh"])} |
| targets | {_listed(result["by_target"])} |
| steps | {_listed(result["by_step"])} |
| hardware | {result["hardware"]} |
| versions | {_listed(result["versions"])} |
| command | `{result["command"]}`, {result["seconds"]} s, {result["date"]} |
"""
    path.with_suffix(".md").write_text(text)
    print(text)


def _listed(items: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(items.items()))


if __name__ == "__main__":
    sys.exit(main())
