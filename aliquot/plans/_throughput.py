"""Predicted throughput of a plan: examples and tokens per second, and model FLOPs utilisation
(MFU).
"""

from __future__ import annotations

import math

from ..cluster import Cluster
from ..core import format_count, format_flops_per_s
from ._plan import Plan

_PEAKS = {"bf16": "bfloat16", "float32": "tf32", "fp8": "float8"}


def examples_per_step(plan: Plan) -> int:
    """Rows of the global batch; 0 if the step takes no batch."""
    sizes = [array.shape[0] for array in plan.inputs if array.role == "batch" and array.shape]
    return max(sizes, default=0)


def tokens_per_step(plan: Plan) -> int:
    """Tokens of the global batch: as many as were said, or else the elements of its integer arrays
    of two dims. Arrays of the same shape count once, as inputs and targets of the same tokens; 0 if
    there is none.
    """
    if plan.model.tokens_per_step:
        return plan.model.tokens_per_step
    shapes = set()
    for array in plan.inputs:
        if array.role == "batch" and len(array.shape) == 2 and "int" in array.dtype:
            shapes.add(tuple(array.shape))
    return sum(map(math.prod, shapes))


def rate(plan: Plan, seconds: float | None = None) -> tuple[float, str]:
    """Tokens per second, or examples of a step without tokens, and the word for what is counted.

    Args:
        seconds: from one step or call to the next; by default the step time.
    """
    between_s = plan.prediction.step_time_s if seconds is None else seconds
    tokens = tokens_per_step(plan)
    count = tokens or examples_per_step(plan)
    return count / between_s if between_s else 0.0, "tokens" if tokens else "examples"


def mfu(plan: Plan) -> float | None:
    """Model FLOPs utilization: the model's floating-point operations over those that all devices,
    also of idle hosts, could do at their peak in the time of a step.

    None if the model's operations are unknown. The peak is that of the dtype that the model is
    computed in.

    Reference: A. Chowdhery et al., "PaLM: scaling language modeling with pathways", JMLR 2023,
    appendix B.
    """
    if not plan.model.flops_per_step or not plan.prediction.step_time_s:
        return None
    cluster = Cluster.from_dict(plan.cluster)
    num_devices = cluster.num_devices + plan.idle_hosts * cluster.devices_per_host
    _, peak = _peak(plan, cluster)
    return plan.model.flops_per_step / (plan.prediction.step_time_s * peak * num_devices)


def mfu_convention(plan: Plan) -> str:
    """Which operations `mfu` counts, and over which peak, in words; empty if it is not known."""
    if mfu(plan) is None:
        return ""
    is_of_text = plan.model.kind == "zoo" and tokens_per_step(plan)
    attention = ", attention in full whatever its mask hides" if is_of_text else ""
    dtype, peak = _peak(plan, Cluster.from_dict(plan.cluster))
    return (
        f"matrix products of forward and backward pass{attention}, nothing that is recomputed; over"
        f" the dense {dtype} peak, {format_flops_per_s(peak)} on each device"
    )


def _peak(plan: Plan, cluster: Cluster) -> tuple[str, float]:
    """The dtype in which a device computes most of the model's products, and its peak in FLOP/s."""
    dtype = plan.model.flops_dtype or str(plan.model.settings.get("dtype", "bf16"))
    name = _PEAKS.get(dtype.partition("-")[0], dtype)
    known = cluster.device.peak_flops_per_s.get(name)
    return (name, known) if known else (dtype, cluster.device.peak(dtype))


def throughput(plan: Plan) -> str:
    """Throughput in words: MFU where it is known, then tokens or examples per second."""
    used, step_s = mfu(plan), plan.prediction.step_time_s
    parts = [] if used is None else [f"MFU {used:.0%}" if used >= 0.1 else f"MFU {used:.1%}"]
    for count, what in ((tokens_per_step(plan), "tokens"), (examples_per_step(plan), "examples")):
        if count and step_s:
            parts.append(f"{format_count(float(round(count / step_s)))} {what}/s")
            break
    return ", ".join(parts)
