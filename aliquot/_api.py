"""The whole pipeline on one screen: capture a step, plan it, run it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from . import __version__
from .cluster import Cluster
from .cost import make_problem
from .graph import capture as capture
from .planners import AbstractMethod, Auto, Decision, Interrupted, Progress, write_plan
from .plans import ModelReference, Plan


def plan(
    step: Callable[..., Any],
    *args: Any,
    cluster: Cluster | None = None,
    method: AbstractMethod | None = None,
    num_micro_batches: int = 1,
    micro_batch_semantics: str = "exact",
    memory_limit_bytes: float | None = None,
    on_missing_rule: str = "error",
    model: ModelReference | None = None,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Plan:
    """Find out how to run a training step on a cluster. Touches no device.

    Args:
        step: an ordinary training step; see `capture`.
        *args, **kwargs: its arguments, as arrays or `jax.ShapeDtypeStruct`s.
        cluster: what to plan for; by default the devices JAX sees.
        method: how to parallelize; by default `Auto()`.
        num_micro_batches: into how many parts the batch of a step is cut.
        micro_batch_semantics: "exact", or "independent" to let what does not decompose see one micro-batch alone.
        memory_limit_bytes: per device; by default what the device's runtime leaves to programs.
        on_missing_rule: "error", or "replicate" to run operators without a rule whole on every device.
        model: how to build the step again, written into the plan.
        progress: called as `progress(what, done, of)` during the search.

    Raises:
        CaptureError, MissingRuleError, InfeasibleError, InputError: as their names say, with what to do next.
    """
    cluster = cluster or Cluster.detect()
    method = method or Auto()
    started = time.perf_counter()
    full = capture(step, *args, **kwargs)
    micro, combine = full, {}
    traced = time.perf_counter()
    problem = make_problem(
        micro,
        cluster,
        num_micro_batches=num_micro_batches,
        memory_limit_bytes=memory_limit_bytes,
        on_missing_rule=on_missing_rule,
    )

    def write(decision: Decision) -> Plan:
        return write_plan(
            decision,
            problem,
            full,
            model=model or ModelReference(kind="closure", name=full.name),
            version=__version__,
            trace_s=traced - started,
            search_s=time.perf_counter() - traced,
            combine=combine,
            semantics=micro_batch_semantics,
        )

    try:
        return write(method.solve(problem, progress))
    except Interrupted as interrupted:
        interrupted.plan = write(interrupted.decision) if interrupted.decision else None
        raise
