"""Settings that somebody trains with, judged: what they cost, what is wrong with them, and better
ones in their own words.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ._layout_search import Better, Judge, find_better
from .cluster import Cluster, ReportedSteps, said_of_reported, steps_reported_by
from .core import (
    RECOMPUTE,
    InputError,
    LossyExportError,
    counted,
    format_bytes,
    format_seconds,
    listing,
)
from .interop.frameworks import Found, Settings, Written, export_plan, read_settings
from .planners import Progress
from .plans import Plan, expected_error, mfu
from .zoo import AbstractTextConfig, as_fields, configure, from_config, from_fields

# Stages whose memory differs by more than this share are worth another cut.
_UNEQUAL = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What `read` found.

    Attributes:
        found: what the files say.
        settings: the same with all degrees, on the cluster.
        cluster: what it was judged for.
        config: the model.
        plan: the settings as a plan; None if they cannot be planned.
        fits: "yes"; "no"; or "perhaps", where the plan needs more than there is, but runs of the
            framework took less than was predicted by more than that, or keep a part on the host.
            Empty without a plan.
        refusal: why there is no plan, or what it lacks.
        advice: what to change, and why.
        error: how far such predictions were from steps that were reported of this framework, or
            of such a layout; empty if none was.
        search: for faster settings in the same limits, if it was asked for.
    """

    found: Found
    settings: Settings
    cluster: Cluster
    config: AbstractTextConfig
    plan: Plan | None
    fits: str
    refusal: str
    advice: tuple[str, ...]
    error: tuple[ReportedSteps, ...]
    search: Better | None = None

    @property
    def better(self) -> Plan | None:
        """The plan of faster settings, if they were looked for and found."""
        return None if self.search is None else self.search.plan

    @property
    def better_settings(self) -> Settings | None:
        """The faster settings."""
        return None if self.search is None else self.search.settings

    @property
    def changes(self) -> tuple[tuple[str, Any, Any], ...]:
        """Name, value now and value then of each setting of the framework to change for them."""
        return () if self.search is None or self.better is None else self.search.changes

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        found = self.found
        return {
            "framework": found.framework,
            "version": found.table.version,
            "model": as_fields(self.config),
            "cluster": self.cluster.name,
            "layout": self.settings.name,
            "settings": dataclasses.asdict(self.settings),
            "said": [{"name": n, "value": v, "place": p} for n, v, p in found.said],
            "assumed": list(found.assumed),
            "lost": list(found.lost),
            "unknown": list(found.unknown),
            "advice": list(self.advice),
            "fits": self.fits,
            "refusal": self.refusal,
            "prediction": _figures(self.plan),
            "expected_error": [dataclasses.asdict(steps) for steps in self.error],
            "better": _figures(self.better),
            "better_settings": None
            if self.better_settings is None
            else dataclasses.asdict(self.better_settings),
            "changes": [{"name": n, "now": a, "then": b} for n, a, b in self.changes],
            "search": None
            if self.search is None
            else {name: getattr(self.search, name) for name in ("tried", "ruled_out", "untried")},
        }


def _figures(plan: Plan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {
        "method": plan.method,
        "step_time_s": plan.prediction.step_time_s,
        "mfu": mfu(plan),
        "memory_bytes_by_stage": memory_by_stage(plan),
        "memory_limit_bytes": plan.prediction.memory_limit_bytes,
    }


def memory_by_stage(plan: Plan) -> list[float]:
    """Bytes on a device of each stage; one figure, of the fullest device, of one program and where
    devices have several stages.
    """
    by_stage = [s.prediction.peak_memory_bytes for s in plan.stages if s.prediction is not None]
    if len(by_stage) > plan.num_submeshes or not by_stage:
        return [plan.prediction.peak_memory_bytes]
    return by_stage


def read(
    *files: str | os.PathLike[str],
    cluster: Cluster,
    framework: str | None = None,
    recipe: str | None = None,
    model: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    seq_len: int | None = None,
    recompute: str | None = None,
    better: bool = False,
    time_limit_s: float = 60.0,
    memory_limit_bytes: float | None = None,
    progress: Progress | None = None,
) -> Reading:
    """Judge the settings with which another framework trains, as a plan of this package::

        reading = aq.read("run.sh", cluster=aq.Cluster.preset("8x8xH100"))
        print(reading.settings.name, reading.plan.prediction.step_time_s, reading.advice)

    Args:
        files, framework, recipe: as for `aliquot.interop.frameworks.read_settings`.
        cluster: the devices of the whole run.
        model: a name of the zoo, where files do not say the model.
        overrides: fields of the model to change.
        global_batch, micro_batch, seq_len, recompute: in place of what the files say; sequences of
            a step, sequences that a data rank computes at once, tokens of a sequence, and a name of
            `aliquot.zoo.build`.
        better: whether to look for faster settings of the same framework.
        time_limit_s: for that search.
        memory_limit_bytes: per device; by default what the device's runtime leaves for programs.
        progress: called as `progress(what, done, of)`.

    Raises:
        InputError: files cannot be read, or say no model, no layout or no batch that could be
            planned; all that is wrong is listed.
    """
    over = {**(overrides or {}), **({"seq_len": seq_len} if seq_len else {})}
    found = read_settings(
        files,
        num_devices=cluster.num_devices,
        framework=framework,
        recipe=recipe,
        layers_of=lambda fields: _num_layers({**fields, **({"like": model} if model else {})}),
    )
    config, dropped = _config(found, model, over)
    given: dict[str, Any] = {"global_batch": global_batch, "micro_batch": micro_batch}
    given["recompute"] = recompute
    settings = replace(
        found.settings,
        seq_len=config.seq_len,
        **{name: value for name, value in given.items() if value is not None},
    )
    assumed = [*found.assumed, *dropped]
    if micro_batch and not global_batch and settings.num_micro_batches:
        settings = replace(settings, global_batch=None)
    if settings.micro_batch is None and settings.global_batch is None:
        settings = replace(settings, micro_batch=1)
        assumed.append("a data rank computes 1 sequence at once: --micro-batch says another")
    found = replace(found, assumed=tuple(assumed))
    lost = list(found.lost)
    data = settings.data or cluster.num_devices // settings.model_ranks
    if data and data % settings.expert:
        fewer = math.gcd(data, settings.expert)
        lost.append(
            f"experts are split over {settings.expert} ranks, of tensor or context parallelism,"
            f" too; in a plan over {fewer} of the {data} data ranks"
        )
        settings = replace(settings, expert=fewer)
    faults = list(settings.faults(cluster.num_devices))
    advice = [*found.advice, *_advice(settings, config, cluster, found)]
    heads = getattr(config, "num_kv_heads", settings.tensor)
    if heads < settings.tensor and heads and settings.tensor % heads == 0:
        lost.append(
            f"{heads} heads of keys and values over {settings.tensor} tensor ranks: judged as"
            f" {settings.tensor} heads, of which each rank has one"
        )
        widened = from_fields({**as_fields(config), "num_kv_heads": settings.tensor})
        assert isinstance(widened, AbstractTextConfig), "the family is the same"
        config = widened
    judge = Judge(config, cluster, found.table, memory_limit_bytes, progress)
    if faults:
        return Reading(
            found=found,
            settings=settings,
            cluster=cluster,
            config=config,
            plan=None,
            fits="",
            refusal=listing(f"on {cluster.num_devices} devices this does not divide", faults),
            advice=(*faults, *advice),
            error=(),
        )
    settings = settings.on(cluster.num_devices)
    if 0 in settings.stage_layers:
        lost.append("a stage without a layer: judged as stages that are equally deep")
        settings = replace(settings, stage_layers=())
    plan, fits, refusal = judge.judged(settings)
    if fits == "no" and found.offloads:
        fits = "perhaps"
        refusal += "\n  The settings keep a part of this on the host, which a plan does not."
    if plan is not None:
        advice += _advice_of_plan(plan, found)
    reading = Reading(
        found=replace(found, lost=tuple(lost)),
        settings=settings,
        cluster=cluster,
        config=config,
        plan=plan,
        fits=fits,
        refusal=refusal,
        advice=tuple(advice),
        # How far predictions were from reported steps of the framework or, where there are none,
        # of steps with such a layout.
        error=steps_reported_by(found.table.reported)
        or (() if plan is None else expected_error(plan)),
    )
    if not better:
        return reading
    fitting = plan if fits != "no" else None
    return replace(reading, search=find_better(judge, found, settings, fitting, time_limit_s))


def export(plan: Plan, to: str, *, allow_loss: bool = False) -> Written:
    """A plan as settings of another framework::

        aq.export(plan, "megatron").text

    Args:
        to: "megatron", "bridge", "torchtitan", "torchtitan-0.3", "torchtitan-0.2", "maxtext",
            "accelerate", "deepspeed" or "flax".
        allow_loss: whether the settings may say less than the plan; `lost` lists what they lack.

    Raises:
        InputError: there is no such framework, or it has no settings for such a plan at all.
        LossyExportError: something is lost, and `allow_loss` is not set.
    """
    written = export_plan(plan, to)
    if written.lost and not allow_loss:
        raise LossyExportError(
            written.lost,
            asked=f"{to} cannot express all of this plan of {plan.model.name or 'a step'}",
            advice="Add --allow-loss (allow_loss=True) to write what it can express, which may take"
            " other time and memory than the plan.",
        )
    return written


def _num_layers(fields: Mapping[str, Any]) -> int | None:
    if isinstance(fields.get("num_layers"), int):
        return int(fields["num_layers"])
    if fields.get("config"):
        return from_config(str(fields["config"])).num_layers
    return configure(str(fields["like"])).num_layers if fields.get("like") else None


def _config(
    found: Found, model: str | None, overrides: Mapping[str, Any]
) -> tuple[AbstractTextConfig, list[str]]:
    """The model, and remarks on what was taken for it."""
    said = dict(found.model)
    path, like = said.pop("config", None), model or said.pop("like", None)
    said.pop("like", None)
    experts = said.pop("expert_ffn_size", None)
    said |= {"ffn_size": experts} if experts else {}
    remarks: list[str] = []
    if path:
        length = {"seq_len": said["seq_len"]} if said.get("seq_len") else {}
        made = from_config(path, **{**length, **overrides})
        differ = {
            name: value
            for name, value in said.items()
            if name not in ("family", "seq_len") and getattr(made, name, value) != value
        }
        if differ and len(said) > 2:
            told = ", ".join(f"{name} {value}" for name, value in differ.items())
            remarks.append(f"the model is that of {path}; the settings say {told}")
        return made, remarks
    if model:
        # The files' own sizes, and defaults of the framework, give way.
        said = {"seq_len": said["seq_len"]} if said.get("seq_len") else {}
    if like:
        base = configure(str(like))
        known = as_fields(base)
        fitting = {
            name: value for name, value in said.items() if name in known and name != "family"
        }
        config = configure(str(like), **{**fitting, **overrides})
    else:
        needed = ("num_layers", "hidden_size", "num_heads", "ffn_size", "vocab_size", "seq_len")
        missing = [name for name in needed if not said.get(name) and name not in overrides]
        if missing:
            raise InputError(
                f"the settings do not say the model: {', '.join(missing)} are missing. Give its"
                " config.json of Hugging Face, too, or --model llama3-8b (`aliquot models` lists"
                " all)."
            )
        fields = {"name": f"{found.framework}-model", **said}
        if fields["family"] == "mixtral":
            fields.pop("qkv_bias", None)
        made_of = {key: value for key, value in fields.items() if value is not None}
        config = from_fields({**made_of, **overrides})
    if not isinstance(config, AbstractTextConfig):
        raise InputError(f"{config.name} is no model of texts, which these frameworks train.")
    return config, remarks


def _advice(
    settings: Settings, config: AbstractTextConfig, cluster: Cluster, found: Found
) -> Iterator[str]:
    """What the degrees say without a plan."""
    tensor = found.table.name_of("ici_tensor" if found.framework == "maxtext" else "tensor")
    kv_heads, heads = getattr(config, "num_kv_heads", 0), getattr(config, "num_heads", 0)
    if kv_heads and settings.tensor > kv_heads:
        yield (
            f"{tensor} {settings.tensor} over {kv_heads} heads of keys and values: ranks compute"
            f" the same ones {settings.tensor // kv_heads} times: take {kv_heads} or less"
        )
    if heads and heads % settings.tensor:
        yield f"{tensor} {settings.tensor} does not divide {heads} heads"
    if settings.tensor > cluster.devices_per_host and cluster.num_hosts > 1:
        yield (
            f"{tensor} {settings.tensor} reaches over hosts of {cluster.devices_per_host} devices:"
            " each layer then waits for the network: take"
            f" {cluster.devices_per_host} or less"
        )
    if settings.pipeline > 1 and settings.global_batch and settings.micro_batch:
        data = settings.data or max(1, cluster.num_devices // settings.model_ranks)
        count = settings.global_batch // (settings.micro_batch * data)
        if 0 < count < 2 * settings.pipeline and settings.chunks == 1:
            share = (settings.pipeline - 1) / (count + settings.pipeline - 1)
            yield (
                f"{count} micro-batches on {settings.pipeline} stages: they wait for {share:.0%} of"
                " the step: take smaller micro-batches, fewer stages, or chunks of stages"
            )


def _advice_of_plan(plan: Plan, found: Found) -> Iterator[str]:
    by_stage = memory_by_stage(plan)
    if len(by_stage) > 1 and max(by_stage) > (1 + _UNEQUAL) * min(by_stage):
        most, least = max(by_stage), min(by_stage)
        words = {
            "megatron": "decoder-first-pipeline-num-layers or pipeline-model-parallel-layout",
            "bridge": "model.pipeline_model_parallel_layout",
            "torchtitan": "parallelism.module_fqns_per_model_part",
        }
        how = words.get(found.framework)
        yield (
            f"stage {by_stage.index(most)} takes {format_bytes(most)}, stage"
            f" {by_stage.index(least)} {format_bytes(least)}: move layers between them"
            + (f" by {how}" if how else "")
        )


def facts_of(reading: Reading, *, of_better: bool = False) -> list[tuple[str, str]]:
    """Names and texts: the model, the layout and what it costs; with `of_better`, the cost of the
    better settings.
    """
    settings, plan, config = reading.settings, reading.plan, reading.config
    if of_better and reading.better is not None and reading.better_settings is not None:
        settings, plan = reading.better_settings, reading.better
    count = settings.num_micro_batches or 1
    found = reading.found
    recompute = f"{settings.recompute}: {RECOMPUTE[settings.recompute.split(':')[0]]}"
    if settings.recompute == found.nothing_recomputed == "fused":
        kernels = f"{found.framework}'s kernels keep the inputs and results of products"
        recompute = f"none: {kernels} (fused)"
    # What does not divide has no batch where the files leave it open.
    batch = (
        f"{settings.global_batch} sequences" if settings.global_batch else "left open: sequences"
    )
    batch += f" of {config.seq_len} tokens"
    if settings.micro_batch:
        batch += f", {counted(count, 'micro-batch')} of {settings.micro_batch} on each data rank"
    rows = [
        ("model", f"{config.name} ({config.family}, {config.num_layers} layers)"),
        ("layout", settings.name),
        ("batch", batch),
        ("recomputation", recompute),
        ("precision", settings.dtype or "bf16"),
    ]
    if settings.stage_layers:
        rows.append(("layers of stages", ", ".join(map(str, settings.stage_layers))))
    if of_better:
        rows = rows[1:2]
    if plan is None:
        return [*rows, ("step time", f"none: {reading.refusal}")]
    used = mfu(plan)
    mfu_text = "" if used is None else f", MFU {used:.0%}"
    rows.append(("step time", f"{format_seconds(plan.prediction.step_time_s)}{mfu_text}"))
    if not of_better:
        error = (
            f"of the step time: {said_of_reported(reading.error)}" if reading.error else "not known"
        )
        rows.append(("expected error", error))
    by_stage = memory_by_stage(plan)
    stages = ", ".join(format_bytes(each) for each in by_stage)
    which = f"by stage: {stages}" if len(by_stage) > 1 else f"{stages} on the fullest device"
    rows.append(("memory", which))
    if not of_better:
        rows.append(("fits", reading.fits + (f": {reading.refusal}" if reading.refusal else "")))
    return rows


def remarks_of(reading: Reading) -> list[tuple[str, tuple[str, ...]]]:
    """Titles with sentences: what to change, what was assumed, what is lost, what is not known."""
    found = reading.found
    return [
        ("To change:", reading.advice),
        ("Assumed:", found.assumed),
        (
            "Lost: these change memory or time, and the figures above do not follow them:",
            found.lost,
        ),
        ("Unknown: nothing is known of what these change:", found.unknown),
    ]
