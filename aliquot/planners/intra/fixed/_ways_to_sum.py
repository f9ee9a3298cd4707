"""When a method of fixed splits sums the gradients of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from ._fixed import Fixed
from ._megatron import MegatronSplit

_Rule = TypeVar("_Rule", Fixed, MegatronSplit)


def ways_to_sum(
    rule: _Rule, waiting: Sequence[frozenset[int]], *, splits: bool, repeats: int
) -> Iterator[tuple[frozenset[int], _Rule]]:
    """The ways in which gradients may be summed, each with the axes over which they wait for the
    last micro-batch, and the rule of that way.

    Gradients that wait accumulate whole. If these do not fit, each micro-batch adds to accumulators
    that are sharded; then parameters are not gathered once either.

    Args:
        waiting: axes over which gradients may wait; none if the step cannot.
        splits: whether the method shards gradients where they do not wait.
        repeats: number of micro-batches.
    """
    for axes in waiting:
        yield axes, rule
    if splits or not waiting:
        yield frozenset(), replace(rule, gathers_once=rule.gathers_once and repeats == 1)
