"""All combinations of all choices of a small problem: step time and peak memory of each, from their
definitions.

Shares with the package the seconds of single nodes and collectives, and the list of collectives of
one conversion (each tested by itself); how choices follow from factors, arrays from choices, sums
from parts and memory from lifetimes is written down here once more, without a program, rows or a
relaxation.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from aliquot.cluster import LogicalMesh, SumCollective, target_for
from aliquot.cost import Problem, collective_line, memory_model, price
from aliquot.graph import Phase
from aliquot.sharding import PARTIAL, REPLICATED, reshard

_CHUNK = 1 << 14
_WIDE = {"bfloat16": 2.0, "float16": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllCombinations:
    """Step time and peak memory of every combination, the last node's choice changing fastest."""

    step_time_s: np.ndarray
    peak_bytes: np.ndarray

    def best(self, limit_bytes: float = math.inf) -> float | None:
        """The least step time of what fits, or None."""
        fits = self.peak_bytes <= limit_bytes
        return float(self.step_time_s[fits].min()) if fits.any() else None

    def limits(self) -> list[float]:
        """Limits worth trying: below every peak, and between the least and that of the fastest
        combination.
        """
        peaks = np.unique(np.round(self.peak_bytes, 6))
        free = float(self.peak_bytes[np.argmin(self.step_time_s)])
        inner = peaks[peaks <= free + 1]
        found = [float(inner[0]) - 0.5]
        for k in np.unique(np.linspace(0, len(inner) - 2, 3).astype(int)) if len(inner) > 1 else []:
            found.append(float(inner[k] + inner[k + 1]) / 2)
        return found


def choices_of(node: Any, axis_sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every way to give each axis a factor or none, such that the axes of a factor divide its
    size.
    """
    found = []
    for choice in itertools.product(range(-1, len(node.factors)), repeat=len(axis_sizes)):
        taken = [1] * len(node.factors)
        for f, size in zip(choice, axis_sizes, strict=True):
            if f >= 0:
                taken[f] *= size
        if all(factor.size % n == 0 for factor, n in zip(node.factors, taken, strict=True)):
            found.append(choice)
    return found


def count_combinations(problem: Problem, mesh: LogicalMesh) -> int:
    """How many combinations of choices there are."""
    return math.prod(len(choices_of(node, mesh.shape)) for node in problem.nodes.nodes)


def try_all(problem: Problem, mesh: LogicalMesh) -> AllCombinations:
    """Step time and peak memory of every combination of choices on one mesh."""
    judge = _Judge(problem, mesh)
    total = math.prod(len(c) for c in judge.choices)
    times, peaks = np.empty(total), np.empty(total)
    for first in range(0, total, _CHUNK):
        picks = judge.picks(np.arange(first, min(first + _CHUNK, total)))
        times[first : first + _CHUNK], peaks[first : first + _CHUNK] = judge(picks)
    return AllCombinations(step_time_s=times, peak_bytes=peaks)


class _Judge:
    def __init__(self, problem: Problem, mesh: LogicalMesh) -> None:
        self.graph, self.residents, self.mesh = problem.nodes, problem.residents, mesh
        self.target = target_for(problem.cluster.device)
        self.repeats = problem.num_micro_batches
        self.choices = [choices_of(node, mesh.shape) for node in self.graph.nodes]
        priced = price(problem, mesh, repeats=self.repeats)
        self.seconds, orders = [], []
        for mine, table in zip(self.choices, priced.nodes, strict=True):
            rows = {tuple(c): k for k, c in enumerate(table.choices.tolist())}
            assert set(rows) == set(mine)
            order = [rows[c] for c in mine]
            orders.append(np.array(order))
            last_s = table.compute[Phase.BACKWARD] / self.repeats
            self.seconds.append([*(getattr(table, name)[order] for name in _PARTS[:-1])])
            self.seconds[-1].append(last_s[order])
        self.shares = self._shares()
        self.memory = self._memory()
        self.copies = [
            _Copies(self, priced, orders, c)
            for c in memory_model(priced, in_turn=False).conversions
        ]

    def picks(self, combinations: np.ndarray) -> list[np.ndarray]:
        """The choice of each node in each combination, the last node's changing fastest."""
        found = []
        for mine in reversed(self.choices):
            combinations, pick = np.divmod(combinations, len(mine))
            found.append(pick)
        return found[::-1]

    def __call__(self, picks: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        compute, beside, communication, gradient, hideable, once, last = (
            sum(parts[k][pick] for parts, pick in zip(self.seconds, picks, strict=True))
            for k in range(len(_PARTS))
        )
        use = sum(table[pick] for table, pick in zip(self.memory, picks, strict=True))
        for share in self.shares:
            paid, summed, hidden = share.cost(picks)
            if share.gradient:
                gradient = gradient + paid
                # Without micro-batches every sum of gradients comes once in a step.
                once = once + (hidden if self.repeats == 1 else 0.0)
            else:
                communication = communication + paid
            if share.beside:
                hideable = hideable + hidden
            elif share.in_passes:
                hideable = hideable + self.target.activation_overlap * summed
        for copies in self.copies:
            use = use + copies.held(picks)[:, None] * copies.alive[None, :]
        hidden = np.minimum(hideable - once + np.minimum(once, last), beside)
        return compute + communication + gradient - hidden, use.max(axis=1)

    def _shares(self) -> list["_Share"]:
        groups: dict[int, list[Any]] = {}
        for edge in self.graph.edges:
            groups.setdefault(edge.share, []).append(edge)
        return [_Share(self, edges) for edges in groups.values()]

    def _memory(self) -> list[np.ndarray]:
        """For each node and choice the bytes of residents at every moment; what no node splits goes
        to the first.
        """
        moments = np.arange(self.graph.num_ops + 1)
        tables = [np.zeros((len(mine), len(moments))) for mine in self.choices]
        for r in self.residents:
            for born, dead in zip(r.births, r.deaths, strict=True):
                alive = (born <= moments) & (moments <= dead)
                if r.node < 0:
                    tables[0] += r.num_bytes * alive
                    continue
                for k, choice in enumerate(self.choices[r.node]):
                    pieces = [
                        n
                        for n, f in zip(self.mesh.shape, choice, strict=True)
                        if f >= 0 and r.projection[f] >= 0
                    ]
                    tables[r.node][k] += r.num_bytes / math.prod(pieces) * alive
        return tables

    def spec(self, node: int, projection: tuple[int, ...], pick: int) -> tuple[int, ...]:
        return tuple(projection[f] if f >= 0 else REPLICATED for f in self.choices[node][pick])


_PARTS = (
    "compute_s",
    "beside_s",
    "communication_s",
    "gradient_s",
    "hideable_s",
    "once_hideable_s",
    "last backward pass",
)


class _Share:
    """Edges whose equal conversions happen once."""

    def __init__(self, judge: _Judge, edges: list[Any]) -> None:
        self.gradient = edges[0].gradient
        self.beside = edges[0].beside_compute
        self.in_passes = edges[0].phase is not Phase.UPDATE
        self.edges = edges
        numbers: dict[Any, int] = {}
        self.codes = []
        for edge in edges:
            sources = [
                judge.spec(edge.source, edge.source_projection, k)
                for k in range(len(judge.choices[edge.source]))
            ]
            targets = [
                judge.spec(edge.target, edge.target_projection, k)
                for k in range(len(judge.choices[edge.target]))
            ]
            self.codes.append(
                np.array(
                    [[numbers.setdefault((p, q), len(numbers)) for q in targets] for p in sources],
                    np.int64,
                )
            )
        pairs = list(numbers)
        self.paid = np.array([_conversion_s(judge, edges[0], p, q) for p, q in pairs])
        hides = [
            min(p) <= PARTIAL or all(b in (a, -1) for a, b in zip(p, q, strict=True))
            for p, q in pairs
        ]
        self.summed = np.where(hides, self.paid, 0.0)
        # Sums of gradients over several hosts hide less.
        target, hosts = judge.target, judge.mesh.axes_between_hosts
        fractions = [
            min(target.overlap_fraction, target.gradient_overlap_between_hosts)
            if self.gradient and any(p[a] <= PARTIAL < q[a] for a in hosts)
            else target.overlap_fraction
            for p, q in pairs
        ]
        self.hidden = np.array(fractions) * self.paid

    def cost(self, picks: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of each combination, the part of them that goes to sums and gathers, and what
        hides of them beside compute.
        """
        codes = [
            c[picks[e.source], picks[e.target]] for e, c in zip(self.edges, self.codes, strict=True)
        ]
        return (
            _sum_distinct(codes, [self.paid[c] for c in codes]),
            _sum_distinct(codes, [self.summed[c] for c in codes]),
            _sum_distinct(codes, [self.hidden[c] for c in codes]),
        )


class _Copies:
    """Copies of arrays that edges cause, equal ones once, and at which moments they are held."""

    def __init__(
        self, judge: _Judge, priced: Any, orders: list[np.ndarray], conversion: Any
    ) -> None:
        numbers: dict[Any, int] = {}
        self.parts = []
        for index, table in zip(conversion.edges, conversion.local_bytes, strict=True):
            edge, p = priced.graph.edges[index], priced.edges[index]
            codes = np.array(
                [[numbers.setdefault((a, b), len(numbers)) for b in p.targets] for a in p.sources]
            )
            sources, targets = (
                p.source_index[orders[edge.source]],
                p.target_index[orders[edge.target]],
            )
            self.parts.append((edge, sources, targets, codes, table))
        moments = np.arange(judge.graph.num_ops + 1)
        self.alive = np.zeros(len(moments))
        for born, dead in zip(conversion.births, conversion.deaths, strict=True):
            self.alive += (born <= moments) & (moments <= dead)

    def held(self, picks: list[np.ndarray]) -> np.ndarray:
        """Bytes of each combination."""
        codes, amounts = [], []
        for edge, sources, targets, numbers, table in self.parts:
            s, t = sources[picks[edge.source]], targets[picks[edge.target]]
            codes.append(numbers[s, t])
            amounts.append(table[s, t])
        return _sum_distinct(codes, amounts)


def _sum_distinct(codes: list[np.ndarray], amounts: list[np.ndarray]) -> np.ndarray:
    """For each combination the amounts of all different codes."""
    total = np.zeros(len(codes[0]))
    for k, (mine, amount) in enumerate(zip(codes, amounts, strict=True)):
        fresh = np.ones(len(mine), bool)
        for other in codes[:k]:
            fresh &= mine != other
        total += np.where(fresh, amount, 0.0)
    return total


def _conversion_s(
    judge: _Judge, edge: Any, source: tuple[int, ...], target: tuple[int, ...]
) -> float:
    scattered = judge.target.reduce_scatter or edge.on_pieces
    sums = SumCollective.REDUCE_SCATTER if scattered else SumCollective.ALL_REDUCE
    moves = reshard(source, target, judge.mesh.shape, sums)
    if moves is None:
        return math.inf
    num_bytes = edge.num_bytes * (
        _WIDE.get(edge.dtype, 1.0) if judge.target.widened_dtypes else 1.0
    )
    # Of a collective that is combined with others, an array pays a part of the start: also gathers
    # of new parameters at the end of a step are combined.
    starts = 1.0
    if (edge.beside_compute or edge.kind == "alias") and judge.target.combined_bytes:
        starts = min(num_bytes / judge.target.combined_bytes, 1.0)
    seconds = 0.0
    for move in moves:
        latency, per_byte = collective_line(
            move.kind, move.axes, judge.mesh, judge.target, move.group
        )
        gathered = max(source[a] for a in move.axes) if move.kind == "all-gather" else 0
        scattered = target[move.axes[0]] if move.kind == "reduce-scatter" else 0
        if judge.target.copies_inner_dims and max(gathered, scattered) > 0:
            latency += 2 * judge.target.kernel_overhead_s
            leaves = move.group if gathered else 1 / move.group
            per_byte += (2 + 2 * leaves) / judge.target.memory_bytes_per_s(
                judge.mesh.cluster.device
            )
        seconds += starts * latency + per_byte * num_bytes * move.fraction
    waits = edge.gradient and PARTIAL in source and judge.repeats == 1
    return seconds * edge.count * (1 if waits or edge.phase is Phase.UPDATE else judge.repeats)
