"""Cuts of a step into layers: places in its forward pass where few bytes cross and that divide the
work evenly.

Equal layers, found as repeats, get equal cuts. Outside of repeats, cuts lie at local minima of the
bytes that cross. A wanted number of layers is then chosen among these places by a dynamic program.

Layers can be cut further, into operators: a product or convolution each, with what follows it.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ..core import InputError, nearest, shortened
from ._dataflow import Item, forward_places, items_of, rough_costs
from ._layer_names import layer_names, operator_names
from ._rule import traits_of
from ._segments import Run, find_repeats
from ._split_order import scans_of_ranges
from ._split_reach import scans_over_layers
from ._types import Call, Graph, Role

# A layer that weighs less than this share of an average one joins its neighbour.
_SMALL = 0.1
# No cut where more than this many times the bytes of the narrowest place cross.
_WIDE = 8.0
# Places where at most this many times the fewest bytes cross count as equally narrow.
_CLOSE = 1.01
# Prefix of the text of `named_places`: places of the forward pass at which layers begin.
_PLACES = "places:"
OPERATORS = "operators"
"""In place of a number or a pattern of layers: a layer for each operator."""
# Operators at most, unless there are more layers: more take long to search.
_MOST_OPERATORS = 128


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layers:
    """A forward pass cut into layers.

    Attributes:
        items: all items of the step.
        forward: positions in `items` of those that are cut into layers: forward and not shared.
        starts: for each layer, where it begins in `forward`; the first is 0.
        names: of the layers, by the parameters that they use first.
        boundary_bytes: bytes that cross the cut after each layer; 0 after the last.
        costs: rough weight of each layer's forward pass; see `rough_costs`.
        inner: layers that begin inside of a layer of the step, where layers are operators.
    """

    items: tuple[Item, ...]
    forward: tuple[int, ...]
    starts: tuple[int, ...]
    names: tuple[str, ...]
    boundary_bytes: tuple[float, ...]
    costs: tuple[float, ...]
    inner: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.starts)


def cut_layers(graph: Graph, *, layers: str | int | None = None) -> Layers:
    """Cut a step's forward pass into layers.

    Args:
        graph: the step.
        layers: a number; a pattern of parameter paths such as `params.layers[*]`, every match of
            which begins a layer; the text that `named_places` gives; "operators" for each product
            or convolution, with the operators that follow it; or None for every good place.

    Raises:
        InputError: the pattern matches no parameter, there are too few places to cut, the text
            names places that the step does not have, or operators are in a loop over layers.
    """
    items = items_of(graph)
    forward = forward_places(items)
    crossing = crossing_bytes(graph, items, forward)
    costs = _costs(graph, items, forward)
    users = _parameters_of(graph, items, forward)
    products: list[int] = []
    inner = frozenset[int]()
    if isinstance(layers, str) and layers.startswith(_PLACES):
        starts = _at_places(graph, layers, len(forward))
    elif layers == OPERATORS:
        _refuse_loops(graph)
        whole = _merge_small(
            [0, *_places(graph, items, forward, costs, crossing, users)], costs, crossing
        )
        products = []
        for place, k in enumerate(forward):
            if any(traits_of(graph.ops[op].name).multiplies for op in items[k].ops):
                products.append(place)
        starts = _cut_further(whole, products, costs, crossing)
        inner = frozenset(k for k, start in enumerate(starts) if start not in whole)
    elif isinstance(layers, str):
        starts = _by_pattern(graph, layers, users, crossing)
    else:
        places = _places(graph, items, forward, costs, crossing, users)
        starts = _merge_small([0, *places], costs, crossing)
        if layers is not None:
            starts = _choose(starts, layers, costs, crossing, graph.name)
    ends = [*starts[1:], len(forward)]
    return Layers(
        items=items,
        forward=forward,
        starts=tuple(starts),
        names=(
            operator_names(starts, ends, users, products)
            if layers == OPERATORS
            else layer_names(starts, ends, users)
        ),
        boundary_bytes=_behind(crossing, ends),
        costs=_weights(costs, starts),
        inner=inner,
    )


def named_places(layers: Layers) -> str:
    """Text that makes `cut_layers` begin layers at the same places as these."""
    return _PLACES + ",".join(map(str, layers.starts[1:]))


def cut_between(graph: Graph, operators: Sequence[tuple[int, int]]) -> Layers:
    """Cut a step's forward pass once between the two operators of each pair, where fewest bytes
    cross.

    Args:
        graph: the step.
        operators: in program order; the first of a pair may be -1 for the beginning of the step,
            where no cut is made if nothing comes before the second.

    Raises:
        InputError: both operators of a pair are in one loop or region, which cannot be cut.
    """
    items = items_of(graph)
    forward = forward_places(items)
    crossing = crossing_bytes(graph, items, forward)
    starts = [0]
    for (before, after), places in zip(operators, _spans(items, forward, operators), strict=True):
        if not places and before == -1:
            continue
        if not places:
            raise InputError(
                f"{graph.name} cannot be cut between operators {before} and {after}: both are in"
                " one loop over layers or one rematerialised region. Write the layers out instead"
                " of scanning over them."
            )
        # Among equally narrow places the last, where the next layer's own operators begin.
        starts.append(narrowest(places, crossing))
    ends = [*starts[1:], len(forward)]
    return Layers(
        items=items,
        forward=forward,
        starts=tuple(starts),
        names=layer_names(starts, ends, _parameters_of(graph, items, forward)),
        boundary_bytes=_behind(crossing, ends),
        costs=_weights(_costs(graph, items, forward), starts),
    )


def narrowest_bytes(graph: Graph, operators: Sequence[tuple[int, int]]) -> list[float]:
    """For each pair of operators, the fewest bytes that cross at any place between them; 0 if there
    is no place.
    """
    items = items_of(graph)
    forward = forward_places(items)
    crossing = crossing_bytes(graph, items, forward)
    found: list[float] = []
    for places in _spans(items, forward, operators):
        found.append(min((float(crossing[k]) for k in places), default=0.0))
    return found


def _places_of_operators(items: Sequence[Item], forward: Sequence[int]) -> dict[int, int]:
    """For each operator of the forward pass the place of its item."""
    place_of: dict[int, int] = {}
    for place, k in enumerate(forward):
        place_of.update(dict.fromkeys(items[k].ops, place))
    return place_of


def _spans(
    items: Sequence[Item], forward: Sequence[int], operators: Sequence[tuple[int, int]]
) -> list[range]:
    """The places between the two operators of each pair."""
    place_of = _places_of_operators(items, forward)
    return [range(place_of.get(before, 0) + 1, place_of[after] + 1) for before, after in operators]


def range_layers(graph: Graph) -> Layers:
    """Layers of a step whose scans are cut (`split_scans`): one for each range.

    Raises:
        InputError: scans over several stacks of layers were cut at once, of which one reads what
            another has made.
    """
    assert graph.split is not None, "the step's scans are not cut"
    items = items_of(graph)
    forward = forward_places(items)
    bounds, passes = graph.split.bounds, graph.split.passes
    place_of = {k: place for place, k in enumerate(forward)}
    places = [place_of[k] for k in scans_of_ranges(graph, items) if k in place_of]
    if len(places) != passes * (len(bounds) - 1):
        raise InputError(
            f"{graph.name} has several stacks of {bounds[-1]} layers of which one reads what"
            " another has made, and only one can be cut into stages. Write the layers out instead"
            " of scanning over them, or use another method than pipeshard."
        )
    names = tuple(
        f"layers[{a}]" if b == a + 1 else f"layers[{a}..{b - 1}]"
        for a, b in itertools.pairwise(bounds)
    )
    # The scans of one range, one for each pass through the layers, follow one another.
    starts = (0, *places[passes::passes])
    return Layers(
        items=items,
        forward=forward,
        starts=starts,
        names=names,
        boundary_bytes=_behind(crossing_bytes(graph, items, forward), [*starts[1:], len(forward)]),
        costs=_weights(_costs(graph, items, forward), starts),
    )


def whole_layers(layers: Layers) -> Layers:
    """The layers of a step, each of its operators together."""
    begins = [k for k in range(len(layers)) if k not in layers.inner]
    ends = [*begins[1:], len(layers)]
    starts, names, boundary_bytes, costs = [], [], [], []
    for begin, end in zip(begins, ends, strict=True):
        starts.append(layers.starts[begin])
        names.append(layers.names[begin])
        boundary_bytes.append(layers.boundary_bytes[end - 1])
        costs.append(sum(layers.costs[begin:end]))
    return replace(
        layers,
        starts=tuple(starts),
        names=tuple(names),
        boundary_bytes=tuple(boundary_bytes),
        costs=tuple(costs),
        inner=frozenset(),
    )


def cut_alike(layers: Layers, graph: Graph) -> Layers:
    """The same layers of the same step at another size of its batch, with unchanged weights."""
    # Items hold operators by index, which stays valid, but calls as objects of their own graph.
    items = tuple(
        structs.replace(item, op_or_call=other) if isinstance(other, Call) else item
        for item, other in zip(layers.items, graph.body.items, strict=True)
    )
    ends = [*layers.starts[1:], len(layers.forward)]
    return replace(
        layers,
        items=items,
        boundary_bytes=_behind(crossing_bytes(graph, items, layers.forward), ends),
    )


def _at_places(graph: Graph, text: str, end: int) -> list[int]:
    """Starts of layers, from the text of `named_places`."""
    parts = text.removeprefix(_PLACES).split(",")
    # Python refuses to read numbers of thousands of digits.
    places = [int(part) for part in parts if part.isdecimal() and len(part) < 10]
    starts = [0, *places]
    if len(places) < len(parts) or any(a >= b for a, b in itertools.pairwise([*starts, end])):
        raise InputError(
            f"layers={shortened(text, 60)!r}: layers of {graph.name} can begin at rising numbers"
            f" from 1 to {end - 1}, such as {_PLACES}1,2."
        )
    return starts


def _refuse_loops(graph: Graph) -> None:
    """Raise `InputError` if the step loops over its layers, whose operators cannot be cut apart."""
    longest = max((scan.length for scan in scans_over_layers(graph)), default=1)
    if longest > 1:
        raise InputError(
            f"layers={OPERATORS!r}: {graph.name} loops over {longest} layers, and the operators of"
            " one loop cannot be in different stages. Write the layers out instead of scanning over"
            " them, or leave `layers` out: loops are then cut between layers."
        )


def _cut_further(
    whole: Sequence[int],
    products: Sequence[int],
    costs: NDArray[np.float64],
    crossing: NDArray[np.float64],
) -> list[int]:
    """Starts of layers and of the operators in them: two products that follow one another are cut
    apart where the fewest bytes cross, and of equally narrow places at the last, so that what
    follows a product stays with it. Operators with hardly any work are merged with a neighbour of
    their layer, and the lightest, too, while there are more than `_MOST_OPERATORS`.
    """
    starts = set(whole)
    for before, after in itertools.pairwise(products):
        if starts.isdisjoint(range(before + 1, after + 1)):
            starts.add(narrowest(range(before + 1, after + 1), crossing))
    return _merge_small(sorted(starts), costs, crossing, frozenset(whole), _MOST_OPERATORS)


def narrowest(places: Iterable[int], crossing: NDArray[np.float64]) -> int:
    """The place where the fewest bytes cross; of equally narrow ones the last."""
    return max(places, key=lambda place: (-float(crossing[place]), place))


def _behind(crossing: NDArray[np.float64], ends: Sequence[int]) -> tuple[float, ...]:
    """Bytes that cross where layers end; 0 after the last."""
    return tuple(float(crossing[e]) if e < len(crossing) - 1 else 0.0 for e in ends)


def _costs(graph: Graph, items: Sequence[Item], forward: Sequence[int]) -> NDArray[np.float64]:
    """Rough weight of each forward item."""
    return np.array(rough_costs(graph, [items[k] for k in forward]), np.float64)


def _weights(costs: NDArray[np.float64], starts: Sequence[int]) -> tuple[float, ...]:
    """Rough weight of each layer."""
    return tuple(float(costs[a:b].sum()) for a, b in itertools.pairwise([*starts, len(costs)]))


def crossing_bytes(
    graph: Graph, items: Sequence[Item], forward: Sequence[int]
) -> NDArray[np.float64]:
    """For each place between two forward items, and both ends, the bytes of values that are made
    before it and read in the forward pass after it.
    """
    made_at: dict[int, int] = {}
    change = np.zeros(len(forward) + 2)
    last: dict[int, int] = {}
    for place, k in enumerate(forward):
        for i in items[k].inputs:
            if i in made_at:
                last[i] = place
        for o in items[k].outputs:
            made_at[o] = place
    for value, place in last.items():
        change[made_at[value] + 1] += graph.values[value].num_bytes
        change[place + 1] -= graph.values[value].num_bytes
    return np.cumsum(change)[: len(forward) + 1]


def _parameters_of(graph: Graph, items: Sequence[Item], forward: Sequence[int]) -> list[list[str]]:
    """The parameters that each forward item uses, directly or through shared items, by path."""
    carries: dict[int, list[str]] = {}
    for i in graph.inputs:
        if i.role is Role.PARAMETER:
            carries[i.value] = [i.path]

    def used_by(item: Item) -> list[str]:
        return list(dict.fromkeys(itertools.chain(*(carries.get(i, []) for i in item.inputs))))

    for item in items:
        if item.shared and (paths := used_by(item)):
            carries |= dict.fromkeys(item.outputs, paths)
    return [used_by(items[k]) for k in forward]


def _places(
    graph: Graph,
    items: Sequence[Item],
    forward: Sequence[int],
    costs: NDArray[np.float64],
    crossing: NDArray[np.float64],
    users: Sequence[Sequence[str]],
) -> list[int]:
    """Good places to cut, in order, without both ends."""
    place_of = _places_of_operators(items, forward)
    cuts: set[int] = set()
    covered = np.zeros(len(forward) + 1, bool)
    for run in find_repeats(graph).runs:
        ops = range(run.start, run.start + run.period * run.count)
        inside = [place_of[k] for k in ops if k in place_of]
        # A loop is one item: there is no place inside of it.
        if not inside or graph.ops[run.start].trips > 1:
            continue
        covered[min(inside) + 1 : max(inside) + 1] = True
        cuts.update(_places_in_run(run, place_of, crossing, users))
    # Fewer bytes cross than on both sides; of neighbouring places with equally many the first.
    first = np.flatnonzero(np.diff(crossing, prepend=-1.0))
    level = crossing[first]
    narrow = first[1:-1][(level[:-2] > level[1:-1]) & (level[1:-1] < level[2:])]
    cuts.update(narrow[~covered[narrow] & (crossing[narrow] > 0)].tolist())
    # Between the ranges of one scan over layers: before every scan that reads results of an
    # earlier one.
    made_before: set[int] = set()
    for at, k in enumerate(forward):
        call = items[k].op_or_call
        if isinstance(call, Call) and call.kind == "scan":
            if made_before.intersection(items[k].inputs):
                cuts.add(at)
            made_before.update(items[k].outputs)
    places = sorted(place for place in cuts if 0 < place < len(forward))
    # Next to the loss only scalars cross, which would make all other places look wide.
    work = np.cumsum([0.0, *costs])
    # Without any cost there is no share of the work: this only avoids a division by zero.
    done = work / (work[-1] or 1.0)
    inner = [crossing[place] for place in places if _SMALL / 2 < done[place] < 1 - _SMALL / 2]
    return [place for place in places if crossing[place] <= _WIDE * min(inner, default=0.0)]


def _places_in_run(
    run: Run,
    place_of: dict[int, int],
    crossing: NDArray[np.float64],
    users: Sequence[Sequence[str]],
) -> list[int]:
    """The same place in every copy of a run: where the fewest bytes cross and, among equally narrow
    places, where parameters with one number stay together.
    """
    rated: list[tuple[float, int, list[int]]] = []
    for offset in range(run.period):
        # At offset 0, the end of the last copy is a place, too.
        start = run.start + offset
        ops = range(start, start + (run.count + (offset == 0)) * run.period, run.period)
        places = [place_of[k] for k in ops if k in place_of]
        if len(places) < run.count:
            continue
        inner = crossing[places[1:-1]] if len(places) > 2 else crossing[places]
        ends = [*places[1:], min(places[-1] + places[1] - places[0], len(users))]
        mixed = 0
        for a, b in zip(places, ends, strict=True):
            mixed += len(set(map(_numbers, itertools.chain(*users[a:b]))) - {()})
        rated.append((float(inner.max()), mixed, places))
    # One more scalar that crosses (an auxiliary loss) is no reason to cut through a layer.
    least = min((entry[0] for entry in rated), default=0.0)
    close = [entry for entry in rated if entry[0] <= _CLOSE * least]
    return min(close, key=lambda entry: (entry[1], entry[0]))[2] if close else []


# Cached, because every place of a layer is rated, and most see the same paths.
@functools.lru_cache(maxsize=1 << 14)
def _numbers(path: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", path))


def _merge_small(
    starts: Sequence[int],
    costs: NDArray[np.float64],
    crossing: NDArray[np.float64],
    fixed: frozenset[int] = frozenset(),
    most: float = math.inf,
) -> list[int]:
    """Merge layers that have hardly any work with a neighbour, by removing that of their two cuts
    where more bytes cross.

    Args:
        fixed: cuts that stay.
        most: of more layers than that, the lightest are merged whatever their work, and those
            that weigh as much.
    """
    kept = list(starts)
    total = np.concatenate(([0.0], np.cumsum(costs)))
    merged = 0.0
    while len(kept) > 1:
        ends = [*kept[1:], len(costs)]
        weights = [float(total[b] - total[a]) for a, b in zip(kept, ends, strict=True)]
        sides = []
        for k in range(len(kept)):
            sides.append([s for s in (k, k + 1) if 0 < s < len(kept) and kept[s] not in fixed])
        light = [k for k, cuts in enumerate(sides) if cuts]
        if not light:
            break
        small = min(light, key=weights.__getitem__)
        # Equal layers are cut alike: a limit does not end between operators of equal weight.
        if (
            weights[small] >= _SMALL * total[-1] / len(kept)
            and len(kept) <= most
            and weights[small] > merged
        ):
            break
        if len(kept) > most:
            merged = max(merged, weights[small] * (1 + 1e-9))
        del kept[max(sides[small], key=lambda s: crossing[kept[s]])]
    return kept


def _choose(
    starts: Sequence[int],
    count: int,
    costs: NDArray[np.float64],
    crossing: NDArray[np.float64],
    name: str,
) -> list[int]:
    """Choose cuts for `count` layers among finer ones, such that the sum of the squares of their
    weights plus the bytes that cross is minimal.

    The dynamic program of "Alpa" (Zheng et al., OSDI 2022), section 6, with a sum of squares in
    place of its bound on the heaviest layer, which needs a tolerance.
    """
    if not 1 <= count <= len(starts):
        raise InputError(
            f"{name} has places for at most {len(starts)} layers, and layers={count} were asked"
            " for. Ask for fewer, or name them by a path pattern such as"
            ' layers="params.layers[*]".'
        )
    bounds = [*starts, len(costs)]
    total = np.concatenate(([0.0], np.cumsum(costs)))[bounds]
    # Weights relative to an average layer, bytes to the widest place: neither drowns the other.
    weight = total / max(total[-1], 1e-30) * count
    bytes_at = np.array([crossing[s] for s in starts]) / max(1.0, float(crossing.max()))
    size = len(starts)
    best = np.full((count + 1, size + 1), np.inf)
    came = np.zeros((count + 1, size + 1), np.int64)
    best[0, 0] = 0.0
    for k in range(1, count + 1):
        for end in range(k, size + 1):
            begin = np.arange(end)
            tried = (
                best[k - 1, :end]
                + (weight[end] - weight[begin]) ** 2
                + np.where(begin > 0, bytes_at[begin], 0.0)
            )
            came[k, end] = int(tried.argmin())
            best[k, end] = tried[came[k, end]]
    chosen = []
    end = size
    for k in range(count, 0, -1):
        end = int(came[k, end])
        chosen.append(starts[end])
    return chosen[::-1]


def _by_pattern(
    graph: Graph, pattern: str, users: Sequence[Sequence[str]], crossing: NDArray[np.float64]
) -> list[int]:
    """Starts of layers, one for each match of a pattern: where the fewest bytes cross between the
    last use of other parameters and the first use of the match's own.
    """
    paths = [i.path for i in graph.inputs if i.role is Role.PARAMETER]
    # In fnmatch, brackets mean a set of characters; here they are part of a path.
    glob = fnmatch.translate(
        pattern.replace("[*]", "\0").replace("[", "[[]").replace("\0", "[[]*]")
    ).removesuffix(r"\Z")
    match = re.compile(
        "(?:.*[.])?(" + glob.replace(r"(?s:", "(?:").replace(".*", r"[^.\[\]]*") + ")(?=[.\\[]|$)"
    )
    first: dict[str, int] = {}
    owner: list[str | None] = []
    for place, used in enumerate(users):
        names = [m.group(1) for m in map(match.match, used) if m]
        owner.append(names[0] if names else ("" if used else None))
        for name in names:
            first.setdefault(name, place)
    if not first:
        short = pattern.replace("[*]", "[0]")
        raise InputError(
            f"layers={pattern!r} matches no parameter of {graph.name}:"
            f" {nearest(short, [*paths, OPERATORS])}"
        )
    starts = {0}
    for name, place in first.items():
        before = max((k for k in range(place) if owner[k] not in (None, name)), default=-1)
        if before >= 0:
            starts.add(before + 1 + int(crossing[before + 1 : place + 1].argmin()))
    return sorted(starts)
