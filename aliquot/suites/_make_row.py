"""Rows of one plan of a case: predicted, or run on the devices of this process."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..cluster import Cluster, target_for
from ..core import AliquotError, InfeasibleError, TimeLimitError
from ..planners import Progress, ShardParallel, apply_plan
from ..plans import Plan
from ..zoo import NUM_TIMES, AbstractTextConfig, UNetConfig, WideResNetConfig
from ._plan_case import BuiltCase, build_case, plan_given, plan_ours, planned
from ._rows import GIVEN, Row, layout_text, row_of
from ._suite import Case

_SEED = 0
_COMPARED_STEPS = 2
# Sums in another order: float32 over two steps.
_TOLERANCE = 1e-4

Phase = Callable[[str, float], None]
"""Told of each phase that is done, with its seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How a step is timed.

    Attributes:
        warmup, repeats: steps before those that are timed, and steps that are.
        barrier: whether each step is waited for. Without, the driver issues them all, and the mean
            is of all together.
        compares: whether losses are compared with one device's.
    """

    warmup: int = 1
    repeats: int = 3
    barrier: bool = True
    compares: bool = False


def predicted_row(
    case: Case,
    plan_of: str,
    cluster: Cluster,
    folder: Path | None,
    *,
    phase: Phase,
    progress: Progress | None = None,
    verify: bool = False,
    time_limit_s: float | None = None,
) -> Row:
    """A plan of a case, as predicted for as many devices as it asks for. The plan is saved.

    Args:
        verify: compile it for the cluster's devices, too.
        time_limit_s: that the plan may take.
    """
    found = _plan(case, plan_of, cluster, folder, phase, progress, time_limit_s)
    if isinstance(found, Row):
        return found
    built, plan, facts = found
    if verify:
        from ..verification import verify_plan

        started = time.perf_counter()
        try:
            compiled = verify_plan(apply_plan(plan, built.graph))
        except AliquotError as error:
            return row_of(case, plan_of, outcome="failed", reason=str(error), **facts)
        phase("verify", time.perf_counter() - started)
        facts["peak_gb"] = compiled.compiled_bytes / 1e9
    too_large = facts["predicted_gb"] > facts["usable_gb"]
    return row_of(case, plan_of, outcome="does not fit" if too_large else "predicted", **facts)


def measured_row(
    case: Case,
    plan_of: str,
    devices: Sequence[Any],
    folder: Path | None,
    *,
    timing: Timing,
    phase: Phase,
    progress: Progress | None = None,
) -> Row:
    """A plan of a case, run on the first of some devices."""
    cluster = Cluster.detect(devices[: case.num_devices])
    found = _plan(case, plan_of, cluster, folder, phase, progress)
    if isinstance(found, Row):
        return found
    built, plan, facts = found
    measured = _run(built, plan, devices[: case.num_devices], timing, phase)
    losses = measured.pop("losses")
    if timing.compares and not any(map(math.isnan, losses)):
        started = time.perf_counter()
        wanted, facts["one_device_s"] = _alone(
            built, plan.num_micro_batches, devices[:1], len(losses), timing.repeats
        )
        difference = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
        phase("compare", time.perf_counter() - started)
        facts["max_difference"] = difference
        if not difference <= _TOLERANCE:
            reason = f"losses differ from one device's by {difference:.1e}"
            return row_of(case, plan_of, outcome="failed", reason=reason, **facts, **measured)
    return row_of(case, plan_of, outcome="measured", **facts, **measured)


def failed_row(case: Case, plan_of: str, reason: str) -> Row:
    """A row of a plan whose process ended without a result."""
    return row_of(case, plan_of, outcome="failed", reason=reason)


def _plan(
    case: Case,
    plan_of: str,
    cluster: Cluster,
    folder: Path | None,
    phase: Phase,
    progress: Progress | None,
    time_limit_s: float | None = None,
) -> Row | tuple[BuiltCase, Plan, dict[str, Any]]:
    """The traced case, its plan and what is predicted of it, or the row that says why there is
    none.
    """
    if case.not_expressible:
        return row_of(case, plan_of, outcome="not expressible", reason=case.not_expressible)
    try:
        built = build_case(case)
        phase("prepare", built.build_s)
        started = time.perf_counter()
        find = plan_given if plan_of == GIVEN else plan_ours
        plan = find(built, cluster, progress, time_limit_s)
        plan_s = time.perf_counter() - started
        phase("plan", plan_s)
    except InfeasibleError as error:
        return row_of(case, plan_of, outcome="does not fit", reason=error.message)
    except TimeLimitError as error:
        # A failure, so that the case is taken again if it is given more time.
        return row_of(case, plan_of, outcome="failed", reason=str(error))
    except AliquotError as error:
        return row_of(case, plan_of, outcome="not expressible", reason=str(error))
    path = None
    if folder is not None:
        path = folder / f"{case.suite}-{case.number}-{plan_of}.json"
        plan.save(path)
    prediction = plan.prediction
    ended = "" if time_limit_s is None else f"; {plan.provenance.status}"
    facts = {
        "billion_parameters": built.num_parameters / 1e9,
        "metadata": f"{cluster.name}; {case.precision}; planned in {plan_s:.1f} s{ended}",
        "plan_file": None if path is None else str(path),
        "predicted_s": prediction.step_time_s,
        "predicted_gb": prediction.peak_memory_bytes / 1e9,
        "usable_gb": target_for(cluster.device).usable_bytes(cluster.device) / 1e9,
    }
    if plan_of != GIVEN:
        facts |= {"parallel": layout_text(plan), "num_micro_batches": plan.num_micro_batches}
    return built, plan, facts


def _run(
    built: BuiltCase, plan: Plan, devices: Sequence[Any], timing: Timing, phase: Phase
) -> dict[str, Any]:
    import jax

    from .._api import parallelize

    batches = [_batch(built, k) for k in range(max(timing.warmup, _COMPARED_STEPS))]
    step = parallelize(built.step, plan, devices=devices)
    started = time.perf_counter()
    state = jax.block_until_ready(step.init(built.init, jax.random.key(_SEED)))
    phase("state", time.perf_counter() - started)
    losses: list[float] = []

    def call(state: Any, batch: Any) -> tuple[Any, Any]:
        result = step(state, batch)
        return (state, result) if built.case.forward_only else (result[0], result[1])

    for k, batch in enumerate(batches):
        started = time.perf_counter()
        state, metrics = call(state, batch)
        losses.append(_figure(metrics))
        if k == 0:
            phase("compile", time.perf_counter() - started)
    started, seconds = time.perf_counter(), []
    for _ in range(timing.repeats):
        began = time.perf_counter()
        state, metrics = call(state, batches[-1])
        if timing.barrier:
            jax.block_until_ready((state, metrics))
            seconds.append(time.perf_counter() - began)
    jax.block_until_ready((state, metrics))
    total = time.perf_counter() - started
    phase("run", total)
    here = [device for device in devices if device.process_index == jax.process_index()]
    most = [device.memory_stats() or {} for device in here]
    used = max((stats.get("peak_bytes_in_use", 0) for stats in most), default=0)
    return {
        "mean_s": statistics.mean(seconds) if seconds else total / timing.repeats,
        "std_s": statistics.pstdev(seconds) if seconds else None,
        "median_s": statistics.median(seconds) if seconds else None,
        "peak_gb": (used or step.stats().peak_bytes) / 1e9,
        "losses": losses[:_COMPARED_STEPS],
    }


def _alone(
    built: BuiltCase, count: int, devices: Sequence[Any], steps: int, repeats: int
) -> tuple[list[float], float]:
    """Losses on one device, and the median of the seconds of a step: of the step as it is, or,
    where micro-batches are independent, of the step in `count` micro-batches.
    """
    import jax

    from .._api import parallelize

    case = built.case
    if case.semantics == "independent" and count > 1:
        alone = replace(built, case=replace(case, num_devices=1))
        cluster = Cluster.detect(devices)
        method = ShardParallel(mesh_shape=(1,))
        plan = planned(alone, cluster, method, count=count)
        step = parallelize(built.step, plan, devices=devices)
        state = step.init(built.init, jax.random.key(_SEED))
    else:
        step = jax.jit(built.step)
        state = jax.jit(built.init)(jax.random.key(_SEED))
    losses, seconds = [], []
    for k in range(steps + repeats):
        began = time.perf_counter()
        result = step(state, _batch(built, k))
        state, metrics = (state, result) if case.forward_only else result
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
        losses.append(_figure(metrics))
    return losses[:steps], statistics.median(seconds[steps:])


def _figure(result: Any) -> float:
    """What is compared of a result: the loss, or the mean size of logits; NaN of logits that other
    processes hold.
    """
    import jax.numpy as jnp

    if isinstance(result, dict):
        return float(result["loss"])
    return float(jnp.abs(result).mean()) if result.is_fully_addressable else math.nan


def _batch(built: BuiltCase, seed: int) -> dict[str, Any]:
    """Random tokens, or images and labels, or noisy images and their times."""
    import numpy as np

    rng = np.random.default_rng(seed)
    config = built.case.config
    if isinstance(config, WideResNetConfig):
        most = config.num_classes
    elif isinstance(config, UNetConfig):
        most = NUM_TIMES
    else:
        assert isinstance(config, AbstractTextConfig)
        most = config.vocab_size
    return {
        name: rng.integers(0, most, leaf.shape, dtype=leaf.dtype)
        if np.issubdtype(leaf.dtype, np.integer)
        else rng.standard_normal(leaf.shape).astype(leaf.dtype)
        for name, leaf in built.batch.items()
    }
