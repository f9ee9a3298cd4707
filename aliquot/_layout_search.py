"""Settings of another framework as plans, and the fastest settings that it can say."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ._variants import Variant, plan_variants
from .cluster import Cluster
from .core import InfeasibleError, InputError, divisors, format_bytes
from .graph import Role
from .interop.frameworks import FRAMEWORKS, Found, Settings, Table, write_settings
from .planners import ATTENTION_WAYS, PipelineOptions, Progress, least_compute_s, method_by_name
from .plans import ModelReference, Plan
from .zoo import AbstractTextConfig, build

_NO_LIMIT_BYTES = 1e18
_LEAST_GAIN = 0.01
# The most rows of a micro-batch on each rank.
_MOST_ROWS = 1024
# Ways to recompute that are tried, besides none.
_RECOMPUTED = ("minimal", "block")
# Ways to recompute with which layers are a loop.
_LOOPED = ("block", "minimal", "save_qkv", "save_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """What a search for faster settings found.

    Attributes:
        settings, plan: the fastest; None if none is faster.
        changes: name, value before and value then of each setting of the framework that differs.
        tried, ruled_out, untried: layouts that were planned; that are larger or slower by their
            state or compute alone; and for which there was no time.
    """

    settings: Settings | None
    plan: Plan | None
    changes: tuple[tuple[str, Any, Any], ...]
    tried: int
    ruled_out: int
    untried: int


class Judge:
    """Plans of one model on one cluster, by settings. A model is traced once for each batch and
    recomputation.
    """

    def __init__(
        self,
        config: AbstractTextConfig,
        cluster: Cluster,
        table: Table,
        memory_limit_bytes: float | None,
        progress: Progress | None,
    ) -> None:
        self.config, self.cluster, self.table = config, cluster, table
        self.limit_bytes, self.progress = memory_limit_bytes, progress
        self._variants: dict[tuple[int, str, str, bool], Variant] = {}
        self._least_s: dict[int, float] = {}

    def judged(self, settings: Settings) -> tuple[Plan | None, str, str]:
        """The plan, whether it fits, and why not."""
        try:
            return self.plan(settings), "yes", ""
        except InfeasibleError as error:
            refusal, least_bytes = error.message, error.required_bytes
            limit_bytes = error.available_bytes
        except InputError as error:
            return None, "", str(error)
        needs = self.plan(settings, memory_limit_bytes=_NO_LIMIT_BYTES)
        share = self.table.memory_share
        least_bytes = least_bytes or needs.prediction.peak_memory_bytes
        if limit_bytes and share * least_bytes <= limit_bytes:
            return (
                needs,
                "perhaps",
                f"{format_bytes(least_bytes)} are predicted at the least, and"
                f" {format_bytes(limit_bytes)} can be used; runs of {self.table.framework} took as"
                f" little as {share:.0%} of what is predicted",
            )
        return needs, "no", refusal

    def plan(self, settings: Settings, memory_limit_bytes: float | None = None) -> Plan:
        """The plan of settings that divide.

        Raises:
            InfeasibleError: it does not fit.
            InputError: the planner has no such layout for the model.
        """
        count = settings.num_micro_batches or 1
        if self.table.tensor_splits_sequence and settings.tensor > 1:
            settings = replace(settings, sequence=True)
        how = settings.name
        pipeline = PipelineOptions(micro_batches=count) if settings.pipeline > 1 else None
        method = method_by_name(how, pipeline=pipeline)
        return plan_variants(
            (self._variant(settings),),
            cluster=self.cluster,
            method=method,
            num_micro_batches=count,
            memory_limit_bytes=memory_limit_bytes or self.limit_bytes,
            progress=self.progress,
        )

    def least_s(self, settings: Settings) -> float:
        """Seconds that its compute alone takes, shared evenly by all devices."""
        variant = self._variant(settings)
        if id(variant) not in self._least_s:
            self._least_s[id(variant)] = least_compute_s(variant.task(self.cluster).problem(1))
        return self._least_s[id(variant)]

    def promise_s(self, settings: Settings) -> float:
        """The same with the time for which stages wait: which settings to try first."""
        count = (settings.global_batch or 1) // ((settings.micro_batch or 1) * (settings.data or 1))
        waiting = (settings.pipeline - 1) / (settings.chunks * max(count, 1))
        return self.least_s(settings) * (1 + waiting)

    def is_too_large(self, settings: Settings) -> bool:
        """Whether an even share of the state alone is more than a device has."""
        graph, _ = self._variant(settings).traced()
        problem = self._variant(settings).task(self.cluster).problem(1)
        state = (Role.PARAMETER, Role.OPTIMIZER_STATE)
        held_bytes = sum(graph.values[i.value].num_bytes for i in graph.inputs if i.role in state)
        ranks = (settings.data or 1) * settings.context
        sharers = settings.tensor * settings.pipeline
        sharers *= ranks if settings.zero_stage else settings.expert
        return held_bytes / sharers > (self.limit_bytes or problem.memory_limit_bytes)

    def _variant(self, settings: Settings) -> Variant:
        dtype = settings.dtype or "bf16"
        # In a loop over layers gradients are reduced layer by layer, as by these frameworks. Where
        # nothing is recomputed, a loop would also copy all that layers keep.
        loops = settings.pipeline == 1 and settings.recompute in _LOOPED and self.config.loops
        key = settings.global_batch or 1, settings.recompute, dtype, loops
        if key not in self._variants:
            made = build(
                self.config,
                key[0],
                dtype=dtype,
                recompute=settings.recompute,
                scan=loops,
                attention="auto",
                device=self.cluster.device,
            )
            reference = ModelReference(
                kind="zoo",
                name=self.config.name,
                settings=made.settings,
                flops_per_step=float(made.flops_per_step),
            )
            self._variants[key] = Variant(
                step=made.train_step,
                args=(made.state, made.batch),
                model=reference,
                # What the framework recomputes is in the step; stages recompute no more.
                recompute="none",
            )
        return self._variants[key]


def _neighbours(settings: Settings, recomputed: Sequence[str]) -> Iterator[Settings]:
    """Settings that differ in one thing."""
    one = replace(settings, stage_layers=(), num_micro_batches=None)
    for tensor in (one.tensor * 2, one.tensor // 2):
        yield replace(one, tensor=tensor, sequence=tensor > 1, data=None)
        yield replace(one, tensor=tensor, sequence=False, data=None)
    for stages in (one.pipeline * 2, one.pipeline // 2):
        yield replace(one, pipeline=stages, chunks=1 if stages == 1 else one.chunks, data=None)
    for chunks in (one.chunks * 2, one.chunks // 2) if one.pipeline > 1 else ():
        yield replace(one, chunks=chunks)
    for stage in (0, 1, 2, 3):
        yield replace(one, zero_stage=stage, shard_within=None)
    for micro in ((one.micro_batch or 1) * 2, (one.micro_batch or 1) // 2):
        yield replace(one, micro_batch=micro)
    for how in recomputed:
        yield replace(one, recompute=how)


def _layouts(
    settings: Settings, cluster: Cluster, num_experts: int, recomputed: Sequence[str]
) -> Iterator[Settings]:
    """All layouts of the same batch: degrees whose product is the number of devices, with each
    stage of ZeRO, size of micro-batches, number of chunks and way to recompute.
    """
    one = replace(settings, stage_layers=(), num_micro_batches=None)
    devices = cluster.num_devices
    degrees = divisors(devices)
    experts = [n for n in degrees if num_experts % n == 0] if num_experts else [1]
    micro_batches = {one.micro_batch or 1, *divisors(one.global_batch or 1, most=_MOST_ROWS)}
    hosts = [None, cluster.devices_per_host] if cluster.num_hosts > 1 else [None]
    for tensor, context, pipeline, expert in product(degrees, degrees, degrees, experts):
        data, rest = divmod(devices, tensor * context * pipeline)
        if rest or data % expert:
            continue
        for sequence, attention, chunks, (stage, within), micro, how in product(
            {False, tensor > 1},
            ATTENTION_WAYS if context > 1 else (None,),
            {1, 2, 4, one.chunks} if pipeline > 1 else (1,),
            [*((stage, None) for stage in (0, 1, 2)), *((3, within) for within in hosts)],
            micro_batches,
            recomputed,
        ):
            if within and (tensor * context * pipeline * expert > 1 or data % within):
                continue
            yield replace(
                one,
                data=data,
                tensor=tensor,
                sequence=sequence,
                context=context,
                attention=attention,
                pipeline=pipeline,
                chunks=chunks,
                expert=expert,
                zero_stage=stage,
                shard_within=within,
                micro_batch=micro,
                recompute=how,
            )


def find_better(
    judge: Judge, found: Found, given: Settings, plan: Plan | None, time_limit_s: float
) -> Better:
    """The fastest settings of those that the framework can say as well as the given ones: first
    from neighbour to neighbour, then all others, the most promising first. Those whose state or
    whose compute alone is too much are not planned.

    Args:
        plan: of the given settings; None if they do not fit.
        time_limit_s: begins no further plan after it.
    """
    until_s = time.perf_counter() + time_limit_s
    config, cluster = judge.config, judge.cluster
    devices, layers = cluster.num_devices, config.num_layers
    heads = getattr(config, "num_heads", 1)
    now, now_s, best = given, math.inf, None
    if plan is not None:
        now_s = plan.prediction.step_time_s * (1 - _LEAST_GAIN)
    sayable = _unsaid(found, given, layers)
    recomputed = (found.nothing_recomputed, *_RECOMPUTED)
    seen, tried, ruled_out = {_key(given, devices)}, 0, 0

    def divides(near: Settings) -> bool:
        degrees = (near.tensor, near.pipeline, near.chunks, near.micro_batch or 1)
        fits = min(degrees) >= 1 and not heads % near.tensor and not config.seq_len % near.context
        return fits and layers >= near.pipeline * near.chunks and not any(near.faults(devices))

    def planned(near: Settings) -> bool:
        """Whether the settings are faster than those before, which they then replace."""
        nonlocal now, now_s, best, tried, ruled_out
        seen.add(_key(near, devices))
        schedule = "1f1b" if near.chunks == 1 else "interleaved-1f1b"
        near = replace(near, schedule=schedule if near.pipeline > 1 else "").on(devices)
        if _unsaid(found, near, layers) - sayable:
            return False
        if judge.least_s(near) >= now_s or judge.is_too_large(near):
            ruled_out += 1
            return False
        tried += 1
        try:
            made = judge.plan(near)
        except (InfeasibleError, InputError):
            return False
        if made.prediction.step_time_s >= now_s:
            return False
        now, now_s, best = near, made.prediction.step_time_s, made
        return True

    def is_open(near: Settings) -> bool:
        return time.perf_counter() < until_s and _key(near, devices) not in seen and divides(near)

    while any(is_open(near) and planned(near) for near in _neighbours(now, recomputed)):
        pass
    others = _layouts(now, cluster, getattr(config, "num_experts", 0) or 0, recomputed)
    left = {_key(near, devices): near for near in others if divides(near)}
    for near in sorted(left.values(), key=lambda near: (judge.promise_s(near), repr(near))):
        if is_open(near):
            planned(near)
    pairs = [
        dict(write_settings(_written_as(found), each, {"num_layers": layers}).pairs)
        for each in (given, now)
    ]
    names = dict.fromkeys([*pairs[0], *pairs[1]])
    changes = [(name, pairs[0].get(name), pairs[1].get(name)) for name in names]
    return Better(
        settings=now if best else None,
        plan=best,
        changes=tuple(each for each in changes if each[1] != each[2]),
        tried=tried,
        ruled_out=ruled_out,
        untried=len(left.keys() - seen),
    )


def _unsaid(found: Found, settings: Settings, num_layers: int) -> set[str]:
    """What the framework cannot say of settings, without figures."""
    written = write_settings(_written_as(found), settings, {"num_layers": num_layers})
    return {re.sub(r"\d+", "", text) for text in written.lost}


def _written_as(found: Found) -> str:
    """The name under which settings of its version are written."""
    of_version = f"{found.framework}-{found.table.version}"
    return of_version if of_version in FRAMEWORKS else found.framework


def _key(settings: Settings, num_devices: int) -> Settings:
    """What tells layouts apart, however they were written."""
    data = settings.data or num_devices // max(1, settings.model_ranks)
    within = None if settings.shard_within == data else settings.shard_within
    return replace(settings, data=data, shard_within=within, schedule="", num_micro_batches=None)
