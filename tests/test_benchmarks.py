"""What benchmarks count by formula, and what they compile only once."""

import importlib
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
HLO = runpy.run_path(str(FOLDER / "_hlo.py"))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_an_all_reduce_sends_what_its_halves_send(n):
    """Of 64 bytes the first half leaves 64/n on each device; in a ring of n each passes on all but
    one part, twice.
    """
    sent = HLO["sent_bytes"]
    halves = sent("reduce-scatter", 64 / n, n), sent("all-gather", 64, n)
    assert halves == pytest.approx((64 * (n - 1) / n,) * 2)
    assert sent("all-reduce", 64, n) == pytest.approx(sum(halves))
    assert sent("all-to-all", 64, n) == pytest.approx(64 * (n - 1) / n)
    assert sent("collective-permute", 64, n) == 64


def test_a_plan_is_compiled_again_only_if_it_decides_otherwise(monkeypatch, tmp_path):
    """What is predicted is always of today; what was compiled is taken from the journal."""
    monkeypatch.syspath_prepend(str(FOLDER))
    modern, results = map(importlib.import_module, ("_memory_modern", "_results"))
    words = "gpt-10m --cluster 8xH100 --global-batch 32"
    compiled = []

    def compiler(path, dumps):
        compiled.append(path)
        return {"bytes": 2**30, "stages": [{"bytes": 2**30, "parts": {}}], "seconds": 1.0}

    def row(asked, *, known=False):
        journal = results.Journal(tmp_path / "journal")
        return modern.modern_row("small", "seen", asked, journal, dumps="", known=known)

    monkeypatch.setattr(modern, "_compiled", compiler)
    first = row(f"{words} --method dp")
    assert first["error"] == pytest.approx(first["predicted GiB"] - 1)
    assert first["stages"][0]["predicted GiB"] == first["predicted GiB"] > 0
    assert row(f"{words} --method dp --memory-limit 60GiB", known=True) == first | {
        "command": f"aliquot plan {words} --method dp --memory-limit 60GiB"
    }
    assert "error" not in row(f"{words} --method zero3", known=True)
    assert len(compiled) == 1
    row(f"{words} --method zero3")
    assert len(compiled) == 2


def test_half_of_drawn_plans_are_pipelines_and_every_way_to_recompute_is_drawn(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    modern = importlib.import_module("_memory_modern")
    plans = modern.drawn_plans(30)
    words = [each.split() for _, each in plans.values()]
    assert len({*map(tuple, words)}) == len(plans) == 30
    assert all(",pp" in " ".join(each) for each in words[:15])
    ways = {each[each.index("--recompute") + 1] for each in words[15:]}
    assert ways == set(modern.RECOMPUTE)
    assert modern.drawn_plans(30) == plans


def test_alpas_suite_is_put_together_from_the_rows_of_the_command(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    suite, results = map(importlib.import_module, ("pipeline_suite", "_results"))
    (tmp_path / "gpt").mkdir()
    journal = results.Journal(tmp_path / "gpt" / "rows.jsonl")
    known = {"case": "gpt.perf_test_auto 2", "parallel": "dp2", "num_micro_batches": 8}
    for plan_of, seconds in (("given", 2.0), ("ours", 1.5)):
        row = {**known, "plan_of": plan_of, "outcome": "predicted", "predicted_s": seconds}
        journal.row(plan_of, lambda row=row: row)
    (found,), missing = suite._plans(tmp_path)
    assert (found["case"], found["ours / Alpa's"]) == ("gpt-760m on 2", 0.75)
    assert "gpt.perf_test_auto 2" not in missing and len(missing) == 20
    wrongly = [
        {"GPUs": 8, "plan": name, "published TFLOP/s": published, "predicted TFLOP/s": predicted}
        for name, published, predicted in (("a", 50, 60.0), ("b", 60, 55.0), ("c", 61, 54.0))
    ]
    assert suite._ranked_wrongly(wrongly) == (2, ["8: b above a", "8: c above a"])
