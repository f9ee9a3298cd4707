"""Names of layers, by the parameters that they use first."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence

# Rows of a stacked parameter, as `split_scans` names them.
_ROWS = re.compile(r"(.*?)(\[\d+:\d+\])$")


def layer_names(
    starts: Sequence[int], ends: Sequence[int], users: Sequence[Sequence[str]]
) -> tuple[str, ...]:
    """Names of layers: the rows of the stacked parameters that a layer uses first, the numbered
    module with most of its parameters, or the common part of their paths. Without parameters of its
    own, the last is called "output", and others are parts of the layer before.
    """
    seen: set[str] = set()
    names: list[str] = []
    for number, (a, b) in enumerate(zip(starts, ends, strict=True)):
        new_paths = [p for used in users[a:b] for p in used if p not in seen]
        seen.update(new_paths)
        stacked: dict[str, list[str]] = {}
        for m in map(_ROWS.match, new_paths):
            if m:
                stacked.setdefault(m.group(2), []).append(m.group(1))
        numbered = Counter(m.group() for m in (re.match(r".*?\d+\]?", p) for p in new_paths) if m)
        if stacked:
            rows = max(stacked, key=lambda r: len(stacked[r]))
            common = os.path.commonprefix(stacked[rows]).rstrip(".[") + rows
        else:
            common = (
                numbered.most_common(1)[0][0]
                if numbered
                else os.path.commonprefix(new_paths).rstrip(".[")
            )
        is_last = number == len(starts) - 1
        names.append(common or ("output" if is_last else names[-1] if names else "input"))
    return tuple(names)
