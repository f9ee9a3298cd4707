"""State that a step returns in another shape or dtype than it takes it in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ._matching import Keys
from ._types import Graph, Input, Literal, Operand, Phase, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedState:
    """An array of the state, as the step takes it and as it returns it: `float32[8, 8]`."""

    path: str
    taken: str
    returned: str

    def __str__(self) -> str:
        return f"{self.path} as {self.taken} and returns it as {self.returned}"

    @property
    def advice(self) -> str:
        """What to change, as a sentence."""
        if self.taken.partition("[")[2] != self.returned.partition("[")[2]:
            return f"Return {self.taken}: state of another shape needs another plan."
        return (
            f"Return {self.taken}, as by astype, or plan for {self.returned} and begin with that."
        )


def changed_state(graph: Graph) -> list[ChangedState]:
    """Arrays that stand at the same place of the state in the step's arguments and in its result,
    with another shape or dtype: what a step returns cannot be given to the same step again.
    """
    found = []
    for item, output in _pairs(graph):
        taken, returned = _kind(graph, item.value), _kind(graph, graph.outputs[output].value)
        if taken != returned:
            found.append(ChangedState(path=item.path, taken=taken, returned=returned))
    return found


def _pairs(graph: Graph) -> Iterator[tuple[Input, int]]:
    """Inputs of the state, each with the position of the output that has its place."""
    calling = graph.calling
    if calling is None or len(calling.call.parts) != len(graph.inputs):
        return
    outputs = {keys: k for k, keys in enumerate(calling.out_parts)}
    arguments: dict[str, list[int]] = {}
    for k, keys in enumerate(calling.call.parts):
        arguments.setdefault(keys[0], []).append(k)
    claimed = {item.output for item in graph.inputs if item.output is not None}
    for name, positions in arguments.items():
        places = [calling.call.parts[k] for k in positions]
        items = [graph.inputs[k] for k in positions]
        root = _root_of_matched(places, items, calling.out_parts)
        if root is None:
            free = {keys: k for keys, k in outputs.items() if k not in claimed}
            root = _root_of_unmatched(graph, places, items, free)
        for keys, item in zip(places, items, strict=True):
            if item.output is not None:
                yield item, item.output
            elif root is not None and name not in calling.modules:
                output = outputs.get(root + keys[1:])
                if output is not None and output not in claimed:
                    claimed.add(output)
                    yield item, output


def _root_of_matched(
    places: Sequence[Keys], items: Sequence[Input], out_parts: Sequence[Keys]
) -> Keys | None:
    """The part of the result that takes an argument's place, from arrays that were matched."""
    for keys, item in zip(places, items, strict=True):
        if item.output is not None and item.output < len(out_parts):
            inner, result = keys[1:], out_parts[item.output]
            if inner and result[-len(inner) :] == inner:
                return result[: -len(inner)]
    return None


def _root_of_unmatched(
    graph: Graph, places: Sequence[Keys], items: Sequence[Input], outputs: dict[Keys, int]
) -> Keys | None:
    """The same of an argument of which no array was matched: the one part of the result with its
    places and shapes that the update makes.
    """
    first, makers = places[0][1:], graph.makers
    # A single array of the batch may be among the metrics.
    is_batch = not first and items[0].role is Role.BATCH
    if is_batch or any(item.output is not None for item in items):
        return None
    roots = []
    for keys in outputs:
        root = keys[: len(keys) - len(first)]
        if root + first != keys:
            continue
        made = [outputs.get(root + place[1:]) for place in places]
        news = [graph.outputs[k].value for k in made if k is not None]
        shapes = [_shape(graph, item.value) for item in items]
        if [_shape(graph, new) for new in news] == shapes and all(
            new in makers and makers[new].phase is Phase.UPDATE
            for new in news
            if not isinstance(new, Literal)
        ):
            roots.append(root)
    return roots[0] if len(roots) == 1 else None


def _shape(graph: Graph, operand: Operand) -> tuple[int, ...]:
    return operand.shape if isinstance(operand, Literal) else graph.values[operand].shape


def _kind(graph: Graph, operand: Operand) -> str:
    dtype = operand.dtype if isinstance(operand, Literal) else graph.values[operand].dtype
    return f"{dtype}[{', '.join(map(str, _shape(graph, operand)))}]"
