"""What may be asked of a plan, in one record."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from .cluster import MEASURED, Cluster
from .planners import AbstractMethod, Progress
from .plans import ModelReference


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What may be asked of a plan: the arguments of `aliquot.plan` beside the step and its own."""

    cluster: Cluster | None = None
    method: AbstractMethod | None = None
    num_micro_batches: int | Literal["auto"] | None = None
    micro_batch_semantics: str = "exact"
    memory_limit_bytes: float | None = None
    on_missing_rule: str = "infer"
    recompute: str | None = None
    model: ModelReference | None = None
    tokens_per_step: int | None = None
    verify: bool = False
    profiles: str | Path | None = None
    profiles_of_any: bool = False
    require_measured: float = 0.0
    require_grade: str = MEASURED
    measure: bool = False
    time_limit_s: float | None = None
    objective: str | None = None
    progress: Progress | None = None
