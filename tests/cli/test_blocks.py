"""`aliquot blocks`, on a very small GPT and virtual devices."""

from __future__ import annotations

import functools
import json

import jax
import pytest
from command_line import refused, run

from aliquot.cli import _bench_cfp, _blocks
from aliquot.plans import Plan, violations
from aliquot.profiling import ProfileDatabase, SegmentKind
from aliquot.zoo import configure

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
    listed = answer_of("enumerate", *here)
    assert len(listed["rows"]) == 81
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


def test_search_says_where_nothing_was_measured(tmp_path):
    ProfileDatabase(tmp_path / "p.sqlite").close()
    found = run("blocks", "search", *MODEL, "--devices", "4", "--database", tmp_path / "p.sqlite")
    assert found.exit_code == 0, found.output
    assert "none of this step's segments" in " ".join(found.stdout.split())


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


@pytest.mark.slow
def test_cases_of_the_paper_are_planned_and_run(monkeypatch):
    monkeypatch.setattr(_bench_cfp, "_CASES", (_bench_cfp._Case("BERT", "bert-base", 2, 8, 4, 32),))
    found = run("bench", "cfp", "--only", "bert", "--run", "--json")
    assert found.exit_code == 0, found.output
    (row,) = json.loads(found.stdout)["rows"]
    assert row["num_programs"] == 91 and row["flops_per_s"] > 0
    assert (
        row["integer_program_s"] * (1 - 2e-3)
        <= row["step_time_s"]
        <= row["data_parallel_s"] * (1 + 1e-9)
    )
    assert row["small_measured_s"] > 0 and row["small_data_parallel_s"] > 0
    refused(run("bench", "cfp", "--only", "resnet"), "--only resnet", "there are BERT")


def test_cases_run_in_several_processes_only_if_they_run():
    refused(run("bench", "cfp", "--launch", "local:2"), "--launch local:2", "Add --run")
    refused(run("bench", "cfp", "--run", "--launch", "loal:2"), "did you mean 'local:2'?")


def test_every_case_of_the_paper_is_a_model_of_the_zoo():
    for case in _bench_cfp._CASES:
        configure(case.model, num_layers=case.num_layers, seq_len=case.seq_len)
