"""`aliquot plan --recompute auto`: never slower than with either way of recomputing."""

import json

import pytest
from command_line import TINY, refused, run

DEEP = "gpt-125m --cluster 1x4xA100-80GB --global-batch 32 --scan --method zero3".split()


def planned(args, recompute, *more):
    found = run("plan", *args, "--recompute", recompute, "--json", "--no-remedies", *more)
    return json.loads(found.stdout) if found.exit_code == 0 else None


@pytest.mark.parametrize("limit", ["60GiB", "5GiB", "100MiB"])
def test_auto_is_the_faster_of_both(limit):
    auto, none, block = (
        planned(DEEP, how, "--memory-limit", limit) for how in ("auto", "none", "block")
    )
    fitting = [each["step_time_s"] for each in (none, block) if each]
    assert (auto and auto["step_time_s"]) == min(fitting, default=None)


def test_the_limits_of_the_test_decide_differently():
    answers = [
        [planned(DEEP, how, "--memory-limit", size) is None for how in ("none", "block")]
        for size in ("60GiB", "5GiB")
    ]
    assert answers == [[False, False], [True, False]]


def test_the_other_way_is_listed_among_what_was_tried(tmp_path):
    path = tmp_path / "plan.json"
    found = run("plan", *TINY, "--method", "dp", "--recompute", "auto", "--out", path)
    assert found.exit_code == 0, found.stderr
    plan = json.loads(path.read_text())
    assert plan["model"]["settings"]["recompute"] == "none"
    assert "recompute block" in [each["name"] for each in plan["provenance"]["candidates"]]


def test_a_time_limit_is_kept_over_both():
    found = run("plan", *TINY, "--recompute", "auto", "--time-limit", "1us")
    assert found.exit_code == 1 and "whether one fits is not known" in found.stderr


def test_the_largest_batch_needs_one_way():
    refused(
        run("plan", *TINY, "--recompute", "auto", "--max-batch"),
        "--recompute none or --recompute block",
    )
