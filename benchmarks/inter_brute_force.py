"""Are StageDP's stages the best of all ways to cut a chain, and how long does it look for them?

Cuts random small chains (1 to 4 devices in 1 to 3 hosts, up to 7 units and 4 options, some of which
cannot run some units; 1 to 16 micro-batches; transfers that overlap or not) under each schedule,
without a memory limit, with two that exclude some cuts and with one that excludes all, and prices
all cuts one by one. Then times chains of realistic sizes.

    python benchmarks/inter_brute_force.py [--chains 250] [--quick] [--hardware NAME]
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from _results import Report, options, say  # noqa: E402
from planners.inter.chains import compare  # noqa: E402

from aliquot.cluster import Link  # noqa: E402
from aliquot.core import InfeasibleError  # noqa: E402
from aliquot.cost import Chain, StageOption  # noqa: E402
from aliquot.planners.inter import StageDP  # noqa: E402
from aliquot.plans import training_schedules  # noqa: E402

_TOLERANCE = 1e-9
_REPETITIONS = 3


def main() -> int:
    """Run, and write what came out; 1 if any answer misses the best cut."""
    chosen = options(
        __doc__,
        lambda parser: parser.add_argument(
            "--chains", type=int, default=250, help="for each schedule"
        ),
    )
    count = 10 if chosen.quick else chosen.chains
    report = Report(
        name="inter_brute_force",
        question="Are StageDP's stages the best of all ways to cut a chain?",
        bar=(
            f"relative difference of step times (closed form) at most {_TOLERANCE:g} everywhere, no"
            " bound above the best"
        ),
        method=(
            f"{count} random chains for each schedule, up to four memory limits each, every cut"
            " priced by itself from the definitions. Search times are processor seconds, the least"
            f" of {_REPETITIONS} runs with default settings, simulations included."
        ),
    )
    wrong, worst = 0, 0.0
    for k, schedule in enumerate(training_schedules()):
        say(f"{schedule}: {count} chains")
        found = [
            c for seed in range(10_000 * k, 10_000 * k + count) for c in compare(seed, schedule)
        ]
        wrong += sum(c.difference > _TOLERANCE or c.bound_exceeds for c in found)
        worst = max(worst, *(c.difference for c in found))
        report.tables.setdefault("Comparisons", []).append(
            {
                "schedule": schedule,
                "comparisons": len(found),
                "limits that exclude the best cut": sum(c.binds for c in found),
                "limits that exclude all": sum(c.best_s is None for c in found),
                "most cuts": max(c.num_tried for c in found),
                "largest difference": max(c.difference for c in found),
            }
        )
    report.tables["Search time"] = [
        _timed(name, chain, schedules)
        for name, chain in _chains()
        for schedules in (("1f1b",), ("1f1b", "zero-bubble", "interleaved-1f1b"))
    ]
    report.summary = {
        "comparisons": sum(row["comparisons"] for row in report.tables["Comparisons"]),
        "wrong answers": wrong,
        "largest relative difference": worst,
    }
    return report.finish(chosen, met=wrong == 0)


def _chains() -> list[tuple[str, Chain]]:
    many = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8)]
    free = _realistic(50, 8, 8, many, equal=False)
    long = _realistic(1024, 1, 8, many[:4], equal=True)
    return [
        ("50 units, 8x8 devices, 28 options", free),
        ("the same, 2 % more memory than is needed at least", _tight(free)),
        ("1024 equal units, 8 devices, 16 options", long),
        ("the same, 2 % more memory than is needed at least", _tight(long)),
    ]


def _tight(chain: Chain) -> Chain:
    try:
        StageDP(schedules=("1f1b",)).solve([replace(chain, memory_limit_bytes=1.0)])
    except InfeasibleError as error:
        assert error.required_bytes is not None
        return replace(chain, memory_limit_bytes=1.02 * error.required_bytes)
    raise AssertionError("a byte is not enough")


def _realistic(
    num_units: int,
    num_hosts: int,
    devices_per_host: int,
    submeshes: list[tuple[int, int]],
    *,
    equal: bool,
) -> Chain:
    """Units of similar weight, four options on each submesh, half of which recompute."""
    rng = np.random.default_rng(0)
    choices = [
        StageOption(name=f"{h}x{d} {k}", submesh=(h, d), mesh_shape=(h * d,), recompute=recompute)
        for h, d in submeshes
        for k, recompute in enumerate(("none", "block", "none", "block"))
    ]
    devices = np.array([o.num_devices for o in choices])
    recomputes = np.array([o.recompute == "block" for o in choices])
    rows = 1 if equal else num_units
    shape = (num_units, len(choices))
    work = np.broadcast_to(rng.uniform(0.6, 1.4, (rows, 1)), shape)
    forward = (
        work
        * np.broadcast_to(rng.uniform(0.9, 1.2, (rows, len(choices))), shape)
        / devices**0.93
        * 1e-2
    )
    state = work * 4e9 / devices ** rng.uniform(0.5, 1, len(choices))
    return Chain(
        unit_names=tuple(f"layers[{k}]" for k in range(num_units)),
        options=tuple(choices),
        num_micro_batches=32,
        forward_s=forward,
        backward_s=forward * (2 + recomputes),
        weight_gradient_s=forward,
        once_s=state * 3e-12,
        state_bytes=state,
        in_flight_bytes=work * 1e8 * np.where(recomputes, 0.1, 1.0) / devices,
        working_bytes=5e8 / devices * np.ones(shape),
        boundary_bytes=np.full(num_units, 2e7),
        memory_limit_bytes=1e18,
        num_hosts=num_hosts,
        devices_per_host=devices_per_host,
        intra=Link(latency_s=2e-6, bandwidth_bytes_per_s=1e11),
        inter=Link(latency_s=2e-5, bandwidth_bytes_per_s=2e10),
    )


def _timed(name: str, chain: Chain, schedules: tuple[str, ...]) -> dict:
    say(f"{name}: {', '.join(schedules)}")
    spent = []
    for _ in range(_REPETITIONS):
        started = time.process_time()
        plan = StageDP(schedules=schedules).solve([chain])
        spent.append(time.process_time() - started)
    assert plan.lower_bound_s is not None
    return {
        "chain": name,
        "schedules": ", ".join(schedules),
        "processor seconds": min(spent),
        "answer": f"{plan.schedule}, {len(plan.stages)} stages",
        "closed form / bound": plan.closed_form_s / plan.lower_bound_s,
        "simulated / closed form": plan.step_time_s / plan.closed_form_s,
    }


if __name__ == "__main__":
    sys.exit(main())
