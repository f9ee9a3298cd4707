"""The pictures of the documentation show what the program draws today."""

import re
from pathlib import Path

import pytest
from browser.pictures import COMMANDS, NARROWER, PICTURES, digest, mesh, noted, page_of

DOCS = Path(__file__).parents[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_picture_is_of_the_page_that_its_commands_write_today(name, tmp_path):
    assert digest(page_of(name, tmp_path)) == noted(name), "draw it again: make pictures"


def test_the_mesh_is_that_of_a_plan_made_today(tmp_path):
    assert mesh(tmp_path) == (PICTURES / "mesh.svg").read_text(), "draw it again: make pictures"
    assert "docs/pictures/mesh.svg" in (DOCS / "README.md").read_text()


def test_every_picture_is_drawn_by_commands_and_shown():
    drawn = {path.stem for path in PICTURES.glob("*.png")}
    assert drawn == {*COMMANDS, *(f"{name}-{width}" for name in COMMANDS for width in NARROWER)}
    pages = [DOCS / "README.md", *(DOCS / "docs").glob("*.md")]
    shown = {
        name for page in pages for name in re.findall(r"pictures/(\w+)\.png", page.read_text())
    }
    assert shown == set(COMMANDS)
