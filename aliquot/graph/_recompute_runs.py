"""Runs of recomputed operators in a backward pass: each is recomputed together, when the gradient
arrives that is used with its results.

A compiler might run all recomputed operators at once and hold their results. `jax.checkpoint`
prevents that by an optimization barrier that ties recomputed values to the incoming gradient; a
pipeline's backward program does the same for each run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ._dataflow import Item, made_at, made_by
from ._types import ValueId


class RecomputedRun(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Forward items that a backward pass recomputes together.

    Attributes:
        items: in program order.
        after: number of the backward pass's own items that run before them.
        gradient: the value of the backward pass for which they wait; None if they need not wait.
    """

    items: tuple[Item, ...]
    after: int
    gradient: ValueId | None


def recomputed_runs(
    recomputed: Sequence[Item], backward: Sequence[Item]
) -> tuple[RecomputedRun, ...]:
    """The runs of recomputed items in a backward pass, in order.

    Each recomputed item waits for a gradient: of those that are read together with values that
    depend on the item, the last one that is made before the item's first use.

    Args:
        recomputed: forward items, in program order.
        backward: the pass's own items, in program order.
    """
    # For each recomputed item the position of the first backward item that reads its results,
    # directly or through other recomputed items; 0 if none does.
    first_read: dict[ValueId, int] = {}
    for k, one in enumerate(backward):
        for i in one.inputs:
            first_read.setdefault(i, k)
    first_uses: list[int] = []
    for one in reversed(recomputed):
        first = min((first_read[o] for o in one.outputs if o in first_read), default=0)
        first_uses.append(first)
        for i in one.inputs:
            first_read[i] = min(first_read.get(i, first), first)
    first_uses = first_uses[::-1]
    places = made_at(backward)
    by_first_use: dict[int, list[Item]] = {}
    for item, use in zip(recomputed, first_uses, strict=True):
        by_first_use.setdefault(use, []).append(item)
    gradient_for = {}
    for use, items in by_first_use.items():
        gradient_for[use] = _awaited_gradient(items, use, backward, places)
    # Runs by the position of the backward item that makes their gradient; -1 without one.
    runs: dict[int, list[Item]] = {}
    run_of: dict[ValueId, int] = {}
    for item, use in zip(recomputed, first_uses, strict=True):
        gradient = gradient_for[use]
        # An item cannot run before the recomputed items whose results it reads.
        start = max((run_of[i] for i in item.inputs if i in run_of), default=-1)
        if gradient is not None:
            start = max(start, places[gradient])
        run_of |= dict.fromkeys(item.outputs, start)
        runs.setdefault(start, []).append(item)
    gradient_at = {places[g]: g for g in gradient_for.values() if g is not None}
    return tuple(
        RecomputedRun(items=tuple(runs[start]), after=start + 1, gradient=gradient_at.get(start))
        for start in sorted(runs)
    )


def _awaited_gradient(
    recomputed: Sequence[Item], use: int, backward: Sequence[Item], places: Mapping[ValueId, int]
) -> ValueId | None:
    """The gradient for which recomputed items wait if the first reader of their results is backward
    item `use`; None if there is none.
    """
    dependent = made_by(recomputed)
    for item in backward[use:]:
        if dependent.isdisjoint(item.inputs):
            continue
        ready = [i for i in item.inputs if places.get(i, use) < use]
        if ready:
            return max(ready, key=lambda i: (places[i], i))
        dependent.update(item.outputs)
    return None


def most_at_once(
    runs: Sequence[RecomputedRun], backward: Sequence[Item], num_bytes: dict[ValueId, float]
) -> float:
    """The most bytes of recomputed values that are alive at once; each is alive from its run to its
    last reader.

    Args:
        num_bytes: of each recomputed value; values without an entry count as 0.
    """
    last_read: dict[ValueId, int] = {}
    for k, item in enumerate(backward):
        last_read.update(dict.fromkeys(item.inputs, k))
    starts: dict[ValueId, int] = {}
    for run in runs:
        starts.update(dict.fromkeys(made_at(run.items), run.after))
    for run in runs:
        for item in run.items:
            for i in item.inputs:
                last_read[i] = max(last_read.get(i, 0), run.after)
    change = [0.0] * (len(backward) + 2)
    for value, start in starts.items():
        change[start] += num_bytes.get(value, 0.0)
        change[max(last_read.get(value, start), start) + 1] -= num_bytes.get(value, 0.0)
    alive = most = 0.0
    for difference in change:
        alive += difference
        most = max(most, alive)
    return most
