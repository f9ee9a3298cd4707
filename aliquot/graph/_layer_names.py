"""Names of layers, by the parameters that they use first, and of operators, by their own."""

from __future__ import annotations

import itertools
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
        new_paths = [p for p in itertools.chain(*users[a:b]) if p not in seen]
        seen.update(new_paths)
        stacked: dict[str, list[str]] = {}
        for m in map(_ROWS.match, new_paths):
            if m:
                stacked.setdefault(m.group(2), []).append(m.group(1))
        matches = [re.match(r".*?\d+\]?", p) for p in new_paths]
        numbered = Counter(m.group() for m in matches if m)
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


def operator_names(
    starts: Sequence[int],
    ends: Sequence[int],
    users: Sequence[Sequence[str]],
    products: Sequence[int],
) -> tuple[str, ...]:
    """Names of operators, each another: the common part of the paths of the parameters that its
    products read, or else of all that it reads. Further ones of the same parameters, and those
    without parameters, are counted from there: `layers[0].v+1`.

    Args:
        users: for each place, the paths of the parameters that it reads.
        products: places of the products.
    """
    named: Counter[str] = Counter()
    names: list[str] = []
    base = "input"
    for a, b in zip(starts, ends, strict=True):
        own = [users[place] for place in products if a <= place < b]
        paths = list(itertools.chain(*own)) or list(itertools.chain(*users[a:b]))
        # Whole keys of paths, not the first letters of keys.
        base = ".".join(os.path.commonprefix([path.split(".") for path in paths])) or base
        is_last = len(names) == len(starts) - 1
        again = "output" if is_last and not paths else f"{base}+{named[base]}"
        names.append(again if named[base] else base)
        named[base] += 1
    return tuple(names)
