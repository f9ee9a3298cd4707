"""`Picked`: a choice for every node of a priced problem, and what follows from these choices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..graph import Memory, Phase
from ..sharding import Choice, Node, shards_of
from ._priced import Ints, Priced, PricedNode
from ._work import Work
from .memory import Held, MemoryUse, memory_model, takes_turns


@dataclass(frozen=True, kw_only=True, eq=False)
class Picked:
    """A priced problem with a choice for every node.

    What follows from the choices is computed when it is first asked for, and kept. Searches that
    look at many choices make a new record for each, and keep only the best.

    Attributes:
        picks: for each node, the row of its choice in the table of its priced choices.
    """

    priced: Priced
    picks: Ints

    @classmethod
    def first(cls, priced: Priced) -> Picked:
        """The first choice of every node: the only one, where a plan's choices alone are priced."""
        return cls(priced=priced, picks=np.zeros(len(priced.nodes), np.int64))

    @classmethod
    def of_choices(cls, priced: Priced, choices: Sequence[Choice]) -> Picked:
        """The reverse of `choices`, each of which must be among those that were priced."""
        picks = [
            int(np.flatnonzero((table.choices == np.array(choice)).all(axis=1))[0])
            for table, choice in zip(priced.nodes, choices, strict=True)
        ]
        return cls(priced=priced, picks=np.array(picks, np.int64))

    def rows(self) -> Iterator[tuple[PricedNode, int]]:
        """Each node's table, and the row that is picked in it."""
        return zip(self.priced.nodes, self.picks.tolist(), strict=True)

    def works(self) -> Iterator[tuple[Node, Work, list[int], Ints]]:
        """All work of all nodes, with the sizes of the node's factors, and its choice as a table
        of one row.
        """
        nodes = zip(self.priced.graph.nodes, self.priced.work, self.rows(), strict=True)
        for node, node_work, (table, pick) in nodes:
            sizes = [factor.size for factor in node.factors]
            for work in node_work:
                yield node, work, sizes, table.choices[pick : pick + 1]

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """For each node, the factor that each mesh axis splits, or -1."""
        return tuple([tuple(table.choices[pick].tolist()) for table, pick in self.rows()])

    @cached_property
    def ends(self) -> list[tuple[int, int]]:
        """For each edge, the positions in its table of the splits at its source and target."""
        picks = self.picks.tolist()
        return [
            (int(table.source_index[picks[e.source]]), int(table.target_index[picks[e.target]]))
            for e, table in zip(self.priced.graph.edges, self.priced.edges, strict=True)
        ]

    @cached_property
    def conversions(self) -> dict[tuple[int, int, int], float]:
        """Every distinct conversion that choices cause: `(edge, source split, target split) ->
        seconds`.

        Of the edges that share a conversion, the first stands for all.
        """
        seen: set[tuple[object, ...]] = set()
        by_edge: dict[tuple[int, int, int], float] = {}
        edges = zip(self.priced.graph.edges, self.priced.edges, self.ends, strict=True)
        for edge, table, (s, t) in edges:
            if table.sources[s] == table.targets[t]:
                continue
            identity = (edge.share, table.sources[s], table.targets[t])
            if identity not in seen:
                seen.add(identity)
                by_edge[edge.index, s, t] = float(table.seconds[s, t])
        return by_edge

    @cached_property
    def memory(self) -> MemoryUse:
        """What a device holds if casts of parameters are not kept for the whole step."""
        return memory_model(self.priced, in_turn=takes_turns(self)).under(self)

    @cached_property
    def host_memory(self) -> MemoryUse:
        """What is held in host memory, for each device."""
        return memory_model(self.priced, in_turn=False, memory=Memory.HOST).under(self)

    @cached_property
    def casts_s(self) -> tuple[float, float]:
        """What the forward and the backward pass of a micro-batch take longer if they cast
        parameters themselves, and no casts are kept for the whole step.
        """
        seconds = np.zeros(len(Phase))
        for node, pick in self.rows():
            seconds += node.casts[:, pick] / self.priced.repeats
        forward = float(seconds[Phase.PROLOGUE] + seconds[Phase.FORWARD])
        return forward, float(seconds[Phase.BACKWARD])

    def casts_fit(self, memory_limit_bytes: float, memory: MemoryUse | None = None) -> bool:
        """Whether a program casts parameters once a step: there are casts, and memory to keep them.

        Args:
            memory: `memory`, if it is known already.
        """
        if not sum(self.casts_s):
            return False
        # What is gathered once is kept; a search has counted its memory.
        if self.priced.use.gathers_once:
            return True
        return (memory or self.memory).keeping_casts.peak_bytes <= memory_limit_bytes

    def bytes_on_device(self, arrays: Iterable[Held]) -> float:
        """Bytes of arrays on each device."""
        total_bytes = 0.0
        for array in arrays:
            num_shards = 1
            if array.node >= 0:
                split_by = tuple([dim >= 0 for dim in array.projection])
                num_shards = shards_of(self.choices[array.node], split_by, self.priced.axis_sizes)
            total_bytes += array.num_bytes / num_shards
        return total_bytes
