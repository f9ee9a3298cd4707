"""Rows that a search adds to its program, and programs over a part of its choices with these rows.

A program begins without memory rows. Each solution's memory over time is computed, and where it
exceeds the limit, a row for that moment is added and the program is solved again. Rows exclude only
what does not fit, so the bound holds with any number of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ....cost import takes_turns, timeline
from ._judging import model_in_turn
from ._layout import Choices
from ._program import Program, add_memory_row, build_program, exclude

if TYPE_CHECKING:
    from ._solve import Floats, Ints, Search


def add_rows(search: Search, use: Floats) -> bool:
    """Add memory rows for up to three moments that exceed the limit most; True if there are any.

    Args:
        use: bytes at each moment.
    """
    over = np.flatnonzero(use > search.limit_bytes * (1 + 1e-9))
    over = np.setdiff1d(over, np.array(search.times, np.int64))
    if not len(over):
        return False
    # One moment for each stretch above the limit, as neighbouring moments hold the same arrays.
    stretches = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    model = model_in_turn(search, search.in_turn)
    peaks = sorted((int(part[np.argmax(use[part])]) for part in stretches), key=lambda t: -use[t])
    for time in peaks[:3]:
        search.times.append(time)
        add_memory_row(
            search.program, search.choices, search.priced, model, time, search.limit_bytes
        )
    return True


def add_unpaid_excess(search: Search, picks: Ints) -> bool:
    """Add excess columns for the shared conversions that the program undercharges under these
    choices; True if there are any.
    """
    groups, uses = search.program.groups, np.zeros(len(search.program.groups.counts), np.int64)
    for edge, table in zip(search.priced.graph.edges, search.priced.edges, strict=True):
        source = table.sources[table.source_index[picks[edge.source]]]
        target = table.targets[table.target_index[picks[edge.target]]]
        number = groups.number.get((edge.share, (source, target)))
        if number is not None:
            uses[number] += 1
    return search.program.add_excess(np.flatnonzero((uses > 0) & (uses < groups.counts)))


def assume_deferred(search: Search, picks: Ints) -> bool:
    """Let memory rows assume from now on that every deferrable product is deferred, if they have
    assumed "at once" and these choices defer. True if the choices then exceed the limit, so that
    rows were added.
    """
    if not search.in_turn or takes_turns(search.priced, picks):
        return False
    search.in_turn, search.assumes_deferred, search.times = False, True, []
    return add_rows(search, timeline(model_in_turn(search, False), search.priced, picks))


def without_costly_choices(search: Search, best_s: float) -> tuple[Program, Choices]:
    """The program without choices whose reduced cost alone raises the bound above `best_s`
    (reduced-cost fixing).
    """
    if not np.isfinite(best_s) or search.relaxed.values is None:
        return search.program, search.choices
    room = best_s - search.relaxed.bound_s
    allowed = []
    for node, columns, kept in zip(
        search.priced.nodes, search.choices.columns, search.choices.allowed, strict=True
    ):
        mask = np.zeros(len(node.choices), bool)
        mask[kept[search.relaxed.reduced_costs[columns] <= room + 1e-12]] = True
        allowed.append(mask)
    # Groups that are added one by one, as solutions use them, would take an integer program each.
    return restricted(search, allowed, exactly=search.is_undercharged)


def restricted(
    search: Search, allowed: Sequence[NDArray[np.bool_]], *, exactly: bool = False
) -> tuple[Program, Choices]:
    """The program over some choices only, with the memory rows and exclusions so far.

    Args:
        exactly: charge all shared conversions in full, not only those that solutions used.
    """
    program, choices = build_program(search.pruned, allowed)
    groups = program.groups.number
    needed = range(len(groups)) if exactly else _excess_groups_in(search, groups)
    program.add_excess(np.array(list(needed), np.int64))
    for time in search.times:
        add_memory_row(
            program,
            choices,
            search.pruned,
            model_in_turn(search, search.in_turn),
            time,
            search.limit_bytes,
        )
    for picks in search.excluded:
        exclude(program, choices, picks)
    return program, choices


def _excess_groups_in(search: Search, groups: Mapping[tuple[int, Hashable], int]) -> Iterator[int]:
    """Another program's numbers of those groups for which the search's program has an excess
    column.
    """
    for key, number in search.program.groups.number.items():
        if number in search.program.excess and key in groups:
            yield groups[key]
