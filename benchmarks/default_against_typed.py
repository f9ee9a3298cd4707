"""Is the plan that `aliquot plan` finds without any option the best one that can be typed?

Each set-up is planned twice. First as a reader would type it: a model, its batch and a cluster.
Then by FSDP, ZeRO-2, hybrid FSDP, Megatron's layouts and method shard, each with every policy of
recomputation and with every divisor of the batch as number of micro-batches. All of these are
priced by the same cost model. No plan that is typed and fits may be faster, and none of the same
policy and number of micro-batches below the bound that the default states.

    python benchmarks/default_against_typed.py [--quick] [--only NAME] [--journal FILE]
"""

from __future__ import annotations

import argparse
import functools
import math
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from _results import Journal, Report, options, say, with_rows

from aliquot._variants import Variant, plan_variants
from aliquot.cli._model import ZooOptions
from aliquot.cli._options import with_network
from aliquot.cli._recomputation import model_to_plan, variants_of
from aliquot.cluster import Cluster
from aliquot.core import CaptureError, InfeasibleError, InputError, format_seconds, parse_bytes
from aliquot.planners import (
    Decision,
    Megatron,
    ShardParallel,
    cannot_fit,
    least_compute_s,
    method_by_name,
)
from aliquot.planners._race import finished

LEAST_RATIO = 0.995
# After so many numbers of micro-batches in a row that are slower than fewer of them, larger ones
# are not typed.
_MOST_SLOWER = 2
# Method shard is not typed where the best simple plan takes this many times the best step time.
_FAR = 2.0
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """A model on a cluster, and the layouts that people give it there.

    Attributes:
        settings: of the model, as `--set` takes them.
        layouts: two of Megatron's, and the published one where it is another.
        devices_in_group: of hybrid FSDP.
    """

    model: str
    cluster: str
    global_batch: int
    layouts: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    network_gbps: str | None = None
    memory_limit: str | None = None
    devices_in_group: int = 8

    @property
    def name(self) -> str:
        """What tables call it."""
        settings = "".join(f"-{key}={value}" for key, value in self.settings.items())
        network = f"-{self.network_gbps}gbps" if self.network_gbps else ""
        limit = f"-{self.memory_limit}" if self.memory_limit else ""
        return f"{self.model}-{self.cluster}{network}-batch{self.global_batch}{settings}{limit}"

    @property
    def words(self) -> list[str]:
        """The command that plans it, from the model on."""
        words = [self.model, "--cluster", self.cluster, "--global-batch", str(self.global_batch)]
        for key, value in self.settings.items():
            words += ["--set", f"{key}={value}"]
        if self.network_gbps:
            words += ["--network-gbps", self.network_gbps]
        if self.memory_limit:
            words += ["--memory-limit", self.memory_limit]
        return [*words, "--scan"]

    @property
    def where(self) -> Cluster:
        """Its cluster."""
        return with_network(Cluster.preset(self.cluster), self.network_gbps)

    @property
    def limit_bytes(self) -> float | None:
        """The memory that a plan may use on each device, where that is given."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    @property
    def simple(self) -> tuple[str, ...]:
        """The methods that split the batch over all devices."""
        size = self.devices_in_group
        in_groups = (f"hsdp:{size}", f"zero2:{size}") if self.where.num_hosts > 1 else ()
        return ("fsdp", "zero2", *in_groups)

    def variants(self) -> dict[str, Variant]:
        """The step with every policy of recomputation, by its name."""
        asked = ZooOptions(global_batch=self.global_batch, overrides=self.settings, scan=True)
        (model,) = variants_of(model_to_plan(self.model, asked, self.where))
        return {str(each.layers): each for each in model.ways_to_recompute(None)}


SET_UPS = (
    SetUp(
        model="llama3-8b",
        cluster="8xH100",
        global_batch=64,
        # NVIDIA's: dp4, cp2, distributed optimizer.
        layouts=("megatron:dp4,tp2,sp,fsdp", "megatron:dp4,cp2,fsdp", "megatron:dp4,cp2,zero1"),
    ),
    SetUp(
        model="llama3-8b",
        cluster="8xH100",
        global_batch=96,
        layouts=("megatron:dp4,tp2,sp,fsdp", "megatron:dp4,cp2,fsdp", "megatron:dp4,cp2,zero1"),
    ),
    SetUp(
        model="llama3-8b",
        cluster="v5e-32",
        global_batch=64,
        layouts=("megatron:dp16,tp2,sp,fsdp", "megatron:dp8,tp4,sp,fsdp"),
    ),
    SetUp(
        model="llama-7b",
        cluster="8xA100-40GB",
        global_batch=128,
        layouts=("megatron:dp4,tp2,sp,fsdp", "megatron:dp2,tp2,pp2,sp,zero1"),
    ),
    SetUp(
        model="llama-7b",
        cluster="v5p-64",
        global_batch=128,
        settings={"seq_len": "4096"},
        # MaxText's is FSDP with `minimal`, in one micro-batch.
        layouts=("megatron:dp16,tp2,sp,fsdp", "megatron:dp8,tp4,sp,zero1"),
    ),
    SetUp(
        model="llama-70b",
        cluster="8x8xH100",
        global_batch=256,
        # NVIDIA's of bf16 has tp4, pp4 and five chunks a stage.
        layouts=("megatron:dp8,tp8,sp,fsdp", "megatron:dp4,tp4,pp4,vpp5,sp,zero1"),
    ),
    SetUp(
        model="mixtral-8x7b",
        cluster="8x8xH100",
        global_batch=256,
        # NVIDIA's has ep8, pp4 and eight chunks a stage.
        layouts=("megatron:dp8,ep8,fsdp", "megatron:dp2,ep8,pp4,vpp8,zero1"),
    ),
    SetUp(
        model="llama-13b",
        cluster="8x8xH100",
        global_batch=32,
        settings={"seq_len": "131072"},
        layouts=("megatron:dp16,cp4,fsdp", "megatron:dp8,cp8,fsdp"),
    ),
    SetUp(
        model="gpt-2.6b",
        cluster="8xV100-32GB",
        global_batch=128,
        layouts=("megatron:dp4,tp2,sp,zero1", "megatron:dp2,tp2,pp2,zero1"),
    ),
    SetUp(
        model="gpt-1.3b",
        cluster="2x8xA100-40GB",
        global_batch=512,
        network_gbps="25",
        layouts=("megatron:dp8,tp2,sp,zero1", "megatron:dp8,pp2,zero1"),
    ),
    SetUp(
        model="gpt-350m",
        cluster="4xV100-16GB",
        global_batch=64,
        layouts=("megatron:dp2,tp2,sp,zero1", "megatron:dp2,pp2,zero1"),
    ),
    SetUp(
        model="qwen3-30b-a3b",
        cluster="8xH100",
        global_batch=64,
        layouts=("megatron:dp1,ep8,fsdp", "megatron:dp1,ep8,zero1"),
    ),
    SetUp(
        model="qwen3-30b-a3b",
        cluster="2x8xH100",
        global_batch=64,
        # NVIDIA's has ep8, pp2 and twelve chunks a stage, in 8 bits.
        layouts=("megatron:dp2,ep8,fsdp", "megatron:dp1,ep8,pp2,vpp12,zero1"),
    ),
)
_QUICK = "gpt-350m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """A plan that was typed: the method, the policy of recomputation and the number of
    micro-batches. `step_time_s` is None where there is no such plan, for a reason. `cpu_s` is what
    planning took.
    """

    method: str
    policy: str
    count: int
    step_time_s: float | None = None
    is_pipeline: bool = False
    reason: str = ""
    cpu_s: float = 0.0

    @property
    def words(self) -> list[str]:
        """The options of the command that makes it."""
        return [
            *("--method", self.method, "--recompute", self.policy),
            *("--micro-batches", str(self.count)),
        ]


def typed_plans(setup: SetUp, variants: Mapping[str, Variant]) -> Iterator[Typed]:
    """Every plan that is typed, method shard last.

    For each method and policy the number of micro-batches rises, until two are slower than fewer of
    them. Pipelines are not typed where compute, shared evenly, with the wait of their stages takes
    longer than the best so far. Method shard is typed with the same policies and numbers where no
    simple plan fits, or the best one takes less than twice the best step time; it ends where its
    bounds show that no plan is faster than the best so far.
    """
    counts = [n for n in range(1, setup.global_batch + 1) if setup.global_batch % n == 0]
    best_s = math.inf
    simple_s: dict[tuple[str, int], float] = {}
    for method in (*setup.simple, *setup.layouts):
        layout = method_by_name(method)
        piped = layout if isinstance(layout, Megatron) and layout.pipeline > 1 else None
        for policy, variant in variants.items():
            compute_s = 0.0
            if piped:
                compute_s = least_compute_s(variant.task(setup.where).problem(1))
            least_s, slower = math.inf, 0
            for count in counts:
                if piped and compute_s * (1 + _waits(piped, count)) >= best_s:
                    reason = "its compute and the wait of its stages take longer than the best"
                    yield Typed(method=method, policy=policy, count=count, reason=reason)
                    continue
                made = _made(setup, variant, method, policy, count)
                yield made
                seconds = math.inf if made.step_time_s is None else made.step_time_s
                best_s = min(best_s, seconds)
                if method in setup.simple:
                    key = policy, count
                    simple_s[key] = min(seconds, simple_s.get(key, math.inf))
                if seconds < least_s:
                    least_s, slower = seconds, 0
                elif seconds < math.inf:
                    slower += 1
                if slower == _MOST_SLOWER:
                    break
    # The fastest first, so that the others are compared with it.
    for (policy, count), seconds in sorted(simple_s.items(), key=lambda each: each[1]):
        if math.isinf(seconds) or seconds <= _FAR * best_s:
            made = _made(setup, variants[policy], "shard", policy, count, faster_than_s=best_s)
            yield made
            best_s = min(best_s, math.inf if made.step_time_s is None else made.step_time_s)


def _waits(layout: Megatron, count: int) -> float:
    """How long a stage at least waits in a step, over how long it works."""
    return (layout.pipeline - 1) / (layout.chunks * count)


def _made(
    setup: SetUp,
    variant: Variant,
    method: str,
    policy: str,
    count: int,
    faster_than_s: float = math.inf,
) -> Typed:
    """One plan. `faster_than_s` is for method shard, which need not find plans that take longer."""
    task = variant.task(
        setup.where,
        num_micro_batches=count,
        memory_limit_bytes=setup.limit_bytes,
        # As in the command, of which every plan is of the policy that was typed.
        recomputes=policy != "none",
    )
    made = functools.partial(Typed, method=method, policy=policy, count=count)
    before = _cpu_s()
    try:
        if method == "shard":
            found = _sharded(task.problem(count), faster_than_s)
        else:
            found = method_by_name(method).decide(task)
    except (InfeasibleError, InputError, CaptureError) as error:
        return made(reason=str(error).partition("\n")[0], cpu_s=_cpu_s() - before)
    return made(
        step_time_s=found.step_time_s,
        is_pipeline=found.pipeline is not None,
        cpu_s=_cpu_s() - before,
    )


def _sharded(problem: Any, faster_than_s: float) -> Decision:
    if cannot_fit(problem):
        raise InfeasibleError("its arrays are too large even if all devices share them evenly")
    method = ShardParallel()
    return finished(method.race(problem, None, faster_than_s=faster_than_s, pauses=False))


def answer(setup: SetUp) -> dict[str, Any]:
    """The default plan of a set-up, and all that are typed."""
    before = _cpu_s()
    variants = setup.variants()
    default = _plan(setup, variants.values())
    default_cpu_s = _cpu_s() - before
    typed = []
    for made in typed_plans(setup, variants):
        if made.step_time_s is not None:
            say(f"{setup.name} {' '.join(made.words)}: {format_seconds(made.step_time_s)}")
        typed.append(made)
    fitting = [each for each in typed if each.step_time_s is not None]
    best = min(fitting, key=lambda each: each.step_time_s or math.inf, default=None)
    again: Mapping[str, Any] = {}
    if best is not None:
        # Through all that the command does.
        again = _plan(
            setup,
            [variants[best.policy]],
            method=method_by_name(best.method),
            num_micro_batches=best.count,
            recompute="none" if best.policy == "none" else None,
        )
    return {
        "command": f"aliquot plan {' '.join(setup.words)}",
        "default": default,
        "default_cpu_s": default_cpu_s,
        "typed_cpu_s": _cpu_s() - before - default_cpu_s,
        "typed": [asdict(each) for each in typed],
        "best": best and asdict(best),
        "best_by_the_command_s": again.get("step_time_s"),
        "below_the_bound": [asdict(each) for each in fitting if is_below_bound(each, default)],
    }


def _plan(setup: SetUp, variants: Iterable[Variant], **asked: Any) -> dict[str, Any]:
    """The figures of a plan, found as the command finds it; without a step time if none fits."""
    try:
        plan = plan_variants(
            tuple(variants), cluster=setup.where, memory_limit_bytes=setup.limit_bytes, **asked
        )
    except InfeasibleError as error:
        return {"step_time_s": None, "reason": error.message}
    assert plan.model is not None
    return {
        "step_time_s": plan.prediction.step_time_s,
        "recompute": plan.recompute,
        "num_micro_batches": plan.num_micro_batches,
        "num_stages": len(plan.stages),
        "lower_bound_s": plan.provenance.lower_bound_s,
        "space": plan.provenance.bound_holds_for,
    }


def is_below_bound(typed: Typed, default: Mapping[str, Any]) -> bool:
    """Whether a plan is among those of which the default states a bound, and takes less."""
    if default.get("lower_bound_s") is None or default["num_stages"] > 1 or typed.is_pipeline:
        return False
    same = (typed.policy, typed.count) == (default["recompute"], default["num_micro_batches"])
    least_s = default["lower_bound_s"] * (1 - _ROUNDING)
    return same and typed.step_time_s is not None and typed.step_time_s < least_s


def ratio_of(found: Mapping[str, Any]) -> float | None:
    """The step time of the best typed plan over the default's; None if neither fits. It is 0 where
    only a typed plan fits, and infinite where only the default does.
    """
    own_s, typed_s = found["default"]["step_time_s"], found["best_by_the_command_s"]
    if own_s is None and typed_s is None:
        return None
    return (typed_s or math.inf) / own_s if own_s else 0.0


def _cpu_s() -> float:
    """Processor seconds of this process and those that it ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _row(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    default, best, ratio = found["default"], found["best"], ratio_of(found)
    typed = Typed(**best) if best else None
    return {
        "set-up": name,
        "default s": default["step_time_s"] or "none fits",
        "policy": default.get("recompute", ""),
        "micro-batches": default.get("num_micro_batches", ""),
        "stages": default.get("num_stages", ""),
        "bound s": default.get("lower_bound_s") or "",
        "CPU s": round(found["default_cpu_s"], 1),
        "typed": len(found["typed"]),
        "fit": sum(each["step_time_s"] is not None for each in found["typed"]),
        "best typed": " ".join(typed.words) if typed else "none fits",
        "its s": found["best_by_the_command_s"] or "",
        "ratio": "refused by both" if ratio is None else round(ratio, 4),
        "below the bound": len(found["below_the_bound"]),
        "CPU s of typed": round(found["typed_cpu_s"], 1),
        "command": found["command"],
    }


def _by_method(name: str, found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """For each method of a set-up, its best plan."""
    typed = [Typed(**each) for each in found["typed"]]
    for method in dict.fromkeys(each.method for each in typed):
        ours = [each for each in typed if each.method == method]
        fitting = [each for each in ours if each.step_time_s is not None]
        best = min(fitting, key=lambda each: each.step_time_s or math.inf, default=None)
        yield {
            "set-up": name,
            "method": method,
            "typed": len(ours),
            "fit": len(fitting),
            "best s": best.step_time_s if best else "",
            "policy": best.policy if best else "",
            "micro-batches": best.count if best else "",
            "CPU s": round(sum(each.cpu_s for each in ours), 1),
            "why none": "" if best else ours[0].reason.replace("|", "/"),
        }


def is_met(found: Mapping[str, Any]) -> bool:
    ratio = ratio_of(found)
    return (ratio is None or ratio >= LEAST_RATIO) and not found["below_the_bound"]


def _chosen(chosen: argparse.Namespace) -> Sequence[SetUp]:
    asked = _QUICK if chosen.quick else chosen.only
    kept = [setup for setup in SET_UPS if asked in setup.name]
    if not kept:
        raise SystemExit(
            f"no set-up's name contains {asked!r}: {', '.join(each.name for each in SET_UPS)}"
        )
    return kept


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, with_rows)
    journal = Journal(chosen.journal)
    report = Report(
        name="default_against_typed",
        question="Is the default plan the best one that can be typed?",
        bar=f"best typed / default at least {LEAST_RATIO}, and no typed plan below a stated bound",
        method=(
            "`aliquot plan` with default options, beside plans by method, policy of recomputation"
            " and number of micro-batches: every policy of the model, and divisors of the batch"
            f" from the smallest until {_MOST_SLOWER} are slower than fewer. Pipelines are left out"
            " where compute alone, with the wait of their stages, takes longer than the best so"
            " far. Method shard is typed where FSDP, ZeRO-2 and hybrid FSDP with the same policy"
            f" and number do not fit or take less than {_FAR:g} times the best, and ends where its"
            " bounds show that no plan is faster than the best so far. All are priced by one cost"
            " model, and the best is planned again as the command does it. Processor seconds are of"
            " all processes, with those that build and trace the step in all ways among the"
            " default's; other programs ran at the same time."
        ),
    )
    found = {
        setup.name: journal.row(setup.name, functools.partial(answer, setup))
        for setup in _chosen(chosen)
    }
    rows = [_row(name, each) for name, each in found.items()]
    by_method = [row for name, each in found.items() for row in _by_method(name, each)]
    report.summary = {
        "set-ups whose default is at most the best typed": (
            f"{sum(map(is_met, found.values()))} of {len(found)}"
        ),
        "least ratio": min(
            (r for r in map(ratio_of, found.values()) if r is not None), default=math.nan
        ),
        "typed plans": sum(row["typed"] for row in rows),
        "that fit": sum(row["fit"] for row in rows),
        "below the bound of a default": sum(row["below the bound"] for row in rows),
    }
    report.tables = {"Set-ups": rows, "Best plan of each method": by_method}
    return report.finish(chosen, met=all(map(is_met, found.values())))


if __name__ == "__main__":
    raise SystemExit(main())
