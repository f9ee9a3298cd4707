"""The planners and the schedule of the documentation are as short as the pages promise: one class
each, and what it calls.
"""

import re

import pytest
from planners.plugins import DOCS


@pytest.mark.parametrize(("page", "count"), [("add-a-planner.md", 2), ("add-a-schedule.md", 2)])
def test_examples_are_of_sixty_lines_at_most(page, count):
    blocks = re.findall(
        r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(blocks) == count
    assert all(len(code.splitlines()) <= 60 for code in blocks)
