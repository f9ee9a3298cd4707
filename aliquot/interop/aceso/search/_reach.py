"""A lower bound on all configurations of a chain of any length, from how far along the chain stages
can reach that take no longer than a given time.

The memory limit of a stage is relaxed by a Lagrange multiplier, as in `_tables.py`. Under one rate
the least costs of the paths from the first operator of the chain to every operator and state are
computed once. A stage then costs at least the difference of these between its end and its
beginning, so bounds of stages need no table of pairs: two rows are enough, one for beginnings and
one for ends. From the end of the chain, the earliest beginning that each number of stages and
devices can reach within the given time is found by binary search in these rows.

A run of equal layers is followed for a few layers, until a further one adds the same to all paths;
the rest is extrapolated by the least that a layer added, which never overestimates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ._evenly import rate_range, spread_evenly_us
from ._problem import SearchProblem
from ._space import Floats, StageSpace
from ._tables import find_period

Integers = NDArray[np.int64]

_MOST_RATES, _FEWEST_RATES = 8, 4
# Rates times operators; long chains get fewer rates.
_MOST_ENTRIES = 16_000
# Times that are tried at once, and how often the interval that holds the answer is divided.
_BARS, _DIVISIONS = 10, 3
# Layers of a run that are followed before the rest is extrapolated.
_FOLLOWED = 3


def least_step_us(
    problem: SearchProblem,
    micro_batch: int,
    spaces: Mapping[int, StageSpace],
    enough_us: float,
) -> float:
    """A lower bound on the iteration time of every configuration with this micro-batch size,
    whatever its cuts, degrees, algorithms and recomputed operators.

    If a stage takes `s` for a micro-batch and none of `S` stages on `N` devices takes longer, then
    the work `W` of all devices leaves at most `N s - W` of idle device time. So the stages take
    together at least `S s - (N s - W)`, and an iteration `(micro-batches - 1) s` more.

    Args:
        spaces: of single operators, by number of devices.
        enough_us: an iteration time above which the bound need not rise.
    """
    count, devices = problem.num_micro_batches(micro_batch), problem.num_devices
    work = spread_evenly_us(spaces, num_devices=devices, memory_limit_mb=problem.memory_limit_mb)
    least = count * work / devices
    if least >= enough_us or not np.isfinite(enough_us):
        return least
    reaches = _Reaches(problem, micro_batch, spaces)
    low, high = work / devices, enough_us / count
    stages = np.arange(1, problem.max_stages + 1)

    def iteration_us(slowest: Floats | float) -> Floats:
        sums = np.maximum(slowest, (stages - devices) * slowest + work)
        rising = count - 1 + stages - devices > 0
        result: Floats = (count - 1) * slowest + np.where(rising, sums, slowest)
        return result

    for _ in range(_DIVISIONS):
        bars = np.linspace(low, high, _BARS)
        possible = reaches.possible(bars)
        # For each number of stages, the longest time that is impossible.
        impossible = np.where(possible.any(axis=0), possible.argmax(axis=0) - 1, len(bars) - 1)
        bounds = np.where(impossible >= 0, iteration_us(bars[np.maximum(impossible, 0)]), least)
        at = int(bounds.argmin())
        least = max(least, float(bounds[at]))
        if impossible[at] < 0 or impossible[at] == len(bars) - 1:
            break
        low, high = float(bars[impossible[at]]), float(bars[impossible[at] + 1])
    return least


class _Reaches:
    """Rows of all stages for one micro-batch size, and the search in them."""

    def __init__(
        self, problem: SearchProblem, micro_batch: int, spaces: Mapping[int, StageSpace]
    ) -> None:
        self._problem, self._spaces = problem, spaces
        kinds = next(iter(spaces.values())).kinds
        self._num, self._layers = len(kinds), _layers(kinds)
        # Stages that are longer reserve memory for whole layers.
        self._window = max((length for _, length, count in self._layers if count > 1), default=1)
        self._held = [problem.in_flight(micro_batch, k) for k in range(problem.max_stages)]
        low, high = rate_range(spaces)
        count = min(max(_MOST_ENTRIES // self._num, _FEWEST_RATES), _MOST_RATES)
        positive = np.geomspace(low, high, count)
        # Under each rate, reserved memory is at least that of the operators, or the weights again.
        self._rates = np.concatenate([[0.0], positive, positive])
        self._copies = np.concatenate([np.zeros(count + 1), np.ones(count)])
        self._costs: dict[int, list[list[tuple[Floats, Floats]]]] = {}
        self._made: dict[tuple[int, int, int, int], list[_Rows]] = {}

    def possible(self, bars: Floats) -> NDArray[np.bool_]:
        """For each of some times and each number of stages, whether stages that take no longer
        might cover the chain.
        """
        devices, per_node = self._problem.num_devices, self._problem.gpus_per_node
        most = self._problem.max_stages
        # For each time and number of devices used at the end of the chain, the first operator
        # that can be reached; one more than all where that is impossible.
        nothing = self._num + 1
        reached = np.full((len(bars), devices + 1), nothing)
        reached[:, 0] = self._num
        result = np.zeros((len(bars), most), bool)
        for behind in range(most):
            further = np.full_like(reached, nothing)
            for n in self._spaces:
                used = np.arange(n, devices + 1)
                start = devices - used
                inside = start // per_node == (start + n - 1) // per_node
                enters = (start > 0) & (start % per_node == 0)
                leaves = (start + n) % per_node == 0
                for link in {(int(a), int(b)) for a, b in zip(enters, leaves, strict=True)}:
                    mine = used[inside & (enters == link[0]) & (leaves == link[1])]
                    from_here = reached[:, mine - n]
                    if not len(mine) or (from_here == nothing).all():
                        continue
                    begins = np.minimum.reduce(
                        [rows.first(from_here, bars) for rows in self._rows(n, behind, *link)]
                    )
                    begins[from_here == nothing] = nothing
                    further[:, mine] = np.minimum(further[:, mine], begins)
            reached = further
            result[:, behind] = reached[:, devices] == 0
        return result

    def _rows(self, n: int, behind: int, entered: int, left: int) -> list[_Rows]:
        """Rows for each set of states that a stage may have."""
        key = n, behind, entered, left
        if key not in self._made:
            mine = slice(behind * len(self._rates), (behind + 1) * len(self._rates))
            self._made[key] = []
            for potentials in self._potentials(n):
                self._made[key].append(
                    _Rows.make(
                        [(begins[entered, mine], ends[left, mine]) for begins, ends in potentials],
                        self._rates / self._held[behind],
                        np.where(self._copies == 0, self._least_reserved(n), 0.0),
                        self._problem.memory_limit_mb,
                        self._window,
                    )
                )
        return self._made[key]

    def _potentials(self, n: int) -> list[list[tuple[Floats, Floats]]]:
        """For each set of states, beginnings and ends by kind of link, by number of stages behind
        with rate, and by operator.
        """
        if n not in self._costs:
            space = self._spaces[n]
            held = np.array(self._held[: self._problem.num_devices - n + 1])
            self._costs[n] = []
            # The states that operators of one stage may have together: all, or those of one pair of
            # degrees.
            together = [np.arange(len(space.states))]
            if not self._problem.chain.resharding:
                pairs = np.array([state[:2] for state in space.states])
                degrees = dict.fromkeys(map(tuple, pairs.tolist()))
                together = [np.flatnonzero((pairs == each).all(axis=1)) for each in degrees]
            for states in together:
                costs = _Costs.make(
                    space,
                    states,
                    rates=np.tile(self._rates, len(held)),
                    price=(self._rates / held[:, None]).ravel(),
                    copies=np.tile(self._copies, len(held)),
                )
                self._costs[n].append([_shortest_paths(costs, self._layers)])
                if len(states) > 1:
                    self._costs[n][-1].append(_cheapest_operators(costs))
        return self._costs[n]

    def _least_reserved(self, n: int) -> float:
        """The least memory that a stage reserves for more than `window` operators."""
        space, sides = self._spaces[n], []
        for reserved in (space.forward_reserved_mb, space.backward_reserved_mb):
            least = np.where(space.valid, reserved, np.inf).min(axis=1)[space.kinds]
            sides.append(sliding_window_view(least, self._window).max(axis=1))
        return float((sides[0] + sides[1]).min())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Costs:
    """Costs of operators in some states: indexed by kind of operator, row, state. A row is a rate
    for a number of micro-batches held.

    Attributes:
        first, again, saved: cost of an operator, what its recomputation adds, and what it saves if
            the next one is recomputed, too.
        enters: by kind of link, cost of the transfer into a stage and of the memory for it.
        leaves: by kind of link, cost of the transfer out of a stage.
    """

    space: StageSpace
    states: Integers
    first: Floats
    again: Floats
    saved: Floats
    enters: Floats
    leaves: Floats

    @classmethod
    def make(
        cls, space: StageSpace, states: Integers, *, rates: Floats, price: Floats, copies: Floats
    ) -> _Costs:
        """Costs under rates in microseconds per MiB of each micro-batch held, which are prices of a
        MiB of the stage's memory.
        """

        def by_row(values: Floats) -> Floats:
            return values[..., None, states]

        busy = by_row(np.where(space.valid, space.busy_us, np.inf))
        weights = by_row(space.weights_mb) * (space.state_copies + copies)[:, None]
        saved = rates[:, None] * by_row(space.kept_mb)
        leaves = np.where(space.valid, space.leaves_us.min(axis=-1), np.inf)
        return cls(
            space=space,
            states=states,
            first=busy + price[:, None] * weights + saved,
            again=by_row(space.again_us),
            saved=saved,
            enters=by_row(space.enters_us) + rates[:, None] * by_row(space.enters_mb),
            leaves=by_row(leaves),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """What stages on so many devices cost, as differences between an end and a beginning.

    Attributes:
        begins: for each row and operator, the most that is subtracted for a stage that begins there
            or before; the rows one after the other, each raised above those before it.
        ends: for each row and operator, the least cost up to the end of a stage that ends with it
            or later.
        short, long: by row, the cost of the memory limit, for stages of at most `window` operators
            and for longer ones, which reserve at least some memory.
        lowest, step: of `begins`, the least value, and by how much each row is raised.
    """

    begins: Floats
    ends: Floats
    short: Floats
    long: Floats
    window: int
    lowest: float
    step: float

    @classmethod
    def make(
        cls,
        potentials: Sequence[tuple[Floats, Floats]],
        price: Floats,
        reserved_mb: Floats,
        limit_mb: float,
        window: int,
    ) -> _Rows:
        begins = np.maximum.accumulate(np.concatenate([b for b, _ in potentials]), axis=1)
        ends = np.concatenate([end for _, end in potentials])
        ends = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
        finite = begins[np.isfinite(begins)]
        lowest, span = float(finite.min()), float(np.ptp(finite)) + 1.0
        begins = np.nan_to_num(begins - lowest, neginf=0.0, posinf=3 * span)
        begins += 4 * span * np.arange(len(begins))[:, None]
        return cls(
            begins=begins.ravel(),
            ends=ends,
            short=np.tile(price * limit_mb, len(potentials)),
            long=np.tile(price * (limit_mb - reserved_mb), len(potentials)),
            window=window,
            lowest=lowest,
            step=4 * span,
        )

    def first(self, last: Integers, bars: Floats) -> Integers:
        """For each row of `bars` the first operators that stages which end before `last`, or later,
        can begin with.
        """
        ends = self.ends[:, np.clip(last, 1, self.ends.shape[1]) - 1] - bars[:, None]
        long = self._search(ends - self.long[:, None, None])
        short = self._search(ends - self.short[:, None, None])
        begins = np.minimum(np.maximum(short, last - self.window), long)
        return np.where(last <= 0, 0, np.minimum(begins, last))

    def _search(self, least: Floats) -> Integers:
        """The first operators at which every row subtracts enough."""
        rows, num = self.ends.shape
        values = np.clip(least - self.lowest, 0.0, 0.5 * self.step) - 1e-9 * self.step
        raised = values + self.step * np.arange(rows)[:, None, None]
        places = np.searchsorted(self.begins, raised.ravel()).reshape(raised.shape)
        at: Integers = (places - num * np.arange(rows)[:, None, None]).max(axis=0)
        return np.maximum(at, 0)


def _cheapest_operators(costs: _Costs) -> tuple[Floats, Floats]:
    """Beginnings and ends if every operator is in its cheapest state, by link, row and operator."""
    kinds = costs.space.kinds
    least = np.minimum(costs.first, costs.first + costs.again - costs.saved).min(axis=-1)
    sums = np.cumsum(least[kinds], axis=0).T
    possible = np.isfinite(costs.first)
    entry = np.where(possible, costs.enters, np.inf).min(axis=-1)
    exits = np.broadcast_to(costs.leaves.min(axis=-1), entry.shape)
    before = np.concatenate([np.zeros_like(sums[:, :1]), sums[:, :-1]], axis=1)
    return before - np.moveaxis(entry[:, kinds], 1, -1), sums + np.moveaxis(exits[:, kinds], 1, -1)


def _shortest_paths(costs: _Costs, layers: Sequence[tuple[int, int, int]]) -> tuple[Floats, Floats]:
    """Beginnings and ends from the shortest paths to each state of each operator, by link, row and
    operator.

    Args:
        layers: runs of equal layers, as `_layers` gives them.
    """
    kinds = costs.space.kinds
    rows = np.zeros((2, 2, costs.first.shape[1], len(kinds)))
    paths: Floats | None = None

    def follow(first: int, last: int) -> Floats:
        after = paths
        for op in range(first, last):
            kind = kinds[op]
            after = _extended(costs, after, op)
            possible = np.isfinite(costs.first[kind])
            own = np.where(possible, costs.first[kind], 0.0)
            more = np.maximum(after[0] - own, after[1] - own - costs.again[kind])
            more = np.where(possible, more, -np.inf)
            rows[0, :, :, op] = (more - costs.enters[:, kind]).max(axis=-1)
            rows[1, :, :, op] = (after.min(axis=0) + costs.leaves[:, kind]).min(axis=-1)
        assert after is not None
        return after

    for first, length, count in layers:
        for layer in range(count):
            before, begin = paths, first + layer * length
            paths = follow(begin, begin + length)
            if layer < _FOLLOWED or before is None or layer + 1 == count:
                continue
            reached = np.isfinite(before)
            if (reached != np.isfinite(paths)).any():
                continue
            # From these paths, every layer adds at least this to each row.
            more = np.where(reached, paths, np.inf) - np.where(reached, before, 0.0)
            added = more.min(axis=(0, 2))[:, None]
            rest = slice(begin + length, first + count * length)
            layers_on = np.repeat(np.arange(1, count - layer), length)
            rows[..., rest] = np.tile(rows[..., begin : begin + length], count - layer - 1)
            rows[..., rest] += layers_on * added
            paths = before + (count - layer) * added
            break
    return rows[0], rows[1]


def _extended(costs: _Costs, paths: Floats | None, op: int) -> Floats:
    """Shortest paths to each state of an operator, not recomputed and recomputed."""
    space, kind = costs.space, costs.space.kinds[op]
    own, again = costs.first[kind], costs.again[kind]
    if paths is None:
        return np.stack([own, own + again])
    edges = space.edges_us[space.edge_of[op]][np.ix_(costs.states, costs.states)]
    joined = paths[1]
    if space.fused[op]:
        joined = joined - costs.saved[space.kinds[op - 1]]
    sources = np.stack([paths.min(axis=0), np.minimum(paths[0], joined)])
    if len(edges) == 1:
        reached: Floats = sources + edges[0, 0]
    else:
        reached = (sources[..., None] + edges).min(axis=-2)
    reached += own
    reached[1] += again
    return reached


def _layers(kinds: Integers) -> Sequence[tuple[int, int, int]]:
    """Runs of equal layers and the operators between them: first operator, operators of a layer,
    number of layers.
    """
    period = find_period(kinds)
    if not period.count:
        return [(0, len(kinds), 1)] if len(kinds) else []
    after = [(period.end + a, length, n) for a, length, n in _layers(kinds[period.end :])]
    return [*_layers(kinds[: period.first]), (period.first, period.length, period.count), *after]
