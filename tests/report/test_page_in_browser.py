"""Pages of plans in Chromium; it needs a package (`make page-test` installs it)."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from browser.pictures import COMMANDS, NARROWER, PICTURES, page_of
from report.test_page import COMPARISON
from sample_plans import PREDICTION, sample_pipeline, sample_plan

from aliquot.plans import MemoryCurve
from aliquot.report import compare_page, page

RENDER = Path(__file__).parents[1] / "browser" / "render.py"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("PySide6") is None,
    reason="no browser for Python is installed; make page-test installs one",
)
CURVE = MemoryCurve(
    phases=("forward",) * 8 + ("backward",) * 8 + ("update",) * 2,
    parts={
        "parameters": (2048.0,) * 18,
        "activations": tuple(119.0 * k for k in (*range(1, 9), *range(8, 0, -1), 0, 0)),
    },
)
PLANS = {
    "program": sample_plan(
        prediction=PREDICTION.__class__(
            **{name: getattr(PREDICTION, name) for name in PREDICTION.__struct_fields__}
            | {"memory_over_time": CURVE}
        )
    ),
    "pipeline": sample_pipeline(),
    "strange names": sample_plan(
        notes=("<script>document.title = 'run'</script> & \"quoted\"",), method="<b>"
    ),
}


PAGES = {**{name: page(plan) for name, plan in PLANS.items()}, "compared": compare_page(COMPARISON)}


def shown(folder, *options):
    """What the browser reports of each page, by name."""
    paths = [folder / f"{name.replace(' ', '_')}.html" for name in PAGES]
    for path, text in zip(paths, PAGES.values(), strict=True):
        path.write_text(text)
    ended = subprocess.run(
        [sys.executable, str(RENDER), *options, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return dict(zip(PAGES, found, strict=True))


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """What the browser reports of each page, and where its picture lies."""
    folder = tmp_path_factory.mktemp("pages")
    found = shown(folder, "--unfold")
    return {name: (found[name], folder / f"{name.replace(' ', '_')}.png") for name in PAGES}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 800, 1440])
def test_no_column_is_cut_and_texts_stay_in_their_pictures(tmp_path, width, dark):
    for found in shown(
        tmp_path, "--width", str(width), "--unfold", *(["--dark"] if dark else [])
    ).values():
        assert found["width"] <= width and found["outside"] == []
        assert found["colliding"] == []
        assert found["background"] == ("rgb(20, 25, 31)" if dark else "rgb(255, 255, 255)")


@pytest.mark.parametrize("name", PAGES)
def test_the_browser_shows_all_of_the_page(rendered, name):
    found, _ = rendered[name]
    assert found["loaded"] and found["logged"] == []
    assert found["pictures"] >= 3 and found["empty"] == 0 and found["outside"] == []
    assert found["width"] <= 1000


def test_sections_of_a_program_and_of_a_pipeline(rendered):
    program, pipeline = rendered["program"][0]["headings"], rendered["pipeline"][0]["headings"]
    assert program[:2] == ["Asked", "Memory on each device, to the limit (predicted)"]
    assert {"Stages (predicted)", "Schedule (predicted)"} <= set(pipeline)


def test_colours_of_memory_reach_the_screen(rendered):
    """Pixels of the stacked areas: of parameters at the bottom, of activations above."""
    from matplotlib.image import imread

    picture = (imread(rendered["program"][1])[:, :, :3] * 255).round().astype(np.int64)
    for colour in ((0x00, 0x72, 0xB2), (0x00, 0x9E, 0x73)):
        assert (np.abs(picture - np.array(colour)).max(axis=2) <= 2).sum() > 5000


@pytest.mark.parametrize("name", COMMANDS)
def test_pages_look_as_they_did(tmp_path, name):
    """Pixels of the pictures in the documentation beside those of today, at three widths."""
    from matplotlib.image import imread

    path = page_of(name, tmp_path)
    # On which day it is written is no change of its looks.
    path.write_text(re.sub(r"(<dt>date</dt><dd>)[^<]*", r"\g<1>2026-11-28", path.read_text()))
    for width in (1000, *NARROWER):
        ending = "" if width == 1000 else f"-{width}"
        subprocess.run(
            [sys.executable, str(RENDER), "--width", str(width), str(path)],
            check=True,
            capture_output=True,
            timeout=240,
        )
        today, before = (
            imread(file)[:, :, :3]
            for file in (path.with_suffix(".png"), PICTURES / f"{name}{ending}.png")
        )
        assert abs(today.shape[0] - before.shape[0]) <= 4, (name, width)
        height = min(today.shape[0], before.shape[0])
        differ = np.abs(today[:height] - before[:height]).max(axis=2) > 0.25
        assert differ.mean() < 0.01, (name, width, differ.mean())


def test_texts_of_a_plan_run_nothing(rendered):
    assert rendered["strange names"][0]["title"] != "run"
