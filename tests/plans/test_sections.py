"""What is shown of a plan is made once: terminals, the explanation and the page show the same
rows.
"""

import re
from html import unescape

import msgspec
import pytest
from sample_plans import PROVENANCE, sample_pipeline, sample_plan

from aliquot.plans import EXPLAINED, InferredRule, SectionKind, describe, fact_rows, sections
from aliquot.plans._sections import PRINTED
from aliquot.report import as_text, explanation, page

replace = msgspec.structs.replace
PRINTED_KINDS = ("tried", "stages", "arrays", "communication", "notes")
CANDIDATES = (
    {"name": "slow", "mesh": [8], "step_time_s": 0.03, "lower_bound_s": 0.01, "outcome": "slower"},
    {"name": "none", "mesh": [4, 2], "outcome": "does not fit"},
    {"name": "fast", "mesh": "2 meshes", "step_time_s": 0.02, "outcome": "best found"},
)
PLANS = {
    "program": sample_plan(
        provenance=replace(PROVENANCE, candidates=CANDIDATES),
        inferred_rules=(InferredRule(primitive="mystery", count=2, rule="ab->ab"),),
    ),
    "pipeline": sample_pipeline(16),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_printed_rows_are_explained_and_are_on_the_page(plan):
    explained = [line.split() for line in as_text(explanation(plan), width=400).splitlines()]
    # Cells without their classes and the headings that they show on a phone.
    on_page = unescape(re.sub("<td [^>]*>", "<td>", page(plan)).replace("<wbr/>", ""))
    printed = describe(plan, every=True).splitlines()
    shown = [section for section in sections(plan, PRINTED) if section.kind in PRINTED_KINDS]
    assert {"tried", "arrays", "communication"} <= {s.kind for s in shown} or plan is PLANS[
        "pipeline"
    ]
    for section in shown:
        assert section.title in printed
        for row in section.rows:
            assert " ".join(row).split() in [line.split() for line in printed]
            assert " ".join(row).split() in explained
            assert "".join(f"<td>{cell}</td>" for cell in row) in on_page
    for name, text in fact_rows(plan):
        if name:
            assert [*name.split(), *text.split()] in explained
            assert f"<td>{name}</td><td>{text}</td>" in on_page


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_more_detail_adds_rows_and_changes_none(plan):
    for short, long in zip(sections(plan, PRINTED), sections(plan, EXPLAINED), strict=False):
        assert short.kind == long.kind and short.header == long.header
        assert short.rows == long.rows[: len(short.rows)]


def test_tried_plans_stand_by_their_step_time_and_unpriced_ones_last():
    tried = next(iter(sections(PLANS["program"], EXPLAINED)))
    assert tried.kind == SectionKind.TRIED
    assert [row[:4] for row in tried.rows] == [
        ("fast", "2 meshes", "20.0 ms", ""),
        ("slow", "8", "30.0 ms", "10.0 ms"),
        ("none", "4x2", "", ""),
    ]
    assert tried.amounts == (0.02, 0.03)


def test_a_column_without_bounds_is_left_out():
    plan = sample_plan(provenance=replace(PROVENANCE, candidates=CANDIDATES[1:]))
    assert next(iter(sections(plan, EXPLAINED))).header == (
        "method",
        "mesh",
        "step time",
        "outcome",
    )


def test_names_of_methods_that_say_nothing_are_explained_below_the_table():
    shown = ("shard, x only for the batch", "zero3", "shard", "pipeshard, 2 stages, 1f1b", "blocks")
    shown += ("zero2, gradients split after the last micro-batch",)
    candidates = tuple({"name": name, "step_time_s": 0.1, "outcome": "slower"} for name in shown)
    plan = sample_plan(provenance=replace(PROVENANCE, candidates=candidates))
    remarks = next(iter(sections(plan, EXPLAINED))).remarks
    assert [text.partition(":")[0] for text in remarks] == [
        "shard",
        "pipeshard",
        "blocks",
        "only for the batch",
        "after the last micro-batch",
    ]
    assert f"  {remarks[0]}" in describe(plan).splitlines() and remarks[0] in page(plan)
    assert not next(iter(sections(PLANS["program"], EXPLAINED))).remarks


def test_what_was_not_searched_comes_last_whatever_it_promises():
    candidates = (
        {"name": "shard", "step_time_s": 0.2, "outcome": "slower"},
        {
            "name": "pipeshard, 8 micro-batches",
            "step_time_s": 0.1,
            "outcome": "not searched: limit",
        },
        {"name": "zero3", "step_time_s": None, "outcome": "does not fit"},
    )
    plan = sample_plan(provenance=replace(PROVENANCE, candidates=candidates))
    rows = next(iter(sections(plan, EXPLAINED))).rows
    assert [row[0] for row in rows] == ["shard", "zero3", "pipeshard, 8 micro-batches"]


def test_what_a_bound_ruled_out_says_so():
    chosen_s = sample_plan().prediction.step_time_s
    names = {"as slow": 1.0, "slower": 1.002}
    candidates = tuple(
        {"name": name, "outcome": "slower", "lower_bound_s": ratio * chosen_s}
        for name, ratio in names.items()
    )
    plan = sample_plan(provenance=replace(PROVENANCE, candidates=candidates))
    outcomes = {row[0]: row[-1] for row in next(iter(sections(plan, EXPLAINED))).rows}
    assert outcomes["as slow"] == "not planned further: not faster"
    assert outcomes["slower"] == "not planned further: at least 0.20% slower"


def test_splits_have_a_legend_where_they_are_listed():
    plan = sample_plan(provenance=replace(PROVENANCE, candidates=CANDIDATES))
    legend = "  sharding: for each dim of an array the mesh axis that splits it, - for none;"
    assert legend in describe(plan, every=True) and legend not in describe(plan)


def test_notes_that_are_left_out_are_counted():
    plan = sample_plan(notes=tuple(f"note {k}" for k in range(9)))
    assert "  and 3 more" in str(plan) and "note 8" not in str(plan)
    assert "note 8" in as_text(explanation(plan)) and "note 8" in page(plan)


def test_numbers_stay_with_their_units_where_facts_wrap():
    for width in range(60, 121):
        for text in (
            describe(PLANS["pipeline"], width),
            as_text(explanation(PLANS["pipeline"]), width=width),
        ):
            facts = text.partition("\n\n")[0].splitlines()
            assert not any(
                line.lstrip().startswith(("ms ", "us ", "GiB ", "MiB ")) for line in facts
            ), text
