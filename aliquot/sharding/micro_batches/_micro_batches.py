"""Analysis of an unmodified step on micro-batches: which operators run on each, and how their
results combine.

The step is traced a second time on a smaller batch. Dims that differ between the two traces are the
batch's; the rules then decide for every array whether a micro-batch computes it as it is, its own
slice of it, or a summand (`_time_specs`). Numbers that the user's code wrote down, such as the
divisor of a mean, are those of the whole batch, so that summands add up to the step's own result,
whether a loss is a mean or a sum.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from ...core import CaptureError, InputError
from ...graph import (
    Call,
    Graph,
    Literal,
    Op,
    Operand,
    Role,
    build_graph,
    has_effects,
    source_line,
    split_scans,
)
from ._findings import Findings
from ._micro_batch_analysis import analyse
from ._micro_calls import EFFECT
from ._resized import batch_size, calls_of, is_resizable, resized
from ._time_specs import EQUAL, Action, Conversion, TimeKind, TimeSpec

SEMANTICS = ("exact", "independent")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatchPlan:
    """A step cut over time.

    A batch of `B` examples is cut into `num_groups * num_micro_batches` parts: each group of
    devices takes its own contiguous share, micro-batch by micro-batch.

    Attributes:
        whole: the step on the whole batch.
        part: the same operators and values on one part, with the literals of the whole.
        part_eqns: for each structured operator of the whole, JAX's equation on a part.
        num_micro_batches, num_groups: parts in time, and parts that run side by side.
        semantics: "exact", or "independent" if some arrays stand for one part alone.
        specs: for each value, how the parts' values make it up.
        actions: how operators run that do not simply run on each part, by index.
        conversions: conversions of operands on their way in, by operator index and position.
        early_calls, late_calls: structured operators that run before the first and after the last
            part.
        combine: for each output path "sum", "mean", "concatenate D", "equal" (also for what is
            computed once, after the last part), or another reduction.
        independent: the operators that are applied to each micro-batch separately, for the reader.
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
    independent: tuple[str, ...]

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
        semantics: "exact": the step's own numbers, or an error. "independent": where a result is a
            non-linear function of a sum over the batch (the statistics of BatchNorm), each part
            takes its own sum, scaled up to the batch; what such values leave behind as state is
            averaged over the parts.
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
    parts = num_micro_batches * num_groups
    part, eqns = _align(graph, trace_part(graph, num_micro_batches, num_groups))
    findings = analyse(
        graph, part, parts, on_missing_rule=on_missing_rule, settle=semantics == "independent"
    )
    # An effect that happens for each micro-batch is no longer the step's own, whatever the
    # semantics.
    repeated = {
        k: EFFECT
        for k in findings.violations.keys() | findings.per_part
        if has_effects(graph.ops[k])
    }
    findings.violations |= repeated
    if repeated or (semantics == "exact" and (findings.violations or findings.conflicts)):
        raise _refusal(graph, findings)
    return MicroBatchPlan(
        whole=graph,
        part=part,
        part_eqns=eqns,
        num_micro_batches=num_micro_batches,
        num_groups=num_groups,
        semantics=semantics,
        specs=tuple(spec or EQUAL for spec in findings.specs),
        actions=findings.actions,
        conversions=findings.conversions,
        early_calls=frozenset(findings.early_calls),
        late_calls=frozenset(findings.late_calls),
        combine={output.path: _combine(findings, output.value) for output in graph.outputs},
        independent=tuple(
            dict.fromkeys(
                describe(graph.ops[index])
                for index in sorted(findings.violations.keys() | findings.per_part)
            )
        ),
    )


def _combine(findings: Findings, operand: Operand) -> str:
    spec = EQUAL if isinstance(operand, Literal) else findings.specs[operand] or EQUAL
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
    them for each group.
    """
    try:
        plan_micro_batches(
            graph,
            num_micro_batches,
            num_groups=num_groups,
            semantics=semantics,
            on_missing_rule=on_missing_rule,
        )
    except (InputError, CaptureError):
        return False
    return True


def traces_in_groups(graph: Graph, num_micro_batches: int, num_groups: int) -> bool:
    """True if the step is the same program on the share of a micro-batch that each group takes;
    also True if the groups cannot divide it.
    """
    parts = num_micro_batches * num_groups
    try:
        if _resizes(graph, parts):
            return True
        _align(graph, trace_part(graph, num_micro_batches, num_groups))
    except InputError:
        return True
    except CaptureError:
        return False
    return True


def _resizes(graph: Graph, parts: int) -> bool:
    """True if the step on one of so many parts can be derived from its traces on two other sizes,
    and is the same program on the smaller of these as on the whole batch.
    """
    if graph.split is not None or not any(item.role is Role.BATCH for item in graph.inputs):
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
        _align(graph, part)
    except CaptureError:
        return False
    return True


def trace_part(graph: Graph, num_micro_batches: int, num_groups: int = 1) -> Graph:
    """The step traced on one of `num_micro_batches * num_groups` equal parts of its batch.

    Raises:
        InputError: the parts do not divide the batch, or there is none.
    """
    parts = num_micro_batches * num_groups
    batch = [item for item in graph.inputs if item.role is Role.BATCH]
    if not batch:
        raise InputError(
            f"{graph.name} has no batch that could be cut into {num_micro_batches} micro-batches:"
            " none of its arguments is an array that each step gets anew. Use num_micro_batches=1."
        )
    groups = f" on {num_groups} data-parallel groups" if num_groups > 1 else ""
    wrong = [
        f"{item.path} holds {graph.values[item.value].shape[0]}"
        for item in batch
        if graph.values[item.value].shape[0] % parts
    ]
    if num_micro_batches < 1 or wrong:
        raise InputError(
            f"num_micro_batches={num_micro_batches}{groups} needs a batch that is a multiple of"
            f" {parts} examples, but {'; '.join(wrong) or 'there must be at least one'}. Choose"
            " another number of micro-batches, or another batch."
        )
    (size,) = {graph.values[item.value].shape[0] // parts for item in batch}
    try:
        return _of_size(graph, size)
    except (TypeError, ValueError, IndexError, ArithmeticError) as error:
        reason = str(error).rstrip(".")
        if held := _hidden_in_state(graph, size):
            raise CaptureError(
                f"{graph.name} cannot be traced on a micro-batch, {parts} times smaller than its"
                f" batch: {reason}. State is not cut, and this state holds a row for each of the"
                f" {batch_size(graph)} examples: {', '.join(held)}. Pass it with the batch, as one"
                " more of its arrays, and return it beside the state; or use num_micro_batches=1."
            ) from error
        raise CaptureError(
            f"{graph.name} cannot be traced on a micro-batch, {parts} times smaller than its batch:"
            f" {reason}. Take sizes from the arrays (x.shape[0]) instead of writing them down, or"
            " use fewer micro-batches."
        ) from error


def _hidden_in_state(graph: Graph, size: int) -> list[str]:
    """The arrays besides the batch that hold a row for each example: those that must have `size`
    rows, too, for the step to be traced on so many examples. Described with their shapes; none if
    that is not why it cannot be traced.
    """
    shapes = [graph.values[item.value].shape for item in graph.inputs]
    kept = {
        k
        for k, item in enumerate(graph.inputs)
        if item.role is not Role.BATCH and shapes[k][:1] == (batch_size(graph),)
    }

    def traces(cut: Collection[int]) -> bool:
        try:
            _trace(graph, size, also=cut)
        except (CaptureError, TypeError, ValueError, IndexError, ArithmeticError):
            return False
        return True

    if not kept or not traces(kept):
        return []
    for k in sorted(kept):
        # Such as a bias of as many elements as there are examples.
        if traces(kept - {k}):
            kept.remove(k)
    return [f"{graph.inputs[k].path} of shape {shapes[k]}" for k in sorted(kept)]


def _of_size(graph: Graph, size: int) -> Graph:
    """The step on `size` examples, with its scans cut as those of the graph are.

    A step is traced on two sizes at most if others can be derived from these, and on a third if JAX
    writes another program for the second.
    """
    if graph.split is not None:
        return split_scans(_of_size(graph.split.original, size), graph.split.bounds).graph
    known: dict[int, Graph] = graph.calling.traces
    whole = batch_size(graph)
    if size == whole:
        return graph
    if size not in known and not known:
        # JAX may write another program for a single example.
        other = size if size > 1 else 2 if whole > 2 else 4
        traced = _trace(graph, other)
        if not _same_operators(graph, traced):
            # So may it where a single group of examples is left: try a larger size.
            larger = 2 * other if 2 * other != whole else 3 * other
            with contextlib.suppress(
                CaptureError, TypeError, ValueError, IndexError, ArithmeticError
            ):
                retraced = _trace(graph, larger)
                if _same_operators(graph, retraced):
                    other, traced = larger, retraced
        known[other] = traced
    if size not in known:
        # Deriving another size takes a moment; tracing it takes as long as tracing the step did.
        with contextlib.suppress(CaptureError):
            known[size] = resized(next(iter(known.values())), graph, size)
    if size not in known:
        known[size] = _trace(graph, size)
    return known[size]


def _trace(graph: Graph, size: int, also: Collection[int] = ()) -> Graph:
    """The step traced on so many examples; `also` are further inputs that have a row for each."""
    leaves = []
    for k, (item, leaf) in enumerate(zip(graph.inputs, graph.calling.call.leaves, strict=True)):
        # Only the batch's leading dim changes: the shapes of state are those of the whole step.
        shape, is_cut = graph.values[item.value].shape, item.role is Role.BATCH or k in also
        leaves.append(_Leaf(leaf, (size, *shape[1:])) if is_cut else leaf)
    return build_graph(graph.calling, leaves)


class _Leaf:
    """A leaf of another shape."""

    def __init__(self, like: Any, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.dtype = like.dtype
        self.weak_type = getattr(like, "weak_type", False)


def _align(whole: Graph, part: Graph) -> tuple[Graph, dict[Call, Any]]:
    """The part's operators and values with the whole's literals. Raises `CaptureError` if the
    programs differ.
    """
    for a, b in zip(whole.ops, part.ops):
        if (
            # The results' numbers are compared too, so that a number stands for the same value in
            # both traces.
            a.name != b.name
            or a.trips != b.trips
            or a.outputs != b.outputs
            or not _same_operands(a, b)
        ):
            raise _different(whole, a, b)
    if len(whole.ops) != len(part.ops) or len(whole.values) != len(part.values):
        raise _different(whole, whole.ops[-1], part.ops[-1])
    # Most operators read no literals, and are the part's own.
    ops = tuple(
        [
            (
                b
                if a.inputs == b.inputs and a.phase is b.phase
                # The whole's literals are kept: the divisor of a mean is that of the whole batch,
                # so that summands add up to its result.
                else replace(a, eqn=b.eqn, params=b.params)
            )
            for a, b in zip(whole.ops, part.ops)
        ]
    )
    others = calls_of(part.body)
    eqns = {call: next(others).eqn for call in calls_of(whole.body)}
    return replace(part, ops=ops), eqns


def _same_operators(whole: Graph, part: Graph) -> bool:
    return [op.name for op in whole.ops] == [op.name for op in part.ops]


def _same_operands(a: Op, b: Op) -> bool:
    return len(a.inputs) == len(b.inputs) and all(
        x == y if isinstance(x, int) else isinstance(y, Literal) for x, y in zip(a.inputs, b.inputs)
    )


def _different(graph: Graph, a: Op, b: Op) -> CaptureError:
    sizes = [graph.values[item.value].shape[0] for item in graph.inputs if item.role is Role.BATCH]
    change = f"{describe(a)} becomes {describe(b)}"
    if a.trips != b.trips:
        change = f"the loop with {describe(a)} runs {b.trips} instead of {a.trips} times"
    return CaptureError(
        f"{graph.name} is another program on a micro-batch than on the whole batch of {sizes[0]}:"
        f" {change}. Its Python code looks at the size of the batch, or it loops over the batch."
        " Use num_micro_batches=1."
    )


def where(op: Op) -> str:
    """The user's line that an operator comes from, or its scope where JAX knows no line."""
    return source_line(op, short=False) or op.scope or "an unknown line"


def describe(op: Op) -> str:
    """An operator as a reader finds it again: its name and the user's line."""
    return f"`{op.name}` at {where(op)}"


def _refusal(graph: Graph, findings: Findings) -> CaptureError:
    refused = findings.violations | findings.conflicts
    lines: dict[str, str] = {}
    # One line for each place in the user's code: a layer that repeats would fill the message.
    for index in sorted(refused):
        op = graph.ops[index]
        lines.setdefault(f"{describe(op)}: {refused[index]}", _reached(graph, op))
    shown = list(lines.items())[:3]
    text = "".join(f"\n  - {line}; {reached} on it" for line, reached in shown)
    more = f"\n  - and {len(lines) - len(shown)} more" if len(lines) > len(shown) else ""
    return CaptureError(
        f"{graph.name} does not decompose into micro-batches:{text}{more}\n  Use"
        ' num_micro_batches=1, or micro_batch_semantics="independent" (--micro-batch-semantics'
        " independent) to let each micro-batch take its own value there (as BatchNorm usually"
        " does)."
    )


def _reached(graph: Graph, op: Op) -> str:
    """Outputs that depend on an operator."""
    reached = {out for out in op.outputs if out >= 0}
    for later in graph.ops[op.index + 1 :]:
        if any(isinstance(i, int) and i in reached for i in later.inputs):
            reached.update(out for out in later.outputs if out >= 0)
    paths = [
        o.path or "the result"
        for o in graph.outputs
        if isinstance(o.value, int) and o.value in reached
    ]
    # A gradient's way through a loop is hidden from this walk; the first result then stands for
    # all.
    first = paths[0] if paths else graph.outputs[0].path
    more = f" and {len(paths) - 1} more outputs depend" if len(paths) > 1 else " depends"
    return f"{first}{more}"
