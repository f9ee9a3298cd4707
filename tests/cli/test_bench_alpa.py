"""`aliquot bench alpa` and `aliquot bench list`."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from command_line import refused, run

from aliquot.plans import Plan

TINY = """
[suite."tiny.plans"]
model = "gpt-10m"
set = { num_layers = 2, hidden_size = 64, vocab_size = 128 }
batch = 8
dtype = "float32"
cases = [
  { micro_batches = 2, published_s = 1.0, stages = [
    { layers = 1, mesh = "2x1" }, { layers = 1, mesh = "2x1", forced = false },
  ] },
  { data = 2, tensor = 2 },
  { devices = 64, data = 64, not_expressible = "nobody knows how" },
  { data = 64, batch = 64 },
]
[suite."tiny.forward"]
model = "gpt-10m"
forward_only = true
cases = [{ batch = 2, tensor = 2, pipeline = 2, dtype = "float32" }]
"""


MANY = """
[suite."many.layouts"]
model = "gpt-10m"
set = { num_layers = 2, hidden_size = 64, vocab_size = 128 }
dtype = "float32"
cases = [{ batch = [8, 16, 24], data = [1, 2], tensor = [1, 2] }]
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "suites.toml"
    path.write_text(TINY)
    return path


def test_plans_of_a_suite_are_saved_judged_and_not_made_again(tiny, tmp_path):
    asked = (
        "bench",
        "alpa",
        "tiny.plans",
        "--suites",
        tiny,
        "--predict",
        "--out",
        tmp_path / "out",
    )
    asked = (*asked, "--cluster", "4xV100-16GB", "--json")
    found = run(*asked)
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    stages, layout = answer["rows"]
    assert [row["outcome"] for row in answer["rows"]] == ["predicted", "predicted"]
    assert [each["case"] for each in answer["skipped"]] == [3, 4]
    assert "it needs 64 devices" in found.stderr
    plan = Plan.load(stages["plan_file"])
    assert [stage.layer_names[0] for stage in plan.stages][1].endswith("layers[1]")
    assert [stage.mesh_shape for stage in plan.stages] == [(2,), (2,)]
    assert plan.prediction.step_time_s == stages["predicted_s"]
    assert stages["predicted_to_published"] == pytest.approx(stages["predicted_s"])
    assert Plan.load(layout["plan_file"]).stages[0].mesh_shape == (2, 2)
    lines = (tmp_path / "out" / "rows.tsv").read_text().splitlines()
    assert len(lines) == 3
    again = run(*asked)
    assert json.loads(again.stdout) == answer and "prepare" not in again.stderr


def test_what_failed_is_made_again(tiny, tmp_path):
    asked = ("bench", "alpa", "tiny.forward", "--suites", tiny, "--out", tmp_path)
    asked = (*asked, "--predict", "--cluster", "4xV100-16GB", "--json")
    wanted = json.loads(run(*asked).stdout)["rows"]
    journal = tmp_path / "rows.jsonl"
    entry = json.loads(journal.read_text())
    entry["row"] |= {"outcome": "failed", "reason": "out of memory"}
    journal.write_text(json.dumps(entry) + "\n")
    (made,) = json.loads(run(*asked).stdout)["rows"]
    assert made["outcome"] == "predicted" and made["predicted_s"] == wanted[0]["predicted_s"]


def test_a_forward_pass_is_laid_out_in_stages(tiny, tmp_path):
    out = ("--out", tmp_path / "out", "--json")
    found = run("bench", "alpa", "tiny.forward", "--suites", tiny, "--predict", *out)
    (row,) = json.loads(found.stdout)["rows"]
    plan = Plan.load(row["plan_file"])
    assert row["outcome"] == "predicted"
    assert [stage.mesh_shape for stage in plan.stages] == [(2,), (2,)]
    assert plan.num_micro_batches == 1


def test_what_cannot_be_expressed_is_a_row_with_its_reason(tiny):
    asked = ("bench", "alpa", "tiny.plans", "--suites", tiny, "--case", "3", "--predict")
    (row,) = json.loads(run(*asked, "--json").stdout)["rows"]
    assert (row["outcome"], row["reason"]) == ("not expressible", "nobody knows how")


def test_a_row_says_that_its_search_was_ended_or_that_no_plan_was_in_time(tiny, tmp_path):
    asked = ("bench", "alpa", "tiny.plans", "--suites", tiny, "--predict", "--search", "--json")
    asked = (*asked, "--out", tmp_path / "out", "--case", "2", "--time-limit")
    given, ours = json.loads(run(*asked, "1ms").stdout)["rows"]
    for row in (given, ours):
        assert row["outcome"] in ("predicted", "failed"), row
        said = row["metadata"] if row["outcome"] == "predicted" else row["reason"]
        assert "time limit reached" in said or "No plan was complete after 1.0 ms" in said
    # Failed rows are made again with the time that there is now.
    rows = json.loads(run(*asked, "5min").stdout)["rows"]
    assert [row["outcome"] for row in rows] == ["predicted", "predicted"]
    refused(run("bench", "alpa", "tiny.plans", "--small", "--time-limit", "9s"), "add --predict")


def test_layers_without_embedding_have_none(tiny):
    asked = ("bench", "alpa", "gpt_no_embedding_inference.profile", "--predict", "--json")
    (row,) = json.loads(run(*asked, "--case", "1").stdout)["rows"]
    (whole,) = json.loads(
        run("bench", "alpa", "gpt_inference.profile", *asked[3:], "--case", "1").stdout
    )["rows"]
    assert row["outcome"] == whole["outcome"] == "predicted"
    tokens, positions, hidden = 51200, 1024, 2048
    ends = (tokens + positions) * hidden + 2 * hidden
    assert whole["billion_parameters"] - row["billion_parameters"] == pytest.approx(ends / 1e9)


def test_suites_are_listed(tiny):
    found = json.loads(run("bench", "list", "--suites", tiny, "--json").stdout)["suites"]
    assert [each["suite"] for each in found][-2:] == ["tiny.plans", "tiny.forward"]
    assert len(found) == 17
    shown = run("bench", "list", "gpt.perf_test_manual").stdout
    assert "dp2 tp2 pp2" in shown and "gpt-39b" in shown


def test_bad_input_is_refused(tiny):
    refused(run("bench", "alpa", "gtp.perf_test_auto", "--predict"), "did you mean 'gpt.perf")
    refused(run("bench", "alpa", "moe.perf_test_auto", "--case", "9", "--predict"), "1 to 7")
    refused(run("bench", "alpa", "gpt", "--predict", "--small"), "leave one out")
    refused(run("bench", "alpa", "gpt", "--verify"), "add --predict")
    alone = ("bench", "alpa", "gpt", "--predict", "--cluster", "1xV100-16GB")
    refused(run(*alone), "no case of gpt.grid_search_auto is for these devices", "--every-size")
    part = ("bench", "alpa", "gpt", "--predict", "--num-hosts", "9")
    refused(run(*part), "has 8 hosts with 8 devices each")
    refused(run("bench", "alpa", "gpt", "--predict", "--launch", "ray"), "--predict runs nothing")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "case"),
    [
        # Each model, and each sort of suite, once.
        ("wresnet.perf_test_auto", 4),
        ("gpt.perf_test_manual", 3),
        ("moe.perf_test_fast_2d", 3),
        ("gpt_no_embedding_inference.profile", 26),
        ("moe_inference.profile", 68),
        ("unet.perf_test_auto", 3),
    ],
)
def test_small_cases_run_and_equal_one_device(suite, case):
    command = [sys.executable, "-m", "aliquot", "bench", "alpa", suite, "--case", str(case)]
    found = subprocess.run([*command, "--small", "--search", "--json"], capture_output=True)
    for row in json.loads(found.stdout)["rows"]:
        assert row["outcome"] == "measured" and row["max_difference"] < 1e-4, row
        assert row["mean_s"] > 0 and row["predicted_s"] > 0 and row["num_devices"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["tiny.plans", "tiny.forward"])
def test_small_cases_run_in_several_processes(suite, tiny):
    command = [sys.executable, "-m", "aliquot", "bench", "alpa", suite, "--suites", str(tiny)]
    command += ["--case", "1", "--small", "--launch", "local:2", "--num-devices-per-host", "2"]
    found = subprocess.run([*command, "--json"], capture_output=True)
    (row,) = json.loads(found.stdout)["rows"]
    assert row["outcome"] == "measured" and row["mean_s"] > 0, row
    if suite == "tiny.plans":
        assert row["max_difference"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("what", "cases"), [("--predict", 12), ("--small", 4)])
def test_a_suite_that_is_killed_five_times_has_every_row_once(what, cases, tmp_path):
    path, out = tmp_path / "suites.toml", tmp_path / "out"
    path.write_text(MANY)
    command = [sys.executable, "-m", "aliquot", "bench", "alpa", "many.layouts", "--suites"]
    command += [str(path), what, "--json", "--out"]
    command += [str(out), *(word for k in range(cases) for word in ("--case", str(k + 1)))]
    journal, draw = out / "rows.jsonl", random.Random(4)

    def known() -> list[str]:
        text = journal.read_text() if journal.exists() else ""
        return [json.loads(line)["key"] for line in text.splitlines(keepends=True) if "\n" in line]

    for wanted in (0, 1, 0, 1, 0):
        before = len(known())
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        while len(known()) < before + wanted:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 3 if what == "--small" else 1))
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    done = known()
    found = subprocess.run(command, capture_output=True)
    rows = json.loads(found.stdout)["rows"]
    assert [row["case"] for row in rows] == [f"many.layouts {k + 1}" for k in range(cases)]
    assert len(known()) == len(set(known())) == cases and known()[: len(done)] == done
    assert len((out / "rows.tsv").read_text().splitlines()) == cases + 1
    assert {row["outcome"] for row in rows} == {"measured" if what == "--small" else "predicted"}
    if what == "--predict":
        whole = run("bench", "alpa", "many.layouts", "--suites", path, "--predict", "--json")
        wanted_s = [row["predicted_s"] for row in json.loads(whole.stdout)["rows"]]
        assert [row["predicted_s"] for row in rows] == wanted_s
