"""Do the plans that are found without any option fit their cards, by the compilers of these cards?

Each set-up of `default_against_typed.py` is planned by the command that a reader would type, and
`aliquot verify` compiles the plan for its devices, which need not be here. GPUs need the wheels of
`jax-cuda12-plugin`, `jax-cuda12-pjrt` and `nvidia-cuda-nvcc-cu12` on `PYTHONPATH`, TPUs `libtpu`.

    python benchmarks/default_plans_deviceless.py [--quick] [--only NAME] [--journal FILE]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _results import Journal, Report, options, say, with_rows
from default_against_typed import SET_UPS

MOST_ERROR = 0.05
_GIB = 2**30


def _aliquot(*words: str) -> tuple[dict[str, Any], str]:
    """What a command answers with `--json`; or, if it cannot, the last sentence of why."""
    command = [sys.executable, "-m", "aliquot", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # The verdict that a plan does not fit is an answer, too.
    if done.stdout.strip().startswith("{"):
        return json.loads(done.stdout), ""
    said = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
    return {}, (said or ["no output"])[-1]


def answer(words: list[str]) -> dict[str, Any]:
    """A default plan, and what its programs need by the compiler's account."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.json")
        _, refusal = _aliquot("plan", *words, "--out", str(plan))
        if not plan.exists():
            return {"refused": refusal or "no plan fits"}
        verified, refusal = _aliquot("verify", str(plan))
        if refusal:
            return {"not compiled": refusal}
        anew = ""
        if not verified["fits"]:
            # What a note of such a plan tells to type.
            _aliquot("plan", *words, "--verify", "--out", str(plan))
            anew = f"{json.loads(plan.read_text())['prediction']['step_time_s']:.4g} s"
    fullest = max(verified["stages"], key=lambda stage: stage["compiled_bytes"])
    return {
        "stages": len(verified["stages"]),
        "predicted GiB": round(fullest["predicted_bytes"] / _GIB, 2),
        "compiled GiB": round(fullest["compiled_bytes"] / _GIB, 2),
        "error": fullest["predicted_bytes"] / fullest["compiled_bytes"] - 1,
        "limit GiB": round(verified["limit_bytes"] / _GIB, 2),
        "fits": verified["fits"],
        "with --verify": anew,
    }


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, with_rows)
    journal = Journal(chosen.journal)
    rows = []
    for setup in SET_UPS:
        if ("gpt-350m" if chosen.quick else chosen.only) not in setup.name:
            continue
        found = journal.row(setup.name, lambda: answer(setup.words))  # noqa: B023
        why_not = {name: found.get(name, "") for name in ("not compiled", "refused")}
        command = f"aliquot plan {' '.join(setup.words)}"
        rows.append({"set-up": setup.name, **found, **why_not, "command": command})
        say(" ".join(f"{key}={value}" for key, value in rows[-1].items()))
    compiled = [row for row in rows if "error" in row]
    errors = [row["error"] for row in compiled]
    fit = sum(row["fits"] for row in compiled)
    report = Report(
        name="default_plans_deviceless",
        question="Do default plans fit their cards, by the compilers of these cards?",
        bar=f"all that are compiled fit; predicted memory within {MOST_ERROR:.0%}",
        method=(
            "`aliquot plan` with default options, then `aliquot verify` of its plan: the peak of"
            " the stage that needs most, predicted beside the compiler's account, with the memory"
            " that the device leaves to programs. A plan so large says itself that it is to be"
            " compiled before use; where it does not fit, the step time of `aliquot plan --verify`,"
            " which plans anew, stands beside it."
        ),
        tables={"Default plans": rows},
    )
    report.summary = {
        "compiled": len(compiled),
        "of them fit": fit,
        "not compiled": sum(bool(row["not compiled"]) for row in rows),
        "no plan fits": sum(bool(row["refused"]) for row in rows),
        "median of the error's size": statistics.median(map(abs, errors)),
        "least and most error": f"{min(errors):+.1%}, {max(errors):+.1%}",
    }
    for row in compiled:
        row["error"] = f"{row['error']:+.1%}"
    met = fit == len(compiled) and max(map(abs, errors)) <= MOST_ERROR
    return report.finish(chosen, met=met)


if __name__ == "__main__":
    raise SystemExit(main())
