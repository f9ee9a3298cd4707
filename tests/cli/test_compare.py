"""`aliquot compare`, `models` and `cluster`: answers in one table, and as one JSON object."""

import json
import re

import pytest
from command_line import TINY, refused, run
from msgspec.structs import replace
from sample_plans import PREDICTION, sample_plan

import aliquot as aq
from aliquot.report import Candidate, Comparison
from aliquot.zoo import MODELS, build

STEP = """
import jax, jax.numpy as jnp
def factory():
    def train_step(state, x):
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p[0]) @ p[1]))(state)
        return [p - g for p, g in zip(state, grads)], {}
    w = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    return train_step, [w, w], w
"""
# Where pipelines are none of the question, one layer is planned in less time than two.
ONE_LAYER = ["num_layers=1" if part == "num_layers=2" else part for part in TINY]


def test_methods_are_compared_fastest_first_with_what_they_lose():
    found = run("compare", *ONE_LAYER, "--methods", "fsdp,ddp,zero2", "--json")
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    # The devices divide the batch, and everybody knows these names.
    assert answer["notes"] == []
    rows = answer["candidates"]
    assert {row["method"] for row in rows} == {"fsdp", "ddp", "zero2"}
    assert [row["step_time_s"] for row in rows] == sorted(row["step_time_s"] for row in rows)
    assert rows[0]["loses"] == ""
    assert all(row["loses"] for row in rows[1:])
    fsdp = next(row for row in rows if row["method"] == "fsdp")
    assert 0 < fsdp["mfu"] < 1 and fsdp["tokens_per_s"] == pytest.approx(
        8 * 1024 / fsdp["step_time_s"]
    )


def test_what_a_plan_loses_in_communication_names_its_dearest_collective():
    slower = replace(PREDICTION, step_time_s=0.014, communication_s=0.006, hidden_s=0.003)
    candidates = [
        Candidate(method=name, cluster="8xH100", plan=sample_plan(prediction=prediction))
        for name, prediction in (("ilp", PREDICTION), ("fsdp", slower))
    ]
    comparison = Comparison(model="step", candidates=tuple(candidates))
    said = comparison.why_not(candidates[1])
    assert said.startswith(
        "step 1.27x as long: +3.0 ms exposed communication (largest collective: all-reduce over x, "
    )


@pytest.mark.slow
def test_layouts_are_compared_by_name():
    found = run(
        "compare",
        *TINY,
        "--methods",
        "auto,tp:2,megatron:dp4,tp2,zero1,megatron:dp2-tp2-pp2",
        "--json",
    )
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)["candidates"]
    assert {row["method"] for row in rows} == {
        "auto",
        "tp:2",
        "megatron:dp4,tp2,zero1",
        "megatron:dp2-tp2-pp2",
    }
    assert all(row["step_time_s"] for row in rows), rows


def test_methods_that_do_not_fit_are_listed_with_the_memory_they_need():
    tight = ("compare", *ONE_LAYER, "--methods", "ddp,tp:2", "--memory-limit", "10MiB")
    found = run(*tight)
    assert found.exit_code == 1
    assert (
        "ddp: does not fit: needs" in found.stdout
        and "on each device" in found.stdout
        and "; 10.0 MiB is usable" in found.stdout
    )


def test_clusters_are_compared():
    options = [part for part in ONE_LAYER if part not in ("--cluster", "8xH100")]
    found = run(
        "compare",
        *options,
        "--clusters",
        "4xV100-32GB,4xH100",
        "--methods",
        "fsdp",
        "--dtype",
        "float16",
        "--json",
    )
    rows = json.loads(found.stdout)["candidates"]
    assert [row["cluster"] for row in rows] == ["4xH100", "4xV100-32GB"]


def test_table_fits_eighty_columns_and_names_equal_plans():
    text = run("compare", *ONE_LAYER, "--methods", "zero3,fsdp,ddp").stdout
    advice, table = text.split("Why not")[0].split("\n\n", 1)
    assert (
        advice.startswith("Take zero3: ")
        and "\nIts parallelism: x (8): data parallel, FSDP" in advice
    )
    assert max(map(len, table.splitlines())) <= 80
    assert "MFU" in table and "tokens/s" in table
    assert "The same plan is found by fsdp." in text
    assert "fsdp: same plan as zero3" in text
    assert "do not divide" not in text


def test_odd_questions_are_refused():
    refused(run("compare", "gpt-10m", "--global-batch", "8"), "--cluster C, or --clusters C1,C2")
    both = ("--cluster", "8xcpu,8xH100")
    refused(run("compare", "gpt-10m", "--global-batch", "8", *both), "or --clusters C1,C2")
    refused(run("compare", *TINY, "--methods", "best"), "Unknown method 'best'")
    refused(run("plan", *TINY, "--memory-limit", "much"), "--memory-limit")
    refused(run("plan", *TINY, "--seq-len", "64", "--set", "seq_len=32"), "leave one out")


@pytest.mark.slow
def test_memory_limit_and_sequence_length_are_plain_options():
    found = json.loads(
        run("plan", *ONE_LAYER, "--seq-len", "64", "--memory-limit", "1GiB", "--json").stdout
    )
    assert found["memory_limit_bytes"] == 2**30
    assert found["tokens_per_s"] == pytest.approx(8 * 64 / found["step_time_s"])


def test_one_call_compares_too():
    work = build("gpt-10m", 8, overrides={"num_layers": 1, "vocab_size": 64, "hidden_size": 64})
    found = aq.compare(
        work.train_step,
        work.state,
        work.batch,
        clusters=aq.Cluster.preset("4xH100"),
        methods={"mine": aq.DataParallel(), "split": aq.Zero3Parallel()},
    )
    assert {c.method for c in found.candidates} == {"mine", "split"}
    assert found.best is found.candidates[0].plan
    assert "fastest first" in str(found)


def test_models_and_clusters_are_listed():
    assert re.search(r"t5-770m +24\+24 +1024 +2048\+512 +30592", run("models").stdout)
    assert [m["name"] for m in json.loads(run("models", "--json").stdout)["models"]] == list(MODELS)
    text = run("models").stdout
    assert max(map(len, text.splitlines())) <= 80 and "llama-70b" in text
    devices = json.loads(run("cluster", "--json").stdout)["devices"]
    assert all(
        aq.Cluster.preset(d["example"]).device.memory_bytes == d["memory_bytes"] for d in devices
    )
    text = run("cluster").stdout
    assert "H100" in text and max(map(len, text.splitlines())) <= 80
    refused(run("cluster", "--network-gbps", "25"), "none is named: type aliquot cluster 8xH100")


def test_a_batch_that_the_devices_do_not_divide_is_said_once():
    args = ["7xH100" if arg == "8xH100" else arg for arg in ONE_LAYER]
    found = run("compare", *args, "--methods", "program,shard")
    assert found.exit_code == 0, found.stderr
    text = " ".join(found.stdout.split())
    assert text.count("7 devices do not divide the batch of 8") == 1
    even = "A size of 7 or 14 would divide evenly over 7 devices; 8 divides evenly over 4."
    assert text.count(even) == 1
    assert "shard: every operator and array split as an integer program finds" in text
    notes = json.loads(run("compare", *args, "--methods", "program,shard", "--json").stdout)[
        "notes"
    ]
    assert sum("do not divide" in note for note in notes) == 1
    # Names that say neither a layout nor stages are explained.
    explained = [note.partition(":")[0] for note in notes if "do not divide" not in note]
    assert sorted(explained) == ["program", "shard"]


def test_the_usual_methods_name_the_layouts_that_were_not_compared(tmp_path, monkeypatch):
    (tmp_path / "two_matrices.py").write_text(STEP)
    monkeypatch.syspath_prepend(tmp_path)
    asked = ("compare", "two_matrices:factory", "--cluster", "2xH100")
    text = " ".join(run(*asked).stdout.split())
    assert "Not compared: Megatron's layouts. --methods auto,grid adds the best" in text
    assert "Not compared" not in run(*asked, "--methods", "auto,grid").stdout


def test_an_objective_is_for_functions_without_gradients():
    words = ("compare", *ONE_LAYER, "--methods", "ddp", "--objective", "throughput")
    refused(run(*words), "takes gradients: a training step", "Leave the objective out")


def test_a_comparison_with_prices_and_a_page(tmp_path):
    prices, html = tmp_path / "prices.csv", tmp_path / "page.html"
    prices.write_text("device, devices per host, price per hour (EUR)\nH100, 8, 40\n")
    args = ("compare", *ONE_LAYER, "--methods", "ddp,zero2", "--prices", prices)
    found = run(*args, "--html", html, "--json")
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    assert answer["html_file"] == str(html) and html.read_text().startswith("<!doctype html>")
    row = answer["candidates"][0]
    assert row["cost_unit"] == "EUR/1B tokens"
    assert row["cost"] == pytest.approx(40 / 3600 / (row["tokens_per_s"] / 1e9))
    a100 = [part.replace("8xH100", "8xA100-40GB") for part in map(str, args)]
    refused(run(*a100), "has no price for hosts of this comparison: add the line A100-40GB, 8, P")
    refused(run(*args, "--html", tmp_path / "no" / "page.html"), "--html", "there is no folder")
    refused(run(*args, "--html", tmp_path), "is a folder")
