"""Notes of a plan: operators and arrays that are not split although a reader might expect it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ..cluster import Cluster, target_for
from ..core import counted, divisors, format_bytes, format_seconds
from ..cost import REPLICATED_BY_PLAN, collective_uses, work_alike
from ..graph import Graph, Memory, Phase, Role, changed_state, named_operator, source_line
from ..sharding import entry_operators, find_blocks, outside_blocks
from ._base import Decision, StageDecision
from ._tried import on_hosts
from .intra.blocks import blocks_split_apart

_LARGE_BYTES = 1 << 20
_ALIKE = 0.1
_MOST_SIZES = 10
_MOST_WHOLE = 5


def notes(stages: Sequence[StageDecision]) -> tuple[str, ...]:
    """Notes on likely mistakes in the step, on much replicated work, on large operators that run
    whole, and on batches and other sizes that devices do not divide.
    """
    undivided = list(_undivided(stages[0]))[:_MOST_SIZES] if len(stages) == 1 else []
    return (
        *_likely_mistakes(stages),
        *_much_alike(stages),
        *_run_whole(stages),
        *_small(stages),
        *_odd_batch(stages),
        *undivided,
    )


def own_loop_note(decision: Decision, own_turns: int) -> Iterator[str]:
    """A note on the step's own loop over micro-batches, which does not run."""
    if own_turns > 1:
        count = decision.num_micro_batches
        yield (
            f"The step's own loop over {own_turns} parts of its batch does not run:"
            f" {counted(count, 'micro-batch')} of the plan {'makes' if count == 1 else 'make'} the"
            " same sums, and devices add up their gradients once a step."
        )


def block_notes(decision: Decision) -> Iterator[str]:
    """Notes on the products that a plan by blocks splits by themselves: those that belong to no
    ParallelBlock, and those of blocks for which one decision would take too long.
    """
    if "blocks" not in decision.planner:
        return
    outside, apart = [], []
    for stage in decision.stages:
        ops, nodes = stage.problem.graph.ops, stage.problem.nodes
        blocks = find_blocks(stage.problem.graph, nodes)
        outside += [named_operator(ops[op]) for op in outside_blocks(nodes, blocks)]
        parted = blocks_split_apart(stage.problem, stage.picked)
        first = {k: op for op, k in reversed(entry_operators(nodes, parted))}
        apart += [named_operator(ops[first[k]]) for k in sorted(first)]
    # Equal stages have equal products.
    outside, apart = list(dict.fromkeys(outside)), list(dict.fromkeys(apart))
    if outside:
        yield (
            f"{counted(len(outside), 'product')} in no ParallelBlock, each split by itself:"
            f" {_first_of(outside)}. Blocks hold the products with a parameter, and those of"
            " activations that one block alone makes."
        )
    if apart:
        yield (
            f"{counted(len(apart), 'ParallelBlock')} whose products are split each by itself, as"
            f" one decision would take longer: with {_first_of(apart)}."
        )


def _first_of(names: Sequence[str]) -> str:
    left = len(names) - _MOST_WHOLE
    return ", ".join(names[:_MOST_WHOLE]) + (f" and {left} more" if left > 0 else "")


def _likely_mistakes(stages: Sequence[StageDecision]) -> Iterator[str]:
    """Large arrays that the step does not take as arguments, and a step that updates nothing."""
    constants = set()
    for stage in stages:
        for constant in stage.problem.graph.constants.values():
            if hasattr(constant, "dtype"):
                constants.add(math.prod(getattr(constant, "shape", ())) * constant.dtype.itemsize)
    largest = max(constants, default=0)
    if largest >= _LARGE_BYTES:
        yield (
            f"The step holds a constant of {format_bytes(largest)}: an array that it uses and is"
            " not among its arguments. It is the same in every step and whole on every device. If"
            " it is the batch or part of the state, make it an argument."
        )
    phases = {op.phase for stage in stages for op in stage.problem.graph.ops}
    if Phase.BACKWARD in phases and Phase.UPDATE not in phases:
        yield (
            "The step computes gradients and updates nothing with them. A training step returns the"
            " new state."
        )


def idle_note(decision: Decision, cluster: Cluster) -> Iterator[str]:
    """A note on hosts that are left idle, with the step time on all hosts if that is known."""
    idle, total = decision.idle_hosts, cluster.num_hosts
    if not idle:
        return
    each, used = cluster.devices_per_host, total - idle
    times = {c.name: c.step_time_s for c in decision.candidates if c.step_time_s is not None}
    on_all_s = times.get(on_hosts(decision.method, total))
    less = ""
    if on_all_s is not None:
        share = 1 - decision.step_time_s / on_all_s
        less = f", {share:.1%} less than the {format_seconds(on_all_s)} on all {total}"
    yield (
        f"{counted(idle, 'host')}, {counted(idle * each, 'device')},"
        f" {'is' if idle == 1 else 'are'} idle: the step is faster on {counted(used, 'host')},"
        f" {format_seconds(decision.step_time_s)}{less}. MFU counts all {total * each} devices."
    )


def crowded_note(peak_bytes: float, cluster: Cluster) -> Iterator[str]:
    """A note on so much memory in use that the compiler saves it."""
    device, target = cluster.device, target_for(cluster.device)
    most = target.compact_above * device.memory_bytes
    if peak_bytes > most < device.memory_bytes:
        advice = f" For so much memory, {target.memory_advice}." if target.memory_advice else ""
        yield (
            f"The plan needs {format_bytes(peak_bytes)} on a device. Above {format_bytes(most)} XLA"
            " rematerializes: it computes some operators twice to save memory, so that time and"
            " memory may differ from these. Compile the plan before use: --verify, or verify=True,"
            f" also plans anew if it does not fit.{advice}"
        )


def memory_note(graph: Graph) -> Iterator[str]:
    """A note on state that the step returns in another memory than it takes it in."""
    moved: dict[tuple[str, str], list[str]] = defaultdict(list)
    for item in graph.inputs:
        new = graph.outputs[item.output].value if item.output is not None else None
        if isinstance(new, int):
            memories = graph.values[item.value].memory, graph.values[new].memory
            if memories[0] is not memories[1]:
                moved[memories].append(item.path)
    for (taken, returned), paths in moved.items():
        more = f" and {counted(len(paths) - 1, 'more array')}" if len(paths) > 1 else ""
        kind = "pinned_host" if returned is Memory.HOST else "device"
        yield (
            f"{paths[0]}{more} of the state: planned in {taken} memory, where their shapes lie, and"
            f" returned by the step in {returned} memory, so that each step begins by moving them"
            f" back. To keep them in {returned} memory, plan for shapes that lie there:"
            " jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding("
            f'jax.devices()[0], memory_kind="{kind}")).'
        )


def changed_state_note(graph: Graph) -> Iterator[str]:
    """A note on state that the step returns in another shape or dtype than it takes it in."""
    found = changed_state(graph)
    if found:
        more = f", and {counted(len(found) - 1, 'more array')} likewise" if len(found) > 1 else ""
        yield (
            f"The step takes {found[0]}{more}. A second step"
            f" refuses what the first has returned. {found[0].advice}"
        )


def _multiples(size: int, devices: int) -> str:
    """The multiples of a number of devices next to a size."""
    below = size - size % devices
    return f"{below} or {below + devices}" if below else f"{devices}"


def _odd_batch(stages: Sequence[StageDecision]) -> Iterator[str]:
    """Batches and micro-batches that the devices do not divide, and that do not divide the
    devices.
    """
    lines: dict[str, None] = {}
    for stage in stages:
        problem, devices = stage.problem, math.prod(stage.priced.mesh.shape)
        size = math.gcd(*problem.graph.batch_sizes)
        if size < 2 or size % devices == 0 or devices % size == 0:
            continue
        count = problem.num_micro_batches
        what = (
            f"the batch of {size}" if count == 1 else f"each of the {count} micro-batches of {size}"
        )
        whose = "devices" if len(stages) == 1 else "devices of a stage"
        even = divisors(size, most=devices)[-1]
        lines[
            f"{devices} {whose} do not divide {what}: data parallelism can use"
            f" {math.gcd(size, devices)} of them at most, and the others split something else or"
            f" repeat work. A size of {_multiples(size, devices)} would divide evenly over"
            f" {devices} devices; {size} divides evenly over {even}."
        ] = None
    yield from lines


def _much_alike(stages: Sequence[StageDecision]) -> Iterator[str]:
    alike_s: dict[str, float] = defaultdict(float)
    longest: dict[str, float] = {}
    total_s = 0.0
    for stage in stages:
        work = work_alike(stage.picked)
        for reason, seconds in work.alike_s.items():
            alike_s[reason] += seconds
        label = next(
            (
                named_operator(op)
                for op in stage.problem.graph.ops
                if f"{op.name}:{op.index}" == work.longest
            ),
            work.longest,
        )
        longest[label] = max(longest.get(label, 0.0), work.alike_s.get(REPLICATED_BY_PLAN, 0.0))
        total_s += work.total_s
    share = sum(alike_s.values()) / total_s if total_s else 0.0
    if share > _ALIKE:
        largest = sorted(alike_s.items(), key=lambda item: -item[1])
        first = max(longest, key=lambda label: longest[label])
        named = {REPLICATED_BY_PLAN: f", the longest {first}"} if first else {}
        parts = ", ".join(
            f"{reason} ({s / total_s:.0%}{named.get(reason, '')})"
            for reason, s in largest
            if s > 0.01 * total_s
        )
        yield f"{share:.0%} of the compute is replicated (the same on every device): {parts}."


def _run_whole(stages: Sequence[StageDecision]) -> Iterator[str]:
    lines = []
    for stage in stages:
        priced, graph = stage.priced, stage.problem.graph
        if math.prod(priced.axis_sizes) == 1:
            continue
        gathered: dict[str, float] = defaultdict(float)
        for use in collective_uses(stage.picked) if priced.graph.whole else ():
            if use.kind == "all-gather":
                gathered[use.label] += use.num_bytes
        for op in priced.graph.whole:
            if op.num_bytes < _LARGE_BYTES:
                continue
            times = op.count * (1 if op.phase is Phase.UPDATE else priced.repeats)
            where = source_line(graph.ops[op.index])
            why = (
                "its rule lets no dim be split"
                if op.declared
                else "it has no rule, and none was found"
            )
            lines.append(
                (
                    -op.num_bytes * times,
                    (
                        f"{op.label}{f' ({where})' if where else ''} runs whole on every device, as"
                        f" {why}: {format_bytes(op.num_bytes)} each time, {times:g} times a step;"
                        f" {format_bytes(gathered[op.label]) if gathered[op.label] else 'nothing'}"
                        " is gathered for it in a step."
                    ),
                )
            )
    lines.sort(key=lambda line: line[0])
    # Equal stages give the same text.
    texts = list(dict.fromkeys(text for _, text in lines))
    yield from texts[:_MOST_WHOLE]
    if len(texts) > _MOST_WHOLE:
        yield f"{len(texts) - _MOST_WHOLE} more large operators run whole on every device."


def _small(stages: Sequence[StageDecision]) -> Iterator[str]:
    """Small arrays that hold fewer rows than the batch, by their number of rows."""
    texts: dict[int, str] = {}
    for stage in stages:
        graph = stage.problem.graph
        for op, rows in stage.problem.nodes.small if math.prod(stage.priced.axis_sizes) > 1 else ():
            where = source_line(graph.ops[op])
            texts.setdefault(
                rows,
                f"{graph.ops[op].name}:{op}{f' ({where})' if where else ''} makes"
                f" {counted(rows, 'row')} of the batch. Arrays of that many rows are small, and"
                " every device computes them whole.",
            )
    yield from texts.values()


def _undivided(stage: StageDecision) -> Iterator[str]:
    """Sizes of dims of large inputs that no axis of the mesh divides, those of parameters first."""
    problem, sizes = stage.problem, stage.priced.mesh.shape
    dims: dict[int, list[str]] = defaultdict(list)
    pairs = list(zip(problem.graph.inputs, problem.nodes.input_ports, strict=True))
    for item, port in sorted(pairs, key=lambda pair: pair[0].role is not Role.PARAMETER):
        value = problem.graph.values[item.value]
        if port.node < 0 or value.num_bytes < _LARGE_BYTES:
            continue
        for dim, size in enumerate(value.shape):
            if size > 1 and all(size % n for n in sizes):
                dims[size].append(f"dim {dim} of {item.path}")
    for size, found in dims.items():
        others = len(found) - 1
        more = f" and {others} more dim{'s' if others > 1 else ''} of that size" if others else ""
        yield (
            f"No axis of the mesh {stage.priced.mesh} divides {size}: {found[0]}{more}"
            f" {'stay' if others else 'stays'} whole."
        )
