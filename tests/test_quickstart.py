"""The quickstart's own code, run from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[1] / "docs" / "quickstart.md"
_NUMBER = r"\d+\.\d+"


def test_the_quickstart_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    rows = np.ones((8192, 256), np.float32)
    names: dict[str, object] = {"batches": [{"x": rows, "y": rows}] * 2}
    for block in blocks:
        exec(block, names)
    assert (tmp_path / "plan.json").exists()
    shown = re.search(r"```\n(train_step on .*?)```", PAGE.read_text(), re.DOTALL)
    assert shown
    printed = str(names["plan"]).splitlines()[: len(shown[1].splitlines())]
    # Releases of JAX differ in how many operators they write, and so by microseconds.
    assert [re.sub(_NUMBER, "#", line) for line in printed] == [
        re.sub(_NUMBER, "#", line) for line in shown[1].splitlines()
    ]
    found, wanted = (
        [float(x) for x in re.findall(_NUMBER, text)] for text in ("\n".join(printed), shown[1])
    )
    assert found == pytest.approx(wanted, rel=0.03)
    first, second = (
        names["metrics"]["loss"],
        names["loss_fn"](names["state"]["params"], names["batches"][0]),
    )
    # The fastest plan may be a pipeline, whose arrays lie on the devices of their stages.
    assert float(second) < float(first)
