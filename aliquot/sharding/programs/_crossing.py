"""Values of a micro-batch that cross between neighbouring stages, as the programs of the stages
exchange them: the bytes that planners and the judge price.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...graph import SHARED, Graph, Phase, StageId, Staging, ValueId, sums_for_the_update


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Crossing:
    """Values that cross each cut between neighbouring stages, one entry for each cut.

    A value that a stage further away reads crosses every cut on the way.

    Attributes:
        forward: values sent to later stages.
        backward: gradients sent to earlier stages.
        graph: the graph of these values, at the size of one micro-batch.
    """

    forward: tuple[frozenset[ValueId], ...]
    backward: tuple[frozenset[ValueId], ...]
    graph: Graph = field(repr=False)

    @property
    def forward_bytes(self) -> tuple[float, ...]:
        """Bytes to the later stages across each cut."""
        return self._bytes(self.forward)

    @property
    def backward_bytes(self) -> tuple[float, ...]:
        """Bytes to the earlier stages across each cut."""
        return self._bytes(self.backward)

    def _bytes(self, cuts: tuple[frozenset[ValueId], ...]) -> tuple[float, ...]:
        values = self.graph.values
        return tuple([float(sum([values[v].num_bytes for v in cut])) for cut in cuts])


def find_crossing(graph: Graph, staging: Staging) -> Crossing:
    """Values that neighbouring stages exchange for each micro-batch.

    Results of shared items do not cross, because each stage computes them. Neither do terms of the
    gradient of a parameter that several stages use, which are added up once, in the update.

    Args:
        graph: the step at the size of one micro-batch.
    """
    made_by: dict[ValueId, StageId] = {}
    late = sums_for_the_update(graph, staging.items)
    num_cuts = staging.num_stages - 1
    forward: list[set[ValueId]] = [set() for _ in range(num_cuts)]
    backward: list[set[ValueId]] = [set() for _ in range(num_cuts)]
    for k, (item, stage) in enumerate(zip(staging.items, staging.stage, strict=True)):
        if stage == SHARED or item.phase is Phase.UPDATE or k in late:
            continue
        for value in item.inputs:
            maker = made_by.get(value, stage)
            # Cut k lies between stages k and k + 1.
            for cut in range(maker, stage):
                forward[cut].add(value)
            for cut in range(stage, maker):
                backward[cut].add(value)
        made_by.update(dict.fromkeys(item.outputs, stage))
    return Crossing(
        forward=tuple(map(frozenset, forward)),
        backward=tuple(map(frozenset, backward)),
        graph=graph,
    )
