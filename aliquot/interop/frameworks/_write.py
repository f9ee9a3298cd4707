"""A plan as settings of another framework, with what these cannot express."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from ...core import InputError, nearest
from ...planners import Megatron, TensorParallel, Zero2Parallel, Zero3Parallel, method_by_name
from ...plans import (
    Plan,
    examples_per_step,
    is_pipeline,
    layers_recompute,
    recomputes_by_stage,
)
from . import _accelerate, _maxtext, _megatron, _rules, _torchtitan
from ._settings import Settings, Written, is_even
from ._table import Table, tables

FRAMEWORKS = (
    "megatron",
    "bridge",
    "torchtitan",
    "torchtitan-0.3",
    "torchtitan-0.2",
    "maxtext",
    "accelerate",
    "deepspeed",
    "flax",
)
"""What plans can be written for; `torchtitan` is the newest version."""


_BY_DEGREES = "method"
_LAYER = re.compile(r".*\blayers\[(\d+)\]")


def settings_of(plan: Plan, lose: Callable[[str], None]) -> Settings:
    """The layout of a plan in degrees. What degrees cannot express is given to `lose`.

    Raises:
        InputError: the plan has no degrees at all, as its stages lie on unequal meshes.
    """
    layout = _named(plan) or _searched(plan, lose)
    model = plan.model.settings
    count, batch = plan.num_micro_batches, examples_per_step(plan)
    data = layout["data"]
    recompute = str(layers_recompute(plan) or "none")
    if recomputes_by_stage(plan):
        stages = {stage.recompute for stage in plan.stages}
        if stages != {"stage"}:
            lose(
                "stages that recompute different operators: recomputation of whole layers is"
                " written"
            )
        recompute = "block"
    layers = []
    for stage in plan.stages if is_pipeline(plan) else ():
        matched = [_LAYER.match(name) for name in stage.layer_names]
        layers.append(len({each[1] for each in matched if each}))
    shapes = [a.shape for a in plan.inputs if a.role == "batch" and len(a.shape) == 2]
    return Settings(
        **layout,
        stage_layers=() if is_even(layers) else tuple(layers),
        schedule=plan.schedule if is_pipeline(plan) else "",
        micro_batch=max(1, batch // (count * data)),
        global_batch=batch,
        num_micro_batches=count,
        recompute=recompute,
        # How 8 bits are scaled is left to the framework.
        dtype=str(model.get("dtype", "bf16")).partition("-")[0],
        seq_len=max((shape[1] for shape in shapes), default=None),
    )


def _named(plan: Plan) -> dict[str, Any] | None:
    """The degrees of a plan that was asked for by the name of a layout."""
    devices = sum(
        math.prod(stage.mesh_shape)
        for stage in plan.stages[: plan.num_submeshes or len(plan.stages)]
    )
    if plan.method in ("dp", "zero2", "zero3"):
        return {"data": devices, "zero_stage": {"dp": 0, "zero2": 2, "zero3": 3}[plan.method]}
    if plan.method.partition(":")[0] not in ("hsdp", "zero2", "tp", "megatron"):
        return None
    try:
        method = method_by_name(plan.method)
    except InputError:
        return None
    if isinstance(method, Zero2Parallel | Zero3Parallel):
        within = method.shard_within
        if within == "host":
            within = min(devices, int(plan.cluster.get("devices_per_host") or devices))
        stage = 3 if isinstance(method, Zero3Parallel) else 2
        return {"data": devices, "zero_stage": stage, "shard_within": within}
    if isinstance(method, TensorParallel):
        return {"data": devices // method.degree, "tensor": method.degree}
    assert isinstance(method, Megatron), "names of layouts make these methods"
    others = method.tensor * method.context * method.pipeline
    return {
        "data": devices // others,
        "expert": method.expert,
        "tensor": method.tensor,
        "sequence": method.sequence,
        "context": method.context,
        "attention": method.attention,
        "pipeline": method.pipeline,
        "chunks": method.chunks,
        "zero_stage": method.zero_stage,
    }


def _searched(plan: Plan, lose: Callable[[str], None]) -> dict[str, Any]:
    """The degrees that a searched plan is nearest to, by what each axis splits."""
    shapes = {stage.mesh_shape for stage in plan.stages}
    if len(shapes) > 1:
        listed = ", ".join(sorted("x".join(map(str, shape)) for shape in shapes))
        raise InputError(
            f"the stages of this plan lie on unequal meshes ({listed}), for which no framework has"
            " degrees. Plan with --method grid, or with a layout such as megatron:dp4,tp8,pp2."
        )
    stage = plan.stages[0]
    degrees = {"data": 1, "tensor": 1, "context": 1, "expert": 1}
    zero = 0
    mixed = []
    uses = stage.parallelism if isinstance(stage.parallelism, Mapping) else {}
    for axis, size in zip(stage.axis_names, stage.mesh_shape, strict=True):
        use = uses.get(axis)
        if size == 1 or use is None:
            degrees["data"] *= size
            continue
        reads = use.reads
        kinds = {
            "data": reads.get("examples", 0.0),
            "context": reads.get("positions", 0.0),
            "tensor": reads.get("pieces", 0.0),
        }
        kind = max(kinds, key=lambda name: kinds[name])
        share = kinds[kind] / (sum(kinds.values()) or 1.0)
        experts = use.expert_reads.get("pieces", 0.0)
        if kind == "data" and experts > sum(use.expert_reads.values()) / 2 > 0:
            degrees["expert"] *= size
        degrees[kind] *= size
        if share < 0.95:
            others = " and ".join(
                f"{name} parallelism for {part / sum(kinds.values()):.0%}"
                for name, part in kinds.items()
                if name != kind and part > 0
            )
            mixed.append(
                f"{_BY_DEGREES} {plan.method}: axis {axis} is {kind} parallelism for {share:.0%} of"
                f" the parameters' bytes, and {others}; settings have one of them for an axis, and"
                f" {kind} parallelism is written"
            )
        if kind == "data":
            split = [
                path
                for path, dims in stage.shardings.items()
                if axis in itertools.chain(*dims) and not path.startswith("batch")
            ]
            parameters = {array.path for array in plan.inputs if array.role == "parameter"}
            is_split = any(path in parameters for path in split)
            zero = max(zero, (2 if stage.gathers_once else 3) if is_split else 1 if split else 0)
    submeshes = plan.num_submeshes or len(plan.stages)
    pipeline = submeshes if is_pipeline(plan) else 1
    chunks = -(-len(plan.stages) // submeshes) if is_pipeline(plan) else 1
    names = {"data": "dp", "tensor": "tp", "context": "cp", "expert": "ep"}
    listed = ", ".join(f"{short}{degrees[name]}" for name, short in names.items())
    lose(
        f"{_BY_DEGREES} {plan.method}: splits were found for each operator; in their place are the"
        f" framework's own of {listed}, pp{pipeline}, vpp{chunks} and ZeRO stage {zero}"
    )
    for text in mixed:
        lose(text)
    return {**degrees, "pipeline": pipeline, "chunks": chunks, "zero_stage": zero}


def export_plan(plan: Plan, to: str) -> Written:
    """A plan as settings of a framework: one of `FRAMEWORKS`.

    What the plan decides and the settings cannot express is listed in `lost`; it is no error here.

    Raises:
        InputError: there is no such framework, or it has no settings for such a plan at all.
    """
    if to not in FRAMEWORKS:
        raise InputError(f"--to: plans are not written for {to!r}: {nearest(to, FRAMEWORKS)}")
    lost: list[str] = []
    if to == "flax":
        text = _rules.write_flax(plan, lost.append)
        return Written(
            framework="flax",
            version="0.12",
            text=text,
            file_name="sharding_rules.py",
            lost=tuple(lost),
        )
    settings = settings_of(plan, lost.append)
    axes: dict[str, int] = {}
    rules: list[Any] = []
    splits: _rules.Splits = {}
    if to == "maxtext" and not is_pipeline(plan) and plan.model.kind == "zoo":
        # Rules say every split, so that nothing is left to degrees.
        lost = [text for text in lost if not text.startswith(_BY_DEGREES)]
        axes, rules, splits = _rules.write_maxtext(plan, lost.append)
    paths = [(_LAYER.match(a.path), a) for a in plan.inputs if a.role == "parameter"]
    numbers = {match[1] for match, _ in paths if match}
    # Stacked layers are the first dim of each of their arrays.
    stacked = [a.shape[0] for _, a in paths if re.search(r"\blayers\.", a.path) and a.shape]
    layers = len(numbers) or max(stacked, default=0)
    written = write_settings(
        to,
        settings,
        {"name": plan.model.name, **({"num_layers": layers} if layers else {})},
        lost,
        axes,
        rules,
    )
    return replace(written, splits=splits)


def write_settings(
    to: str,
    settings: Settings,
    model: Mapping[str, Any],
    lost: Sequence[str] = (),
    axes: Mapping[str, int] | None = None,
    rules: Sequence[Any] = (),
) -> Written:
    """Settings in degrees, as a framework takes them.

    Args:
        to: one of `FRAMEWORKS`, but flax.
        model: what is known of the model, such as its `num_layers`.
        lost: what is lost already.
        axes, rules: of MaxText, sizes of mesh axes and rules of logical axes, in place of degrees.
    """
    lost = list(lost)
    name, _, version = to.partition("-")
    table = next(
        t for t in reversed(tables()) if t.framework == name and version in ("", t.version)
    )
    lose = lost.append
    if settings.recompute.partition(":")[0] == "fused":
        if not table.kernels_fuse:
            lose(f"recompute {settings.recompute}: written as none, which keeps more there")
        settings = replace(settings, recompute="none")
    left_open: tuple[str, ...] = ()
    if name in ("megatron", "bridge"):
        pairs = _megatron.write(settings, model, lose, bridge=name == "bridge")
    elif name == "torchtitan":
        pairs = _torchtitan.write(settings, lose, table, model.get("num_layers"))
    elif name == "maxtext":
        pairs = _maxtext.write(settings, lose, axes or {}, model.get("num_layers"))
    elif name == "accelerate":
        settings = _accelerate.sayable(settings, "accelerate", lose)
        pairs = _accelerate.write_accelerate(settings, lose)
        left_open = ("global_batch", "micro_batch", "seq_len")
    else:
        settings = _accelerate.sayable(settings, "DeepSpeed", lose)
        pairs = _accelerate.write_deepspeed(settings, lose)
        left_open = ("seq_len", "recompute")
    if name in ("megatron", "bridge") and settings.seq_len:
        pairs.append(("seq_len", settings.seq_len))
    named: list[tuple[str, Any]] = []
    for word, value in pairs:
        if value is not None:
            is_length = (table.framework, word) == ("bridge", "seq_len")
            named.append(("model.seq_length" if is_length else table.name_of(word), value))
    if rules:
        named.append(("logical_axis_rules", list(rules)))
    text, file_name = _FORMS[to](table, named)
    return Written(
        framework=name,
        version=table.version,
        text=text,
        file_name=file_name,
        pairs=tuple(named),
        lost=tuple(dict.fromkeys(lost)),
        left_open={each: value for each in left_open if (value := getattr(settings, each))},
    )


def _opening(table: Table) -> str:
    return f"Written by aliquot for {table.title}."


def _as_shell(table: Table, pairs: list[tuple[str, Any]]) -> tuple[str, str]:
    lines = [f'# {_opening(table)} Use: torchrun ... pretrain_gpt.py "${{PLAN_ARGS[@]}}" ...']
    lines.append("PLAN_ARGS=(")
    for name, value in pairs:
        if value is True:
            lines.append(f"    --{name}")
        elif isinstance(value, list):
            lines.append(f"    --{name} {' '.join(map(str, value))}")
        elif value is not False:
            quoted = f'"{value}"' if re.search(r"[|*()]", str(value)) else value
            lines.append(f"    --{name} {quoted}")
    return "\n".join([*lines, ")", ""]), "plan_args.sh"


def _as_recipe(table: Table, pairs: list[tuple[str, Any]]) -> tuple[str, str]:
    lines = [f'"""{_opening(table)} Call `planned` with a recipe\'s ConfigContainer."""', "", ""]
    lines += ["def planned(cfg):", '    """The configuration with the plan\'s layout."""']
    lines += [f"    cfg.{name} = {value!r}" for name, value in pairs]
    return "\n".join([*lines, "    return cfg", ""]), "planned_recipe.py"


def _as_registry(table: Table, pairs: list[tuple[str, Any]]) -> tuple[str, str]:
    checkpointing = {"full": "FullAC", "selective": "SelectiveAC"}
    lines = [f'"""{_opening(table)} Call `planned` with the Trainer.Config of a model."""', ""]
    said = dict(pairs)
    policy = checkpointing.get(str(said.get("activation_checkpoint")))
    if policy:
        lines += [f"from torchtitan.distributed.activation_checkpoint import {policy}", "", ""]
    lines += ["", "def planned(config):", '    """The configuration with the plan\'s layout."""']
    for name, value in pairs:
        if name == "activation_checkpoint":
            value_text = f"{policy}.Config()" if policy else "None"
        else:
            value_text = repr(value)
        lines.append(f"    config.{name} = {value_text}")
    return "\n".join([*lines, "    return config", ""]), "planned_config.py"


def _as_toml(table: Table, pairs: list[tuple[str, Any]]) -> tuple[str, str]:
    groups: dict[str, list[str]] = {}
    for name, value in pairs:
        group, _, key = name.rpartition(".")
        # What JSON writes of texts, numbers, truth values and lists is TOML, too.
        groups.setdefault(group, []).append(f"{key} = {json.dumps(value)}")
    lines = [f"# {_opening(table)}"]
    for group, entries in groups.items():
        lines += ["", f"[{group}]", *entries]
    return "\n".join([*lines, ""]), "plan.toml"


def _as_yaml(table: Table, pairs: list[tuple[str, Any]]) -> tuple[str, str]:
    data: dict[str, Any] = {"base_config": "base.yml"} if table.framework == "maxtext" else {}
    _nest(data, pairs)
    # Lists on one line each.
    flow = None if any(isinstance(value, list) for value in data.values()) else False
    body = yaml.safe_dump(data, sort_keys=False, default_flow_style=flow, width=100)
    return (
        f"# {_opening(table)}\n{body}",
        "plan.yaml" if table.framework != "maxtext" else "plan.yml",
    )


def _as_json(table: Table, pairs: list[tuple[str, Any]]) -> tuple[str, str]:
    data: dict[str, Any] = {}
    _nest(data, pairs)
    return json.dumps(data, indent=2) + "\n", "ds_config.json"


def _nest(data: dict[str, Any], pairs: Sequence[tuple[str, Any]]) -> None:
    """Put values under names with dots into nested tables."""
    for name, value in pairs:
        *groups, key = name.split(".")
        place = data
        for group in groups:
            place = place.setdefault(group, {})
        place[key] = value


_FORMS: Mapping[str, Callable[..., tuple[str, str]]] = {
    "megatron": _as_shell,
    "bridge": _as_recipe,
    "torchtitan": _as_registry,
    "torchtitan-0.3": _as_registry,
    "torchtitan-0.2": _as_toml,
    "maxtext": _as_yaml,
    "accelerate": _as_yaml,
    "deepspeed": _as_json,
}
"""The form in which each framework takes its settings, and the usual name of the file."""
