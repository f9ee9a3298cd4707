"""New parameters that are gathered row by row, each row into its place in the memory of the old
ones.

A gather along another dim than the first leaves a copy with that dim in front. An array that is
gathered whole is therefore held twice, and so, at the same time, are all others that are gathered
at the end of a step.
"""

from __future__ import annotations

from ._spec import REPLICATED, Spec

# Smallest row that is gathered by itself: its time is bandwidth, not latency.
_LEAST_ROW_BYTES = 2**20


def gathered_by_rows(
    length: int, rank: int, num_bytes: int, source: Spec, target: Spec, above_bytes: float
) -> bool:
    """True if an array that replaces another one is gathered along its first dim's rows.

    Args:
        length: of its first dim.
        rank: number of its dims.
        num_bytes: of the whole array.
        source, target: its split, and that of what it replaces.
        above_bytes: smaller arrays are gathered together with others instead.

    >>> [gathered_by_rows(32, 3, 2**30, (dim,), (-1,), 2**24) for dim in (1, 0)]
    [True, False]
    """
    if rank < 3 or num_bytes <= above_bytes or num_bytes < length * _LEAST_ROW_BYTES:
        return False
    pairs = list(zip(source, target, strict=True))
    return source != target and all(
        # Along the first dim tiles are whole rows: gathered at once they lie where they belong,
        # without a copy.
        s != 0 and (t == s or (s > 0 and t == REPLICATED))
        for s, t in pairs
    )
