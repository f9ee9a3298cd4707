"""The pictures of the documentation show what the program draws today."""

import re
from pathlib import Path

import pytest
from browser.pictures import COMMANDS, PICTURES, digest, noted, page_of

DOCS = Path(__file__).parents[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_picture_is_of_the_page_that_its_commands_write_today(name, tmp_path):
    assert digest(page_of(name, tmp_path)) == noted(name), "draw it again: make pictures"


def test_every_picture_is_drawn_by_commands_and_shown():
    assert {path.stem for path in PICTURES.glob("*.png")} == set(COMMANDS)
    pages = [DOCS / "README.md", *(DOCS / "docs").glob("*.md")]
    shown = {
        name for page in pages for name in re.findall(r"pictures/(\w+)\.png", page.read_text())
    }
    assert shown == set(COMMANDS)
