"""Comparison of the calls of one step with those of the other processes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import jax
import numpy as np
from jax.sharding import Sharding

from ..graph import Graph, Role
from ._arguments import types_of
from .transport import Call, Given, agree_on_arrays, describe, watched

# Batches are read in full in the first calls, and in each 64th those on the host; the others read a
# sample of a large one.
_FIRST, _EACH = 3, 64
# How many arrays a report describes one by one.
_ALONE = 64


class SameCalls:
    """Compares what this process passes in the calls of one step with what the others pass.

    Args:
        graph: the step.
        homes: where it needs each of its inputs, which may be on several stages.
    """

    def __init__(self, graph: Graph, homes: Sequence[tuple[Sharding, ...]]) -> None:
        self._name, self._number = graph.name, 0
        self._inputs = [
            (item.path, item.role, shape, dtype, home)
            for item, (shape, dtype), home in zip(graph.inputs, types_of(graph), homes, strict=True)
        ]

    def compare(self, leaves: Sequence[Any]) -> None:
        """Report a call, before it is made. The first one waits for all other processes.

        If a later call differs, process 0 ends all processes as soon as it has heard of it. Without
        `initialize` nobody hears of later calls.

        Raises:
            PlanMismatchError: the arrays of the first call differ; in every process.
        """
        number = self._number
        self._number += 1
        # Processes may round differently what they compute alike, so results are not compared.
        known = itertools.chain.from_iterable(_made.values() if number == 0 else ())
        made = {id(array()) for array in known}
        given = {}
        for leaf, (path, role, shape, dtype, home) in zip(leaves, self._inputs, strict=True):
            if id(leaf) in made:
                continue
            is_state = role in (Role.PARAMETER, Role.OPTIMIZER_STATE, Role.STATE)
            is_early = number == 0 or (number < _FIRST and not is_state)
            described = describe(
                leaf,
                shape,
                dtype,
                home,
                is_state=is_state,
                in_full=is_early or (number % _EACH == 0 and isinstance(leaf, np.ndarray)),
            )
            if described is not None:
                given[path] = described
        peers = watched()
        if peers is not None:
            what = f"call {number + 1} of {self._name}"
            peers.report(Call(what=what, given=_shortened(given) if number else {}))
        if number == 0:
            agree_on_arrays(given)


def _shortened(given: dict[str, Given]) -> dict[str, Given]:
    """Descriptions that fit into one message: of many arrays, as when a state comes from the host,
    most have a digest together.
    """
    # Batches are the arguments after the state.
    paths = [*given]
    together = [path for path in paths[:-_ALONE] if given[path].rows != "own"]
    if not together:
        return {path: given[path] for path in paths[-_ALONE:]}
    text = "\n".join(f"{path} {given[path]} {given[path].digests}" for path in together)
    name = f"one of {len(together)} arrays from {together[0]} on"
    digest = hashlib.sha256(text.encode()).hexdigest()
    rest = Given(
        kind="[]",
        digests={"": digest[:16]},
        is_restored=any(given[path].is_restored for path in together),
    )
    return {name: rest, **{path: given[path] for path in paths[-_ALONE:]}}


# The arrays that the last call of each step, and its `init`, returned.
_made: WeakKeyDictionary[Any, list[ref[Any]]] = WeakKeyDictionary()


def remember(maker: Any, arrays: Sequence[Any]) -> None:
    """Note that `maker` returned these arrays; forgets what it returned before."""
    _made[maker] = [ref(array) for array in arrays if isinstance(array, jax.Array)]
