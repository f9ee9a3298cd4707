"""Runs of a backward pass: operators that are worked out again together, once the gradient is there
that needs them.

A compiler that meets recomputed operators may run all of them at once and hold their results.
`jax.checkpoint` ties what it recomputes to the incoming gradient by an optimization barrier; so
does a pipeline's backward program, for each run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ._dataflow import Item
from ._types import ValueId


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecomputedRun:
    """Items that are worked out again together.

    Attributes:
        items: in program order.
        after: how many of the backward pass's own items run before them.
        gradient: the value of the backward pass that they wait for; None if they wait for nothing.
    """

    items: tuple[Item, ...]
    after: int
    gradient: ValueId | None


def runs_again(again: Sequence[Item], backward: Sequence[Item]) -> tuple[RecomputedRun, ...]:
    """The runs of a backward pass, in order.

    Each item waits for the last gradient that enters the operators behind it and is there before
    the first of them.

    Args:
        again: forward items that are worked out again, in program order.
        backward: the pass's own items, in program order.
    """
    first_read: dict[ValueId, int] = {}
    for k, item in enumerate(backward):
        for i in item.inputs:
            first_read.setdefault(i, k)
    first: list[int] = []
    for item in reversed(again):
        use = min((first_read[o] for o in item.outputs if o in first_read), default=0)
        first.append(use)
        for i in item.inputs:
            first_read[i] = min(first_read.get(i, use), use)
    first.reverse()
    made_at = {o: k for k, item in enumerate(backward) for o in item.outputs}
    gradients = {
        use: _gradient(
            [i for i, f in zip(again, first, strict=True) if f == use], use, backward, made_at
        )
        for use in dict.fromkeys(first)
    }
    members: dict[int, list[Item]] = {}
    starts: dict[ValueId, int] = {}
    for item, use in zip(again, first, strict=True):
        gradient = gradients[use]
        own = -1 if gradient is None else made_at[gradient]
        start = max([own, *(starts[i] for i in item.inputs if i in starts)])
        starts |= dict.fromkeys(item.outputs, start)
        members.setdefault(start, []).append(item)
    waits_for = {made_at[g]: g for g in gradients.values() if g is not None}
    return tuple(
        RecomputedRun(items=tuple(members[start]), after=start + 1, gradient=waits_for.get(start))
        for start in sorted(members)
    )


def _gradient(
    again: Sequence[Item], use: int, backward: Sequence[Item], made_at: dict[ValueId, int]
) -> ValueId | None:
    """The gradient that some items wait for, of which item `use` is the first reader."""
    behind = {o for item in again for o in item.outputs}
    for item in backward[use:]:
        if behind.isdisjoint(item.inputs):
            continue
        ready = [i for i in item.inputs if made_at.get(i, use) < use]
        if ready:
            return max(ready, key=lambda i: (made_at[i], i))
        behind.update(item.outputs)
    return None


def most_at_once(
    runs: Sequence[RecomputedRun], backward: Sequence[Item], num_bytes: dict[ValueId, float]
) -> float:
    """The most bytes of recomputed values that are there at once, each from its run to the last
    operator that reads it.

    Args:
        num_bytes: of each value that counts.
    """
    last_read = {i: k for k, item in enumerate(backward) for i in item.inputs}
    starts = {o: run.after for run in runs for item in run.items for o in item.outputs}
    for run in runs:
        for item in run.items:
            for i in item.inputs:
                last_read[i] = max(last_read.get(i, 0), run.after)
    change = [0.0] * (len(backward) + 2)
    for value, start in starts.items():
        change[start] += num_bytes.get(value, 0.0)
        change[max(last_read.get(value, start), start) + 1] -= num_bytes.get(value, 0.0)
    held = most = 0.0
    for step in change:
        held += step
        most = max(most, held)
    return most
