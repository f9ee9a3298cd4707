"""The quickstart's own code, run from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

PAGE = Path(__file__).parents[1] / "docs" / "quickstart.md"


def test_the_quickstart_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    rows = np.ones((8192, 256), np.float32)
    names: dict[str, object] = {"batches": [{"x": rows, "y": rows}] * 2}
    for block in blocks:
        exec(block, names)
    assert (tmp_path / "plan.json").exists()
    shown = re.search(r"```\n(train_step on .*?)```", PAGE.read_text(), re.DOTALL)
    # Releases of JAX differ in how many operators they write, and so by microseconds.
    assert shown and _with_whole_times(str(names["plan"])).startswith(_with_whole_times(shown[1]))
    first, second = (
        names["metrics"]["loss"],
        names["loss_fn"](names["state"]["params"], names["batches"][0]),
    )
    # The fastest plan may be a pipeline, whose arrays lie on the devices of their stages.
    assert float(second) < float(first)


def _with_whole_times(text: str) -> str:
    return re.sub(r"\d+\.\d+", "#", text)
