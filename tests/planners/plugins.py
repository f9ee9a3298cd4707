"""All planners and schedules under test, those of the pages on how to add one among them."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

from aliquot.planners import ILP, AbstractIntra, Fixed

DOCS = Path(__file__).parents[2] / "docs"


def example(page: str) -> types.ModuleType:
    """The Python code of a page as a module that can be imported by name, so that what it defines can be pickled."""
    name = f"planners.example_{page.removesuffix('.md').replace('-', '_')}"
    if name not in sys.modules:
        module = types.ModuleType(name)
        sys.modules[name] = module
        code = "\n".join(re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE))
        exec(compile(code, str(DOCS / page), "exec"), module.__dict__)
    return sys.modules[name]


INTRAS: dict[str, AbstractIntra] = {
    "ilp": ILP(),
    "fixed": Fixed(),
    "zero2": Fixed(zero_stage=2),
    "zero3": Fixed(zero_stage=3),
    "example": example("add-a-planner.md").Greedy(),
}
