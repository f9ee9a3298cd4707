"""The tables of Aceso's artifact: what was measured and predicted of the paper's models."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from ...core import InputError

PAPER_SIZES = {
    "gpt": ("1_3B", "2_6B", "6_7B", "13B"),
    "t5": ("3B", "6B", "11B", "22B"),
    "resnet": ("2B", "4B", "6_8B", "13B"),
}
"""The sizes of each family, on 4, 8, 16 and 32 GPUs."""

PAPER_TITLES = {"gpt": "GPT", "t5": "T5", "resnet": "Wide-ResNet"}
"""How each family is called."""

_Table = dict[str, dict[str, float]]


def accuracy_rows(published: PublishedTables, *, setting: str = "large") -> list[dict[str, Any]]:
    """For each model of a setting: iteration time and memory, predicted by Aceso and measured."""
    rows = []
    for family in PAPER_SIZES:
        times = published.table(f"perf_model_time_{setting}_{family}")
        memory = published.table(f"perf_model_mem_{setting}_{family}")
        for size, measured_s in times.get("actual", {}).items():
            predicted_mb = [
                memory.get(f"predict ({part})", {}).get(size) for part in ("norm", "extra")
            ]
            measured_mb = memory.get("actual", {}).get(size)
            total = sum(part or 0 for part in predicted_mb)
            rows.append(
                {
                    "model": f"{PAPER_TITLES[family]} {size}",
                    "predicted s": times["predict"][size],
                    "measured s": measured_s,
                    "time off by": f"{times['predict'][size] / measured_s - 1:+.1%}",
                    "predicted MiB": total,
                    "measured MiB": measured_mb,
                    "memory off by": f"{total / measured_mb - 1:+.1%}" if measured_mb else "",
                }
            )
    return rows


class PublishedTables:
    """The tables of the artifact by name: a row for each system, a column for each size.

    Args:
        folder: of CSV files; None for no tables.

    Raises:
        InputError: the folder has none, or a file is no table of numbers.
    """

    def __init__(self, folder: Path | None) -> None:
        paths = sorted(folder.glob("*.csv")) if folder is not None else []
        if folder is not None and not paths:
            raise InputError(f"{folder} holds no CSV files of the artifact's figures.")
        self._tables: dict[str, _Table] = {}
        for path in paths:
            try:
                rows = list(csv.reader(path.read_text().splitlines()))
                self._tables[path.stem] = {
                    row[0]: dict(zip(rows[0][1:], map(float, row[1:]), strict=True))
                    for row in rows[1:]
                    if row
                }
            except (OSError, ValueError, IndexError) as error:
                raise InputError(f"{path} is no table of numbers with a header: {error}.") from None

    def table(self, name: str) -> _Table:
        """A table; empty if there is none of this name."""
        return self._tables.get(name, {})
