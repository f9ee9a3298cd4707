"""How long does it take from a step to the plan of a pipeline?

Runs `aliquot plan ... --method pipeshard --micro-batches auto --json` as a process of its own:
stages, submeshes, splits, schedule, number of micro-batches and recomputation are searched. Limits
are for what `aq.plan` takes, from the step to the plan; the whole command, with the start of
Python, imports and building the model, is shown beside it.

    python benchmarks/pipeline_search_time.py [--quick] [--repetitions 3] [--only TEXT]
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
    limit_s: float | None = None
    more: tuple[str, ...] = ()
    global_batch: int = 1024

    @property
    def name(self) -> str:
        """What tables call it."""
        return " ".join(
            [
                self.model,
                *(m for m in self.more if m.startswith("num_") or m == "--scan"),
                "on",
                self.cluster,
            ]
        )

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
            *self.more,
        ]
        method = ["--method", "pipeshard", "--micro-batches", "auto", "--recompute", "block"]
        return [*shape, *method, "--json"]


# A 70B MoE in single precision with AdamW needs 17 GiB on each of 64 devices: it gets the larger
# V100.
CASES = (
    Case(model="gpt-39b", cluster="8x8xV100-16GB", limit_s=10.0),
    Case(
        model="moe-70b",
        cluster="8x8xV100-32GB",
        limit_s=15.0,
        more=("--layers", "params.layers[*]"),
    ),
    Case(
        model="wide-resnet-13b",
        cluster="4x8xV100-16GB",
        limit_s=15.0,
        more=("--micro-batch-semantics", "independent"),
        global_batch=1536,
    ),
    Case(
        model="gpt-125m",
        cluster="8xV100-32GB",
        limit_s=10.0,
        more=("--set", "num_layers=1024", "--scan"),
    ),
    Case(model="gpt-39b", cluster="8x8xV100-16GB", limit_s=10.0, more=("--scan",)),
    Case(model="gpt-2.6b", cluster="8xV100-16GB", limit_s=10.0),
)

GROWTH = {
    "Growth with layers": tuple(
        Case(model="gpt-1.3b", cluster="2x8xV100-32GB", more=("--set", f"num_layers={layers}"))
        for layers in (12, 24, 48, 96)
    ),
    "A thousand layers written out": (
        Case(model="gpt-125m", cluster="8xV100-32GB", more=("--set", "num_layers=1024")),
    ),
    "Growth with devices": tuple(
        Case(model="gpt-1.3b", cluster=f"{hosts}x8xV100-32GB", more=("--set", "num_layers=24"))
        for hosts in (1, 2, 4, 8, 16)
    ),
}


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, more_options(repetitions=3))
    report = Report(
        name="pipeline_search_time",
        question="Search time of pipelines, from the step to the plan",
        bar="; ".join(f"{c.name}: {c.limit_s:g} s" for c in CASES if c.limit_s),
        method=(
            "`aliquot plan MODEL --cluster C --global-batch 1024 --method pipeshard"
            " --micro-batches auto --json`, each in a process of its own. From the step: what"
            " `aq.plan` takes, which limits are for: tracing the step, pricing layers on every"
            " submesh, the search, the chosen stages solved as wholes, writing the plan. Median,"
            " least and most are of the whole command, with Python's start, imports and building"
            f" the model. One run to warm the disk, then {chosen.repetitions} in turn over all"
            " cases; one run for what shows growth. Within: trace and search as the plan's own"
            " provenance has them, in the median run."
        ),
    )
    return time_commands(report, chosen, CASES, growth=GROWTH, warm_up=True, from_step=True)


if __name__ == "__main__":
    raise SystemExit(main())
