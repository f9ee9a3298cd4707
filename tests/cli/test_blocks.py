"""`aliquot blocks`, on a very small GPT and virtual devices."""

from __future__ import annotations

import functools
import io
import json

import jax
import pytest
from command_line import refused, run
from rich.console import Console

from aliquot.cli import _blocks
from aliquot.plans import Plan, violations
from aliquot.profiling import ProfileDatabase, SegmentKind
from aliquot.report import composed_text

MODEL = [
    "gpt-10m",
    "--global-batch",
    "8",
    "--set",
    "num_layers=2",
    "--set",
    "hidden_size=32",
    "--set",
    "num_heads=4",
]
MODEL += ["--seq-len", "16", "--dtype", "float32", "--recompute", "none"]


def answer_of(*args):
    found = run("blocks", *args, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def ask_once(monkeypatch):
    """From here on the commands share what they trace and price of one step."""
    ask, asked = _blocks._ask, {}

    def again(*question):
        key = repr(question)
        if key not in asked:
            asked[key] = ask(*question)
        return asked[key]

    monkeypatch.setattr(_blocks, "_ask", again)
    monkeypatch.setattr(SegmentKind, "promising", functools.cache(SegmentKind.promising))


def test_analyze_lists_blocks_segments_and_programs(tmp_path):
    found = run("blocks", "analyze", *MODEL, "--cluster", "4xH100", "--out", tmp_path / "found")
    assert found.exit_code == 0, found.output
    assert (
        "5 distinct ParallelBlocks on a mesh x=4, in 2 kinds of segment: 85 programs to measure"
        in found.stdout
    )
    assert "0 batch on x; 1 contraction on x; 2 output on x" in found.stdout
    assert "Found in" in found.stdout and "to trace the step" in found.stdout
    answer = answer_of("analyze", *MODEL, "--cluster", "4xH100")
    assert 0 < answer["trace_s"] < answer["seconds"] and answer["outside"] == []
    assert json.loads((tmp_path / "found" / "blocks.json").read_text()) == answer["blocks"]
    assert json.loads((tmp_path / "found" / "segments.json").read_text()) == answer["segments"]


@pytest.mark.slow
def test_profile_goes_on_where_it_was_and_search_plans_from_it(tmp_path, monkeypatch):
    database, out = tmp_path / "p.sqlite", tmp_path / "plan.json"
    here = [*MODEL, "--devices", "4", "--database", database]
    assert len(jax.devices()) == 8  # JAX has started with more than are asked for
    first = answer_of("profile", *here, "--repeats", "1", "--share", "1/20")
    assert first["programs"] == first["measured"] == 5 and first["missing"] == 0
    rows = [row for kind in first["kinds"] for row in kind["combinations"]]
    ran = [row for row in rows if row["measured_s"]]
    assert len(rows) == 85 and 0 < len(ran) <= 5 and all(row["measured_bytes"] for row in ran)
    again = answer_of("profile", *here, "--repeats", "1", "--share", "1/10", "--budget-s", "0")
    assert (again["known"], again["measured"]) == (5, 0) and again["missing"] == 5
    # Each profile traces the step anew, and so does the first search: its segments have the keys
    # that were measured.
    ask_once(monkeypatch)
    found = answer_of("search", *here, "--out", out, "--top", "2")
    assert len(found["found"]) == 2 and 0 <= found["found"][0]["measured_share"] <= 1
    plan = Plan.load(out)
    assert violations(plan) == [] and plan.provenance.planner == "blocks"
    again = answer_of("search", *here, "--run", "2", "--top", "3")
    times = [row.get("measured_s") for row in again["found"]]
    assert times[:2] == sorted(times[:2]) and times[0] > 0 and times[2] is None
    before, after = ([row["options"] for row in each["found"]][:2] for each in (found, again))
    assert sorted(before) == sorted(after) and again["found"][0]["compiled_bytes"] > 0
    assert len(again["costs_s"]) == 3 and again["flops_per_s"] == pytest.approx(
        again["flops"] / sorted(again["costs_s"])[1]
    )
    listed = answer_of("enumerate", *here, "--run", "1")
    assert len(listed["rows"]) == 81
    assert listed["rows"][0]["measured_communication_s"] > 0
    assert listed["rows"][0]["measured_compute_s"] > 0
    assert [r["composed_s"] for r in listed["rows"]] == sorted(
        r["composed_s"] for r in listed["rows"]
    )
    refused(
        run("blocks", "search", *here, "--require-measured", "1"),
        "was measured, and --require-measured asks for 100%",
    )
    refused(
        run("blocks", "search", *here, "--memory-limit", "1KiB"),
        "No combination fits",
        "the smallest needs",
        code=1,
    )


def test_search_says_where_nothing_was_measured(tmp_path, monkeypatch):
    ask_once(monkeypatch)
    ProfileDatabase(tmp_path / "p.sqlite").close()
    found = run("blocks", "search", *MODEL, "--devices", "4", "--database", tmp_path / "p.sqlite")
    assert found.exit_code == 0, found.output
    said = " ".join(found.stdout.split())
    assert "none of this step's segments" in said
    assert "0 of the 85 ways to split a segment are measured, the others modelled; 0% of" in said
    here = [*MODEL, "--devices", "4", "--database", tmp_path / "p.sqlite"]
    before, layer, head = answer_of("profile", *here, "--budget-s", "0")["kinds"]
    assert [len(kind["combinations"]) for kind in (before, layer, head)] == [1, 81, 3]
    times = [row["modelled_s"] for row in layer["combinations"]]
    assert times == sorted(times) and layer["count"] == 2
    for row in layer["combinations"]:
        assert row["outcome"] == "not measured" and row["modelled_bytes"] > 0
    assert "not measured" in run("blocks", "profile", *here, "--budget-s", "0").stdout


def test_a_plan_that_ran_is_shown_with_three_costs_and_what_it_computes():
    row = {
        "options": [[], [0]],
        "step_time_s": 0.5,
        "peak_memory_bytes": 2e9,
        "measured_share": 1.0,
    }
    answer = {
        "kinds": ["before", "layer"],
        "found": [{**row, "measured_s": 0.3, "combinations": 92, "measured_combinations": 2}],
        "costs_s": [0.29, 0.292, 0.294],
        "flops": 59.37e12,
        "flops_per_s": 203.3e12,
    }
    console = Console(file=io.StringIO(), width=200)
    console.print(composed_text(answer))
    shown = " ".join(console.file.getvalue().split())
    assert "2 of the 92 ways to split a segment are measured" in shown
    assert "290.0 ms, 292.0 ms, 294.0 ms" in shown
    assert "59.4 TFLOP a step, 203.3 TFLOP/s on all devices" in shown
    assert "before" not in shown and "layer" in shown


def test_bad_input_is_refused(tmp_path):
    here = [*MODEL, "--devices", "4", "--database", tmp_path / "none.sqlite"]
    refused(run("blocks", "search", *here), "There is no profile database")
    refused(run("blocks", "profile", *here, "--share", "3/2"), "--share 3/2", "such as 1/2")
    refused(
        run("blocks", "analyze", *MODEL, "--cluster", "4xH100", "--mesh", "8"),
        "--mesh 8 has 8 devices",
    )
    refused(
        run("blocks", "analyze", *MODEL, "--cluster", "4xH100", "--factors", "dense"),
        "factors='dense'",
    )
