"""All planners and schedules under test, those of the pages on how to add one among them."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from aliquot.planners import (
    ILP,
    AbstractInter,
    AbstractIntra,
    Blocks,
    Bottleneck,
    Fixed,
    Grid,
    StageDP,
)
from aliquot.plans import SCHEDULES, AbstractScheduleKind

DOCS = Path(__file__).parents[2] / "docs"


def example(page: str) -> types.ModuleType:
    """The Python code of a page as a module that can be imported by name, so that what it defines
    can be pickled.
    """
    name = f"planners.example_{page.removesuffix('.md').replace('-', '_')}"
    if name not in sys.modules:
        module = types.ModuleType(name)
        sys.modules[name] = module
        code = "\n".join(
            re.findall(
                r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE
            )
        )
        known = dict(SCHEDULES)
        exec(compile(code, str(DOCS / page), "exec"), module.__dict__)
        SCHEDULES.clear()
        SCHEDULES.update(known)
    return sys.modules[name]


INTRAS: dict[str, AbstractIntra] = {
    "ilp": ILP(),
    "fixed": Fixed(),
    "zero2": Fixed(zero_stage=2),
    "zero3": Fixed(zero_stage=3),
    "blocks": Blocks(),
    "blocks, cfp": Blocks(factors="cfp"),
    "example": example("add-a-planner.md").Greedy(),
}

# `ManualStages` has stages of its own for each chain, which the tests write.
INTERS: dict[str, AbstractInter] = {
    "stages": StageDP(),
    "bottleneck": Bottleneck(),
    "grid": Grid(),
    "example": example("add-a-planner.md").Balanced(),
}

KINDS: dict[str, AbstractScheduleKind] = {
    **SCHEDULES,
    "v-shaped": example("add-a-schedule.md").VShaped(),
}
TRAINING = [name for name, kind in KINDS.items() if kind.trains]


@pytest.fixture(autouse=True)
def all_schedules(monkeypatch):
    """The table of schedules with that of the page."""
    for name, kind in KINDS.items():
        monkeypatch.setitem(SCHEDULES, name, kind)
