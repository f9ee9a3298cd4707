"""Figures of Aceso's paper from a toy database."""

from __future__ import annotations

import csv
import json

import pytest
from command_line import refused, run
from interop.aceso_files import ROWS, write_database

from aliquot.interop.aceso import built_in_chains, make_chain
from aliquot.suites import aceso_cases


@pytest.fixture
def measured(tmp_path):
    """A database of GPT 1.3B and of the deep model, every operator like the toy's, and what was
    published of them.
    """
    folder = write_database(tmp_path / "measured")
    names = dict.fromkeys(
        o.name for o in make_chain(built_in_chains()["gpt"], {"num_layers": 1}).operators
    )
    rows = list(ROWS)
    for path in list(folder.glob("toy_1B_*.csv")):
        lines = path.read_text().splitlines()
        by_name = {line.split(",")[0]: line.split(",", 1)[1] for line in lines[1:]}
        text = "\n".join(
            [lines[0], *(f"{name},{by_name[rows[k % len(rows)]]}" for k, name in enumerate(names))]
        )
        for model in ("gpt_1_3B", "gpt_scale-layer"):
            (folder / path.name.replace("toy_1B", model)).write_text(text + "\n")
    published = tmp_path / "published"
    published.mkdir()
    tables = {
        "e2e_norm_thpt_large_gpt": ",1_3B,2_6B\nmegatron,1,1\nalpa,0.9,1\naceso,1.2,1.3\n",
        "perf_model_time_large_gpt": "size,1_3B\nactual,100\npredict,101\n",
        "perf_model_mem_large_gpt": (
            "size,1_3B\nactual,20000\npredict (norm),21000\npredict (extra),1000\n"
        ),
        "search_cost_large_gpt": "size,1_3B\nalpa,4000\naceso,200\n",
        "e2e_thpt_scale_scale-layer": (
            "size,2layers,4layers\nmegatron,200,100\nalpa,210,0\naceso,220,120\n"
        ),
        "search_cost_scale_scale-layer": "size,2layers,4layers\nalpa,1200,0\naceso,20,30\n",
    }
    for name, text in tables.items():
        (published / f"{name}.csv").write_text(text)
    return folder, published


def test_figures_are_drawn_with_their_numbers_and_a_page(measured, tmp_path):
    database, published = measured
    out = tmp_path / "figures"
    options = ("--database", database, "--published", published, "--out", out)
    answer = json.loads(run("bench", "aceso", *options, "--json").stdout)
    names = ["figure7_gpt", "figure8_gpt", "figure9_throughput", "figure9_search"]
    for name in names:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "index.html").read_text()
    assert all(f"{name}.png" in page for name in names) and "accuracy.csv" in page
    row = next(csv.DictReader((out / "figure7_gpt.csv").read_text().splitlines()))
    case = answer["cases"]["gpt 1_3B"]
    expected = case["megatron_ms"] / case["iteration_time_ms"]
    assert expected >= 1 and float(row["aliquot (predicted)"]) == pytest.approx(expected)
    assert answer["layers"]["4layers"]["samples_per_s"] > 0
    assert answer["accuracy"][0]["time off by"] == "+1.0%"
    assert "gpt 2_6B" in answer["missing"]
    again = run("bench", "aceso", *options, "--json")
    assert json.loads(again.stdout) == answer and "searching" not in again.stderr
    # Another database is another answer.
    path = database / "p2p_intra_node.csv"
    path.write_text(path.read_text() + "\n")
    assert "searching: gpt 1_3B on 4 GPUs" in run("bench", "aceso", *options).stderr


def test_the_small_tables_need_nothing_published(measured, tmp_path):
    database, published = measured
    refused(run("bench", "aceso", "--database", database, "--out", tmp_path), "--published DIR")
    options = ("--small", "--database", database, "--out", tmp_path / "small")
    found = run("bench", "aceso", *options)
    assert found.exit_code == 0, found.stderr
    assert "Throughput of the small setting" in found.stdout
    assert "not measured: t5 770M" in found.stderr
    for name, text in {
        "search_cost_small_gpt": "size,1_3B\naceso,69\n",
        "perf_model_time_small_gpt": "size,1_3B\nactual,60\npredict,57\n",
    }.items():
        (published / f"{name}.csv").write_text(text)
    answer = json.loads(run("bench", "aceso", *options, "--published", published, "--json").stdout)
    assert answer["accuracy"][0]["time off by"] == "-5.0%"
    row = next(csv.DictReader((tmp_path / "small/search_cost_small.csv").read_text().splitlines()))
    assert float(row["aceso"]) == 69 and float(row["aliquot"]) > 0
    # Of each fault: what it costs, which is nothing where the same configuration wins without it.
    (faults,) = answer["faults"].values()
    assert len(faults) == 6 == len((tmp_path / "small/faults.csv").read_text().splitlines()) - 1
    assert all(each["cost"] >= -1e-9 for each in faults)
    assert "searching" not in run("bench", "aceso", *options).stderr


def test_a_database_without_the_papers_models_is_refused(measured, tmp_path):
    database = write_database(tmp_path / "other")
    options = ("--database", database, "--published", measured[1], "--out", tmp_path / "figures")
    refused(run("bench", "aceso", *options), "none of the models", "toy_1B")


def test_a_corrupt_table_is_refused(measured, tmp_path):
    database, published = measured
    (published / "search_cost_large_gpt.csv").write_text("size,1_3B\nalpa,many\n")
    options = ("--database", database, "--published", published, "--out", tmp_path / "figures")
    refused(run("bench", "aceso", *options), "search_cost_large_gpt.csv")


def test_every_case_of_the_paper_has_a_size():
    chains = built_in_chains()
    assert all(case.size in chains[case.family]["sizes"] for case in aceso_cases())
