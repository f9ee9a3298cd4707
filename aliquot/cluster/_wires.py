"""Rings that groups of devices can form at once in hosts whose devices are wired pair by pair.

Behind a switch all groups are alike. Pair by pair they are not: on eight V100s two neighbours share
one of their six links, while all eight together form six rings.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

Wires: TypeAlias = tuple[tuple[float, ...], ...]
"""For each two devices of a host what one can send to the other directly, in bytes/s; 0 where
nothing joins them.
"""

_Links: TypeAlias = tuple[tuple[int, ...], ...]


def ring_bandwidth(wires: Wires, members: Sequence[int]) -> float:
    """Bytes per second that each of `members` sends when they form as many rings as their own links
    allow.

    Two devices send over all links between them. More devices form rings: each closed tour through
    all members, over links that no other tour uses, makes two, one in each direction. Where there
    is no tour, messages pass through a third device or the host, at half the bandwidth of a link.

    Reference: the search for rings in NCCL (NVIDIA, `src/graph/search.cc`).

    >>> wires = ((0, 25e9, 25e9), (25e9, 0, 50e9), (25e9, 50e9, 0))
    >>> ring_bandwidth(wires, (1, 2)), ring_bandwidth(wires, (0, 1, 2))
    (50000000000.0, 50000000000.0)
    """
    if len(members) < 2:
        return max(map(sum, wires))
    unit, links = _links(wires, members)
    if len(members) == 2:
        return unit * links[0][1] or unit / 2
    return unit * 2 * _disjoint_tours(links) or unit / 2


def all_to_all_bandwidth(wires: Wires, members: Sequence[int]) -> float:
    """Bytes per second that each of `members` sends when all send to all: the weakest pair holds up
    the rest.

    Pairs without a link of their own count as half a link, as in `ring_bandwidth`.
    """
    if len(members) < 2:
        return max(map(sum, wires))
    unit, links = _links(wires, members)
    weakest = min(links[i][j] for i, j in itertools.combinations(range(len(members)), 2))
    return unit * (weakest or 0.5) * (len(members) - 1)


def _links(wires: Wires, members: Sequence[int]) -> tuple[float, _Links]:
    """The bandwidth of one link, and the links between each two members."""
    unit = min(filter(None, itertools.chain(*wires)))
    links = []
    for i in members:
        links.append(tuple(int(wires[i][j] // unit) for j in members))
    return unit, tuple(links)


@lru_cache(maxsize=1024)
def _disjoint_tours(links: _Links) -> int:
    """Largest number of closed tours through all devices of which no two share a link."""
    most = min(map(sum, links)) // 2
    num_tours = 0
    for tour in _tours(links) if most else ():
        left = [list(row) for row in links]
        for i, j in zip(tour, (*tour[1:], tour[0])):
            left[i][j] -= 1
            left[j][i] -= 1
        num_tours = max(num_tours, 1 + _disjoint_tours(tuple(map(tuple, left))))
        if num_tours == most:
            break
    return num_tours


def _tours(links: _Links, tour: tuple[int, ...] = (0,)) -> Iterator[tuple[int, ...]]:
    """All closed tours over links, each in both directions."""
    if len(tour) == len(links):
        if links[tour[-1]][0]:
            yield tour
        return
    for device, count in enumerate(links[tour[-1]]):
        if count and device not in tour:
            yield from _tours(links, (*tour, device))
