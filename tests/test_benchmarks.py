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
        monkeypatch.setitem(modern.PLANS, "small", ("seen", asked))
        journal = results.Journal(tmp_path / "journal")
        return modern.modern_row("small", journal, dumps="", known=known)

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
