"""Matching of a step's results to the arguments that they replace in the next step: new parameters
to parameters, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from ._roles import Reach
from ._types import Literal, Op, Operand, Output, Phase, Value, ValueId, value_ids

Keys: TypeAlias = tuple[str, ...]
"""A pytree path, key by key; that of an argument begins with its name."""

_MAX_DEPTH = 3


def match_state(
    ops: Sequence[Op],
    values: Sequence[Value],
    inputs: Sequence[tuple[Keys, ValueId]],
    outputs: Sequence[tuple[Keys, Output]],
    reach: Reach,
    trains: bool,
) -> dict[int, int]:
    """Position of the successor among `outputs`, for each position in `inputs` that has one.

    An argument is state if some part of the result has its structure, shapes and dtypes, and if the
    dataflow agrees: gradients look like parameters, but no parameter is added to them outside of
    the forward and backward pass. Arguments without a match as a whole are matched part by part,
    under the same key. Among several candidates, names decide, then order. Arrays of a batch that a
    step returns beside its metrics, such as labels, are no state.
    """
    groups: dict[Keys, list[int]] = {}
    for position, (keys, _) in enumerate(inputs):
        groups.setdefault(keys[:1], []).append(position)
    matcher = _Matcher(ops, values, inputs, outputs, reach, trains)
    for depth in range(1, _MAX_DEPTH + 1):
        waiting = matcher.assign(groups)
        groups = {}
        for positions in waiting.values():
            for position in positions:
                keys = inputs[position][0]
                if len(keys) > depth:
                    groups.setdefault(keys[: depth + 1], []).append(position)
    returned = _returned_parts_of_batches(values, inputs, matcher.matched, reach)
    found = {}
    for position, successor in matcher.matched.items():
        if position not in returned:
            found[position] = successor
    return found


def _returned_parts_of_batches(
    values: Sequence[Value],
    inputs: Sequence[tuple[Keys, ValueId]],
    matched: dict[int, int],
    reach: Reach,
) -> set[int]:
    """Positions of matched inputs that are no state, because their argument looks like a batch:
    another argument has matched arrays, too, some arrays of this one are unmatched, and all its
    arrays have the same first dim.
    """
    arguments: dict[str, list[int]] = {}
    for position, (keys, _) in enumerate(inputs):
        arguments.setdefault(keys[0], []).append(position)
    returned: set[int] = set()
    for positions in arguments.values():
        mine = matched.keys() & positions
        arrays = []
        for p in positions:
            if values[inputs[p][1]].shape and not reach.key[inputs[p][1]]:
                arrays.append(p)
        sizes = {values[inputs[p][1]].shape[0] for p in arrays}
        if (
            mine
            and not mine.issuperset(arrays)
            and len(mine) < len(matched)
            and len(sizes) == 1
            and mine.issubset(arrays)
        ):
            returned |= mine
    return returned


class _Matcher:
    """Matches groups of inputs (arguments, or parts of them) to parts of the result that have the
    same structure, shapes and dtypes.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        values: Sequence[Value],
        inputs: Sequence[tuple[Keys, ValueId]],
        outputs: Sequence[tuple[Keys, Output]],
        reach: Reach,
        trains: bool,
    ) -> None:
        self._ops, self._values, self._inputs, self._outputs = ops, values, inputs, outputs
        self._reach, self._trains = reach, trains
        self._taken: set[int] = set()
        self.matched: dict[int, int] = {}
        parts: dict[Keys, list[int]] = {}
        for position, (keys, _) in enumerate(outputs):
            # Every part of the result may be a successor; at depth 0, the part is all of it.
            for depth in range(min(_MAX_DEPTH, len(keys)) + 1):
                parts.setdefault(keys[:depth], []).append(position)
        self._prefixes: dict[tuple[Any, ...], list[tuple[Keys, list[int]]]] = {}
        for prefix, positions in parts.items():
            signature = tuple(
                (outputs[p][0][len(prefix) :], self._kind(outputs[p][1].value)) for p in positions
            )
            self._prefixes.setdefault(signature, []).append((prefix, positions))

    def assign(self, groups: dict[Keys, list[int]]) -> dict[Keys, list[int]]:
        """Match as many groups as possible; returns the unmatched ones."""
        direct = self._direct(groups)
        options: dict[Keys, list[tuple[Keys, list[int]]]] = {}
        for number, (prefix, positions) in enumerate(groups.items()):
            signature = tuple(
                (self._inputs[p][0][len(prefix) :], self._kind(self._inputs[p][1]))
                for p in positions
            )
            options[prefix] = [
                (name, successors)
                for name, successors in self._prefixes.get(signature, [])
                if self._fits(prefix, name, positions, successors, direct, 1 << number)
            ]
        while True:
            free = {}
            for name, possible in options.items():
                left = [option for option in possible if self._taken.isdisjoint(option[1])]
                if left:
                    free[name] = left
            choice = _choose(free)
            if choice is None:
                return {prefix: groups[prefix] for prefix in options}
            prefix, successors = choice
            self._taken.update(successors)
            self.matched.update(zip(groups[prefix], successors, strict=True))
            del options[prefix]

    def _kind(self, operand: Operand) -> tuple[Any, ...]:
        array = self._values[operand] if isinstance(operand, int) else operand
        return array.shape, array.dtype

    def _direct(self, groups: dict[Keys, list[int]]) -> list[int]:
        """For each value, a bit mask of the groups on which it depends through operators outside of
        the forward and backward pass.
        """
        direct = [0] * len(self._values)
        for number, positions in enumerate(groups.values()):
            for position in positions:
                direct[self._inputs[position][1]] |= 1 << number
        for op in self._ops:
            if op.phase is Phase.UPDATE or op.phase is Phase.PROLOGUE:
                bits = 0
                for i in op.inputs:
                    if type(i) is not Literal:
                        bits |= direct[i]
                if bits:
                    for out in op.outputs:
                        if out >= 0:
                            direct[out] |= bits
        return direct

    def _fits(
        self,
        prefix: Keys,
        name: Keys,
        positions: list[int],
        candidates: list[int],
        direct: list[int],
        bit: int,
    ) -> bool:
        """True if names and dataflow permit the result's part `name` as the successor of the group
        `prefix`.
        """
        values = [self._outputs[p][1].value for p in candidates]
        indices = value_ids(values)
        same_name = _last(prefix) == _last(name)
        inner = len(prefix) > 1
        lone = len(positions) == 1
        # New random keys depend on old ones through no sum: names decide.
        if lone and self._reach.key[self._inputs[positions[0]][1]]:
            return not inner or same_name
        if inner and not same_name:
            return False
        if not self._trains:
            return not lone or same_name
        carried = any(direct[v] & bit for v in indices)
        if lone and len(self._inputs[positions[0]][0]) == len(prefix):
            return carried
        # Gradients have the structure of parameters, but come only from the backward pass.
        return carried or not (indices and all(self._reach.backward[v] for v in indices))


def _choose(options: dict[Keys, list[tuple[Keys, list[int]]]]) -> tuple[Keys, list[int]] | None:
    """The next match to make: one with equal names, else a group's only option, else the first."""
    for prefix, successors in options.items():
        for name, positions in successors:
            if _last(prefix) == _last(name):
                return prefix, positions
    for prefix, successors in options.items():
        if len(successors) == 1:
            return prefix, successors[0][1]
    for prefix, successors in options.items():
        return prefix, successors[0][1]
    return None


def _last(keys: Keys) -> str:
    return keys[-1].strip(".[]'") if keys else ""
