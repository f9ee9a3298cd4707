"""Notes of a plan: operators and arrays that are not split although a reader might expect it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ..core import format_bytes
from ..cost import collective_uses, work_alike
from ..graph import Phase, source_line
from ._base import StageDecision

_LARGE_BYTES = 1 << 20
_ALIKE = 0.1
_MOST = 20
_MOST_WHOLE = 5


def notes(stages: Sequence[StageDecision]) -> tuple[str, ...]:
    """Notes on replicated work, if it is much, on large operators that run whole, and on dims that
    are not split.
    """
    undivided = list(_undivided(stages[0]))[:_MOST] if len(stages) == 1 else []
    return (*_much_alike(stages), *_run_whole(stages), *undivided)


def _much_alike(stages: Sequence[StageDecision]) -> Iterator[str]:
    alike_s: dict[str, float] = defaultdict(float)
    total_s = 0.0
    for stage in stages:
        work = work_alike(stage.priced, stage.picks)
        for reason, seconds in work.alike_s.items():
            alike_s[reason] += seconds
        total_s += work.total_s
    share = sum(alike_s.values()) / total_s if total_s else 0.0
    if share > _ALIKE:
        largest = sorted(alike_s.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{reason} ({s / total_s:.0%})" for reason, s in largest if s > 0.01 * total_s)
        yield f"{share:.0%} of the computing is replicated, done by every device alike: {parts}."


def _run_whole(stages: Sequence[StageDecision]) -> Iterator[str]:
    lines = []
    for stage in stages:
        priced, picks, graph = stage.priced, stage.picks, stage.problem.graph
        if math.prod(priced.axis_sizes) == 1:
            continue
        gathered: dict[str, float] = defaultdict(float)
        for use in collective_uses(priced, picks) if priced.graph.whole else ():
            if use.kind == "all-gather":
                gathered[use.label] += use.num_bytes
        for op in priced.graph.whole:
            if op.num_bytes < _LARGE_BYTES:
                continue
            times = op.count * (1 if op.phase is Phase.UPDATE else priced.repeats)
            where = source_line(graph.ops[op.index])
            why = "its rule lets no dim be split" if op.declared else "it has no rule, and none was found"
            lines.append(
                (
                    -op.num_bytes * times,
                    f"{op.label}{f' ({where})' if where else ''} runs whole on every device, as {why}: "
                    f"{format_bytes(op.num_bytes)} each time, {times:g} times a step; "
                    f"{format_bytes(gathered[op.label]) if gathered[op.label] else 'nothing'} is gathered for it in a step.",
                )
            )
    lines.sort(key=lambda line: line[0])
    # Equal stages say the same.
    texts = list(dict.fromkeys(text for _, text in lines))
    yield from texts[:_MOST_WHOLE]
    if len(texts) > _MOST_WHOLE:
        yield f"{len(texts) - _MOST_WHOLE} more large operators run whole on every device."


def _undivided(stage: StageDecision) -> Iterator[str]:
    """Dims of inputs that no axis of the mesh divides."""
    problem, sizes = stage.problem, stage.priced.mesh.shape
    for item, port in zip(problem.graph.inputs, problem.nodes.input_ports, strict=True):
        value = problem.graph.values[item.value]
        if port.node < 0 or value.num_bytes < _LARGE_BYTES:
            continue
        for dim, size in enumerate(value.shape):
            stuck = [n for n in sizes if size % n]
            if size > 1 and len(stuck) == len(sizes):
                yield (
                    f"{item.path}: dim {dim} of size {size} is not split; no axis of the mesh "
                    f"{'x'.join(map(str, sizes))} divides it."
                )
