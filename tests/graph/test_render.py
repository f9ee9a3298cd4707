"""Listings and drawings of a graph."""

from __future__ import annotations

import re

from graph.steps import STEPS, shapes

from aliquot.graph import capture, to_dot, to_text


def made(name):
    step = STEPS[name]()
    return capture(step.fn, *shapes(step.args), **step.kwargs)


def test_text_lists_inputs_bodies_and_results():
    graph = made("scan_layers_remat")
    text = to_text(graph)
    assert "parameter  params.w -> output 1" in text
    assert "batch  batch.x" in text
    assert " = scan(" in text and " = remat(" in text
    assert re.search(r"^    +forward x3 .*dot_general\(", text, re.MULTILINE)
    listed = re.findall(r"^ *(?:prologue|forward|backward|update) ", text, re.MULTILINE)
    assert len(listed) == sum(not op.is_link for op in graph.ops)


def test_text_can_be_short():
    text = to_text(made("plain_params_loss"), max_ops=3)
    assert "more lines" in text and len(text.splitlines()) == 1 + 6 + 3 + 1 + 5


def test_dot_draws_every_operator_and_input():
    graph = made("while_and_cond")
    dot = to_dot(graph)
    assert dot.startswith("digraph {") and dot.endswith("}")
    assert len(re.findall(r"^  o\d+ \[", dot, re.MULTILINE)) == len(graph.ops)
    assert "params.w\\nparameter" in dot
    drawn = set(re.findall(r"^  (\w+) \[", dot, re.MULTILINE))
    for source, target in re.findall(r"^  (\w+) -> (\w+);", dot, re.MULTILINE):
        assert source in drawn and target in drawn
