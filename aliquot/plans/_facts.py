"""Facts at the head of a plan, as pairs of a name and a text: its decisions, the predicted time and
memory, and the bound.
"""

from __future__ import annotations

import math

from ..cluster import Cluster, target_for
from ..core import counted, format_bytes, format_seconds, format_share_of_limit
from ._idle_hosts import idle_devices, plan_devices
from ._plan import GIVEN_LAYOUT, Plan
from ._stage_text import idle_parts, meshes
from ._summary import (
    chosen_candidate,
    layers_recompute,
    name_on_mesh,
    said_of_step_time,
    step_time_range_s,
    summary_rows,
)

_ROUNDING = 1e-6
# Stages whose shares of waiting differ by less are said to wait alike.
_ALIKE = 0.02
# Smaller gaps would be told as 0.00%.
_LEAST_GAP = 1e-4
# A bound on a schedule's closed form holds for the closed form alone: a simulation may lie on
# either side of it.
_CLOSED_FORM = "closed forms of "
# The zoo's dtypes where they say more than the type of products.
_DTYPES = {
    "bf16-master": "bf16, as parameters and gradients; the optimizer updates a float32 copy",
    "fp8": "fp8, scaled by the last step's maxima",
    "fp8-tensor": "fp8-tensor, scaled by the maxima of arrays",
    "fp8-rows": "fp8-rows, scaled by the maxima of rows",
}
# Sets of plans among which a bound holds, by their names in plan files.
_SCOPES = {
    "all copies of all layers": "",
    "gap_within_folded_space": "plans with equal layers split alike",
    "gap_within_blocks": "plans of ParallelBlocks",
    "gap_within_neighbourhood": "plans near those of coarser meshes",
}
# What the names of spaces in plan files are called where people read them.
_SAID_OF_SPACES = {
    "plans without a pipeline in ": "one-program plans, ",
    " that split all repeated layers the same way": ", equal layers split alike",
    " that split each product by some option of its ParallelBlock": ", by ParallelBlocks",
    " with choices near the solutions of coarser meshes": ", near those of coarser meshes",
    "all plans, by compute alone that all devices share evenly": "all plans, by compute alone",
    " with the given options": "",
    ", with --recompute": ", --recompute",
}
_WITHIN_GAP = "optimal within the gap"
# Rows of the summary that state decisions; the others state their effect.
_DECISIONS = ("parallelism", "recomputation", "attention")
# Outputs that are equal in all micro-batches or computed once: their rule is not shown.
_EQUAL = "equal"
# What micro-batches compute, by the names in plan files.
_SEMANTICS = {
    "exact": "accumulated to the result of the whole batch",
    "independent": "independent: each is a step of its own",
}
_COMBINED = {"sum": "summed", "mean": "averaged", "concatenate": "joined along dim"}
# Names that are shown in place of the short names in plan files.
_PARTS_OF_MEMORY = {
    "casts of parameters": "low-precision copies of parameters",
    "resharded copies": "gathered or resharded copies",
    # Of a stage; without a pipeline each part has a name of its own.
    "state": "parameters, gradients and optimizer state",
    "working memory": "temporaries",
}


def fact_rows(plan: Plan) -> list[tuple[str, str]]:
    """Names and texts in reading order; a row without a name continues the row above it."""
    rows, summary, p = [], summary_rows(plan), plan.prediction
    batch = [array for array in plan.inputs if array.role == "batch" and array.shape]
    if batch:
        # The largest array of the batch, and the type of most matrix products.
        largest = max(batch, key=lambda array: math.prod(array.shape))
        dtype = plan.model.flops_dtype or str(plan.model.settings.get("dtype", ""))
        if plan.model.kind == "zoo":
            dtype = _DTYPES.get(dtype, dtype)
        products = f"; most matmuls in {dtype}" if dtype else ""
        shape = f"{largest.dtype}[{', '.join(map(str, largest.shape))}]"
        rows.append(("batch", f"{largest.path.removeprefix('batch.')} {shape}{products}"))
    rows += [row for row in summary if row[0] in _DECISIONS]
    if plan.idle_hosts:
        which, devices = counted(plan.idle_hosts, "host"), counted(idle_devices(plan), "device")
        rows.append(("idle", f"the last {which}, {devices}: faster without"))
    rows.append(("micro-batches", micro_batches(plan)))
    step_time = time_parts(plan)
    # Of devices without calibration the range comes first.
    if step_time_range_s(plan) is not None:
        step_time = f"{said_of_step_time(plan)}; by the data sheet {step_time}"
    rows.append(("step time (predicted)", step_time))
    # Where stages take the next call before they have ended this one.
    if len(plan.stages) > 1 and not has_gradients(plan):
        between = format_seconds(time_between_calls_s(plan))
        rows.append(("time between calls", f"{between}, if they follow one another without a gap"))
    rows += [row for row in summary if row[0] not in _DECISIONS]
    peak, limit, share = format_bytes(p.peak_memory_bytes), p.memory_limit_bytes, ""
    if limit:
        share = f", {format_share_of_limit(p.peak_memory_bytes, limit)} of the limit of"
        share += f" {format_bytes(limit)}{_limit_of_device(plan)}"
    rows += [
        ("bound", bound(plan)),
        ("memory (predicted)", f"{peak} on each device{share}; peak at {p.peak_moment}"),
        ("", " + ".join(f"{format_bytes(size)} {name}" for name, size in told_parts(plan))),
    ]
    if p.host_memory_bytes:
        each = sum(p.host_memory_bytes.values())
        hosts = plan.cluster.get("host")
        held = hosts.get("memory_bytes") if isinstance(hosts, dict) else None
        per_host = each * devices_of_a_host(plan)
        text = f"{format_bytes(each)} for each device, {format_bytes(per_host)} on a host"
        text += f", {per_host / held:.0%} of {format_bytes(held)}" if held else ""
        parts = [f"{format_bytes(size)} {name}" for name, size in p.host_memory_bytes.items()]
        rows += [("host memory", text), ("", " + ".join(parts))]
    took = plan.provenance
    # Plan files do not hold the time that the search took.
    if took.search_s or took.trace_s:
        search, trace = format_seconds(took.search_s), format_seconds(took.trace_s)
        rows.append(("planned in", f"{search} of search, after {trace} of tracing"))
    return rows


def origin_rows(plan: Plan) -> list[tuple[str, str]]:
    """The planner, and how to build the step again."""
    # The step, as it is built, may recompute less than the plan says.
    how, built = layers_recompute(plan), plan.model.settings.get("recompute", "none")
    added = "" if how in (None, built) else f"; the plan adds the recomputation ({how})"
    return [
        ("planner", f"{plan.provenance.planner}; aliquot {plan.provenance.version}"),
        ("to rebuild the step", f"{rebuild(plan)}{added}"),
    ]


def headline(plan: Plan) -> str:
    """One line: model, method, mesh or stages, and cluster."""
    what, cluster = plan.model.name or "step", plan.cluster.get("name", "a cluster")
    if is_pipeline(plan):
        return f"{what}: {plan.method}, {meshes(plan)} of {cluster}, {plan.schedule}"
    stages = ", no pipeline," if plan.method.startswith("pipeshard") else ""
    return f"{what}: {plan.method}{stages} on {meshes(plan)} of {cluster}"


def is_pipeline(plan: Plan) -> bool:
    """True if it runs as stages with a schedule."""
    return plan.is_pipeline or len(plan.stages) > 1


def time_parts(plan: Plan) -> str:
    """The predicted step time as a sum of its parts; of a pipeline those of its busiest submesh."""
    p = plan.prediction
    total_s = p.communication_s + p.gradient_s
    communicated = f" + {format_seconds(total_s - p.hidden_s)} exposed communication"
    behind = (
        f"; all communication {format_seconds(total_s)}, of which {format_seconds(p.hidden_s)}"
        " overlap with compute"
    )
    behind += f"; {format_seconds(p.gradient_s)} are for gradients" if p.gradient_s else ""
    if not p.hidden_s:
        # All of it is exposed.
        # Of stages, what overlaps with compute is left out of both.
        exposed = "exposed " if is_pipeline(plan) else ""
        parts = [
            (f"{exposed}communication", p.communication_s),
            (f"{exposed}gradient communication", p.gradient_s),
        ]
        communicated = "".join(f" + {format_seconds(s)} {name}" for name, s in parts if s)
        behind = ""
    copied = ""
    if p.host_transfer_s:
        exposed_s = p.host_transfer_s - p.host_hidden_s
        copied = f" + {format_seconds(exposed_s)} copies to and from host memory"
        if p.host_hidden_s:
            copied += f" ({format_seconds(p.host_hidden_s)} more overlap with compute)"
    transfers_s, waits_s = idle_parts(plan)
    bubble = f" + {format_seconds(transfers_s)} transfers" if transfers_s else ""
    bubble += f" + {format_seconds(waits_s)} bubble"
    if is_pipeline(plan):
        # Whose parts add up to the step time, and how long the others wait.
        whose = "stage" if plan.num_submeshes == len(plan.stages) else "submesh"
        shares = [stage.prediction.bubble for stage in plan.stages if stage.prediction]
        if not shares or max(shares) - min(shares) < _ALIKE:
            bubble += f" (of the busiest {whose})"
        else:
            number = shares.index(min(shares)) % plan.num_submeshes
            others = f"others wait for up to {max(shares):.0%} of the step"
            bubble += f" (of {whose} {number}, the busiest; {others})"
    elif not p.bubble_s:
        bubble = ""
    return (
        f"{format_seconds(p.step_time_s)} = {format_seconds(p.compute_s)} compute"
        f"{communicated}{copied}{bubble}{behind}"
    )


def bound(plan: Plan) -> str:
    """Lower bound of the step time, the plans among which it holds, and the gap to it."""
    p = plan.provenance
    if not p.lower_bound_s:
        if p.bound_holds_for:
            found = "the best plan" if p.status == "optimal" else p.status
            return f"no lower bound; {found} within {p.bound_holds_for}"
        others = (
            "" if plan.method == "auto" else f"; --method auto compares {plan.method} with others"
        )
        given = "layout given by the method; " if p.status == GIVEN_LAYOUT else ""
        # The bound among plans of the candidate that was chosen may be all that is known.
        chosen = chosen_candidate(plan)
        known = {} if chosen is None else p.candidates[chosen]
        least_s, text = known.get("lower_bound_s"), "no lower bound"
        if isinstance(least_s, int | float) and least_s:
            share = max(plan.prediction.step_time_s / least_s - 1, 0.0)
            text = f"{_at_most(share)} above the fastest of plans of {name_on_mesh(known)}"
        return f"{given}{text}{others}"
    if p.bound_holds_for.startswith(_CLOSED_FORM):
        return _bound_of_closed_forms(plan, p.lower_bound_s)
    if plan.provenance.status == "optimal" and (plan.provenance.gap or 0.0) <= _ROUNDING:
        text = f"proven optimal: 0% above the fastest of {_space(plan)}"
    else:
        above = p.gap
        if above is None:
            above = max(plan.prediction.step_time_s / p.lower_bound_s - 1, 0.0)
        text = f"{_at_most(above)} above the fastest of {_space(plan)}"
    return text if p.status in (_WITHIN_GAP, "optimal") else f"{text}; {p.status}"


def _space(plan: Plan) -> str:
    """The plans among which a bound holds, as one noun with its limits."""
    scope = plan.provenance.bound_holds_for
    scope = _SCOPES.get(scope, scope) or "all plans"
    for written, said in _SAID_OF_SPACES.items():
        scope = scope.replace(written, said)
    return scope


def _at_most(share: float) -> str:
    return f"at most {share:.2%}" if share >= _LEAST_GAP else f"less than {_LEAST_GAP:.2%}"


def _bound_of_closed_forms(plan: Plan, least_s: float) -> str:
    """What a bound on closed forms says of a simulated step, which may take more or less."""
    p = plan.provenance
    scope = _space(plan).removeprefix(_CLOSED_FORM)
    # "all stages" say nothing; where they lie, and with which options, does.
    scope = scope.removeprefix("all stages") if scope.startswith("all stages") else f" of {scope}"
    parts = counted(plan.num_micro_batches, "micro-batch")
    above = plan.prediction.step_time_s / least_s - 1
    which = f"pipelines{scope}, {parts}, {plan.schedule}"
    if above < 0:
        text = (
            f"none: the least by formula for {which} is {format_seconds(least_s)}; simulated, this"
            f" plan takes {-above:.1%} less"
        )
    else:
        text = f"{above:.1%} above {format_seconds(least_s)}, the least by formula for {which}"
    return text if p.status in (_WITHIN_GAP, "optimal") else f"{text}; {p.status}"


def micro_batches(plan: Plan) -> str:
    """Number of micro-batches, and how outputs that differ between them are combined."""
    if plan.num_micro_batches == 1:
        return "1 (the whole batch at once)"
    by_rule: dict[str, list[str]] = {}
    for path, rule in plan.combine.items():
        if rule != _EQUAL:
            by_rule.setdefault(rule, []).append(path)
    told = []
    for paths in by_rule.values():
        told.append(f"output {paths[0]} is" if len(paths) == 1 else f"{len(paths)} outputs are")
    rules = []
    for who, rule in zip(told, by_rule, strict=True):
        rules.append(
            " ".join([who, *(_COMBINED.get(word, word) for word in rule.split()), "over them"])
        )
    semantics = _SEMANTICS.get(plan.micro_batch_semantics, plan.micro_batch_semantics)
    return "; ".join([f"{plan.num_micro_batches}, {semantics}", *rules])


def rebuild(plan: Plan) -> str:
    """Instruction to rebuild the step that the plan is for."""
    if plan.model.kind == "zoo":
        settings = ", ".join(f"{key}={value!r}" for key, value in plan.model.settings.items())
        return f"aliquot.zoo.build({settings})"
    if plan.model.kind == "factory":
        return (
            f"{plan.model.name}({', '.join(f'{k}={v!r}' for k, v in plan.model.settings.items())})"
        )
    return "the plan was made from a function in a running program; pass that function again"


def memory_parts(plan: Plan) -> list[tuple[str, float]]:
    """Names and bytes of the parts of a device's memory at the peak, the largest first."""
    sizes = sorted(plan.prediction.memory_bytes.items(), key=lambda item: -item[1])
    return [(name_of_part(name), size) for name, size in sizes]


def told_parts(plan: Plan) -> list[tuple[str, float]]:
    """As `memory_parts`, where names stand by themselves and say what they count."""
    batch = "batch" if plan.num_micro_batches == 1 else "batch (one micro-batch)"
    return [(batch if name == "batch" else name, size) for name, size in memory_parts(plan)]


def name_of_part(name: str) -> str:
    """A part of a device's memory for readers, by its name in plan files."""
    return _PARTS_OF_MEMORY.get(name, name)


def _limit_of_device(plan: Plan) -> str:
    """Which share of the device's memory the limit is, and for what the rest is; empty if the limit
    is another than the device's own.
    """
    device = Cluster.from_dict(plan.cluster).device
    target = target_for(device)
    if abs(plan.prediction.memory_limit_bytes - target.usable_bytes(device)) > 1:
        return ""
    return (
        f" ({target.usable_memory_fraction:.0%} of the {format_bytes(device.memory_bytes)} of"
        f" {device.name}; the rest is left to its runtime and to fragmentation)"
    )


def devices_of_a_host(plan: Plan) -> int:
    """Devices of the plan on its fullest host."""
    per_host = plan.cluster.get("devices_per_host")
    return min(per_host, plan_devices(plan)) if isinstance(per_host, int) else 1


def time_between_calls_s(plan: Plan) -> float:
    """Predicted seconds from the end of one call to the end of the next, if calls follow one
    another without a gap: a pipeline is as slow as its busiest submesh, or as its slowest link; one
    program takes its step time.
    """
    step_s = plan.prediction.step_time_s
    stages = [stage.prediction for stage in plan.stages]
    if len(stages) < 2:
        return step_s
    busy = [(1 - each.bubble) * step_s for each in stages if each is not None]
    sent = [plan.num_micro_batches * each.transfer_s for each in stages if each is not None]
    return min(step_s, max([*busy, *sent], default=step_s))


def has_gradients(plan: Plan) -> bool:
    """True if any stage of a pipeline has a backward pass; of one program nothing is known, and
    calls of it follow one another as steps do.
    """
    return any(s.prediction is not None and s.prediction.backward_s > 0 for s in plan.stages)
