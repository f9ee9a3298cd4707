"""How long does it take from the command to the plan?

Runs `aliquot plan ... --method shard --json` as a process of its own, start of Python and imports
included, over all two-dimensional logical meshes, and takes the time until it ends.

    python benchmarks/search_time.py [--quick] [--repetitions 5] [--only TEXT]
"""

from __future__ import annotations

from dataclasses import dataclass

from _commands import more_options, time_commands
from _results import Report, options


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command and the seconds it may take."""

    model: str
    cluster: str
    global_batch: int
    scan: bool
    limit_s: float

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.model} {'scan' if self.scan else 'unrolled'} on {self.cluster}"

    @property
    def command(self) -> list[str]:
        """Arguments of `aliquot`."""
        shape = [
            "plan",
            self.model,
            "--cluster",
            self.cluster,
            "--global-batch",
            str(self.global_batch),
        ]
        method = ["--method", "shard", "--recompute", "block", "--json"]
        return [*shape, *method, *(["--scan"] if self.scan else [])]


_PROBLEMS = (
    ("gpt-2.6b", "8xH100", 64, 10.0),
    ("llama-7b", "8x8xH100", 128, 15.0),
    ("gpt-175b", "64x8xH100", 512, 30.0),
)
CASES = tuple(
    Case(
        model=model,
        cluster=cluster,
        global_batch=batch,
        scan=scan,
        limit_s=6.0 if scan else limit_s,
    )
    for scan in (False, True)
    for model, cluster, batch, limit_s in _PROBLEMS
)


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, more_options(repetitions=5))
    report = Report(
        name="search_time",
        question="Search time, from the start of the command to the plan",
        bar="; ".join(f"{c.name}: {c.limit_s:g} s" for c in CASES),
        method=(
            "Wall time of a whole process, `aliquot plan MODEL --cluster C --global-batch N"
            " --method shard --json`: Python's start, imports of compiled modules, building and"
            " tracing the step, the search over all logical meshes of up to two axes, the plan."
            f" One run to warm the disk, then {chosen.repetitions} in turn over all cases; median,"
            " least and most. Within: trace and search as the plan's own provenance has them, in"
            " the median run."
        ),
    )
    return time_commands(report, chosen, CASES, warm_up=True, columns=("mesh",))


if __name__ == "__main__":
    raise SystemExit(main())
