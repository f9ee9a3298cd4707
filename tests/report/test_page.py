"""The page of a plan: well-formed, complete, and free of anything from elsewhere."""

from xml.etree import ElementTree

import pytest
from command_line import run
from sample_plans import sample_pipeline, sample_plan

from aliquot.report import page


@pytest.mark.parametrize("plan", [sample_plan(), sample_pipeline()], ids=["program", "pipeline"])
def test_page_is_whole_and_stands_alone(plan):
    text = page(plan)
    body = ElementTree.fromstring(text[text.index("<body>") : text.index("</html>")])
    titles = [heading.text for heading in body.iter("h2")]
    assert any(title.startswith("Memory on each device") for title in titles)
    assert ("Stages (predicted)" in titles) == (len(plan.stages) > 1)
    assert not any(word in text for word in ("http:", "https:", "<script", "src=", "@import"))
    assert len(list(body.iter("svg"))) >= 2


def test_texts_of_a_plan_file_are_escaped_in_html():
    assert "<img" not in page(sample_plan(notes=("<img onerror=1>",)))


def test_explain_writes_the_page(tmp_path):
    sample_plan().save(tmp_path / "plan.json")
    found = run("explain", tmp_path / "plan.json", "--no-alternatives", "--html", tmp_path / "page.html")
    assert found.exit_code == 0 and "The page is in" in found.stdout
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
