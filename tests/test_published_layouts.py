"""Published layouts beside reports and defaults: `published_layouts.py` of `benchmarks`."""

import importlib
from pathlib import Path

import pytest
import test_public_steps

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("published_layouts")


@pytest.fixture
def case(benchmark):
    return importlib.import_module("public_steps").express(test_public_steps.row())


def test_a_layout_stands_beside_what_was_reported_and_the_default(benchmark, case):
    parts = {"compute": 1e-3, "collectives": 6e-4, "hidden": 4e-4, "bubble": 0.0}
    row = benchmark.Row(
        case=case,
        step_s=1.2e-3,
        reason="",
        needed_bytes=2.0**30,
        fits=True,
        parts=parts,
        cpu_s=0.0,
    )
    # The default hides nothing, and all else is equal.
    default = {"method": "zero3", "step_s": 1.6e-3, "parts": {**parts, "hidden": 0.0}}
    told = benchmark.shown(row, default)
    assert (told["error"], told["recompute"], told["GiB"]) == ("+20.0%", "none", 1.0)
    assert told["layout / default"] == pytest.approx(0.75)
    assert told["most of it"] == "collectives -0.0004 s"
    alone = benchmark.shown(row, None)
    assert alone["layout / default"] is None and alone["default"] == alone["most of it"] == ""
    refused = benchmark.shown(row, {"method": "No plan fits", "step_s": None})
    assert (refused["default"], refused["layout / default"]) == ("No plan fits", None)


def test_the_default_is_planned_once(benchmark, case, monkeypatch):
    planned = []
    monkeypatch.setattr(benchmark, "_planned", lambda case: planned.append(case) or {"step_s": 1.0})
    journal = benchmark.Journal(None)
    assert benchmark.default_of(case, journal) == benchmark.default_of(case, journal)
    assert planned == [case]
