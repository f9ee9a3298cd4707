"""Analysis of an unmodified step on micro-batches: which operators run on each, and how their
results combine.

The step is traced a second time on a smaller batch. Dims that differ between the two traces are the
batch's; the rules then decide for every array whether a micro-batch computes it as it is, its own
slice of it, or a summand (`_time_specs`). Numbers that the user's code wrote down, such as the
divisor of a mean, are those of the whole batch, so that summands add up to the step's own result,
whether a loss is a mean or a sum.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...core import CaptureError, InputError, counted, divisors
from ...graph import (
    NO_VALUE,
    Call,
    Graph,
    Literal,
    Operand,
    Recomputation,
    Role,
    value_ids,
    with_recomputation,
)
from ._findings import Findings
from ._independent import Phased, cut_own
from ._micro_batch_analysis import analyse
from ._resized import batch_size, calls_of, is_resizable
from ._time_specs import EQUAL, Action, Conversion, TimeKind, TimeSpec
from ._traces import align, describe, trace_part

SEMANTICS = ("exact", "independent")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatchPlan:
    """A step cut over time.

    A batch of `B` examples is cut into `num_groups * num_micro_batches` parts: each group of
    devices takes its own contiguous share, micro-batch by micro-batch.

    Attributes:
        whole: the step on the whole batch.
        part: the same operators and values on one part, with the literals of the whole; with
            "independent", those of the part.
        part_eqns: for each structured operator of the whole, JAX's equation on a part.
        num_micro_batches, num_groups: parts in time, and parts that run side by side.
        semantics: "exact", or "independent" if the parts are steps of their own.
        specs: for each value, how the parts' values make it up.
        actions: how operators run that do not simply run on each part, by index.
        conversions: conversions of operands on their way in, by operator index and position.
        early_calls, late_calls: structured operators that run before the first and after the last
            part.
        combine: for each output path "sum", "mean", "concatenate D", "equal" (also for what is
            computed once, after the last part), or another reduction.
        phased: with "independent", what runs on each micro-batch and what once; else None.
    """

    whole: Graph
    part: Graph
    part_eqns: dict[Call, Any] = field(repr=False)
    num_micro_batches: int
    num_groups: int
    semantics: str
    specs: tuple[TimeSpec, ...] = field(repr=False)
    actions: dict[int, Action] = field(repr=False)
    conversions: dict[tuple[int, int], Conversion] = field(repr=False)
    early_calls: frozenset[Call] = field(repr=False)
    late_calls: frozenset[Call] = field(repr=False)
    combine: dict[str, str]
    phased: Phased | None = None

    @property
    def num_parts(self) -> int:
        """Parts of one batch."""
        return self.num_micro_batches * self.num_groups

    def is_summed(self, value: int) -> bool:
        """True if the parts' values are added up as they come: sums, and means of floats."""
        kind, dtype = self.specs[value].kind, self.whole.values[value].dtype
        return kind is TimeKind.SUM or (
            kind is TimeKind.MEAN and dtype.startswith(("float", "bfloat", "complex"))
        )


def plan_micro_batches(
    graph: Graph,
    num_micro_batches: int,
    *,
    num_groups: int = 1,
    semantics: str = "exact",
    on_missing_rule: str = "infer",
) -> MicroBatchPlan:
    """Decide how a step runs on micro-batches and gives the same result as on the whole batch.

    Args:
        graph: the step as captured, on the whole batch.
        num_micro_batches: parts in time.
        num_groups: groups of devices that each take a share of the batch (data parallelism).
        semantics: "exact": the step's own numbers, or an error. "independent": each micro-batch
            is a step of its own; see `_independent`. Groups of devices then share each micro-batch,
            so there can be only one.
        on_missing_rule: see `dim_rule`.

    Raises:
        InputError: the parts do not divide the batch, or there is none.
        CaptureError: the step does not decompose, or its Python code looks at the size of the
            batch.
    """
    if semantics not in SEMANTICS:
        raise InputError(
            f'micro_batch_semantics={semantics!r} is not known: it is "exact" or "independent".'
        )
    plan = _independent if semantics == "independent" else _exact
    return plan(graph, num_micro_batches, num_groups, on_missing_rule)


# For each step and number of parts of its batch, whether it decomposes into them.
_DECOMPOSES: weakref.WeakKeyDictionary[Graph, dict[tuple[int, str], bool]]
_DECOMPOSES = weakref.WeakKeyDictionary()


# Planners ask for the same numbers again for each way to recompute.
@functools.lru_cache(maxsize=8)
def _exact(
    graph: Graph, num_micro_batches: int, num_groups: int, on_missing_rule: str
) -> MicroBatchPlan:
    if _repeats_written_layers(graph):
        written: Graph = graph.calling.as_written
        known = _exact(written, num_micro_batches, num_groups, on_missing_rule)
        if (repeated := _repeated(graph, known)) is not None:
            return repeated
    part, eqns, findings = _analysed(graph, num_micro_batches, num_groups, on_missing_rule)
    if findings.violations or findings.conflicts:
        raise _refusal(graph, findings, num_micro_batches, on_missing_rule)
    return MicroBatchPlan(
        whole=graph,
        part=part,
        part_eqns=eqns,
        num_micro_batches=num_micro_batches,
        num_groups=num_groups,
        semantics="exact",
        specs=tuple(spec or EQUAL for spec in findings.specs),
        actions=findings.actions,
        conversions=findings.conversions,
        early_calls=frozenset(findings.early_calls),
        late_calls=frozenset(findings.late_calls),
        combine={
            output.path: _combine(_spec_of(findings.specs, output.value))
            for output in graph.outputs
        },
    )


def _repeats_written_layers(graph: Graph) -> bool:
    """True for a step whose layers are written out and recompute."""
    how: Recomputation | None = graph.calling.recompute
    return how is not None and bool(how.op_origins)


def _repeated(graph: Graph, known: MicroBatchPlan) -> MicroBatchPlan | None:
    """How a step runs whose layers recompute: each operator as the one that it repeats; None where
    only a part of a region runs on each micro-batch, which takes a closer look.
    """
    how: Recomputation = graph.calling.recompute
    graph.calling.cut_state = known.whole.calling.cut_state
    part = with_recomputation(known.part, how.name, like=graph)
    of_op: dict[int, list[tuple[int, Conversion]]] = {}
    for (op, position), conversion in known.conversions.items():
        of_op.setdefault(op, []).append((position, conversion))
    actions, conversions = {}, {}
    for op, origin in enumerate(how.op_origins):
        if origin in known.actions:
            actions[op] = known.actions[origin]
        for position, conversion in of_op.get(origin, ()):
            conversions[op, position] = conversion
    specs = [known.specs[origin] for origin in how.value_origins]
    calls: dict[Action, list[Call]] = {Action.EARLY: [], Action.LATE: []}
    for region in calls_of(graph.body):
        ops = [op for op in region.blocks[0].items if isinstance(op, int)]
        together = set(map(actions.get, ops))
        if together.isdisjoint(calls):
            continue
        if len(together) > 1:
            return None
        # A region runs early or late as a whole, and nothing is to be said of what is inside.
        calls[actions[ops[0]]].append(region)
        for op in ops:
            del actions[op]
            for out in {*graph.ops[op].outputs} - {*region.outputs, NO_VALUE}:
                specs[out] = EQUAL
    regions = zip(calls_of(graph.body), calls_of(part.body), strict=True)
    return replace(
        known,
        whole=graph,
        part=part,
        part_eqns={region: other.eqn for region, other in regions},
        specs=tuple(specs),
        actions=actions,
        conversions=conversions,
        early_calls=frozenset(calls[Action.EARLY]),
        late_calls=frozenset(calls[Action.LATE]),
    )


@functools.lru_cache(maxsize=4)
def _analysed(
    graph: Graph, num_micro_batches: int, num_groups: int, on_missing_rule: str
) -> tuple[Graph, dict[Call, Any], Findings]:
    """The step at the size of a part of the batch, its equations, and how it decomposes. Raises
    `InputError` and `CaptureError` where there is no such step.
    """
    part, eqns = align(graph, trace_part(graph, num_micro_batches, num_groups))
    return part, eqns, _of_chunks(graph, part, num_micro_batches * num_groups, on_missing_rule)


def _of_chunks(graph: Graph, part: Graph, parts: int, on_missing_rule: str) -> Findings:
    """Findings on parts of the batch; if the step cuts the batch into chunks, on parts that have an
    equal share of each chunk.
    """
    first = findings = analyse(graph, part, parts, on_missing_rule=on_missing_rule)
    size, chunks = batch_size(graph) // parts, 1
    while findings.violations or findings.conflicts:
        finer = math.lcm(*findings.finer.values())
        if finer == 1:
            return first
        chunks *= finer
        if size % chunks:
            reason = (
                f"it cuts the batch into {chunks} chunks, of which {parts} parts have an equal"
                f" share only if it is a multiple of {parts * chunks} examples"
            )
            cutting = [k for k in first.violations if first.finer.get(k, 1) > 1]
            first.violations |= dict.fromkeys(cutting, reason)
            return first
        findings = analyse(graph, part, parts, chunks=chunks, on_missing_rule=on_missing_rule)
    return findings


@functools.lru_cache(maxsize=4)
def _independent(
    graph: Graph, num_micro_batches: int, num_groups: int, on_missing_rule: str
) -> MicroBatchPlan:
    if num_groups != 1:
        raise InputError(
            f"{graph.name} cannot run on independent micro-batches in {num_groups} groups of"
            " devices: each micro-batch is one step, which all devices share. Use num_groups=1."
        )
    own = cut_own(graph, num_micro_batches, on_missing_rule=on_missing_rule)
    handed_on = {result for _, result in own.phased.handed_on}
    once = set(own.phased.late_values)
    combine = {}
    for output in graph.outputs:
        if output.value in handed_on:
            combine[output.path] = "handed on"
        elif output.value in once:
            combine[output.path] = TimeKind.EQUAL.value
        else:
            combine[output.path] = _combine(_spec_of(own.specs, output.value))
    return MicroBatchPlan(
        whole=graph,
        part=own.part,
        part_eqns=dict(own.part_eqns),
        num_micro_batches=num_micro_batches,
        num_groups=1,
        semantics="independent",
        specs=own.specs,
        actions={},
        conversions={},
        early_calls=frozenset(),
        late_calls=frozenset(),
        combine=combine,
        phased=own.phased,
    )


def _spec_of(specs: Sequence[TimeSpec | None], operand: Operand) -> TimeSpec:
    return EQUAL if isinstance(operand, Literal) else specs[operand] or EQUAL


def _combine(spec: TimeSpec) -> str:
    match spec.kind:
        case TimeKind.CONCATENATE:
            return f"{spec.kind} {spec.dim}"
        case TimeKind.LATE | TimeKind.WHOLE:
            return TimeKind.EQUAL.value
    return spec.kind.value


def runs_in_groups(
    graph: Graph,
    num_micro_batches: int,
    num_groups: int,
    *,
    semantics: str = "exact",
    on_missing_rule: str = "infer",
) -> bool:
    """True if `plan_micro_batches` succeeds. A step may run on micro-batches, but not on shares of
    them for each group; independent micro-batches never do.
    """
    if semantics == "independent":
        try:
            _independent(graph, num_micro_batches, num_groups, on_missing_rule)
        except (InputError, CaptureError):
            return False
        return True
    # A step decomposes as it does with layers that recompute, and that has fewer operators.
    graph = graph.calling.as_written or graph
    # Groups of devices cut a micro-batch into parts as more micro-batches would, and planners ask
    # for every number of micro-batches and every mesh.
    parts = num_micro_batches * num_groups
    finest = _finest(graph, parts)
    if finest != parts and _decomposes(graph, finest, on_missing_rule) and _resizes(graph, parts):
        # Each of its parts is a whole number of the finest ones, and the same program.
        return True
    return _decomposes(graph, parts, on_missing_rule)


def _finest(graph: Graph, parts: int) -> int:
    """The largest multiple of `parts` that leaves two examples or more to each part of the batch:
    JAX may write another program for a single one. `parts` itself if there is none.
    """
    if not any(item.role is Role.BATCH for item in graph.inputs):
        return parts
    share, rest = divmod(batch_size(graph), parts)
    if rest or share < 2:
        return parts
    return parts * (share // divisors(share)[1])


def _decomposes(graph: Graph, parts: int, on_missing_rule: str) -> bool:
    """True if the step runs on so many equal parts of its batch. To say why it does not would take
    longer than to find out.
    """
    known = _DECOMPOSES.setdefault(graph, {})
    key = parts, on_missing_rule
    if key not in known:
        try:
            found = _analysed(graph, parts, 1, on_missing_rule)[-1]
            known[key] = not (found.violations or found.conflicts)
        except (InputError, CaptureError):
            known[key] = False
    return known[key]


def traces_in_groups(graph: Graph, num_micro_batches: int, num_groups: int) -> bool:
    """True if the step is the same program on the share of a micro-batch that each group takes;
    also True if the groups cannot divide it.
    """
    if graph.split is not None:
        # Where scans are cut depends on no batch: pieces are equal wherever their originals are.
        return traces_in_groups(graph.split.original, num_micro_batches, num_groups)
    # Layers recompute alike on every batch.
    graph = graph.calling.as_written or graph
    parts = num_micro_batches * num_groups
    try:
        if _resizes(graph, parts):
            return True
        align(graph, trace_part(graph, num_micro_batches, num_groups))
    except InputError:
        return True
    except CaptureError:
        return False
    return True


def _resizes(graph: Graph, parts: int) -> bool:
    """True if the step on one of so many parts can be derived from its traces on two other sizes,
    and is the same program on the smaller of these as on the whole batch.
    """
    if not any(item.role is Role.BATCH for item in graph.inputs):
        return False
    known: dict[int, Graph] = graph.calling.traces
    size, rest = divmod(batch_size(graph), parts)
    if rest or not size or not known:
        return False
    traced = next(iter(known.values()))
    return is_resizable(traced, graph, size) and _is_same_program(graph, traced)


@functools.lru_cache(maxsize=1)
def _is_same_program(graph: Graph, part: Graph) -> bool:
    try:
        align(graph, part)
    except CaptureError:
        return False
    return True


def _refusal(
    graph: Graph, findings: Findings, num_micro_batches: int, on_missing_rule: str
) -> CaptureError:
    refused = findings.violations | findings.conflicts
    lines: dict[str, str] = {}
    # One line for each place in the user's code: a layer that repeats would fill the message.
    for index in sorted(refused):
        op = graph.ops[index]
        # Outputs that depend on an operator.
        reached = set(value_ids(op.outputs))
        for later in graph.ops[op.index + 1 :]:
            if not reached.isdisjoint(value_ids(later.inputs)):
                reached.update(value_ids(later.outputs))
        paths = []
        for o in graph.outputs:
            if isinstance(o.value, int) and o.value in reached:
                paths.append(o.path or "the result")
        # A gradient's way through a loop is hidden from this walk; the first result then stands for
        # all.
        first = paths[0] if paths else graph.outputs[0].path
        others = f" and {counted(len(paths) - 1, 'more output')} depend"
        more = others if len(paths) > 1 else " depends"
        lines.setdefault(f"{describe(op, graph)}: {refused[index]}", f"{first}{more}")
    shown = list(lines.items())[:3]
    text = "".join(f"\n  - {line}; {reached} on it" for line, reached in shown)
    more = f"\n  - and {len(lines) - len(shown)} more" if len(lines) > len(shown) else ""
    instead = ""
    if any(op.name == "ragged_dot_general" for op in graph.ops):
        instead = (
            " aliquot.experts in place of the sort and the grouped products (ragged_dot), which"
            " micro-batches and split experts leave exact, or"
        )
    independent = (
        ', or micro_batch_semantics="independent" (--micro-batch-semantics independent): each'
        " micro-batch is then a step of its own, as by gradient accumulation, and the numbers are"
        " other than the whole batch's"
    )
    try:
        cut_own(graph, num_micro_batches, on_missing_rule=on_missing_rule)
    except (CaptureError, InputError) as error:
        reason = str(error).split(": ", 1)[-1].split(". ")[0].split("\n")[0]
        independent = f" (independent micro-batches are no way out: {reason})"
    return CaptureError(
        f"{graph.name} does not decompose into micro-batches:{text}{more}\n  Use{instead}"
        f" num_micro_batches=1{independent}."
    )
